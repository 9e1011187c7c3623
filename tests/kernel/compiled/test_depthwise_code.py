"""Machine code of depthwise banks and of mixing for a Hopper GPU: nothing spilled, and few enough registers for four blocks a processor."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton.language")

from ridgeline.kernel import depthwise_kernels as depthwise
from ridgeline.search.supernet import mixing_kernels as mixing
from tests.kernel.sass import Code, compiled
from tests.support import FULL

SHAPE = {"C": 16, "H": 32, "W": 32, "HO": 32, "WO": 32, "STRIDE": 1, "RELU": True, "MASKED": True}
MOST_REGISTERS = 128
MOST_REGISTERS_MASKED = 160
"""Of the gradient of inputs with flags, whose branches are few: three blocks a processor."""


def code_of(kernel: Any, constants: dict[str, Any], floats: tuple[str, ...] = ()) -> Code:
    """States in bfloat16, weights, sums and gains in float32."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            continue
        if name.endswith("_ptr"):
            whole = "starts" in name or name.startswith(("source", "target", "order"))
            single = name.startswith(("w", "gain", "on")) or "sums" in name
            signature[name] = "*i32" if whole else "*fp32" if single else "*bf16"
        else:
            signature[name] = "fp32" if name in floats else "i32"
    return compiled(kernel, signature, constants, aligned=tuple(name for name in signature if name != "unaligned" and name not in floats))


def test_depthwise() -> None:
    tile = {"ROWS": 1, "COLS": 512}
    forward = code_of(depthwise.bank_forward, {**SHAPE, **tile, "K": 5, "DILATION": 2})
    assert forward.spills == 0 and forward.registers <= MOST_REGISTERS
    assert forward.count(r"LDG\.E\.U16") >= 25 * 4  # a tap's reads: one place a lane, neighbours side by side
    for masked in (False, True) if FULL else ():
        shape = {**SHAPE, **tile, "DILATION": 1, "MASKED": masked}
        backward = code_of(depthwise.bank_grad_input, {**shape, "K0": 3, "K1": 5})
        assert backward.spills == 0 and backward.registers <= (MOST_REGISTERS_MASKED if masked else MOST_REGISTERS)
        weight = code_of(depthwise.bank_grad_weight, {**shape, "K": 5})
        assert weight.spills == 0 and weight.registers <= MOST_REGISTERS


def test_mixing() -> None:
    shape = {"C": 16, "P": 1024, "ROWS": 1, "COLS": 1024, "WIDTH": 64, "MAPPED": True, "MASKED": True}
    kinds = [(mixing.mix, {"GAIN": True}), (mixing.grad_input, {"GAIN": True}), (mixing.sums, {"BACKWARD": True}),
             (mixing.mix, {"GAIN": False, "MAPPED": False}), (mixing.grad_input, {"GAIN": False, "MAPPED": False}),
             (mixing.sums, {"BACKWARD": False, "MAPPED": False})]  # fmt: skip
    kinds += [(kernel, {**more, "MASKED": False}) for kernel, more in kinds]
    for kernel, more in kinds if FULL else kinds[:1]:
        code = code_of(kernel, {**shape, **more}, ("shares", "count", "eps"))
        assert code.spills == 0 and code.registers <= MOST_REGISTERS
        assert code.count(r"LDG\.E\.128") >= 1  # states are read 8 at a time
