"""How a Hugging Face model runs one pass: attention without masks it does not need, and one decode step over a full cache.

    attend     scaled_dot_product_attention, causal by flag; a mask only where a sliding window is shorter than the keys
    DecodeStep forward(input_ids [B,1], kv_cache) ──> logits [B,1,vocab]
      kv_cache: one (key, value) pair a layer, each [B,heads,min(context, window),head_dim]; the new token takes the last place

Transformers, when exported, builds a mask for every attention, and with it copies each shared key-value head; in eager mode it
does neither. A cache of its own kind is copied whole with every token. Both would be counted, so both are left out here.
Importing this module imports transformers.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import CaptureError

ATTENTION = "ridgeline"
# By name, so that the types are the same (unknown) whether or not transformers is installed where they are checked.
caches: Any = importlib.import_module("transformers.cache_utils")


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Transformers' own attention over torch's kernel, with the mask of a sliding window where one is needed."""
    window, queries, keys = options.get("sliding_window"), query.shape[2], key.shape[2]
    if attention_mask is None and window and queries > 1 and keys > window:
        back = torch.arange(queries, device=query.device)[:, None] - torch.arange(keys, device=query.device)  # [T,T]: tokens ago
        attention_mask = torch.logical_and(back >= 0, back < window)[None, None]
    integration: Any = importlib.import_module("transformers.integrations.sdpa_attention")
    result: tuple[Tensor, None] = integration.sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return result


def register_attention() -> str:
    """Make `attend` known to transformers; no mask function of that name exists, so models make no masks for it."""
    modeling: Any = importlib.import_module("transformers.modeling_utils")
    modeling.AttentionInterface.register(ATTENTION, attend)
    return ATTENTION


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one layer keeps: nothing (it shares another's), or keys and values of the last `length` tokens."""

    length: int = 0
    window: int | None = None
    key_shape: tuple[int, ...] = ()
    value_shape: tuple[int, ...] = ()


class FullLayer(caches.DynamicLayer):  # type: ignore[misc]
    """Keys and values of the whole context, of which the last is being computed; written in place."""

    def __init__(self, keys: Tensor, values: Tensor, plan: LayerPlan, context: int) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True
        self.dtype, self.device = keys.dtype, keys.device
        self.plan, self.context = plan, context
        self.is_sliding = plan.window is not None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys[:, :, -1:].copy_(key_states)
        self.values[:, :, -1:].copy_(value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.context - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.plan.length, self.context - self.plan.length


class DecodeStep:
    """Mixed into a causal language model's class: its forward becomes one decode step, its layers keep their names."""

    plans: tuple[LayerPlan, ...]
    context: int

    def forward(self, input_ids: Tensor, kv_cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        pairs = iter(kv_cache)
        layers = [FullLayer(*next(pairs), plan, self.context) if plan.length else caches.DynamicLayer() for plan in self.plans]
        # The next class in line is the model's own, which Python, but not mypy, knows.
        output = super().forward(input_ids=input_ids, past_key_values=caches.Cache(layers=layers), use_cache=True)  # type: ignore[misc]
        logits: Tensor = output.logits
        return logits


def plan_layers(model: Any, model_class: type[Any], batch: int, device: str, name: str) -> tuple[LayerPlan, ...]:
    """What each layer caches, learnt by letting the model fill a cache of its own with one token."""
    experts = getattr(model.config, "_experts_implementation", None)
    token = torch.zeros(batch, 1, dtype=torch.long, device=device)
    # On the meta device the default, grouped products, exists for bfloat16 alone.
    model.config._experts_implementation = "batched_mm"
    try:
        with torch.no_grad():
            output = model_class.forward(model, input_ids=token, use_cache=True)
    finally:
        model.config._experts_implementation = experts
    cache = getattr(output, "past_key_values", None)
    if not isinstance(cache, caches.Cache):
        raise _no_decode(name, "it returns no key-value cache")
    return tuple(_plan(layer, model.context, name) for layer in cache.layers)


def _plan(layer: Any, context: int, name: str) -> LayerPlan:
    if type(layer) not in (caches.DynamicLayer, caches.DynamicSlidingWindowLayer):
        raise _no_decode(name, f"a layer keeps a {type(layer).__name__}, not keys and values alone")
    if not layer.is_initialized:
        return LayerPlan()
    window = layer.sliding_window if layer.is_sliding else None
    length = min(context, window) if window else context
    shapes = (tuple((*t.shape[:2], length, t.shape[3])) for t in (layer.keys, layer.values))
    return LayerPlan(length, window, *shapes)


def _no_decode(name: str, why: str) -> CaptureError:
    return CaptureError(f"no decode step of {name}", why=why, do="capture its prefill, or give file.py:factory with inputs of your own")
