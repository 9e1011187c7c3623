"""Machine code of the weight-only kernels for Hopper: 128-bit loads of weights, few instructions a weight, tensor cores for many rows."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from ridgeline.kernel.jit import INTERPRETED
from ridgeline.kernel.tuning import Config
from ridgeline.kernel.weight_only_kernels import (
    CANDIDATES,
    default_config,
    dot_int4_kernel,
    dot_int8_kernel,
    dot_shape,
    gemv_int4_kernel,
    gemv_int8_kernel,
    gemv_shape,
)
from tests.kernel.sass import Code, compiled

pytestmark = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels have no machine code")
N, K = 14336, 4096
SHARED = 232448
"""Bytes a block may use on an H200."""
INT8 = {"x_ptr": "*bf16", "q_ptr": "*i32", "scale_ptr": "*bf16", "out_ptr": "*bf16", "n": "i32", "k": "i32"}
INT4 = {"x_ptr": "*bf16", "packed_ptr": "*i32", "scale_ptr": "*bf16", "out_ptr": "*bf16", "n": "i32", "k": "i32", "words": "i32",
        "groups": "i32"}  # fmt: skip


def gemv(bits: int, k: int, chosen: Config) -> tuple[Code, int]:
    """Code, and weights a thread has of each BN rows."""
    wide, steps, warps, _ = gemv_shape(bits, N, k, chosen, 132)
    constants = {"bias_ptr": None, "BN": chosen["bn"], "BW": wide, "STEPS": steps, "FP16": False}
    weights = chosen["bn"] * wide * 32 // bits // (32 * warps)
    if bits == 8:
        return compiled(gemv_int8_kernel, INT8, constants, num_warps=warps, aligned=tuple(INT8)), weights
    constants |= {"zero_ptr": None, "GROUP": 128}
    return compiled(gemv_int4_kernel, INT4, constants, num_warps=warps, aligned=tuple(INT4)), weights


def dot(bits: int, m: int) -> Code:
    chosen = default_config(bits, m, N, K, 132)
    bm, bk, _, _, stages = dot_shape(bits, m, K, chosen["bn"], chosen["bk"], chosen["split"], chosen["stages"], SHARED)
    constants = {"bias_ptr": None, "partial_ptr": None, "BM": bm, "BN": chosen["bn"], "EVEN": True, "UPCAST": False}
    options = {"num_warps": chosen["warps"], "num_stages": stages}
    if bits == 8:
        signature = INT8 | {"q_ptr": "*i8", "m": "i32", "chunk": "i32"}
        return compiled(dot_int8_kernel, signature, constants | {"BK": bk}, aligned=tuple(INT8), **options)
    constants |= {"zero_ptr": None, "GROUP": 128}
    return compiled(dot_int4_kernel, INT4 | {"m": "i32", "chunk": "i32"}, constants, aligned=(*INT4, "chunk"), **options)


def turn(code: Code, steps: int) -> tuple[str, float]:
    """(text of the loop, instructions a turn of it runs): what a branch skips until a tile's last step counts once in `steps`."""
    lines = [line.strip() for line in code.text.splitlines() if re.search(r"/\*[0-9a-f]{4,5}\*/|^\.L_x_\d+:", line)]
    labels = {line.rstrip(":"): number for number, line in enumerate(lines) if line.startswith(".L_x_")}
    jumps = [(number, labels[found[1]]) for number, line in enumerate(lines) if (found := re.search(r"BRA `\((\.L_x_\d+)\)", line))]
    last, first = max(((at, to) for at, to in jumps if to < at - 1), key=lambda jump: jump[0] - jump[1])
    skipped = sum(to - at - 1 for at, to in jumps if first < at < to <= last)
    size = sum(not line.startswith(".L_x_") for line in lines[first : last + 1])
    return "\n".join(lines[first : last + 1]), size - skipped * (steps - 1) / steps


@pytest.mark.parametrize("bits, k, short, limit", [
    (8, 4096, False, 5.2), (8, 14336, False, 5.2), (4, 4096, False, 4.0), (4, 14336, False, 4.0), (4, 14336, True, 4.2),
])  # fmt: skip
def test_gemv(bits: int, k: int, short: bool, limit: float) -> None:
    chosen = next(c for c in CANDIDATES[bits] if c.get("span") == 2048) if short else default_config(bits, 1, N, k, 132)
    code, weights = gemv(bits, k, chosen)
    loads = weights * bits // 128
    assert code.count(r"LDG\.E\.128\.STRONG\.GPU") == 2 * loads  # each thread's first weights and the next: nothing narrower
    assert not code.count(r"\bI2F") and code.spills == 0
    assert code.registers * chosen["threads"] <= 65536  # all programs of an SM at once
    loop, instructions = turn(code, gemv_shape(bits, N, k, chosen, 132)[1])
    assert loop.count("FFMA") >= weights  # this is the loop
    assert instructions <= limit * weights  # at 7.4 a byte the SMs, not the memory, are the limit


@pytest.mark.parametrize("bits", [8, 4])
def test_dot(bits: int) -> None:
    for m in (16, 300):
        code = dot(bits, m)
        assert code.count(r"HGMMA|HMMA") and code.spills == 0 and code.shared <= SHARED
