"""Compiling, loading and calling: what is checked before C sees a pointer, and what is said when gcc cannot help."""

from __future__ import annotations

import numpy
import pytest
import torch

from ridgeline.core.errors import MeasureError, MissingExtraError, OptionError
from ridgeline.estimate.spatial.layer import Layer
from ridgeline.estimate.spatial.lowering import compile_layer, compile_layers, naive, run_c, shapes
from tests.estimate.spatial.lowering.cases import convolve, operands

LAYER = Layer("conv", {"B": 2, "G": 2, "K": 3, "C": 2, "P": 4, "Q": 5, "R": 3}, padding=(1, 0))


def test_shapes_are_torchs() -> None:
    assert shapes(LAYER) == {"W": (6, 2, 3, 1), "I": (2, 4, 4, 5), "O": (2, 6, 4, 5)}


def test_torch_and_numpy_contiguous_or_not() -> None:
    compiled = compile_layer(naive(LAYER))
    weights, inputs = operands(LAYER, 1)
    expected = convolve(LAYER, weights, inputs, torch.float64)
    backwards = numpy.ascontiguousarray(inputs[..., ::-1])[..., ::-1]
    assert not backwards.flags.c_contiguous
    for given in (inputs, backwards, torch.from_numpy(inputs), torch.from_numpy(inputs).requires_grad_()):
        assert numpy.array_equal(compiled(weights, given), expected)


def test_a_matmul_is_a_convolution_with_one_tap() -> None:
    rows, columns = numpy.arange(12.0, dtype="float32").reshape(4, 3), numpy.arange(6.0, dtype="float32").reshape(3, 2)
    compiled = compile_layer(naive(Layer("matmul", {"P": 4, "C": 3, "K": 2})))
    result = compiled(columns.T.reshape(2, 3, 1, 1), rows.T.reshape(1, 3, 4, 1))
    assert numpy.array_equal(result.reshape(2, 4).T, rows @ columns)


def test_wrong_shapes_and_types_never_reach_the_pointer() -> None:
    compiled = compile_layer(naive(LAYER))
    weights, inputs = operands(LAYER, 1)
    for given in ((weights[:-1], inputs), (weights, inputs[0]), (weights.astype("float64"), inputs), (weights, inputs.astype("int32"))):
        with pytest.raises(OptionError) as error:
            compiled(*given)
        assert "compiled for float32" in error.value.why


def test_the_same_source_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = run_c._gcc
    monkeypatch.setattr(run_c, "_gcc", lambda arguments: calls.append(arguments) or real(arguments))
    layer = Layer("once only", {"K": 3, "C": 2})
    compile_layers([naive(layer), naive(layer, "c k")])
    compile_layers([naive(layer), naive(layer, "c k")])
    assert len(calls) == 1
    assert {"-O3", "-march=native"} <= set(calls[0])


def test_without_gcc_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_c.shutil, "which", lambda name: None)
    with pytest.raises(MissingExtraError, match="gcc is not installed"):
        run_c.build("int never_compiled;")


def test_code_that_does_not_compile_is_reported() -> None:
    with pytest.raises(MeasureError) as error:
        run_c.build("this is not C")
    assert "error" in error.value.why


def test_gcc_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_c, "COMPILE_LIMIT_S", 0.0)
    with pytest.raises(MeasureError, match="did not finish"):
        run_c.build("int too_slow;")


def test_registers_are_a_machines() -> None:
    lanes, count = run_c.registers()
    assert lanes in (4, 8, 16) and count in (16, 32)
