"""What has the wrong type or no sensible size is refused at every public door, by name and without a traceback of torch's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ridgeline
from ridgeline.core.checks import MOST, expect, whole
from ridgeline.core.errors import OptionError
from ridgeline.target.load import load_array
from ridgeline.workload.case import CaseOptions

NET, X = nn.Linear(4, 4), torch.zeros(1, 4)


def digits() -> ridgeline.Workload:
    return ridgeline.capture("digits-cnn")


def test_expect_names_value_type_and_what_to_give() -> None:
    expect("batch", 8, int, do="")
    expect("name", Path("x"), str, Path, do="")
    for value, what, why in (
        ("8", "batch = '8'", "it is a str, not an int"),
        (None, "batch = None", "it is None, not an int"),
        (True, "batch = True", "it is a bool, not an int"),
        (NET, "batch of type Linear", "it is a Linear, not an int"),
        (nn.Linear, "batch of type type", "it is the class Linear, not an int"),
    ):
        with pytest.raises(OptionError) as refused:
            expect("batch", value, int, do="give 8")
        assert (refused.value.what, refused.value.why, refused.value.do) == (what, why, "give 8")


def test_whole_numbers_have_an_upper_end() -> None:
    whole("batch", MOST, do="")
    with pytest.raises(OptionError, match=f"at most {MOST:,}"):
        whole("batch", MOST + 1, do="")


@pytest.mark.parametrize("batch", [10**20, 2**63 - 1, 10**15, "8", 1.5, True])
@pytest.mark.parametrize("model", ["resnet18", "digits-cnn", "gpt2", "anything.onnx", "file.py:factory"])
def test_a_batch_or_context_nobody_can_mean_is_refused(model: str, batch: object) -> None:
    for name in ("batch", "context"):
        with pytest.raises(OptionError, match=f"{name} = "):
            ridgeline.capture(model, **{name: batch})  # type: ignore[arg-type]
        with pytest.raises(OptionError, match=f"{name} = "):
            CaseOptions(**{name: batch})  # type: ignore[arg-type]


def test_the_largest_batch_still_has_sizes() -> None:
    assert ridgeline.capture("resnet18", batch=MOST).flops > 0


DOORS: dict[str, Callable[[], object]] = {
    "estimate a name": lambda: ridgeline.estimate("resnet18", "h200"),  # type: ignore[arg-type]
    "estimate a module": lambda: ridgeline.estimate(NET, "h200"),  # type: ignore[arg-type]
    "estimate on nothing": lambda: ridgeline.estimate(digits(), None),  # type: ignore[arg-type]
    "half a device": lambda: ridgeline.estimate(digits(), "h200", devices=1.5),  # type: ignore[arg-type]
    "settings as a dict": lambda: ridgeline.estimate(digits(), "h200", settings={"devices": 2}),  # type: ignore[arg-type]
    "advise a workload": lambda: ridgeline.advise(digits()),  # type: ignore[arg-type]
    "map onto nothing": lambda: ridgeline.map_layers(digits(), None),  # type: ignore[arg-type]
    "map onto a processor": lambda: ridgeline.map_layers(digits(), "h200"),
    "map a module": lambda: ridgeline.map_layers(NET, "tpu-v1"),  # type: ignore[arg-type]
    "load no target": lambda: ridgeline.load_target(None),  # type: ignore[arg-type]
    "load no data": lambda: ridgeline.load_data(None),  # type: ignore[arg-type]
    "capture a function": lambda: ridgeline.capture(lambda x: x, X),  # type: ignore[arg-type, misc]
    "capture a class": lambda: ridgeline.capture(nn.Linear, X),  # type: ignore[arg-type]
    "a number as dtype": lambda: ridgeline.capture("resnet18", dtype=16),  # type: ignore[arg-type]
    "measure nothing": lambda: ridgeline.measure(None),  # type: ignore[arg-type]
    "quantize a name": lambda: ridgeline.quantize("nope"),  # type: ignore[arg-type]
    "prune nothing": lambda: ridgeline.prune(None),  # type: ignore[arg-type]
    "evaluate on a tensor": lambda: ridgeline.evaluate(NET, X),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("door", DOORS)
def test_a_slip_is_an_option_error(door: str) -> None:
    with pytest.raises(OptionError):
        DOORS[door]()


def test_an_engine_takes_sampling_alone() -> None:
    engine = ridgeline.Engine.from_pretrained("builtin")
    with pytest.raises(OptionError, match="sampling of type dict"):
        engine.generate(["a"], {"max_tokens": 3})  # type: ignore[arg-type]
    assert engine.idle


def test_torch_dtypes_and_target_names_are_taken() -> None:
    assert ridgeline.capture("resnet18", dtype=torch.bfloat16) == ridgeline.capture("resnet18", dtype="bfloat16")
    assert ridgeline.map_layers(digits(), "tpu-v1").array == load_array("tpu-v1")
