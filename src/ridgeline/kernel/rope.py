"""Rotary positions applied to query and key in one launch.

    query [B,T,HQ,D], key [B,T,HK,D], cos, sin [T,D] or [B,T,D] ──some heads of a few tokens a program──> the same shapes
      first  half of D: x1 * cos1 - x2 * sin1        (half-split convention; `signed`: sin1 already carries the minus)
      second half of D: x2 * cos2 + x1 * sin2
    gradient ──the same kernel, sin transposed: the halves of sin change places and the minus moves──> again one launch

cos and sin are read again for every few heads, from the caches. Any strides as long as D is innermost (else copied), so [B,H,T,D]
views are read in place; `seq_dim` says which dimension T is, and results are laid out like the inputs. The halves of cos and of sin may
differ. Arithmetic in float32 (float64 in its own). Least bytes: 2 x item size an element of query and key. No gradient for cos and sin.
Ref: Su 2021, RoFormer.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..core.errors import OptionError
from .case import Anchor, Case, Inputs, benchmark
from .jit import cdiv, jit, next_power_of_2, tl
from .library import operator, without_gradient
from .overlap import promptly
from .plan import PLANS, Plan, planned, start
from .tuning import bucketed, config, space

_plans: dict[Any, Plan] = {}
_plain_layouts: set[Any] = set()
"""Those of tensors that need no copy and whose results are laid out like them."""


@jit
def _loaded(x_ptr, offset, mask, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(x_ptr + offset, mask=mask, other=0.0).to(WIDE)


@jit
def _tile(x_ptr, cos_ptr, sin_ptr, tokens, b, t, first, cos_b, cos_t, sin_b, sin_t, x_b, x_t, x_h, out_b, out_t, out_h,  # type: ignore[no-untyped-def]
          HEADS: tl.constexpr, HALF: tl.constexpr, SIGNED: tl.constexpr, TRANSPOSED: tl.constexpr, WIDE: tl.constexpr,
          BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Both halves of some heads turned, where they go, and which are there. Strides of None: sin's are cos's, the output's x's."""
    heads = first + tl.arange(0, BLOCK_H)[None, :, None]
    d = tl.arange(0, BLOCK_D)[None, None, :]
    mask = (t < tokens) & (heads < HEADS) & (d < HALF)
    t = t.to(tl.int64)
    heads = heads.to(tl.int64)
    here = b * x_b + t * x_t + heads * x_h + d
    there = here
    if out_b is not None:
        there = b * out_b + t * out_t + heads * out_h + d
    # cos and sin once a head: the first-level cache serves them in the layout of x; once a token they would be brought there through
    # shared memory
    cos_from = tl.broadcast_to(b * cos_b + t * cos_t + d, [BLOCK_T, BLOCK_H, BLOCK_D])
    sin_from = cos_from
    if sin_b is not None:
        sin_from = tl.broadcast_to(b * sin_b + t * sin_t + d, [BLOCK_T, BLOCK_H, BLOCK_D])
    x1 = _loaded(x_ptr, here, mask, WIDE)
    x2 = _loaded(x_ptr, here + HALF, mask, WIDE)
    c1 = _loaded(cos_ptr, cos_from, mask, WIDE)
    c2 = _loaded(cos_ptr, cos_from + HALF, mask, WIDE)
    s1 = _loaded(sin_ptr, sin_from, mask, WIDE)
    s2 = _loaded(sin_ptr, sin_from + HALF, mask, WIDE)
    if not SIGNED:
        s1 = -s1
    if TRANSPOSED:
        s1, s2 = s2, s1
    return x1 * c1 + x2 * s1, x2 * c2 + x1 * s2, there, mask


@jit
def _turn(x_ptr, out_ptr, cos_ptr, sin_ptr, tokens, b, t, first, cos_b, cos_t, sin_b, sin_t, x_b, x_t, x_h, out_b, out_t, out_h,  # type: ignore[no-untyped-def]
          HEADS: tl.constexpr, HALF: tl.constexpr, SIGNED: tl.constexpr, TRANSPOSED: tl.constexpr, WIDE: tl.constexpr,
          BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    y1, y2, there, mask = _tile(x_ptr, cos_ptr, sin_ptr, tokens, b, t, first, cos_b, cos_t, sin_b, sin_t, x_b, x_t, x_h, out_b, out_t,
                                out_h, HEADS, HALF, SIGNED, TRANSPOSED, WIDE, BLOCK_T, BLOCK_H, BLOCK_D)  # fmt: skip
    tl.store(out_ptr + there, y1, mask=mask)
    tl.store(out_ptr + there + HALF, y2, mask=mask)


@jit
def rope_kernel(query_ptr, key_ptr, cos_ptr, sin_ptr, query_out_ptr, key_out_ptr, tokens,  # type: ignore[no-untyped-def]
                cos_b, cos_t, sin_b, sin_t, q_b, q_t, q_h, k_b, k_t, k_h, qo_b, qo_t, qo_h, ko_b, ko_t, ko_h,
                HQ: tl.constexpr, HK: tl.constexpr, HALF: tl.constexpr, SIGNED: tl.constexpr, TRANSPOSED: tl.constexpr,
                WIDE: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_Q: tl.constexpr,
                BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, PROMPT: tl.constexpr = False):  # fmt: skip
    promptly(PROMPT)
    part = tl.program_id(0) % PARTS
    groups = tl.cdiv(tokens, BLOCK_T)
    b = (tl.program_id(0) // PARTS // groups).to(tl.int64)
    t = (tl.program_id(0) // PARTS % groups) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None, None]
    if SPLIT > 0:
        if part < SPLIT:
            _turn(key_ptr, key_out_ptr, cos_ptr, sin_ptr, tokens, b, t, part * BLOCK_K, cos_b, cos_t, sin_b, sin_t, k_b, k_t, k_h, ko_b,
                  ko_t, ko_h, HK, HALF, SIGNED, TRANSPOSED, WIDE, BLOCK_T, BLOCK_K, BLOCK_D)  # fmt: skip
        else:
            _turn(query_ptr, query_out_ptr, cos_ptr, sin_ptr, tokens, b, t, (part - SPLIT) * BLOCK_Q, cos_b, cos_t, sin_b, sin_t, q_b, q_t,
                  q_h, qo_b, qo_t, qo_h, HQ, HALF, SIGNED, TRANSPOSED, WIDE, BLOCK_T, BLOCK_Q, BLOCK_D)  # fmt: skip
    else:
        # every load before the first store: the compiler must assume that a store changes what is loaded after it
        q1, q2, q_to, q_mask = _tile(query_ptr, cos_ptr, sin_ptr, tokens, b, t, part * BLOCK_Q, cos_b, cos_t, sin_b, sin_t, q_b, q_t, q_h,
                                     qo_b, qo_t, qo_h, HQ, HALF, SIGNED, TRANSPOSED, WIDE, BLOCK_T, BLOCK_Q, BLOCK_D)  # fmt: skip
        if HK > 0:
            _turn(key_ptr, key_out_ptr, cos_ptr, sin_ptr, tokens, b, t, part * BLOCK_K, cos_b, cos_t, sin_b, sin_t, k_b, k_t, k_h, ko_b,
                  ko_t, ko_h, HK, HALF, SIGNED, TRANSPOSED, WIDE, BLOCK_T, BLOCK_K, BLOCK_D)  # fmt: skip
        tl.store(query_out_ptr + q_to, q1, mask=q_mask)
        tl.store(query_out_ptr + q_to + HALF, q2, mask=q_mask)


# TOKENS: of a program; HEADS: the most heads of the query it takes. SPLIT: heads of the key have programs of their own, of the same
# size, so that all loads have 128 bits; otherwise a program takes the heads of the key that belong to its own of the query.
_CANDIDATES = ((1, 8, 2, 1), (2, 8, 4, 1), (4, 8, 4, 1), (4, 8, 8, 1), (1, 16, 4, 1), (2, 4, 2, 1), (8, 8, 8, 1), (1, 32, 4, 0),
               (1, 32, 2, 0), (2, 32, 8, 0), (1, 64, 8, 0), (16, 4, 4, 0))  # fmt: skip
space("rope", __file__, [dict(zip(("TOKENS", "HEADS", "num_warps", "SPLIT"), found, strict=True)) for found in _CANDIDATES])


def _default(heads: int, half: int, inside: bool) -> dict[str, int]:
    """Some 1,024 elements of each half a program; `inside`: T lies inside H, so that several tokens make longer lines."""
    block = min(next_power_of_2(heads), 4 if inside else 8)
    tokens = max(1, min(16, 1024 // (block * next_power_of_2(half))))
    return {"TOKENS": tokens, "HEADS": block, "num_warps": 4, "SPLIT": 1}


def _like(x: Tensor) -> Tensor:
    """Room for the result: laid out like x where its last dimension is innermost, contiguous otherwise."""
    if x.stride(-1) == 1:
        out = torch.empty_like(x)
        if out.stride(-1) == 1:
            return out
    return x.new_empty(x.shape)


def _innermost(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _steps(x: Tensor, seq_dim: int) -> tuple[int, int, int]:
    """Strides of batch, token, head."""
    b, one, two, _ = x.stride()
    return (b, one, two) if seq_dim == 1 else (b, two, one)


def _table_steps(table: Tensor) -> tuple[int, int]:
    """Strides of batch and token of cos or sin."""
    if table.dim() == 2:
        return 0, table.stride(0)
    return (0 if table.shape[0] == 1 else table.stride(0)), table.stride(1)


def _plan(query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, outs: tuple[Tensor, Tensor], seq_dim: int, signed: bool,
          transposed: bool) -> Plan:  # fmt: skip
    other = query if key is None else key
    tokens, heads, dim = query.shape[seq_dim], query.shape[3 - seq_dim], query.shape[3]
    key_heads = 0 if key is None else other.shape[3 - seq_dim]
    q_steps, k_steps = _steps(query, seq_dim), _steps(other, seq_dim)
    inside = q_steps[1] < q_steps[2]
    bucket = (heads, key_heads, dim, query.element_size(), inside, bucketed(tokens))
    usual = _default(heads, dim // 2, inside)
    chosen = config("rope", bucket, usual)
    block_q = min(next_power_of_2(heads), chosen["HEADS"])
    parts = cdiv(heads, block_q)
    block_k = min(block_q, next_power_of_2(key_heads)) if chosen["SPLIT"] else next_power_of_2(cdiv(key_heads, max(1, parts)))
    split = cdiv(key_heads, block_k) if chosen["SPLIT"] else 0
    same: tuple[Any, ...] = (None, None, None)
    steps = (*(same if _steps(out, seq_dim) == mine else _steps(out, seq_dim) for out, mine in zip(outs, (q_steps, k_steps), strict=True)),)
    cos_steps, sin_steps = _table_steps(cos), _table_steps(sin)
    sizes = (tokens, *cos_steps, *((None, None) if sin_steps == cos_steps else sin_steps), *q_steps, *k_steps, *steps[0], *steps[1])
    constants = {
        "HQ": heads, "HK": key_heads, "HALF": dim // 2, "SIGNED": signed, "TRANSPOSED": transposed,
        "WIDE": tl.float64 if query.dtype is torch.float64 else tl.float32, "PARTS": parts + split, "SPLIT": split,
        "BLOCK_T": chosen["TOKENS"], "BLOCK_Q": block_q, "BLOCK_K": block_k, "BLOCK_D": next_power_of_2(dim // 2),
        "num_warps": chosen["num_warps"],
    }  # fmt: skip
    grid = (query.shape[0] * cdiv(tokens, chosen["TOKENS"]) * (parts + split) if dim else 0,)
    return Plan("rope", bucket, usual, chosen, rope_kernel, grid, sizes, constants)


def _rotate(query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, signed: bool, transposed: bool,
            seq_dim: int, layout: tuple[Any, ...] | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    other = query if key is None else key
    if layout is None:
        layout = (*_layout(query, other, cos, sin, signed, transposed, seq_dim), key is None)
    if layout in _plain_layouts:
        query_out = torch.empty_like(query)
        key_out = query_out if key is None else torch.empty_like(other)
    else:
        query_out = _like(query)
        key_out = query_out if key is None else _like(other)
        given = (query, other, cos, sin)
        query, other, cos, sin = (_innermost(x) for x in given)
        if all(x is y for x, y in zip((query, other, cos, sin), given, strict=True)) and _is_plain(query) and _is_plain(other):
            if len(_plain_layouts) >= PLANS:
                _plain_layouts.clear()
            _plain_layouts.add(layout)
        else:  # copied, or laid out otherwise than what came
            layout += (query.stride(), other.stride(), cos.stride(), sin.stride(), query_out.stride(), key_out.stride())
    plan = planned(
        _plans, layout, _plan, query, None if key is None else other, cos, sin, (query_out, key_out), seq_dim, signed, transposed
    )
    start(plan, (query, other, cos, sin, query_out, key_out))
    return query_out, key_out


def _layout(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, signed: bool, transposed: bool, seq_dim: int) -> tuple[Any, ...]:
    return (query.shape, query.stride(), key.shape, key.stride(), cos.shape, cos.stride(), sin.shape, sin.stride(), signed, transposed,
            seq_dim, query.dtype, key.dtype, query.get_device())  # fmt: skip


def _is_plain(x: Tensor) -> bool:
    """Whether empty_like gives what `_like` does."""
    return x.stride(-1) == 1 and torch.empty_like(x).stride(-1) == 1


def _launch_one(x: Tensor, cos: Tensor, sin: Tensor, signed: bool, transposed: bool, seq_dim: int) -> Tensor:
    return _rotate(x, None, cos, sin, signed, transposed, seq_dim)[0]


def _reference_one(x: Tensor, cos: Tensor, sin: Tensor, signed: bool, transposed: bool, seq_dim: int) -> Tensor:
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    heads_dim = 2 if seq_dim == 1 else 1
    (c1, c2), (s1, s2), (x1, x2) = (part.to(wide).chunk(2, dim=-1) for part in (cos, sin, x))
    s1 = s1 if signed else -s1
    s1, s2 = (s2, s1) if transposed else (s1, s2)
    c1, c2, s1, s2 = ((part if part.dim() == 3 else part[None]).unsqueeze(heads_dim) for part in (c1, c2, s1, s2))
    return _like(x).copy_(torch.cat((x1 * c1 + x2 * s1, x2 * c2 + x1 * s2), dim=-1))


def _reference(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, signed: bool, transposed: bool, seq_dim: int) -> tuple[Tensor, Tensor]:
    rest = (cos, sin, signed, transposed, seq_dim)
    return _reference_one(query, *rest), _reference_one(key, *rest)


def _fake_one(x: Tensor, cos: Tensor, sin: Tensor, signed: bool, transposed: bool, seq_dim: int) -> Tensor:
    return _like(x)


def _fake(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, signed: bool, transposed: bool, seq_dim: int) -> tuple[Tensor, Tensor]:
    return _like(query), _like(key)


def _setup(ctx: Any, args: tuple[Any, ...], output: Any) -> None:
    *_, cos, sin, signed, transposed, seq_dim = args
    ctx.save_for_backward(cos, sin)
    ctx.rest = (signed, not transposed, seq_dim)
    ctx.set_materialize_grads(False)


def _backward_one(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None, None, None]:
    return (None if grad is None else _rope_one(grad, *ctx.saved_tensors, *ctx.rest)), None, None, None, None, None


def _backward(ctx: Any, grad_query: Tensor | None, grad_key: Tensor | None) -> tuple[Tensor | None, ...]:
    rest = (*ctx.saved_tensors, *ctx.rest)
    grads = [grad if needed else None for grad, needed in zip((grad_query, grad_key), ctx.needs_input_grad, strict=False)]
    if grads[0] is not None and grads[1] is not None:
        grads = list(_rope(*grads, *rest))
    else:
        grads = [None if grad is None else _rope_one(grad, *rest) for grad in grads]
    return *grads, None, None, None, None, None


_rope = operator("rope(Tensor query, Tensor key, Tensor cos, Tensor sin, bool signed, bool transposed, int seq_dim) -> (Tensor, Tensor)",
                 launch=_rotate, reference=_reference, fake=_fake, setup=_setup, backward=_backward)  # fmt: skip
_rope_one = operator("rope_one(Tensor x, Tensor cos, Tensor sin, bool signed, bool transposed, int seq_dim) -> Tensor",
                     launch=_launch_one, reference=_reference_one, fake=_fake_one, setup=_setup, backward=_backward_one)  # fmt: skip


def _checked(x: Tensor, cos: Tensor, sin: Tensor, seq_dim: int) -> None:
    if seq_dim not in (1, 2):
        raise OptionError(f"seq_dim = {seq_dim}", why="tokens are dimension 1 of [B,T,H,D] or 2 of [B,H,T,D]", do="give 1 or 2")
    if x.dim() != 4 or x.shape[3] % 2 or not x.is_floating_point():
        raise OptionError(f"rope of {x.dtype} {tuple(x.shape)}", why="it needs [B,T,H,D] of real numbers, D even", do="reshape it")
    table = (x.shape[seq_dim], x.shape[3])
    if cos.shape != sin.shape or (cos.shape != table and cos.shape not in ((x.shape[0], *table), (1, *table))):
        raise OptionError(f"cos and sin of shape {tuple(cos.shape)}, {tuple(sin.shape)} for x of {tuple(x.shape)}",
                          why="both must be [T,D] or [B,T,D]", do="cut them to the tokens of x, and check seq_dim")  # fmt: skip
    if (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled():
        raise OptionError("cos or sin asks for a gradient", why="rope has none for them", do="detach them, or use plain torch")


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, signed: bool = False, seq_dim: int = 1) -> tuple[Tensor, Tensor]:
    """x * cos + cat(-x2, x1) * sin of query and key [B,T,H,D] (seq_dim=2: [B,H,T,D]); `signed`: the minus is already in sin."""
    if without_gradient(query, key, cos, sin):
        layout = (*_layout(query, key, cos, sin, signed, False, seq_dim), False)
        if layout in _plain_layouts:  # was checked before; checking takes longer than the launch
            return _rotate(query, key, cos, sin, signed, False, seq_dim, layout)
    _checked(query, cos, sin, seq_dim)
    wanted = (*query.shape[:2], key.shape[2], query.shape[3]) if seq_dim == 1 else (query.shape[0], key.shape[1], *query.shape[2:])
    if key.shape != wanted:
        raise OptionError(f"key {tuple(key.shape)} with query {tuple(query.shape)}", why="only heads may differ", do="check their layouts")
    if query.dtype is not key.dtype:
        rest = (cos, sin, signed, False, seq_dim)
        return _rope_one(query, *rest), _rope_one(key, *rest)
    result: tuple[Tensor, Tensor] = _rope(query, key, cos, sin, signed, False, seq_dim)
    return result


def rope_one(x: Tensor, cos: Tensor, sin: Tensor, *, signed: bool = False, seq_dim: int = 1) -> Tensor:
    """`rope` of one tensor."""
    _checked(x, cos, sin, seq_dim)
    result: Tensor = _rope_one(x, cos, sin, signed, False, seq_dim)
    return result


def _plain(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The usual formula, for [B,T,H,D]."""
    cos, sin = cos[:, None], sin[:, None]

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return turned(query), turned(key)


def _make(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Inputs:
    batch, tokens, heads, key_heads, dim = shape
    angle = torch.arange(tokens, device=device)[:, None] / 10000.0 ** (torch.arange(0, dim, 2, device=device) / dim)
    table = torch.cat((angle, angle), dim=-1)
    query, key = (torch.randn(batch, tokens, n, dim, dtype=dtype, device=device, requires_grad=True) for n in (heads, key_heads))
    return query, key, table.cos().to(dtype), table.sin().to(dtype)


def _moved(inputs: Inputs, backward: bool) -> int:
    query, key, cos, sin = inputs
    once = 2 * (query.numel() + key.numel()) + cos.numel() + sin.numel()
    return int((2 if backward else 1) * once * query.element_size())


def _liger() -> Any:
    apply = import_module("liger_kernel.ops.rope").LigerRopeFunction.apply
    return lambda query, key, cos, sin: apply(query.transpose(1, 2), key.transpose(1, 2), cos[None], sin[None])


BENCH = benchmark(
    Case(
        op="rope",
        ours=rope,
        plain=_plain,
        make=_make,
        moved=_moved,
        sizes={
            "small": ((1, 256, 8, 2, 64),),
            "medium": ((1, 2048, 32, 8, 128),),
            "large": ((4, 2048, 32, 8, 128),),
            "batch": ((32, 128, 12, 12, 64),),
        },
        anchors=(Anchor((4, 4096, 32, 8, 128), torch.bfloat16, limit_ms=0.084),),
        differentiable=True,
        peers={"liger": _liger},
    )
)
