"""Machine code of the fused crossbar kernels for a Hopper GPU: tensor-core dots, few instructions a conversion, no spills.

plan ──settings_of──> constants ──triton.compile for sm_90──> SASS ──> counts of opcodes
"""

from __future__ import annotations

import re
from functools import cache

import pytest

pytest.importorskip("triton")

from ridgeline.crossbar.engine import fused_settings as settings_module
from ridgeline.crossbar.engine.fused_kernels import multiply_arrays, quantise_patches
from ridgeline.crossbar.engine.fused_settings import DOTS, PatchTile, Tile
from ridgeline.crossbar.plan import Plan
from tests.crossbar.support import chip
from tests.kernel.sass import Code, compiled

TRITON_TYPES = {"float8": "fp8e4nv", "int8": "i8", "float16": "fp16"}
DOT_OPCODES = {"float8": r"\bQGMMA", "int8": r"\bIGMMA", "float16": r"\bHGMMA"}
WHOLE_NUMBERS = ("m_all", "n_all", "length", "so_image", "so_channel", "so_place", "channels", "layer", "call", "seed", "chip", "k_group",
                 "arrays", "n_padded")  # fmt: skip


@cache
def product_code(dot: str, tile: Tile, lossless: bool = False) -> Code:
    """Of ResNet-18's second stage on 64-row arrays, for inputs that may skip the sign slice; lossless: an ADC step is a level."""
    plan = Plan(chip(array_rows=64, array_columns=64), 576, 64)
    made = settings_module.settings_of(plan, dot != "float16")
    slices = len(plan.x.widths)
    signature = dict.fromkeys(WHOLE_NUMBERS, "i32") | {
        "q_in": "*i8", "x_step": "*fp32", "w_in": f"*{TRITON_TYPES[dot]}", "w_step": "*fp32", "bias": "*fp32", "negative": "*i32",
        "offsets": "*fp32", "codes": "*i32", "out": "*fp32", "adc_sigma": "fp32", "dac_sigma": "fp32",
    }  # fmt: skip
    constants = {
        "SHIFTS": made.shifts, "MOSTS": made.mosts, "TOPS": made.tops, "PACKED": True, "MAGNITUDE": False,
        "MULTIPLY": settings_module.multiply_of(made, DOTS[dot], True), "DIVIDE": made.divide, "WORTH": made.worth,
        "SUM_ALL": settings_module.start_of(made, slices, slices, 0), "SUM_SKIPPED": settings_module.start_of(made, slices, slices, 1),
        "LOWEST": made.lowest, "HIGHEST": made.highest, "CLIP": False, "COLLAPSED": False, "WHOLE": made.whole, "NOISE": 0, "KEEP": False,
        "SKIP": True, "REFERENCE": (), "OFFSET": False, "DOWN": (0.0,) * slices, "SX": slices, "SW": slices, "PAIRS": 4, "ROWS": 64,
        "R": 64, "BIAS": True, "FLIP": True, "BM": tile.rows, "BN": tile.columns,
    }  # fmt: skip
    if lossless:
        constants |= {"PACKED": False, "MULTIPLY": (1.0,) * slices**2, "DIVIDE": (1.0,) * slices**2}
    aligned = (*(name for name, kind in signature.items() if kind.startswith("*")), "m_all", "n_all", "n_padded", "so_image", "so_channel")
    return compiled(multiply_arrays, signature, constants, num_warps=tile.warps, num_stages=tile.stages, aligned=aligned)


@pytest.mark.parametrize("dot", ["float8", "int8", "float16"])
def test_slice_pairs_are_tensor_core_dots(dot: str) -> None:
    code = product_code(dot, Tile(64, 32, 4, 2))
    depth = 16 if dot == "float16" else 32
    assert code.count(DOT_OPCODES[dot]) == (16 + 12) * 64 // depth  # all slice pairs, and those without the sign slice of x


def test_rounding_is_not_the_start_of_a_dot() -> None:
    """Beside 1.5 * 2^23, which rounds a sum, tensor cores lose small products: what is added must not become the accumulator."""
    ir = product_code("float16", Tile(64, 32, 4, 2), lossless=True).ir
    starts = set(re.findall(r"tt\.dot %\w+, %\w+, (%\w+)", ir))
    assert starts
    for start in starts:
        assert f"{start} = arith.constant dense<0.000000e+00>" in ir


def test_a_float8_conversion_is_two_instructions() -> None:
    """A multiply-add that rounds, and an integer one that shifts and adds; 16 sums a thread for each of 28 slice pairs."""
    code = product_code("float8", Tile(64, 32, 4, 2))
    assert code.spills <= 32
    conversions = 28 * 64 * 32 // 128
    assert code.count(r"\bFFMA\b") <= conversions * 1.1
    arithmetic = sum(code.count(rf"\b{opcode}\b") for opcode in ("IMAD", "IADD3", "LEA", "I2FP", "FADD", "FMUL", "F2I"))
    assert arithmetic <= conversions * 2.2


def test_weights_come_in_whole_sectors() -> None:
    assert product_code("float8", Tile(64, 32, 4, 2)).count(r"LDGSTS\.E[\w.]*\.128") >= 8


@pytest.mark.parametrize(("taps", "stride", "padding"), [(3, 1, 1), (7, 2, 3), (1, 1, 0)])
def test_quantising(taps: int, stride: int, padding: int) -> None:
    tile = PatchTile()
    numbers = ("m_all", "channels", "height", "width", "out_height", "out_width", "sb", "sc", "sh", "arrays")
    signature = dict.fromkeys(numbers, "i32") | {"x": "*fp32", "q_out": "*i32", "step_out": "*fp32", "negative": "*i32", "table": "*i64"}
    constants = {
        "sw": 1, "KH": taps, "KW": taps, "SH": stride, "SW": stride, "PH": padding, "PW": padding, "DH": 1, "DW": 1, "R": 64, "A_BLOCK": 1,
        "EACH": tile.blocks, "PACK": 4, "LARGEST": 31.0, "LOWEST": -32.0, "BFP": False, "SPAN": 6, "SHARED": 0, "TILE": tile.patches,
    }  # fmt: skip
    aligned = ("x", "q_out", "step_out", "negative", "table", "m_all", "sb", "sc")
    code = compiled(quantise_patches, signature, constants, num_warps=tile.warps, aligned=aligned)
    each = 64 * tile.patches // (32 * tile.warps)  # elements a thread
    assert code.spills == 0
    assert code.count(r"LDG\.E") <= 2 * each + 2  # an element, and where it lies
    assert code.count(r"STG\.E\.128") >= each // 16
