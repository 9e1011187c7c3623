"""Residual networks stage by stage: width, number and kind of blocks, attention; one activation for all. ResNet-18 is a point of it.

    image ─conv 3x3─> stage 1 ─blocks─> … ─the first block of a stage halves the size─> … ─norm, activation, mean, linear─> logits
    block: x + body(ready)      ready = activation(norm x); where width or size changes: conv 1x1 (ready) + body(ready)
      basic       conv 3x3, norm, activation, conv 3x3
      single      conv 3x3
      bottleneck  conv 1x1 to half the width, norm, activation, conv 3x3, norm, activation, conv 1x1

`widths` lists, for each stage, what `channels` may be multiplied by there: a network found narrow is trained wide by `channels` alone.
All decisions always make a difference. Ref: He 2016 (Identity mappings), Hu 2018 (SE).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

from torch import Tensor, nn

from ...core.errors import OptionError
from ...workload.models.normed import normed
from .base import BaseSpace, block, choice, once
from .macro_blocks import ACTIVATIONS, make_attention
from .space import Block, Decision, Point

KINDS = ("basic", "single", "bottleneck")
FIELDS = ("width", "blocks", "kind", "attention")
REDUCTION = 16


def _conv(channels: int, width: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, width: int, stride: int, kind: str, attention: str, activation: str) -> None:
        super().__init__()
        act = ACTIVATIONS[activation]
        self.norm, self.activation = nn.BatchNorm2d(channels), act()
        if kind == "bottleneck":
            inner = max(1, width // 2)
            body = [_conv(channels, inner, 1), nn.BatchNorm2d(inner), act(), _conv(inner, inner, 3, stride)]
            body += [nn.BatchNorm2d(inner), act(), _conv(inner, width, 1)]
        else:
            body = [_conv(channels, width, 3, stride)]
            body += [nn.BatchNorm2d(width), act(), _conv(width, width, 3)] if kind == "basic" else []
        self.body = nn.Sequential(*body)
        self.attention = make_attention(attention, width, REDUCTION)
        self.shortcut = None if stride == 1 and channels == width else _conv(channels, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        ready = normed(x, self.norm, self.activation)
        beside = x if self.shortcut is None else self.shortcut(ready)
        out: Tensor = self.attention(self.body(ready)) + beside
        return out


def make_residual_head(channels: int, classes: int, activation: str) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(channels), ACTIVATIONS[activation](), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )


@dataclass(frozen=True, slots=True)
class Stage:
    width: int
    blocks: int
    kind: str
    attention: str


@dataclass(frozen=True)
class ResidualSpace(BaseSpace):
    name: ClassVar[str] = "residual"
    channels: int = 64
    widths: tuple[tuple[float, ...], ...] = ((1, 1.5), (2, 3), (4, 6), (4, 8))
    blocks_each: tuple[int, ...] = (1, 2, 3)
    kinds: tuple[str, ...] = KINDS
    attentions: tuple[str, ...] = ("none", "se")
    activations: tuple[str, ...] = ("relu", "hswish")
    classes: int = 10
    image: int = 32
    image_channels: int = 3

    def __post_init__(self) -> None:
        self.check_sizes("channels", "classes", "image", "image_channels")
        _check("widths", self.widths, lambda stage: isinstance(stage, tuple) and stage and _distinct(stage) and _numbers(stage), "lists")
        _check("blocks_each", self.blocks_each, lambda n: isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= 100, "1 to 100")
        for name, known in (("kinds", KINDS), ("attentions", ("none", "se", "cbam")), ("activations", tuple(ACTIVATIONS))):
            _check(name, getattr(self, name), lambda one, known=known: one in known, ", ".join(known))
        for stage in self.widths:
            if len({self._width(factor) for factor in stage}) < len(stage):
                raise OptionError(
                    f"widths {list(stage)} of space residual", why=f"of {self.channels} channels some give the same", do="more channels"
                )
        if len(self.widths) > 8:
            raise OptionError(f"{len(self.widths)} stages of space residual", why="each halves the image; 1 to 8 are allowed", do="fewer")

    def _width(self, factor: float) -> int:
        return max(1, round(self.channels * factor))

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        found = [Decision("activation", self.activations)]
        for place, widths in enumerate(self.widths):
            choices = (tuple(map(str, widths)), tuple(map(str, self.blocks_each)), self.kinds, self.attentions)
            found += [Decision(f"{place}.{field}", values) for field, values in zip(FIELDS, choices, strict=True)]
        return tuple(found)

    def groups(self) -> list[range]:
        return [range(0, 1), *(range(start, start + len(FIELDS)) for start in range(1, len(self.decisions), len(FIELDS)))]

    def canonical(self, point: Point) -> Point:
        return point

    def stages(self, point: Point) -> list[Stage]:
        found = []
        for place, widths in enumerate(self.widths):
            width, count, kind, attention = point[1 + len(FIELDS) * place : 1 + len(FIELDS) * (place + 1)]
            found.append(Stage(self._width(widths[width]), self.blocks_each[count], self.kinds[kind], self.attentions[attention]))
        return found

    def parts(self, point: Point) -> Iterator[Block]:
        """In the order of the flow: the net is these one after another."""
        activation = self.activations[point[0]]
        yield self._stem()
        channels, size = self.channels, self.image
        for place, stage in enumerate(self.stages(point)):
            for number in range(stage.blocks):
                stride = 2 if place and not number else 1
                yield self._block(channels, size, stride, stage, activation)
                channels, size = stage.width, -(-size // stride)
        yield self._head(channels, size, activation)

    def build_network(self, point: Point) -> nn.Module:
        return nn.Sequential(*[part.make() for part in self.parts(point)])

    def all_blocks(self) -> list[Block]:
        parts, before, size = [self._stem()], [self.channels], self.image
        for place, widths in enumerate(self.widths):
            stride = 2 if place else 1
            here = [self._width(factor) for factor in widths]
            makes = [Stage(width, 1, kind, gate) for width in here for kind in self.kinds for gate in self.attentions]
            for activation in self.activations:
                parts += [self._block(channels, size, stride, stage, activation) for channels in before for stage in makes]
                if max(self.blocks_each) > 1:
                    parts += [self._block(stage.width, -(-size // stride), 1, stage, activation) for stage in makes]
            before, size = here, -(-size // stride)
        parts += [self._head(channels, size, activation) for channels in before for activation in self.activations]
        return once(parts)

    def _stem(self) -> Block:
        return block("residual_stem", partial(_conv, self.image_channels, self.channels, 3), self.input_shape, detail=str(self.channels))

    def _block(self, channels: int, size: int, stride: int, stage: Stage, activation: str) -> Block:
        make = partial(ResidualBlock, channels, stage.width, stride, stage.kind, stage.attention, activation)
        detail = f"{stage.width}/s{stride}/{stage.attention}/{activation}"
        return block(f"residual_{stage.kind}", make, (channels, size, size), detail=detail)

    def _head(self, channels: int, size: int, activation: str) -> Block:
        make = partial(make_residual_head, channels, self.classes, activation)
        return block("residual_head", make, (channels, size, size), detail=f"{self.classes}/{activation}")

    def content(self, point: Point) -> dict[str, Any]:
        decisions = self.decisions
        named = [decisions[place].choices[index] for place, index in enumerate(point)]
        starts = range(1, len(decisions), len(FIELDS))
        return {"activation": named[0], "stages": [dict(zip(FIELDS, named[start : start + len(FIELDS)], strict=True)) for start in starts]}

    def read(self, genotype: dict[str, Any]) -> Point:
        stages, decisions = genotype["stages"], self.decisions
        if not isinstance(stages, list) or not all(isinstance(stage, dict) and set(stage) == set(FIELDS) for stage in stages):
            raise ValueError(f"stages is a list of objects with {', '.join(FIELDS)}")
        values = [genotype["activation"], *(stage[field] for stage in stages for field in FIELDS)]
        return tuple(choice(decision, value) for decision, value in zip(decisions, values, strict=True))


def _numbers(stage: tuple[Any, ...]) -> bool:
    return all(isinstance(factor, int | float) and not isinstance(factor, bool) and 0 < factor <= 64 for factor in stage)


def _distinct(values: tuple[Any, ...]) -> bool:
    return len(set(values)) == len(values)


def _check(name: str, values: Any, allowed: Any, which: str) -> None:
    good = isinstance(values, tuple) and values and all(allowed(value) for value in values)
    if not good or (name != "widths" and not _distinct(values)):
        needed = "for each stage different numbers above 0, at most 64" if name == "widths" else f"different ones of {which}"
        raise OptionError(f"{name} of space residual", why=f"{needed} are needed", do="change it")
