"""Machine code of add and mul for a Hopper GPU: wide loads, nothing spilled."""

from __future__ import annotations

import pytest

tl = pytest.importorskip("triton.language")

from ridgeline.kernel.pointwise import _STRIDED, binary_flat, binary_strided, line  # noqa: E402
from tests.kernel.sass import compiled  # noqa: E402


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_flat(kind: str) -> None:
    chosen = line("add", 4 if kind == "fp32" else 2, 1 << 24)
    pointers = dict.fromkeys(("x_ptr", "y_ptr", "out_ptr"), f"*{kind}")
    code = compiled(binary_flat, {**pointers, "n": "i32"}, {"OP": "add", "COMPUTE": tl.float32, "SCALAR": False, "LONG": False,
                    "BLOCK": chosen["BLOCK"]}, num_warps=chosen["num_warps"], aligned=(*pointers, "n"))  # fmt: skip
    loads = chosen["BLOCK"] // (chosen["num_warps"] * 32) * (4 if kind == "fp32" else 2) // 16
    assert code.count(r"LDG\.E\.128") == 2 * loads and code.count(r"STG\.E\.128") == loads
    assert code.count(r"\bLDG\.") == 2 * loads and code.spills == 0


@pytest.mark.parametrize("transposed", [False, True])
def test_strided(transposed: bool) -> None:
    """A row added to every row, and a transposed operand: both still read and written 128 bits at a time."""
    known = {"n1": 1, "x3": 1, "o3": 1, ("y2" if transposed else "y3"): 1}
    names = [name for name in binary_strided.arg_names if name.islower() and name not in known]
    signature = {name: "*fp32" if name.endswith("ptr") else "i32" for name in names}
    cols = 64 if transposed else _STRIDED["TILE"]
    code = compiled(binary_strided, signature, {**known, "OP": "mul", "COMPUTE": tl.float32, "SCALAR": False,
                    "ROWS": _STRIDED["TILE"] // cols, "COLS": cols}, num_warps=_STRIDED["num_warps"], aligned=tuple(names))  # fmt: skip
    assert code.count(r"LDG\.E\.128") == code.count(r"\bLDG\.") == 8
    assert code.count(r"STG\.E\.128") == 4 and code.spills == 0
