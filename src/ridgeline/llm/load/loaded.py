"""A model ready to generate: the decoder on its device, its tokenizer, its chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .tokens import TextTokenizer

if TYPE_CHECKING:
    from ..model.config import ModelConfig
    from ..model.decoder import Decoder


@dataclass(slots=True)
class Loaded:
    """What load_model gives back; the decoder is in eval mode and keeps no gradients."""

    model: Decoder
    tokenizer: TextTokenizer
    config: ModelConfig
    name: str
    chat_template: str | None
    eos: tuple[int, ...]  # tokens that end an answer
    bos: int | None
