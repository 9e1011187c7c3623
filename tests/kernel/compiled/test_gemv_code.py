"""Machine code of the decode products for Hopper: 128-bit loads only, few instructions a byte, no spills, weights read before the wait."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from ridgeline.kernel.gemv_kernels import CANDIDATES, gemv_kernel, gemv_nibbles_kernel, gemv_shape
from ridgeline.kernel.rope_write import rope_write_kernel
from ridgeline.kernel.tuning import Config
from tests.kernel.compiled.test_weight_only_code import turn
from tests.kernel.sass import Code, compiled

N = 14336


def code_of(bits: int, k: int, chosen: Config, gated: bool, early: bool, m: int = 1) -> tuple[Code, int]:
    """Code, and weights a thread has of a tile."""
    bn, wide, warps, _ = gemv_shape(bits, N, k, chosen, 132, gated)
    signature = {"x_ptr": "*bf16", "w_ptr": "*i32", "out_ptr": "*bf16", "n": "i32", "k": "i32", "words": "i32"}
    constants = {"bias_ptr": None, "residual_ptr": None, "BN": bn, "BW": wide, "GATED": gated, "EVEN": k * bits // 32 == wide,
                 "CACHED": False, "AHEAD": bool(chosen["ahead"]), "EARLY": early, "EMULATED": False}  # fmt: skip
    if bits < 16:
        signature["scale_ptr"] = "*bf16"
    else:
        constants["scale_ptr"] = None
    if bits == 4:
        signature["groups"] = "i32"
        constants |= {"GROUP": 128, "CHAIN": chosen["chain"]}
    else:
        constants |= {"M": m, "BITS": bits, "FP16": False, "HALF": bits == 8 and bool(chosen["half"])}
    kernel = gemv_nibbles_kernel if bits == 4 else gemv_kernel
    return compiled(kernel, signature, constants, num_warps=warps, aligned=tuple(signature)), bn * wide * 32 // bits // (32 * warps)


@pytest.mark.parametrize(
    "bits, k, gated, limit", [(16, 4096, True, 1.95), (16, 14336, False, 2.0), (8, 4096, False, 3.6), (4, 4096, False, 6.4)]
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
        assert code.count(r"\bHFMA2") >= weights / 2  # two products an instruction


def test_rows_and_rope_write_do_not_spill() -> None:
    code, _ = code_of(16, 4096, {**CANDIDATES[16][0], "bn": 4, "loads": 2}, gated=False, early=False, m=2)
    assert code.spills == 0 and not code.count("ACQBULK")
    constants = {"PAGE": 16, "HALF": 64, "BLOCK_D": 64, "UPCAST": False, "EARLY": True}
    named = {"slots_ptr": "*i64", "keys_ptr": "*i8", "values_ptr": "*i8", "key_scale_ptr": "*fp16", "value_scale_ptr": "*fp16",
             "cos_ptr": "*fp32", "sin_ptr": "*fp32"}  # fmt: skip
    names = [name for name in rope_write_kernel.arg_names if name not in constants]
    signature = {name: named.get(name, "*bf16" if name.endswith("_ptr") else "i32") for name in names}
    code = compiled(rope_write_kernel, signature, constants, num_warps=1, aligned=tuple(name for name in names if "_" in name))
    assert code.spills == 0 and code.registers <= 64 and code.count("ACQBULK") == 1
