"""Machine code of the layer norm kernels for a Hopper GPU: wide loads and stores, nothing spilled."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
import triton.language as tl

from ridgeline.kernel import jit
from ridgeline.kernel import layer_norm as module
from tests.kernel.sass import compiled

pytestmark = pytest.mark.skipif(jit.INTERPRETED, reason="interpreted kernels have no machine code")
WIDE_LOAD, WIDE_STORE = r"LDG\.E\.(?:\w+\.)*128|LDGSTS\.E\.(?:\w+\.)*128", r"STG\.E\.(?:\w+\.)*128"


@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize("block", [256, 4096, module.IN_REGISTERS])
def test_forward(dtype: str, block: int) -> None:
    chosen = module._FORWARD
    signature = {**dict.fromkeys(("x_ptr", "w_ptr", "b_ptr", "y_ptr"), dtype), "mean_ptr": "*fp32", "rstd_ptr": "*fp32", "rows": "i32",
                 "cols": "i32", "eps": "fp32"}  # fmt: skip
    rows = max(1, chosen["TILE"] // block)
    constants = dict(r_ptr=None, s_ptr=None, ACC=tl.float32, VEC=1, FULL=block > 256, ROWS=rows, BLOCK=block, STAGES=chosen["STAGES"],
                     CHUNK=4 if dtype == "*fp32" else 8, LATE=chosen["LATE"], CENTER=True, STREAM=False)  # fmt: skip
    count = module.warps(rows * block, chosen["PER_THREAD"])
    code = compiled(module._forward, signature, constants, num_warps=count, aligned=tuple(signature)[:-1])
    assert code.spills == 0 and code.registers <= 64
    if rows == 1:  # mean and squares by one reduction: 2 barriers with Triton 3.6, 3 with 3.9, where two reductions took 6 and 4
        assert code.count(r"BAR\.SYNC") <= 3
    assert code.count(WIDE_LOAD) == code.count("LDG")
    assert code.count(WIDE_LOAD) > 0 and code.count(WIDE_STORE) > 0


@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize("block", [256, 4096, module.IN_REGISTERS_BACKWARD])
def test_backward(dtype: str, block: int) -> None:
    chosen = module.default_backward(block, 4 if dtype == "*fp32" else 2)
    signature = {**dict.fromkeys(("g_ptr", "x_ptr", "w_ptr", "dx_ptr"), dtype),
                 **dict.fromkeys(("mean_ptr", "rstd_ptr", "dw_ptr", "db_ptr"), "*fp32"), "rows": "i32", "cols": "i32"}  # fmt: skip
    rows = max(1, chosen["TILE"] // block)
    constants = dict(gs_ptr=None, ACC=tl.float32, VEC=1, ROWS=rows, BLOCK=block, STAGES=chosen["STAGES"])
    count = module.warps(rows * block, chosen["PER_THREAD"])
    code = compiled(module._backward, signature, constants, num_warps=count, aligned=tuple(signature))
    assert code.spills == 0
    assert code.count(WIDE_LOAD) > 0 and code.count(WIDE_STORE) > 0


def test_long_rows() -> None:
    signature = {**dict.fromkeys(("x_ptr", "w_ptr", "b_ptr", "y_ptr"), "*bf16"), "mean_ptr": "*fp32", "rstd_ptr": "*fp32", "cols": "i32",
                 "eps": "fp32"}  # fmt: skip
    constants = dict(r_ptr=None, s_ptr=None, ACC=tl.float32, BLOCK=module._CHUNK, STAGES=2)
    code = compiled(module._forward_long, signature, constants, num_warps=8, aligned=tuple(signature)[:-1])
    assert code.spills == 0 and code.count(WIDE_LOAD) > 0
    signature = {**dict.fromkeys(("g_ptr", "x_ptr"), "*bf16"), **dict.fromkeys(("mean_ptr", "rstd_ptr", "dw_ptr", "db_ptr"), "*fp32"),
                 "rows": "i32", "cols": "i32"}  # fmt: skip
    constants = dict(ACC=tl.float32, ROWS=8, BLOCK=256, STAGES=2)
    code = compiled(module._columns, signature, constants, num_warps=4, aligned=tuple(signature))
    assert code.spills == 0 and code.count(WIDE_LOAD) > 0
