"""Calibration: a quick real one, its cache, and going on after a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ridgeline import calibrate, capture, estimate, load_target
from ridgeline.core.errors import MeasureError, OptionError
from ridgeline.target import calibrate as calibration
from ridgeline.target import machine
from ridgeline.target.calibrate import Journal, calibration_path
from ridgeline.target.probes import probe_cases


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RIDGELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        messages: list[str] = []
        yield calibrate("cpu", progress=messages.append, quick=True), messages, calibration_path("cpu")


def test_roofs_of_this_machine_make_sense(quick: tuple) -> None:
    spec, messages, path = quick
    assert path.exists() and not path.with_suffix(".journal.json").exists()
    assert len(messages) > 20  # progress was shown
    assert list(spec.memories)[-1] == "dram"
    assert 1e9 < spec.memories["dram"].bandwidth_bps.value < 1e13
    assert 1e9 < spec.units["matrix"].peak_flops["float32"].value < 1e14
    assert 0 <= spec.fault_s_per_byte.value < 1e-8
    assert 1e-8 < spec.dispatch.per_op_s.value < 1e-3
    assert all(p.seconds > 0 for p in spec.probes) and {"conv", "matmul", "pointwise"} <= {p.family for p in spec.probes}


def test_the_cache_is_used(quick: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, _, _ = quick
    monkeypatch.setattr(calibration, "_run_worker", lambda *_: pytest.fail("measured again"))
    assert load_target("cpu") == spec


def test_an_estimate_of_a_small_net_is_near_its_measured_time(quick: tuple) -> None:
    spec, _, _ = quick
    model = torch.nn.Sequential(*(torch.nn.Linear(700, 700) for _ in range(8))).eval()
    x = torch.randn(300, 700)
    with torch.inference_mode():
        measured = machine.seconds_per_call(lambda: model(x), "cpu", 0.3)
    predicted = estimate(capture(model, x), spec).total.time_s
    assert 0.2 < predicted / measured < 5  # a quick calibration on a busy machine; the accuracy table is a benchmark


def test_a_killed_calibration_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "cpu.journal.json"
    first = Journal(path)
    assert first.once("a", lambda: 1) == 1
    again = Journal(path)  # a new process
    assert again.once("a", lambda: pytest.fail("measured again")) == 1
    path.write_text("{broken")
    assert Journal(path).once("a", lambda: 2) == 2
    assert json.loads(path.read_text()) == {"a": 2}


def test_probes_are_no_layers_of_named_models() -> None:
    shapes = set()
    for name in ("resnet18", "resnet50", "alexnet", "vgg16", "mobilenet-v2", "vit-b16", "bert-base"):
        for op in capture(name).ops:
            if op.loops and op.kind in ("conv", "linear"):
                shapes.add((op.kind, op.loops[0].as_matmul()[2:]))
    for case in probe_cases("meta", ("float32",)):
        module, _ = case.build()
        for layer in module.modules():
            if isinstance(layer, torch.nn.Conv2d):
                width = layer.in_channels // layer.groups * layer.kernel_size[0] * layer.kernel_size[1]
                assert layer.groups > 1 or ("conv", (layer.out_channels, width)) not in shapes, case.name
            if isinstance(layer, torch.nn.Linear):
                assert ("linear", (layer.out_features, layer.in_features)) not in shapes, case.name


def test_a_calibration_that_dies_says_why_and_keeps_the_old_one(quick: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, _, path = quick
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(MeasureError, match="goes on where it stopped"):
        calibrate("cpu")
    assert path.exists() and load_target("cpu") == spec


def test_a_busy_machine_is_noticed() -> None:
    spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        time.sleep(0.5)
        assert "taken" in machine.busy().get("busy", "" if Path("/proc/stat").exists() else "taken")
    finally:
        for process in spin:
            process.kill()
            process.wait()


def test_only_this_machine_can_be_calibrated() -> None:
    with pytest.raises(OptionError):
        calibrate("h200")
