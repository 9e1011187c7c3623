"""Vision transformers (Dosovitskiy 2021): depth, width, and for each layer heads and the ratio of the feed-forward part.

    image ──patches, positions──> [B, tokens, width] ──(attention, feed-forward) x depth──> norm, mean over tokens ──> logits

Pre-norm layers, no class token. Decisions of layers past the depth are 0 in the canonical form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...core.errors import OptionError
from .base import BaseSpace, block, choice, once
from .space import Block, Decision, Point


class Embed(nn.Module):
    """Patches as tokens, each with a learned position."""

    def __init__(self, channels_in: int, width: int, patch: int, tokens: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels_in, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.empty(1, tokens, width))
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.patches(x).flatten(2).transpose(1, 2)  # [B, tokens, width]
        return tokens + self.positions


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query, key, value = self.project(self.norm(x)).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)  # [B, heads, tokens, width / heads]
        added: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + added


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.activation, self.narrow = nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.narrow(self.activation(self.wide(self.norm(x))))
        return x + added


class Head(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm, self.classify = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classify(self.norm(x).mean(dim=1))
        return logits


@dataclass(frozen=True)
class TransformerSpace(BaseSpace):
    """Every number of `heads` must divide every one of `widths`."""

    name: ClassVar[str] = "transformer"
    depths: tuple[int, ...] = (4, 6, 8, 10, 12)
    widths: tuple[int, ...] = (96, 144, 192, 240, 288)
    heads: tuple[int, ...] = (2, 3, 4, 6)
    ratios: tuple[float, ...] = (1, 2, 3, 4)
    patch: int = 4
    classes: int = 10
    image: int = 32
    image_channels: int = 3

    def __post_init__(self) -> None:
        self.check_sizes("classes", "image", "image_channels")
        for name, largest in (("depths", 200), ("widths", 16384), ("heads", 1024)):
            self._check_list(name, int, largest)
        self._check_list("ratios", int | float, 64)
        if any(width % heads for width in self.widths for heads in self.heads):
            raise OptionError("heads of space transformer", why="every one must divide every width", do="change heads or widths")
        if isinstance(self.patch, bool) or not isinstance(self.patch, int) or self.patch < 1 or self.image % self.patch:
            raise OptionError(f"patch = {self.patch!r}", why=f"it must divide the image's {self.image} pixels", do="change patch")

    def _check_list(self, name: str, kind: Any, largest: int) -> None:
        values = getattr(self, name)
        good = isinstance(values, tuple) and values and all(isinstance(value, kind) and not isinstance(value, bool) for value in values)
        if not good or len(set(values)) != len(values) or not all(0 < value <= largest for value in values):
            raise OptionError(
                f"{name} of space transformer", why=f"different numbers above 0, at most {largest}, are needed", do="change it"
            )

    @property
    def tokens(self) -> int:
        return (self.image // self.patch) ** 2

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        found = [Decision("depth", tuple(map(str, self.depths))), Decision("width", tuple(map(str, self.widths)))]
        for layer in range(max(self.depths)):
            found.append(Decision(f"{layer}.heads", tuple(map(str, self.heads))))
            found.append(Decision(f"{layer}.ratio", tuple(map(str, self.ratios))))
        return tuple(found)

    def groups(self) -> list[range]:
        return [range(0, 1), range(1, 2), *(range(start, start + 2) for start in range(2, len(self.decisions), 2))]

    def canonical(self, point: Point) -> Point:
        end = 2 + 2 * self.depths[point[0]]
        return (*point[:end], *(0,) * (len(point) - end))

    def live(self, point: Point) -> Sequence[bool]:
        end = 2 + 2 * self.depths[point[0]]
        return [place < end for place in range(len(point))]

    def layers(self, point: Point) -> list[tuple[int, float]]:
        """Heads and ratio of each."""
        places = range(2, 2 + 2 * self.depths[point[0]], 2)
        return [(self.heads[point[place]], self.ratios[point[place + 1]]) for place in places]

    def parts(self, point: Point) -> Iterator[Block]:
        """In the order of the flow: the net is these one after another."""
        width = self.widths[point[1]]
        yield self._embed(width)
        for heads, ratio in self.layers(point):
            yield self._attention(width, heads)
            yield self._feed_forward(width, ratio)
        yield self._head(width)

    def build_network(self, point: Point) -> nn.Module:
        return nn.Sequential(*[part.make() for part in self.parts(point)])

    def all_blocks(self) -> list[Block]:
        parts: list[Block] = []
        for width in self.widths:
            parts += [self._embed(width), self._head(width)]
            parts += [self._attention(width, heads) for heads in self.heads]
            parts += [self._feed_forward(width, ratio) for ratio in self.ratios]
        return once(parts)

    def _embed(self, width: int) -> Block:
        make = partial(Embed, self.image_channels, width, self.patch, self.tokens)
        return block("transformer_embed", make, self.input_shape, detail=f"{width}/p{self.patch}")

    def _attention(self, width: int, heads: int) -> Block:
        return block("transformer_attention", partial(Attention, width, heads), (self.tokens, width), detail=f"h{heads}")

    def _feed_forward(self, width: int, ratio: float) -> Block:
        hidden = max(1, round(width * ratio))
        return block("transformer_feed_forward", partial(FeedForward, width, hidden), (self.tokens, width), detail=str(hidden))

    def _head(self, width: int) -> Block:
        return block("transformer_head", partial(Head, width, self.classes), (self.tokens, width), detail=str(self.classes))

    def content(self, point: Point) -> dict[str, Any]:
        layers = [{"heads": heads, "ratio": ratio} for heads, ratio in self.layers(point)]
        return {"width": self.widths[point[1]], "layers": layers}

    def read(self, genotype: dict[str, Any]) -> Point:
        layers, decisions = genotype["layers"], self.decisions
        if not isinstance(layers, list) or not all(isinstance(layer, dict) and set(layer) == {"heads", "ratio"} for layer in layers):
            raise ValueError("layers is a list of objects with heads and ratio")
        found = [choice(decisions[0], len(layers)), choice(decisions[1], genotype["width"])]
        for layer in layers:
            found += [choice(decisions[2], layer["heads"]), choice(decisions[3], layer["ratio"])]
        return (*found, *(0,) * (len(decisions) - len(found)))
