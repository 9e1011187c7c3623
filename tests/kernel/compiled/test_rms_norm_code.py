"""Machine code of the RMS norm kernels for a Hopper GPU: wide loads and stores, nothing spilled."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
import triton.language as tl

from ridgeline.kernel import jit
from ridgeline.kernel import layer_norm as shared
from tests.kernel.sass import compiled

pytestmark = pytest.mark.skipif(jit.INTERPRETED, reason="interpreted kernels have no machine code")
WIDE_LOAD, WIDE_STORE = r"LDG\.E\.(?:\w+\.)*128|LDGSTS\.E\.(?:\w+\.)*128", r"STG\.E\.(?:\w+\.)*128"


@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize("residual", [False, True])
def test_forward(dtype: str, residual: bool) -> None:
    chosen = shared._FORWARD
    tensors = ("x_ptr", "w_ptr", "y_ptr", *(("r_ptr", "s_ptr") if residual else ()))
    signature = {**dict.fromkeys(tensors, dtype), "rstd_ptr": "*fp32", "rows": "i32", "cols": "i32", "eps": "fp32"}
    absent = dict.fromkeys(("b_ptr", "mean_ptr", *(() if residual else ("r_ptr", "s_ptr"))))
    constants = {**absent, "ACC": tl.float32, "VEC": 1, "FULL": True, "ROWS": 1, "BLOCK": 4096, "STAGES": chosen["STAGES"],
                 "CHUNK": 4 if dtype == "*fp32" else 8, "LATE": chosen["LATE"], "CENTER": False, "STREAM": not residual}  # fmt: skip
    count = shared.warps(4096, chosen["PER_THREAD"])
    code = compiled(shared._forward, signature, constants, num_warps=count, aligned=tuple(signature)[:-1])
    assert code.spills == 0
    assert code.count(WIDE_LOAD) > 0 and code.count(WIDE_STORE) > 0
    assert (code.count(r"LDG\.E\.EF\.128") > 0) == (code.count(r"STG\.E\.EF\.128") > 0) == (not residual)  # hints of large tensors


@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize("residual", [False, True])
def test_backward(dtype: str, residual: bool) -> None:
    chosen = shared.default_backward(8192, 4 if dtype == "*fp32" else 2)
    tensors = ("g_ptr", "x_ptr", "w_ptr", "dx_ptr", *(("gs_ptr",) if residual else ()))
    signature = {**dict.fromkeys(tensors, dtype), "rstd_ptr": "*fp32", "dw_ptr": "*fp32", "rows": "i32", "cols": "i32"}
    absent = dict.fromkeys(("mean_ptr", "db_ptr", *(() if residual else ("gs_ptr",))))
    constants = {**absent, "ACC": tl.float32, "VEC": 1, "ROWS": 1, "BLOCK": 8192, "STAGES": chosen["STAGES"]}
    count = shared.warps(8192, chosen["PER_THREAD"])
    code = compiled(shared._backward, signature, constants, num_warps=count, aligned=tuple(signature))
    assert code.spills == 0
    assert code.count(WIDE_LOAD) > 0 and code.count(WIDE_STORE) > 0
