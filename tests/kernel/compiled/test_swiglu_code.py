"""Machine code of SwiGLU for a Hopper GPU: wide loads, nothing spilled."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from ridgeline.kernel.swiglu import _chosen, swiglu_backward_kernel, swiglu_kernel
from tests.kernel.sass import compiled


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("backward", [False, True])
def test_loads(backward: bool, kind: str) -> None:
    kernel = swiglu_backward_kernel if backward else swiglu_kernel
    size = 4 if kind == "fp32" else 2
    chosen = _chosen("swiglu_backward" if backward else "swiglu", 8192 * 14336, size, 1)
    signature = {name: f"*{kind}" if name.endswith("ptr") else "i32" for name in kernel.arg_names if name.islower()}
    code = compiled(kernel, signature, {"BLOCK": chosen["BLOCK"]}, num_warps=chosen["num_warps"], aligned=tuple(signature))
    vectors = chosen["BLOCK"] // (chosen["num_warps"] * 32) * size // 16
    assert code.count(r"LDG\.E\.128") == code.count(r"\bLDG\.") == (3 if backward else 2) * vectors
    assert code.count(r"STG\.E\.128") == (2 if backward else 1) * vectors
    assert code.spills == 0
