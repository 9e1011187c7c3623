"""Exact acceptance of drafted tokens: what comes out is distributed as the target alone would sample it.

target probabilities p [B, k+1, V]   drafted tokens x [B, k]   draft probabilities q [B, k, V] or None   counts [B] ≤ k
   q given   keep x_i while u_i < p_i(x_i) / q_i(x_i); at the first one not kept draw from max(0, p_i - q_i) / Σ;
             all kept: one more from p_{k+1} (the bonus)
   q None    draw y_i from p_i with the number the plain sampler would use; keep y_i while y_i = x_i; the first that differs still counts
   ──> tokens [B, k+1], emitted [B] (1 to counts + 1): the first `emitted` of each row are the output; a p of NaN gives BAD_ROW and ends it

The second is the first with a one-hot q (kept with chance p(x), else drawn from p without x), and its output does not depend on x at
all: the text is the one plain sampling gives for the same seed. Greedy: p is one-hot, so both give the greedy text.
Ref: Leviathan 2023, Chen 2023 (theorem 1: the output follows p for every q).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..sampling import pick


def accept_batch(
    target: torch.Tensor,
    drafted: torch.Tensor,
    counts: torch.Tensor,
    draft: torch.Tensor | None,
    draws: torch.Tensor,
    tests: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [B, k+1], emitted [B]) for a padded batch; draws [B, k+1] sample tokens, tests [B, k] decide whether a draft is kept."""
    width = drafted.shape[1]
    proposed = torch.arange(width, device=drafted.device) < counts[:, None]
    if draft is None:
        tokens = pick(target.flatten(0, 1), draws.flatten()).view(len(target), width + 1)
        kept = (tokens[:, :width] == drafted) & proposed
        return tokens, _leading(kept) + 1
    assert tests is not None
    chance_target = target[:, :width].gather(2, drafted[..., None])[..., 0]
    chance_draft = draft.gather(2, drafted[..., None])[..., 0]
    kept = (tests * chance_draft < chance_target) & proposed
    accepted = _leading(kept)
    rows = torch.arange(len(drafted), device=drafted.device)
    final = target[rows, accepted]
    if width:
        rejected = (accepted < counts)[:, None]
        residual = (final - draft[rows, accepted.clamp(max=width - 1)]).clamp(min=0)
        # An empty residual means p = q up to rounding: the rejection itself was rounding, and p is the right distribution.
        final = torch.where(rejected & (residual.sum(-1, keepdim=True) > 0), residual, final)
    last = pick(final, draws[rows, accepted])
    tokens = torch.cat([drafted, drafted.new_zeros(len(drafted), 1)], 1).scatter(1, accepted[:, None], last[:, None])
    return tokens, accepted + 1


def accept(
    target: torch.Tensor, drafted: Sequence[int], draft: torch.Tensor | None, uniforms: Sequence[tuple[float, float]] | torch.Tensor
) -> list[int]:
    """One request: target [k+1, V], drafted k tokens, draft [k, V] or None, uniforms [k+1, 2] (sampling, keeping) -> 1 to k + 1 tokens."""
    numbers = torch.as_tensor(uniforms, dtype=torch.float64, device=target.device)
    width = len(drafted)
    tokens, emitted = accept_batch(
        target[None],
        torch.tensor([list(drafted)], dtype=torch.int64, device=target.device).view(1, width),
        torch.tensor([width], device=target.device),
        None if draft is None else draft[None],
        numbers[None, :, 0],
        numbers[None, :width, 1],
    )
    output: list[int] = tokens[0, : int(emitted[0])].tolist()
    return output


def _leading(kept: torch.Tensor) -> torch.Tensor:
    """How many of each row are kept before the first that is not."""
    return kept.long().cumprod(1).sum(1)
