"""Products of decoding and their epilogues against float64: halves, int8, int4, several rows, gates, residuals, every candidate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ridgeline.core.errors import OptionError
from ridgeline.kernel import gemv_kernels
from ridgeline.kernel.gemv import gemv, gemv_int4, gemv_int8, gemv_swiglu, weights_are_still
from ridgeline.kernel.gemv_kernels import CANDIDATES, _starts, gemv_shape
from ridgeline.kernel.tuning import forced
from ridgeline.kernel.weight_only import dequantize_int4, dequantize_int8, quantize_int4, quantize_int8
from tests.kernel.support import FLOATS, check, passes

EPS = 1e-5


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def stored(bits: int, weight: torch.Tensor) -> tuple[Any, tuple[Any, ...], torch.Tensor]:
    """(operator, the weight as it takes it, what that stands for in float64)."""
    if bits == 16:
        return gemv, (weight,), weight.double()
    if bits == 8:
        q, scale = quantize_int8(weight)
        return gemv_int8, (q, scale), dequantize_int8(q, scale, torch.float64)
    packed, scale = quantize_int4(weight)
    return gemv_int4, (packed, scale, 128), dequantize_int4(packed, scale, 128, weight.shape[1], None, torch.float64)


def formula(x: torch.Tensor, weight: torch.Tensor, bias: Any, residual: Any, swiglu: bool, gain: Any = None) -> torch.Tensor:
    out = F.linear(x if gain is None else F.rms_norm(x, gain.shape, gain, EPS), weight, bias)
    if swiglu:
        gate, up = out.chunk(2, -1)
        out = F.silu(gate) * up
    return out if residual is None else out + residual


def compared(
    bits: int, x: torch.Tensor, weight: torch.Tensor, bias: bool = False, residual: bool = False, swiglu: bool = False, norm: bool = False
) -> None:
    operator, held, exact = stored(bits, weight)
    rows = weight.shape[0]
    extra = torch.randn(rows, device=x.device).to(x.dtype) if bias else None
    added = torch.randn(*x.shape[:-1], rows // 2 if swiglu else rows, device=x.device).to(x.dtype) if residual else None
    gain = (torch.randn(x.shape[-1], device=x.device) + 1).to(x.dtype) if norm else None
    wide = [None if t is None else t.double() for t in (extra, added, gain)]
    plain = formula(x, exact.to(x.dtype), extra, added, swiglu, gain)
    ours = operator(x, *held, extra, added, swiglu, gain, EPS)
    check(ours, plain, formula(x.double(), exact, *wide[:2], swiglu, wide[2]))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("m, n, k", [(1, 34, 512), (2, 18, 260), (3, 10, 128)])
def test_epilogues(bits: int, dtype: torch.dtype, m: int, n: int, k: int, device: str) -> None:
    """Three rows and float32 are left to others; several tiles a program."""
    x, weight = torch.randn(m, k, device=device).to(dtype), (torch.randn(2 * n, k, device=device) * k**-0.5).to(dtype)
    with forced(f"gemv_{bits}", {**CANDIDATES[bits][0], "bn": 16, "half": bits < 16, "threads": 32}):
        compared(bits, x, weight[:n], bias=True, residual=True)
        compared(bits, x, 2 * weight, bias=True, residual=True, swiglu=True)
        compared(bits, 3 * x, weight, swiglu=True, norm=True)


@pytest.mark.parametrize("bits, way", [(bits, way) for bits, ways in CANDIDATES.items() for way in range(len(ways))])
def test_every_candidate(bits: int, way: int, device: str) -> None:
    """Rows that are no multiple of the tile, of a length that is no power of two."""
    x, weight = torch.randn(1, 300, device=device).bfloat16(), torch.randn(34, 300, device=device).bfloat16()
    with forced(f"gemv_{bits}", CANDIDATES[bits][way]):
        compared(bits, x, weight * 0.05, swiglu=way % 2 == 0, norm=way % 3 == 0)


@pytest.mark.parametrize("bits", [8, 4])
def test_x_in_whole_numbers_loses_no_digits(bits: int, device: str) -> None:
    """x of one sign, x with outliers, very large and very small x; without the leeway that bfloat16 has when interpreted."""
    weight = torch.randn(64, 1024, device=device).bfloat16()
    noise = torch.randn(1, 1024, device=device)
    operator, held, wide = stored(bits, weight)
    for x in (noise.abs() * 0.01 + 100, noise * (1 + 1000 * (noise > 2.5)), noise * 1e30, noise * 1e-30, 0 * noise):
        x = x.bfloat16()
        with forced(f"gemv_{bits}", {**CANDIDATES[bits][0], "bn": 64}):
            ours = operator(x, *held)
        assert passes(ours, F.linear(x, wide.bfloat16()), x.double() @ wide.t())


@pytest.mark.parametrize("bits", [8, 4])
def test_the_largest_digits(bits: int, device: str) -> None:
    """Sums as large as they get, weights and x at the ends of their ranges: exact, so no product of bytes overflows anywhere."""
    n, k = 16, 16384 if device == "cuda" else 2048
    weight = torch.ones(n, k, device=device).bfloat16()
    weight[1::2] *= -1
    operator, held, wide = stored(bits, weight)
    for largest in (1.9921875, -1.9921875, 1.0):
        x = torch.full((1, k), largest, device=device).bfloat16()
        with forced(f"gemv_{bits}", CANDIDATES[bits][0]):
            assert torch.equal(operator(x, *held).double(), (x.double() @ wide.t()).bfloat16().double())


@pytest.mark.parametrize("bits", [8, 4])
def test_x_down_to_a_64th_of_the_largest_is_exact(bits: int, device: str) -> None:
    """Whole numbers of 15 bits hold all 8 of a bfloat16 that much smaller. The large ones meet weights of 0: the sums are of small ones."""
    weight = torch.randn(32, 512, device=device).bfloat16()
    weight[:, ::32] = 0
    operator, held, wide = stored(bits, weight)
    x = torch.randn(1, 512, device=device).sign() * (1 + torch.randint(0, 128, (1, 512), device=device) / 128) / 64
    x[:, ::32] = 1.9921875
    x = x.bfloat16()
    with forced(f"gemv_{bits}", CANDIDATES[bits][0]):
        assert torch.equal(operator(x, *held).double(), (x.double() @ wide.t()).bfloat16().double())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_not_finite_x_shows(bits: int, bad: float, device: str) -> None:
    operator, held, _ = stored(bits, torch.randn(8, 512, device=device).bfloat16())
    x = torch.randn(1, 512, device=device).bfloat16()
    x[0, 77] = bad
    assert not operator(x, *held).isfinite().any()


def test_layouts_and_empty(device: str) -> None:
    weight = torch.randn(12, 64, device=device).half()
    wide = torch.randn(2, 2, 128, device=device).half()
    for x in (wide[..., ::2], wide[..., 3:67], wide[0, 0, :64], wide[0, 0, 1:65], wide[:0, :, :64]):
        torch.testing.assert_close(gemv(x, weight), F.linear(x, weight), rtol=1e-2, atol=3e-2)
    for other in (weight.t().contiguous().t(), torch.cat([weight.flatten()[:1], weight.flatten()])[1:].view(12, 64)):
        torch.testing.assert_close(gemv(wide[0, :1, :64], other), F.linear(wide[0, :1, :64], other), rtol=1e-2, atol=3e-2)
    assert gemv_swiglu(wide[0, :, :64], weight).shape == (2, 6)


def test_bitwise_the_same_twice(device: str) -> None:
    x, weight = torch.randn(2, 256, device=device).half(), torch.randn(24, 256, device=device).half()
    assert torch.equal(gemv(x, weight), gemv(x, weight))


def test_operators_are_registered_right(device: str) -> None:
    x, weight = torch.randn(1, 128, device=device).half(), torch.randn(8, 128, device=device).half()
    residual = torch.randn(1, 4, device=device).half()
    torch.library.opcheck(torch.ops.ridgeline.gemv, (x, weight, weight[:, 0].contiguous(), residual, True, x[0], 1e-5))
    torch.library.opcheck(torch.ops.ridgeline.gemv_int8, (x, *quantize_int8(weight), None, None, False, None, 0.0))
    torch.library.opcheck(torch.ops.ridgeline.gemv_int4, (x, *quantize_int4(weight), 128, None, residual, True, None, 0.0))


def test_wrong_arguments_say_so(device: str) -> None:
    x, weight = torch.randn(1, 128, device=device).half(), torch.randn(7, 128, device=device).half()
    for call in (
        lambda: gemv(x[:, :100], weight),
        lambda: gemv_swiglu(x, weight),
        lambda: gemv(x, weight, weight[0]),
        lambda: gemv(x, weight, None, x),
        lambda: gemv(x, weight, None, None, False, weight[:, 0]),
        lambda: gemv(x, weight, None, None, False, x[0].float()),
        lambda: gemv_int8(x, weight, weight[:, 0]),
        lambda: gemv_int4(x, quantize_int4(weight)[0], weight[:, :2]),
    ):
        with pytest.raises(OptionError):
            call()


def test_shape_of_a_launch() -> None:
    chosen = {"bn": 2, "loads": 4, "threads": 512}
    assert gemv_shape(16, 4096, 4096, chosen, 132, False) == (2, 2048, 4, 528)
    assert gemv_shape(16, 4096, 4096, {**chosen, "threads": 1 << 20}, 132, False) == (2, 2048, 4, 2048)
    assert gemv_shape(4, 14336, 4096, {**chosen, "bn": 1}, 132, True) == (2, 512, 1, 2112)


def test_weights_are_read_before_the_wait_only_where_they_are_still() -> None:
    """And where that was not measured to pay, a product is not even started before the one before it has ended."""
    assert _starts({"early": 1}) == _starts({"early": 0}) == {"EARLY": False}
    with weights_are_still():
        assert _starts({"early": 1}) == {"EARLY": True}
        assert _starts({"early": 0}) == {"EARLY": False, "PROMPT": False}
    assert _starts({"early": 1}) == {"EARLY": False}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="large sizes need a GPU")
@pytest.mark.parametrize("bits, way", [(bits, way) for bits, ways in CANDIDATES.items() for way in range(len(ways))])
@pytest.mark.parametrize("n, k", [(14336, 4096), (4096, 14336), (2048, 5632)])
def test_every_candidate_on_the_gpu(bits: int, way: int, n: int, k: int) -> None:
    x, weight = torch.randn(1, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16()
    torch.cuda.synchronize()
    with forced(f"gemv_{bits}", CANDIDATES[bits][way]), weights_are_still():
        compared(bits, x, weight, residual=True)
        compared(bits, x, weight * k**-0.5, swiglu=True, norm=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_chain_of_overlapping_kernels_waits_for_each_link(bits: int) -> None:
    """Each product needs the one before; a read before its end would show. In a graph too."""
    weight = (torch.randn(4096, 4096, device="cuda") / 64).bfloat16()
    operator, held, _ = stored(bits, weight)
    x = torch.randn(1, 4096, device="cuda").bfloat16()

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = operator(x, *held, None, x)
        return x

    expected = chain(x)
    torch.cuda.synchronize()
    with weights_are_still():
        for _ in range(20):
            assert torch.equal(chain(x), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(x)
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_plan_belongs_to_one_eps(bits: int, device: str) -> None:
    """Two norms of one shape, small x: with the other's eps the result would be many times as large."""
    x, weight = (0.01 * torch.randn(1, 256, device=device)).bfloat16(), torch.randn(4, 256, device=device).bfloat16()
    gain = torch.ones(256, device=device).bfloat16()
    operator, held, exact = stored(bits, weight)
    for eps in (1e-6, 1e-2):
        ours = operator(x, *held, None, None, False, gain, eps)
        wide = F.linear(F.rms_norm(x.double(), (256,), None, eps), exact)
        torch.testing.assert_close(ours.double(), wide, rtol=3e-2, atol=3e-2 * float(wide.abs().max()))


def test_a_plan_of_int4_belongs_to_one_group_size(device: str) -> None:
    x, weight = torch.randn(1, 256, device=device).bfloat16(), torch.randn(4, 256, device=device).bfloat16()
    weight[:, 128:] *= 16  # scales that differ by group
    for group in (128, 256, 128):
        packed, scale = quantize_int4(weight, group)
        wide = dequantize_int4(packed, scale, group, 256, None, torch.float64)
        check(gemv_int4(x, packed, scale, group), F.linear(x, wide.bfloat16()), x.double() @ wide.t())


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_plan_is_kept_for_weights_that_are_still_and_another_for_others(bits: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only inside weights_are_still() may weights be read before the wait, whatever was launched first."""
    kept: dict[Any, Any] = {}
    monkeypatch.setattr(gemv_kernels, "_plans", kept)
    x, weight = torch.randn(1, 128, device=device).bfloat16(), torch.randn(4, 128, device=device).bfloat16()
    operator, held, _ = stored(bits, weight)
    with forced(f"gemv_{bits}", {**CANDIDATES[bits][0], "early": 1}):
        with weights_are_still():
            early = operator(x, *held)
        assert [plan.constants["EARLY"] for plan in kept.values()] == [True]
        assert torch.equal(operator(x, *held), early)
    assert [plan.constants["EARLY"] for plan in kept.values()] == [True, False]


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_strided_gain_is_read_by_its_strides(bits: int, device: str) -> None:
    x, weight = torch.randn(1, 256, device=device).bfloat16(), torch.randn(8, 256, device=device).bfloat16()
    gain = (torch.randn(512, device=device) + 1).bfloat16()[::2]
    operator, held, exact = stored(bits, weight)
    ours = operator(x, *held, None, None, False, gain, EPS)
    check(ours, formula(x, exact.bfloat16(), None, None, False, gain), formula(x.double(), exact, None, None, False, gain.double()))


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_strided_scales_and_biases_are_read_by_their_strides(bits: int, device: str) -> None:
    x, weight = torch.randn(1, 256, device=device).bfloat16(), torch.randn(8, 256, device=device).bfloat16()
    operator, (held, *rest), _ = stored(bits, weight)
    bias = torch.randn(16, device=device).bfloat16()[::2]
    apart = [torch.stack((t, 100 * t), -1)[..., 0] if isinstance(t, torch.Tensor) else t for t in rest]
    assert not any(isinstance(t, torch.Tensor) and t.is_contiguous() for t in apart)
    for given in (apart, rest):
        ours = operator(x, held, *given, bias)
        assert torch.equal(ours, operator(x, held, *rest, bias.contiguous()))
    if bits == 8:
        same = rest[0][:1].expand(8)
        assert torch.equal(operator(x, held, same), operator(x, held, same.contiguous()))
