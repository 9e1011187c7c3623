"""Hardware counters of the CPU, where the kernel and the machine give them.

    function ──count_events──> CounterReading(instructions, cycles, cache_misses, branch_misses,    or   Unavailable(why)
                                              page_faults, cpu_ns)
    machine_counters() ──> what this machine gives: {"perf": …, "nvml": …, "rapl": …}, "available" or "unavailable: why"

perf_event_open (Linux) opens one counter an event and thread: those of every thread this process has now (torch's pool is
among them) are added up, threads started meanwhile are inherited. User space only, so that perf_event_paranoid = 2 is
enough. Page faults and CPU time are counted by the kernel and also exist where a virtual machine hides the processor's
counters: those are None then, and `lacking` says why. When the processor has fewer counters than there are events, the
kernel takes turns and counts are scaled by the time each one really counted: `coverage` below 1 says so.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .power import Unavailable, power_reading, rapl_zones

SYSCALL = {"x86_64": 298, "aarch64": 241, "riscv64": 241, "ppc64le": 319, "s390x": 331}
HARDWARE, SOFTWARE = 0, 1  # PERF_TYPE_*
EVENTS = {
    "instructions": (HARDWARE, 1),
    "cycles": (HARDWARE, 0),
    "cache_misses": (HARDWARE, 3),
    "branch_misses": (HARDWARE, 5),
    "page_faults": (SOFTWARE, 2),
    "cpu_ns": (SOFTWARE, 1),  # PERF_COUNT_SW_TASK_CLOCK
}
ENABLE, DISABLE = 0x2400, 0x2401  # PERF_EVENT_IOC_*
TIMES = 0b11  # read_format: time enabled, time running
# disabled, inherit, exclude_kernel, exclude_hv: bits 0, 1, 5 and 6 of the flag word
FLAGS = 1 << 0 | 1 << 1 | 1 << 5 | 1 << 6
ATTRIBUTE_BYTES = 128


@dataclass(frozen=True, slots=True)
class CounterReading:
    """Counts over one call of a function, all threads together; an event this machine lacks is None."""

    instructions: int | None
    cycles: int | None
    cache_misses: int | None
    branch_misses: int | None
    page_faults: int | None
    cpu_ns: int | None
    threads: int
    coverage: float  # least fraction of the time an event was really counted
    lacking: str = ""  # why some are None

    @property
    def instructions_per_cycle(self) -> float | None:
        return self.instructions / self.cycles if self.instructions and self.cycles else None


class _PerfError(Exception):
    """perf_event_open said no."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code, self.why = code, why


def count_events(function: Callable[[], object]) -> CounterReading | Unavailable:
    """Run `function` once and count; Unavailable, with the reason and without running it, where nothing can be counted."""
    try:
        opened, lacking = _open_all()
    except _PerfError as error:
        return Unavailable(error.why)
    try:
        for files in opened.values():
            _control(files, ENABLE)
        try:
            function()
        finally:
            for files in opened.values():
                _control(files, DISABLE)
        readings = {event: _total(files) for event, files in opened.items()}
    finally:
        for files in opened.values():
            for file in files:
                os.close(file)
    counts = {event: readings[event][0] if event in readings else None for event in EVENTS}
    coverage = min(reading[1] for reading in readings.values())
    return CounterReading(**counts, threads=max(map(len, opened.values())), coverage=coverage, lacking=lacking)


def _open_all() -> tuple[dict[str, list[int]], str]:
    """(event → one file a thread, why others are left out); no event at all is an error."""
    opened: dict[str, list[int]] = {}
    refused: _PerfError | None = None
    for event, (kind, config) in EVENTS.items():
        try:
            opened[event] = _open_threads(kind, config)
        except _PerfError as error:
            refused = refused or error
    if not opened:
        raise refused or _PerfError(errno.ENOENT, "no events")
    return opened, refused.why if refused else ""


def _open_threads(kind: int, config: int) -> list[int]:
    files: list[int] = []
    for thread in _threads():
        try:
            files.append(_open(kind, config, thread))
        except _PerfError as error:
            if error.code == errno.ESRCH:  # the thread ended since it was listed
                continue
            for file in files:
                os.close(file)
            raise
    return files


def _threads() -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir("/proc/self/task"))
    except OSError:
        return [0]


def _open(kind: int, config: int, thread: int) -> int:
    number = SYSCALL.get(platform.machine())
    if not sys.platform.startswith("linux") or number is None:
        raise _PerfError(errno.ENOSYS, f"perf_event_open is not known for {sys.platform} on {platform.machine()}")
    attribute = struct.pack("=IIQQQQQ", kind, ATTRIBUTE_BYTES, config, 0, 0, TIMES, FLAGS).ljust(ATTRIBUTE_BYTES, b"\0")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    group, flags = ctypes.c_int(-1), ctypes.c_ulong(8)  # PERF_FLAG_FD_CLOEXEC
    file = libc.syscall(ctypes.c_long(number), attribute, ctypes.c_int(thread), ctypes.c_int(-1), group, flags)
    if file < 0:
        code = ctypes.get_errno()
        raise _PerfError(code, explain(code))
    return int(file)


def explain(code: int) -> str:
    """Why perf_event_open refuses, in words a user can act on."""
    if code in (errno.EACCES, errno.EPERM):
        level = paranoid_level()
        shown = "unknown" if level is None else level
        allowed = level is not None and level <= 2
        reason = "the container or sandbox forbids the call" if allowed else "2 or less is needed: sysctl kernel.perf_event_paranoid=2"
        return f"perf_event_open: {os.strerror(code)}; perf_event_paranoid is {shown}, {reason}"
    if code in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP):
        return f"perf_event_open: {os.strerror(code)}; the processor's counters are not visible, as in most virtual machines"
    if code == errno.ENOSYS:
        return "perf_event_open: not offered by this kernel, or blocked by a sandbox"
    return f"perf_event_open: {os.strerror(code)}"


def paranoid_level() -> int | None:
    """/proc/sys/kernel/perf_event_paranoid, where there is one."""
    try:
        return int(Path("/proc/sys/kernel/perf_event_paranoid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _control(files: list[int], request: int) -> None:
    import fcntl

    for file in files:
        fcntl.ioctl(file, request, 0)


def _total(files: list[int]) -> tuple[int, float]:
    """(count scaled to the whole time, least fraction of it that was counted)."""
    count, coverage = 0.0, 1.0
    for file in files:
        value, enabled_ns, running_ns = struct.unpack("=QQQ", os.read(file, 24))
        if running_ns:
            count += value * enabled_ns / running_ns
            coverage = min(coverage, running_ns / enabled_ns)
        elif enabled_ns and value == 0:
            coverage = 0.0
    return round(count), coverage


def machine_counters() -> dict[str, str]:
    """What can be read here, by source: `available …` or `unavailable: why`."""
    probe = count_events(lambda: None)
    perf = str(probe) if isinstance(probe, Unavailable) else _describe(probe)
    gpus, zones = power_reading(), rapl_zones()
    return {
        "perf": perf,
        "nvml": str(gpus) if isinstance(gpus, Unavailable) else f"available: {', '.join(gpu.name for gpu in gpus)}",
        "rapl": str(zones) if isinstance(zones, Unavailable) else f"available: {', '.join(zone.name for zone in zones)}",
    }


def _describe(probe: CounterReading) -> str:
    has = [event for event in EVENTS if getattr(probe, event) is not None]
    lacks = [event for event in EVENTS if event not in has]
    return f"available: {', '.join(has)}" + (f"; without {', '.join(lacks)}: {probe.lacking}" if lacks else "")
