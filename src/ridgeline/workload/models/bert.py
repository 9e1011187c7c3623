"""BERT, encoder and pooler, with Hugging Face's layer names.

    input_ids, token_type_ids [B,T] ─embeddings─> [B,T,hidden] ─layers─> sequence [B,T,hidden] ─first token, pooler─> pooled [B,hidden]
      layer: x = norm(x + attention(x)); x = norm(x + mlp(x))

Sequences fill the batch: there is no padding mask. For inference: dropout is left out. Ref: Devlin 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import Example

NORM_EPS = 1e-12


@dataclass(frozen=True, slots=True)
class BertConfig:
    """The sizes of an encoder; the vocabulary is that of the uncased models."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocab: int = 30_522
    positions: int = 512


CONFIGS = {
    "bert-base": BertConfig(layers=12, hidden=768, heads=12, intermediate=3072),
    "bert-large": BertConfig(layers=24, hidden=1024, heads=16, intermediate=4096),
}


def build(name: str, example: Example) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """The module and one batch of single-sentence token ids."""
    config = CONFIGS[name]
    shape = (example.batch, example.tokens)
    return Bert(config), (torch.randint(config.vocab, shape), torch.zeros(shape, dtype=torch.int64)), {}


class Embeddings(nn.Module):
    """Word, position and sentence, summed and normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab, config.hidden, padding_idx=0)
        self.position_embeddings = nn.Embedding(config.positions, config.hidden)
        self.token_type_embeddings = nn.Embedding(2, config.hidden)
        self.LayerNorm = nn.LayerNorm(config.hidden, eps=NORM_EPS)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        positions = self.position_embeddings.weight[: input_ids.size(1)]  # positions count up from 0, so a slice is the lookup
        embedded = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids) + positions
        out: Tensor = self.LayerNorm(embedded)
        return out


class SelfAttention(nn.Module):
    """Every token attends to every token."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.head_dim = config.hidden // config.heads
        self.query = nn.Linear(config.hidden, config.hidden)
        self.key = nn.Linear(config.hidden, config.hidden)
        self.value = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], -1, self.head_dim)
        query, key, value = (project(x).view(shape).transpose(1, 2) for project in (self.query, self.key, self.value))
        return functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class Residual(nn.Module):
    """A linear, added to what entered the block, normalised."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.dense = nn.Linear(features, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=NORM_EPS)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = self.LayerNorm(self.dense(x) + residual)
        return out


class Dense(nn.Module):
    """A linear and its activation: the first half of the perceptron, and the pooler."""

    def __init__(self, features: int, out_features: int, activation: nn.Module) -> None:
        super().__init__()
        self.dense = nn.Linear(features, out_features)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(self.dense(x))
        return out


class Layer(nn.Module):
    """Attention and a two-layer perceptron, each normalised after being added to its input."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": SelfAttention(config), "output": Residual(config.hidden, config.hidden)})
        self.intermediate = Dense(config.hidden, config.intermediate, nn.GELU())
        self.output = Residual(config.intermediate, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention["output"](self.attention["self"](x), x)
        out: Tensor = self.output(self.intermediate(x), x)
        return out


class Encoder(nn.Module):
    """The layers, in turn."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(config) for _ in range(config.layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x)
        return x


class BertModel(nn.Module):
    """Token ids to the sequence and its pooled first token."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.pooler = Dense(config.hidden, config.hidden, nn.Tanh())

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> tuple[Tensor, Tensor]:
        sequence = self.encoder(self.embeddings(input_ids, token_type_ids))
        return sequence, self.pooler(sequence[:, 0])


class Bert(nn.Module):
    """Puts the `bert.` of the published weights before every name."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.bert = BertModel(config)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> tuple[Tensor, Tensor]:
        outputs: tuple[Tensor, Tensor] = self.bert(input_ids, token_type_ids)
        return outputs
