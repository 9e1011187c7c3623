"""Activations: relu, silu, gelu (both formulas), sigmoid, tanh.

    x ──one block of a line a program, 128 bits a load──> f(x)        2 x item size bytes an element
    grad, x ──the same; f computed again from x──> grad * f'(x)       3 x item size

x that has gaps or overlaps is copied first; the result has the strides of x where x has none. Half types compute in float32.
gelu of half types takes the tail of the normal distribution as 2^Q(|x|), Q a polynomial of degree 7 fitted here: relative error under
6e-6 for |x| < 2 and 8e-5 for |x| < 6, far below half a unit of bfloat16 and float16, at less than half the instructions of erf.
Left to torch: complex numbers and float64.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .case import Anchor, Case, Inputs, benchmark
from .jit import jit, tl
from .library import operator
from .overlap import promptly
from .plan import Plan, planned, start
from .pointwise import COMPUTE_TYPES, LINES, castable, fits, flat_plan, nothing
from .replace import replaces, worth
from .tuning import space


@jit
def _normal_tail(a):  # type: ignore[no-untyped-def]
    """P(N(0,1) > a) for 0 <= a <= 16, as 2^Q(a)."""
    q = -1.5767525e-06 * a + 5.6334793e-05
    q = q * a - 8.890690e-04
    q = q * a + 8.3483867e-03
    q = q * a - 5.3647168e-02
    q = q * a - 0.45876110
    q = q * a - 1.1511371
    return tl.exp2(q * a - 1.0000058)


@jit
def activated(x, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The activation of a float32 block; relu also of other types."""
    if KIND == "relu":
        out = tl.where(x < 0, 0, x)  # keeps NaN, as torch does
    elif KIND == "silu":
        out = x / (1.0 + tl.exp(-x))
    elif KIND == "sigmoid":
        out = 1.0 / (1.0 + tl.exp(-x))
    elif KIND == "gelu":
        out = 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))
    elif KIND == "gelu_half":
        # x for x > 0, 0 below, less |x| * tail: even in the correction, so no sign to choose; min keeps inf * 0 out
        a = tl.minimum(tl.abs(x), 16.0)
        out = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - a * _normal_tail(a)
    elif KIND == "gelu_tanh":
        # (1 + tanh u) / 2 = 1 / (1 + exp(-2u)): no cancellation, no overflow
        out = x / (1.0 + tl.exp(-1.5957691216057308 * x * (1.0 + 0.044715 * x * x)))
    else:
        # exp cancels near 0: an odd polynomial there (Cephes, tanhf)
        s = x * x
        p = (((-5.70498872745e-3 * s + 2.06390887954e-2) * s - 5.37397155531e-2) * s + 1.33314422036e-1) * s - 3.33332819422e-1
        a = tl.abs(x)
        far = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * a))
        out = tl.where(a < 0.625, x + x * s * p, tl.where(x < 0, -far, far))
    return out


@jit
def _pulled(grad, x, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """grad times the slope at x."""
    if KIND == "relu":
        out = tl.where(x <= 0, 0.0, grad)
    elif KIND == "silu":
        s = 1.0 / (1.0 + tl.exp(-x))
        out = grad * s * (1.0 + x * (1.0 - s))
    elif KIND == "sigmoid":
        e = tl.exp(tl.abs(x))
        out = grad / (2.0 + e + 1.0 / e)  # no cancellation at either end, and the error of e cancels near 0
    elif KIND == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        out = grad * (0.5 * (1.0 + tl.erf(0.7071067811865476 * x)) + x * density)
    elif KIND == "gelu_half":
        tail = _normal_tail(tl.minimum(tl.abs(x), 16.0))
        density = 0.3989422804014327 * tl.exp2(-0.7213475204444817 * x * x)
        out = grad * (tl.where(x < 0, tail, 1.0 - tail) + x * density)
    elif KIND == "gelu_tanh":
        e = tl.exp(-1.5957691216057308 * tl.abs(x) * (1.0 + 0.044715 * x * x))
        r = 1.0 / (1.0 + e)  # of |x|: 1 - r loses the tail, e * r does not
        out = grad * (tl.where(x < 0, e * r, r) + x * e * r * r * 1.5957691216057308 * (1.0 + 0.134145 * x * x))
    else:
        e = tl.exp(2.0 * tl.abs(x))
        out = 4.0 * grad / (2.0 + e + 1.0 / e)
    return out


@jit
def activation_kernel(x_ptr, out_ptr, n, KIND: tl.constexpr, COMPUTE: tl.constexpr, LONG: tl.constexpr,  # type: ignore[no-untyped-def]
                      BLOCK: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    promptly(PROMPT)
    start = tl.program_id(0)
    if LONG:
        start = start.to(tl.int64)
    index = start * BLOCK + tl.arange(0, BLOCK)
    mask = index < n
    x = tl.load(x_ptr + index, mask=mask).to(COMPUTE)
    tl.store(out_ptr + index, activated(x, KIND), mask=mask)


@jit
def activation_backward_kernel(grad_ptr, x_ptr, out_ptr, n, KIND: tl.constexpr, LONG: tl.constexpr,  # type: ignore[no-untyped-def]
                               BLOCK: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    promptly(PROMPT)
    start = tl.program_id(0)
    if LONG:
        start = start.to(tl.int64)
    index = start * BLOCK + tl.arange(0, BLOCK)
    mask = index < n
    grad = tl.load(grad_ptr + index, mask=mask).to(tl.float32)
    x = tl.load(x_ptr + index, mask=mask).to(tl.float32)
    tl.store(out_ptr + index, _pulled(grad, x, KIND), mask=mask)


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
_aten = torch.ops.aten


def _silu_slope(grad: Tensor, x: Tensor) -> Tensor:
    """aten.silu_backward, which cannot be differentiated."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x.to(wide)
    share = torch.sigmoid(x)
    return grad.to(wide) * share * (1 + x * (1 - share))


SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of grad and x; torch can differentiate them
    "relu": lambda grad, x: _aten.threshold_backward(grad, x, 0),
    "silu": lambda grad, x: _silu_slope(grad, x),
    "gelu": lambda grad, x: _aten.gelu_backward(grad, x),
    "gelu_tanh": lambda grad, x: _aten.gelu_backward(grad, x, approximate="tanh"),
    "sigmoid": lambda grad, x: _aten.sigmoid_backward(grad, torch.sigmoid(x)),
    "tanh": lambda grad, x: _aten.tanh_backward(grad, torch.tanh(x)),
}
for _name in ACTIVATIONS:
    space(_name, __file__, LINES)
    space(f"{_name}_backward", __file__, LINES)


_plans: dict[Any, Plan] = {}


def _activation_dtype(name: str, x: Tensor) -> torch.dtype | None:
    """Of the result; None where the kernel does not do it."""
    if x.dtype in _FLOATS:
        return x.dtype
    if x.dtype not in COMPUTE_TYPES or x.dtype is torch.float64:
        return None
    if name == "relu":
        return None if x.dtype is torch.bool else x.dtype
    default = torch.get_default_dtype()
    return default if name in ("sigmoid", "tanh") and default in _FLOATS else None


def _activation_launch(name: str, x: Tensor, out: Tensor) -> None:
    """x and out share their strides and have no gaps."""
    start(planned(_plans, (name, x.dtype, x.numel(), x.get_device()), _activation_plan, name, x), (x, out))


def kind_for(name: str, out: Tensor) -> str:
    """The formula of an activation whose result is `out`."""
    return "gelu_half" if name == "gelu" and out.element_size() == 2 else name


def _activation_plan(name: str, x: Tensor) -> Plan:
    compute = COMPUTE_TYPES[x.dtype] if name == "relu" else tl.float32
    return flat_plan(name, activation_kernel, x, {"KIND": kind_for(name, x), "COMPUTE": compute})


def _activation(name: str, x: Tensor) -> Tensor:
    dtype = _activation_dtype(name, x)
    if dtype is None:
        plain = ACTIVATIONS[name](x)
        return torch.empty_like(x, dtype=plain.dtype).copy_(plain)
    out = torch.empty_like(x, dtype=dtype)
    if not x.is_contiguous() and out.stride() != x.stride():
        x = x.clone()  # into the strides empty_like chose
    _activation_launch(name, x, out)
    return out


def _activation_out(name: str, x: Tensor, out: Tensor) -> None:
    dtype = _activation_dtype(name, x)
    # out in place of x is fine, out that overlaps it is not: an element would be read after it was written
    inplace = x.data_ptr() == out.data_ptr() and x.dtype is out.dtype
    apart = inplace or x.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()
    if dtype is out.dtype and apart and x.is_contiguous() and out.is_contiguous():
        _activation_launch(name, x, out)
    else:
        result = _activation(name, x)
        castable(result.dtype, out)
        out.copy_(result)


def _activation_backward(name: str, grad: Tensor, x: Tensor) -> Tensor:
    if x.dtype not in _FLOATS:
        return _activation_backward_reference(name, grad, x)
    out = torch.empty_like(x)
    if not x.is_contiguous() and out.stride() != x.stride():
        x = x.clone()
    if grad.stride() != x.stride() and not (grad.is_contiguous() and x.is_contiguous()):
        grad = torch.empty_like(x).copy_(grad)
    start(planned(_plans, ("backward", name, x.dtype, x.numel(), x.get_device()), _backward_plan, name, x), (grad, x, out))
    return out


def _backward_plan(name: str, x: Tensor) -> Plan:
    return flat_plan(f"{name}_backward", activation_backward_kernel, x, {"KIND": kind_for(name, x)})


def _activation_backward_reference(name: str, grad: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(SLOPES[name](grad, x))


def _register_activation(name: str) -> tuple[Any, Any, Any]:
    """Operators <name>, <name>_out and <name>_backward."""

    def fake(x: Tensor) -> Tensor:
        whole = not x.dtype.is_floating_point and not x.dtype.is_complex
        return torch.empty_like(x, dtype=torch.get_default_dtype() if whole and name != "relu" else x.dtype)

    def reference(x: Tensor) -> Tensor:
        return fake(x).copy_(ACTIVATIONS[name](x))

    def reference_out(x: Tensor, out: Tensor) -> None:
        plain = ACTIVATIONS[name](x)
        castable(plain.dtype, out)
        out.copy_(plain)

    def setup(ctx: Any, args: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(args[0])

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        result: Tensor = pull(grad, *ctx.saved_tensors)
        return result

    pull = operator(f"{name}_backward(Tensor grad, Tensor x) -> Tensor", launch=lambda grad, x: _activation_backward(name, grad, x),
                    reference=lambda grad, x: _activation_backward_reference(name, grad, x),
                    fake=lambda grad, x: torch.empty_like(x), twice=True)  # fmt: skip
    plain = operator(f"{name}(Tensor x) -> Tensor", launch=lambda x: _activation(name, x), reference=reference, fake=fake, setup=setup,
                     backward=backward)  # fmt: skip
    into = operator(f"{name}_out(Tensor x, Tensor(a!) out) -> ()", launch=lambda x, out: _activation_out(name, x, out),
                    reference=reference_out, fake=nothing)  # fmt: skip
    return plain, into, pull


_ACTIVATION_OPS = {name: _register_activation(name) for name in ACTIVATIONS}


def pulled(name: str, grad: Tensor, x: Tensor) -> Tensor:
    """grad times the slope of an activation at x."""
    result: Tensor = _ACTIVATION_OPS[name][2](grad, x)
    return result


def _activate(name: str, x: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        result: Tensor = _ACTIVATION_OPS[name][0](x)
        return result
    _ACTIVATION_OPS[name][1](x, fits(out, x.shape, x))
    return out


def relu(x: Tensor, out: Tensor | None = None) -> Tensor:
    """max(x, 0)."""
    return _activate("relu", x, out)


def silu(x: Tensor, out: Tensor | None = None) -> Tensor:
    """x * sigmoid(x)."""
    return _activate("silu", x, out)


def gelu(x: Tensor, approximate: str = "none", out: Tensor | None = None) -> Tensor:
    """x * P(N(0,1) < x); `approximate="tanh"` is torch's other formula."""
    if approximate not in ("none", "tanh"):
        raise RuntimeError(f"approximate must be 'none' or 'tanh', not {approximate!r}")
    return _activate("gelu" if approximate == "none" else "gelu_tanh", x, out)


def sigmoid(x: Tensor, out: Tensor | None = None) -> Tensor:
    """1 / (1 + exp(-x))."""
    return _activate("sigmoid", x, out)


def tanh(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Hyperbolic tangent."""
    return _activate("tanh", x, out)


@replaces("gelu", functional.gelu)
def gelu_stand_in(input: Tensor, approximate: str = "none") -> Any:
    """For F.gelu."""
    name = "gelu" if approximate == "none" else "gelu_tanh"
    if approximate not in ("none", "tanh") or not worth(name, input, input.numel()):
        return NotImplemented
    return _activate(name, input, None)


@replaces("silu", functional.silu)
def silu_stand_in(input: Tensor, inplace: bool = False) -> Any:
    """For F.silu; not in place."""
    if inplace or not worth("silu", input, input.numel()):
        return NotImplemented
    return _activate("silu", input, None)


def _make(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Inputs:
    return (torch.randn(shape, dtype=dtype, device=device, requires_grad=True),)


def _moved(inputs: Inputs, backward: bool) -> int:
    return int((5 if backward else 2) * inputs[0].numel() * inputs[0].element_size())


def _peer(name: str) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        function = getattr(import_module("flag_gems").ops, name.partition("_")[0])
        return (lambda x: function(x, approximate="tanh")) if name == "gelu_tanh" else lambda x: function(x)

    return load


_LIMITS = {"gelu": (Anchor((8192, 14336), torch.bfloat16, limit_ms=0.150),)}
BENCH = tuple(
    benchmark(Case(op=name, ours=_ACTIVATION_OPS[name][0], plain=ACTIVATIONS[name], make=_make, moved=_moved, differentiable=True,
                   anchors=_LIMITS.get(name, ()), peers={"flag_gems": _peer(name)}))
    for name in ACTIVATIONS
)  # fmt: skip
