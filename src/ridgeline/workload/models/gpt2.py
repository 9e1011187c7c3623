"""GPT-2, with Hugging Face's layer names.

    input_ids [B,T], positions [T] ─wte + wpe─> [B,T,hidden] ─h─> ln_f, lm_head (tied to wte) ─> logits [B,T,vocab]
      block: x = x + attention(ln_1 x); x = x + mlp(ln_2 x)

Prefill, decode and kv_cache are as in `decoder`. The published `c_attn`, `c_proj` and `c_fc` store their weights transposed
(Conv1D); here they are linears. For inference: dropout is left out. Ref: Radford 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from . import Example
from .decoder import Cache, attend, language_inputs


@dataclass(frozen=True, slots=True)
class GPT2Config:
    """The sizes of a GPT-2; the perceptron is four times as wide as the hidden state."""

    layers: int
    hidden: int
    heads: int
    vocab: int = 50_257
    positions: int = 1024


CONFIGS = {"gpt2": GPT2Config(layers=12, hidden=768, heads=12), "gpt2-medium": GPT2Config(layers=24, hidden=1024, heads=16)}


def build(name: str, example: Example) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """The module and the inputs of one phase."""
    config = CONFIGS[name]
    args, kwargs = language_inputs(example, config.vocab, config.layers, config.heads, config.hidden // config.heads)
    return GPT2(config), args, kwargs


class Attention(nn.Module):
    """One matrix for query, key and value."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.hidden, self.heads = config.hidden, config.heads
        self.c_attn = nn.Linear(config.hidden, 3 * config.hidden)
        self.c_proj = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor, positions: Tensor, cache: tuple[Tensor, Tensor] | None) -> Tensor:
        shape = (*x.shape[:2], self.heads, -1)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.c_attn(x).split(self.hidden, dim=2))
        out: Tensor = self.c_proj(attend(query, key, value, positions, cache))
        return out


class MLP(nn.Module):
    """Two linears with the tanh form of GELU between."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.hidden, 4 * config.hidden)
        self.act = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(self.act(self.c_fc(x)))
        return out


class Block(nn.Module):
    """Attention and perceptron, each normalised before and added to its input."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, positions: Tensor, cache: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attn(self.ln_1(x), positions, cache)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class Transformer(nn.Module):
    """Token ids to the normalised last hidden states."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab, config.hidden)
        self.wpe = nn.Embedding(config.positions, config.hidden)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.hidden)

    def forward(self, input_ids: Tensor, positions: Tensor, kv_cache: Cache | None) -> Tensor:
        x = self.wte(input_ids) + self.wpe(positions)
        for index, block in enumerate(self.h):
            x = block(x, positions, kv_cache[index] if kv_cache is not None else None)
        out: Tensor = self.ln_f(x)
        return out


class GPT2(nn.Module):
    """The transformer and its output matrix."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, input_ids: Tensor, positions: Tensor, kv_cache: Cache | None = None) -> Tensor:
        logits: Tensor = self.lm_head(self.transformer(input_ids, positions, kv_cache))
        return logits
