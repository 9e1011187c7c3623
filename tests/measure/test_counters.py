"""What the machine gives is read; what it does not give is said with the reason."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from ridgeline.measure import counters, power
from ridgeline.measure.counters import EVENTS, CounterReading, count_events, explain, machine_counters
from ridgeline.measure.power import EnergyMeter, Unavailable, power_reading, rapl_zones


def test_counting_works_or_says_why_not() -> None:
    ran: list[int] = []
    reading = count_events(lambda: ran.append(sum(i * i for i in range(200_000))))
    if isinstance(reading, Unavailable):
        assert reading.why.startswith("perf_event_open") and ran == []
    else:
        assert len(ran) == 1 and reading.threads >= 1
        assert reading.instructions is None or reading.instructions > 200_000
        assert (reading.lacking != "") == (None in [getattr(reading, event) for event in EVENTS])


def test_touching_memory_counts_page_faults_and_time() -> None:
    quiet, touching = count_events(lambda: None), count_events(lambda: bytearray(b"x" * (64 << 20)))
    if isinstance(quiet, Unavailable) or isinstance(touching, Unavailable) or touching.page_faults is None or touching.cpu_ns is None:
        pytest.skip("perf_event_open is not allowed here")
    assert quiet.page_faults is not None and quiet.cpu_ns is not None
    assert touching.page_faults > quiet.page_faults + 20  # as few as 32 where pages are 2 MiB
    assert touching.cpu_ns > quiet.cpu_ns


def test_threads_that_already_run_are_counted() -> None:
    start, stop = threading.Event(), threading.Event()

    def spin() -> None:
        start.wait(10)
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        stop.set()

    thread = threading.Thread(target=spin)
    thread.start()
    reading = count_events(lambda: (start.set(), stop.wait(10)))
    start.set()
    thread.join()
    if isinstance(reading, Unavailable) or reading.cpu_ns is None:
        pytest.skip("perf_event_open is not allowed here")
    assert reading.cpu_ns > 15e6


def test_more_work_counts_more_instructions() -> None:
    few, many = (count_events(lambda n=n: sum(range(n))) for n in (10_000, 1_000_000))
    if not isinstance(few, CounterReading) or not isinstance(many, CounterReading) or not few.instructions or not many.instructions:
        pytest.skip("no instruction counter on this machine")
    assert many.instructions > 10 * few.instructions


def refuse(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def always(kind: int, config: int, thread: int) -> int:
        raise counters._PerfError(code, explain(code))

    monkeypatch.setattr(counters, "_open", always)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (errno.EACCES, "perf_event_paranoid"),
        (errno.EPERM, "perf_event_paranoid"),
        (errno.ENOENT, "virtual machine"),
        (errno.ENOSYS, "kernel"),
    ],
)
def test_a_refusal_is_explained_and_the_function_not_run(monkeypatch: pytest.MonkeyPatch, code: int, says: str) -> None:
    refuse(monkeypatch, code)
    ran: list[int] = []
    reading = count_events(lambda: ran.append(1))
    assert isinstance(reading, Unavailable) and says in reading.why and ran == []
    assert says in machine_counters()["perf"]


def test_files_are_closed_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    def one_then_none(kind: int, config: int, thread: int) -> int:
        if opened:
            raise counters._PerfError(errno.ENOENT, explain(errno.ENOENT))
        opened.append(os.open(os.devnull, os.O_RDONLY))
        return opened[0]

    monkeypatch.setattr(counters, "_open", one_then_none)
    monkeypatch.setattr(counters, "_threads", lambda: [1, 2])
    assert isinstance(count_events(lambda: None), Unavailable)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_a_lacking_event_is_none_and_scaled_counts_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    def some(kind: int, config: int) -> list[int]:
        if (kind, config) == EVENTS["branch_misses"]:
            raise counters._PerfError(errno.ENOENT, "no such event")
        return [os.open(os.devnull, os.O_RDONLY)]

    monkeypatch.setattr(counters, "_open_threads", some)
    monkeypatch.setattr(counters, "_control", lambda files, request: None)
    monkeypatch.setattr(
        os, "read", lambda file, size: (100).to_bytes(8, "little") + (40).to_bytes(8, "little") + (20).to_bytes(8, "little")
    )
    reading = count_events(lambda: None)
    assert isinstance(reading, CounterReading)
    assert (reading.instructions, reading.branch_misses, reading.coverage, reading.lacking) == (200, None, 0.5, "no such event")


def test_every_source_says_what_it_is() -> None:
    said = machine_counters()
    assert said.keys() == {"perf", "nvml", "rapl"}
    assert all(text.startswith(("available", "unavailable: ")) and len(text) > 8 for text in said.values())


def test_no_driver_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str | None) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(power.ctypes, "CDLL", missing)
    assert "no NVIDIA driver" in str(power_reading())


def zone(root: Path, folder: str, name: str, energy_uj: int, range_uj: int = 1000) -> Path:
    path = root / folder
    path.mkdir(parents=True)
    for file, value in (("name", name), ("energy_uj", energy_uj), ("max_energy_range_uj", range_uj)):
        (path / file).write_text(f"{value}\n", encoding="ascii")
    return path


def test_rapl_adds_package_and_memory_over_a_wrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 900)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 10)
    core = zone(tmp_path, "intel-rapl:0:0", "core", 5)
    monkeypatch.setattr(power, "rapl_zones", lambda: rapl_zones(tmp_path))
    with EnergyMeter("cpu") as meter:
        (package / "energy_uj").write_text("99\n", encoding="ascii")  # past 1000 and on
        (memory / "energy_uj").write_text("60\n", encoding="ascii")
        (core / "energy_uj").write_text("900\n", encoding="ascii")
    assert meter.energy_j == pytest.approx((200 + 50) / 1e6)
    assert meter.source == "RAPL (package-0, dram)" and meter.why is not None and "refreshed" in meter.why


def test_rapl_that_is_not_there_is_said(tmp_path: Path) -> None:
    assert "does not exist" in str(rapl_zones(tmp_path / "none"))
    assert "lists no package" in str(rapl_zones(tmp_path))


def test_a_meter_without_a_counter_reads_none_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(power, "rapl_zones", lambda: rapl_zones(tmp_path))
    with EnergyMeter() as meter:
        pass
    assert meter.energy_j is None and meter.why and meter.duration_s >= 0
