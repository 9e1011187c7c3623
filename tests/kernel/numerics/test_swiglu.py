"""SwiGLU and its gradients against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from ridgeline.kernel import swiglu
from ridgeline.kernel.tuning import forced, spaces
from tests.kernel.support import FLOATS, check, layouts


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def plain_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.silu(gate) * up


def plain_packed(x: torch.Tensor) -> torch.Tensor:
    return plain_swiglu(*x.chunk(2, dim=-1))


def compared(ours: Any, plain: Any, dtype: torch.dtype, *inputs: torch.Tensor) -> None:
    """Result and gradients of every input."""
    results = []
    for function, kind in ((ours, dtype), (plain, dtype), (plain, torch.float64)):
        leaves = [x.detach().to(kind).requires_grad_() for x in inputs]
        out = function(*leaves)
        torch.manual_seed(1)
        out.backward(torch.randn(out.shape, device=out.device).to(dtype).to(kind))
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for triple in zip(*results, strict=True):
        check(*triple)


def cases(dtype: torch.dtype, device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for (_, gate), (_, up) in zip(layouts((3, 5, 24), dtype, device), reversed(list(layouts((3, 5, 24), dtype, device))), strict=True):
        yield gate, up
    packed = torch.randn(2, 3, 40, device=device).to(dtype)
    yield packed[..., :20], packed[..., 20:]
    yield packed[0, 0, 3], packed[1, 1, 3]
    yield packed[:, :0], packed[:, :0]
    yield torch.randn(5, 3000, device=device).to(dtype), torch.randn(5, 3000, device=device).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_layouts(dtype: torch.dtype, device: str) -> None:
    for gate, up in cases(dtype, device):
        compared(swiglu.swiglu, plain_swiglu, dtype, gate, up)


@pytest.mark.parametrize("dtype", FLOATS)
def test_packed(dtype: torch.dtype, device: str) -> None:
    for _, x in layouts((3, 5, 24), dtype, device):
        compared(swiglu.swiglu_packed, plain_packed, dtype, x)
    for shape in ((6,), (0, 4), (3, 0), (2, 5000), (2, 3, 2, 10)):
        compared(swiglu.swiglu_packed, plain_packed, dtype, torch.randn(shape, device=device).to(dtype))
    for bad in (torch.randn(3, 5, device=device), torch.randn((), device=device), torch.ones(4, device=device, dtype=torch.int32)):
        with pytest.raises(RuntimeError, match="needs"):
            swiglu.swiglu_packed(bad)


def test_broadcast_promotion_and_one_gradient(device: str) -> None:
    gate, up = torch.randn(4, 1, 6, device=device), torch.randn(5, 6, device=device, dtype=torch.float64)
    out = swiglu.swiglu(gate, up)
    assert out.dtype is torch.float64 and torch.allclose(out, plain_swiglu(gate.double(), up))
    for index in (0, 1):
        results = []
        for function in (swiglu.swiglu, plain_swiglu):
            pair = [torch.linspace(-3, 3, 60, device=device).view(6, 10), torch.linspace(2, -1, 60, device=device).view(6, 10)]
            pair[index].requires_grad_()
            function(*pair).square().sum().backward()
            assert pair[1 - index].grad is None
            results.append(pair[index].grad)
        assert torch.allclose(*results, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="floating"):
        swiglu.swiglu(torch.ones(3, device=device, dtype=torch.int64), torch.ones(3, device=device, dtype=torch.int64))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_far_ends(device: str) -> None:
    gate = torch.tensor([-1e4, -200.0, 200.0, 1e4], device=device, requires_grad=True)
    up = torch.full((4,), 2.0, device=device)
    out = swiglu.swiglu(gate, up)
    assert torch.equal(out, torch.tensor([0.0, 0.0, 400.0, 2e4], device=device))
    out.sum().backward()
    assert gate.grad is not None and torch.equal(gate.grad, torch.tensor([0.0, 0.0, 2.0, 2.0], device=device))


def test_gradcheck_and_registration(device: str) -> None:
    gate, up = (torch.randn(3, 4, device=device, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(swiglu.swiglu, (gate, up))
    assert torch.autograd.gradcheck(swiglu.swiglu_packed, (gate,))
    ops = torch.ops.ridgeline
    for kind in (torch.float32, torch.float64):
        x, y = (side.detach().to(kind).requires_grad_() for side in (gate, up))
        turned = x.detach().t().contiguous().t()
        torch.library.opcheck(ops.swiglu.default, (x, y))
        torch.library.opcheck(ops.swiglu.default, (turned.requires_grad_(), y.detach()))
        torch.library.opcheck(ops.swiglu_packed.default, (x,))
        torch.library.opcheck(ops.swiglu_backward.default, (x.detach(), turned.detach(), y.detach()))
        torch.library.opcheck(ops.swiglu_packed_backward.default, (x.detach()[:, :2], y.detach()))


def test_the_same_on_every_run_and_with_every_configuration(device: str) -> None:
    gate, up = (torch.randn(7, 700, device=device) for _ in range(2))
    first = (swiglu.swiglu(gate, up), *torch.ops.ridgeline.swiglu_backward(gate, gate, up))
    for chosen in spaces()["swiglu"]:
        with forced("swiglu", chosen), forced("swiglu_backward", chosen):
            again = (swiglu.swiglu(gate, up), *torch.ops.ridgeline.swiglu_backward(gate, gate, up))
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_than_two_to_the_31_elements() -> None:
    packed = torch.full((2**16 + 1, 2**15), 30.0, dtype=torch.bfloat16, device="cuda")
    out = swiglu.swiglu_packed(packed)
    assert float(out[-1].min()) == float(out[0].min()) == 900.0
    del out
    flat = packed.view(-1)
    assert float(swiglu.swiglu(flat, flat)[-1]) == 900.0
