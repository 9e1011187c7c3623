"""Machine code of the matmul kernels for Hopper: tensor cores, TMA, shared memory that fits, no spills."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import triton.language as tl

from ridgeline.kernel.jit import INTERPRETED
from ridgeline.kernel.matmul_kernels import default_config, persistent_kernel, pointer_kernel, stages_that_fit
from tests.kernel.sass import Code, compiled

pytestmark = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels have no machine code")
SHARED = 232448
"""Bytes a block may use on an H200."""


def persistent(*, rows: bool = True, gelu: bool = False, residual: bool = False) -> Code:
    chosen = default_config("half", 4096, 4096, 4096, True, 132)
    assert chosen["tma"]
    bm, bn, bk, halves = chosen["bm"], chosen["bn"], chosen["bk"], chosen["halves"]
    a, b = ((bm, bk), (bk, bn)) if rows else ((bk, bm), (bn, bk))
    described = {"a_desc": a, "b_desc": b, "c_desc": (bm, bn // halves)}
    signature = {name: f"tensordesc<bf16[{h},{w}]>" for name, (h, w) in described.items()}
    signature |= dict.fromkeys(("m", "n", "k", "residual_m", "residual_n"), "i32")
    constants = {
        "residual_ptr": None, "pre_ptr": None, "BM": bm, "BN": bn, "BK": bk, "GROUP": chosen["group"], "PROGRAMS": 132, "A_ROWS": rows,
        "B_ROWS": rows, "ACT": "gelu_half" if gelu else "none", "ACC": tl.float32, "HALVES": halves,
        "FLATTEN": bool(chosen["flatten"]), "SPECIALIZE": bool(chosen["specialize"]), "UPCAST": False,
    }  # fmt: skip
    if gelu:
        signature["bias_ptr"] = "*bf16"
    else:
        constants["bias_ptr"] = None
    if residual:
        signature["residual_ptr"] = "*bf16"
        del constants["residual_ptr"], signature["residual_n"]
        constants["residual_n"] = 1  # a contiguous residual: Triton makes a stride of 1 a constant
    stages = stages_that_fit(bm, bn, bk, halves, 2, 2, residual, chosen["stages"], SHARED)
    aligned = ("m", "n", "k", "residual_m", *(name for name in ("bias_ptr", "residual_ptr") if name in signature))
    return compiled(persistent_kernel, signature, constants, num_warps=chosen["warps"], num_stages=stages, aligned=aligned)


def pointer(kind: str, dtype: str, size: int) -> Code:
    chosen = default_config(kind, size, size, size, False, 132)
    pointers = dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), f"*{dtype}")
    sizes = dict.fromkeys(("m", "n", "k", "a_m", "b_k", "residual_m", "residual_n", "chunk"), "i32")
    none = dict.fromkeys(("bias_ptr", "residual_ptr", "pre_ptr", "partial_ptr"))
    constants = {
        **none, "a_k": 1, "b_n": 1, "BM": chosen["bm"], "BN": chosen["bn"], "BK": chosen["bk"], "GROUP": 8, "EVEN_K": True, "ACT": "none",
        "ACC": tl.float32, "UPCAST": False,
    }  # fmt: skip
    aligned = (*pointers, "m", "n", "k", "a_m", "b_k", "chunk")
    return compiled(
        pointer_kernel, {**pointers, **sizes}, constants, num_warps=chosen["warps"], num_stages=chosen["stages"], aligned=aligned
    )


@pytest.mark.parametrize("rows, gelu, residual", [(True, False, False), (False, False, False), (False, True, False), (False, False, True)])
def test_persistent(rows: bool, gelu: bool, residual: bool) -> None:
    code = persistent(rows=rows, gelu=gelu, residual=residual)
    assert code.count(r"HGMMA\.64x256x16") and code.count("UTMALDG") and code.count("UTMASTG")
    assert code.spills == 0 and code.shared <= SHARED


def test_gelu_takes_few_instructions() -> None:
    """While the epilogue runs the tensor cores wait, and erf takes 67 a value."""
    arithmetic = r"\b(?:FFMA|FMUL|FADD|FMNMX|FSEL|FSETP|MUFU)\b"
    code = persistent(rows=False, gelu=True)
    assert 0 < code.count(arithmetic) - persistent(rows=False).count(arithmetic) <= 13 * code.count(r"MUFU\.EX2")


def test_pointer_on_tensor_cores() -> None:
    code = pointer("half", "bf16", 2048)
    assert code.count("HGMMA") and code.count(r"LDGSTS\.E\.BYPASS\.128")
    assert code.spills == 0 and code.shared <= SHARED


def test_float32_as_tf32() -> None:
    code = pointer("tf32", "fp32", 2048)
    assert code.count(r"HGMMA\S*TF32|HMMA\S*TF32") and not code.count("FFMA") and code.spills == 0
