"""Sets of channels that stand or fall together, their scores, and their removal.

    model, inputs ──torch-pruning's dependency graph──> ChannelSet(root, width, members: (layer, side, places, channel of each))
      conv1 ─out─┬─ bn ─ relu ─ conv2 ─in─        one set: rows of conv1, entries of bn, columns of conv2
    channel_scores(set) ──> [width]                remove(model, inputs, {root: channels}) ──> smaller Conv, Linear, BatchNorm, in place

Left alone, each with its reason: sets that reach the model's output, that pass a layer which mixes channels (LayerNorm,
GroupNorm, grouped convolution), or whose members disagree in width, as where a shortcut pads channels (the option-A shortcut of
the CIFAR ResNets couples 16, 32 and 64 channels; the graph takes the padding for an elementwise operation).
Scores of channel c: l1 Σ|w|, l2 Σw² over rows and columns, bn_scale |γ|, each over the mean of its set; taylor
Σ_batches |Σ w·∂L/∂w| over the columns that read c, which is |∂L/∂ξ| for a gate ξ on the channel.
Ref: Fang 2023 (dependency graph), Li 2017 (l1), Liu 2017 (bn_scale), Molchanov 2019 (taylor).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ...core.errors import MissingExtraError, TransformError
from .scores import gradients_of

if TYPE_CHECKING:
    from ...workload.data import Data

Importance = Literal["l1", "l2", "taylor", "bn_scale", "random"]
CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True, slots=True)
class Member:
    """Places of one layer that belong to a set: place i goes with channel `channels[i]` of the set's root."""

    layer: str
    side: Literal["out", "in"]
    places: Tensor  # int64, CPU
    channels: Tensor


@dataclass(frozen=True, slots=True)
class ChannelSet:
    """Channels of a root layer with everything that must go along."""

    root: str
    width: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """The sets that can be pruned, and why others cannot."""

    sets: tuple[ChannelSet, ...]
    left: tuple[str, ...]


def torch_pruning() -> Any:
    """The library, or an error that names the extra."""
    try:
        import torch_pruning
    except ImportError as error:
        raise MissingExtraError(
            "torch-pruning is not installed", why="channels are removed along its dependency graph", do="pip install 'ridgeline[compress]'"
        ) from error
    return torch_pruning


@contextmanager
def _graph(model: nn.Module, inputs: tuple[Any, ...]) -> Iterator[Any]:
    """The dependency graph of an eval-mode forward pass; requires_grad and mode are put back."""
    library = torch_pruning()
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    modes = {module: module.training for module in model.modules()}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of parameters outside layers, which the sets below leave alone
            try:
                graph = library.DependencyGraph().build_dependency(model, example_inputs=inputs, verbose=False)
            except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError) as error:
                raise TransformError(
                    "the model could not be traced for channels",
                    why=f"{type(error).__name__}: {error}",
                    do="check that model(*inputs) runs",
                ) from error
            yield graph
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(wanted.get(name, True))
            parameter.grad = None
        for module, training in modes.items():
            module.training = training


def find_sets(model: nn.Module, inputs: tuple[Any, ...], skip: Sequence[str] = ()) -> Found:
    """Every prunable set of channels, in the order the network computes them."""
    names = {module: name for name, module in model.named_modules()}
    position = {name: place for place, name in enumerate(names.values())}
    sets, left = [], []
    with _graph(model, inputs) as graph:
        for group in graph.get_all_groups(root_module_types=(*CONV, nn.Linear)):
            root = names[group[0].dep.target.module]
            reason = _why_not(graph, group, names, skip)
            if reason:
                left.append(f"{root}: {reason}")
            else:
                sets.append(_channel_set(graph, group, root, names))
    return Found(tuple(sorted(sets, key=lambda s: position[s.root])), tuple(left))


def _why_not(graph: Any, group: Any, names: Mapping[nn.Module, str], skip: Sequence[str]) -> str | None:
    kinds = torch_pruning().ops.OPTYPE
    for dep, places in group:
        node, layer = dep.target, dep.target.module
        if node.type == kinds.OUTPUT or (not node.outputs and graph.is_out_channel_pruning_fn(dep.handler) and layer in names):
            return "its channels are the model's output"
        if node.type == kinds.PARAMETER:
            return "a parameter outside any layer is tied to it"
        if layer not in names:
            continue
        if any(fnmatchcase(names[layer], pattern) for pattern in skip):
            return f"{names[layer]} is skipped"
        if not isinstance(layer, (*CONV, *NORM, nn.Linear)):
            return f"{names[layer]}, a {type(layer).__name__}, mixes channels or is not known"
        if isinstance(layer, CONV) and layer.groups > 1 and not layer.groups == layer.in_channels == layer.out_channels:
            return f"{names[layer]} is a grouped convolution"
        width = (graph.get_out_channels if graph.is_out_channel_pruning_fn(dep.handler) else graph.get_in_channels)(layer)
        if max(places) >= width or (isinstance(layer, NORM) and len(set(places)) != width):
            return f"{names[layer]} has {width} channels, others in the set have more: an operation between them changes the channel count"
    if not any(graph.is_in_channel_pruning_fn(dep.handler) and isinstance(dep.target.module, (*CONV, nn.Linear)) for dep, _ in group):
        return "no layer reads its channels"
    return None


def _channel_set(graph: Any, group: Any, root: str, names: Mapping[nn.Module, str]) -> ChannelSet:
    members = []
    for item in group:
        layer = item.dep.target.module
        if layer in names:
            side: Literal["out", "in"] = "out" if graph.is_out_channel_pruning_fn(item.dep.handler) else "in"
            members.append(Member(names[layer], side, torch.tensor(item.idxs), torch.tensor(item.root_idxs)))
    return ChannelSet(root, graph.get_out_channels(group[0].dep.target.module), tuple(members))


def remove(model: nn.Module, inputs: tuple[Any, ...], channels: Mapping[str, Sequence[int]]) -> None:
    """Take these channels of these root layers out of `model`, in place, with everything tied to them."""
    images = [name for name, p in model.named_parameters() if p.dim() == 4 and _is_channels_last(p)]
    with _graph(model, inputs) as graph:
        for root, gone in channels.items():
            layer = model.get_submodule(root)
            if gone:
                graph.get_pruning_group(layer, graph.get_pruner_of_module(layer).prune_out_channels, list(gone)).prune()
    for name in images:  # taking rows out makes a copy in the default layout
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def channel_scores(
    model: nn.Module,
    sets: Sequence[ChannelSet],
    importance: Importance,
    *,
    data: Data | None = None,
    batches: int = 8,
    batch: int = 128,
    seed: int = 0,
) -> list[Tensor]:
    """One score a channel of each set, float32 on the CPU; higher stays."""
    if importance == "taylor":
        if data is None:
            raise TransformError(
                "taylor importance without data", why="it is a gradient of the loss on data", do="give data=, or use l1 or l2"
            )
        scores = _taylor(model, sets, data, batches, batch, seed)
    elif importance == "random":
        generator = torch.Generator().manual_seed(seed)
        scores = [torch.rand(each.width, generator=generator) for each in sets]
    else:
        scores = [_relative(sum((_norm(model, m, each.width, importance) for m in each.members), torch.zeros(each.width))) for each in sets]
    for each, values in zip(sets, scores, strict=True):
        if not bool(torch.isfinite(values).all()):
            raise TransformError(
                f"{each.root} has a channel score that is not finite", why="its weights are NaN or infinite", do="repair them"
            )
        if importance == "bn_scale" and not any(isinstance(model.get_submodule(m.layer), NORM) for m in each.members):
            raise TransformError(f"bn_scale importance of {each.root}", why="no batch norm follows it", do="use l1, l2 or taylor")
    return scores


def _relative(values: Tensor) -> Tensor:
    """Over the mean, so that sets of other sizes and scales can be ranked together."""
    mean = values.mean()
    return values / mean if mean > 0 else values


def _norm(model: nn.Module, member: Member, width: int, importance: Importance) -> Tensor:
    layer = model.get_submodule(member.layer)
    values = _slices(layer, member, layer.weight)
    total = torch.zeros(width)
    if values is None or (importance == "bn_scale") != isinstance(layer, NORM):
        return total
    values = values.abs() if importance != "l2" else values.square()
    return total.index_add_(0, member.channels, values.sum(1).float().cpu())


def _slices(layer: nn.Module, member: Member, tensor: Any) -> Tensor | None:
    """[places, rest]: the part of a weight (or of its gradient) that belongs to each place."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    places = member.places.to(tensor.device)
    if member.side == "in" and not isinstance(layer, NORM) and not (isinstance(layer, CONV) and layer.groups > 1):
        tensor = tensor.transpose(0, 1)
    part: Tensor = tensor[places].flatten(1) if tensor.dim() > 1 else tensor[places, None]
    return part


def _taylor(model: nn.Module, sets: Sequence[ChannelSet], data: Data, batches: int, batch: int, seed: int) -> list[Tensor]:
    readers = [(place, m, model.get_submodule(m.layer)) for place, each in enumerate(sets) for m in each.members if m.side == "in"]
    readers = [
        (place, m, layer) for place, m, layer in readers if isinstance(layer, (*CONV, nn.Linear)) and getattr(layer, "groups", 1) == 1
    ]
    totals = [torch.zeros(each.width) for each in sets]
    weights: list[Tensor] = [layer.weight for _, _, layer in readers]  # type: ignore[misc]
    for gradients in gradients_of(model, weights, data, batches=batches, batch=batch, seed=seed):
        sums = [torch.zeros(each.width) for each in sets]
        for (place, member, layer), weight, gradient in zip(readers, weights, gradients, strict=True):
            products = None if gradient is None else _slices(layer, member, weight.detach() * gradient)
            if products is not None:
                sums[place].index_add_(0, member.channels, products.sum(1).float().cpu())
        totals = [total + each.abs() for total, each in zip(totals, sums, strict=True)]
    return totals
