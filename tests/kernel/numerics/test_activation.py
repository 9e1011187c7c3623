"""Activations and their gradients against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from ridgeline.kernel import activation, replace
from ridgeline.kernel.tuning import forced
from tests.kernel.support import FLOATS, check, layouts

OURS: dict[str, Callable[..., torch.Tensor]] = {
    "relu": activation.relu,
    "silu": activation.silu,
    "gelu": activation.gelu,
    "gelu_tanh": lambda x, out=None: activation.gelu(x, "tanh", out),
    "sigmoid": activation.sigmoid,
    "tanh": activation.tanh,
}
PLAIN = activation.ACTIVATIONS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of the overflows the formulas are made to survive


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", OURS)
def test_layouts_and_gradients(name: str, dtype: torch.dtype, device: str) -> None:
    for _, x in layouts((3, 5, 24), dtype, device):
        results = []
        for function, kind in ((OURS[name], dtype), (PLAIN[name], dtype), (PLAIN[name], torch.float64)):
            leaf = x.detach().to(kind).requires_grad_()
            out = function(leaf)
            torch.manual_seed(1)
            out.backward(torch.randn(out.shape, device=device).to(dtype).to(kind))
            results.append((out.detach(), leaf.grad))
        for ours, plain, exact in zip(*results, strict=True):
            check(ours, plain, exact)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("scale", [1e-4, 8.0])
def test_small_and_large_arguments(name: str, dtype: torch.dtype, scale: float, device: str) -> None:
    x = (torch.linspace(-scale, scale, 2001, device=device)).to(dtype)
    check(OURS[name](x), PLAIN[name](x), PLAIN[name](x.double()))
    grad = torch.ones_like(x)
    ours = getattr(torch.ops.ridgeline, f"{name}_backward")(grad, x)
    slope = [torch.autograd.grad(PLAIN[name](leaf).sum(), leaf)[0] for leaf in (x.clone().requires_grad_(), x.double().requires_grad_())]
    check(ours, *slope)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gelu_of_half_types_is_right_to_the_last_bit_or_its_neighbour(dtype: torch.dtype, device: str) -> None:
    x = torch.linspace(-4.0, 4.0, 4001, device=device).to(dtype)
    exact = (x.double() * torch.special.ndtr(x.double())).to(dtype)
    steps = (activation.gelu(x).view(torch.int16).int() - exact.view(torch.int16).int()).abs()
    assert int(steps.max()) <= 1
    if x.is_cuda or dtype is torch.float16:  # the interpreter truncates to bfloat16
        assert float((steps > 0).double().mean()) < 0.01


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", OURS)
def test_infinities_and_nan(name: str, dtype: torch.dtype, device: str) -> None:
    ends = torch.tensor([float("inf"), 60000.0, float("nan")], device=device, dtype=dtype)
    out = OURS[name](ends)
    assert torch.equal(out[:2], torch.ones_like(out[:2]) if name in ("sigmoid", "tanh") else ends[:2]) and bool(out[2].isnan())
    low = torch.tensor([-60000.0, -200.0], device=device, dtype=dtype)
    assert torch.equal(OURS[name](low), torch.full_like(low, -1.0) if name == "tanh" else torch.zeros_like(low))


@pytest.mark.parametrize("name", OURS)
def test_whole_numbers_empty_and_zero_dimensions(name: str, device: str) -> None:
    for shape in ((0,), (3, 0), ()):
        x = torch.randn(shape, device=device)
        assert torch.allclose(OURS[name](x), PLAIN[name](x), atol=1e-6)
    for dtype in (torch.int32, torch.int64, torch.uint8, torch.int8):
        x = torch.randint(0, 5, (3, 4), device=device).to(dtype)
        try:
            plain = PLAIN[name](x)
        except (RuntimeError, NotImplementedError) as error:
            with pytest.raises(type(error)):
                OURS[name](x)
        else:
            assert OURS[name](x).dtype is plain.dtype and torch.allclose(OURS[name](x), plain)


@pytest.mark.parametrize("name", OURS)
def test_out(name: str, device: str) -> None:
    x = torch.randn(6, 4, device=device)
    for out in (torch.empty_like(x), torch.empty(4, 6, device=device).t(), torch.empty(0, device=device), x.clone()):
        assert OURS[name](x, out=out) is out
        assert torch.allclose(out, PLAIN[name](x), atol=1e-6)
        OURS[name](x.t(), out=out.t())
        assert torch.allclose(out, PLAIN[name](x), atol=1e-6)
    with pytest.raises(RuntimeError, match="stored"):
        OURS[name](x, out=torch.empty(6, 4, device=device, dtype=torch.int32))
    wide = torch.empty(6, 4, device=device, dtype=torch.float64)
    assert torch.allclose(OURS[name](x, out=wide), PLAIN[name](x).double(), atol=1e-6)
    line = torch.randn(9, device=device)
    expected = PLAIN[name](line[:-1])
    OURS[name](line[:-1], out=line[1:])
    assert torch.allclose(line[1:], expected, atol=1e-6)


@pytest.mark.parametrize("name", OURS)
def test_float64_and_registration(name: str, device: str) -> None:
    x = torch.randn(4, 3, device=device, dtype=torch.float64)
    x = (x + 0.1 * x.sign()).requires_grad_()  # away from the corner of relu
    assert torch.autograd.gradcheck(OURS[name], (x,))
    op = getattr(torch.ops.ridgeline, name).default
    for y in (x.detach().float().requires_grad_(), x.detach().float().t().requires_grad_(), torch.randn(2, 6, device=device)[:, ::2], x):
        torch.library.opcheck(op, (y,))
        plain = y.detach()
        torch.library.opcheck(getattr(torch.ops.ridgeline, f"{name}_backward").default, (plain, plain))
    plain = x.detach().float()
    torch.library.opcheck(getattr(torch.ops.ridgeline, f"{name}_out").default, (plain, torch.empty_like(plain)))


@pytest.mark.parametrize("name", OURS)
def test_the_same_on_every_run_and_with_every_configuration(name: str, device: str) -> None:
    x = torch.randn(40, 50, device=device)
    first = OURS[name](x)
    assert torch.equal(first, OURS[name](x))
    with forced(name, {"BLOCK": 512, "num_warps": 4}):
        assert torch.equal(first, OURS[name](x))


def test_stand_ins(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, device=device)
    gelu: Any = replace.REPLACEMENTS[functional.gelu][1]
    silu: Any = replace.REPLACEMENTS[functional.silu][1]
    monkeypatch.setattr(replace, "_wins", {})
    assert gelu(x) is NotImplemented and silu(x) is NotImplemented
    with replace.everywhere():
        for approximate in ("none", "tanh"):
            assert torch.allclose(gelu(x, approximate=approximate), functional.gelu(x, approximate=approximate), atol=1e-6)
        assert torch.allclose(silu(x), functional.silu(x), atol=1e-6)
        assert silu(x, inplace=True) is NotImplemented and gelu(x, "other") is NotImplemented
    with pytest.raises(RuntimeError, match="approximate"):
        activation.gelu(x, "other")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_than_two_to_the_31_elements() -> None:
    x = torch.full((2**31 + 40,), -1, dtype=torch.int8, device="cuda")
    x[-1] = 5
    out = activation.relu(x)
    assert int(out[-1]) == 5 and int(out[2**31 - 2 : -1].abs().max()) == 0


@pytest.mark.parametrize("name", OURS)
def test_out_one_place_further_on_over_several_programs(name: str, device: str) -> None:
    """What one program writes is what the next one would read."""
    line = torch.randn(2100, device=device)
    expected = OURS[name](line[:-1].clone())
    OURS[name](line[:-1], out=line[1:])
    assert torch.equal(line[1:], expected)


def test_relu_of_large_whole_numbers_is_exact(device: str) -> None:
    """More digits than a float32 has; a uint8 has no sign."""
    for dtype, numbers in ((torch.int32, (2**24 + 1, -(2**31), 2**31 - 1)), (torch.int64, (2**40 + 1, -(2**63), 2**63 - 1)),
                           (torch.uint8, (0, 127, 255)), (torch.int16, (32767, -32768, 3))):  # fmt: skip
        x = torch.tensor(numbers, device=device, dtype=dtype)
        assert torch.equal(activation.relu(x), x.clamp(min=0))


@pytest.mark.parametrize("default", [torch.float64, torch.float16])
def test_whole_numbers_become_the_default_dtype(default: torch.dtype, device: str) -> None:
    x = torch.tensor([-3, 0, 1, 2], device=device)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        for name in ("sigmoid", "tanh"):
            ours = OURS[name](x)
            assert ours.dtype is default and torch.allclose(ours.double(), PLAIN[name](x.double()), atol=torch.finfo(default).eps)
    finally:
        torch.set_default_dtype(before)


def test_the_slope_of_relu_at_zero_is_zero(device: str) -> None:
    x = torch.tensor([-1.0, -0.0, 0.0, 1.0], device=device, requires_grad=True)
    activation.relu(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gelu_of_half_types_far_below_zero(dtype: torch.dtype, device: str) -> None:
    """Down to where nothing is left; its slope too. The largest results say nothing of these."""
    x = torch.linspace(-14.0, -4.0, 501, device=device).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    (exact := wide * torch.special.ndtr(wide)).sum().backward()
    (ours := activation.gelu(x)).sum().backward()
    assert x.grad is not None and wide.grad is not None
    for mine, true in ((ours.detach(), exact.detach()), (x.grad, wide.grad)):
        assert torch.allclose(mine.double(), true, rtol=4 * torch.finfo(dtype).eps, atol=2.0**-24)
