"""Attention without a table of scores: softmax(scale · Q Kᵀ + causal mask) V.

    query [B, H, T, D], key, value [B, Hkv, S, D] ──forward──> out [B, H, T, D], lse [B, H, T] float32, base 2 ──backward──> dQ, dK, dV
      H a multiple of Hkv (grouped heads); query i sees keys 0..i when causal, as torch's is_causal; any strides on B, H and T

`attention` asks the dispatch table and calls torch's own where that is faster: on an H200 cuDNN takes 0.476 ms forward and 1.89 ms
with the backward for causal bfloat16 4x16x4096x128, which Triton hardly reaches. `flash_attention` always takes the kernels.
Least bytes: Q, K, V, out once each forward; the backward reads those and dO, writes dQ, dK, dV. Bound by products for T over a few 100:
4·B·H·T·S·D forward (half when causal), 10 ideal and 14 here backward (attention_kernels.py says why).
Limits: D up to 256 (others, float64 and scale <= 0 take the plain formula); no mask but the causal one, no dropout, no second derivative.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ..core.errors import OptionError
from .attention_kernels import attention_delta, attention_dkv, attention_dq, attention_forward
from .case import Anchor, Case, Inputs, benchmark
from .jit import INTERPRETED, cdiv, launch, next_power_of_2
from .library import operator
from .replace import replaces, worth
from .tuning import Config, config, space

Tensor = torch.Tensor
LOG2E = 1.4426950408889634
FAR = 1 << 22  # row strides from here on (times 256 rows of a tile) could leave 32 bits


def _tiles(block_m: int, block_n: int, warps: int, stages: int) -> dict[str, int]:
    return {"block_m": block_m, "block_n": block_n, "warps": warps, "stages": stages}


FORWARD = {32: _tiles(128, 128, 8, 3), 64: _tiles(128, 128, 8, 3), 128: _tiles(128, 64, 8, 3), 256: _tiles(128, 32, 8, 2)}
DKV = {32: _tiles(64, 128, 8, 3), 64: _tiles(64, 128, 8, 2), 128: _tiles(32, 128, 8, 3), 256: _tiles(16, 64, 8, 2)}
DQ = {32: _tiles(128, 64, 8, 3), 64: _tiles(128, 64, 8, 3), 128: _tiles(128, 64, 8, 2), 256: _tiles(128, 32, 8, 2)}
"""Tiles for half types by padded D (32 and below share a line): the largest tried that compile for sm_90 without spilling registers.
Not so for 256 (forward 14 spills, dkv 215) and for dkv of grouped heads (12 at 128, where the loop over heads needs registers too)."""
SINGLE = {32: _tiles(32, 32, 8, 2), 64: _tiles(32, 32, 8, 2), 128: _tiles(16, 32, 8, 2), 256: _tiles(16, 16, 8, 2)}
"""float32, by plain multiply-adds: products in tf32 would lose 13 bits."""

space(
    "attention",
    __file__,
    [
        _tiles(*tile)
        for tile in ((128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (128, 64, 4, 2), (128, 32, 4, 3), (64, 64, 4, 3), (64, 32, 4, 2))
    ],
)
space(
    "attention_dkv",
    __file__,
    [_tiles(*tile) for tile in ((32, 128, 8, 3), (32, 128, 8, 2), (64, 128, 8, 2), (64, 64, 8, 2), (32, 64, 4, 2))],
)
space(
    "attention_dq",
    __file__,
    [_tiles(*tile) for tile in ((128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 3))],
)


def _chosen(op: str, table: dict[int, dict[str, int]], query: Tensor, causal: bool) -> tuple[int, Config]:
    """(padded D, tiles)"""
    padded = max(16, next_power_of_2(query.shape[3]))
    single = query.dtype == torch.float32
    default = _tiles(32, 16, 4, 1) if INTERPRETED else (SINGLE if single else table)[max(32, padded)]
    return padded, config(op, (padded, causal, single), default)


def _ready(tensor: Tensor) -> Tensor:
    """As it is where rows are contiguous and within 32-bit reach of each other inside a tile; else a copy."""
    _, _, rows, columns = tensor.stride()
    return tensor if columns == 1 and rows < FAR else tensor.contiguous()


def _like(tensor: Tensor) -> Tensor:
    """Room for a result laid out like `tensor` ([B, T, H, D] views keep their order), rows contiguous."""
    result = torch.empty_like(tensor)
    if result.stride(3) == 1 and result.stride(2) < FAR:
        return result
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _plain_only(query: Tensor, scale: float) -> bool:
    return query.dtype == torch.float64 or query.shape[3] > 256 or not scale > 0


def launch_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Forward kernel: (out, lse)."""
    if _plain_only(query, scale):
        return attention_reference(query, key, value, causal, scale)
    query, key, value = _ready(query), _ready(key), _ready(value)
    batch, heads, T, D = query.shape
    S = key.shape[2]
    out = _like(query)
    lse = torch.empty((batch, heads, T), dtype=torch.float32, device=query.device)
    padded, tiles = _chosen("attention", FORWARD, query, causal)
    launch(
        attention_forward, (cdiv(T, tiles["block_m"]) * batch * heads,),
        query, key, value, out, lse, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
        heads, heads // max(1, key.shape[1]), T, S, scale * LOG2E,
        CAUSAL=causal, UPCAST=INTERPRETED, D=D, BLOCK_D=padded, BLOCK_M=tiles["block_m"], BLOCK_N=tiles["block_n"],
        num_warps=tiles["warps"], num_stages=tiles["stages"],
    )  # fmt: skip
    return out, lse


def launch_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    need_q: bool,
    need_kv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """delta, then dK and dV, then dQ; what is not needed comes back empty."""
    if _plain_only(query, scale):
        return attention_backward_reference(grad, query, key, value, out, lse, causal, scale, need_q, need_kv)
    grad, query, key, value, out = _ready(grad), _ready(query), _ready(key), _ready(value), _ready(out)
    batch, heads, T, D = query.shape
    shared, S = key.shape[1:3]
    group = heads // max(1, shared)
    delta = torch.empty_like(lse)
    padded, tiles = _chosen("attention_dq", DQ, query, causal)
    launch(
        attention_delta, (cdiv(T, 32) * batch * heads,),
        out, grad, delta, *out.stride()[:3], *grad.stride()[:3], heads, T, D=D, BLOCK_D=padded, BLOCK_M=32, num_warps=4,
    )  # fmt: skip
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad.stride()[:3])
    shape = (heads, group, T, S, scale, scale * LOG2E)
    dq, dk, dv = _gradients(query, key, value, need_q, need_kv)
    if need_q:
        launch(
            attention_dq, (cdiv(T, tiles["block_m"]) * batch * heads,),
            query, key, value, grad, lse, delta, dq, *strides, *dq.stride()[:3], *shape,
            CAUSAL=causal, UPCAST=INTERPRETED, D=D, BLOCK_D=padded, BLOCK_M=tiles["block_m"], BLOCK_N=tiles["block_n"],
            num_warps=tiles["warps"], num_stages=tiles["stages"],
        )  # fmt: skip
    if need_kv:
        _, tiles = _chosen("attention_dkv", DKV, query, causal)
        launch(
            attention_dkv, (cdiv(S, tiles["block_n"]) * batch * shared,),
            query, key, value, grad, lse, delta, dk, dv, *strides, *dk.stride()[:3], *dv.stride()[:3], *shape,
            CAUSAL=causal, RAGGED=T % tiles["block_m"] != 0, UPCAST=INTERPRETED,
            D=D, BLOCK_D=padded, BLOCK_M=tiles["block_m"], BLOCK_N=tiles["block_n"],
            num_warps=tiles["warps"], num_stages=tiles["stages"],
        )  # fmt: skip
    return dq, dk, dv


def _gradients(query: Tensor, key: Tensor, value: Tensor, need_q: bool, need_kv: bool) -> tuple[Tensor, Tensor, Tensor]:
    needs = ((query, need_q), (key, need_kv), (value, need_kv))
    dq, dk, dv = (_like(tensor) if need else tensor.new_empty(0) for tensor, need in needs)
    return dq, dk, dv


def _weights(query: Tensor, key: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, torch.dtype]:
    """(scores with the mask, keys of every query head, dtype of the arithmetic)"""
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    keys = key.to(compute).repeat_interleave(query.shape[1] // max(1, key.shape[1]), 1)
    scores = query.to(compute) @ keys.mT * scale
    if causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores, keys, compute


def attention_reference(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The formula in plain torch, all scores in memory."""
    scores, _, compute = _weights(query, key, causal, scale)
    values = value.to(compute).repeat_interleave(query.shape[1] // max(1, key.shape[1]), 1)
    out = _like(_ready(query))
    out.copy_(scores.softmax(-1) @ values)
    return out, scores.logsumexp(-1) * LOG2E


def attention_backward_reference(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    need_q: bool,
    need_kv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in plain torch, all scores in memory."""
    scores, keys, compute = _weights(query, key, causal, scale)
    group = query.shape[1] // max(1, key.shape[1])
    p = scores.softmax(-1)  # made anew: lse in float32 would cost digits
    grad = grad.to(compute)
    delta = (grad * out.to(compute)).sum(-1, keepdim=True)
    ds = p * (grad @ value.to(compute).repeat_interleave(group, 1).mT - delta) * scale
    dq, dk, dv = _gradients(_ready(query), _ready(key), _ready(value), need_q, need_kv)
    if need_q:
        dq.copy_(ds @ keys)
    if need_kv:
        dk.copy_((ds.mT @ query.to(compute)).unflatten(1, (-1, group)).sum(2))
        dv.copy_((p.mT @ grad).unflatten(1, (-1, group)).sum(2))
    return dq, dk, dv


def _fake(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    precise = torch.float64 if query.dtype == torch.float64 else torch.float32
    return _like(_ready(query)), query.new_empty(query.shape[:3], dtype=precise)


def _fake_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    need_q: bool,
    need_kv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(_ready(query), _ready(key), _ready(value), need_q, need_kv)


def _setup(ctx: Any, args: tuple[Any, ...], output: Any) -> None:
    query, key, value, ctx.causal, ctx.scale = args
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)  # lse gets no gradient: no zeros for it
    ctx.save_for_backward(query, key, value, out, lse)


def _backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None, None
    need_q, need_k, need_v = ctx.needs_input_grad[:3]
    dq, dk, dv = attention_backward_op(grad, *ctx.saved_tensors, ctx.causal, ctx.scale, need_q, need_k or need_v)
    return dq if need_q else None, dk if need_k else None, dv if need_v else None, None, None


attention_backward_op = operator(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, bool causal, float scale, "
    "bool need_query, bool need_key_value) -> (Tensor, Tensor, Tensor)",
    launch=launch_attention_backward,
    reference=attention_backward_reference,
    fake=_fake_backward,
)
attention_op = operator(
    "attention(Tensor query, Tensor key, Tensor value, bool causal, float scale) -> (Tensor, Tensor)",
    launch=launch_attention,
    reference=attention_reference,
    fake=_fake,
    setup=_setup,
    backward=_backward,
)


def _checked(query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.dim() != 4 or key.dim() != 4 or key.shape != value.shape or query.shape[::3] != key.shape[::3]:
        what = f"attention of {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        raise OptionError(what, why="shapes do not fit", do="give query [B, H, T, D], key and value [B, Hkv, S, D]")
    if query.shape[1] != key.shape[1] and (key.shape[1] == 0 or query.shape[1] % key.shape[1]):
        what = f"{query.shape[1]} query heads over {key.shape[1]} key heads"
        raise OptionError(what, why="every key head serves the same number of query heads", do="make H a multiple of Hkv")
    if not query.dtype == key.dtype == value.dtype or not query.dtype.is_floating_point:
        what = f"attention of {query.dtype}, {key.dtype}, {value.dtype}"
        raise OptionError(what, why="the three share one floating dtype", do="cast them first")


def flash_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool = True, scale: float | None = None) -> Tensor:
    """Attention by the kernels of this file, whatever is fastest."""
    _checked(query, key, value)
    out: Tensor = attention_op(query, key, value, causal, query.shape[3] ** -0.5 if scale is None else scale)[0]
    return out


def attention(query: Tensor, key: Tensor, value: Tensor, causal: bool = True, scale: float | None = None) -> Tensor:
    """softmax(scale · query keyᵀ) value; by our kernels where they were measured to win, else by torch's own."""
    _checked(query, key, value)
    if _worthwhile(query, key, causal):
        return flash_attention(query, key, value, causal, scale)
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )  # fmt: skip


def _place(query: Tensor, key: Tensor, causal: bool) -> tuple[str, int]:
    """Line and size in the dispatch table: one line a D, by the number of scores."""
    return f"{'causal' if causal else 'full'}{query.shape[3]}", query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]


def _worthwhile(query: Tensor, key: Tensor, causal: bool) -> bool:
    kind, size = _place(query, key, causal)
    return worth("flash_attention", query, size, kind)


@replaces("attention", F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Stand-in for torch's; 4 dimensions, one dtype, no mask, no dropout."""
    if attn_mask is not None or dropout_p != 0.0 or query.dim() != 4 or key.dim() != 4 or key.shape != value.shape:
        return NotImplemented
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3] or not 16 <= query.shape[3] <= 256:
        return NotImplemented
    if query.shape[1] != key.shape[1] and not (enable_gqa and key.shape[1] and query.shape[1] % key.shape[1] == 0):
        return NotImplemented
    if not query.dtype == key.dtype == value.dtype or query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return NotImplemented
    # Under autocast torch's own casts its inputs; ours would not.
    if torch.is_autocast_enabled(query.device.type) or not _worthwhile(query, key, is_causal):
        return NotImplemented
    return flash_attention(query, key, value, is_causal, scale)


def _make(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Inputs:
    return tuple(torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))


def _moved(inputs: Inputs, backward: bool) -> int:
    query: Tensor = inputs[0]
    key: Tensor = inputs[1]
    once = query.numel() * query.element_size(), key.numel() * key.element_size()
    lse = query.numel() // query.shape[3] * 4
    return 6 * (once[0] + once[1]) + 2 * lse if backward else 2 * (once[0] + once[1]) + lse


def _flops(inputs: Inputs, backward: bool) -> int:
    query: Tensor = inputs[0]
    key: Tensor = inputs[1]
    return query.numel() * key.shape[2] * 4 // 2 * (7 if backward else 2) // 2


def _plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


_ANCHORS = tuple(Anchor((4, 16, 4096, 128), torch.bfloat16, backward=backward) for backward in (False, True))
BENCH = benchmark(
    Case(
        op="flash_attention",
        ours=flash_attention,
        plain=_plain,
        make=_make,
        moved=_moved,
        flops=_flops,
        dtypes=(torch.bfloat16, torch.float16),
        sizes={
            "small": ((1, 8, 512, 64), (4, 16, 512, 128)),
            "medium": ((4, 16, 2048, 64), (4, 16, 2048, 128)),
            "large": ((4, 16, 4096, 128),),
            "xlarge": ((2, 16, 8192, 128),),
        },
        anchors=_ANCHORS,
        differentiable=True,
        kind=lambda inputs: _place(inputs[0], inputs[1], True),
    )
)
BENCH_CHOSEN = benchmark(replace(BENCH, op="attention", ours=attention, sizes={}, chooses=True))
