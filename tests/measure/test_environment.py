"""The environment is read from this machine and is plain JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy
import pytest
import torch

from ridgeline.measure.environment import environment, machine_name, memory_bytes, package_version, usable_threads
from ridgeline.target.machine import cache_sizes


def test_environment_names_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "cpu-0123.toml").write_text("", encoding="utf-8")
    found = json.loads(json.dumps(environment()))
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert (found["torch"]["version"], found["packages"]["numpy"]) == (str(torch.__version__), numpy.__version__)
    assert found["torch"]["threads"] == torch.get_num_threads()
    assert found["cpu"]["threads"] == os.cpu_count() and found["cpu"]["model"] in found["machine"]
    assert found["cpu"]["isa"] == torch.backends.cpu.get_cpu_capability()
    assert bool(found["gpus"]) == torch.cuda.is_available()
    assert (found["cache_dir"], found["calibrations"]) == (str(tmp_path), ["targets/cpu-0123.toml"])
    assert found["counters"].keys() == {"perf", "nvml", "rapl"}


def test_sizes_are_plausible() -> None:
    memory = memory_bytes()
    assert memory is None or memory > 2**28
    sizes = list(cache_sizes().values())
    assert sizes == sorted(sizes) and all(2**12 < size < 2**31 for size in sizes)


def test_missing_packages_have_no_version() -> None:
    assert package_version("no-such-package-anywhere") is None


def test_machine_name_tells_how_much_of_the_processor_is_used() -> None:
    assert machine_name().endswith(f", {usable_threads()} threads")
