"""Machine code of the batch norm kernels for a Hopper GPU: wide loads and stores, nothing spilled, in every configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl

from ridgeline.kernel import batch_norm as module
from ridgeline.kernel import jit
from tests.kernel.sass import Code, compiled

pytestmark = pytest.mark.skipif(jit.INTERPRETED, reason="interpreted kernels have no machine code")
WIDE_LOAD, WIDE_STORE = r"LDG\.E\.(?:\w+\.)*128|LDGSTS\.E\.(?:\w+\.)*128", r"STG\.E\.(?:\w+\.)*128"


def code_of(kernel: Any, absent: str, dtype: str, config: int, **constants: object) -> Code:
    """With x and what is like it in `dtype`, the rest in float32."""
    chosen = module.SPACE[config]
    missing = {f"{name}_ptr" for name in absent.split()}
    pointers = [name for name in kernel.arg_names if name.endswith("_ptr") and name not in missing]
    whole = dict.fromkeys(pointers, "*fp32") | dict.fromkeys(LIKE_X.intersection(pointers), dtype)
    whole |= {name: "i32" for name in kernel.arg_names if name in ("rows", "cols")}
    tile = chosen["TILE"] // chosen["BLOCK"]
    constants |= {**dict.fromkeys(missing), "ACC": tl.float32, "VEC": 1, "ROWS": tile, "BLOCK": chosen["BLOCK"], "STAGES": chosen["STAGES"]}
    count = module.warps(tile * chosen["BLOCK"], chosen["PER_THREAD"])
    signature = whole | ({"eps": "fp32"} if "eps" in kernel.arg_names else {})
    return compiled(kernel, signature, constants, num_warps=count, aligned=tuple(whole))


USUAL = module.SPACE.index(module._USUAL)
LIKE_X = {"g_ptr", "x_ptr", "r_ptr", "y_ptr", "dx_ptr", "dr_ptr"}


@pytest.mark.parametrize("config,dtype", [(USUAL, "*fp32"), *((at, "*bf16") for at in range(len(module.SPACE)))])
def test_streams(config: int, dtype: str) -> None:
    walks = (
        (module._statistics, "r", {}),
        (module._apply, "r", {"KIND": "relu"}),
        (module._slopes, "r dr", {"KIND": "relu"}),
        (module._apply_backward, "r dr", {"KIND": "relu"}),
    )
    for kernel, absent, constants in walks:
        code = code_of(kernel, absent, dtype, config, **constants)
        assert code.spills == 0, kernel
        assert code.count(WIDE_LOAD) > 0
        assert kernel in (module._statistics, module._slopes) or code.count(WIDE_STORE) > 0


@pytest.mark.parametrize("kind", module.ACTIVATIONS)
def test_residual(kind: str) -> None:
    for kernel in (module._apply, module._apply_backward):
        code = code_of(kernel, "", "*bf16", USUAL, KIND=kind)
        assert code.spills == 0 and code.count(WIDE_LOAD) > 0 and code.count(WIDE_STORE) > 0


@pytest.mark.parametrize("absent", ["", "r w b dx dr dw db"])
def test_joins(absent: str) -> None:
    """What is launched between two walks, with the tensors of both; gradients of half weights are rounded on the way out."""
    x = torch.zeros(64, 1024, dtype=torch.bfloat16)
    for plan in (module._plan_forward(x, "relu").then, module._plan_backward(x, "relu", True).then):
        assert plan is not None
        names = [name for name in plan.kernel.arg_names if name.endswith("_ptr")]
        missing = [name for name in names if name.removesuffix("_ptr") in absent.split()]
        pointers = {name: "*fp32" if name in ("part_ptr", "sums_ptr", "stats_ptr") else "*bf16" for name in names if name not in missing}
        numbers = {name: "fp32" if name == "eps" else "i32" for name in ("rows", "cols", "parts", "eps") if name in plan.kernel.arg_names}
        constants = {**dict.fromkeys(missing), **plan.constants}
        code = compiled(plan.kernel, {**pointers, **numbers}, constants, num_warps=constants.pop("num_warps"), aligned=(*pointers, "cols"))
        assert code.spills == 0
        assert (code.count(r"F2FP\.BF16") > 0) == ("dw_ptr" in pointers)
