"""Tiny decoders of every family with transformers' own beside them, and steps through a cache whose pages lie scattered."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from ridgeline.llm.cache.kv import KVCache
from ridgeline.llm.model.config import config_of
from ridgeline.llm.model.decoder import Batch, Decoder
from ridgeline.llm.model.weights import from_huggingface

SIZES = {
    "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 80, "max_position_embeddings": 256, "head_dim": 8,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, one kv head a head": ("Llama", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, rope llama3": ("Llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}),
    "llama, rope linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama, rope dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
    "llama, rope yarn": ("Llama", {"rope_parameters": YARN}),
    "qwen2, rope yarn with all its numbers": (
        "Qwen2",
        {"rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False}},
    ),
    "mistral, window 7": ("Mistral", {"sliding_window": 7}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, windows from layer 1": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2, window in layer 1": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gpt2": ("GPT2", {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 128, "vocab_size": 97}),
    "gpt2, wide and untied": (
        "GPT2",
        {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 97, "n_inner": 100, "tie_word_embeddings": False},
    ),
}  # fmt: skip


def pair(case: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Decoder]:
    """(transformers' model, ours with its weights and its config.json)."""
    family, options = CASES[case]
    config = getattr(transformers, f"{family}Config")(
        **(options if family == "GPT2" else {**SIZES, **options}), attn_implementation="eager"
    )
    theirs = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")(config).eval().to(dtype)
    with torch.no_grad():
        for parameter in theirs.parameters():  # biases and norms too: transformers leaves them 0 and 1, and errors in them unseen
            parameter.copy_(torch.randn(parameter.shape) * 0.3 + (1.0 if parameter.dim() == 1 else 0.0))
    ours = from_huggingface(config_of(config.to_dict(), case), theirs.state_dict(), dtype=dtype)
    return theirs, ours


def logits_of(theirs: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        out: Tensor = theirs(torch.tensor([tokens])).logits[0]
        return out


class Text:
    """Sequences in a cache of scattered pages, advanced in whatever steps a test likes."""

    def __init__(self, decoder: Decoder, sequences: list[list[int]], page_size: int = 16, seed: int = 0, **cache: Any) -> None:
        self.decoder, self.sequences, self.page_size = decoder, sequences, page_size
        self.done = [0] * len(sequences)
        most = max(-(-len(tokens) // page_size) for tokens in sequences)
        pages = len(sequences) * most + 3
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))[: len(sequences) * most]
        self.table = order.view(len(sequences), most).to(torch.int32)
        self.cache = KVCache(decoder.config, pages, page_size, **{"dtype": decoder.dtype, **cache})
        for tensor in (*self.cache.keys, *self.cache.values):
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))  # what was not written must not be read
        self.logits: list[list[Tensor]] = [[] for _ in sequences]

    def step(self, counts: dict[int, int], rows: bool = False) -> None:
        """The next `count` tokens of each sequence named; `rows`: as a decode step, which has no starts."""
        tokens, positions, slots, starts, lengths = [], [], [], [0], []
        for index, count in counts.items():
            here = range(self.done[index], self.done[index] + count)
            tokens += [self.sequences[index][i] for i in here]
            positions += here
            slots += [int(self.table[index, i // self.page_size]) * self.page_size + i % self.page_size for i in here]
            starts.append(len(tokens))
            lengths.append(here.stop)
        table, each = self.table[list(counts)], torch.tensor(lengths, dtype=torch.int32)
        batch = Batch(
            torch.tensor(tokens), torch.tensor(positions), torch.tensor(slots), table, each, None if rows else tuple(starts)
        )  # fmt: skip
        with torch.inference_mode():
            out = self.decoder(batch, self.cache)
        for place, (index, count) in enumerate(counts.items()):
            self.logits[index] += [*out[starts[place] : starts[place + 1]]]
            self.done[index] += count

    def all_logits(self, index: int) -> Tensor:
        return torch.stack(self.logits[index])


def random_tokens(count: int, seed: int = 0, vocab: int = 97) -> list[int]:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
