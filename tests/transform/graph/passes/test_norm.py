"""Norms by hand become one op; near misses stay; a residual joins an RMS norm where the kernel wins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.transform.graph import fused_ops
from tests.transform.graph.pattern_cases import Formula, run

COLS, EPS = 16, 1e-3


def rows(dtype: torch.dtype = torch.float64) -> tuple[Tensor]:
    return (torch.randn(3, 4, COLS, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype),)


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {"w": torch.linspace(0.5, 2, COLS, dtype=dtype), "b": torch.linspace(-1, 1, COLS, dtype=dtype)}


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


RMS_FORMS: dict[str, Callable[..., Tensor]] = {
    "llama": lambda x, w, b: w * rms(x),
    "no weight": lambda x, w, b: rms(x),
    "square, sqrt": lambda x, w, b: x / torch.sqrt((x * x).mean(2, keepdim=True) + EPS) * w,
    "one over": lambda x, w, b: w * (x * (1 / torch.sqrt(EPS + torch.square(x).mean(-1, True)))),
}
LAYER_FORMS: dict[str, Callable[..., Tensor]] = {
    "whole": lambda x, w, b: centred(x) / torch.sqrt(centred(x).pow(2).mean(-1, keepdim=True) + EPS) * w + b,
    "var": lambda x, w, b: w * (centred(x) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + EPS)) + b,
    "no bias": lambda x, w, b: centred(x) / torch.sqrt(x.var(-1, correction=0, keepdim=True) + EPS) * w,
    "plain": lambda x, w, b: (d := centred(x)) / torch.sqrt((d * d).mean(-1, keepdim=True) + EPS),
}


@pytest.mark.parametrize("form", RMS_FORMS)
def test_rms_forms(form: str) -> None:
    ran = run(Formula(RMS_FORMS[form], **parameters()), rows(), "norm")
    assert ran.count("rms_norm") == 1
    assert ran.count("mean", "rsqrt", "sqrt", "mul", "div") == 0


@pytest.mark.parametrize("form", LAYER_FORMS)
def test_layer_forms(form: str) -> None:
    ran = run(Formula(LAYER_FORMS[form], **parameters()), rows(), "norm")
    assert ran.count("layer_norm") == 1
    assert ran.count("mean", "var", "sub", "mul", "div") == 0


def test_eps_is_carried_over() -> None:
    """With numbers as small as eps, another eps would show."""
    small = (rows()[0] * 1e-2,)
    assert run(Formula(RMS_FORMS["llama"], **parameters()), small, "norm").only("rms_norm").args[3] == EPS


NEAR_MISSES: dict[str, Callable[..., object]] = {
    "mean over tokens": lambda x, w, b: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS),
    "cube": lambda x, w, b: x * torch.rsqrt(x.pow(3).abs().mean(-1, keepdim=True) + EPS),
    "of another tensor": lambda x, w, b: (x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS),
    "variance read twice": lambda x, w, b: (x * torch.rsqrt((m := x.pow(2).mean(-1, keepdim=True)) + EPS), m),
    "unbiased variance": lambda x, w, b: centred(x) / torch.sqrt(x.var(-1, keepdim=True) + EPS),
    "eps outside the root": lambda x, w, b: centred(x) / (x.std(-1, unbiased=False, keepdim=True) + EPS),
    "through float32": lambda x, w, b: w * rms(x.float()).to(x.dtype),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_stay(case: str) -> None:
    ran = run(Formula(NEAR_MISSES[case], **parameters()), rows(), "norm", tolerance=0.0)
    assert ran.changed == []


def test_a_gate_is_not_taken_for_a_weight() -> None:
    ran = run(Formula(lambda x: rms(x) * (x + 2.0)), rows(), "norm")
    assert ran.count("rms_norm") == 1
    assert ran.only("rms_norm").args[2] is None
    assert ran.count("mul") == 1


def test_half_precision_stays_on_cpus() -> None:
    ran = run(Formula(RMS_FORMS["llama"], **parameters(torch.bfloat16)), rows(torch.bfloat16), "norm", tolerance=0.0)
    assert ran.changed == []
    assert "slower" in ran.refused[0]


def residual_block(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    total = x + torch.sin(x)
    return functional.rms_norm(total, (COLS,), w, EPS) * 2.0 + total


def test_a_residual_joins_where_the_kernel_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(Formula(residual_block, **parameters()), rows(), "norm", tolerance=0.0)
    assert plain.changed == []
    assert "GPUs" in plain.refused[0]
    monkeypatch.setattr(fused_ops, "no_win", lambda *args, **kwargs: None)
    joined = run(Formula(residual_block, **parameters()), rows(), "norm")
    assert joined.count("graph_add_rms_norm") == 1
    assert joined.count("rms_norm") == 0


def test_our_kernel_in_place_of_torch_where_it_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_ops, "no_win", lambda *args, **kwargs: None)
    ran = run(Formula(lambda x, w, b: w * rms(x + b), **parameters()), rows(), "norm")
    assert ran.count("graph_rms_norm") == 1
    both = run(Formula(lambda x, w, b: w * rms(x + torch.cos(x)), **parameters()), rows(), "norm")
    assert both.count("graph_add_rms_norm") == 1


def test_the_norm_of_a_tensor_written_later_stays() -> None:
    def written(x: Tensor) -> Tensor:
        y = x + 1.0
        scale = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
        y.add_(5.0)
        return y * scale

    assert run(Formula(written), rows(), "norm", tolerance=0.0).changed == []
