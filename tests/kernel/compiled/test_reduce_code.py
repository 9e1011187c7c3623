"""Machine code of the reductions for a Hopper GPU: 128-bit loads, nothing spilled."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import pytest

pytest.importorskip("triton")

from ridgeline.kernel import reduce_kernels as kernels
from ridgeline.kernel.jit import INTERPRETED, tl
from ridgeline.kernel.reduce_plan import SMS, Schedule, default, normalize, plan, schedule
from tests.kernel.sass import Code, compiled

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted")

WIDE = r"LDG\.E\.(?:\w+\.)*128"
ANY = r"\bLDG\."


def at_once(code: Code, warps: int) -> int:
    """Programs an SM runs at the same time."""
    return min(65536 // (-(-code.registers // 8) * 8 * warps * 32), 64 // warps, 32)


def build(kernel: Any, shape: tuple[int, ...], dims: Any, dtype: str, itemsize: int, **constants: Any) -> tuple[Code, Schedule]:
    """Compile as the launcher would for a contiguous tensor; sizes that Triton would specialize on are."""
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    p = plan(shape, strides, normalize(dims, len(shape)))
    assert p is not None
    cut = schedule(p, default(p, itemsize), itemsize)
    stage = 2 if cut.splits > 1 else 0
    numbers = {
        "kept": p.kept, "k_units": cut.k_units, "r_units": cut.r_units, "sb": p.sb, "sk": p.sk, "ss": p.ss, "sr": p.sr,
        "chunks": cut.chunks, "splits": cut.splits, "divisor": 0,
    }  # fmt: skip
    constants |= {
        "AXIS": p.axis, "KEPT": cut.tile_kept, "RED": cut.tile_reduced, "FLAT": cut.flat, "EVEN": cut.even, "ALIGN": p.align,
        "ONCE": cut.once, "STAGE": stage, "ACC": tl.float32, "LINEAR": cut.linear, "SOLE": p.s == 1,
        "SPL": cut.combine if kernel is not kernels.spread_kernel else max(1, cut.combine // 4),
    }  # fmt: skip
    signature = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "part_ptr": "*fp32", "index_ptr": "*i64", "count_ptr": "*i32"}
    if stage == 0:  # as the launcher does
        constants |= {name: None for name in ("part_ptr", "index_ptr", "count_ptr")}
        signature = {name: of for name, of in signature.items() if name not in constants}
    aligned = list(signature)
    for name, value in numbers.items():
        if value == 1:
            constants[name] = 1
        else:
            signature[name] = "i64" if value >= 2**31 else "i32"
            if value % 16 == 0:
                aligned.append(name)
    known = set(kernel.arg_names)
    code = compiled(
        kernel, {n: t for n, t in signature.items() if n in known}, {n: v for n, v in constants.items() if n in known},
        num_warps=cut.warps, aligned=tuple(n for n in aligned if n in known),
    )  # fmt: skip
    return code, cut


SUM = {"MAXIMUM": False, "MEAN": False, "IDENTITY": 0.0}


@pytest.mark.parametrize(
    ("shape", "dims", "dtype", "itemsize"),
    [
        ((64, 4096, 4096), None, "fp32", 4),
        ((64, 4096, 4096), -1, "fp32", 4),
        ((64, 4096, 4096), (0, 1), "fp32", 4),
        ((64, 4096, 4096), 1, "bf16", 2),
        ((8, 16777216), -1, "bf16", 2),
        ((2048, 1000), -1, "fp32", 4),  # rows of a multiple of 8, not of 16, elements
    ],
    ids=str,
)
def test_sum_loads_128_bits(shape: tuple[int, ...], dims: Any, dtype: str, itemsize: int) -> None:
    code, cut = build(kernels.fold_kernel, shape, dims, dtype, itemsize, **SUM)
    assert code.spills == 0
    assert code.count(WIDE) >= 4, "four loads in flight a thread"
    programs, running = prod(cut.grid), at_once(code, cut.warps)
    assert running * cut.tile_kept * cut.tile_reduced * itemsize >= 32768, "bytes in flight an SM"
    if not cut.once and cut.splits > 1:
        assert programs <= running * SMS, "one wave: a second for the last programs would take as long again"


@pytest.mark.parametrize(("dims", "loads"), [(-1, 8), ((0, 1), 4), (None, 4)], ids=str)
def test_small_sums_ask_for_everything_at_once(dims: Any, loads: int) -> None:
    code, cut = build(kernels.fold_kernel, (4, 512, 896), dims, "fp32", 4, **SUM)
    before = code.text[: code.text.index("FADD")]
    assert code.spills == 0 and len(re.findall(WIDE, before)) == loads, "no load waits for another"
    assert len(re.findall(r"MUFU\.RCP", before)) == 0, "no division on the way to the first load"
    if cut.warps == 1:
        assert code.count(r"BAR\.SYNC") == 0, "a warp a row has nobody to wait for"
    assert prod(cut.grid) <= at_once(code, cut.warps) * SMS


@pytest.mark.parametrize("dims", [-1, 0], ids=str)
def test_other_reductions(dims: int) -> None:
    maximum = build(kernels.fold_kernel, (4096, 4096), dims, "bf16", 2, MAXIMUM=True, MEAN=False, IDENTITY=float("-inf"))
    position = build(kernels.position_kernel, (4096, 4096), dims, "fp32", 4, IDENTITY=float("-inf"))
    spread = build(kernels.spread_kernel, (4096, 4096), dims, "fp32", 4)
    for code, _ in (maximum, position, spread):
        assert code.spills == 0
        assert code.count(WIDE) >= 4
        assert code.registers <= 128


def test_unaligned_rows_still_compile() -> None:
    code, _ = build(kernels.fold_kernel, (2048, 1001), -1, "fp32", 4, **SUM)
    assert code.spills == 0 and code.count(WIDE) == 0 and code.count(ANY) > 0, "the counting of wide loads can fail"
