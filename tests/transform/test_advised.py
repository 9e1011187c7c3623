"""Advice by name: the right step, prediction beside measurement."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ridgeline.core.errors import NoGainError, TransformError, UnknownNameError
from ridgeline.core.profile import Advice
from ridgeline.transform.advised import ADVISED, apply_advice
from ridgeline.transform.recipe import parse_step
from ridgeline.transform.step import Context
from tests.transform import toy

INPUTS = (torch.ones(1, 1, 4, 4),)


def test_prediction_stands_beside_measurement() -> None:
    advice = Advice("precision bfloat16", 1.7, "memory")
    model = toy.net()
    made, change = apply_advice(model, advice, Context(data=toy.data()))
    assert all(parameter.dtype == torch.bfloat16 for parameter in made.parameters())
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert change.predicted_speedup == 1.7 and change.speedup is not None
    assert 1.8 < change.compression_ratio < 2.0
    assert "1.70x" in change.table() and f"{change.speedup:.2f}x" in change.table()


def test_every_name_has_a_step_with_right_settings() -> None:
    for name, table in ADVISED.items():
        assert parse_step(dict(table), name).kind == table["kind"]


def test_names_are_those_the_estimate_gives() -> None:
    from ridgeline.estimate import advice
    from tests.support import ROOT

    text = (ROOT / "src" / "ridgeline" / "estimate" / "advice.py").read_text()
    for name in ADVISED:
        kind, _, value = name.partition(" ")
        assert f'"{name}"' in text or (f'f"{kind} {{dtype}}"' in text and f'"{value}"' in text), name
    assert advice.advise


@pytest.mark.parametrize("name", ["weight-only int8", "weight-only int4"])
def test_weight_only(name: str) -> None:
    made, change = apply_advice(toy.net(64), name, Context(inputs=INPUTS, latency=False))
    assert change.predicted_speedup is None
    assert change.compression_ratio > 2
    assert any("Packed" in type(module).__name__ for module in made.modules())


def test_channels_last_changes_the_layout_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    made, change = apply_advice(model, "channels-last", Context(inputs=(torch.randn(2, 3, 8, 8),)), require_gain=False)
    assert made[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert change.compression_ratio == 1.0 and change.speedup is not None


def test_what_cannot_be_applied_lists_what_can() -> None:
    with pytest.raises(UnknownNameError) as caught:
        apply_advice(toy.net(), "device h200", Context())
    assert all(name in str(caught.value) for name in ADVISED)
    with pytest.raises(TransformError, match="without a convolution"):
        apply_advice(nn.Sequential(nn.Linear(2, 2)), "channels-last", Context())
    with pytest.raises(NoGainError):
        apply_advice(nn.Sequential(nn.Conv2d(1, 1, 1)), "channels-last", Context())


def test_values_beyond_float16_are_told() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight[0, 0] = 1e6
    with pytest.raises(TransformError, match=r"0\.weight overflows float16"):
        apply_advice(model, "precision float16", Context())
