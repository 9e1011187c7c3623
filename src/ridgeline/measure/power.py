"""Power and energy where the machine reports them.

    power_reading() ──NVML──> [GpuReading(power_w, energy_j, temperature_c, clocks, memory)]     or Unavailable(why)
    with EnergyMeter("cuda") as meter: …   ──> meter.energy_j [J], or None and meter.why

GPU: NVML, the library that comes with NVIDIA's driver, called directly; its energy counter (Volta and later) counts
millijoules and is refreshed every 20 to 100 ms, so shorter regions read 0 or too much. CPU: RAPL under /sys/class/powercap,
package and DRAM domains added; most systems let only root read it. Both count the whole chip, whoever uses it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

POWERCAP = Path("/sys/class/powercap")
REFRESH_S = 0.1


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why a reading cannot be had."""

    why: str

    def __str__(self) -> str:
        return f"unavailable: {self.why}"


@dataclass(frozen=True, slots=True)
class GpuReading:
    """What NVML says of one GPU now; a value it does not give is None."""

    index: int
    name: str
    power_w: float | None
    energy_j: float | None  # since the driver was loaded
    temperature_c: int | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Nvml:
    """An open NVML session; construction raises OSError with the reason when there is none."""

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        except OSError as error:
            raise OSError("no NVIDIA driver: libnvidia-ml.so.1 cannot be loaded") from error
        if code := self.library.nvmlInit_v2():
            raise OSError(f"nvmlInit: {self._word(code)}")

    def __enter__(self) -> _Nvml:
        return self

    def __exit__(self, *error: object) -> None:
        self.library.nvmlShutdown()

    def _word(self, code: int) -> str:
        self.library.nvmlErrorString.restype = ctypes.c_char_p
        return str(self.library.nvmlErrorString(code).decode(errors="replace"))

    def count(self) -> int:
        number = ctypes.c_uint()
        if code := self.library.nvmlDeviceGetCount_v2(ctypes.byref(number)):
            raise OSError(f"nvmlDeviceGetCount: {self._word(code)}")
        return number.value

    def handle(self, index: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        if code := self.library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)):
            raise OSError(f"GPU {index}: {self._word(code)}")
        return handle

    def handle_of(self, uuid: str) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        if code := self.library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
            raise OSError(f"GPU {uuid}: {self._word(code)}")
        return handle

    def number(self, function: str, handle: ctypes.c_void_p, *before: Any, kind: Any = ctypes.c_uint) -> int | None:
        """One number NVML writes through its last argument; None where it is not supported."""
        value = kind()
        code = getattr(self.library, function)(handle, *before, ctypes.byref(value))
        return None if code else int(value.value)

    def energy_mj(self, handle: ctypes.c_void_p) -> int | None:
        return self.number("nvmlDeviceGetTotalEnergyConsumption", handle, kind=ctypes.c_ulonglong)

    def read(self, index: int) -> GpuReading:
        handle, name, memory = self.handle(index), ctypes.create_string_buffer(96), _Memory()
        named = self.library.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name))) == 0
        sized = self.library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
        power_mw, energy_mj = self.number("nvmlDeviceGetPowerUsage", handle), self.energy_mj(handle)
        return GpuReading(
            index=index,
            name=name.value.decode(errors="replace") if named else f"GPU {index}",
            power_w=None if power_mw is None else power_mw / 1e3,
            energy_j=None if energy_mj is None else energy_mj / 1e3,
            temperature_c=self.number("nvmlDeviceGetTemperature", handle, ctypes.c_uint(0)),
            sm_clock_mhz=self.number("nvmlDeviceGetClockInfo", handle, ctypes.c_uint(1)),
            memory_clock_mhz=self.number("nvmlDeviceGetClockInfo", handle, ctypes.c_uint(2)),
            memory_used_bytes=memory.used if sized else None,
            memory_total_bytes=memory.total if sized else None,
        )


def power_reading() -> list[GpuReading] | Unavailable:
    """A reading of every GPU, or why there is none."""
    try:
        with _Nvml() as nvml:
            return [nvml.read(index) for index in range(nvml.count())] or Unavailable("the driver lists no GPU")
    except (OSError, AttributeError) as error:  # AttributeError: a driver too old for one of the functions
        return Unavailable(str(error))


@dataclass(frozen=True, slots=True)
class RaplZone:
    """An energy counter of the CPU [µJ], which starts again at 0 after `range_uj`."""

    name: str
    path: Path
    range_uj: int

    def read_uj(self) -> int:
        return int((self.path / "energy_uj").read_text(encoding="ascii"))


def rapl_zones(root: Path = POWERCAP) -> list[RaplZone] | Unavailable:
    """The package and DRAM counters that can be read, or why none can."""
    if not root.is_dir():
        return Unavailable(f"{root} does not exist: the kernel or virtual machine offers no RAPL counters")
    zones, refused = [], ""
    for path in sorted(root.glob("intel-rapl:*")):
        try:
            name = (path / "name").read_text(encoding="ascii").strip()
            if not name.startswith(("package", "dram")):
                continue  # core and uncore are inside package; psys holds it
            zone = RaplZone(name, path, int((path / "max_energy_range_uj").read_text(encoding="ascii")))
            zone.read_uj()
            zones.append(zone)
        except (OSError, ValueError) as error:
            refused = refused or str(error)
    return zones or Unavailable(refused or f"{root} lists no package counter")


class EnergyMeter:
    """Energy of what runs inside `with`: `energy_j`, or None and `why`."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.energy_j: float | None = None
        self.why: str | None = None
        self.source: str | None = None
        self.duration_s = 0.0
        self._read: Callable[[], float] | None = None

    def __enter__(self) -> EnergyMeter:
        opened = _gpu_meter(self.device) if self.device.startswith("cuda") else _cpu_meter()
        if isinstance(opened, Unavailable):
            self.why = opened.why
        else:
            self.source, self._read = opened
        self._start = perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.duration_s = perf_counter() - self._start
        if self._read is None:
            return
        try:
            self.energy_j = self._read()
        except (OSError, ValueError) as failure:
            self.why = str(failure)
        if self.energy_j is not None and self.duration_s < REFRESH_S:
            self.why = f"the region took {self.duration_s * 1e3:.0f} ms; the counter is refreshed every 20 to 100 ms, so repeat it"


def _gpu_meter(device: str) -> tuple[str, Callable[[], float]] | Unavailable:
    """(source, joules since now) of one CUDA device; the device is idle at both readings."""
    import torch

    if not torch.cuda.is_available():
        return Unavailable("torch finds no CUDA device")
    place = torch.device(device)
    uuid = f"GPU-{torch.cuda.get_device_properties(place).uuid}"

    def read_mj() -> int:
        torch.cuda.synchronize(place)
        with _Nvml() as nvml:
            value = nvml.energy_mj(nvml.handle_of(uuid))
        if value is None:
            raise OSError("this GPU has no energy counter")
        return value

    try:
        before = read_mj()
    except (OSError, AttributeError) as error:
        return Unavailable(str(error))
    return "NVML", lambda: (read_mj() - before) / 1e3


def _cpu_meter() -> tuple[str, Callable[[], float]] | Unavailable:
    zones = rapl_zones()
    if isinstance(zones, Unavailable):
        return zones
    before = [zone.read_uj() for zone in zones]

    def spent_j() -> float:
        return sum((zone.read_uj() - start) % (zone.range_uj + 1) for zone, start in zip(zones, before, strict=True)) / 1e6

    return f"RAPL ({', '.join(zone.name for zone in zones)})", spent_j
