"""A model ready to run or to capture: the module and its inputs, on whatever device they were built.

    named model, Hugging Face folder, file.py:factory ──build──> ModelCase(module, args, kwargs)

An input whose parameter name is one of CACHE_NAMES is a KV cache; all other inputs are activations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..core.checks import whole

if TYPE_CHECKING:
    from torch import nn

CACHE_NAMES = frozenset({"kv_cache", "past_key_values", "cache", "caches"})


@dataclass(frozen=True, slots=True)
class CaseOptions:
    """What the user may say about a model: None means the model's own default."""

    batch: int | None = None
    dtype: str | None = None
    phase: str | None = None  # prefill or decode, for language models
    context: int | None = None  # tokens: the prompt in prefill, what the cache holds in decode
    device: str = "meta"

    def __post_init__(self) -> None:
        for name in ("batch", "context"):
            if (value := getattr(self, name)) is not None:
                whole(name, value, do=f"give the {name} as a whole number, e.g. 8")


@dataclass(frozen=True, slots=True)
class ModelCase:
    """A module in eval mode with example inputs on the same device."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    batch: int
    dtype: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    phase: str | None = None
    context: int | None = None
