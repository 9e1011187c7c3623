"""SwiGLU: silu(gate) * up, the gate of a transformer's perceptron.

    gate, up [..., N] ──one pass──> gate * sigmoid(gate) * up [..., N]                   3 x item size bytes an element
    grad, gate, up    ──one pass, sigmoid computed again──> grad_gate, grad_up           5 x item size
    packed: x [..., 2N], gate the first half of the last dimension, up the second; its gradient is one tensor again

Tensors are seen as rows with a stride each, so halves of a wider tensor are read in place; without gaps it is all one row.
Other layouts are copied first; results are contiguous. Arithmetic in float32; float64 is left to torch.
The backward pass runs from the last element to the first: the end of gate and up is what the forward pass left in the L2 cache.
Ref: Shazeer 2020, GLU Variants Improve Transformer.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .case import Anchor, Case, Inputs, benchmark
from .jit import cdiv, jit, launch, tl
from .library import operator
from .overlap import promptly
from .plan import Plan, planned, start
from .tuning import Config, bucketed, config, space


@jit
def swiglu_kernel(gate_ptr, up_ptr, out_ptr, n, gate_row, up_row, BLOCK: tl.constexpr, PROMPT: tl.constexpr = False):  # type: ignore[no-untyped-def]
    promptly(PROMPT)
    blocks = tl.cdiv(n, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    # int64 before the product: one row may be longer than int32 counts
    col = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = col < n
    gate = tl.load(gate_ptr + row * gate_row + col, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + col, mask=mask).to(tl.float32)
    tl.store(out_ptr + row * n + col, gate / (1.0 + tl.exp(-gate)) * up, mask=mask)


@jit
def swiglu_backward_kernel(grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, n, grad_row, gate_row, up_row,  # type: ignore[no-untyped-def]
                           grad_gate_row, grad_up_row, BLOCK: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    promptly(PROMPT)
    blocks = tl.cdiv(n, BLOCK)
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (number // blocks).to(tl.int64)
    col = (number % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = col < n
    grad = tl.load(grad_ptr + row * grad_row + col, mask=mask).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_row + col, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + col, mask=mask).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    pulled = grad * share
    tl.store(grad_gate_ptr + row * grad_gate_row + col, pulled * up * (1.0 + gate * (1.0 - share)), mask=mask)
    tl.store(grad_up_ptr + row * grad_up_row + col, pulled * gate, mask=mask)


_CANDIDATES = [{"BLOCK": block, "num_warps": warps} for block, warps in
               ((512, 2), (1024, 4), (1024, 2), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8))]  # fmt: skip
space("swiglu", __file__, _CANDIDATES)
space("swiglu_backward", __file__, _CANDIDATES)


_HALF, _WIDE = {"BLOCK": 2048, "num_warps": 4}, {"BLOCK": 1024, "num_warps": 4}
_plans: dict[Any, Plan] = {}


def _chosen(op: str, n: int, itemsize: int, rows: int) -> Any:
    # a single row is the flat case
    return config(op, (itemsize, bucketed(n), rows == 1), _usual(itemsize))


def _usual(itemsize: int) -> Config:
    """Two 128-bit loads an operand and thread in flight."""
    return _HALF if itemsize == 2 else _WIDE


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """x, copied unless it is rows of one stride, and that stride."""
    shape, strides = x.shape, x.stride()
    if x.dim() > 1 and strides[-1] == 1:
        step = strides[-2]
        size = shape[-2]
        for n, stride in zip(shape[-3::-1], strides[-3::-1], strict=True):
            if n != 1 and stride != step * size:
                break
            size *= n
        else:
            return x, step
    x = x.contiguous()
    return x, shape[-1] if shape else 1


def _flat(op: str, kernel: Any, x: Tensor, steps: int) -> Plan:
    """Of tensors without gaps: one long row."""
    n, itemsize = x.numel(), x.element_size()
    chosen = _chosen(op, n, itemsize, 1)
    return Plan(
        op, (itemsize, bucketed(n), True), _usual(itemsize), chosen, kernel, (cdiv(n, chosen["BLOCK"]),), (n, *(0,) * steps), dict(chosen)
    )


def _launch(gate: Tensor, up: Tensor) -> Tensor:
    if gate.dtype is torch.float64:
        return _reference(gate, up)
    if gate.is_contiguous() and up.is_contiguous():
        out = torch.empty_like(gate)
        start(planned(_plans, (gate.dtype, gate.numel(), gate.get_device()), _flat, "swiglu", swiglu_kernel, gate, 2), (gate, up, out))
        return out
    out, n = gate.new_empty(gate.shape), gate.shape[-1]
    total = out.numel()
    (gate, gate_row), (up, up_row) = _rows(gate), _rows(up)
    rows = total // n if n else 0
    chosen = _chosen("swiglu", total, gate.element_size(), rows)
    launch(swiglu_kernel, (rows * cdiv(n, chosen["BLOCK"]),), gate, up, out, n, gate_row, up_row, **chosen)
    return out


def _reference(gate: Tensor, up: Tensor) -> Tensor:
    return (functional.silu(gate) * up).contiguous()


def _fake(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


def _launch_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    if gate.dtype is torch.float64:
        return _reference_backward(grad, gate, up)
    if grad.is_contiguous() and gate.is_contiguous() and up.is_contiguous():
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(gate)
        key = ("backward", gate.dtype, gate.numel(), gate.get_device())
        plan = planned(_plans, key, _flat, "swiglu_backward", swiglu_backward_kernel, gate, 5)
        start(plan, (grad, gate, up, grad_gate, grad_up))
        return grad_gate, grad_up
    grad_gate, grad_up = (gate.new_empty(gate.shape) for _ in range(2))
    n = gate.shape[-1]
    (grad, grad_row), (gate, gate_row), (up, up_row) = _rows(grad), _rows(gate), _rows(up)
    rows, steps = (grad.numel() // n if n else 0), (grad_row, gate_row, up_row, n, n)
    chosen = _chosen("swiglu_backward", grad.numel(), gate.element_size(), rows)
    grid = (rows * cdiv(n, chosen["BLOCK"]),)
    launch(swiglu_backward_kernel, grid, grad, gate, up, grad_gate, grad_up, n, *steps, **chosen)
    return grad_gate, grad_up


def _reference_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    share = torch.sigmoid(gate)
    return (grad * up * share * (1 + gate * (1 - share))).contiguous(), (grad * gate * share).contiguous()


def _fake_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _launch_packed(x: Tensor) -> Tensor:
    if x.dtype is torch.float64:
        return _reference_packed(x)
    x, step = _rows(x)
    n = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], n))
    rows = out.numel() // n if n else 0
    chosen = _chosen("swiglu", out.numel(), x.element_size(), rows)
    launch(swiglu_kernel, (rows * cdiv(n, chosen["BLOCK"]),), x, x[..., n:], out, n, step, step, **chosen)
    return out


def _reference_packed(x: Tensor) -> Tensor:
    return _reference(*x.chunk(2, dim=-1))


def _fake_packed(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _launch_packed_backward(grad: Tensor, x: Tensor) -> Tensor:
    if x.dtype is torch.float64:
        return _reference_packed_backward(grad, x)
    (grad, grad_row), (x, x_row) = _rows(grad), _rows(x)
    n = grad.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = grad.numel() // n if n else 0
    chosen = _chosen("swiglu_backward", grad.numel(), x.element_size(), rows)
    grid = (rows * cdiv(n, chosen["BLOCK"]),)
    launch(swiglu_backward_kernel, grid, grad, x, x[..., n:], out, out[..., n:], n, grad_row, x_row, x_row, 2 * n, 2 * n, **chosen)
    return out


def _reference_packed_backward(grad: Tensor, x: Tensor) -> Tensor:
    return torch.cat(_reference_backward(grad, *x.chunk(2, dim=-1)), dim=-1)


def _fake_packed_backward(grad: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _setup(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*args)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    gate, up = ctx.saved_tensors
    if not ctx.needs_input_grad[0]:
        return None, _swiglu(gate, grad)  # grad * silu(gate)
    grads: tuple[Tensor, Tensor] = _swiglu_backward(grad, gate, up)
    return grads[0], grads[1] if ctx.needs_input_grad[1] else None


def _backward_packed(ctx: Any, grad: Tensor) -> Tensor:
    result: Tensor = _swiglu_packed_backward(grad, *ctx.saved_tensors)
    return result


_swiglu_backward = operator("swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)",
                            launch=_launch_backward, reference=_reference_backward, fake=_fake_backward, twice=True)  # fmt: skip
_swiglu = operator("swiglu(Tensor gate, Tensor up) -> Tensor",
                   launch=_launch, reference=_reference, fake=_fake, setup=_setup, backward=_backward)  # fmt: skip
_swiglu_packed_backward = operator("swiglu_packed_backward(Tensor grad, Tensor x) -> Tensor",
                                   launch=_launch_packed_backward, reference=_reference_packed_backward,
                                   fake=_fake_packed_backward, twice=True)  # fmt: skip
_swiglu_packed = operator("swiglu_packed(Tensor x) -> Tensor",
                          launch=_launch_packed, reference=_reference_packed, fake=_fake_packed, setup=_setup,
                          backward=_backward_packed)  # fmt: skip


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; the two broadcast and promote as torch's operators do."""
    if gate.dtype is not up.dtype:
        dtype = torch.promote_types(gate.dtype, up.dtype)
        gate, up = gate.to(dtype), up.to(dtype)
    if gate.shape != up.shape:
        gate, up = torch.broadcast_tensors(gate, up)
    if not gate.is_floating_point():
        raise RuntimeError(f"swiglu needs floating point numbers, not {gate.dtype}")
    result: Tensor = _swiglu(gate, up)
    return result


def swiglu_packed(x: Tensor) -> Tensor:
    """silu of the first half of the last dimension, times the second half."""
    if x.dim() == 0 or x.shape[-1] % 2:
        raise RuntimeError(f"swiglu_packed needs a last dimension of even size, not {tuple(x.shape)}")
    if not x.is_floating_point():
        raise RuntimeError(f"swiglu_packed needs floating point numbers, not {x.dtype}")
    result: Tensor = _swiglu_packed(x)
    return result


def _plain(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _make(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Inputs:
    return tuple(torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(2))


def _moved(inputs: Inputs, backward: bool) -> int:
    return int((8 if backward else 3) * inputs[0].numel() * inputs[0].element_size())


def _liger() -> Any:
    return import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction.apply


BENCH = benchmark(
    Case(
        op="swiglu",
        ours=swiglu,
        plain=_plain,
        make=_make,
        moved=_moved,
        anchors=(
            Anchor((8192, 14336), torch.bfloat16, limit_ms=0.168),
            Anchor((8192, 14336), torch.bfloat16, backward=True, limit_ms=0.44),
        ),
        differentiable=True,
        peers={"liger": _liger},
    )
)
