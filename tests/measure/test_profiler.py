"""Measured rows stand beside captured ones, a planted slow op is found, and the user's module is left as it was."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from ridgeline.core.errors import CaptureError, MeasureError, OptionError
from ridgeline.core.profile import Profile
from ridgeline.measure.profiler import measure
from ridgeline.measure.subject import choose_device
from ridgeline.workload.capture import capture
from tests.measure.nets import SLOW_S, Blocks, Branching, Convolutional, Planted, Pointwise
from tests.support import FULL

IMAGE = (2, 3, 48, 48)


@pytest.fixture(scope="module")
def profile() -> Profile:
    torch.manual_seed(0)
    return measure(Convolutional(), torch.randn(IMAGE), device="cpu", repeats=7)


def blocks_inputs() -> dict[str, Any]:
    return {"x": torch.randn(4, 8), "times": 3, "scale": torch.tensor(2.0)}


@pytest.mark.parametrize(
    ("module", "inputs", "how"),
    [
        (Convolutional(), torch.randn(IMAGE), "torch.export"),
        (Blocks(), blocks_inputs(), "torch.export"),
        (Branching(), torch.randn(4, 16), "dispatch"),
    ],
    ids=["convolutional", "nested", "not exportable"],
)
def test_rows_are_the_captured_ops(module: nn.Module, inputs: Any, how: str) -> None:
    workload = capture(module, inputs)
    assert workload.captured_by == how
    measured = measure(module, inputs, repeats=2, warmup=1)
    assert [(row.name, row.layer, row.kind) for row in measured.rows] == [(op.name, op.layer, op.kind) for op in workload.ops]
    assert [row.name for row in measured.rows if row.measured is None] == []
    assert [(row.flops, row.bytes) for row in measured.rows] == [(op.flops, op.bytes) for op in workload.ops]


def test_ops_add_up_to_about_the_whole(profile: Profile) -> None:
    assert profile.total.measured is not None and profile.total.measured.repeats == 7
    assert profile.total.time_s == profile.total.measured.median_s
    whole_s = sum(row.time_s for row in profile.rows)
    assert 0.2 < whole_s / profile.total.time_s < 5
    assert sum(share.fraction for share in profile.shares) == pytest.approx(1)


def test_rows_follow_each_other_on_the_timeline(profile: Profile) -> None:
    now_s = 0.0
    for row in profile.rows:
        assert row.start_s == pytest.approx(now_s)
        assert row.measured is not None and row.time_s == row.measured.median_s
        now_s += row.time_s


def test_the_heavy_op_is_the_heaviest(profile: Profile) -> None:
    heaviest = max(profile.rows, key=lambda row: row.time_s)
    assert heaviest.layer == "second" and heaviest.kind == "conv"


def test_settings_hold_the_samples(profile: Profile) -> None:
    assert len(profile.settings.samples_s) == 7
    assert (profile.target, profile.mode, profile.settings.device) == ("cpu", "eager", "cpu")
    assert profile.to_json()["total"]["measured"]["repeats"] == 7


def test_planted_slow_op_is_found() -> None:
    found = measure(Planted(), torch.randn(8), repeats=5, warmup=1)
    times = {row.name: row.time_s for row in found.rows}
    assert times["slow"] >= SLOW_S * 0.95
    assert all(time_s < SLOW_S / 2 for name, time_s in times.items() if name != "slow")


def test_the_whole_model_includes_its_python() -> None:
    found = measure(Planted(python_s=2 * SLOW_S), torch.randn(8), repeats=3, warmup=1)
    assert found.total.time_s >= 3 * SLOW_S * 0.95
    assert sum(row.time_s for row in found.rows) < 2.5 * SLOW_S


def test_peak_memory_is_what_lives_at_once() -> None:
    found = measure(Pointwise(), torch.randn(1024, 256), repeats=1, warmup=0)
    assert found.total.measured_peak_bytes == 2 * 1024 * 256 * 4


def test_weights_shared_by_two_layers_count_once() -> None:
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    assert measure(nn.Sequential(first, second), torch.randn(1, 8), repeats=1).total.weight_bytes == 8 * 8 * 4


def test_the_users_module_and_inputs_are_left_alone() -> None:
    module, image = Convolutional().train(), torch.randn(IMAGE)
    module.norm.eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    measure(module, image, repeats=1, warmup=0, dtype="bfloat16", channels_last=True)
    assert module.training and module.first.training and not module.norm.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.first.weight.dtype == torch.float32 and module.first.weight.is_contiguous()


def test_a_model_that_writes_into_its_input_gets_its_own_copy() -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1) * 2

    given = torch.zeros(4)
    measure(Writes(), given, repeats=2)
    assert torch.equal(given, torch.zeros(4))


def test_dtype_is_really_run() -> None:
    found = measure(Convolutional(), torch.randn(IMAGE), dtype="bf16", repeats=1)
    assert found.dtype == "bfloat16"
    assert {row.dtype for row in found.rows if row.kind == "conv"} == {"bfloat16"}


def test_channels_last_changes_the_layout_not_the_rows(profile: Profile) -> None:
    seen: list[bool] = []

    class Watched(Convolutional):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            seen.append(image.is_contiguous(memory_format=torch.channels_last) and not image.is_contiguous())
            return super().forward(image)

    found = measure(Watched(), torch.randn(IMAGE), channels_last=True, repeats=1)
    assert seen and all(seen)
    assert [row.name for row in found.rows] == [row.name for row in profile.rows]


@pytest.mark.skipif(not FULL, reason="compiling takes 15 s; runs with RIDGELINE_FULL=1")
def test_compiling_changes_the_whole_and_keeps_the_rows() -> None:
    found = measure(Pointwise(), torch.randn(1000), compiled=True, repeats=2, warmup=0)
    assert (found.mode, [row.name for row in found.rows]) == ("compiled", ["relu", "exp", "neg"])
    assert found.total.time_s < 1  # compilation itself is warm-up
    assert any("ran compiled" in note for note in found.notes)


def test_a_failed_compilation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*args: object) -> None:
        raise RuntimeError("no C++ compiler was found\nand more")

    monkeypatch.setattr(torch, "compile", lambda module: no_compiler)
    with pytest.raises(MeasureError, match="no C\\+\\+ compiler") as caught:
        measure(Pointwise(), torch.randn(4), compiled=True)
    assert "and more" not in caught.value.why


def test_progress_is_told() -> None:
    said: list[str] = []
    measure(Pointwise(), torch.randn(4), repeats=1, progress=said.append)
    assert len(said) >= 3 and any("whole model" in message for message in said)


def test_named_models_are_built_on_the_device() -> None:
    found = measure("resnet18", device="cpu", repeats=2, warmup=1)
    workload = capture("resnet18")
    assert [row.name for row in found.rows] == [op.name for op in workload.ops]
    assert (found.model, found.total.parameters) == ("resnet18", workload.parameters)
    assert 0.2 < sum(row.time_s for row in found.rows) / found.total.time_s < 5


def test_a_model_larger_than_memory_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.measure.memory.free_bytes", lambda device: 1_000_000)
    with pytest.raises(MeasureError, match="does not fit"):
        measure("resnet18", device="cpu")


@pytest.mark.parametrize(
    ("model", "inputs", "options", "error", "says"),
    [
        (Pointwise(), None, {}, OptionError, "no example inputs"),
        (Pointwise(), torch.ones(2), {"batch": 2}, OptionError, "shape the example inputs"),
        (Pointwise(), torch.ones(2), {"dtype": "int8"}, OptionError, "cannot be measured"),
        (Pointwise(), torch.ones(2), {"dtype": "floaty"}, OptionError, "not a data type"),
        (Pointwise(), torch.ones(2), {"repeats": 0}, OptionError, "at least one repeat"),
        (Pointwise(), torch.ones(2), {"device": "warp drive"}, OptionError, "cpu, cuda"),
        (Pointwise(), torch.ones(2), {"device": "meta"}, MeasureError, "only cpu and cuda"),
        (nn.Linear(4, 4, device="meta"), torch.ones(2, 4), {"device": "cpu"}, MeasureError, "meta device"),
        (nn.Linear(4, 4), torch.ones(2, 5), {}, CaptureError, "does not run on these inputs"),
        ("model.onnx", None, {}, MeasureError, "ridgeline analyze"),
    ],
)
def test_bad_requests_say_what_to_do(model: Any, inputs: Any, options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        measure(model, inputs, **options)


def test_a_missing_gpu_is_named() -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with pytest.raises(MeasureError, match="CUDA device"):
        choose_device(f"cuda:{count}", "resnet18")


def test_settings_are_frozen(profile: Profile) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        profile.settings.repeats = 3
