"""Emitted C, compiled by gcc, loaded and called.

    [Nest, …] ──emit──> one C file ──gcc -O3 -march=native──> shared library ──ctypes──> [CompiledLayer, …]
    CompiledLayer(weights, inputs) ──shapes and types checked──> outputs (numpy)

A file is compiled once a process. gcc gets a list of arguments and a time limit, and works in a folder of its own that is
gone when it is done. Functions run on one thread; a lock keeps two callers out of one padded copy.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ....core.errors import MeasureError, MissingExtraError, OptionError
from ..layer import Layer
from .emit import PRELUDE, emit_function
from .nest import Nest

# -fwrapv: int32 sums wrap around as torch's do, where plain C leaves overflow undefined
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fwrapv", "-shared", "-fPIC")
COMPILE_LIMIT_S = 300.0

_LIBRARIES: dict[str, ctypes.CDLL] = {}
_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class CompiledLayer:
    """One compiled function and the shapes it was compiled for."""

    layer: Layer
    dtype: str
    function: Any
    lock: Any

    def __call__(self, weights: Any, inputs: Any) -> Any:
        """O [B, G*K, P, Q] as a numpy array, from torch tensors or numpy arrays of the compiled dtype."""
        import numpy

        output = numpy.empty(shapes(self.layer)["O"], self.dtype)
        self.run_into(self.checked("W", weights), self.checked("I", inputs), output)
        return output

    def checked(self, operand: str, values: Any) -> Any:
        """The operand as a contiguous numpy array, copied only if it is not one yet."""
        import numpy

        array = numpy.asarray(values.detach() if hasattr(values, "detach") else values)
        expected = shapes(self.layer)[operand]
        if array.shape != expected or array.dtype != self.dtype:
            raise OptionError(
                f"{operand} is {array.dtype} {list(array.shape)}",
                why=f"layer {self.layer.name} was compiled for {self.dtype} {list(expected)}",
                do="convert the operand, or compile the layer for it",
            )
        return numpy.ascontiguousarray(array)

    def run_into(self, weights: Any, inputs: Any, output: Any) -> None:
        """The bare call, for timing: arrays must come from `checked`, the output from an earlier call."""
        with self.lock:
            self.function(weights.ctypes.data, inputs.ctypes.data, output.ctypes.data)


def compile_layer(nest: Nest, dtype: str = "float32") -> CompiledLayer:
    """One nest, compiled."""
    return compile_layers([nest], dtype)[0]


def compile_layers(nests: Sequence[Nest], dtype: str = "float32") -> list[CompiledLayer]:
    """Several nests in one file: one run of gcc."""
    names = [f"layer{number}" for number in range(len(nests))]
    library = build("\n".join([PRELUDE, *(emit_function(nest, dtype, name=name) for nest, name in zip(nests, names, strict=True))]))
    found = []
    for nest, name in zip(nests, names, strict=True):
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_void_p] * 3, None
        found.append(CompiledLayer(nest.layer, dtype, function, threading.Lock()))
    return found


def shapes(layer: Layer) -> dict[str, tuple[int, ...]]:
    """Shapes of W, I and O as torch has them."""
    d = layer.dims
    return {
        "W": (d["G"] * d["K"], d["C"], d["R"], d["S"]),
        "I": (d["B"], d["G"] * d["C"], *layer.input_size),
        "O": (d["B"], d["G"] * d["K"], d["P"], d["Q"]),
    }


def build(source: str) -> ctypes.CDLL:
    """The library of a C file, compiled at most once a process."""
    key = hashlib.sha256("\0".join([*FLAGS, source]).encode()).hexdigest()
    with _LOCK:
        if key not in _LIBRARIES:
            _LIBRARIES[key] = _compile(source)
        return _LIBRARIES[key]


def _compile(source: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="ridgeline-c-") as folder:
        code, library = Path(folder, "layer.c"), Path(folder, "layer.so")
        code.write_text(source, encoding="utf-8")
        _gcc([*FLAGS, str(code), "-o", str(library)])
        return ctypes.CDLL(str(library))  # stays loaded when the folder is gone


@cache
def registers() -> tuple[int, int]:
    """(lanes of 32 bits in a vector register, vector registers) of this machine, as gcc knows it."""
    macros = _gcc(["-march=native", "-dM", "-E", "-x", "c", "/dev/null"])
    wide = "__AVX512F__" in macros
    return 16 if wide else 8 if "__AVX__" in macros else 4, 32 if wide or "__aarch64__" in macros else 16


def _gcc(arguments: list[str]) -> str:
    gcc = shutil.which("gcc")
    if gcc is None:
        raise MissingExtraError("gcc is not installed", why="the emitted C has to be compiled", do="install gcc, or read the C from emit_c")
    try:
        done = subprocess.run([gcc, *arguments], capture_output=True, text=True, check=False, timeout=COMPILE_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise MeasureError("gcc did not finish", why=f"more than {COMPILE_LIMIT_S:.0f} s", do="unroll less") from error
    if done.returncode:
        raise MeasureError(
            "gcc refused the emitted C", why=done.stderr.strip()[:2000], do="report this nest: emitted C should always compile"
        )
    return done.stdout
