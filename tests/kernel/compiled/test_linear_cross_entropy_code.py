"""Machine code of the in-place loss kernel with the default configuration for a large vocabulary, for a Hopper GPU."""

from __future__ import annotations

import pytest

from tests.kernel.sass import Code, compiled

pytest.importorskip("triton")

BYTES = {"fp32": 4, "bf16": 2}


def fused(kind: str, *, gradient: bool, smoothing: float = 0.0) -> tuple[Code, int]:
    """Code, and the vectors of a block a thread, for 128256 classes."""
    from ridgeline.kernel.linear_cross_entropy import _fused_kernel, default_config

    chosen = default_config(1 << 17, BYTES[kind])
    signature = {"x_ptr": f"*{kind}", "target_ptr": "*i64", "loss_ptr": "*fp32", "count_ptr": "*fp32"}
    aligned = (*signature, "V")
    values = {"SMOOTHING": smoothing, "GRADIENT": gradient, "AVERAGE": True, "ALIGNED": True, "VEC": 16 // BYTES[kind],
              "PER": chosen["PER"], "THREADS": 32 * chosen["WARPS"], "STAGES": chosen["STAGES"]}  # fmt: skip
    scalars = {"V": "i32", "ignore_index": "i32", "lift": "fp32"}
    code = compiled(_fused_kernel, {**signature, **scalars}, values, num_warps=chosen["WARPS"], aligned=aligned)
    return code, chosen["PER"]


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_both_passes_move_vectors_and_spill_nothing(kind: str) -> None:
    code, vectors = fused(kind, gradient=True)
    assert code.count(r"LDG\.E\.128") >= 4 * vectors  # two passes, each with a loop and a rest
    assert code.count(r"STG\.E\.128") >= 2 * vectors
    assert code.spills == 0


def test_without_gradients_nothing_is_written_back() -> None:
    code, vectors = fused("bf16", gradient=False)
    assert code.count(r"LDG\.E\.128") >= 2 * vectors and code.count(r"STG\.E\.128") == 0 and code.spills == 0


def test_label_smoothing_compiles_and_spills_nothing() -> None:
    """Float32, which Triton 3.6 once failed on: see the test of the same name of cross_entropy."""
    code, vectors = fused("fp32", gradient=True, smoothing=0.1)
    assert code.count(r"LDG\.E\.128") >= 4 * vectors and code.spills == 0


def test_scaling_moves_vectors() -> None:
    from ridgeline.kernel.linear_cross_entropy import _scale_kernel

    code = compiled(
        _scale_kernel,
        {"x_ptr": "*bf16", "by_ptr": "*fp32", "size": "i32"},
        {"BLOCK": 4096},
        num_warps=8,
        aligned=("x_ptr", "by_ptr", "size"),
    )
    assert code.count(r"LDG\.E\.128") == 2 and code.count(r"STG\.E\.128") == 2 and code.spills == 0
