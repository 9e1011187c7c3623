"""Mobile nets layer by layer: block kind, width, kernel, stride, activation, attention and skip of each of 10 to 50 layers.

    image ──stem──> stage 0 ──layers──> … ──a layer of stride 2──> next stage: half the size, its own widths ──> … ──> head ──> logits

`widths` lists, for each stage, the channels a layer can have there; a stride past the last stage, or one that would leave less than 2x2,
is 1. Also without effect, and 0 in the canonical form: decisions of layers past the depth, the reduction where attention is none, a skip
where stride or channels differ. The blocks are the parts of layers (body, attention, sum), so that a table of all stays near 2,500.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any, ClassVar

import numpy as np
from torch import nn

from ...core.errors import OptionError, unknown_name
from .base import BaseSpace, Sum, block, choice, once
from .macro_blocks import ACTIVATIONS, ATTENTIONS, MacroNetwork, block_names, make_attention, make_body, make_head, make_stem
from .space import Block, Decision, Point

SMALLEST = 2
"""Pixels a side."""
FIELDS = ("kind", "channels", "kernel", "stride", "activation", "attention", "reduction", "skip")
STRIDES = ("1", "2")
SKIPS = ("off", "on")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer as it is built; `size` is its input's."""

    kind: str
    channels_in: int
    channels: int
    kernel: int
    stride: int
    activation: str
    attention: str
    reduction: int
    skip: bool
    size: int
    expansion: int

    @property
    def size_out(self) -> int:
        return -(-self.size // self.stride)


@dataclass(frozen=True)
class MacroSpace(BaseSpace):
    name: ClassVar[str] = "macro"
    widths: tuple[tuple[int, ...], ...] = ((16, 24, 32), (32, 48, 64), (64, 96, 128), (128, 160, 192), (192, 224, 256))
    depths: tuple[int, int] = (10, 50)
    kinds: tuple[str, ...] = ("conv", "depthwise", "mbconv")
    kernels: tuple[int, ...] = (3, 5, 7)
    activations: tuple[str, ...] = ("relu", "relu6", "hswish")
    attentions: tuple[str, ...] = ("none", "attention", "se", "cbam")
    reductions: tuple[int, ...] = (4, 8, 16)
    expansion: int = 4
    classes: int = 10
    image: int = 32
    image_channels: int = 3

    def __post_init__(self) -> None:
        self.check_sizes("classes", "image", "image_channels")
        _require(len({len(stage) for stage in _tuples(self.widths)}) == 1, "widths", "every stage needs the same number of widths")
        _require(len(self.widths) <= 16 and all(self.widths), "widths", "1 to 16 stages are allowed, none empty")
        _require(_whole([width for stage in self.widths for width in stage], 4096), "widths", "channels are integers of 1 to 4096")
        _require(len(_tuples((self.depths,))[0]) == 2 and _whole(self.depths, 500), "depths", "two integers of 1 to 500 are needed")
        _require(self.depths[0] <= self.depths[1], "depths", "the first must not be above the second")
        _require(_whole(_distinct(self.kernels), 63) and all(kernel % 2 for kernel in self.kernels), "kernels", "odd integers below 64")
        _require(_whole(_distinct(self.reductions), 4096), "reductions", "different integers above 0 are needed")
        _require(_whole((self.expansion,), 64), "expansion", "an integer of 1 to 64 is needed")
        for what, names, known in (
            ("macro block", self.kinds, block_names()),
            ("activation", self.activations, tuple(ACTIVATIONS)),
            ("attention", self.attentions, ATTENTIONS),
        ):
            for name in _distinct(names):
                if name not in known:
                    raise unknown_name(what, str(name), known, see="docs/search.md")

    @cached_property
    def halvings(self) -> int:
        """How many layers of stride 2 a net can have."""
        found, size = 0, self.image
        while found < len(self.widths) - 1 and size // 2 >= SMALLEST:
            found, size = found + 1, -(-size // 2)
        return found

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        low, high = self.depths
        found = [Decision("depth", tuple(str(depth) for depth in range(low, high + 1)))]
        widths = tuple(f"width {place}" for place in range(len(self.widths[0])))
        kernels, reductions = tuple(map(str, self.kernels)), tuple(map(str, self.reductions))
        fields = (self.kinds, widths, kernels, STRIDES, self.activations, self.attentions, reductions, SKIPS)
        for layer in range(high):
            found += [Decision(f"{layer}.{name}", choices) for name, choices in zip(FIELDS, fields, strict=True)]
        return tuple(found)

    def groups(self) -> list[range]:
        return [range(0, 1), *(range(start, start + len(FIELDS)) for start in range(1, len(self.decisions), len(FIELDS)))]

    def random(self, random: np.random.Generator) -> Point:
        """Uniform, but for the strides: how many there are is uniform, and so are their places."""
        point = list(super().random(random))
        depth = self.depths[0] + point[0]
        halvings = int(random.integers(min(1, self.halvings), self.halvings + 1))
        places = set(random.choice(depth, min(halvings, depth), replace=False).tolist())
        for layer in range(self.depths[1]):
            point[1 + layer * len(FIELDS) + FIELDS.index("stride")] = int(layer in places)
        return tuple(point)

    def canonical(self, point: Point) -> Point:
        stage, channels_in = 0, self.widths[0][0]
        found, fields = [point[0]], len(FIELDS)
        for start in range(1, 1 + (self.depths[0] + point[0]) * fields, fields):
            kind, width, kernel, stride, activation, attention, reduction, skip = point[start : start + fields]
            stride = stride if stage < self.halvings else 0
            stage += stride
            channels = self.widths[stage][width]
            width = self.widths[stage].index(channels)  # a stage may list a width twice
            skip = skip if not stride and channels == channels_in else 0
            reduction = reduction if self.attentions[attention] != "none" else 0
            found += (kind, width, kernel, stride, activation, attention, reduction, skip)
            channels_in = channels
        return (*found, *(0,) * (len(point) - len(found)))

    def live(self, point: Point) -> Sequence[bool]:
        flags = [True]
        for layer in self.layers(point):
            conditional = layer.attention != "none", layer.stride == 1 and layer.channels_in == layer.channels
            flags += [True] * (len(FIELDS) - 2) + list(conditional)
        return flags + [False] * (len(point) - len(flags))

    def layers(self, point: Point) -> list[Layer]:
        point = self.canonical(point)
        found: list[Layer] = []
        stage, channels_in, size = 0, self.widths[0][0], self.image
        for place in range(self.depths[0] + point[0]):
            kind, width, kernel, stride, activation, attention, reduction, skip = point[1 + place * 8 : 9 + place * 8]
            stage += stride
            layer = Layer(self.kinds[kind], channels_in, self.widths[stage][width], self.kernels[kernel], stride + 1,
                          self.activations[activation], self.attentions[attention], self.reductions[reduction], bool(skip), size,
                          self.expansion)  # fmt: skip
            found.append(layer)
            channels_in, size = layer.channels, layer.size_out
        return found

    def build_network(self, point: Point) -> nn.Module:
        return MacroNetwork(self.layers(point), self.image_channels, self.widths[0][0], self.classes)

    def parts(self, point: Point) -> Iterator[Block]:
        layers = self.layers(point)
        yield self._stem()
        for layer in layers:
            yield from layer_blocks(layer)
        yield self._head(layers[-1].channels, layers[-1].size_out)

    def all_blocks(self) -> list[Block]:
        parts, size = [self._stem()], self.image
        entering: list[tuple[int, int, int]] = []
        for widths in self.widths[: self.halvings + 1]:
            inner = [(1, channels_in, size) for channels_in in widths]
            for (stride, channels_in, size_in), channels in product(inner + entering, widths):
                for kind, kernel, activation in product(self.kinds, self.kernels, self.activations):
                    layer = Layer(kind, channels_in, channels, kernel, stride, activation, "none", 0, False, size_in, self.expansion)
                    parts += layer_blocks(layer)
            for channels in widths:
                shape = (channels, size, size)
                parts += [attention_block(name, *shape[:2], by) for name in self.attentions if name != "none" for by in self.reductions]
                parts += [block("sum", Sum, shape, shape), self._head(channels, size)]
            entering, size = [(2, channels_in, size) for channels_in in widths], -(-size // 2)
        return once(parts)

    def _stem(self) -> Block:
        channels = self.widths[0][0]
        return block("macro_stem", partial(make_stem, self.image_channels, channels), self.input_shape, detail=str(channels))

    def _head(self, channels: int, size: int) -> Block:
        return block("macro_head", partial(make_head, channels, self.classes), (channels, size, size), detail=str(self.classes))

    def content(self, point: Point) -> dict[str, Any]:
        return {"layers": [{name: getattr(layer, name) for name in FIELDS} for layer in self.layers(point)]}

    def read(self, genotype: dict[str, Any]) -> Point:
        layers = genotype["layers"]
        if not isinstance(layers, list) or not self.depths[0] <= len(layers) <= self.depths[1]:
            raise ValueError(f"{self.depths[0]} to {self.depths[1]} layers are needed")
        found, stage, decisions = [len(layers) - self.depths[0]], 0, self.decisions
        for layer in layers:
            if not isinstance(layer, dict) or set(layer) != set(FIELDS) or not isinstance(layer["skip"], bool):
                raise ValueError(f"a layer has exactly {', '.join(FIELDS)}")
            stage += layer["stride"] == 2
            values = {**layer, "channels": f"width {self.widths[stage].index(layer['channels'])}", "skip": SKIPS[layer["skip"]]}
            found += [choice(decision, values[name]) for name, decision in zip(FIELDS, decisions[1:9], strict=True)]
        point = (*found, *(0,) * (len(decisions) - len(found)))
        for place, (given, built) in enumerate(zip(layers, self.layers(point), strict=True)):
            if (given["stride"], given["channels"], given["skip"]) != (built.stride, built.channels, built.skip):
                raise ValueError(f"layer {place}: its stride or skip is not possible there")
        return point


def layer_blocks(layer: Layer) -> Iterator[Block]:
    shape = (layer.channels_in, layer.size, layer.size)
    make = partial(make_body, layer.kind, layer.channels_in, layer.channels, layer.kernel, layer.stride, layer.activation, layer.expansion)
    expanded = f"/e{layer.expansion}" if layer.kind == "mbconv" else ""
    detail = f"{layer.channels}/k{layer.kernel}/s{layer.stride}/{layer.activation}{expanded}"
    yield block(f"macro_{layer.kind}", make, shape, detail=detail)
    if layer.attention != "none":
        yield attention_block(layer.attention, layer.channels, layer.size_out, layer.reduction)
    if layer.skip:
        yield block("sum", Sum, *[(layer.channels, layer.size_out, layer.size_out)] * 2)


def attention_block(name: str, channels: int, size: int, reduction: int) -> Block:
    return block(f"macro_{name}", partial(make_attention, name, channels, reduction), (channels, size, size), detail=f"r{reduction}")


def _require(holds: bool, what: str, why: str) -> None:
    if not holds:
        raise OptionError(f"{what} of space macro", why=why, do="change the setting")


def _tuples(values: Any) -> tuple[Any, ...]:
    _require(
        isinstance(values, tuple) and len(values) > 0 and all(isinstance(value, tuple) for value in values),
        "widths or depths",
        "they are lists",
    )
    return tuple(values)


def _distinct(values: Any) -> tuple[Any, ...]:
    good = isinstance(values, tuple) and len(values) > 0 and all(isinstance(value, str | int) for value in values)
    _require(good and len(set(values)) == len(values), "a list of choices", "it needs one entry or more, all different")
    return tuple(values)


def _whole(values: Sequence[Any], largest: int) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= largest for value in values)
