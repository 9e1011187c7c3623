"""Machine code of the kernels that program cells, for a Hopper GPU: no spills, no call into a library, few instructions a cell.

plan ──shape_of──> constants ──triton.compile for sm_90──> SASS ──> counts of opcodes
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from ridgeline.crossbar.engine.fused_program import CELL_TILE, MAXIMA_TILE, PACK_TILE, array_maxima, pack_cells, program_cells, shape_of
from ridgeline.crossbar.plan import Plan
from tests.crossbar.support import chip
from tests.kernel.sass import Code, compiled

SIZES = ("k", "n", "sg", "sn", "arrays", "across")
WHOLE_NUMBERS = (*SIZES, "down", "wide", "cells", "plane", "stuck_high", "stuck", "layer_kind", "seed", "chip")
FAULTS: dict[str, Any] = {"cell_write_sigma": 0.05, "cell_stuck_high": 0.002, "cell_stuck_low": 0.008}
DRIFT: dict[str, Any] = {"cell_drift_nu": 0.05, "cell_drift_nu_sigma": 0.01, "cell_drift_time_s": 3600}


def program_code(sign: str, **changes: Any) -> Code:
    """Of ResNet-18's second stage on 64-row arrays."""
    slices = [1, 2, 2, 2] if sign == "differential" else [1, 1, 2, 2]
    on = chip(array_rows=64, array_columns=64, operands_sign=sign, operands_x_slices=slices, operands_w_slices=slices, **changes)
    shape = shape_of(Plan(on, 576, 64))
    assert shape is not None
    pointers = {
        "weight": "*fp32", "maxima": "*i32", "sigmas": "*fp32", "planes": "*fp32" if shape.varies else "*i8", "step_out": "*fp64",
        "values": "*fp32", "flag": "*i32",
    }  # fmt: skip
    numbers = dict.fromkeys(WHOLE_NUMBERS, "i32") | dict.fromkeys(("low", "drift", "drift_spread", "kept"), "fp32")
    return compiled(program_cells, pointers | numbers, {"sk": 1, **shape.constants}, aligned=(*pointers, "k", "n", "sg", "sn"))


@pytest.mark.parametrize(
    ("sign", "changes", "planes"), [("differential", FAULTS, 2), ("slice", FAULTS | DRIFT | {"operands_format": "bfp"}, 1)]
)
def test_programming(sign: str, changes: dict[str, Any], planes: int) -> None:
    code = program_code(sign, **changes)
    cells = CELL_TILE[0] * CELL_TILE[1] // 128 * planes  # of a thread
    assert code.spills == 0 and code.registers <= 128
    assert code.count(r"IMAD\.WIDE\.U32|IMAD\.HI\.U32") >= 20 * cells  # ten rounds of two products: every cell has a counter of its own
    assert code.count(r"\n\s+/\*[0-9a-f]+\*/") <= 700 * cells


def test_ideal_cells_draw_nothing() -> None:
    code = program_code("slice")
    assert code.spills == 0 and code.count(r"0x2daf8e0d|-0x2daee0ad|0xd2511f53") == 0
    assert code.registers <= 64


def test_maxima_are_loads_and_little_else() -> None:
    signature = dict.fromkeys(SIZES, "i32") | {"weight": "*fp32", "maxima": "*i32"}
    constants = {"sk": 1, "ROWS": 64, "COLUMNS": 64, "BLOCK_K": MAXIMA_TILE[0], "BLOCK_N": MAXIMA_TILE[1]}
    code = compiled(array_maxima, signature, constants, aligned=("weight", "maxima", "k", "n", "sg", "sn"))
    assert code.spills == 0 and code.count(r"\bSTG\.E\b") == 1


@pytest.mark.parametrize(("planes", "levels", "pair"), [("fp32", "fp16", True), ("i8", "i8", False)])
def test_packing_writes_whole_lines(planes: str, levels: str, pair: bool) -> None:
    signature = dict.fromkeys(("n", "arrays", "plane", "n_padded"), "i32")
    signature |= {"planes": f"*{planes}", "step_in": "*fp64", "levels": f"*{levels}", "step_out": "*fp32"}
    constants = {
        "UNIT": 0.1, "WORTHS": (1,), "EACH": 1, "PAIR": pair, "WHOLE": not pair, "PARTS": 4, "ROWS": 64, "R": 64, "BLOCK_R": PACK_TILE[0],
        "BLOCK_N": PACK_TILE[1],
    }  # fmt: skip
    code = compiled(pack_cells, signature, constants, aligned=("planes", "step_in", "levels", "step_out", "n", "n_padded"))
    assert code.spills == 0 and code.count(r"STG\.E\.128") >= 1
