"""A draft by name, for the command line and for Engine.from_pretrained.

"ngram" | "ngram:5" (longest match) | "layers" | "layers:4" (the first four) | "layers:0:30:2" (every other) | a model's name or path
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.errors import OptionError
from .layer_skip import LayerSkipDraft
from .model_draft import ModelDraft
from .ngram import NgramDraft

if TYPE_CHECKING:
    from ..load import Loaded
    from .draft import Draft


def make_draft(name: str, target: Loaded) -> Draft:
    """The draft `name` says, for this target."""
    kind, _, setting = name.partition(":")
    if kind not in ("ngram", "layers"):
        return _model_draft(name, target)
    numbers = [int(part) for part in setting.split(":")] if _whole_numbers(setting) else None if setting else []
    if numbers is None or len(numbers) > (1 if kind == "ngram" else 3) or (len(numbers) == 3 and numbers[2] == 0):
        raise OptionError(f"draft {name!r}", why=f"{setting!r} is no setting of {kind}", do='e.g. "ngram:4", "layers:6" or "layers:0:30:2"')
    if kind == "ngram":
        return NgramDraft(numbers[0], min(2, numbers[0])) if numbers else NgramDraft()
    return LayerSkipDraft(range(*numbers) if numbers else None)


def _whole_numbers(setting: str) -> bool:
    return all(part.isascii() and part.isdigit() and len(part) < 6 for part in setting.split(":"))


def _model_draft(name: str, target: Loaded) -> ModelDraft:
    """A second model, refused when its tokens are not the target's: it would be exact still, but nothing would be accepted."""
    from ..load import load_model

    first = next(target.model.parameters())
    loaded = load_model(name, dtype=str(first.dtype).removeprefix("torch."), device=str(first.device))
    ours, theirs = target.tokenizer, loaded.tokenizer
    some = range(0, min(ours.size, theirs.size), max(1, ours.size // 500))
    if any(ours.decode_bytes([token]) != theirs.decode_bytes([token]) for token in some):
        raise OptionError(
            f"draft {name!r} for {target.name!r}",
            why="their tokens stand for different text, so no draft would be accepted",
            do="take a smaller model of the same family, or the draft 'ngram' or 'layers'",
        )
    return ModelDraft(loaded.model)
