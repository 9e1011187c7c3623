"""Machine code of the activations for a Hopper GPU: wide loads, nothing spilled, and gelu within its instructions."""

from __future__ import annotations

import pytest

tl = pytest.importorskip("triton.language")

from ridgeline.kernel.activation import activation_backward_kernel, activation_kernel  # noqa: E402
from ridgeline.kernel.pointwise import line  # noqa: E402
from tests.kernel.sass import Code, compiled  # noqa: E402


def forward(kind: str, dtype: str) -> tuple[Code, int]:
    chosen = line("gelu", 4 if dtype == "fp32" else 2, 1 << 24)
    code = compiled(activation_kernel, {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "n": "i32"}, {"KIND": kind, "COMPUTE": tl.float32,
                    "LONG": False, "BLOCK": chosen["BLOCK"]}, num_warps=chosen["num_warps"], aligned=("x_ptr", "out_ptr", "n"))  # fmt: skip
    return code, chosen["BLOCK"] // (chosen["num_warps"] * 32)


@pytest.mark.parametrize("kind,dtype", [("gelu", "fp32"), ("gelu_half", "bf16"), ("silu", "bf16"), ("tanh", "fp32")])
def test_forward(kind: str, dtype: str) -> None:
    code, elements = forward(kind, dtype)
    loads = elements * (4 if dtype == "fp32" else 2) // 16
    assert code.count(r"LDG\.E\.128") == code.count(r"\bLDG\.") == loads
    assert code.count(r"STG\.E\.128") == loads and code.spills == 0


def test_gelu_of_half_types_takes_few_instructions() -> None:
    """At 4 TB/s there is time for about 30 an element; erf alone takes that many."""
    code, elements = forward("gelu_half", "bf16")
    arithmetic = code.count(r"\b(?:FFMA|FMUL|FADD|FMNMX|FSEL|FSETP|MUFU|SHF|PRMT|F2FP|HSETP2|IMAD|LOP3|MOV)\b")
    assert arithmetic <= 18 * elements
    assert code.count(r"MUFU\.EX2") == elements


def test_backward() -> None:
    chosen = line("gelu_backward", 2, 1 << 24)
    pointers = dict.fromkeys(("grad_ptr", "x_ptr", "out_ptr"), "*bf16")
    code = compiled(activation_backward_kernel, {**pointers, "n": "i32"}, {"KIND": "gelu_half", "LONG": False, "BLOCK": chosen["BLOCK"]},
                    num_warps=chosen["num_warps"], aligned=(*pointers, "n"))  # fmt: skip
    assert code.count(r"LDG\.E\.128") == 4 and code.count(r"STG\.E\.128") == 2 and code.spills == 0
