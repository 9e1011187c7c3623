"""The modules of macro nets; users register their own blocks.

    register_block("ghost", make)   make(channels_in, channels_out, kernel, stride, activation) ──> nn.Module
    MacroSpace(kinds=("conv", "ghost"))
    layer: x ──body──> ──attention──> (+ x where skip) ──> next

Bodies: conv (Conv-BN-act), depthwise (depthwise-BN-act-1x1-BN-act), mbconv (1x1 expand-BN-act-depthwise-BN-act-1x1-BN).
Attention: se (Hu 2018), cbam (Woo 2018), attention (self-attention of all places, channels over `reduction`, added to the input).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ...core.errors import OptionError

MakeBlock = Callable[[int, int, int, int, str], nn.Module]
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "relu6": nn.ReLU6, "hswish": nn.Hardswish}
ATTENTIONS = ("none", "attention", "se", "cbam")
BODIES = ("conv", "depthwise", "mbconv")
_BLOCKS: dict[str, MakeBlock] = {}


class LayerLike(Protocol):
    """What a layer is built from."""

    @property
    def kind(self) -> str: ...
    @property
    def channels_in(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def kernel(self) -> int: ...
    @property
    def stride(self) -> int: ...
    @property
    def activation(self) -> str: ...
    @property
    def attention(self) -> str: ...
    @property
    def reduction(self) -> int: ...
    @property
    def skip(self) -> bool: ...
    @property
    def expansion(self) -> int: ...


def register_block(name: str, make: MakeBlock) -> None:
    """A name can be taken once; it must be usable in a genotype and a block's key."""
    if not name or not name.replace("_", "").isalnum():
        raise OptionError(f"macro block {name!r}", why="a name has letters, digits and _ only", do="rename the block")
    if name in block_names():
        raise OptionError(f"macro block {name!r}", why="a block of that name is registered already", do="choose another name")
    _BLOCKS[name] = make


def block_names() -> tuple[str, ...]:
    return (*BODIES, *_BLOCKS)


def conv_norm(channels_in: int, channels_out: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(channels_in, channels_out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(channels_out)]


def make_body(kind: str, channels_in: int, channels_out: int, kernel: int, stride: int, activation: str, expansion: int) -> nn.Module:
    act = ACTIVATIONS[activation]
    if kind == "conv":
        return nn.Sequential(*conv_norm(channels_in, channels_out, kernel, stride), act())
    if kind == "depthwise":
        depthwise = conv_norm(channels_in, channels_in, kernel, stride, channels_in)
        return nn.Sequential(*depthwise, act(), *conv_norm(channels_in, channels_out, 1), act())
    if kind == "mbconv":
        wide = channels_in * expansion
        depthwise = conv_norm(wide, wide, kernel, stride, wide)
        return nn.Sequential(*conv_norm(channels_in, wide, 1), act(), *depthwise, act(), *conv_norm(wide, channels_out, 1))
    return _BLOCKS[kind](channels_in, channels_out, kernel, stride, activation)


class ChannelGate(nn.Module):
    """Squeeze-and-excitation; with `peaks` each channel's largest value is squeezed too, by the same layers (CBAM's first half)."""

    def __init__(self, channels: int, reduction: int, peaks: bool = False) -> None:
        super().__init__()
        narrow = max(1, channels // reduction)
        self.squeeze, self.activation, self.excite = nn.Conv2d(channels, narrow, 1), nn.ReLU(), nn.Conv2d(narrow, channels, 1)
        self.peaks = peaks

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.excite(self.activation(self.squeeze(x.mean((2, 3), keepdim=True))))
        if self.peaks:
            gate = gate + self.excite(self.activation(self.squeeze(x.amax((2, 3), keepdim=True))))
        return x * torch.sigmoid(gate)


class PlaceGate(nn.Module):
    """CBAM's second half: a gate for each place from the mean and the largest of its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.conv(torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], dim=1)))


class PlaceAttention(nn.Module):
    """Self-attention over places, added to its input."""

    def __init__(self, channels: int, reduction: int) -> None:
        super().__init__()
        self.narrow = max(1, channels // reduction)
        self.project, self.out = nn.Conv2d(channels, 3 * self.narrow, 1), nn.Conv2d(self.narrow, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.project(x).flatten(2).transpose(1, 2).unsqueeze(1)  # [B, 1, HW, 3n]
        query, key, value = (flat[..., part * self.narrow : (part + 1) * self.narrow] for part in range(3))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)  # [B, 1, HW, n]
        places = mixed.squeeze(1).transpose(1, 2).reshape(x.shape[0], self.narrow, x.shape[2], x.shape[3])
        added: Tensor = self.out(places)
        return x + added


def make_attention(name: str, channels: int, reduction: int) -> nn.Module:
    if name == "se":
        return ChannelGate(channels, reduction)
    if name == "cbam":
        return nn.Sequential(ChannelGate(channels, reduction, peaks=True), PlaceGate())
    return PlaceAttention(channels, reduction) if name == "attention" else nn.Identity()


def make_stem(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(*conv_norm(channels_in, channels_out, 3), nn.ReLU())


def make_head(channels: int, classes: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class MacroLayer(nn.Module):
    def __init__(self, layer: LayerLike) -> None:
        super().__init__()
        self.body = make_body(layer.kind, layer.channels_in, layer.channels, layer.kernel, layer.stride, layer.activation, layer.expansion)
        self.attention = make_attention(layer.attention, layer.channels, layer.reduction)
        self.skip = layer.skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(self.body(x))
        return x + out if self.skip else out


class MacroNetwork(nn.Module):
    def __init__(self, layers: Sequence[LayerLike], image_channels: int, stem_channels: int, classes: int) -> None:
        super().__init__()
        self.stem = make_stem(image_channels, stem_channels)
        self.layers = nn.Sequential(*[MacroLayer(layer) for layer in layers])
        self.head = make_head(layers[-1].channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.stem(x)))
        return logits
