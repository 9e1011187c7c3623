"""Growth of a GrownNet that preserves its function: a wider, a deeper, or a more branched network that computes the same.

    wider   channel i ≥ n of the new net is a copy of channel i mod n; what reads copies has weights that sum to the old one, in random
            parts, so that copies get different gradients from the first step (Chen 2016, Net2Net)
    deeper  one cell more in a stage, with gain 0: x + 0 · cell(x)
    branch  one op more on an edge, the gain and offset of its last batch norm 0

All hold in training mode, too: copies have the batch statistics of their channel. `grow.py` grows the channels tied to one layer of any
model; a plan has one width for all nodes of a stage, so here all of them grow at once, into a network that the new plan builds.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Generator, Tensor, nn

from ...core.errors import OptionError
from ..spaces.ops import make_op
from .grown import Cell, GrownNet

KINDS = ("deeper", "wider", "branch")
MULTIPLE = 8  # of channels: what tensor cores take


def wider(net: GrownNet, channels: int, *, seed: int = 0) -> GrownNet:
    """The same function with `channels` in the first stage and as much more in the others; a new network."""
    before = net.plan.channels
    if channels <= before or net.mixture is not None:
        why = "an open stage cannot grow" if net.mixture is not None else f"it has {before} already"
        raise OptionError(f"wider network of {channels} channels", why=why, do="close the stages first, give more channels")
    made = GrownNet(replace(net.plan, channels=channels)).to(net.classifier.weight.device, net.classifier.weight.dtype)
    random = Generator().manual_seed(seed)
    new = dict(made.named_modules())
    with torch.no_grad():
        for name, module in net.named_modules():
            _copy(name, module, new[name], random)
    return made.train(net.training)


def deeper(net: GrownNet, stage: int) -> GrownNet:
    """One cell more at the end of a stage; the other cells are the same objects."""
    weight = net.classifier.weight
    cell = Cell(net.plan.edges[stage], net.plan.channels << stage, gain=0.0).to(weight.device, weight.dtype).train(net.training)
    net.stages[stage].append(cell)  # type: ignore[operator]
    net.plan = net.plan.with_cell(stage)
    return net


def branch(net: GrownNet, stage: int, edge: int, op: str) -> GrownNet:
    """One op more beside those of an edge, in every cell of a stage."""
    weight, width = net.classifier.weight, net.plan.channels << stage
    for cell in net.stages[stage]:  # type: ignore[attr-defined]
        made = make_op(op, width, width).to(weight.device, weight.dtype).train(net.training)
        last = last_norm(made)
        if last is None:
            raise OptionError(f"branch of {op}", why="it does not end with a batch norm that can be set to 0", do="choose a convolution")
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        cell.edges[edge].paths.append(made)
        cell.edges[edge].names = (*cell.edges[edge].names, op)
    net.plan = net.plan.with_edge(stage, edge, (*net.plan.edges[stage][edge], op))
    return net


def last_norm(op: nn.Module) -> nn.BatchNorm2d | None:
    """The batch norm an op ends with, if it has one with weights."""
    last = list(op.modules())[-1]
    return last if isinstance(last, nn.BatchNorm2d) and last.affine else None


def next_width(channels: int) -> int:
    """About 1.4 times as wide: twice the work of a convolution."""
    return max(round(channels * 1.4 / MULTIPLE) * MULTIPLE, channels + MULTIPLE)


def _copy(name: str, old: nn.Module, new: nn.Module, random: Generator) -> None:
    """What the module itself holds; its children are copied in their turn."""
    if isinstance(old, nn.Conv2d) and isinstance(new, nn.Conv2d):
        weight = old.weight[_sources(old.out_channels, new.out_channels, old.weight.device)]
        if old.groups == 1:
            weight = _split(weight, new.in_channels, random)
        elif not old.groups == old.in_channels == old.out_channels:
            raise _unknown(name, old)
        new.weight.copy_(weight)
        _copy_rows(old, new, ("bias",))
    elif isinstance(old, nn.Linear) and isinstance(new, nn.Linear):
        rows = old.weight[_sources(old.out_features, new.out_features, old.weight.device)]
        new.weight.copy_(_split(rows, new.in_features, random))
        _copy_rows(old, new, ("bias",))
    elif isinstance(old, nn.BatchNorm2d):
        _copy_rows(old, new, ("weight", "bias", "running_mean", "running_var"))
    elif isinstance(old, Cell) and isinstance(new, Cell):
        new.gain.copy_(old.gain)
    elif any(True for _ in old.parameters(recurse=False)):
        raise _unknown(name, old)


def _copy_rows(old: nn.Module, new: nn.Module, names: tuple[str, ...]) -> None:
    for name in names:
        before, after = getattr(old, name), getattr(new, name)
        if before is not None:
            after.copy_(before[_sources(len(before), len(after), before.device)])


def _sources(before: int, after: int, device: torch.device) -> Tensor:
    """The old channel each new one copies; a function of the two counts alone, so that what writes and what reads agree."""
    return torch.arange(after, device=device) % before


def _split(weight: Tensor, after: int, random: Generator) -> Tensor:
    """[out, in, …] ──> [out, after, …]: each input's weight in random parts over its copies, the parts summing to it."""
    before = weight.shape[1]
    source = _sources(before, after, weight.device)
    drawn = torch.rand(weight.shape[0], after, generator=random, dtype=torch.float64).to(weight.device) + 0.5
    total = torch.zeros(weight.shape[0], before, dtype=torch.float64, device=weight.device).index_add_(1, source, drawn)
    parts = (drawn / total[:, source]).reshape(*drawn.shape, *[1] * (weight.ndim - 2))
    return weight[:, source].double() * parts


def _unknown(name: str, module: nn.Module) -> OptionError:
    return OptionError(
        f"cannot widen {name}, a {type(module).__name__}",
        why="how its weights depend on the channels is not known",
        do="use ops of plain or depthwise convolutions, linear layers and batch norms, or give max_channels=channels",
    )
