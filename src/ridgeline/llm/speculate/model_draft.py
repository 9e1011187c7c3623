"""Drafts from a smaller model of the same vocabulary, with a paged cache of its own.

request ──> _Kept(tokens in the draft's cache, pages) ──common prefix with prompt + output──> what still has to be computed
   accepted drafts are in the cache already; rejected ones are rolled back by forgetting them (their slots are written again)

Tokens of a request are only ever added, so what agreed once agrees for good, and each call compares the last few tokens only.
Out of pages: the least recently drafted request loses its cache (computed again when it is asked for); if that is not enough, nothing
is proposed. Prefixes are shared between requests as in the engine's own pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...core.errors import OptionError
from ..cache.kv import KVCache
from ..cache.pages import PagePool
from .draft import Ask, Proposal, known_tokens
from .rollout import Row, roll_out

if TYPE_CHECKING:
    import torch

    from ..engine.request import Request
    from ..model.decoder import Decoder


@dataclass(slots=True)
class _Kept:
    """What the draft's cache holds of one request."""

    tokens: list[int] = field(default_factory=list)
    agreed: int = 0  # the first so many are known to be the request's
    pages: list[int] = field(default_factory=list)
    published: int = 0  # leading pages already offered for sharing


class ModelDraft:
    """A smaller Decoder as the draft. `pages` of its own cache: by default those of the target's cache, as they are the same tokens."""

    name = "model"

    def __init__(self, model: Decoder, *, pages: int | None = None, page_size: int = 16, dtype: torch.dtype | None = None) -> None:
        self.model = model
        self.relative_cost = 1.0
        self._page_size, self._dtype = page_size, dtype
        self._kept: dict[str, _Kept] = {}  # least recently used first
        self._pages = pages
        self._vocab = model.config.vocab

    def attach(self, target: Decoder, cache: KVCache) -> None:
        if self.model.config.vocab < target.config.vocab // 2 or self.model.config.vocab > target.config.vocab * 2:
            raise OptionError(
                f"a draft of {self.model.config.vocab} tokens for a target of {target.config.vocab}",
                why="draft and target must share one vocabulary; tables may be padded differently, but not this much",
                do="take a smaller model of the same family",
            )
        first = next(self.model.parameters())
        pages = self._pages or -(-cache.pages * cache.page_size // self._page_size)
        self._vocab = target.config.vocab
        self.relative_cost = step_bytes(self.model) / step_bytes(target)
        self.cache = KVCache(self.model.config, pages, self._page_size, dtype=self._dtype or first.dtype, device=first.device)
        self.pool = PagePool(pages, self._page_size)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        result = [Proposal() for _ in asks]
        rows: list[Row] = []
        owners: list[int] = []
        busy = {ask.request.id for ask in asks}
        for index, ask in enumerate(asks):
            if (row := self._row(ask, busy)) is not None:
                rows.append(row)
                owners.append(index)
        if rows:
            for index, proposal in zip(owners, roll_out(self.model, self.cache, rows, self._vocab), strict=True):
                result[index] = proposal
                self._remember(asks[index].request, proposal)
        return result

    def forget(self, request: Request) -> None:
        if (kept := self._kept.pop(request.id, None)) is not None:
            self.pool.release(kept.pages)

    def _row(self, ask: Ask, busy: set[str]) -> Row | None:
        """The request with pages for `count` drafts, and how much of it the cache holds; None when there is no room."""
        request, tokens = ask.request, known_tokens(ask.request)
        count = min(ask.count, self.model.config.context - len(tokens))
        if count < 1:
            return None
        kept = self._kept.pop(request.id, None)
        if kept is None:
            pages = self.pool.match(tokens[:-1])  # the last token is always computed: its logits are wanted
            held = len(pages) * self._page_size
            kept = _Kept(tokens[:held], held, pages, len(pages))
        self._kept[request.id] = kept  # now the most recently used
        if not self._grow(kept, len(tokens) + count - 1, busy):
            self.forget(request)
            return None
        while kept.agreed < min(len(kept.tokens), len(tokens) - 1) and kept.tokens[kept.agreed] == tokens[kept.agreed]:
            kept.agreed += 1
        return Row(ask, count, min(kept.agreed, len(tokens) - 1), kept.pages)

    def _grow(self, kept: _Kept, tokens: int, busy: set[str]) -> bool:
        """Pages for so many tokens, taken from requests that are not drafted now where none is free."""
        needed = -(-tokens // self._page_size) - len(kept.pages)
        if needed <= 0:
            return True
        while (found := self.pool.allocate(needed)) is None:
            victim = next((key for key in self._kept if key not in busy), None)
            if victim is None:
                return False
            self.pool.release(self._kept.pop(victim).pages)
        kept.pages += found
        return True

    def _remember(self, request: Request, proposal: Proposal) -> None:
        """The cache now holds every known token and all drafted ones but the last; pages full of known tokens can be shared."""
        kept = self._kept[request.id]
        tokens = known_tokens(request)
        begin, end = kept.published, len(tokens) // self._page_size
        if end > begin:
            fresh = tokens[begin * self._page_size : end * self._page_size]
            kept.pages[begin:end] = self.pool.share(fresh, kept.pages[begin:end], kept.pages[begin - 1] if begin else None)
            kept.published = end
        kept.agreed = len(tokens)
        kept.tokens = [*tokens, *proposal.tokens[:-1]]


def step_bytes(model: Decoder) -> float:
    """Bytes of weights a decode step reads, which is what its time is made of: all but an embedding table that is not the head too."""
    whole = sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()])
    return float(whole - (0 if model.config.tied else table_bytes(model)))


def table_bytes(model: Decoder) -> int:
    """Bytes of one table over the vocabulary, in the dtype of the first parameter."""
    return model.config.vocab * model.config.hidden * next(model.parameters()).element_size()
