"""The blocked engine where products of matrices do not reach: windows, groups, pieces, noise, wide numbers, other dots, memory.

x (B, groups * C, *size), window ──BlockedEngine.convolution──> the oracle's outputs, whatever the budget
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.core.errors import OptionError
from ridgeline.crossbar.cells import program
from ridgeline.crossbar.engine import blocked
from ridgeline.crossbar.engine.array_sums import _added_up, _levels, made_of
from ridgeline.crossbar.engine.blocked import MIB, BlockedEngine
from ridgeline.crossbar.engine.packing import Packing, pack
from ridgeline.crossbar.engine.patches import Piece, patches, pieces
from ridgeline.crossbar.engine.reference import ReferenceEngine
from ridgeline.crossbar.plan import Draw, Plan, Window
from tests.crossbar.support import chip

DRAW = Draw(1, 2, 3, 4)
WINDOWS = [
    ((9,), Window((3,), (2,), (2,), (2,))),
    ((7, 6), Window((3, 2), (2, 1), (1, 0), (1, 2))),
    ((5, 4, 6), Window((2, 3, 1), (1, 2, 1), (1, 1, 0), (1, 1, 1))),
    ((6, 6), Window((1, 1), (2, 2), (0, 0), (1, 1))),
]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def both(x: Tensor, window: Window, on: Any, groups: int = 1, n: int = 4, **engine: Any) -> tuple[Tensor, Tensor]:
    """What the oracle and the blocked engine give for one convolution."""
    k = x.shape[1] // groups * math.prod(window.kernel)
    plan = Plan(on, k, n, groups)
    cells = program(normal(groups, k, n, seed=1), plan, DRAW)
    oracle, ours = ReferenceEngine(), BlockedEngine(**engine)
    expected = oracle.convolution(x.double(), window, plan, oracle.prepare(plan, cells), DRAW)
    return expected, ours.convolution(x, window, plan, ours.prepare(plan, cells), DRAW)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(("size", "window"), WINDOWS, ids=["1d", "2d", "3d", "1x1"])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_windows_and_groups(size: tuple[int, ...], window: Window, groups: int) -> None:
    expected, found = both(normal(3, 6, *size), window, chip(array_rows=4, adc_levels=64), groups)
    assert found.shape == expected.shape == (3, groups * 4, *window.output_size(size)) and error(found, expected) < 2e-6
    assert error(found * 1.01, expected) > 5e-3


@pytest.mark.parametrize("granularity", ["per-matrix", "per-col", [5, 8], [2, 3]])
@pytest.mark.parametrize("tile_rows", [1, 4])
def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch, granularity: Any, tile_rows: int) -> None:
    """Blocks of several rows reach over pieces of a few lines, and blocks of several arrays over blocks of one."""
    monkeypatch.setattr(blocked, "MOST_POSITIONS_CPU", 14)
    monkeypatch.setattr(blocked, "BLOCK_CPU", 40)
    on = chip(array_rows=4, adc_levels=64, operands_x_granularity=granularity, operands_x_tile_rows=tile_rows)
    expected, found = both(normal(2, 6, 7, 6), WINDOWS[1][1], on)
    assert error(found, expected) < 2e-6


@pytest.mark.parametrize("sign", ["slice", "differential", "offset"])
def test_noise_is_the_oracles(sign: str) -> None:
    noisy = {"adc_noise_lsb": 1.5, "adc_offset_lsb": 1.0, "dac_noise_sigma": 0.1, "cell_read_sigma": 0.1, "cell_write_sigma": 0.1}
    on = chip(array_rows=4, adc_levels=64, operands_sign=sign, **noisy)
    expected, found = both(normal(2, 6, 7, 6), WINDOWS[1][1], on, groups=2)
    far = ((found - expected).abs() > 1e-5 * expected.abs().max()).double().mean()
    assert far < 0.01  # a fraction near half a code may round the other way in float32
    quiet = both(normal(2, 6, 7, 6), WINDOWS[1][1], chip(array_rows=4, adc_levels=64, operands_sign=sign), groups=2)[1]
    assert error(found, quiet) > 0.05


@pytest.mark.parametrize("noise", [{"adc_noise_lsb": 1.5}, {"adc_offset_lsb": 1.0}, {"dac_noise_sigma": 0.1}, {"cell_stuck_high": 0.1}])
def test_each_noise_alone(noise: dict[str, float]) -> None:
    expected, found = both(normal(2, 6, 7, 6).relu(), WINDOWS[1][1], chip(array_rows=4, adc_levels=64, **noise))
    assert ((found - expected).abs() > 1e-5 * expected.abs().max()).double().mean() < 0.01


@pytest.mark.parametrize("bits", [2, 16, 29])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_few_and_many_bits(bits: int, dtype: torch.dtype) -> None:
    slices = [1, *[4] * (bits // 4)] if bits > 2 else [1, 1]
    on = chip(operands_x_slices=slices, operands_w_slices=slices, dac_levels=16, cell_levels=16, adc_levels=1 << 16)
    expected, found = both(normal(2, 6, 7, 6).to(dtype), WINDOWS[1][1], on)
    assert found.dtype == dtype and error(found, expected) < (2e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("compute", ["tf32", "float16", "bfloat16", "integer"])
def test_other_dots(compute: str) -> None:
    """Levels below 2^8 and sums below 2^8 are exact in all of them."""
    expected, found = both(normal(2, 6, 7, 6), WINDOWS[1][1], chip(array_rows=4, adc_levels=64), compute=compute)
    assert error(found, expected) < 2e-6


def test_products_ignore_autocast_and_low_precision() -> None:
    x = normal(2, 6, 7, 6)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            expected, found = both(x, WINDOWS[1][1], chip(adc_levels=64))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert error(found, expected) < 2e-6


def packing_of(on: Any, skip: int = 0, k: int = 64) -> Packing:
    plan = Plan(on, k, 8)
    found = pack(plan, tuple(range(skip, len(plan.x.widths))), whole=True, wide=False, apart=False, collapse=True)
    assert found is not None
    return found


def test_slices_are_packed_as_far_as_float32_goes() -> None:
    assert packing_of(chip(), skip=1).packs == (((1, 289**2), (2, 289), (3, 1)),)
    assert packing_of(chip()).packs == (((0, 1),), ((1, 289**2), (2, 289), (3, 1)))
    assert packing_of(chip(array_rows=256), k=512, skip=1).packs == (((1, 1),), ((2, 2305), (3, 1)))
    assert packing_of(chip(operands_sign="differential"), skip=2).packs == (((2, 577), (3, 1)),)
    assert packing_of(chip(adc_levels=1 << 24)).dtype == torch.float64


def test_shortcuts_are_said_and_exact() -> None:
    engine, on = BlockedEngine(), chip(adc_levels=32 * 9 + 1)
    plan = Plan(on, 54, 4)
    cells = program(normal(1, 54, 4), plan, DRAW)
    prepared = engine.prepare(plan, cells)
    assert engine.shortcuts(plan, prepared) == []
    x = normal(2, 5, 54, seed=3)
    assert error(engine.product(x, plan, prepared, DRAW), ReferenceEngine().product(x.double(), plan, cells, DRAW)) < 2e-6
    engine.product(x.relu(), plan, prepared, DRAW)
    said = " ".join(engine.shortcuts(plan, prepared))
    assert "collapsed" in said and "sign slice" in said
    lossy = Plan(chip(), 54, 4)
    assert "collapsed" not in " ".join(engine.shortcuts(lossy, engine.prepare(lossy, cells)))


class Largest(TorchDispatchMode):
    """Of all tensors that any operation gives, the bytes of the largest one."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.bytes = max(self.bytes, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize(("groups", "n"), [(1, 16), (32, 1)])
def test_the_budget_bounds_memory(groups: int, n: int) -> None:
    """The patches of all of it are 2.25 MiB, its column sums up to 9 MiB a slice pair: nothing is larger than half the budget."""
    plan = Plan(chip(array_rows=8), 64 * 9 // groups, n, groups)
    engine, x = BlockedEngine(MIB), normal(1, 64, 32, 32)
    prepared = engine.prepare(plan, program(normal(groups, plan.k, n), plan, DRAW))
    with Largest() as largest:
        engine.convolution(x, Window((3, 3), (1, 1), (1, 1), (1, 1)), plan, prepared, DRAW)
    assert x.numel() * 4 <= largest.bytes <= MIB // 2
    with Largest() as largest:
        BlockedEngine(64 * MIB).convolution(x, Window((3, 3), (1, 1), (1, 1), (1, 1)), plan, prepared, DRAW)
    assert largest.bytes > 2 * MIB


def test_patches_are_torchs() -> None:
    x, window = normal(3, 4, 7, 6), WINDOWS[1][1]
    whole = functional.unfold(x, window.kernel, window.dilation, window.padding, window.stride)  # (B, K, L)
    assert torch.equal(patches(x, window, 1)[0].transpose(0, 1), whole)
    across = window.output_size((7, 6))[1]
    for piece in pieces(3, window.output_size((7, 6)), across):
        part = patches(x, window, 1, piece)[0].transpose(0, 1)
        assert torch.equal(part, whole[piece.first : piece.last, :, piece.top * across : piece.bottom * across])
    assert pieces(5, (2, 3), 13) == [Piece(0, 2, 0, 2), Piece(2, 4, 0, 2), Piece(4, 5, 0, 2)]


def test_an_empty_batch_gives_an_empty_output() -> None:
    _, found = both(torch.zeros(0, 6, 7, 6), WINDOWS[1][1], chip(operands_x_granularity="per-matrix"))
    assert found.shape == (0, 4, 4, 4)


def test_what_cannot_be_computed_is_an_error() -> None:
    with pytest.raises(OptionError, match="int3"):
        BlockedEngine(compute="int3")
    with pytest.raises(OptionError, match="budget_bytes"):
        BlockedEngine(100)
    with pytest.raises(OptionError, match="not finite"):
        both(normal(1, 6, 7, 6) / 0, WINDOWS[1][1], chip())
    with pytest.raises(OptionError, match="larger than the padded image"):
        both(normal(1, 6, 2, 2), Window((5, 5), (1, 1), (1, 1), (1, 1)), chip())
    with pytest.raises(OptionError, match="calibrate"):
        both(normal(1, 6, 7, 6), WINDOWS[1][1], chip(adc_range="calibrated"))
    huge = Plan(chip(array_rows=65536, dac_levels=65535, cell_levels=1 << 16, adc_levels=1 << 24), 70_000, 1)
    assert "float64" in str(BlockedEngine().unable(huge, "cpu"))
    assert "integer" in str(BlockedEngine(compute="integer").unable(Plan(chip(), 4, 4), "cuda"))
    assert BlockedEngine().unable(Plan(chip(), 4, 4), "cuda") is None


@pytest.mark.parametrize("sign", ["slice", "differential"])
@pytest.mark.parametrize("slices", [[1, 1, 2, 2], [1, 3], [1, 2, 1, 2, 2]])
def test_inputs_are_the_levels_added_up(sign: str, slices: list[int]) -> None:
    """The short way to a dot's inputs gives what one level after another gives, for every whole number."""
    plan = Plan(chip(operands_x_slices=slices, dac_levels=8 if 3 in slices else 4, operands_sign=sign), 64, 8)
    for active in {tuple(range(first, len(slices))) for first in (0, 1 if sign == "slice" else 0)}:
        packing = pack(plan, active, whole=True, wide=False, apart=False, collapse=False)
        assert packing is not None
        made = made_of(plan, packing)
        q = torch.arange(0 if 0 not in active else 1 - 2 ** (plan.x.span - 1), 2 ** (plan.x.span - 1)).float().view(1, 1, 1, -1)
        levels = dict(_levels(q.clone(), plan, packing.units))
        expected = [sum(radix * levels[i] for i, radix in one) for one in packing.packs]
        assert made.uptos is not None
        assert all(torch.equal(a, b) for a, b in zip(_added_up(q.clone(), plan, made.uptos), expected, strict=True))


def test_a_coarse_dac_keeps_the_long_way() -> None:
    plan = Plan(chip(operands_x_slices=[1, 1, 4]), 64, 8)
    packing = pack(plan, (0, 1, 2), whole=True, wide=False, apart=False, collapse=False)
    assert packing is not None and made_of(plan, packing).uptos is None
