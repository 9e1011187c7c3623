"""softmax and log_softmax against float64: every dtype, layout and dim, gradients, -inf rows, stand-ins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ridgeline.kernel import replace
from ridgeline.kernel import softmax as module
from ridgeline.kernel.softmax import log_softmax, softmax, softmax_backward_op, softmax_op
from ridgeline.kernel.tuning import forced
from tests.kernel.support import FLOATS, check, layouts

PAIRS = [(softmax, torch.softmax), (log_softmax, torch.log_softmax)]


def grad_of(function: Any, x: torch.Tensor, dim: int, g: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().clone().requires_grad_()
    function(leaf, dim).backward(g)
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("ours,plain", PAIRS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(7, 40), (3, 5, 33), (2, 3, 1000)])
def test_layouts(device: str, dtype: torch.dtype, shape: tuple[int, ...], ours: Any, plain: Any) -> None:
    torch.manual_seed(0)
    for _name, x in layouts(shape, dtype, device):
        out = ours(x)
        check(out, plain(x, -1), plain(x.double(), -1))
        assert out.is_contiguous()


@pytest.mark.parametrize("ours,plain", PAIRS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [0, -2])
def test_any_dim(device: str, dtype: torch.dtype, dim: int, ours: Any, plain: Any) -> None:
    torch.manual_seed(1)
    x = (torch.randn(3, 9, 70, device=device) * 3).to(dtype)
    g = torch.randn(3, 9, 70, device=device).to(dtype)
    check(ours(x, dim), plain(x, dim), plain(x.double(), dim))
    check(grad_of(ours, x, dim, g), grad_of(plain, x, dim, g), grad_of(plain, x.double(), dim, g.double()))


@pytest.mark.parametrize("ours,plain", PAIRS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(9, 64), (4, 1000), (5, 1), (2, 20000)])
def test_gradient(device: str, dtype: torch.dtype, shape: tuple[int, ...], ours: Any, plain: Any) -> None:
    compare(device, dtype, shape, ours, plain)


@pytest.mark.parametrize("ours,plain", PAIRS)
def test_hints_of_large_tensors_change_nothing(device: str, ours: Any, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", 0)
    x = torch.randn(5, 72, device=device)
    module._plans.clear()
    check(ours(x), plain(x, -1), plain(x.double(), -1))
    assert any(plan.constants.get("STREAM") for plan in module._plans.values())
    module._plans.clear()


@pytest.mark.parametrize("ours,plain", PAIRS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_long_rows(device: str, dtype: torch.dtype, ours: Any, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":  # the kernels for long rows, for rows the interpreter can afford
        monkeypatch.setattr(module, "IN_REGISTERS", 16)
        monkeypatch.setattr(module, "_plans", {})
    with forced("softmax_strided", {"TILE": 64, "PER_THREAD": 16, "STAGES": 2} if device == "cpu" else module._STRIDED):
        compare(device, dtype, (3, 200 if device == "cpu" else 40000), ours, plain)


def compare(device: str, dtype: torch.dtype, shape: tuple[int, ...], ours: Any, plain: Any) -> None:
    """Result and gradient along the last dim against float64."""
    torch.manual_seed(2)
    x = (torch.randn(shape, device=device) * 2).to(dtype)
    g = torch.randn(shape, device=device).to(dtype)
    check(ours(x), plain(x, -1), plain(x.double(), -1))
    check(grad_of(ours, x, -1, g), grad_of(plain, x, -1, g), grad_of(plain, x.double(), -1, g.double()))


@pytest.mark.parametrize("ours", [softmax, log_softmax])
def test_gradcheck(device: str, ours: Any) -> None:
    torch.manual_seed(3)
    x = torch.randn(3, 6, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: ours(t, -1), (x,), fast_mode=True)
    assert torch.autograd.gradcheck(lambda t: ours(t, 0), (x,), fast_mode=True)


@pytest.mark.parametrize("ours,plain", PAIRS)
@pytest.mark.parametrize("cols,dtype", [(24, torch.float32), (33000, torch.float32), (24, torch.float16), (700, torch.bfloat16)])
def test_infinities(device: str, cols: int, dtype: torch.dtype, ours: Any, plain: Any) -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.zeros(6, cols, device=device, dtype=dtype)
    x[0] = -inf
    x[1, 3:] = -inf
    x[2, 5] = inf
    x[3, 7] = nan
    x[4, :12] = -inf
    x[5] = torch.finfo(dtype).max
    expected = plain(x, -1)
    rtol = 1e-5 if dtype == torch.float32 else 2e-2  # the interpreter cuts off what a bfloat16 cannot hold
    out = ours(x)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.allclose(out, expected, equal_nan=True, rtol=rtol, atol=1e-7)
    turned = ours(x.t(), 0).t()
    assert torch.allclose(turned, expected, equal_nan=True, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("ours,plain", PAIRS)
@pytest.mark.parametrize("shape,dim", [((), 0), ((), -1), ((0,), 0), ((0, 5), 1), ((5, 0), 1), ((5, 0), 0), ((1, 1), 0), ((4, 1, 1), 0)])
def test_small_shapes(device: str, shape: tuple[int, ...], dim: int, ours: Any, plain: Any) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    out = ours(x, dim)
    assert out.shape == x.shape
    assert torch.allclose(out, plain(x, dim))
    out.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


@pytest.mark.parametrize("ours,plain", PAIRS)
def test_result_dtype(device: str, ours: Any, plain: Any) -> None:
    torch.manual_seed(4)
    x = torch.randn(5, 40, device=device).bfloat16()
    g = torch.randn(5, 40, device=device)
    assert torch.allclose(ours(x, -1, torch.float64), plain(x.double(), -1), rtol=1e-13, atol=1e-13)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        check(ours(x, -1, dtype), plain(x, -1, dtype=dtype), plain(x.double(), -1))
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    exact = x.double().requires_grad_()
    ours(mine, -1, torch.float32).backward(g)
    plain(theirs, -1, dtype=torch.float32).backward(g)
    plain(exact, -1).backward(g.double())
    assert mine.grad is not None and theirs.grad is not None and exact.grad is not None
    check(mine.grad, theirs.grad, exact.grad)
    assert ours(torch.arange(6, device=device).reshape(2, 3), -1, torch.float32).dtype == torch.float32
    with pytest.raises(IndexError):
        ours(x, 2)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("log", [False, True])
def test_opcheck(device: str, log: bool, dim: int) -> None:
    torch.manual_seed(5)
    x = torch.randn(4, 12, device=device)
    for arg in (x.clone().requires_grad_(), x.t(), x.bfloat16()):
        torch.library.opcheck(softmax_op.overload, (arg, dim, log, torch.float32))
    torch.library.opcheck(softmax_backward_op.overload, (x, torch.softmax(x, dim), dim, log, torch.float32))
    torch.library.opcheck(softmax_backward_op.overload, (x.t(), torch.softmax(x.t(), dim), dim, log, torch.bfloat16))


def test_deterministic(device: str) -> None:
    x = torch.randn(16, 3000, device=device)
    assert torch.equal(softmax(x), softmax(x))
    g = torch.randn_like(x)
    assert torch.equal(grad_of(softmax, x, -1, g), grad_of(softmax, x, -1, g))


@pytest.mark.parametrize("candidate", range(len(module._CANDIDATES)))
def test_every_configuration(device: str, candidate: int) -> None:
    """Every candidate of the tuner gives the right answer, with more tiles than programs where it loops."""
    torch.manual_seed(6)
    x, g = torch.randn(2, 11, 700, device=device)
    with forced("softmax", module._CANDIDATES[candidate]), forced("softmax_backward", module._CANDIDATES[candidate]):
        check(softmax(x), torch.softmax(x, -1), torch.softmax(x.double(), -1))
        got = grad_of(softmax, x, -1, g)
    check(got, grad_of(torch.softmax, x, -1, g), grad_of(torch.softmax, x.double(), -1, g.double()))


def test_stand_ins(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replace, "_everywhere", True)
    x = torch.randn(3, 8, device=device)

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        return replace.REPLACEMENTS[function][1](*args, **kwargs)

    for function in (F.softmax, torch.softmax, torch.Tensor.softmax, F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax):
        for args, kwargs in [((1,), {}), ((), {"dim": 0}), ((), {"dim": -1, "dtype": torch.float64})]:
            out, expected = call(function, x, *args, **kwargs), function(x, *args, **kwargs)
            assert out.dtype == expected.dtype and torch.allclose(out, expected, atol=1e-6)
    assert torch.allclose(call(torch.softmax, x, 1, torch.float64), torch.softmax(x, 1, torch.float64))
    assert call(F.softmax, x) is NotImplemented
    assert call(F.softmax, x, 5) is NotImplemented
    assert call(F.softmax, x.long(), 1) is NotImplemented
    assert call(torch.softmax, x, 1, out=torch.empty_like(x)) is NotImplemented
    monkeypatch.setattr(replace, "_everywhere", False)
    monkeypatch.setattr(replace, "_wins", {})
    assert call(torch.softmax, x, 1) is NotImplemented


def test_autocast(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replace, "_everywhere", True)
    x = torch.randn(3, 8, device=device).bfloat16()
    with torch.autocast(device, dtype=torch.bfloat16):
        out = replace.REPLACEMENTS[torch.softmax][1](x, 1)
        expected = torch.softmax(x, 1)
    assert out is NotImplemented or out.dtype == expected.dtype


def test_compiled_graph(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo traces the stand-in, and the dispatcher's fakes agree with it, forward and backward, in one graph."""
    monkeypatch.setattr(replace, "_everywhere", True)
    stand_in = replace.REPLACEMENTS[torch.softmax][1]
    x = torch.randn(4, 16, device=device, requires_grad=True)
    out = torch.compile(lambda t: stand_in(t * 2, 0), backend="aot_eager", fullgraph=True)(x)
    out.square().sum().backward()
    expected = x.detach().clone().requires_grad_()
    torch.softmax(expected * 2, 0).square().sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, expected.grad, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_than_two_to_the_31_elements() -> None:
    x = torch.empty(2**31 // 4096 + 8, 4096, device="cuda", dtype=torch.bfloat16).normal_()
    out = softmax(x)
    assert torch.equal(out[-4:], softmax(x[-4:].clone()))
    assert torch.equal(out[:4], softmax(x[:4].clone()))


@pytest.mark.parametrize("ours,plain", PAIRS)
def test_parts_of_a_row_that_are_nothing_but_infinities(device: str, ours: Any, plain: Any) -> None:
    """As where a mask hides most of a row: chunks of half types are scaled by their own maxima, and two of -inf must not make a nan."""
    x = torch.randn(3, 600, device=device).half()
    x[0, :400], x[1, 200:], x[2, 8:592] = (float("-inf"),) * 3
    out, exact = ours(x), plain(x.double(), -1)
    assert not out.isnan().any()
    seen = ~x.isinf()
    check(out[seen], plain(x, -1)[seen], exact[seen])
    assert torch.equal(out[~seen].double(), exact[~seen])


@pytest.mark.parametrize("dim", [0, -1])
def test_a_plan_belongs_to_one_dtype(device: str, dim: int) -> None:
    """float64 after float32 of the same shape is still computed in float64, forward and backward."""
    x, g = torch.randn(2, 6, 37, device=device, dtype=torch.float64)
    for ours, plain in PAIRS:
        for dtype, most in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
            found = ours(x.to(dtype), dim), grad_of(ours, x.to(dtype), dim, g.to(dtype))
            for mine, exact in zip(found, (plain(x, dim), grad_of(plain, x, dim, g)), strict=True):
                assert mine.dtype == dtype and float((mine.double() - exact).abs().max()) < most


def test_a_dtype_of_whole_numbers_is_left_to_torch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which refuses it."""
    monkeypatch.setattr(replace, "_everywhere", True)
    for function in (torch.softmax, torch.log_softmax, F.softmax):
        assert replace.REPLACEMENTS[function][1](torch.randn(2, 3, device=device), 1, dtype=torch.int64) is NotImplemented


@pytest.mark.parametrize("ours,plain", PAIRS)
def test_tiles_without_a_gap(device: str, ours: Any, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a power of two, as many as fill the tiles: read and written without masks."""
    monkeypatch.setattr(module, "_plans", kept := {})
    for dtype in (torch.float32, torch.float16):
        compare(device, dtype, (32, 64), ours, plain)
    assert [plan.constants["FULL"] for plan in kept.values() if plan.op == "softmax"] == [True, True]
