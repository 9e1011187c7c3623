"""The end of a decode step in one launch: logits in float32, the likeliest token of each row, and everything one step further.

    logits [B, V] ──a program a share of a row──> float32 logits, largest of the share
      ──the last of a row to end (tickets)──> tokens[b], best[b] = argmax, max      history[step[b], b] = both; step, positions, lengths + 1

The first of equal logits; a row with a NaN has best = inf. Four small kernels and two copies of torch otherwise, the largest of them a
maximum by few programs. A step past the end of the history is not written down. tickets: int32 [B], zeros before and after.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.errors import OptionError
from .jit import INTERPRETED, cdiv, jit, launch, next_power_of_2, tl
from .library import operator
from .matmul_kernels import processors


@jit
def first_largest(value, index, other_value, other_index):  # type: ignore[no-untyped-def]
    """Of two (value, index): the larger, the earlier where equal."""
    other = (other_value > value) | ((other_value == value) & (other_index < index))
    return tl.where(other, other_value, value), tl.where(other, other_index, index)


@jit
def decode_choice_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, wide_ptr, part_ptr, place_ptr, ticket_ptr, tokens_ptr, best_ptr, positions_ptr, lengths_ptr, step_ptr, token_history_ptr,
    best_history_ptr, vocab, share, shares, rows, most_steps, BLOCK: tl.constexpr, SHARES: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """One share of one row."""
    row = (tl.program_id(0) // shares).to(tl.int64)
    mine = tl.program_id(0) % shares
    start = mine * share
    stop = tl.minimum(start + share, vocab)
    lanes = tl.arange(0, BLOCK)
    value = tl.full([BLOCK], float("-inf"), tl.float32)
    index = tl.full([BLOCK], 2147483647, tl.int32)
    for at in range(start, stop, BLOCK):
        columns = at + lanes
        x = tl.load(logits_ptr + row * vocab + columns, mask=columns < stop, other=float("-inf")).to(tl.float32)
        if COPIED:
            tl.store(wide_ptr + row * vocab + columns, x, mask=columns < stop)
        x = tl.where(x == x, x, float("inf"))
        value, index = first_largest(value, index, x, columns)
    value, index = tl.reduce((value, index), 0, first_largest)
    tl.store(part_ptr + row * shares + mine, value)
    tl.store(place_ptr + row * shares + mine, index)
    tl.debug_barrier()
    done = tl.atomic_add(ticket_ptr + row, 1, sem="acq_rel")
    if done == shares - 1:
        tl.store(ticket_ptr + row, 0)
        others = tl.arange(0, SHARES)
        values = tl.load(part_ptr + row * shares + others, mask=others < shares, other=float("-inf"), cache_modifier=".cg")
        places = tl.load(place_ptr + row * shares + others, mask=others < shares, other=2147483647, cache_modifier=".cg")
        top, token = tl.reduce((values, places), 0, first_largest)
        token = tl.minimum(token, vocab - 1).to(tl.int64)
        step = tl.load(step_ptr + row)
        inside = (step >= 0) & (step < most_steps)
        tl.store(tokens_ptr + row, token)
        tl.store(best_ptr + row, top)
        tl.store(token_history_ptr + step * rows + row, token, mask=inside)
        tl.store(best_history_ptr + step * rows + row, top, mask=inside)
        tl.store(step_ptr + row, step + 1)
        tl.store(positions_ptr + row, tl.load(positions_ptr + row) + 1)
        tl.store(lengths_ptr + row, tl.load(lengths_ptr + row) + 1)


def _launch(logits: Tensor, tokens: Tensor, best: Tensor, positions: Tensor, lengths: Tensor, step: Tensor, tickets: Tensor,
            token_history: Tensor, best_history: Tensor) -> Tensor:  # fmt: skip
    rows, vocab = logits.shape
    if logits.dtype is torch.float64 or rows == 0:
        return _reference(logits, tokens, best, positions, lengths, step, tickets, token_history, best_history)
    logits = logits.contiguous()
    copied = logits.dtype is not torch.float32
    wide = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device) if copied else logits
    block = min(2048, next_power_of_2(vocab))
    shares = max(1, min(cdiv(vocab, block), 2 * processors(logits.get_device()) // rows, 256))
    share = cdiv(cdiv(vocab, shares), block) * block
    shares = cdiv(vocab, share)
    part = torch.empty((rows, shares), dtype=torch.float32, device=logits.device)
    place = torch.empty((rows, shares), dtype=torch.int32, device=logits.device)
    launch(
        decode_choice_kernel, (rows * shares,), logits, wide, part, place, tickets, tokens, best, positions, lengths, step, token_history,
        best_history, vocab, share, shares, token_history.shape[1], token_history.shape[0], BLOCK=block, SHARES=next_power_of_2(shares),
        COPIED=copied, num_warps=1 if INTERPRETED else 8,
    )  # fmt: skip
    return wide if copied else logits.clone()


def _reference(logits: Tensor, tokens: Tensor, best: Tensor, positions: Tensor, lengths: Tensor, step: Tensor, tickets: Tensor,
               token_history: Tensor, best_history: Tensor) -> Tensor:  # fmt: skip
    wide = logits if logits.dtype is torch.float64 else logits.float()
    seen = torch.where(wide.isnan(), torch.inf, wide)
    tokens.copy_(seen.argmax(-1))  # of equal ones the first
    best.copy_(seen.gather(1, tokens[:, None])[:, 0])
    here = torch.arange(token_history.shape[0], device=step.device)[:, None] == step[None]
    rows = logits.shape[0]
    token_history[:, :rows].copy_(torch.where(here, tokens, token_history[:, :rows]))
    best_history[:, :rows].copy_(torch.where(here, best, best_history[:, :rows]))
    for counted in (step, positions, lengths):
        counted.add_(1)
    return wide if wide is not logits else logits.clone()


def _fake(logits: Tensor, *rest: Tensor) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.promote_types(logits.dtype, torch.float32))


_decode_choice = operator(
    "decode_choice(Tensor logits, Tensor(a!) tokens, Tensor(b!) best, Tensor(c!) positions, Tensor(d!) lengths, Tensor(e!) step, "
    "Tensor(f!) tickets, Tensor(g!) token_history, Tensor(h!) best_history) -> Tensor",
    launch=_launch, reference=_reference, fake=_fake,
)  # fmt: skip


def decode_choice(logits: Tensor, tokens: Tensor, best: Tensor, positions: Tensor, lengths: Tensor, step: Tensor, tickets: Tensor,
                  token_history: Tensor, best_history: Tensor) -> Tensor:  # fmt: skip
    """float32 logits [B, V]; all else is written: tokens, positions, step int64 [B], best float32 [B], lengths, tickets int32 [B],
    histories int64 and float32 [steps, B or more]. float64 for float32 where the logits are."""
    rows = logits.shape[0] if logits.dim() == 2 else -1
    wide = torch.promote_types(logits.dtype, torch.float32)
    per_row = ((tokens, torch.int64), (best, wide), (positions, torch.int64), (lengths, torch.int32), (step, torch.int64),
               (tickets, torch.int32))  # fmt: skip
    fits = all(one.shape == (rows,) and one.dtype is dtype and one.is_contiguous() for one, dtype in per_row)
    kept = ((token_history, torch.int64), (best_history, wide))
    fits = fits and all(one.dim() == 2 and one.shape[1] >= rows and one.dtype is dtype and one.is_contiguous() for one, dtype in kept)
    fits = fits and token_history.shape == best_history.shape and logits.shape[-1] > 0
    if not fits or not logits.dtype.is_floating_point:
        given = ", ".join(f"{tuple(one.shape)} {one.dtype}" for one in (logits, tokens, best, positions, lengths, step, tickets))
        raise OptionError(f"logits, tokens, best, positions, lengths, step, tickets of {given}", why="they do not fit",
                          do="give [B, V]; int64, float32, int64, int32, int64, int32 [B]; int64, float32 [steps, B]")  # fmt: skip
    out: Tensor = _decode_choice(logits, tokens, best, positions, lengths, step, tickets, token_history, best_history)
    return out
