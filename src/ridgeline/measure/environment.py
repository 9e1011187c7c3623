"""What this machine is and has: the answer to `ridgeline env`, and the machine a measurement belongs to.

    environment() ──> {"python": …, "torch": …, "cpu": {…}, "gpus": […], "packages": {…}, "counters": {…}, …}   JSON-ready

Read from the system, never guessed: what cannot be read is None. torch is imported only when asked for something of it.
"""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__
from ..core.files import cache_dir
from .counters import machine_counters
from .power import Unavailable, power_reading

OPTIONAL = (
    "onnx", "onnxruntime", "transformers", "tokenizers", "triton", "torchao", "torch-pruning", "optuna", "scikit-learn",
    "fastapi", "uvicorn", "httpx",
)  # fmt: skip
REQUIRED = ("torch", "numpy", "pydantic", "typer", "rich", "safetensors", "jinja2")


def environment() -> dict[str, Any]:
    """Everything a measurement may depend on."""
    import torch

    from ..target.machine import cache_sizes, cpu_name

    return {
        "ridgeline": __version__,
        "python": platform.python_version(),
        "os": os_name(),
        "machine": machine_name("cpu"),
        "cpu": {
            "model": cpu_name(),
            "cores": physical_cores(),
            "threads": os.cpu_count(),
            "usable_threads": usable_threads(),
            "caches_bytes": cache_sizes(),
            "memory_bytes": memory_bytes(),
            "isa": torch.backends.cpu.get_cpu_capability(),
        },
        "torch": {
            "version": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "interop_threads": torch.get_num_interop_threads(),
            "cuda": torch.version.cuda,
        },
        "gpus": gpus(),
        "packages": {name: package_version(name) for name in (*REQUIRED, *OPTIONAL)},
        "counters": machine_counters(),
        "cache_dir": str(cache_dir()),
        "calibrations": calibration_files(),
    }


def calibration_files() -> list[str]:
    """Stored calibrations of this or other machines, relative to the cache folder."""
    return sorted(str(path.relative_to(cache_dir())) for path in (cache_dir() / "targets").glob("*.toml"))


def machine_name(device: str = "cpu") -> str:
    """The machine a measurement on `device` belongs to: processor and how much of it may be used, or the GPU's name."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(torch.device(device)))
    from ..target.machine import cpu_name

    return f"{cpu_name()}, {usable_threads()} threads"


def package_version(name: str) -> str | None:
    """The installed version, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def os_name() -> str:
    """`Debian GNU/Linux 12 (bookworm), Linux 6.1.0`."""
    try:
        pretty = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        pretty = ""
    return ", ".join(filter(None, [pretty, f"{platform.system()} {platform.release()}"]))


def physical_cores() -> int | None:
    """Cores, not hardware threads."""
    found = {_read(f"{path}/topology/core_cpus_list") for path in _cpu_folders()} - {""}
    return len(found) or None


def usable_threads() -> int:
    """Hardware threads this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Physical memory, or the control group's limit where that is less."""
    kib = re.search(r"^MemTotal:\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    known = [int(kib[1]) * 1024] if kib else []
    return min([*known, int(limit)] if limit.isdigit() else known, default=None)


def gpus() -> list[dict[str, Any]]:
    """The CUDA devices torch sees, with what NVML says of them."""
    import torch

    if not torch.cuda.is_available():
        return []
    driver = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", _read("/proc/driver/nvidia/version"))
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "driver": driver[1] if driver else None,
            }
        )
    reading = power_reading()
    if not isinstance(reading, Unavailable) and len(reading) == len(found):
        for entry, gpu in zip(found, reading, strict=True):
            entry["power_w"], entry["temperature_c"] = gpu.power_w, gpu.temperature_c
    return found


def _cpu_folders() -> list[Path]:
    return [path for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*") if path.is_dir()]


def _read(path: Path | str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
