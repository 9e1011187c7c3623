"""Machine code of attention for sm_90 with the default tiles: tensor cores fed by 128-bit copies, no spills."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from ridgeline.kernel.attention import DKV, DQ, FORWARD
from ridgeline.kernel.attention_kernels import attention_delta, attention_dkv, attention_dq, attention_forward
from tests.kernel.sass import Code, compiled

STRIDES = ("b", "h", "t", "s")


def _code(kernel: Any, tiles: dict[str, int], D: int, dtype: str = "bf16", **more: Any) -> Code:
    constants = {"CAUSAL": True, "RAGGED": False, "UPCAST": False, "D": D, "BLOCK_D": D}
    constants |= {"BLOCK_M": tiles["block_m"], "BLOCK_N": tiles["block_n"], "group": 1, **more}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    names = [name for name in kernel.arg_names if name not in constants]
    kinds = {"lse_ptr": "*fp32", "delta_ptr": "*fp32", "scale": "fp32", "scale_log2": "fp32"}
    signature = {name: kinds.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32") for name in names}
    aligned = tuple(name for name in names if name.endswith("_ptr") or name.rpartition("_")[2] in STRIDES or name in ("T", "S"))
    return compiled(kernel, signature, constants, num_warps=tiles["warps"], num_stages=tiles["stages"], aligned=aligned)


@pytest.mark.parametrize(("kernel", "table"), [(attention_forward, FORWARD), (attention_dkv, DKV), (attention_dq, DQ)])
def test_default_tiles_of_128_columns(kernel: Any, table: dict[int, dict[str, int]]) -> None:
    code = _code(kernel, table[128], 128)
    assert code.spills == 0
    assert code.count("HGMMA") > 0
    assert code.count(r"LDGSTS\.E\.[A-Z.]*128") > 0


def test_one_key_is_a_constant_to_the_compiler() -> None:
    """Triton makes a constant of an argument that is 1; the kernels must still compile."""
    tiles = {"block_m": 64, "block_n": 32, "warps": 4, "stages": 2}
    for kernel in (attention_forward, attention_dkv):
        assert _code(kernel, tiles, 16, CAUSAL=False, RAGGED=True, S=1, T=1, heads=1).registers > 0


def test_delta_reads_in_128_bits() -> None:
    for dtype in ("bf16", "fp32"):
        code = _code(attention_delta, {"block_m": 32, "block_n": 0, "warps": 4, "stages": 3}, 128, dtype)
        assert code.spills == 0
        assert code.count(r"LDG\.E\.[A-Z.]*128") >= 2
