"""Triton, or a clear error where it is not installed.

    @jit kernels ──launch(kernel, grid, *args, **constants)──> the GPU, or the interpreter with TRITON_INTERPRET=1

Kernel files import `jit`, `tl` and `launch` from here, so that they load, and register their operators with plain-torch references,
on machines without Triton. Kernels keep to what the interpreter gets right: arithmetic in float32 (it is wrong for bfloat16), no
@triton.autotune, no libdevice, no inline assembly. A kernel with a PROMPT parameter is started promptly (overlap.py) where the GPU can.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ..core.errors import MissingExtraError

__all__ = ["HAVE_TRITON", "INTERPRETED", "cdiv", "empty", "jit", "launch", "next_power_of_2", "recorded", "tl", "triton"]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run as Python on the CPU; Triton reads the variable when a kernel is defined, so it must be set at start."""

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    if not TYPE_CHECKING:

        class _Language:
            """Stands in for triton.language in annotations and defaults of kernels that cannot run here."""

            def __getattr__(self, name: str) -> Any:
                return self

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return self

        tl = _Language()

HAVE_TRITON = triton is not None
_KNOWN_LAUNCHER = HAVE_TRITON and triton.__version__.startswith("3.6.")
"""Its launcher's C function takes a kernel's arguments one by one, after the grid, the stream and what Ready.before has."""
_recorder: list[tuple[Any, tuple[int, ...], Any]] | None = None


def jit(function: Callable[..., Any]) -> Any:
    """triton.jit; without Triton, something that says so when it is launched."""
    return triton.jit(function) if HAVE_TRITON else _Missing(function.__name__)


class _Missing:
    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: Any) -> Any:
        raise MissingExtraError(f"kernel {self.name} cannot run", why="Triton is not installed", do="pip install 'ridgeline[gpu]'")


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Start a kernel on the current stream; nothing for an empty grid.

    Triton's own way through `kernel[grid]` binds, specialises and checks anew each time, 10 µs of host time or more. The first
    launch of a kind goes that way; later ones of the same kind (see `_kind`) call the compiled kernel, with bare pointers.
    """
    if 0 in grid:
        return
    if INTERPRETED or not HAVE_TRITON:
        _launch_by_triton(kernel, grid, args, constants)
        return
    constants = with_prompt(kernel, constants)
    if _recorder is not None:
        _launch_by_triton(kernel, grid, args, constants)
        return
    kind = _kind(kernel, args, constants)
    if kind is None:
        _launch_by_triton(kernel, grid, args, constants)
        return
    key, values = kind
    ready = _ready.get(key)
    if ready is None:
        compiled = _launch_by_triton(kernel, grid, args, constants)
        tail = _tail(kernel, len(args), constants)
        if compiled is not None and tail is not None:
            _ready[key] = Ready(compiled, tail)
        return
    ready(grid, torch._C._cuda_getCurrentRawStream(key[1]), values)


def with_prompt(kernel: Any, constants: dict[str, Any]) -> dict[str, Any]:
    """Constants, with those of a prompt start where the kernel knows how, the GPU can (from Hopper on) and PROMPT=False is not given."""
    if not hasattr(kernel, "params"):  # something that wraps a kernel
        return constants
    device = torch._C._cuda_getDevice()
    able = _prompt.get((id(kernel), device))
    if able is None:
        knows = any(parameter.name == "PROMPT" for parameter in kernel.params)
        able = _prompt[id(kernel), device] = knows and torch.cuda.get_device_capability(device)[0] >= 9
    return {**constants, "PROMPT": True, "launch_pdl": True} if able and constants.get("PROMPT", True) else constants


class Ready:
    """A compiled kernel and how it is started, without what Triton does in Python at every launch."""

    __slots__ = ("before", "descriptors", "run", "tail")

    def __init__(self, compiled: Any, tail: tuple[Any, ...]) -> None:
        self.tail = tail
        """Values of the parameters after those that are given."""
        self.run = launcher = compiled.run
        self.before: tuple[Any, ...] = (compiled.function, compiled.packed_metadata, None, None, None)
        """What `run` takes between the stream and the kernel's arguments."""
        self.descriptors: tuple[Any, ...] = ()
        """How each tensor descriptor, the first arguments, is encoded: where it is us who do that."""
        scratch = getattr(launcher, "global_scratch_size", True) or getattr(launcher, "profile_scratch_size", True)
        if _KNOWN_LAUNCHER and not scratch:
            self.run = launcher.launch
            self.before = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, *self.before[1:])
            inside = inspect.getclosurevars(self.run).nonlocals if inspect.isfunction(self.run) else {}
            if inside.get("tensordesc_indices") == set(range(len(inside.get("tensordesc_meta", ())))):
                self.run, self.descriptors = inside["launcher"], tuple(inside["tensordesc_meta"])

    def __call__(self, grid: tuple[int, ...], stream: int, values: Sequence[Any]) -> None:
        if self.descriptors:
            given = len(self.descriptors)
            maps = [part for at, how in zip(values, self.descriptors, strict=False) for part in _encoded(at, how)]
            values = (*maps, *values[given:])
        self.run(*(*grid, 1, 1)[:3], stream, *self.before, *values, *self.tail)


def _encoded(descriptor: Any, how: Any) -> Sequence[Any]:
    """A tensor descriptor as the launcher takes it; kept with it, for encoding it takes microseconds."""
    kept = descriptor.__dict__.get("_encoded")
    if kept is None or kept[0] is not how:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        kept = descriptor.__dict__["_encoded"] = (how, make_tensordesc_arg(descriptor, how))
    encoded: Sequence[Any] = kept[1]
    return encoded


_prompt: dict[tuple[int, int], bool] = {}
_ready: dict[tuple[Any, ...], Ready] = {}
_constexpr: dict[int, tuple[bool, ...]] = {}


def _launch_by_triton(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    compiled = kernel[grid](*args, **constants)
    if _recorder is not None:
        _recorder.append((kernel, grid, compiled))
    return compiled


def _kind(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[tuple[Any, ...], list[Any]] | None:
    """(what Triton compiles a kernel for, arguments with pointers for tensors); None where an argument is of another sort.

    That is the device, dtype and 16-byte alignment of tensors, whether an integer is 1, a multiple of 16, or needs 64 bits, and
    the value of every constant.
    """
    fixed = _constexpr.get(id(kernel))
    if fixed is None:
        if not hasattr(kernel, "params"):  # something that wraps a kernel
            return None
        fixed = _constexpr[id(kernel)] = tuple(parameter.is_constexpr for parameter in kernel.params)
    key: list[Any] = [id(kernel), torch._C._cuda_getDevice()]
    values: list[Any] = []
    for arg, constant in zip(args, fixed, strict=False):
        if isinstance(arg, torch.Tensor):
            pointer = arg.data_ptr()
            key += (arg.dtype, pointer & 15 == 0)
            values.append(pointer)
            continue
        if arg is None or constant or isinstance(arg, bool):
            key += (arg, type(arg))
        elif isinstance(arg, int):
            wide = "L" if not -(1 << 31) <= arg < 1 << 31 else "i"
            key.append(wide + ("1" if arg == 1 else "D" if arg & 15 == 0 else ""))
        elif isinstance(arg, float):
            key.append("f")
        elif hasattr(arg, "block_shape"):  # a tensor descriptor: its map is encoded at every launch
            key += (arg.base.dtype, *arg.block_shape)
        else:
            return None
        values.append(arg)
    key += constants.items()
    return tuple(key), values


def _tail(kernel: Any, given: int, constants: dict[str, Any]) -> tuple[Any, ...] | None:
    """Values of the parameters after the positional ones, all of them constants; None where one is not."""
    values = []
    for parameter in kernel.params[given:]:
        if not parameter.is_constexpr:
            return None
        values.append(constants.get(parameter.name, parameter.default))
    return tuple(values)


@contextmanager
def recorded() -> Iterator[list[tuple[Any, tuple[int, ...], Any]]]:
    """(kernel, grid, compiled kernel or None) of every launch inside, of any thread: backward runs on autograd's own."""
    global _recorder
    before, _recorder = _recorder, []
    try:
        yield _recorder
    finally:
        _recorder = before


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """torch.empty, at half its host time: 1.7 against 3.5 µs."""
    return torch.empty_strided(shape, _contiguous_strides(shape), dtype=dtype, device=device)


@lru_cache(maxsize=4096)
def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(max(size, 1) for size in shape[at + 1 :]) for at in range(len(shape)))


def cdiv(a: int, b: int) -> int:
    """Blocks of b that cover a."""
    return -(-a // b)


def next_power_of_2(number: int) -> int:
    """The smallest power of two >= number; 1 for 0."""
    return 1 << max(0, number - 1).bit_length()
