"""linear_int8 and linear_int4 against the dequantised weight in float64, and what the quantisers lose."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ridgeline.core.errors import RidgelineError
from ridgeline.kernel import weight_only_kernels
from ridgeline.kernel.tuning import forced
from ridgeline.kernel.weight_only import (
    dequantize_int4,
    dequantize_int8,
    linear_int4,
    linear_int8,
    quantize_int4,
    quantize_int4_zero,
    quantize_int8,
)
from tests.kernel.support import FLOATS, check

GEMV = {"dot": 0, "bn": 8, "loads": 1, "threads": 32}
SHORT = {**GEMV, "bn": 2, "span": 512}
DOT = {"dot": 1, "bn": 64, "bk": 128, "warps": 4, "stages": 2, "split": 1}
HALVES = (torch.float16, torch.bfloat16)
WAYS = {"one": DOT, "split": {**DOT, "split": 2}}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def operands(m: int, n: int, k: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(s, device=device).to(dtype) for s in ((m, k), (n, k), (n,)))


def check_int8(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    q, scale = quantize_int8(weight)
    wide = dequantize_int8(q, scale, torch.float64)
    exact = F.linear(x.double(), wide, None if bias is None else bias.double())
    check(linear_int8(x, q, scale, bias), F.linear(x, wide.to(x.dtype), bias), exact)


def check_int4(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: int, zeros: bool) -> None:
    packed, scale, zero = quantize_int4_zero(weight, group) if zeros else (*quantize_int4(weight, group), None)
    wide = dequantize_int4(packed, scale, group, weight.shape[1], zero, torch.float64)
    exact = F.linear(x.double(), wide, None if bias is None else bias.double())
    check(linear_int4(x, packed, scale, group, bias, zero), F.linear(x, wide.to(x.dtype), bias), exact)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", [(32, 512), (35, 300)])
def test_gemv(device: str, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    """Several tiles a program, the last one not full; float32 goes to torch."""
    x, weight, bias = operands(1, *sizes, device, dtype)
    with forced("int8_linear", GEMV), forced("int4_linear", GEMV):
        check_int8(x, weight, bias)
        check_int4(x, weight, bias, 128, zeros=False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", [(1, 64, 256), (20, 70, 300)])
def test_dot(device: str, dtype: torch.dtype, way: str, sizes: tuple[int, int, int]) -> None:
    x, weight, bias = operands(*sizes, device, dtype)
    with forced("int8_linear", WAYS[way]), forced("int4_linear", WAYS[way]):
        check_int8(x, weight, bias)
        check_int4(x, weight, bias, 128, zeros=False)


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 256])
def test_groups_and_zero_points(device: str, group: int, zeros: bool, m: int) -> None:
    x, weight, bias = operands(m, 8, 384, device, torch.float16)
    with forced("int4_linear", GEMV):
        check_int4(x, weight + 0.5, bias, group, zeros)


@pytest.mark.parametrize("k", [1, 5, 12, 130])
@pytest.mark.parametrize("m", [1, 3])
def test_widths_that_are_no_multiple_of_anything(device: str, m: int, k: int) -> None:
    x, weight, _ = operands(m, 7, k, device, torch.float16)
    with forced("int8_linear", GEMV), forced("int4_linear", GEMV):
        check_int8(x, weight, None)
        check_int4(x, weight, None, 32, zeros=True)


@pytest.mark.parametrize("dtype", HALVES)
def test_rows_longer_than_a_program_holds(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_only_kernels, "WIDEST", 512)
    x, weight, bias = operands(1, 6, 1100, device, dtype)
    with forced("int8_linear", GEMV), forced("int4_linear", GEMV):
        check_int8(x, weight, bias)
        check_int4(x, weight, bias, 64, zeros=True)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("k", [1024, 1100])
def test_rows_in_short_steps(device: str, dtype: torch.dtype, k: int) -> None:
    """Several steps a tile and several tiles a program: a tile's sums start anew, the next tile's weights are its own."""
    x, weight, bias = operands(1, 11, k, device, dtype)
    with forced("int8_linear", SHORT), forced("int4_linear", SHORT):
        check_int8(x, weight, bias)
        check_int4(x, weight, bias, 64, zeros=True)


def test_layouts_and_empty(device: str) -> None:
    _, weight, bias = operands(1, 16, 64, device, torch.float16)
    q, scale = quantize_int8(weight)
    packed, scales = quantize_int4(weight)
    wide8, wide4 = dequantize_int8(q, scale, torch.float16), dequantize_int4(packed, scales, 128, 64, None, torch.float16)
    wide = torch.randn(2, 2, 128, device=device).half()
    for x in (wide[..., ::2], wide[..., 3:67], wide.transpose(0, 1)[..., :64], wide[0, 0, :64], wide[0, 0, 1:65], wide[:0, :, :64]):
        torch.testing.assert_close(linear_int8(x, q, scale, bias), F.linear(x, wide8, bias), rtol=1e-2, atol=3e-2)
        torch.testing.assert_close(linear_int4(x, packed, scales, 128, bias), F.linear(x, wide4, bias), rtol=1e-2, atol=3e-2)
    transposed, offset = q.t().contiguous().t(), torch.cat([q[:1, :2].flatten(), q.flatten()])[2:].view(16, 64)
    for other in (transposed, offset):
        for rows in (wide[0, :1, :64], wide[0, :, :64]):
            torch.testing.assert_close(linear_int8(rows, other, scale), linear_int8(rows, q, scale), rtol=1e-2, atol=3e-2)


@pytest.mark.parametrize("dtype", HALVES)
def test_large_offsets_do_not_lose_digits(device: str, dtype: torch.dtype) -> None:
    """What carries the integers is taken out again: x and weights all of one sign are as exact as any."""
    _, weight, _ = operands(1, 32, 512, device, dtype)
    x = (torch.rand(1, 512, device=device) + 100).to(dtype)
    with forced("int8_linear", GEMV), forced("int4_linear", GEMV):
        check_int8(x, weight + 0.2, None)
        check_int4(x, weight + 0.2, None, 128, zeros=True)
        check_int4(x, weight, None, 128, zeros=False)


def test_gradients_reach_x_and_bias(device: str) -> None:
    x, weight, bias = operands(3, 8, 64, device, torch.float64)
    q, scale = quantize_int8(weight)
    packed, scales, zero = quantize_int4_zero(weight, 32)
    leaves = (x.requires_grad_(), bias.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, b: linear_int8(x, q, scale, b), leaves)
    assert torch.autograd.gradcheck(lambda x, b: linear_int4(x, packed, scales, 32, b, zero), leaves)


def test_operators_are_registered_right(device: str) -> None:
    x, weight, bias = operands(1, 8, 128, device, torch.float16)
    with forced("int8_linear", GEMV), forced("int4_linear", GEMV):
        torch.library.opcheck(torch.ops.ridgeline.linear_int8, (x.requires_grad_(), *quantize_int8(weight), bias))
        packed, scale, zero = quantize_int4_zero(weight, 64)
        torch.library.opcheck(torch.ops.ridgeline.linear_int4, (x, packed, scale, 64, bias, zero))


def test_bitwise_the_same_twice(device: str) -> None:
    for m, way in ((1, GEMV), (4, WAYS["split"])):
        x, weight, _ = operands(m, 24, 256, device, torch.float16)
        q, scale = quantize_int8(weight)
        packed, scales = quantize_int4(weight)
        with forced("int8_linear", way), forced("int4_linear", way):
            assert torch.equal(linear_int8(x, q, scale), linear_int8(x, q, scale))
            assert torch.equal(linear_int4(x, packed, scales), linear_int4(x, packed, scales))


def test_quantisers(device: str) -> None:
    """Signal to noise of a normal weight: near the 6 dB a bit that rounding gives, less what the range above 3 sigma costs."""
    weight = torch.randn(64, 500, device=device, dtype=torch.float64).float()

    def decibels(back: torch.Tensor) -> float:
        return float(10 * torch.log10(weight.double().square().sum() / (weight.double() - back).square().sum()))

    q, scale = quantize_int8(weight)
    assert q.dtype == torch.int8 and int(q.abs().max()) == 127
    assert decibels(dequantize_int8(q, scale, torch.float64)) > 40
    packed, scales = quantize_int4(weight)
    assert packed.shape == (64, 64) and scales.shape == (64, 4)
    assert decibels(dequantize_int4(packed, scales, 128, 500, None, torch.float64)) > 18.5
    packed, scales, zero = quantize_int4_zero(weight, 32)
    assert zero.dtype == torch.uint8 and int(zero.max()) <= 15
    assert decibels(dequantize_int4(packed, scales, 32, 500, zero, torch.float64)) > 20
    zeros = torch.zeros(4, 128, device=device)
    assert not dequantize_int8(*quantize_int8(zeros), torch.float32).any()
    assert not dequantize_int4(*quantize_int4(zeros), 128, 128, None, torch.float32).any()


def test_wrong_arguments_say_so(device: str) -> None:
    x, weight, _ = operands(2, 16, 64, device, torch.float32)
    q, scale = quantize_int8(weight)
    packed, scales = quantize_int4(weight, 32)
    for call in (
        lambda: linear_int8(x[:, :60], q, scale),
        lambda: linear_int8(x, q.int(), scale),
        lambda: linear_int4(x, packed, scales, 128),
        lambda: linear_int4(x, packed, scales, 24),
        lambda: quantize_int4(weight, 100),
    ):
        with pytest.raises(RidgelineError):
            call()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="large sizes need a GPU")
@pytest.mark.parametrize("m", [1, 2, 4, 16, 64, 300])
@pytest.mark.parametrize("sizes", [(14336, 4096), (4096, 14336)])
def test_model_sizes_with_the_default_choice(device: str, m: int, sizes: tuple[int, int]) -> None:
    x, weight, bias = operands(m, *sizes, device, torch.bfloat16)
    check_int8(x, weight, bias)
    check_int4(x, weight, bias, 128, zeros=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="large sizes need a GPU")
@pytest.mark.parametrize("bits, way", [(bits, way) for bits, ways in weight_only_kernels.CANDIDATES.items() for way in range(len(ways))])
@pytest.mark.parametrize("sizes", [(14336, 4096), (4096, 14336), (1000, 40960)])
def test_every_candidate_on_the_gpu(device: str, bits: int, way: int, sizes: tuple[int, int]) -> None:
    x, weight, bias = operands(1, *sizes, device, torch.bfloat16)
    with forced(f"int{bits}_linear", weight_only_kernels.CANDIDATES[bits][way]):
        if bits == 8:
            check_int8(x, weight, bias)
        else:
            check_int4(x, weight, bias, 128, zeros=False)


def test_a_plan_of_int8_belongs_to_one_dtype(device: str) -> None:
    """bfloat16 after float16 of one shape; a weight stored by columns, for one stored by rows has a kernel of its own in bfloat16."""
    weight = torch.randn(8, 64, device=device)
    for dtype in (torch.float16, torch.bfloat16, torch.float16):
        x = torch.randn(1, 64, device=device).to(dtype)
        q, scale = quantize_int8(weight.to(dtype))
        wide = dequantize_int8(q, scale, torch.float64)
        with forced("int8_linear", GEMV):
            ours = linear_int8(x, q.t().contiguous().t(), scale)
        check(ours, F.linear(x, wide.to(dtype)), F.linear(x.double(), wide))


@pytest.mark.parametrize("m", [1, 3])
def test_strided_scales_and_zero_points(device: str, m: int) -> None:
    x, weight, _ = operands(m, 8, 256, device, torch.float16)
    q, row_scale = quantize_int8(weight)
    packed, scale, zero = quantize_int4_zero(weight + 0.5, 64)
    apart = [torch.stack((t, t + 1), -1)[..., 0] for t in (row_scale, scale, zero)]
    assert not any(t.is_contiguous() for t in apart)
    with forced("int8_linear", GEMV), forced("int4_linear", GEMV):
        assert torch.equal(linear_int8(x, q, apart[0]), linear_int8(x, q, row_scale))
        assert torch.equal(linear_int4(x, packed, apart[1], 64, None, apart[2]), linear_int4(x, packed, scale, 64, None, zero))


def test_small_groups_of_one_row_in_bfloat16(device: str) -> None:
    """Fewer than 128 weights a scale: not for the kernel of gemv_kernels.py."""
    x, weight, _ = operands(1, 8, 256, device, torch.bfloat16)
    weight[:, ::64] *= 8  # scales that differ
    weight[:, 128:192] *= 8
    check_int4(x, weight, None, 64, zeros=False)


def test_strided_scales_and_biases_of_one_row_in_bfloat16(device: str) -> None:
    """gemv_kernels.py's, which reads both without strides."""
    x, weight, _ = operands(1, 8, 256, device, torch.bfloat16)
    q, row_scale = quantize_int8(weight)
    packed, scale = quantize_int4(weight)
    bias = torch.randn(16, device=device).bfloat16()[::2]
    apart = torch.stack((row_scale, 100 * row_scale), 1)[:, 0]
    for given in (apart, row_scale[:1].expand(8)):
        assert torch.equal(linear_int8(x, q, given, bias), linear_int8(x, q, given.contiguous(), bias.contiguous()))
    assert torch.equal(linear_int4(x, packed, scale, 128, bias), linear_int4(x, packed, scale, 128, bias.contiguous()))


@pytest.mark.parametrize("m", [1, 3])
def test_every_group_size(device: str, m: int) -> None:
    """In both half types: kernels are chosen by group, rows and dtype. Neighbouring scales differ, so that another group's is seen."""
    for group in (16, 32, 64, 128):
        for dtype in (torch.float16, torch.bfloat16):
            x, weight, _ = operands(m, 8, 256, device, dtype)
            weight[:, ::group] *= 8
            weight[:, group : 2 * group] *= 8
            check_int4(x, weight, None, group, zeros=False)
