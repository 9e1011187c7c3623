"""Drafts from some of the target's own layers, in the target's own cache: no second model, no second cache, no catching up.

last token ──layers 0 … m-1, final norm, head──> x₁ ──> x₂ …      (Decoder.forward(layers=range))

For the first m layers the cached keys and values of the text are exactly those the draft would compute (same weights, same inputs).
For a range with steps (0, 2, 4 …) they are the full model's, which is what the draft attends to then.
Drafted tokens write keys and values into the slots reserved behind the text; the target's pass writes the same slots again in every
layer before it attends, so nothing of the draft stays. Those slots are past `computed`, so their pages belong to the request alone.
Ref: Zhang 2023 (self-speculative decoding), Elhoushi 2024 (LayerSkip).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...core.errors import OptionError
from .draft import Ask, Proposal
from .model_draft import step_bytes, table_bytes
from .rollout import Row, roll_out

if TYPE_CHECKING:
    from ..cache.kv import KVCache
    from ..engine.request import Request
    from ..model.decoder import Decoder


class LayerSkipDraft:
    """`layers`: how many of the first layers, or a range of them; by default half."""

    name = "layers"

    def __init__(self, layers: int | range | None = None) -> None:
        self.layers = range(layers) if isinstance(layers, int) else layers
        self.relative_cost = 1.0

    def attach(self, target: Decoder, cache: KVCache) -> None:
        most = target.config.layers
        layers = self.layers if self.layers is not None else range(max(1, most // 2))
        if not 1 <= len(layers) < most or layers[0] < 0 or layers[-1] >= most:
            raise OptionError(
                f"layers {layers} of a model that has {most}",
                why="a draft runs at least one and not all of the target's layers",
                do=f"e.g. LayerSkipDraft({max(1, most // 2)})",
            )
        self.layers = layers
        self.target, self.cache = target, cache
        whole, head = step_bytes(target), table_bytes(target)
        self.relative_cost = (max(whole - head, 0.0) * len(layers) / most + head) / max(whole, head)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        result = [Proposal() for _ in asks]
        rows: list[Row] = []
        owners: list[int] = []
        for index, ask in enumerate(asks):
            request, known = ask.request, ask.request.length
            # The target's pass writes the last draft too, so the reserved pages hold known + count tokens.
            count = min(ask.count, len(request.pages) * self.cache.page_size - known, self.target.config.context - known)
            if count > 0:
                rows.append(Row(ask, count, request.computed, request.pages))
                owners.append(index)
        if rows:
            for index, proposal in zip(owners, roll_out(self.target, self.cache, rows, self.target.config.vocab, self.layers), strict=True):
                result[index] = proposal
        return result

    def forget(self, request: Request) -> None:
        """Nothing is kept: the cache is the target's."""
