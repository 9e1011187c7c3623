"""The rules every kernel test shares.

ours, plain torch in the same dtype, the exact result in float64 ──check──> error at most twice plain torch's, and a planted 1 % error fails
layouts(shape, dtype, device) ──> the same kind of tensor contiguous, transposed, sliced, broadcast, and the empty and 0-dim ones
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FEW = 32
"""Results with fewer numbers of a half type: chance roundings, up to 0.4 % each in bfloat16, hide an error of 1 % from the 2x rule."""


MOST = 0.0075
"""Error on the whole that a half type may have however far off plain torch is, so that 1 % is always seen."""


def errors(out: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """(relative error of the whole, largest error as a share of the largest value); nothing but zeros is held to roundings of 1."""
    if exact.numel() == 0:
        return 0.0, 0.0
    gap = (out.double() - exact.double()).nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("inf"))
    whole, largest = float(exact.double().norm()), float(exact.double().abs().max())
    if largest < 1e-12:
        wrong = float(gap.abs().max()) > 128 * ROUNDING[torch.float32]
        return (float("inf"),) * 2 if wrong else (0.0, 0.0)
    return float(gap.norm()) / whole, float(gap.abs().max()) / largest


def allowed(plain: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Twice plain torch's errors, and a little for where it made none by chance: four roundings of float32, one of a half type
    (half of one on the whole of many numbers)."""
    whole, largest = errors(plain, exact)
    if plain.dtype == torch.float32:
        return 2 * whole + 4 * ROUNDING[plain.dtype], 2 * largest + 4 * ROUNDING[plain.dtype]
    one = ROUNDING[plain.dtype]
    if exact.numel() < FEW:
        return 2 * whole + one, 2 * largest + one
    return min(2 * whole + one / 2, MOST), 2 * largest + one


def passes(ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> bool:
    """Shape and dtype of plain torch, error at most twice its own."""
    if ours.shape != plain.shape or ours.dtype != plain.dtype:
        return False
    if not ours.dtype.is_floating_point:
        return torch.equal(ours, exact.to(ours.dtype))
    return all(mine <= most for mine, most in zip(errors(ours, exact), allowed(plain, exact), strict=True))


def check(ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """Ours is as good as plain torch against float64, and the check would have seen an error of 1 %.

    The interpreter cuts off what does not fit a bfloat16, where the GPU rounds: there, results may be a few roundings further off.
    """
    detail = f"{tuple(ours.shape)} {ours.dtype} against {tuple(plain.shape)} {plain.dtype}"
    cut_off = ours.dtype == torch.bfloat16 and not ours.is_cuda
    if cut_off and not passes(ours, plain, exact):
        assert ours.shape == plain.shape and plain.dtype == ours.dtype, detail
        assert errors(ours, exact)[0] <= 4 * ROUNDING[torch.bfloat16], f"{detail}: error {errors(ours, exact)}"
        return
    assert passes(ours, plain, exact), f"{detail}: errors {errors(ours, exact)}, plain torch {errors(plain, exact)}"
    half = ours.dtype in (torch.float16, torch.bfloat16)
    if not ours.numel() or float(exact.double().abs().max()) == 0 or cut_off or (half and ours.numel() < FEW):
        return
    if not ours.dtype.is_floating_point:
        assert not passes(ours + 1, plain, exact), f"{detail}: a planted error of 1 passes"
        return
    wrong = exact.double() * 1.01  # as the kernel would have it before it rounds
    assert errors(wrong.to(ours.dtype), exact)[0] > allowed(plain, exact)[0], f"{detail}: a planted error of 1 % passes"


def layouts(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of one shape laid out in every way users have."""

    def fresh(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device).to(dtype)

    yield "contiguous", fresh(*shape)
    if len(shape) > 1:
        yield "transposed", fresh(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
        yield "broadcast", fresh(*shape[:-2], 1, shape[-1]).expand(shape)
    yield "sliced", fresh(*shape[:-1], 2 * shape[-1] + 3)[..., 1 : 2 * shape[-1] + 1 : 2]
    yield "offset", fresh(*shape[:-1], shape[-1] + 5)[..., 3:-2]
