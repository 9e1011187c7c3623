"""Triton kernels of matmul.py and how one is chosen and launched.

    a [M, K] @ b [K, N], any strides ──config──> persistent (TMA, a program an SM) | pointer (a tile a program) | pointer + reduce (split K)
      accumulator, float32 ──+ bias──> pre (kept on request) ──activation, + residual──> out [M, N]

Tile order: GROUP rows of tiles at a time, so that the tiles in flight share their operands in L2.
TMA needs a unit stride, the other stride and the base multiples of 16 bytes, for a, b and the output; float32 and int8 also need K to be
the unit stride (Hopper's tensor cores read other layouts of 16-bit types only). Everything else goes through pointers.
Split K writes partials [split, M, N] and adds them in a fixed order: bitwise the same on every run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from .activation import activated, kind_for
from .jit import HAVE_TRITON, INTERPRETED, cdiv, empty, jit, launch, tl
from .overlap import promptly
from .plan import Plan, planned, start
from .tuning import Config, bucketed, config, space

if HAVE_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
STORED: Mapping[torch.dtype, torch.dtype] = {torch.bfloat16: torch.float32} if INTERPRETED else {}
"""What kernels write for a dtype: the interpreter truncates to bfloat16 where a GPU rounds to nearest, so torch rounds there."""
TMA_LEAST = 1 << 31
"""Multiplications from which TMA is the default: three descriptors cost the host about 10 µs more than pointers do."""


@jit
def tile_at(tile, tiles_m, tiles_n, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """(row, column) of a tile, GROUP rows at a time."""
    wide = GROUP * tiles_n
    first = (tile // wide) * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    return first + (tile % wide) % rows, (tile % wide) // rows


@jit
def finished(acc, rows, columns, m, n, bias_ptr, residual_ptr, residual_m, residual_n, pre_ptr, ACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bias, activation and residual of a block of the accumulator; the pre-activation is stored where asked for."""
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    if pre_ptr is not None:
        tl.store(pre_ptr + rows.to(tl.int64)[:, None] * n + columns[None, :], acc.to(pre_ptr.dtype.element_ty), mask=mask)
    if ACT != "none":
        acc = activated(acc, ACT)
    if residual_ptr is not None:
        place = rows.to(tl.int64)[:, None] * residual_m + columns.to(tl.int64)[None, :] * residual_n
        acc += tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
    return acc


ROUND = tl.constexpr(not INTERPRETED)


@jit
def rounded(x):  # type: ignore[no-untyped-def]
    """float32 to the nearest tf32: the tensor cores cut the last 13 bits off, which makes 2.6 times cuBLAS's error."""
    if ROUND and x.dtype == tl.float32:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return x


@jit
def persistent_kernel(a_desc, b_desc, c_desc, bias_ptr, residual_ptr, pre_ptr, m, n, k, residual_m, residual_n,  # type: ignore[no-untyped-def]
                      BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
                      A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, ACT: tl.constexpr, ACC: tl.constexpr,
                      HALVES: tl.constexpr, FLATTEN: tl.constexpr, SPECIALIZE: tl.constexpr, UPCAST: tl.constexpr,
                      PROMPT: tl.constexpr = False):  # fmt: skip
    """Each program works through tiles PROGRAMS apart; A_ROWS, B_ROWS: the operand's last dimension is its unit stride."""
    promptly(PROMPT)
    tiles_m = tl.cdiv(m, BM)
    tiles_n = tl.cdiv(n, BN)
    start = tl.program_id(0)
    # The epilogue counts tiles by itself: loads of the next tile run ahead of it once the two loops are one.
    stored = start - PROGRAMS
    for tile in tl.range(start, tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN, warp_specialize=SPECIALIZE):
        row, column = tile_at(tile, tiles_m, tiles_n, GROUP)
        acc = tl.zeros((BM, BN), dtype=ACC)
        for step in range(tl.cdiv(k, BK)):
            a = a_desc.load([row * BM, step * BK]) if A_ROWS else a_desc.load([step * BK, row * BM]).T
            b = b_desc.load([step * BK, column * BN]) if B_ROWS else b_desc.load([column * BN, step * BK]).T
            if UPCAST:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            a, b = rounded(a), rounded(b)
            acc = tl.dot(a, b, acc, input_precision="tf32", out_dtype=ACC)
        stored += PROGRAMS
        row, column = tile_at(stored, tiles_m, tiles_n, GROUP)
        rows = row * BM + tl.arange(0, BM)
        if HALVES == 2:
            # Two stores of half a tile take half the shared memory, which pays for one more stage.
            left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
            columns = column * BN + tl.arange(0, BN // 2)
            left = finished(left, rows, columns, m, n, bias_ptr, residual_ptr, residual_m, residual_n, pre_ptr, ACT)
            c_desc.store([row * BM, column * BN], left.to(c_desc.dtype))
            right = finished(right, rows, columns + BN // 2, m, n, bias_ptr, residual_ptr, residual_m, residual_n, pre_ptr, ACT)
            c_desc.store([row * BM, column * BN + BN // 2], right.to(c_desc.dtype))
        else:
            columns = column * BN + tl.arange(0, BN)
            acc = finished(acc, rows, columns, m, n, bias_ptr, residual_ptr, residual_m, residual_n, pre_ptr, ACT)
            c_desc.store([row * BM, column * BN], acc.to(c_desc.dtype))


@jit
def pointer_kernel(a_ptr, b_ptr, c_ptr, bias_ptr, residual_ptr, pre_ptr, partial_ptr, m, n, k,  # type: ignore[no-untyped-def]
                   a_m, a_k, b_k, b_n, residual_m, residual_n, chunk,
                   BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr, ACT: tl.constexpr,
                   ACC: tl.constexpr, UPCAST: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    """One tile of the output over k from `chunk` * program_id(1); with `partial_ptr` the bare sums go there."""
    promptly(PROMPT)
    row, column = tile_at(tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP)
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, k)
    rows = row * BM + tl.arange(0, BM)
    columns = column * BN + tl.arange(0, BN)
    depth = begin + tl.arange(0, BK)
    a_ptrs = a_ptr + (rows.to(tl.int64)[:, None] * a_m + depth.to(tl.int64)[None, :] * a_k)
    b_ptrs = b_ptr + (depth.to(tl.int64)[:, None] * b_k + columns.to(tl.int64)[None, :] * b_n)
    a_step = tl.full((), BK, tl.int64) * a_k
    b_step = tl.full((), BK, tl.int64) * b_k
    a_mask = (rows < m)[:, None]
    b_mask = (columns < n)[None, :]
    acc = tl.zeros((BM, BN), dtype=ACC)
    for at in range(begin, end, BK):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=a_mask, other=0)
            b = tl.load(b_ptrs, mask=b_mask, other=0)
        else:
            inside = tl.arange(0, BK) < end - at
            a = tl.load(a_ptrs, mask=a_mask & inside[None, :], other=0)
            b = tl.load(b_ptrs, mask=b_mask & inside[:, None], other=0)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        a, b = rounded(a), rounded(b)
        acc = tl.dot(a, b, acc, input_precision="tf32", out_dtype=ACC)
        a_ptrs += a_step
        b_ptrs += b_step
    place = rows.to(tl.int64)[:, None] * n + columns[None, :]
    mask = a_mask & b_mask
    if partial_ptr is not None:
        tl.store(partial_ptr + tl.program_id(1).to(tl.int64) * m * n + place, acc, mask=mask)
    else:
        acc = finished(acc, rows, columns, m, n, bias_ptr, residual_ptr, residual_m, residual_n, pre_ptr, ACT)
        tl.store(c_ptr + place, acc.to(c_ptr.dtype.element_ty), mask=mask)


@jit
def reduce_kernel(partial_ptr, c_ptr, bias_ptr, residual_ptr, pre_ptr, m, n, residual_m, residual_n, splits,  # type: ignore[no-untyped-def]
                  BM: tl.constexpr, BN: tl.constexpr, ACT: tl.constexpr, ACC: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    """Adds the partials of one tile in order and finishes it."""
    promptly(PROMPT)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    place = rows.to(tl.int64)[:, None] * n + columns[None, :]
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    size = tl.full((), 1, tl.int64) * m * n
    acc = tl.zeros((BM, BN), dtype=ACC)
    for part in range(splits):
        acc += tl.load(partial_ptr + part * size + place, mask=mask, other=0)
    acc = finished(acc, rows, columns, m, n, bias_ptr, residual_ptr, residual_m, residual_n, pre_ptr, ACT)
    tl.store(c_ptr + place, acc.to(c_ptr.dtype.element_ty), mask=mask)


_LARGE = {
    "tma": 1,
    "bm": 128,
    "bn": 256,
    "bk": 64,
    "group": 8,
    "warps": 8,
    "stages": 4,
    "split": 1,
    "halves": 2,
    "flatten": 1,
    "specialize": 0,
}
_PLAIN = {**_LARGE, "tma": 0, "halves": 1, "flatten": 0}
CANDIDATES: list[Config] = [
    _LARGE,
    {**_LARGE, "group": 16},
    {**_LARGE, "stages": 3, "halves": 1},
    {**_LARGE, "flatten": 0},
    {**_LARGE, "flatten": 0, "specialize": 1, "stages": 3},
    {**_LARGE, "bm": 256, "bn": 128},
    {**_LARGE, "bn": 128, "warps": 4},
    {**_PLAIN, "stages": 3},
    {**_PLAIN, "bn": 128, "stages": 4},
    {**_PLAIN, "bm": 64, "bn": 128, "warps": 4},
    {**_PLAIN, "bm": 64, "bn": 64, "bk": 128, "warps": 4, "split": 4},
    {**_PLAIN, "bm": 16, "bn": 64, "bk": 128, "warps": 4, "split": 4},
]
space("matmul", __file__, CANDIDATES)


@lru_cache(maxsize=16)
def processors(device: int) -> int:
    """Streaming multiprocessors of a device; 2 in the interpreter, so that a program sees more than one tile."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device >= 0 else 2


@lru_cache(maxsize=16)
def shared_bytes(device: int) -> int:
    """Shared memory a block may use; an H200's in the interpreter."""
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 232448)) if device >= 0 else 232448


@lru_cache(maxsize=4096)
def stages_that_fit(bm: int, bn: int, bk: int, halves: int, size: int, out_size: int, extra: bool, wanted: int, shared: int) -> int:
    """A block holds `stages` pairs of operands, the tile on its way out and, with a residual or a kept pre-activation, that once more."""
    out = bm * (bn // halves) * out_size * (2 if extra else 1)
    return max(1, min(wanted, (shared - out - 1024) // ((bm + bn) * bk * size)))


@lru_cache(maxsize=4096)
def default_config(kind: str, m: int, n: int, k: int, tma: bool, sms: int) -> Config:
    """By computed occupancy: the largest tile that still gives most SMs one; K is split where even small tiles are too few."""
    depth = {"tf32": 32, "int8": 128}.get(kind, 64)
    large = cdiv(m, 128) * cdiv(n, 256)
    if m >= 128 and n >= 256 and 8 * large >= 6 * sms:
        if tma and m * n * k >= TMA_LEAST:
            return {**_LARGE, "bk": depth}
        return {**_PLAIN, "bk": depth, "stages": 3}
    if m >= 128 and n >= 128 and 8 * cdiv(m, 128) * cdiv(n, 128) >= 6 * sms:
        return {**_PLAIN, "bn": 128, "bk": depth}
    bm = 16 if m <= 16 else 32 if m <= 32 else 64
    bn = 64 if m <= 32 or cdiv(m, bm) * cdiv(n, 128) < sms else 128
    return {**_PLAIN, "bm": bm, "bn": bn, "bk": depth, "warps": 4, "split": _splits(cdiv(m, bm) * cdiv(n, bn), k, sms)}


def _splits(tiles: int, k: int, sms: int) -> int:
    """Parts of K so that tiles × parts is about one wave, none shorter than 512."""
    return max(1, min(sms // max(tiles, 1), k // 512, 32))


def by_torch(dtype: torch.dtype) -> bool:
    """Whether torch multiplies: full precision has no tensor cores, and cuBLAS sums more exactly. The interpreter has no TF32: it may."""
    return dtype is torch.float64 or (dtype is torch.float32 and not INTERPRETED and not torch.backends.cuda.matmul.allow_tf32)


KINDS: Mapping[torch.dtype, str] = {torch.float32: "tf32", torch.int8: "int8"}
"""How products are taken; "half" for the rest."""


Shapes = tuple[tuple[int, int, int], tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""(M, N, K), and the strides of both operands and of the residual."""
_plans: dict[Any, Plan] = {}


def tma_fits(x: torch.Tensor, near: int, far: int) -> bool:
    """Whether an aligned tensor with these two strides (the smaller first) can be read by TMA."""
    return near == 1 and far * x.element_size() % 16 == 0 and far > 0


def run_matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, sizes: tuple[int, int, int], a_strides: tuple[int, int],
               bias: torch.Tensor | None = None, residual: torch.Tensor | None = None, residual_strides: tuple[int, int] = (0, 0),
               pre: torch.Tensor | None = None, activation: str = "none") -> None:  # fmt: skip
    """out [M, N], contiguous, = activation(a [M, K] @ b [K, N] + bias) + residual, by the kernel the configuration names."""
    extra = residual is not None or pre is not None
    aligned = (a.data_ptr() | b.data_ptr()) & 15 == 0
    shapes = (sizes, a_strides, b.stride(), residual_strides)
    key = (a.dtype, out.dtype, shapes, activation, aligned, extra, a.get_device())
    plan = planned(_plans, key, _plan, a, b, out, shapes, activation, aligned, extra)
    if plan.kernel is persistent_kernel:
        start(plan, (bias, residual, pre), descriptors=_descriptors(plan.constants, a, b, out, shapes))
        return
    (m, n, _), split = sizes, plan.grid[1]
    partial = empty((split, m, n), torch.int32 if out.dtype is torch.int32 else torch.float32, a.device) if split > 1 else None
    start(plan, (a, b, out, bias, residual, pre, partial))
    if partial is not None:
        run_reduce(partial, out, m, n, bias, residual, residual_strides, pre, activation)


def _plan(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, shapes: Shapes, activation: str, aligned: bool, extra: bool) -> Plan:
    """The kernel the configuration names, with what it needs besides its tensors."""
    (m, n, k), a_strides, b_strides, residual_strides = shapes
    kind, device = KINDS.get(a.dtype, "half"), a.get_device()
    a_rows, b_rows = _runs_along_rows(a_strides, b_strides)
    tma = (
        aligned
        and tma_fits(a, *(a_strides[::-1] if a_rows else a_strides))
        and tma_fits(b, *(b_strides[::-1] if b_rows else b_strides))
        and n * out.element_size() % 16 == 0
        and (kind == "half" or (a_rows and not b_rows))
    )
    sms = processors(device)
    bucket = (kind, bucketed(m), bucketed(n), bucketed(k), tma)
    default = default_config(*bucket, sms)
    chosen = config("matmul", bucket, default)
    bm, bn, bk, stages = chosen["bm"], chosen["bn"], chosen["bk"], chosen["stages"]
    common = {
        "BM": bm, "BN": bn, "BK": bk, "GROUP": chosen["group"], "ACT": kind_for(activation, out),
        "ACC": tl.int32 if kind == "int8" else tl.float32, "UPCAST": INTERPRETED and kind == "half", "num_warps": chosen["warps"],
    }  # fmt: skip
    if tma and chosen["tma"]:
        programs = min(sms, cdiv(m, bm) * cdiv(n, bn))
        size, out_size, halves = a.element_size(), out.element_size(), chosen["halves"]
        fitting = stages_that_fit(bm, bn, bk, halves, size, out_size, extra, stages, shared_bytes(device))
        constants = {**common, "PROGRAMS": programs, "A_ROWS": a_rows, "B_ROWS": b_rows, "HALVES": halves,
                     "FLATTEN": bool(chosen["flatten"]), "SPECIALIZE": bool(chosen["specialize"]), "num_stages": fitting}  # fmt: skip
        return Plan("matmul", bucket, default, chosen, persistent_kernel, (programs,), (m, n, k, *residual_strides), constants)
    split = min(chosen["split"], max(1, cdiv(k, bk)))
    chunk = max(cdiv(cdiv(k, split), bk), 1) * bk
    grid = (cdiv(m, bm) * cdiv(n, bn), max(1, cdiv(k, chunk)))
    strides = (*a_strides, *b_strides, *residual_strides, chunk)
    constants = {**common, "EVEN_K": k % bk == 0, "num_stages": stages}
    return Plan("matmul", bucket, default, chosen, pointer_kernel, grid, (m, n, k, *strides), constants)


def _runs_along_rows(a_strides: tuple[int, ...], b_strides: tuple[int, ...]) -> tuple[bool, bool]:
    """Whether neighbours of a row of a, and of b, lie side by side."""
    return a_strides[1] == 1, b_strides[1] == 1 and b_strides[0] != 1


class _Address:
    """As much of a tensor as a descriptor needs: one that held the tensor would keep its memory."""

    __slots__ = ("_pointer", "dtype")

    def __init__(self, pointer: int, dtype: torch.dtype) -> None:
        self._pointer, self.dtype = pointer, dtype

    def data_ptr(self) -> int:
        return self._pointer


_described: dict[tuple[Any, ...], Any] = {}
_DESCRIBED = 1024
"""Descriptors kept: of weights and of the few places the allocator gives activations."""


def described(x: torch.Tensor, height: int, width: int, stride: int, tall: int, wide: int) -> Any:
    """Descriptor of x as [height, width] rows `stride` apart, read [tall, wide] at a time; known ones cost a look-up."""
    if INTERPRETED:
        return TensorDescriptor(x, [height, width], [stride, 1], [tall, wide])
    pointer = x.data_ptr()
    key = (pointer, x.dtype, height, width, stride, tall, wide)
    found = _described.get(key)
    if found is None:
        if len(_described) >= _DESCRIBED:
            _described.clear()
        found = _described[key] = TensorDescriptor(_Address(pointer, x.dtype), [height, width], [stride, 1], [tall, wide])
    return found


def _descriptors(constants: dict[str, Any], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, shapes: Shapes) -> tuple[Any, Any, Any]:
    """Of both operands and the result."""
    (m, n, k), a_strides, b_strides, _ = shapes
    bm, bn, bk = constants["BM"], constants["BN"], constants["BK"]
    a_desc = described(a, m, k, a_strides[0], bm, bk) if constants["A_ROWS"] else described(a, k, m, a_strides[1], bk, bm)
    b_desc = described(b, k, n, b_strides[0], bk, bn) if constants["B_ROWS"] else described(b, n, k, b_strides[1], bn, bk)
    return a_desc, b_desc, described(out, m, n, n, bm, bn // constants["HALVES"])


def run_reduce(partial: torch.Tensor, out: torch.Tensor, m: int, n: int, bias: torch.Tensor | None = None,
               residual: torch.Tensor | None = None, residual_strides: tuple[int, int] = (0, 0),
               pre: torch.Tensor | None = None, activation: str = "none") -> None:  # fmt: skip
    """out = activation(sum of partials [split, M, N] + bias) + residual."""
    bm = 4 if m >= 4 else 1
    launch(
        reduce_kernel, (cdiv(m, bm), cdiv(n, 256)), partial, out, bias, residual, pre, m, n, *residual_strides, partial.shape[0],
        BM=bm, BN=256, ACT=kind_for(activation, out), ACC=tl.int32 if out.dtype is torch.int32 else tl.float32,
    )  # fmt: skip
