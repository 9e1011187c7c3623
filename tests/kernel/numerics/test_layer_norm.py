"""Layer normalisation against float64: every dtype, layout and row length, gradients, stand-ins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from ridgeline.core.errors import OptionError
from ridgeline.kernel import layer_norm as module
from ridgeline.kernel import replace
from ridgeline.kernel import rms_norm as rms
from ridgeline.kernel.layer_norm import layer_norm, layer_norm_backward_op, layer_norm_op
from ridgeline.kernel.tuning import forced
from tests.kernel.support import FLOATS, check, layouts


def gradients(function: Any, g: torch.Tensor, *tensors: torch.Tensor | None) -> list[torch.Tensor]:
    """Gradients of every tensor given; function(x, weight, bias)."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    function(*leaves).backward(g)
    return [leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None]


def shorten(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The kernels for long rows, for rows the interpreter can afford; a GPU takes real ones."""
    if device == "cpu":
        for name, value in {"IN_REGISTERS": 16, "IN_REGISTERS_BACKWARD": 16, "_CHUNK": 64, "_plans": {}}.items():
            monkeypatch.setattr(module, name, value)


def double(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.double()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(7, 40), (3, 5, 33), (2, 3, 1000)])
def test_layouts(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    w, b = torch.randn(2, shape[-1], device=device).to(dtype)
    for _name, x in layouts(shape, dtype, device):
        out = layer_norm(x, shape[-1:], w, b)
        check(out, F.layer_norm(x, shape[-1:], w, b), F.layer_norm(x.double(), shape[-1:], w.double(), b.double()))
        assert out.is_contiguous()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("with_weight,with_bias", [(True, True), (True, False), (False, False), (False, True)])
@pytest.mark.parametrize("shape", [(9, 64), (37, 24), (2, 2, 280), (5, 1)])
def test_gradients(device: str, dtype: torch.dtype, shape: tuple[int, ...], with_weight: bool, with_bias: bool) -> None:
    compare(device, dtype, shape, with_weight, with_bias)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("affine,rows", [(True, 11), (False, 3)])
def test_long_rows(device: str, dtype: torch.dtype, affine: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, device)
    compare(device, dtype, (rows, 200 if device == "cpu" else 17000), affine, affine)


def compare(device: str, dtype: torch.dtype, shape: tuple[int, ...], with_weight: bool, with_bias: bool) -> None:
    """Result and gradients against float64."""
    torch.manual_seed(1)
    x = (torch.randn(shape, device=device) * 2 + 0.5).to(dtype)
    w = torch.randn(shape[-1], device=device).to(dtype) if with_weight else None
    b = torch.randn(shape[-1], device=device).to(dtype) if with_bias else None
    g = torch.randn(shape, device=device).to(dtype)

    def ours(*a: Any) -> torch.Tensor:
        return layer_norm(a[0], shape[-1:], a[1], a[2])

    def plain(*a: Any) -> torch.Tensor:
        return F.layer_norm(a[0], shape[-1:], a[1], a[2])

    if shape[-1] > 1:  # the input of a single column is its own mean: y is the bias, and torch's rounding noise times rstd
        check(ours(x, w, b), plain(x, w, b), plain(x.double(), double(w), double(b)))
    exact = gradients(plain, g.double(), x.double(), double(w), double(b))
    for mine, theirs, right in zip(gradients(ours, g, x, w, b), gradients(plain, g, x, w, b), exact, strict=True):
        if shape[-1] > 1:
            check(mine, theirs, right)
        else:
            assert torch.allclose(mine.double(), right, rtol=0.02, atol=1e-2)


def test_mean_far_from_zero(device: str) -> None:
    """Squares about the mean of every chunk: no cancellation in the variance, also where one value is far from all others."""
    torch.manual_seed(2)
    far = torch.randn(4, 500, device=device) + 4096
    outlier = torch.randn(4, 512, device=device)
    outlier[:, 0] = 1e4
    for x in (far, outlier):
        cols = x.shape[-1:]
        check(layer_norm(x, cols), F.layer_norm(x, cols), F.layer_norm(x.double(), cols))


@pytest.mark.parametrize("shape,normal", [((3, 4, 5), (4, 5)), ((2, 3, 2, 4), (3, 2, 4)), ((6,), (6,))])
def test_several_dims(device: str, shape: tuple[int, ...], normal: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    x, w, b = torch.randn(shape, device=device), torch.randn(normal, device=device), torch.randn(normal, device=device)
    g = torch.randn(shape, device=device)
    mine = gradients(lambda *a: layer_norm(a[0], normal, a[1], a[2]), g, x, w, b)
    theirs = gradients(lambda *a: F.layer_norm(a[0], normal, a[1], a[2]), g, x, w, b)
    assert all(torch.allclose(m, t, atol=1e-5) for m, t in zip(mine, theirs, strict=True))
    assert torch.allclose(layer_norm(x, normal, w.t().contiguous().t() if w.dim() == 2 else w, b), F.layer_norm(x, normal, w, b), atol=1e-5)


@pytest.mark.parametrize("long", [False, True])
def test_gradcheck(device: str, long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (4, 90 if long else 6)
    if long:
        shorten(monkeypatch, device)
    torch.manual_seed(4)
    x = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
    w = torch.randn(shape[1], dtype=torch.float64, device=device, requires_grad=True)
    b = torch.randn(shape[1], dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: layer_norm(a[0], (shape[1],), a[1], a[2]), (x, w, b), fast_mode=True)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0,), (2, 0, 4)])
def test_empty(device: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    w = torch.randn(shape[-1], device=device, requires_grad=True)
    out = layer_norm(x, shape[-1:], w, None)
    assert out.shape == x.shape
    out.sum().backward()
    assert x.grad is not None and w.grad is not None
    assert x.grad.shape == x.shape and torch.equal(w.grad, torch.zeros_like(w))


def test_only_what_is_needed(device: str) -> None:
    x, w = torch.randn(3, 8, device=device), torch.randn(8, device=device, requires_grad=True)
    layer_norm(x, (8,), w, None).sum().backward()
    assert x.grad is None and w.grad is not None
    expected = w.detach().clone().requires_grad_()
    F.layer_norm(x, (8,), expected, None).sum().backward()
    assert torch.allclose(w.grad, expected.grad, atol=1e-5)


def test_opcheck(device: str) -> None:
    torch.manual_seed(5)
    x, w, b = torch.randn(4, 12, device=device), torch.randn(12, device=device), torch.randn(12, device=device)
    torch.library.opcheck(
        layer_norm_op.overload, (x.clone().requires_grad_(), w.clone().requires_grad_(), b.clone().requires_grad_(), 12, 1e-5)
    )
    torch.library.opcheck(layer_norm_op.overload, (x.reshape(12, 4).t().bfloat16(), None, None, 12, 1e-5))
    mean, rstd = layer_norm_op(x, w, b, 12, 1e-5)[1:]
    for needs in ([True, True, True], [False, True, False]):
        torch.library.opcheck(layer_norm_backward_op.overload, (x, x, mean, rstd, w, b, needs, 12))
    torch.library.opcheck(layer_norm_backward_op.overload, (x, x, mean, rstd, None, None, [True, False, False], 12))


def test_deterministic(device: str) -> None:
    x, g = torch.randn(2, 40, 300, device=device)
    w, b = torch.randn(2, 300, device=device)
    runs = [gradients(lambda *a: layer_norm(a[0], (300,), a[1], a[2]), g, x, w, b) for _ in range(2)]
    assert all(torch.equal(one, two) for one, two in zip(*runs, strict=True))


@pytest.mark.parametrize("candidate", range(len(module.FORWARD_SPACE)))
def test_every_configuration(device: str, candidate: int) -> None:
    torch.manual_seed(6)
    x, g = torch.randn(2, 11, 700, device=device)
    w, b = torch.randn(2, 700, device=device)

    def ours(*a: Any) -> torch.Tensor:
        return layer_norm(a[0], (700,), a[1], a[2])

    def plain(*a: Any) -> torch.Tensor:
        return F.layer_norm(a[0], (700,), a[1], a[2])

    with forced("layer_norm", module.FORWARD_SPACE[candidate]), forced("layer_norm_backward", module.BACKWARD_SPACE[candidate]):
        check(ours(x, w, b), plain(x, w, b), plain(x.double(), w.double(), b.double()))
        mine = gradients(ours, g, x, w, b)
    exact = gradients(plain, g.double(), x.double(), w.double(), b.double())
    for one, two, right in zip(mine, gradients(plain, g, x, w, b), exact, strict=True):
        check(one, two, right)


def test_stand_in(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replace, "_everywhere", True)
    x, w, b = torch.randn(3, 8, device=device), torch.randn(8, device=device), torch.randn(8, device=device)
    for function in (F.layer_norm, torch.layer_norm):
        stand_in = replace.REPLACEMENTS[function][1]
        for args, kwargs in [(((8,),), {}), (([8], w), {}), (((8,), w, b, 1e-3), {}), (((3, 8),), {}), (((8,),), {"bias": b})]:
            assert torch.allclose(stand_in(x, *args, **kwargs), function(x, *args, **kwargs), atol=1e-5)
        assert stand_in(x, (7,)) is NotImplemented
        assert stand_in(x, (8,), w.double()) is NotImplemented
        assert stand_in(x, (8,), w[:4]) is NotImplemented
        assert stand_in(x.long(), (8,)) is NotImplemented
        with torch.autocast(device, dtype=torch.bfloat16):
            assert stand_in(x, (8,)) is NotImplemented
    assert torch.allclose(
        torch.layer_norm(x, (8,), w, b, 1e-5, False), replace.REPLACEMENTS[torch.layer_norm][1](x, (8,), w, b, 1e-5, False), atol=1e-5
    )
    with pytest.raises(OptionError):
        layer_norm(x, (7,))


def test_compiled_graph(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replace, "_everywhere", True)
    stand_in = replace.REPLACEMENTS[F.layer_norm][1]
    x, w = torch.randn(4, 16, device=device, requires_grad=True), torch.randn(16, device=device, requires_grad=True)
    out = torch.compile(lambda t, u: stand_in(t * 2, (16,), u), backend="aot_eager", fullgraph=True)(x, w)
    out.square().sum().backward()
    x2, w2 = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    F.layer_norm(x2 * 2, (16,), w2).square().sum().backward()
    assert torch.allclose(x.grad, x2.grad, atol=1e-4) and torch.allclose(w.grad, w2.grad, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_than_two_to_the_31_elements() -> None:
    x = torch.empty(2**31 // 4096 + 8, 4096, device="cuda", dtype=torch.bfloat16).normal_()
    out = layer_norm(x, (4096,))
    assert torch.equal(out[-4:], layer_norm(x[-4:].clone(), (4096,)))


def test_a_plan_belongs_to_one_dtype(device: str) -> None:
    """float64 after float32 of the same shape is still computed in float64, forward and backward."""
    tensors = [torch.randn(size, device=device, dtype=torch.float64) for size in ((5, 37), (37,), (37,))]
    g = torch.randn(5, 37, device=device, dtype=torch.float64)
    exact = [F.layer_norm(tensors[0], (37,), *tensors[1:]), *gradients(lambda x, w, b: F.layer_norm(x, (37,), w, b), g, *tensors)]
    for dtype, most in ((torch.float32, 1e-4), (torch.float64, 1e-12)):
        cast = [t.to(dtype) for t in tensors]
        found = [layer_norm(cast[0], (37,), *cast[1:]), *gradients(lambda x, w, b: layer_norm(x, (37,), w, b), g.to(dtype), *cast)]
        for mine, true in zip(found, exact, strict=True):
            assert mine.dtype == dtype and float((mine.double() - true).abs().max()) < most


def test_the_reference_lays_out_its_result_as_the_kernel_does(device: str) -> None:
    x = torch.randn(5, 3, device=device).t()
    for reference, fake, extra in ((module._reference, module._fake, (None,)), (rms._reference, rms._fake, ())):
        ours, expected = reference(x, None, *extra, 5, 1e-5)[0], fake(x, None, *extra, 5, 1e-5)[0]
        assert ours.stride() == expected.stride() == (5, 1)


def test_parameters_on_another_device() -> None:
    """A GPU's tensors without a GPU: shapes that know their device."""
    with FakeTensorMode():
        x, weight = torch.empty(4, 8, device="cuda"), torch.empty(8, device="cuda")
        away = torch.empty(8)
    with replace.everywhere():
        assert module.replaceable("layer_norm", x, (8,), weight, weight) and module.replaceable("rms_norm", x, (8,), weight)
        for wrong in ((away, None), (weight, away)):
            assert not module.replaceable("layer_norm", x, (8,), *wrong)
            with pytest.raises(OptionError, match="on cpu"):
                layer_norm(x, (8,), *wrong)
        assert not module.replaceable("rms_norm", x, (8,), away)
    with pytest.raises(OptionError, match="on cpu"):
        rms.rms_norm(x, away)
    with pytest.raises(OptionError, match="on cpu"):
        rms.add_rms_norm(x, away.expand(4, 8), weight)
