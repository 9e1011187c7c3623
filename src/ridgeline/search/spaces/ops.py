"""The ops an edge of a cell can have, by name; users register their own.

    register_op("swish_conv", make)     make(channels_in, channels_out, stride, affine) ──> nn.Module
    make_op("sep_conv_3x3", 16, 16, 1)  [B, C_in, H, W] ──> [B, C_out, ⌈H/stride⌉, ⌈W/stride⌉]

DARTS (Liu 2019): an activation comes first, batch norm last; separable convolutions are applied twice. NAS-Bench-201 (Dong 2020): skip,
none, conv3x3, conv1x1, avgpool. `affine` is whether batch norms have weights: not in supernets.
"""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Callable

import torch
import torch.fx
from torch import Tensor, nn

from ...core.errors import OptionError, unknown_name

MakeOp = Callable[[int, int, int, bool], nn.Module]
_OPS: dict[str, MakeOp] = {}
_RUN: set[tuple[str, int, int, int]] = set()
"""Forms of users' ops that have given the right shape."""
SIZE = 8
"""Pixels a side of the image they are run on."""


def register_op(name: str, make: MakeOp) -> None:
    """A name can be taken once; it must be usable in a genotype and a block's key."""
    if not name or not name.replace("_", "").isalnum():
        raise OptionError(f"op {name!r}", why="a name has letters, digits and _ only", do="rename the op")
    if name in _OPS:
        raise OptionError(f"op {name!r}", why="an op of that name is registered already", do="choose another name")
    _OPS[name] = make


def op_names() -> tuple[str, ...]:
    return tuple(_OPS)


def require_ops(names: tuple[str, ...]) -> None:
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise OptionError(f"ops = {reprlib.repr(names)}", why="they are a list of names", do="e.g. none,skip,conv3x3")
    for name in names:
        if name not in _OPS:
            raise unknown_name("op", name, _OPS, see="`ridgeline.search.spaces.register_op`")


def make_op(name: str, channels_in: int, channels_out: int, stride: int = 1, affine: bool = True) -> nn.Module:
    require_ops((name,))
    if name in _BUILTIN:
        return _OPS[name](channels_in, channels_out, stride, affine)
    return _checked_op(name, channels_in, channels_out, stride, affine)


def _checked_op(name: str, channels_in: int, channels_out: int, stride: int, affine: bool) -> nn.Module:
    """An op of a user's; the first of each form is run once, so that what it does wrong is told with its name."""
    form, wanted = (name, channels_in, channels_out, stride), (2, channels_out, -(-SIZE // stride), -(-SIZE // stride))
    what = f"op {name!r} of {channels_in} to {channels_out} channels, stride {stride}"
    do = f"register one that gives [B, {channels_out}, H/{stride}, W/{stride}] of [B, {channels_in}, H, W]"
    try:
        made = _OPS[name](channels_in, channels_out, stride, affine)
        if form in _RUN:
            return made
        with torch.no_grad(), torch.random.fork_rng(devices=[]):  # weights built after it are as without the run
            given = copy.deepcopy(made).eval()(torch.zeros(2, channels_in, SIZE, SIZE))
    except Exception as error:
        why = f"on an input of {SIZE}x{SIZE} it fails: {type(error).__name__}: {str(error)[:200]}"
        raise OptionError(what, why=why, do=do) from error
    if not isinstance(given, Tensor) or given.shape != wanted:
        found = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise OptionError(what, why=f"on an input of {SIZE}x{SIZE} it gives {found}, not {list(wanted)}", do=do)
    _RUN.add(form)
    return made


class Zero(nn.Module):
    """Zeros of the op's output shape."""

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.channels, self.stride = channels, stride

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], self.channels, -(-x.shape[2] // self.stride), -(-x.shape[3] // self.stride))


@torch.fx.wrap
def shifted(x: Tensor) -> Tensor:
    """One place on in both directions; where a size is odd a zero follows, so that a stride of 2 finds as many places as before."""
    odd_size = x.shape[2] % 2 or x.shape[3] % 2
    return (nn.functional.pad(x, (0, 1, 0, 1)) if odd_size else x)[:, :, 1:, 1:]


class FactorizedReduce(nn.Module):
    """Half the size by two 1x1 convolutions of stride 2, one on the even and one on the odd places."""

    def __init__(self, channels_in: int, channels_out: int, affine: bool = True) -> None:
        super().__init__()
        self.activation = nn.ReLU()
        self.even = nn.Conv2d(channels_in, channels_out // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(channels_in, channels_out - channels_out // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(channels_out, affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(x)
        out: Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted(x))], dim=1))
        return out


class DropPath(nn.Module):
    """In training, a sample's whole branch is zero with probability `share`, the others scaled up; the share is a buffer so that a captured
    step sees it change."""

    share: Tensor

    def __init__(self, share: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("share", torch.tensor(share), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = 1 - self.share
        drawn = torch.rand(x.shape[0], 1, 1, 1, device=x.device, dtype=torch.float32) < keep
        return x * (drawn / keep).to(x.dtype)


def set_drop_path(model: nn.Module, share: float) -> None:
    """The drop probability of every DropPath of the model, e.g. rising over the epochs."""
    if not 0 <= share < 1:
        raise OptionError(f"drop path {share}", why="a probability below 1 is needed", do="give 0 to 0.9")
    for module in model.modules():
        if isinstance(module, DropPath):
            module.share.fill_(share)


def relu_conv(channels_in: int, channels_out: int, kernel: int, stride: int = 1, affine: bool = True) -> nn.Sequential:
    conv = nn.Conv2d(channels_in, channels_out, kernel, stride=stride, padding=kernel // 2, bias=False)
    return nn.Sequential(nn.ReLU(), conv, nn.BatchNorm2d(channels_out, affine=affine))


def _depthwise(channels_in: int, channels_out: int, kernel: int, stride: int, dilation: int, affine: bool) -> list[nn.Module]:
    padding = dilation * (kernel - 1) // 2
    depthwise = nn.Conv2d(channels_in, channels_in, kernel, stride, padding, dilation=dilation, groups=channels_in, bias=False)
    return [nn.ReLU(), depthwise, nn.Conv2d(channels_in, channels_out, 1, bias=False), nn.BatchNorm2d(channels_out, affine=affine)]


def _separable(kernel: int) -> MakeOp:
    def make(channels_in: int, channels_out: int, stride: int, affine: bool) -> nn.Module:
        first = _depthwise(channels_in, channels_in, kernel, stride, 1, affine)
        return nn.Sequential(*first, *_depthwise(channels_in, channels_out, kernel, 1, 1, affine))

    return make


def _dilated(kernel: int) -> MakeOp:
    return lambda channels_in, channels_out, stride, affine: nn.Sequential(
        *_depthwise(channels_in, channels_out, kernel, stride, 2, affine)
    )


def _convolution(kernel: int) -> MakeOp:
    return lambda channels_in, channels_out, stride, affine: relu_conv(channels_in, channels_out, kernel, stride, affine)


def _skip(channels_in: int, channels_out: int, stride: int, affine: bool) -> nn.Module:
    if stride == 2:
        return FactorizedReduce(channels_in, channels_out, affine)
    return nn.Identity() if channels_in == channels_out else relu_conv(channels_in, channels_out, 1, 1, affine)


def _pool(pool: Callable[[int], nn.Module]) -> MakeOp:
    """A pool keeps the channels; where they change, a 1x1 convolution goes before it."""

    def make(channels_in: int, channels_out: int, stride: int, affine: bool) -> nn.Module:
        if channels_in == channels_out:
            return pool(stride)
        return nn.Sequential(relu_conv(channels_in, channels_out, 1, 1, affine), pool(stride))

    return make


_average = _pool(lambda stride: nn.AvgPool2d(3, stride=stride, padding=1, count_include_pad=False))
register_op("none", lambda channels_in, channels_out, stride, affine: Zero(channels_out, stride))
register_op("max_pool_3x3", _pool(lambda stride: nn.MaxPool2d(3, stride=stride, padding=1)))
register_op("avg_pool_3x3", _average)
register_op("skip_connect", _skip)
register_op("sep_conv_3x3", _separable(3))
register_op("sep_conv_5x5", _separable(5))
register_op("dil_conv_3x3", _dilated(3))
register_op("dil_conv_5x5", _dilated(5))
register_op("skip", _skip)
register_op("conv3x3", _convolution(3))
register_op("conv1x1", _convolution(1))
register_op("avgpool", _average)
_BUILTIN = frozenset(_OPS)
