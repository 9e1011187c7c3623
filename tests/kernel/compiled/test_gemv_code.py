"""Machine code of the decode products for Hopper: 128-bit loads only, few instructions a byte, no spills, weights read before the wait."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton")

from ridgeline.kernel.decode_attention import decode_attention_head_kernel, decode_attention_kernel
from ridgeline.kernel.gemv_kernels import CANDIDATES, default_config, gemv_kernel, gemv_nibbles_kernel, gemv_shape
from ridgeline.kernel.tuning import Config
from tests.kernel.compiled.test_weight_only_code import turn
from tests.kernel.sass import Code, compiled

N = 14336


def code_of(
    bits: int, k: int, chosen: Config, gated: bool, early: bool, m: int = 1, norm: bool = False, prompt: bool | None = None
) -> tuple[Code, int]:
    """Code, and weights a thread has of a tile."""
    bn, wide, warps, _ = gemv_shape(bits, N, k, chosen, 132, gated)
    signature = {
        "x_ptr": "*bf16",
        "w_ptr": "*i32",
        "out_ptr": "*bf16",
        "n": "i32",
        "k": "i32",
        "words": "i32",
        "eps": "fp32",
    }
    constants = {"bias_ptr": None, "residual_ptr": None, "BN": bn, "BW": wide, "GATED": gated, "EVEN": k * bits // 32 == wide,
                 "CACHED": False, "AHEAD": bool(chosen["ahead"]), "EARLY": early, "EMULATED": False,
                 "PROMPT": early if prompt is None else prompt}  # fmt: skip
    if norm:
        signature["gain_ptr"] = "*bf16"
    else:
        constants["gain_ptr"] = None
    if bits < 16:
        signature["scale_ptr"] = "*bf16"
    else:
        constants["scale_ptr"] = None
    if bits == 4:
        signature |= {"groups": "i32"}
        constants |= {"GROUP": 128}
    else:
        constants |= {"M": m, "BITS": bits, "WHOLE": True, "FP16": False, "HALF": bits == 8 and bool(chosen["half"])}
    kernel = gemv_nibbles_kernel if bits == 4 else gemv_kernel
    return compiled(
        kernel, signature, constants, num_warps=warps, aligned=tuple(name for name in signature if name != "eps")
    ), bn * wide * 32 // bits // (32 * warps)


@pytest.mark.parametrize(
    "bits, k, gated, limit", [(16, 4096, True, 2.5), (16, 14336, False, 2.0), (8, 4096, False, 2.2), (4, 4096, False, 3.0)]
)
def test_default(bits: int, k: int, gated: bool, limit: float) -> None:
    chosen = CANDIDATES[bits][0]
    code, weights = code_of(bits, k, chosen, gated, early=True)
    assert code.count(r"LDG\.E\.128\.STRONG\.GPU") == 2 * weights * bits // 128  # the first tile and the next ones: nothing narrower
    assert code.spills == 0 and code.registers * chosen["threads"] <= 65536
    wait = code.text.index("ACQBULK")
    assert code.text[:wait].count("LDG.E.128.STRONG.GPU") == weights * bits // 128  # the first weights are on their way before the wait
    _, instructions = turn(code, 1)
    assert instructions <= limit * weights * bits / 8  # 7 a byte is what the SMs have time for
    if bits < 16:
        assert code.count(r"IMMA\.16832\.S8\.S8") >= weights / 8  # two rows of eight weights a lane, by the high and by the low bytes
        assert not code.count(r"\bI2F\b|HFMA2") and code.count(r"I2FP") <= weights / 16 + 2  # no weight is converted


def test_rows_do_not_spill() -> None:
    code, _ = code_of(16, 4096, {**CANDIDATES[16][0], "bn": 4}, gated=False, early=False, m=2)
    assert code.spills == 0 and not code.count("ACQBULK")


@pytest.mark.parametrize("bits, k", [(16, 4096), (8, 4096), (4, 4096), (8, 5632)])
def test_x_and_gain_come_wide_and_straight(bits: int, k: int) -> None:
    """Each to the thread that needs it: of 32 bits only a tile's scales, shared memory only for the two sums, of norm and products."""
    chosen = default_config(bits, 1, N, k)
    code, _ = code_of(bits, k, chosen, gated=False, early=True, norm=True)
    assert code.spills == 0 and code.registers * chosen["threads"] <= 65536
    assert code.count(r"BAR\.SYNC") <= 8
    start = code.text.index("ACQBULK")
    narrow = re.findall(r"LDG\.E R", code.text[start : start + code.text[start:].index("BAR.SYNC")])
    assert len(narrow) <= (1 if bits == 8 else 0)


@pytest.mark.parametrize("stored, scaled", [("*bf16", False), ("*i8", True)])
def test_decode_attention(stored: str, scaled: bool) -> None:
    """Keys are on their way before the wait; tensor cores; one ticket."""
    constants = {"PAGE": 16, "WINDOWED": False, "D": 128, "BLOCK_D": 128, "BLOCK_G": 16, "BLOCK_N": 64, "MEMBERS": 4, "STEP": 8,
                 "PEEL": True,
                 "UPCAST": False, "PROMPT": True}  # fmt: skip
    named = {"slots_ptr": "*i64", "k_ptr": stored, "v_ptr": stored, "cos_ptr": "*fp32", "sin_ptr": "*fp32", "table_ptr": "*i32",
             "lengths_ptr": "*i32", "ticket_ptr": "*i32", "part_ptr": "*fp32", "lse_ptr": "*fp32", "scale": "fp32",
             "k_scale_ptr": "*fp16", "v_scale_ptr": "*fp16"}  # fmt: skip
    if not scaled:
        constants |= {"k_scale_ptr": None, "v_scale_ptr": None}
    code = attention_code(decode_attention_kernel, constants, named, 8 if scaled else 4, 3)
    assert code.spills == 0
    assert code.count(r"HMMA") >= 8 and code.count("ATOM") == 1
    assert re.search(r"LDG\.E\.128", code.text[: code.text.index("ACQBULK")])
    alone = {name: constants[name] for name in constants if name not in ("BLOCK_G", "MEMBERS", "STEP", "PEEL")} | {"BLOCK_N": 256}
    code = attention_code(decode_attention_head_kernel, alone, named, 8, 1)
    assert code.spills == 0 and not code.count("ATOM") and re.search(r"LDG\.E\.(128|64)", code.text[: code.text.index("ACQBULK")])


def attention_code(kernel: Any, constants: dict[str, Any], named: dict[str, str], warps: int, stages: int) -> Code:
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: named.get(name, "*bf16" if name.endswith("_ptr") else "i32") for name in names}
    return compiled(kernel, signature, constants, num_warps=warps, num_stages=stages, aligned=tuple(name for name in names if "_" in name))


@pytest.mark.parametrize("bits", [16, 4])
def test_nothing_is_read_before_the_wait_where_weights_may_change(bits: int) -> None:
    """Started while the kernel before still writes, but outside weights_are_still()."""
    code, _ = code_of(bits, 4096, CANDIDATES[bits][0], gated=False, early=False, norm=True, prompt=True)
    wait = code.text.find("ACQBULK")
    assert wait >= 0 and "LDG" not in code.text[:wait] and "LDG" in code.text[wait:]
