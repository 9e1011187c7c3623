"""Element-wise addition and multiplication.

    x, y ──broadcast, promote──> flat:    all dense with the same strides; one block of a line a program, 128 bits a load
                                 strided: up to 4 merged dimensions; a tile of the two innermost a program
    gradient ──mul: times the other operand──> summed back to the shape of the operand

Least bytes: 3 times the item size an element. Half types compute in float32, whole numbers in their own type.
Left to torch: complex numbers, and float64 with a Python number. More than 4 dimensions that do not merge are copied first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .case import Anchor, Case, Inputs, benchmark
from .jit import cdiv, jit, launch, next_power_of_2, tl
from .library import operator
from .overlap import promptly
from .plan import Plan, planned, start
from .tuning import bucketed, config, space

Number = int | float | bool


@jit
def _combined(x, y, OP: tl.constexpr, COMPUTE: tl.constexpr):  # type: ignore[no-untyped-def]
    x = x.to(COMPUTE)
    y = y.to(COMPUTE)
    if OP == "add":
        out = x + y
    elif OP == "mul":
        out = x * y
    elif OP == "or":
        out = x | y
    else:
        out = x & y
    return out


@jit
def binary_flat(x_ptr, y_ptr, out_ptr, n, OP: tl.constexpr, COMPUTE: tl.constexpr, SCALAR: tl.constexpr,  # type: ignore[no-untyped-def]
                LONG: tl.constexpr, BLOCK: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    promptly(PROMPT)
    start = tl.program_id(0)
    if LONG:
        start = start.to(tl.int64)
    index = start * BLOCK + tl.arange(0, BLOCK)
    mask = index < n
    x = tl.load(x_ptr + index, mask=mask)
    y = tl.full((BLOCK,), y_ptr, COMPUTE) if SCALAR else tl.load(y_ptr + index, mask=mask)
    tl.store(out_ptr + index, _combined(x, y, OP, COMPUTE), mask=mask)


@jit
def binary_strided(x_ptr, y_ptr, out_ptr, n1, n2, n3, x0, x1, x2, x3, y0, y1, y2, y3, o0, o1, o2, o3,  # type: ignore[no-untyped-def]
                   OP: tl.constexpr, COMPUTE: tl.constexpr, SCALAR: tl.constexpr, ROWS: tl.constexpr,
                   COLS: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    promptly(PROMPT)
    col_blocks = tl.cdiv(n3, COLS)
    row_blocks = tl.cdiv(n2, ROWS)
    rest = tl.program_id(0) // col_blocks
    outer = rest // row_blocks
    i0 = (outer // n1).to(tl.int64)
    i1 = (outer % n1).to(tl.int64)
    row = (rest % row_blocks) * ROWS + tl.arange(0, ROWS)[:, None]
    col = (tl.program_id(0) % col_blocks) * COLS + tl.arange(0, COLS)[None, :]
    mask = (row < n2) & (col < n3)
    row = row.to(tl.int64)
    col = col.to(tl.int64)
    x = tl.load(x_ptr + i0 * x0 + i1 * x1 + row * x2 + col * x3, mask=mask)
    y_ptrs = y_ptr if SCALAR else y_ptr + i0 * y0 + i1 * y1 + row * y2 + col * y3
    y = tl.full((ROWS, COLS), y_ptr, COMPUTE) if SCALAR else tl.load(y_ptrs, mask=mask)
    tl.store(out_ptr + i0 * o0 + i1 * o1 + row * o2 + col * o3, _combined(x, y, OP, COMPUTE), mask=mask)


COMPUTE_TYPES: dict[torch.dtype, Any] = {
    torch.float16: tl.float32, torch.bfloat16: tl.float32, torch.float32: tl.float32, torch.float64: tl.float64, torch.bool: tl.int1,
    torch.uint8: tl.uint8, torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64,
}  # fmt: skip
LONG_FROM = 2**31 - 2**16  # from here on an element's number, or that of the end of its block, may not fit int32

BINARIES: dict[str, Callable[..., Tensor]] = {"add": torch.add, "mul": torch.mul}

# A thread with 16 bytes x 2 or 4 loads in flight fills the memory pipe at full occupancy; more only costs registers.
LINES = [{"BLOCK": block, "num_warps": warps} for block, warps in
          ((512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8))]  # fmt: skip
for _name in BINARIES:
    space(_name, __file__, LINES)
space("strided", __file__, [{"TILE": 1024, "num_warps": 4}, {"TILE": 2048, "num_warps": 4}, {"TILE": 4096, "num_warps": 8}])
_STRIDED = {"TILE": 2048, "num_warps": 4}


_LINES = {1: {"BLOCK": 2048, "num_warps": 4}, 2: {"BLOCK": 2048, "num_warps": 4}, 4: {"BLOCK": 1024, "num_warps": 4}, 8: LINES[1]}
_plans: dict[Any, Plan] = {}


def line(op: str, itemsize: int, n: int) -> Any:
    """The configuration of a flat kernel."""
    return config(op, (itemsize, bucketed(n)), _LINES[itemsize])


def flat_plan(op: str, kernel: Any, x: Tensor, constants: dict[str, Any]) -> Plan:
    """Of a kernel over the elements of tensors that are laid out alike."""
    n, itemsize = x.numel(), x.element_size()
    chosen = line(op, itemsize, n)
    constants = {**constants, "LONG": n > LONG_FROM, **chosen}
    return Plan(op, (itemsize, bucketed(n)), _LINES[itemsize], chosen, kernel, (cdiv(n, chosen["BLOCK"]),), (n,), constants)


def _shape(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    """What two shapes broadcast to."""
    if len(a) < len(b):
        a, b = b, a
    lead = len(a) - len(b)
    if any(n != m and n != 1 and m != 1 for n, m in zip(a[lead:], b, strict=True)):
        raise RuntimeError(f"shapes {tuple(a)} and {tuple(b)} do not broadcast")
    return (*a[:lead], *(n if m == 1 else m for n, m in zip(a[lead:], b, strict=True)))


def _binary_empty(x: Tensor, y: Tensor) -> Tensor:
    """Room for the result, laid out like the operand that has its shape."""
    dtype = x.dtype if x.dtype is y.dtype else torch.result_type(x, y)
    if x.shape == y.shape:
        return torch.empty_like(x, dtype=dtype)
    shape = _shape(x.shape, y.shape)
    like = x if x.shape == shape else y
    return torch.empty_like(like, dtype=dtype) if like.shape == shape else x.new_empty(shape, dtype=dtype)


def _scalar_empty(x: Tensor, y: Number) -> Tensor:
    return torch.empty_like(x, dtype=torch.result_type(x, y))


def _kernel_op(op: str, dtype: torch.dtype) -> str:
    """Truth values add as "or" and multiply as "and"."""
    return op if dtype is not torch.bool else "or" if op == "add" else "and"


def _binary_into(op: str, x: Tensor, y: Tensor | Number, out: Tensor, dtype: torch.dtype) -> None:
    """out = x op y; y a tensor that broadcasts with x to the shape of out, or a number."""
    compute = COMPUTE_TYPES.get(dtype)
    scalar = not isinstance(y, Tensor)
    if compute is None or (scalar and dtype is torch.float64):  # a Python float reaches a kernel as float32
        out.copy_(BINARIES[op](x, y))
        return
    value: Any = (float(y) if dtype.is_floating_point else int(y)) if scalar else y
    strides = out.stride()
    n = out.numel()
    # flat: all in the same order without gaps, which empty_like of `out` shows (it keeps strides only then)
    same = x.shape == out.shape and (x.stride() == strides or (x.is_contiguous() and out.is_contiguous()))
    if same and not isinstance(y, (int, float)):
        same = y.shape == out.shape and (y.stride() == strides or (y.is_contiguous() and out.is_contiguous()))
    if same and (out.is_contiguous() or torch.empty_like(out).stride() == strides):
        chosen = line(op, out.element_size(), n)
        launch(binary_flat, (cdiv(n, chosen["BLOCK"]),), x, value, out, n, OP=_kernel_op(op, dtype), COMPUTE=compute,
               SCALAR=scalar, LONG=n > LONG_FROM, **chosen)  # fmt: skip
        return
    _binary_tiles(op, x, value, out, dtype, scalar)


def _alike(x: Tensor, y: Tensor) -> bool:
    """The usual case, told apart quickly: same shape and dtype, no gaps."""
    return x.dtype is y.dtype and x.shape == y.shape and x.dtype in COMPUTE_TYPES and x.is_contiguous() and y.is_contiguous()


def _binary_plan(op: str, x: Tensor) -> Plan:
    return flat_plan(op, binary_flat, x, {"OP": _kernel_op(op, x.dtype), "COMPUTE": COMPUTE_TYPES[x.dtype], "SCALAR": False})


def _binary_tiles(op: str, x: Tensor, y: Any, out: Tensor, dtype: torch.dtype, scalar: bool) -> None:
    operand = x if scalar else y
    dims = _merged(
        tuple(out.shape), tuple(x.shape), x.stride(), tuple(operand.shape), (0,) * x.dim() if scalar else y.stride(), out.stride()
    )
    if len(dims) > 4:  # too many to count apart: copies without gaps need one
        flat = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        y = y if scalar else y.expand(out.shape).contiguous()
        _binary_into(op, x.expand(out.shape).contiguous(), y, flat, dtype)
        out.copy_(flat)
        return
    (n0, n1, n2, n3), *steps = zip(*((1, 0, 0, 0),) * (4 - len(dims)), *dims, strict=True)
    chosen = config("strided", (out.element_size(), bucketed(out.numel())), _STRIDED)
    tile = chosen["TILE"]
    # a line of the innermost dimension where all read along it, nearly a square where one is transposed
    cols = min(next_power_of_2(n3), tile if all(step[3] in (0, 1) for step in steps) else 64)
    rows = min(next_power_of_2(n2), max(1, tile // cols))
    grid = (n0 * n1 * cdiv(n2, rows) * cdiv(n3, cols),)
    launch(binary_strided, grid, x, y, out, n1, n2, n3, *steps[0], *steps[1], *steps[2], OP=_kernel_op(op, dtype),
           COMPUTE=COMPUTE_TYPES[dtype], SCALAR=scalar, ROWS=rows, COLS=cols, num_warps=chosen["num_warps"])  # fmt: skip


Sizes = tuple[int, ...]


@lru_cache(maxsize=1024)  # 10 µs a call otherwise
def _merged(shape: Sizes, x_shape: Sizes, x_stride: Sizes, y_shape: Sizes, y_stride: Sizes, stride: Sizes) -> tuple[Sizes, ...]:
    """(size, stride in x, in y, in out) of every dimension, outermost of out first; those that run on into each other as one."""
    every = zip(shape, _steps(x_shape, x_stride, len(shape)), _steps(y_shape, y_stride, len(shape)), stride, strict=True)
    dims: list[Sizes] = []
    for size, *steps in sorted((dim for dim in every if dim[0] != 1), key=lambda dim: -dim[3]):
        if dims and all(outer == size * inner for outer, inner in zip(dims[-1][1:], steps, strict=True)):
            dims[-1] = (dims[-1][0] * size, *steps)
        else:
            dims.append((size, *steps))
    return tuple(dims)


def _steps(shape: Sizes, stride: Sizes, dims: int) -> Sizes:
    """Strides of a tensor stretched by broadcasting."""
    own = (0 if size == 1 else step for size, step in zip(shape, stride, strict=True))
    return (*(0,) * (dims - len(shape)), *own)


def _summed(grad: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Gradient of an operand that was stretched: back to its shape and dtype."""
    if grad.shape != shape:
        from .reduce import sum_to_shape

        grad = sum_to_shape(grad, shape)
    return grad if grad.dtype is dtype else grad.to(dtype)


def _apart(x: Tensor, out: Tensor) -> Tensor:
    """x, or a copy where writing out could change elements of x before they are read."""
    if x.untyped_storage().data_ptr() != out.untyped_storage().data_ptr():
        return x
    same = x.data_ptr() == out.data_ptr() and x.dtype is out.dtype and x.shape == out.shape and x.stride() == out.stride()
    return x if same else x.clone()


def _register_binary(name: str) -> tuple[Any, Any, Any, Any]:
    """Operators <name>, <name>_scalar and their `_out` forms."""
    plain = BINARIES[name]

    def run(x: Tensor, y: Tensor | Number) -> Tensor:
        if isinstance(y, Tensor) and _alike(x, y):
            out = torch.empty_like(x)
            start(planned(_plans, (name, x.dtype, x.numel(), x.get_device()), _binary_plan, name, x), (x, y, out))
            return out
        out = _binary_empty(x, y) if isinstance(y, Tensor) else _scalar_empty(x, y)
        _binary_into(name, x, y, out, out.dtype)
        return out

    def reference(x: Tensor, y: Tensor | Number) -> Tensor:
        out = _binary_empty(x, y) if isinstance(y, Tensor) else _scalar_empty(x, y)
        return out.copy_(plain(x, y))

    def run_out(x: Tensor, y: Tensor | Number, out: Tensor) -> None:
        dtype = torch.result_type(x, y)
        castable(dtype, out)
        _binary_into(name, _apart(x, out), _apart(y, out) if isinstance(y, Tensor) else y, out, dtype)

    def reference_out(x: Tensor, y: Tensor | Number, out: Tensor) -> None:
        castable(torch.result_type(x, y), out)
        out.copy_(plain(x, y))

    def setup(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
        x, y = args
        ctx.shapes = (x.shape, x.dtype, y.shape, y.dtype)
        if name == "mul":
            ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, y if ctx.needs_input_grad[0] else None)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_shape, x_dtype, y_shape, y_dtype = ctx.shapes
        x, y = ctx.saved_tensors if name == "mul" else (None, None)
        of_x, of_y = ctx.needs_input_grad
        grad_x = _summed(grad if y is None else tensor(grad, y), x_shape, x_dtype) if of_x else None
        grad_y = _summed(grad if x is None else tensor(grad, x), y_shape, y_dtype) if of_y else None
        return grad_x, grad_y

    def setup_scalar(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
        ctx.number = args[1]

    def backward_scalar(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (scalar(grad, ctx.number) if name == "mul" else grad), None

    tensor = operator(f"{name}(Tensor x, Tensor y) -> Tensor", launch=run, reference=reference, fake=_binary_empty, setup=setup,
                      backward=backward)  # fmt: skip
    scalar = operator(f"{name}_scalar(Tensor x, Scalar y) -> Tensor", launch=run, reference=reference, fake=_scalar_empty,
                      setup=setup_scalar, backward=backward_scalar)  # fmt: skip
    tensor_out = operator(f"{name}_out(Tensor x, Tensor y, Tensor(a!) out) -> ()", launch=run_out, reference=reference_out, fake=nothing)
    scalar_out = operator(f"{name}_scalar_out(Tensor x, Scalar y, Tensor(a!) out) -> ()", launch=run_out, reference=reference_out,
                          fake=nothing)  # fmt: skip
    return tensor, scalar, tensor_out, scalar_out


def nothing(*args: Any) -> None:
    """`_out` operators make no tensors."""


_BINARY_OPS = {name: _register_binary(name) for name in BINARIES}


def castable(dtype: torch.dtype, out: Tensor) -> None:
    """Part of the `_out` operators: Dynamo does not trace torch.result_type."""
    if not torch.can_cast(dtype, out.dtype):
        raise RuntimeError(f"a result of {dtype} cannot be stored in out of {out.dtype}")


def fits(out: Tensor, shape: Sequence[int], *inputs: Any) -> Tensor:
    """`out=` by torch's rules, except that a tensor of another shape is an error unless it is empty."""
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (*inputs, out)):
        raise RuntimeError("out= has no gradient; call it under torch.no_grad()")
    if any(size > 1 and step == 0 for size, step in zip(out.shape, out.stride(), strict=True)):
        raise RuntimeError("out is expanded: several of its elements share one place")
    if out.shape != shape:
        if out.numel():
            raise RuntimeError(f"out has shape {tuple(out.shape)}, the result {tuple(shape)}")
        out.resize_(tuple(shape))
    return out


def _binary(name: str, x: Tensor, y: Tensor | Number, out: Tensor | None) -> Tensor:
    tensor, scalar, tensor_out, scalar_out = _BINARY_OPS[name]
    if isinstance(y, Tensor):
        if x.device != y.device:  # torch lets a number on the CPU meet a tensor on the GPU
            x, y = (x, y.to(x.device)) if y.dim() == 0 else (x.to(y.device) if x.dim() == 0 else x, y)
        shape = x.shape if out is None or x.shape == y.shape else _shape(x.shape, y.shape)
    else:
        shape, tensor, tensor_out = x.shape, scalar, scalar_out
    if out is None:
        result: Tensor = tensor(x, y)
        return result
    tensor_out(x, y, fits(out, shape, x, y))
    return out


def add(x: Tensor, y: Tensor | Number, out: Tensor | None = None) -> Tensor:
    """x + y, broadcast and promoted as by torch.add."""
    return _binary("add", x, y, out)


def mul(x: Tensor, y: Tensor | Number, out: Tensor | None = None) -> Tensor:
    """x * y, broadcast and promoted as by torch.mul."""
    return _binary("mul", x, y, out)


def _make(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Inputs:
    return torch.randn(shape, dtype=dtype, device=device), torch.randn(shape, dtype=dtype, device=device)


def _moved(inputs: Inputs, backward: bool) -> int:
    return int(3 * inputs[0].numel() * inputs[0].element_size())


def _peer(name: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(import_module("flag_gems").ops, name)
        return function

    return load


_LIMITS = (Anchor((4096, 4096), torch.float32, limit_ms=1.03 * 0.0484), Anchor((8192, 8192), torch.float32, limit_ms=1.03 * 0.186))
BENCH = tuple(
    benchmark(Case(op=name, ours=_BINARY_OPS[name][0], plain=BINARIES[name], make=_make, moved=_moved, anchors=_LIMITS,
                   peers={"flag_gems": _peer(name)}))
    for name in BINARIES
)  # fmt: skip
