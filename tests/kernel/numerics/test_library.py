"""Second derivatives of every operator: torch's, or an error where they are asked for.

    loss, and the square of its gradient made with create_graph ──ours, plain torch──> gradients of their sum

The loss is part of it so that every input is reached even where the gradient has lost its connection, which would say nothing otherwise.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.kernel import activation, pointwise, reduce, rope
from ridgeline.kernel.attention import flash_attention
from ridgeline.kernel.batch_norm import batch_norm
from ridgeline.kernel.cross_entropy import cross_entropy
from ridgeline.kernel.layer_norm import layer_norm
from ridgeline.kernel.library import OPERATORS
from ridgeline.kernel.linear_cross_entropy import linear_cross_entropy
from ridgeline.kernel.matmul import matmul
from ridgeline.kernel.rms_norm import add_rms_norm, rms_norm
from ridgeline.kernel.softmax import log_softmax, softmax
from ridgeline.kernel.swiglu import swiglu, swiglu_packed
from ridgeline.kernel.use import load_operators
from ridgeline.kernel.weight_only import dequantize_int4, dequantize_int8, linear_int4, linear_int8, quantize_int4, quantize_int8

Function = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def penalised(function: Function, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    out = function(*inputs)
    loss = (out * torch.linspace(0.3, 1.7, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)).sum()
    first = torch.autograd.grad(loss, inputs, create_graph=True)
    total = loss + sum((gradient.square().sum() for gradient in first), torch.zeros((), device=out.device))
    return list(torch.autograd.grad(total, inputs))


def leaves(device: str, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape, device=device, requires_grad=True) for shape in shapes)


def normed_sum(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x + residual, (5,), weight, 1e-6) * (x + residual)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos[:, None] + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin[:, None]


def right(device: str) -> dict[str, tuple[Function, Function, tuple[Tensor, ...]]]:
    """Operator -> ours, plain torch, inputs."""
    rows, square, five, wide = (3, 5), (3, 3), (5,), (3, 256)
    target = torch.tensor([1, -100, 4], device=device)
    q8, s8 = quantize_int8(torch.randn(6, 256, device=device))
    q4, s4 = quantize_int4(torch.randn(6, 256, device=device))
    w8, w4 = dequantize_int8(q8, s8, torch.float32), dequantize_int4(q4, s4, 128, 256, None, torch.float32)
    cos, sin = torch.rand(4, 8, device=device), torch.rand(4, 8, device=device)
    # squared where the operator is linear: its own second derivative is 0
    cases: dict[str, tuple[Function, Function, tuple[tuple[int, ...], ...]]] = {
        "softmax": (softmax, lambda x: torch.softmax(x, -1), (rows,)),
        "log_softmax": (log_softmax, lambda x: torch.log_softmax(x, -1), (rows,)),
        "layer_norm": (lambda x, w, b: layer_norm(x, (5,), w, b), lambda x, w, b: F.layer_norm(x, (5,), w, b), (rows, five, five)),
        "rms_norm": (lambda x, w: rms_norm(x, w, 1e-6), lambda x, w: F.rms_norm(x, (5,), w, 1e-6), (rows, five)),
        "add_rms_norm": (lambda *given: torch.mul(*add_rms_norm(*given, 1e-6)), normed_sum, (rows, rows, five)),
        "swiglu": (swiglu, lambda gate, up: F.silu(gate) * up, (rows, rows)),
        "swiglu_packed": (swiglu_packed, lambda x: F.silu(x[:, :3]) * x[:, 3:], ((4, 6),)),
        "cross_entropy": (
            lambda x: cross_entropy(x, target, label_smoothing=0.1), lambda x: F.cross_entropy(x, target, label_smoothing=0.1), (rows,),
        ),
        "matmul": (matmul, torch.matmul, (rows, (5, 4))),
        "add": (lambda x, y: pointwise.add(x, y).square(), lambda x, y: (x + y).square(), (rows, five)),
        "add_scalar": (lambda x: pointwise.add(x, 2.0).square(), lambda x: (x + 2).square(), (rows,)),
        "mul": (pointwise.mul, torch.mul, (rows, five)),
        "mul_scalar": (lambda x: pointwise.mul(x, 2.0).square(), lambda x: (2 * x).square(), (rows,)),
        "sum": (lambda x: reduce.sum(x, 0).square(), lambda x: x.sum(0).square(), (rows,)),
        "mean": (lambda x: reduce.mean(x, 0).square(), lambda x: x.mean(0).square(), (rows,)),
        "amax": (lambda x: reduce.amax(x, 0).square(), lambda x: x.amax(0).square(), (rows,)),
        "var": (lambda x: reduce.var(x, 0), lambda x: x.var(0), (rows,)),
        "rope_one": (lambda x: rope.rope_one(x, cos, sin).square(), lambda x: turned(x, cos, sin).square(), ((1, 4, 2, 8),)),
        "rope": (
            lambda q, k: torch.mul(*rope.rope(q, k, cos, sin)), lambda q, k: turned(q, cos, sin) * turned(k, cos, sin),
            ((1, 4, 2, 8), (1, 4, 2, 8)),
        ),
        "linear_int8": (lambda x: linear_int8(x, q8, s8).square(), lambda x: F.linear(x, w8).square(), (wide,)),
        "linear_int4": (lambda x: linear_int4(x, q4, s4).square(), lambda x: F.linear(x, w4).square(), (wide,)),
    }  # fmt: skip
    for name, plain in activation.ACTIVATIONS.items():
        cases[name] = (getattr(activation, name, None) or (lambda x: activation.gelu(x, "tanh")), plain, (rows,))
    for name in ("relu", "gelu", "gelu_tanh", "silu"):
        cases[f"matmul_kept {name}"] = (
            lambda x, w, bias, name=name: matmul(x, w, bias, name),
            lambda x, w, bias, name=name: activation.ACTIVATIONS[name](x @ w + bias), (square, (3, 4), (4,)),
        )  # fmt: skip
    return {name: (ours, plain, leaves(device, *shapes)) for name, (ours, plain, shapes) in cases.items()}


def refused(device: str) -> dict[str, tuple[Function, tuple[Tensor, ...]]]:
    target = torch.tensor([0, 1, 2], device=device)
    hidden, weight, bias = leaves(device, (3, 4), (5, 4), (5,))
    query, key, value = leaves(device, *3 * [(1, 2, 4, 16)])
    images, scale = leaves(device, (4, 5), (5,))
    return {
        "linear_cross_entropy": (lambda h, w, b: linear_cross_entropy(h, w, target, b), (hidden, weight, bias)),
        "linear_cross_entropy of hidden": (lambda h: linear_cross_entropy(h, weight.detach(), target), (hidden,)),
        "linear_cross_entropy of the weight": (lambda w: linear_cross_entropy(hidden.detach(), w, target), (weight,)),
        "attention": (flash_attention, (query, key, value)),
        "attention of values": (lambda q: flash_attention(q, key.detach(), value.detach()), (query,)),
        "batch_norm": (lambda x, w: batch_norm(x, weight=w), (images, scale)),
    }


def test_second_derivatives_are_torchs(device: str) -> None:
    for name, (ours, plain, inputs) in right(device).items():
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*autograd kernel was not registered.*")
            mine = penalised(ours, inputs)
        for found, exact in zip(mine, penalised(plain, inputs), strict=True):
            torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_second_derivatives_that_we_lack_are_errors(device: str) -> None:
    for name, (ours, inputs) in refused(device).items():
        with pytest.raises(RuntimeError, match=f"{name.partition(' ')[0]} is differentiated") as raised:
            penalised(ours, inputs)
        assert "create_graph" in str(raised.value)


def test_a_gradient_that_nobody_differentiates_again_is_right(device: str) -> None:
    """create_graph alone is no reason to refuse."""
    for name, (ours, inputs) in refused(device).items():
        loss = ours(*inputs).square().sum()
        exact = torch.autograd.grad(loss, inputs, retain_graph=not name.startswith("linear_cross_entropy"))
        found = torch.autograd.grad(ours(*inputs).square().sum(), inputs, create_graph=True)
        for mine, other in zip(found, exact, strict=True):
            assert mine.requires_grad
            torch.testing.assert_close(mine.detach().mul_(2), 2 * other)


def test_every_gradient_is_held_to_this(device: str) -> None:
    """An operator with a gradient belongs to one of the two lists above."""
    load_operators()
    held = {name.partition(" ")[0] for name in [*right(device), *refused(device)]}
    assert {name for name, known in OPERATORS.items() if known.differentiable} <= held


def test_third_derivatives_of_plain_torch(device: str) -> None:
    x = torch.randn(3, 5, device=device, requires_grad=True)

    def third(function: Function) -> Any:
        out = function(x).square().sum()
        for _ in range(2):
            out = torch.autograd.grad(out, x, create_graph=True)[0].square().sum()
        return torch.autograd.grad(out, x)[0]

    for ours, plain in ((lambda t: layer_norm(t, (5,)), lambda t: F.layer_norm(t, (5,))), (softmax, lambda t: torch.softmax(t, -1))):
        torch.testing.assert_close(third(ours), third(plain), rtol=1e-2, atol=1e-3)
