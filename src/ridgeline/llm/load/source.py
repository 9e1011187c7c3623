"""What every kind of model file gives before a decoder is built."""

from __future__ import annotations

from dataclasses import dataclass

from ..model.config import ModelConfig
from .tensors import Tensors
from .tokens import TextTokenizer


@dataclass(frozen=True, slots=True)
class Source:
    """A model file that has been opened and checked; its weights are not read yet."""

    name: str
    config: ModelConfig
    tensors: Tensors
    tokenizer: TextTokenizer
    chat_template: str | None = None
    eos: tuple[int, ...] = ()
