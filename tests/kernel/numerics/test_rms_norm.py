"""RMS normalisation, alone and with a residual, against float64: every dtype, layout and row length, gradients, stand-ins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ridgeline.core.errors import OptionError
from ridgeline.kernel import layer_norm as shared
from ridgeline.kernel import replace
from ridgeline.kernel.rms_norm import add_rms_norm, add_rms_norm_op, rms_norm, rms_norm_backward_op, rms_norm_op
from ridgeline.kernel.tuning import forced
from tests.kernel.support import FLOATS, check, layouts

Pair = tuple[torch.Tensor, torch.Tensor]


def gradients(function: Any, g: torch.Tensor, *tensors: torch.Tensor | None) -> list[torch.Tensor]:
    """Gradients of every tensor given; function(*tensors)."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    function(*leaves).backward(g)
    return [leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None]


def plain(x: torch.Tensor, w: torch.Tensor | None) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:] if w is None else w.shape, w, 1e-6)


def plain_add(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor | None) -> Pair:
    return plain(x + r, w), x + r


def rounded_add(dtype: torch.dtype) -> Any:
    """In float64, except for the rounding of the sum, which is part of what the operator promises."""

    def exact(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor | None) -> Pair:
        total = x + r
        total = total + (total.to(dtype).double() - total).detach()
        return plain(total, w), total

    return exact


def shorten(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The kernels for long rows, for rows the interpreter can afford; a GPU takes real ones."""
    if device == "cpu":
        for name, value in {"IN_REGISTERS": 16, "IN_REGISTERS_BACKWARD": 16, "_CHUNK": 64, "_plans": {}}.items():
            monkeypatch.setattr(shared, name, value)


def double(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.double()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(7, 40), (3, 5, 33), (2, 3, 1000)])
def test_layouts(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    w = torch.randn(shape[-1], device=device).to(dtype)
    r = torch.randn(shape, device=device).to(dtype)
    for _name, x in layouts(shape, dtype, device):
        out = rms_norm(x, w, 1e-6)
        check(out, plain(x, w), plain(x.double(), w.double()))
        assert out.is_contiguous()
        y, total = add_rms_norm(x, r, w, 1e-6)
        theirs = plain_add(x, r, w)
        exact = rounded_add(dtype)(x.double(), r.double(), w.double())
        check(y, theirs[0], exact[0])
        check(total, theirs[1], exact[1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("shape", [(9, 64), (37, 24), (2, 3, 1000), (5, 1)])
def test_gradients(device: str, dtype: torch.dtype, shape: tuple[int, ...], with_weight: bool) -> None:
    compare(device, dtype, shape, with_weight)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("with_weight", [True, False])
def test_long_rows(device: str, dtype: torch.dtype, with_weight: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, device)
    compare(device, dtype, (11, 200 if device == "cpu" else 17000), with_weight)


def compare(device: str, dtype: torch.dtype, shape: tuple[int, ...], with_weight: bool) -> None:
    """Result and gradients against float64."""
    torch.manual_seed(1)
    x = (torch.randn(shape, device=device) * 2 + 0.5).to(dtype)
    w = torch.randn(shape[-1], device=device).to(dtype) if with_weight else None
    g = torch.randn(shape, device=device).to(dtype)
    check(rms_norm(x, w, 1e-6), plain(x, w), plain(x.double(), double(w)))
    exact = gradients(plain, g.double(), x.double(), double(w))
    mine = gradients(lambda a, b: rms_norm(a, b, 1e-6), g, x, w)
    for one, two, right in zip(mine, gradients(plain, g, x, w), exact, strict=True):
        if shape[-1] > 1:
            check(one, two, right)
        else:  # the exact gradient of x is almost 0: what is left is rounding
            assert torch.allclose(one.double(), right, rtol=0.02, atol=1e-2)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("used", ["both", "normed", "sum"])
@pytest.mark.parametrize("long", [False, True])
def test_add_gradients(device: str, dtype: torch.dtype, long: bool, with_weight: bool, used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (9, 72)
    if long:
        shorten(monkeypatch, device)
        shape = (2, 200 if device == "cpu" else 17000)
    torch.manual_seed(2)
    x, r, g, gs = ((torch.randn(shape, device=device)).to(dtype) for _ in range(4))
    w = torch.randn(shape[-1], device=device).to(dtype) if with_weight and used != "sum" else None

    def of(function: Any, *seeds: torch.Tensor) -> Any:
        def total(a: Any, b: Any, c: Any) -> torch.Tensor:
            y, s = function(a, b, c)
            return (y * seeds[0]).sum() * (used != "sum") + (s * seeds[1]).sum() if used != "normed" else (y * seeds[0]).sum()

        return total

    one = torch.ones((), device=device)
    mine = gradients(of(lambda a, b, c: add_rms_norm(a, b, c, 1e-6), g, gs), one.to(dtype), x, r, w)
    theirs = gradients(of(plain_add, g, gs), one.to(dtype), x, r, w)
    exact = gradients(of(rounded_add(dtype), g.double(), gs.double()), one.double(), x.double(), r.double(), double(w))
    for a, b, c in zip(mine, theirs, exact, strict=True):
        check(a, b, c)


@pytest.mark.parametrize("long", [False, True])
def test_gradcheck(device: str, long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (4, 90 if long else 6)
    if long:
        shorten(monkeypatch, device)
    torch.manual_seed(4)
    x = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
    r = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
    w = torch.randn(shape[1], dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b), (x, w), fast_mode=True)
    assert torch.autograd.gradcheck(lambda a, b, c: add_rms_norm(a, b, c, 1e-6), (x, r, w), fast_mode=True)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0,), (2, 0, 4)])
def test_empty(device: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    w = torch.randn(shape[-1], device=device, requires_grad=True)
    for out in (rms_norm(x, w), add_rms_norm(x, x.detach(), w)[0]):
        assert out.shape == x.shape
        out.sum().backward()
    assert x.grad is not None and w.grad is not None
    assert x.grad.shape == x.shape and torch.equal(w.grad, torch.zeros_like(w))


def test_default_eps(device: str) -> None:
    """That of the dtype computed in."""
    x = torch.randn(4, 64, device=device) * 1e-3
    assert torch.allclose(rms_norm(x), F.rms_norm(x, (64,)), rtol=1e-5)
    half = x.half()
    assert torch.allclose(rms_norm(half).float(), F.rms_norm(half.float(), (64,), None, torch.finfo(torch.float32).eps), rtol=2e-3)


def test_several_dims_and_errors(device: str) -> None:
    torch.manual_seed(3)
    x, w = torch.randn(3, 4, 5, device=device), torch.randn(4, 5, device=device)
    assert torch.allclose(rms_norm(x, w, 1e-6), F.rms_norm(x, (4, 5), w, 1e-6), atol=1e-5)
    with pytest.raises(OptionError):
        rms_norm(x, w[:, :3])
    with pytest.raises(OptionError):
        add_rms_norm(x, x[0])


def test_only_what_is_needed(device: str) -> None:
    x, w = torch.randn(3, 8, device=device), torch.randn(8, device=device, requires_grad=True)
    rms_norm(x, w).sum().backward()
    assert x.grad is None and w.grad is not None
    r = torch.randn(3, 8, device=device, requires_grad=True)
    add_rms_norm(x, r, w.detach())[0].sum().backward()
    assert x.grad is None and r.grad is not None


def test_opcheck(device: str) -> None:
    torch.manual_seed(5)
    x, w = torch.randn(4, 12, device=device), torch.randn(12, device=device)
    torch.library.opcheck(rms_norm_op.overload, (x.clone().requires_grad_(), w.clone().requires_grad_(), 12, 1e-6))
    torch.library.opcheck(rms_norm_op.overload, (x.reshape(12, 4).t().bfloat16(), None, 12, 1e-6))
    torch.library.opcheck(
        add_rms_norm_op.overload, (x.clone().requires_grad_(), x.clone().requires_grad_(), w.clone().requires_grad_(), 12, 1e-6)
    )
    rstd = rms_norm_op(x, w, 12, 1e-6)[1]
    for grad_sum, needs in ((x, [True, True]), (None, [False, True]), (None, [True, False])):
        torch.library.opcheck(rms_norm_backward_op.overload, (x, x, rstd, w, grad_sum, needs, 12))


def test_deterministic(device: str) -> None:
    x, g = torch.randn(2, 40, 300, device=device)
    w = torch.randn(300, device=device)
    runs = [gradients(lambda a, b: rms_norm(a, b), g, x, w) for _ in range(2)]
    assert all(torch.equal(one, two) for one, two in zip(*runs, strict=True))


@pytest.mark.parametrize("candidate", range(len(shared.FORWARD_SPACE)))
def test_every_configuration(device: str, candidate: int) -> None:
    torch.manual_seed(6)
    x, g = torch.randn(2, 11, 700, device=device)
    w = torch.randn(700, device=device)
    with forced("rms_norm", shared.FORWARD_SPACE[candidate]), forced("rms_norm_backward", shared.BACKWARD_SPACE[candidate]):
        check(rms_norm(x, w, 1e-6), plain(x, w), plain(x.double(), w.double()))
        mine = gradients(lambda a, b: rms_norm(a, b, 1e-6), g, x, w)
    exact = gradients(plain, g.double(), x.double(), w.double())
    for one, two, right in zip(mine, gradients(plain, g, x, w), exact, strict=True):
        check(one, two, right)


def test_stand_in(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replace, "_everywhere", True)
    x, w = torch.randn(3, 8, device=device), torch.randn(8, device=device)
    for function in (F.rms_norm, torch.rms_norm):
        stand_in = replace.REPLACEMENTS[function][1]
        for args, kwargs in [(((8,),), {}), (([8], w), {}), (((8,), w, 1e-3), {}), (((3, 8),), {}), (((8,),), {"eps": 1e-2})]:
            assert torch.allclose(stand_in(x, *args, **kwargs), function(x, *args, **kwargs), atol=1e-5)
        assert stand_in(x, (7,)) is NotImplemented
        assert stand_in(x, (8,), w.double()) is NotImplemented
        assert stand_in(x.half(), (8,)) is NotImplemented
        with torch.autocast(device, dtype=torch.bfloat16):
            assert stand_in(x, (8,)) is NotImplemented


def test_compiled_stand_in(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replace, "_everywhere", True)
    stand_in = replace.REPLACEMENTS[F.rms_norm][1]
    x, w = torch.randn(4, 16, device=device), torch.randn(16, device=device)
    out = torch.compile(lambda t, u: stand_in(t * 2, (16,), u, 1e-6), backend="aot_eager", fullgraph=True)(x, w)
    assert torch.allclose(out, plain(x * 2, w), atol=1e-5)


def test_compiled_graph(device: str) -> None:
    x, w = torch.randn(4, 16, device=device, requires_grad=True), torch.randn(16, device=device, requires_grad=True)
    y, s = torch.compile(lambda t, u: add_rms_norm(t * 2, t, u, 1e-6), backend="aot_eager", fullgraph=True)(x, w)
    (y.square().sum() + s.sum()).backward()
    x2, w2 = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    y, s = plain_add(x2 * 2, x2, w2)
    (y.square().sum() + s.sum()).backward()
    assert torch.allclose(x.grad, x2.grad, atol=1e-4) and torch.allclose(w.grad, w2.grad, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_than_two_to_the_31_elements() -> None:
    x = torch.empty(2**31 // 4096 + 8, 4096, device="cuda", dtype=torch.bfloat16).normal_()
    out = rms_norm(x, None, 1e-6)
    assert torch.equal(out[-4:], rms_norm(x[-4:].clone(), None, 1e-6))
