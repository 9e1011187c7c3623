"""add and mul against float64, in every layout, dtype and kind of operand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ridgeline.kernel import pointwise
from ridgeline.kernel.tuning import forced
from tests.kernel.support import FLOATS, check, layouts

OPS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "add": (pointwise.add, torch.add),
    "mul": (pointwise.mul, torch.mul),
}
WHOLE = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
SHAPE = (3, 5, 24)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def compared(name: str, x: torch.Tensor, y: Any) -> None:
    ours, plain = OPS[name]
    exact = plain(x.double(), y.double() if isinstance(y, torch.Tensor) else y)
    check(ours(x, y), plain(x, y), exact)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", OPS)
def test_every_pair_of_layouts(name: str, dtype: torch.dtype, device: str) -> None:
    for (_, x), (_, y) in itertools.product(layouts(SHAPE, dtype, device), layouts(SHAPE, dtype, device)):
        compared(name, x, y)


@pytest.mark.parametrize("shapes", [((4, 1, 6), (5, 1)), ((7,), (3, 7)), ((3, 7), (7,)), ((2, 1, 3, 1), (1, 4, 1, 5)), ((), (4, 3)),
                                    ((4, 3), ()), ((), ()), ((2, 3, 4, 5), (1, 3, 1, 1)), ((70, 1), (1, 90))])  # fmt: skip
@pytest.mark.parametrize("name", OPS)
def test_broadcasting(name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]], device: str) -> None:
    x, y = (torch.randn(shape, device=device) for shape in shapes)
    compared(name, x, y)
    compared(name, x.bfloat16(), y.bfloat16())


@pytest.mark.parametrize("name", OPS)
def test_six_dimensions_that_do_not_merge_and_dense_ones_that_do(name: str, device: str) -> None:
    x = torch.randn(2, 3, 2, 3, 2, 3, device=device)
    compared(name, x.permute(1, 0, 3, 2, 5, 4), torch.randn(3, 2, 3, 2, 3, 2, device=device))
    compared(name, x.permute(1, 0, 3, 2, 5, 4), torch.randn((), device=device, dtype=torch.float64))
    dense = x.permute(3, 1, 5, 0, 2, 4)
    out = OPS[name][0](dense, dense)
    assert out.stride() == dense.stride()
    compared(name, dense, dense)


@pytest.mark.parametrize("name", OPS)
def test_whole_numbers_and_promotion(name: str, device: str) -> None:
    tensors = [torch.randint(0, 2 if dtype is torch.bool else 9, (4, 5), device=device).to(dtype) for dtype in WHOLE]
    tensors += [torch.randn(4, 5, device=device).to(dtype) for dtype in (*FLOATS, torch.float64)]
    tensors += [torch.tensor(3, device=device), torch.tensor(2.5, device=device, dtype=torch.float64)]
    for x, y in itertools.product(tensors, tensors):
        ours, plain = OPS[name][0](x, y), OPS[name][1](x, y)
        assert ours.dtype is plain.dtype, (x.dtype, y.dtype)
        if ours.dtype.is_floating_point:
            check(ours, plain, OPS[name][1](x.double(), y.double()))
        else:
            assert torch.equal(ours, plain), (x.dtype, y.dtype)


@pytest.mark.parametrize("number", [2, 1, 16, -3, 2.5, True, 0])
@pytest.mark.parametrize("name", OPS)
def test_numbers(name: str, number: float, device: str) -> None:
    for dtype in (*FLOATS, *WHOLE, torch.float64):
        x = (3 * torch.randn(4, 6, device=device)).to(dtype)
        for view in (x, x.t(), x[:, 1:4]):
            ours, plain = OPS[name][0](view, number), OPS[name][1](view, number)
            assert ours.dtype is plain.dtype
            assert torch.allclose(ours, plain, rtol=2**-7), (dtype, number)


@pytest.mark.parametrize("name", OPS)
def test_empty_and_complex(name: str, device: str) -> None:
    ours, plain = OPS[name]
    for shapes in (((0,), (0,)), ((3, 0), (1,)), ((0, 4), (4,)), ((2, 0, 1), (1, 0, 5))):
        x, y = (torch.randn(shape, device=device) for shape in shapes)
        assert ours(x, y).shape == plain(x, y).shape
    z = torch.randn(3, 4, dtype=torch.complex64, device=device)
    assert torch.allclose(ours(z, z), plain(z, z)) and torch.allclose(ours(z, 2.5), plain(z, 2.5))
    with pytest.raises(RuntimeError, match="broadcast"):
        ours(torch.randn(3, device=device), torch.randn(4, device=device))


@pytest.mark.parametrize("name", OPS)
def test_out(name: str, device: str) -> None:
    ours, plain = OPS[name]
    x, y = torch.randn(6, 4, device=device), torch.randn(4, device=device)
    for out in (torch.empty(6, 4, device=device), torch.empty(4, 6, device=device).t(), torch.empty(6, 9, device=device)[:, ::2][:, :4],
                torch.empty(0, device=device), torch.empty(6, 4, device=device, dtype=torch.float64)):  # fmt: skip
        for other in (y, x.clone(), 2.5):
            assert ours(x, other, out=out) is out
            assert torch.allclose(out.double(), plain(x, other).double())
    line = torch.arange(8.0, device=device)
    ours(line[:-1], 1.5, out=line[1:])  # overlaps its input
    assert torch.equal(line[1:], plain(torch.arange(7.0, device=device), 1.5))
    same = x.clone()
    assert torch.equal(ours(same, same, out=same), plain(x, x))
    for bad, message in ((torch.empty(6, 5, device=device), "shape"), (torch.empty(6, 4, device=device, dtype=torch.int32), "stored"),
                         (torch.empty(6, 1, device=device).expand(6, 4), "expanded")):  # fmt: skip
        with pytest.raises(RuntimeError, match=message):
            ours(x, y, out=bad)
    with pytest.raises(RuntimeError, match="no gradient"):
        ours(x.requires_grad_(), y, out=torch.empty(6, 4, device=device))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", OPS)
def test_gradients_in_half_types(name: str, dtype: torch.dtype, device: str) -> None:
    x, y = torch.randn(6, 5, 4, device=device).to(dtype), torch.randn(5, 1, device=device).to(dtype)
    grads = []
    for function, kind in ((OPS[name][0], dtype), (OPS[name][1], dtype), (OPS[name][1], torch.float64)):
        leaves = [x.detach().to(kind).requires_grad_(), y.detach().to(kind).requires_grad_()]
        out = function(*leaves)
        torch.manual_seed(1)
        out.backward(torch.randn(out.shape, device=device).to(dtype).to(kind))
        grads.append([leaf.grad for leaf in leaves])
    for ours, plain, exact in zip(*grads, strict=True):
        check(ours, plain, exact)


@pytest.mark.parametrize("name", OPS)
def test_gradients(name: str, device: str) -> None:
    ours = OPS[name][0]
    x = torch.randn(3, 4, device=device, dtype=torch.float64, requires_grad=True)
    y = torch.randn(4, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ours, (x, y))
    assert torch.autograd.gradcheck(ours, (x, y.detach()))
    assert torch.autograd.gradcheck(lambda a: ours(a, 2.5), (x,))
    mixed = torch.randn(3, 4, device=device, dtype=torch.bfloat16, requires_grad=True)
    ours(mixed, torch.randn(3, 4, device=device)).sum().backward()
    assert mixed.grad is not None and mixed.grad.dtype is torch.bfloat16


@pytest.mark.parametrize("name", OPS)
def test_registration(name: str, device: str) -> None:
    tensor, scalar, tensor_out, scalar_out = (
        getattr(torch.ops.ridgeline, name + end).default for end in ("", "_scalar", "_out", "_scalar_out")
    )
    x = torch.randn(4, 3, device=device, requires_grad=True)
    for y in (torch.randn(4, 3, device=device), torch.randn(3, 4, device=device, requires_grad=True).t(), torch.randn(3, device=device)):
        torch.library.opcheck(tensor, (x, y))
    torch.library.opcheck(tensor, (torch.randn(2, 6, device=device)[:, ::2], torch.randn(4, 1, 1, device=device)))
    torch.library.opcheck(scalar, (x, 2.5))
    plain = x.detach()
    torch.library.opcheck(tensor_out, (plain, plain, torch.empty_like(plain)))
    torch.library.opcheck(scalar_out, (plain, 2.5, torch.empty_like(plain)))


@pytest.mark.parametrize("name", OPS)
def test_the_same_on_every_run_and_with_every_configuration(name: str, device: str) -> None:
    x, y = torch.randn(40, 50, device=device), torch.randn(40, 50, device=device)
    first = OPS[name][0](x, y)
    assert torch.equal(first, OPS[name][0](x, y))
    for chosen in pointwise.LINES:
        with forced(name, chosen):
            assert torch.equal(first, OPS[name][0](x, y))
    for tile in (256, 4096):
        with forced("strided", {"TILE": tile, "num_warps": 4}):
            assert torch.equal(OPS[name][1](x, y[0]), OPS[name][0](x, y[0]))
            assert torch.equal(OPS[name][1](x[:, :40], y[:, :40].t()), OPS[name][0](x[:, :40], y[:, :40].t()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_than_two_to_the_31_elements() -> None:
    x = torch.ones(2**31 + 40, dtype=torch.int8, device="cuda")
    out = pointwise.add(x, x)
    assert int(out[-1]) == 2 and int(out.view(-1)[2**31 - 1]) == 2 and int(out.sum(dtype=torch.int64)) == 2 * x.numel()
    row = torch.ones(2**16, 2**15 + 1, dtype=torch.int8, device="cuda")
    assert int(pointwise.add(row, row[0]).sum(dtype=torch.int64)) == 2 * row.numel()


@pytest.mark.parametrize("name", OPS)
def test_out_that_overlaps_an_operand_over_several_programs(name: str, device: str) -> None:
    """What one program writes is what a later one would read: one place further on, and transposed."""
    ours, plain = OPS[name]
    other, square = torch.randn(2100, device=device), torch.randn(70, 70, device=device)
    for first in (True, False):
        line = torch.randn(2101, device=device)
        expected = plain(line[:-1], other)
        ours(line[:-1] if first else other, other if first else line[:-1], out=line[1:])
        assert torch.equal(line[1:], expected)
        own = square.clone()
        ours(own if first else square, square if first else own, out=own.t())
        assert torch.equal(own.t(), plain(square, square))


@pytest.mark.parametrize("name", OPS)
def test_whole_numbers_that_32_bits_do_not_hold(name: str, device: str) -> None:
    ours, plain = OPS[name]
    x, y = torch.tensor([[2**40 + 3, -(2**62), 2**31], [2**53 + 1, -5, 2**63 - 1]], device=device), torch.tensor([2, 3, 1], device=device)
    for given in ((x, y), (x, y.expand_as(x).contiguous()), (x, 3), (x.t(), 1), (y, 2**31 + 7)):
        assert torch.equal(ours(*given), plain(*given))


def test_more_elements_than_32_bits_count() -> None:
    """Of tensors without memory: the plan says how elements are numbered."""
    for size, long in ((2**31 - 2**17, False), (2**31 - 1, True), (2**32, True)):
        x = torch.empty(size, dtype=torch.int8, device="meta")
        assert pointwise.flat_plan("add", None, x, {}).constants["LONG"] is long
