"""Vision transformer with torchvision's layer names.

    image [B,3,224,224] ─conv_proj 16x16/16─> 196 patches, + class token, + positions [B,197,768]
      ─12 x (x + attention(ln_1 x); x + mlp(ln_2 x))─> ln ─first token, heads─> [B,1000]

The query, key and value projections are one matrix, `in_proj_weight`, as in nn.MultiheadAttention. Dropout, zero in the
published model, is left out. Ref: Dosovitskiy 2020.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import Example


@dataclass(frozen=True, slots=True)
class ViTConfig:
    """The sizes of a vision transformer; the defaults are ViT-B/16."""

    image: int = 224  # pixels a side
    patch: int = 16
    layers: int = 12
    hidden: int = 768
    heads: int = 12
    intermediate: int = 3072
    classes: int = 1000


def build(name: str, example: Example) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """The module and one batch of images."""
    config = ViTConfig()
    return VisionTransformer(config), (torch.randn(example.batch, 3, config.image, config.image),), {}


class SelfAttention(nn.Module):
    """Every token attends to every token."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * hidden, hidden))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * hidden))
        self.out_proj = nn.Linear(hidden, hidden)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(self, x: Tensor) -> Tensor:
        projected = functional.linear(x, self.in_proj_weight, self.in_proj_bias)  # [B,T,3·hidden]
        query, key, value = projected.view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()  # each [B,heads,T,head]
        mixed = functional.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out


class EncoderLayer(nn.Module):
    """Attention and a two-layer perceptron, each normalised before and added to its input."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden, eps=1e-6)
        self.self_attention = SelfAttention(config.hidden, config.heads)
        self.ln_2 = nn.LayerNorm(config.hidden, eps=1e-6)
        # torchvision numbers the second linear 3, after a dropout.
        linears = nn.Linear(config.hidden, config.intermediate), nn.Linear(config.intermediate, config.hidden)
        self.mlp = nn.Sequential(OrderedDict([("0", linears[0]), ("1", nn.GELU()), ("3", linears[1])]))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class Encoder(nn.Module):
    """Positions, the layers, and a last norm."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        tokens = (config.image // config.patch) ** 2 + 1
        self.pos_embedding = nn.Parameter(torch.empty(1, tokens, config.hidden).normal_(std=0.02))
        self.layers = nn.Sequential(OrderedDict((f"encoder_layer_{i}", EncoderLayer(config)) for i in range(config.layers)))
        self.ln = nn.LayerNorm(config.hidden, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.ln(self.layers(x + self.pos_embedding))
        return out


class VisionTransformer(nn.Module):
    """Patches to class scores."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, config.hidden, config.patch, stride=config.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.hidden))
        self.encoder = Encoder(config)
        self.heads = nn.Sequential(OrderedDict(head=nn.Linear(config.hidden, config.classes)))

    def forward(self, x: Tensor) -> Tensor:
        patches = self.conv_proj(x).flatten(2).transpose(1, 2)  # [B,patches,hidden]
        tokens = torch.cat((self.class_token.expand(x.size(0), -1, -1), patches), dim=1)
        scores: Tensor = self.heads(self.encoder(tokens)[:, 0])
        return scores
