"""Machine code of the batch norm kernels for a Hopper GPU: wide loads and stores, nothing spilled, in every configuration."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
import triton.language as tl

from ridgeline.kernel import batch_norm as module
from ridgeline.kernel import jit
from tests.kernel.sass import Code, compiled

pytestmark = pytest.mark.skipif(jit.INTERPRETED, reason="interpreted kernels have no machine code")
WIDE_LOAD, WIDE_STORE = r"LDG\.E\.(?:\w+\.)*128|LDGSTS\.E\.(?:\w+\.)*128", r"STG\.E\.(?:\w+\.)*128"


def code_of(kernel: object, tensors: str, absent: str, dtype: str, config: int, **constants: object) -> Code:
    chosen = module.SPACE[config]
    whole = {**dict.fromkeys((f"{name}_ptr" for name in tensors.split()), dtype)}
    sums = dict.fromkeys(("mean_ptr", "square_ptr") if kernel is module._statistics else ("stats_ptr", "w_ptr", "b_ptr"), "*fp32")
    sums |= {} if kernel in (module._statistics, module._apply) else dict.fromkeys(("dw_ptr", "db_ptr"), "*fp32")
    signature = {**whole, **sums, "rows": "i32", "cols": "i32"}
    tile = chosen["TILE"] // chosen["BLOCK"]
    constants |= {**dict.fromkeys(f"{name}_ptr" for name in absent.split()), "ACC": tl.float32, "VEC": 1, "ROWS": tile,
                  "BLOCK": chosen["BLOCK"], "STAGES": chosen["STAGES"]}  # fmt: skip
    count = module.warps(tile * chosen["BLOCK"], chosen["PER_THREAD"])
    return compiled(kernel, signature, constants, num_warps=count, aligned=tuple(signature))


USUAL = module.SPACE.index(module._USUAL)


@pytest.mark.parametrize("config,dtype", [(USUAL, "*fp32"), *((at, "*bf16") for at in range(len(module.SPACE)))])
def test_streams(config: int, dtype: str) -> None:
    walks = (
        (module._statistics, "x", "", {}),
        (module._apply, "x y", "r", {"KIND": "relu"}),
        (module._slopes, "g x", "r", {"KIND": "relu"}),
        (module._apply_backward, "g x dx", "r dr", {"KIND": "relu"}),
    )
    for kernel, tensors, absent, constants in walks:
        code = code_of(kernel, tensors, absent, dtype, config, **constants)
        assert code.spills == 0, kernel
        assert code.count(WIDE_LOAD) > 0
        assert kernel in (module._statistics, module._slopes) or code.count(WIDE_STORE) > 0


@pytest.mark.parametrize("kind", module.ACTIVATIONS)
def test_residual(kind: str) -> None:
    kept = (module._apply_backward, "g x r dx dr", "", {"KIND": kind})
    for kernel, tensors, absent, constants in ((module._apply, "x r y", "", {"KIND": kind}), kept):
        code = code_of(kernel, tensors, absent, "*bf16", USUAL, **constants)
        assert code.spills == 0 and code.count(WIDE_LOAD) > 0 and code.count(WIDE_STORE) > 0
