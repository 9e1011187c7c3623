"""A tiny random model with a byte vocabulary, and the slow way to generate with it: everything again for each token, no sharing."""

from __future__ import annotations

import functools

import torch

from ridgeline.llm.cache.kv import KVCache
from ridgeline.llm.engine.engine import Engine
from ridgeline.llm.engine.options import EngineOptions
from ridgeline.llm.load import Loaded, byte_tokenizer
from ridgeline.llm.model.config import ModelConfig
from ridgeline.llm.model.decoder import Batch
from ridgeline.llm.model.weights import random_decoder

CONFIG = ModelConfig("llama", vocab=256, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=48, context=96)
PROMPTS = ["It was the best of times", "a", "It was the worst of times", "It was the best of times, it was", "xyz" * 9, "It was the"]


@functools.cache
def tiny(eos: tuple[int, ...] = ()) -> Loaded:
    return Loaded(random_decoder(CONFIG, seed=3).eval(), byte_tokenizer(), CONFIG, "tiny", None, eos, None)


def engine(loaded: Loaded | None = None, **options: object) -> Engine:
    return Engine(loaded or tiny(), EngineOptions(**{"seed": 1, **options}))  # type: ignore[arg-type]


@torch.inference_mode()
def reference_logits(loaded: Loaded, tokens: list[int]) -> torch.Tensor:
    """[V] after all of `tokens`, read at once into a cache that knows nothing."""
    cache = KVCache(loaded.config, 1, len(tokens), torch.float32)
    count = len(tokens)
    places = torch.arange(count)
    batch = Batch(
        torch.tensor(tokens),
        places,
        places,
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([count], dtype=torch.int32),
        (0, count),
        None,
    )
    return loaded.model(batch, cache)[-1]


@functools.cache
def reference_greedy(prompt: str, count: int) -> tuple[int, ...]:
    tokens = list(prompt.encode())
    for _ in range(count):
        tokens.append(int(reference_logits(tiny(), tokens).argmax()))
    return tuple(tokens[-count:])
