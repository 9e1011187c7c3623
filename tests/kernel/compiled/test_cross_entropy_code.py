"""Machine code of the cross-entropy kernels with the default configurations, for a Hopper GPU."""

from __future__ import annotations

import pytest

from tests.kernel.sass import Code, compiled

pytest.importorskip("triton")

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}
INNER = {"fp64": "*fp64", "fp32": "*fp32", "bf16": "*fp32"}
SIZES = {"stride": "i32", "N": "i32", "V": "i32", "ignore_index": "i32"}


def constants(op: str, kind: str, *, aligned: bool) -> tuple[dict[str, object], int]:
    """(constants of the kernel, warps) as the launcher sets them for 32000 or 50257 classes."""
    from ridgeline.kernel.cross_entropy import default_config

    chosen = default_config(op, 1 << 15, BYTES[kind])
    vector = 16 // BYTES[kind]
    shape = {"VEC": vector, "PER": chosen["PER"], "THREADS": 32 * chosen["WARPS"], "STAGES": chosen["STAGES"]}
    return {"SMOOTHING": 0.0, "ALIGNED": aligned, **shape}, chosen["WARPS"]


def forward(kind: str, *, aligned: bool = True, smoothing: float = 0.0) -> tuple[Code, int]:
    """Code, and the exponentials of a block a thread."""
    from ridgeline.kernel.cross_entropy import _forward_kernel

    values, warps = constants("cross_entropy", kind, aligned=aligned)
    pointers = {"x_ptr": f"*{kind}", "target_ptr": "*i64", "loss_ptr": f"*{kind}", "stats_ptr": INNER[kind]}
    known = (*pointers, "stride", "V") if aligned else tuple(pointers)
    values |= {"EACH": False, "SMOOTHING": smoothing}
    code = compiled(_forward_kernel, {**pointers, **SIZES}, values, num_warps=warps, aligned=known)
    return code, int(values["PER"]) * int(values["VEC"])  # type: ignore[call-overload]


def backward(kind: str, *, aligned: bool = True) -> Code:
    from ridgeline.kernel.cross_entropy import _backward_kernel

    values, warps = constants("cross_entropy_backward", kind, aligned=aligned)
    pointers = {"grad_ptr": f"*{kind}", "x_ptr": f"*{kind}", "target_ptr": "*i64", "stats_ptr": "*fp32", "out_ptr": f"*{kind}"}
    known = (*pointers, "stride", "V") if aligned else tuple(pointers)
    signature = {**pointers, "grad_stride": "i32", **SIZES}
    return compiled(_backward_kernel, signature, {"AVERAGE": True, "SAME": True, **values}, num_warps=warps, aligned=known)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_forward_reads_vectors_and_takes_one_exponential_an_element(kind: str) -> None:
    code, block = forward(kind)
    assert code.count(r"LDG\.E\.128") >= 2 * block * BYTES[kind] // 16  # in the loop and after it
    assert code.spills == 0 and code.registers <= 64
    assert code.count(r"MUFU\.EX2") <= 2 * block + 3  # a rescaling each in loop and rest, and one of the whole row
    assert code.count(r"SHFL") <= 20  # threads talk at the end of a row only


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_backward_reads_and_writes_vectors(kind: str) -> None:
    code = backward(kind)
    assert code.count(r"LDG\.E\.128") >= 4 and code.count(r"STG\.E\.128") >= 4
    assert code.spills == 0 and code.registers <= 64
    assert code.count(r"SHFL") == 0


def test_rows_that_do_not_start_on_a_vector_are_read_in_vectors_too() -> None:
    code, block = forward("bf16", aligned=False)
    assert code.count(r"LDG\.E\.128") >= block * 2 // 16 and code.spills == 0
    code = backward("bf16", aligned=False)
    assert code.count(r"LDG\.E\.128") >= 2 and code.count(r"STG\.E\.128") >= 2 and code.spills == 0


@pytest.mark.parametrize("kind", ["fp64", "fp32", "bf16"])
def test_label_smoothing_compiles_and_spills_nothing(kind: str) -> None:
    """Triton 3.6 stops with "PassManager::run failed" where loads that need no conversion are summed and the sums kept over a loop."""
    code, block = forward(kind, smoothing=0.1)
    assert code.count(r"LDG\.E\.128") >= 2 * block * BYTES[kind] // 16 and code.spills == 0
