"""Machine code of the softmax kernels for a Hopper GPU: wide loads and stores, nothing spilled."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")
import triton.language as tl

from ridgeline.kernel import jit
from ridgeline.kernel import softmax as module
from tests.kernel.sass import Code, compiled

pytestmark = pytest.mark.skipif(jit.INTERPRETED, reason="interpreted kernels have no machine code")


WIDE_LOAD, WIDE_STORE = r"LDG\.E\.(?:\w+\.)*128|LDGSTS\.E\.(?:\w+\.)*128", r"STG\.E\.(?:\w+\.)*128"


def build(kernel: Any, tensors: tuple[str, ...], dtype: str, block: int, **more: Any) -> Code:
    """With the configuration shipped for rows of `block` columns."""
    chosen = module.default(block, len(tensors) == 3)
    signature = {**dict.fromkeys(tensors, dtype), "rows": "i32", "cols": "i32"}
    constants = dict(LOG=False, ACC=tl.float32, VEC=1, ROWS=max(1, chosen["TILE"] // block), BLOCK=block, STAGES=chosen["STAGES"], **more)
    count = module.warps(max(block, chosen["TILE"]), chosen["PER_THREAD"])
    return compiled(kernel, signature, constants, num_warps=count, aligned=tuple(signature))


@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize("block", [64, 1024, 32768])
def test_rows_in_registers(dtype: str, block: int) -> None:
    chunk, stream = 4 if dtype == "*fp32" else 8, block == 1024
    forward = build(module._rows_forward, ("x_ptr", "y_ptr"), dtype, block, FULL=block > 64, CHUNK=chunk, STREAM=stream)
    assert (forward.count(r"LDG\.E\.EF\.128") > 0) == (forward.count(r"STG\.E\.EF\.128") > 0) == stream  # hints reach the machine
    backward = build(module._rows_backward, ("g_ptr", "y_ptr", "dx_ptr"), dtype, block, AGAIN=block > 16384)
    for code in (forward, backward):
        assert code.spills == 0
        assert code.count(WIDE_LOAD) == code.count("LDG") > 0
        assert code.count(WIDE_STORE) == code.count("STG") > 0
    if dtype == "*bf16" and block > 1024:  # maximum and sum by one reduction: one exchange between the warps
        assert forward.count(r"BAR\.SYNC") <= 2


def test_rows_of_eight_times_an_odd_number() -> None:
    """Triton alone knows only of multiples of 16; VEC tells it."""
    signature = {"x_ptr": "*bf16", "y_ptr": "*bf16", "rows": "i32", "cols": "i32"}
    constants = dict(LOG=False, ACC=tl.float32, VEC=8, FULL=False, ROWS=1, BLOCK=1024, CHUNK=8, STAGES=0, STREAM=False)
    code = compiled(module._rows_forward, signature, constants, num_warps=1, aligned=("x_ptr", "y_ptr"))
    assert code.count(WIDE_LOAD) == code.count("LDG") > 0


@pytest.mark.parametrize("inner", [1, None])
def test_long_rows_and_other_dims(inner: int | None) -> None:
    chosen = module._STRIDED
    lanes = 1 if inner == 1 else 64
    for kernel, tensors in ((module._strided_forward, ("x_ptr", "y_ptr")), (module._strided_backward, ("g_ptr", "y_ptr", "dx_ptr"))):
        signature = {**dict.fromkeys(tensors, "*bf16"), "cols": "i32", **({} if inner == 1 else {"inner": "i32"})}
        constants = dict(LOG=False, ACC=tl.float32, BLOCK=chosen["TILE"] // lanes, INNER=lanes, STAGES=chosen["STAGES"])
        constants |= {"inner": 1} if inner == 1 else {}
        count = module.warps(chosen["TILE"], chosen["PER_THREAD"])
        code = compiled(kernel, signature, constants, num_warps=count, aligned=tuple(signature))
        assert code.spills == 0
        assert code.count(r"LDG\.E\.(?:\w+\.)*128|LDGSTS\.E\.(?:\w+\.)*128") > 0
        assert code.count(r"STG\.E\.(?:\w+\.)*128") > 0
