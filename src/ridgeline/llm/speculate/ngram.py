"""Drafts from the request's own text: what followed the last time the same few tokens stood there.

prompt + output = … a b c d e … a b c  ──longest suffix of `most` to `least` tokens seen before, latest place first──>  d e …

No model and no memory beside an index of places, O(new tokens) a call. Good where the output repeats the input (summaries, code, edits).
Ref: prompt lookup decoding, Saxena 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...core.errors import OptionError
from .draft import Ask, Proposal, known_tokens

if TYPE_CHECKING:
    from ..cache.kv import KVCache
    from ..engine.request import Request
    from ..model.decoder import Decoder


@dataclass(slots=True)
class _Index:
    """Where each n-gram of one request last ended, for every n; only places that have a token after them."""

    done: int = 0
    places: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramDraft:
    """Proposes the continuation of the latest earlier occurrence of the longest matching suffix."""

    name = "ngram"
    relative_cost = 0.0

    def __init__(self, most: int = 4, least: int = 2) -> None:
        if not 1 <= least <= most <= 16:
            raise OptionError(f"n-grams of {least} to {most} tokens", why="1 <= least <= most <= 16 must hold", do="e.g. NgramDraft(4, 2)")
        self.most, self.least = most, least
        self._indexes: dict[str, _Index] = {}

    def attach(self, target: Decoder, cache: KVCache) -> None:
        """Nothing of the model is needed."""

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        return [Proposal(self.lookup(ask.request, ask.count)) for ask in asks]

    def lookup(self, request: Request, count: int) -> list[int]:
        """At most `count` tokens; none when no suffix was seen before."""
        tokens = known_tokens(request)
        index = self._indexes.setdefault(request.id, _Index())
        self._extend(index, tokens)
        for size in range(min(self.most, len(tokens) - 1), self.least - 1, -1):
            end = index.places.get(tuple(tokens[-size:]))
            if end is not None:
                return _continued(tokens, end, count)
        return []

    def forget(self, request: Request) -> None:
        self._indexes.pop(request.id, None)

    def _extend(self, index: _Index, tokens: list[int]) -> None:
        """Adds the n-grams that end before the last token; later places replace earlier ones."""
        for end in range(index.done + 1, len(tokens)):
            for size in range(self.least, min(self.most, end) + 1):
                index.places[tuple(tokens[end - size : end])] = end
        index.done = max(index.done, len(tokens) - 1)


def _continued(tokens: list[int], end: int, count: int) -> list[int]:
    """`count` tokens from place `end` on; where the copy reaches the present it goes on copying itself (a b a b -> a b a b …)."""
    text = list(tokens)
    for place in range(end, end + count):
        text.append(text[place])
    return text[len(tokens) :]
