"""The loop both model drafts share: catch up on the tokens a cache does not hold, then one token a request and pass.

Row(ask, count, computed, pages)
   pass 1       tokens[computed:] of every row, ragged (chunks of at most `chunk` tokens, so that a long prompt needs no huge pass)
   pass 2..k    the token just drawn, rows that want no more drop out
   ──> Proposal a row; keys and values of everything but the last drafted token are in the cache

Drawn tokens stay on the device: the host waits once, at the end (requests with penalties wait once a token: penalties need the tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..cache.kv import KVCache
from ..model.decoder import Batch, Decoder
from ..sampling import History, Rules, Sampling, draw, pick, probabilities
from .draft import Ask, Proposal


@dataclass(slots=True)
class Row:
    """One request as a draft model sees it; `pages` must hold known + count - 1 tokens."""

    ask: Ask
    count: int  # tokens there is room for, at most ask.count
    computed: int  # tokens of prompt + output whose keys and values are in the cache already
    pages: Sequence[int]

    @property
    def known(self) -> int:
        return self.ask.request.length

    @property
    def sampling(self) -> Sampling:
        return self.ask.request.sampling


@torch.inference_mode()
def roll_out(
    model: Decoder, cache: KVCache, rows: Sequence[Row], vocab: int, layers: range | None = None, chunk: int = 512
) -> list[Proposal]:
    """row.count tokens after each row (at least 1), drawn from the draft's own distribution under the row's sampling settings."""
    device = cache.keys[0].device
    logits = _catch_up(model, cache, rows, layers, chunk, device)
    table = _page_table(rows, device)
    drawn: list[list[torch.Tensor]] = [[] for _ in rows]
    chances: list[list[torch.Tensor]] = [[] for _ in rows]
    active = list(range(len(rows)))
    tokens = torch.empty(0, dtype=torch.int64, device=device)
    for step in range(max(row.count for row in rows)):
        if step:
            going = [at for at, index in enumerate(active) if rows[index].count > step]
            tokens = tokens if len(going) == len(active) else tokens[torch.tensor(going, device=device)]
            active = [active[at] for at in going]
            batch = _decode_batch(tokens, [rows[index] for index in active], active, step, table, cache.page_size, device)
            logits = model(batch, cache, layers)
        tokens, probs = _draw([rows[index] for index in active], [drawn[index] for index in active], logits, vocab, step)
        for at, index in enumerate(active):
            drawn[index].append(tokens[at])
            if probs is not None and rows[index].ask.distributions:
                chances[index].append(probs[at])
    return _proposals(rows, drawn, chances)


def _catch_up(model: Decoder, cache: KVCache, rows: Sequence[Row], layers: range | None, chunk: int, device: torch.device) -> torch.Tensor:
    """Logits [rows, vocab] after the last known token of every row."""
    last: list[torch.Tensor | None] = [None] * len(rows)
    computed = [row.computed for row in rows]
    while waiting := [index for index, row in enumerate(rows) if computed[index] < row.known]:
        parts: list[tuple[int, int]] = []
        budget = max(chunk, len(rows))
        for index in waiting:
            if count := min(budget, rows[index].known - computed[index]):
                parts.append((index, count))
                budget -= count
        logits = model(_ragged_batch(model, rows, parts, computed, cache.page_size, device), cache, layers)
        for at, (index, count) in enumerate(parts):
            computed[index] += count
            last[index] = logits[at]
    found = [row for row in last if row is not None]
    assert len(found) == len(rows), "every row has a token that is not computed yet"
    return torch.stack(found)


def _ragged_batch(
    model: Decoder, rows: Sequence[Row], parts: Sequence[tuple[int, int]], computed: Sequence[int], page_size: int, device: torch.device
) -> Batch:
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    lengths: list[int] = []
    for index, count in parts:
        row, begin = rows[index], computed[index]
        tokens += row.ask.request.span(begin, count)
        positions += range(begin, begin + count)
        slots += (_slot(row, position, page_size) for position in range(begin, begin + count))
        starts.append(len(tokens))
        lengths.append(begin + count)
    return Batch(
        # The text may hold tokens a smaller table does not: read as its last one, which costs a guess and no more.
        tokens=torch.tensor(tokens, device=device).clamp(max=model.config.vocab - 1),
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        page_table=_page_table([rows[index] for index, _ in parts], device),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        starts=tuple(starts),
        wanted=torch.tensor(starts[1:], device=device) - 1,
        lengths_host=tuple(lengths),
    )


def _decode_batch(
    tokens: torch.Tensor, rows: Sequence[Row], active: Sequence[int], step: int, table: torch.Tensor, page_size: int, device: torch.device
) -> Batch:
    places = [row.known + step - 1 for row in rows]
    return Batch(
        tokens=tokens,
        positions=torch.tensor(places, device=device),
        slots=torch.tensor([_slot(row, place, page_size) for row, place in zip(rows, places, strict=True)], device=device),
        page_table=table if len(active) == len(table) else table[torch.tensor(active, device=device)],
        lengths=torch.tensor(places, dtype=torch.int32, device=device) + 1,
        starts=None,
        wanted=None,
        lengths_host=tuple(place + 1 for place in places),
    )


def _draw(
    rows: Sequence[Row], drawn: Sequence[Sequence[torch.Tensor]], logits: torch.Tensor, vocab: int, step: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(tokens [R], probabilities [R, vocab] if any row needs them) under each row's own settings."""
    histories = [
        History(row.ask.request.prompt, [*row.ask.request.output, *(int(token) for token in before)]) if row.sampling.penalised else None
        for row, before in zip(rows, drawn, strict=True)
    ]
    samplings, logits = [row.sampling for row in rows], _fit(logits, vocab)
    numbers = torch.tensor([row.ask.uniforms[step] for row in rows], dtype=torch.float64, device=logits.device)
    if not any(row.ask.distributions for row in rows):
        return draw(logits, Rules(samplings, vocab, logits.device), numbers, histories).clamp(min=0), None
    probs = probabilities(logits, samplings, histories)
    return pick(probs, numbers).clamp(min=0), probs  # a row of NaN proposes token 0, which is never kept


def _fit(logits: torch.Tensor, vocab: int) -> torch.Tensor:
    """The draft's logits over the target's vocabulary: tables are often padded to different sizes. Missing tokens are never drafted."""
    if logits.shape[1] >= vocab:
        return logits[:, :vocab]
    return torch.nn.functional.pad(logits, (0, vocab - logits.shape[1]), value=-torch.inf)


def _proposals(rows: Sequence[Row], drawn: Sequence[Sequence[torch.Tensor]], chances: Sequence[Sequence[torch.Tensor]]) -> list[Proposal]:
    every = torch.stack([token for tokens in drawn for token in tokens]).tolist()
    result: list[Proposal] = []
    at = 0
    for row, probs in zip(rows, chances, strict=True):
        tokens = every[at : at + row.count]
        at += row.count
        result.append(Proposal(tokens, torch.stack(list(probs)) if probs else None))
    return result


def _page_table(rows: Sequence[Row], device: torch.device) -> torch.Tensor:
    width = max(len(row.pages) for row in rows)
    return torch.tensor([[*row.pages, *[0] * (width - len(row.pages))] for row in rows], dtype=torch.int32, device=device)


def _slot(row: Row, position: int, page_size: int) -> int:
    return row.pages[position // page_size] * page_size + position % page_size
