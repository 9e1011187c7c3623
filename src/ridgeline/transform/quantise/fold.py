"""Batch norms folded into the convolutions before them, and the graph that says where that is right.

    module ──trace──> fx graph, one node a layer call ──pairs──> (conv, norm) where the norm alone reads the convolution
    y = γ (conv(x) − μ) / √(σ² + ε) + β      ──fold──>     W' = W γ/√(σ² + ε),   b' = β + (b − μ) γ/√(σ² + ε)        [float64 maths]

Only in eval mode is that the same function: a folded model is not for training from scratch. A norm without running statistics, one
called twice, one of several readers, a convolution shared by two places: left as they are. Where fx cannot trace a model (its
forward branches on values) name the pairs. The graph is used to look at, never to run. Ref: Jacob 2018.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...core.errors import TransformError

CONVOLUTIONS: dict[type[nn.Module], type[nn.Module]] = {nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d, nn.Conv3d: nn.BatchNorm3d}
Pair = tuple[str, str]


class _Leaves(fx.Tracer):
    """Layers without children are nodes, whoever wrote them."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(True for _ in m.children()) or super().is_leaf_module(m, module_qualified_name)


def trace(model: nn.Module) -> fx.Graph | None:
    """One node for each call of a layer or function; None where the forward cannot be traced."""
    try:
        return _Leaves().trace(model)
    except Exception:  # whatever a user's forward does with a stand-in for a tensor
        return None


def calls(graph: fx.Graph) -> Counter[str]:
    """How often each layer is called."""
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_module")


def norm_pairs(model: nn.Module, graph: fx.Graph) -> list[Pair]:
    """(convolution, norm) by name, in the order of the graph, for every pair that may be folded."""
    layers, times = dict(model.named_modules(remove_duplicate=False)), calls(graph)
    shared = _shared(model)
    found = []
    for node in graph.nodes:
        if node.op != "call_module" or len(node.args) != 1:
            continue
        norm, before = layers[str(node.target)], node.args[0]
        if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) != 1:
            continue
        names = str(before.target), str(node.target)
        once = all(times[name] == 1 and name not in shared for name in names)
        if once and CONVOLUTIONS.get(type(layers[names[0]])) is type(norm) and has_statistics(norm):
            found.append(names)
    return found


def _shared(model: nn.Module) -> set[str]:
    """Names of modules, or of modules with a parameter, that stand in more than one place."""
    homes: dict[int, set[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for thing in (module, *module.parameters(recurse=False)):
            homes.setdefault(id(thing), set()).add(name)
    return {name for names in homes.values() if len(names) > 1 for name in names}


def has_statistics(norm: Any) -> bool:
    """Whether the norm has a mean and a variance of its own to fold."""
    return norm.running_mean is not None and norm.running_var is not None


def norm_as_affine(norm: Any) -> tuple[Tensor, Tensor]:
    """(factor, shift) per channel, float64: the norm in eval mode is x * factor + shift."""
    factor = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        factor = factor * norm.weight.detach().double()
    shift = -norm.running_mean.double() * factor
    return factor, shift + norm.bias.detach().double() if norm.bias is not None else shift


def fold_(conv: Any, norm: Any) -> None:
    """The convolution, in place, does what both did."""
    factor, shift = norm_as_affine(norm)
    weight = conv.weight.detach().double() * factor.view(-1, *[1] * (conv.weight.dim() - 1))
    bias = shift if conv.bias is None else shift + conv.bias.detach().double() * factor
    conv.weight = nn.Parameter(weight.to(conv.weight.dtype), requires_grad=conv.weight.requires_grad)
    conv.bias = nn.Parameter(bias.to(conv.weight.dtype), requires_grad=conv.weight.requires_grad)


def check_pairs(model: nn.Module, pairs: Iterable[Pair]) -> list[Pair]:
    """Pairs a user named: they must be a convolution and its norm."""
    checked = []
    for conv, norm in pairs:
        try:
            layers = model.get_submodule(conv), model.get_submodule(norm)
        except AttributeError as error:
            raise TransformError(f"fold {norm} into {conv}", why=str(error), do="name layers of the model, e.g. conv1 and bn1") from error
        if CONVOLUTIONS.get(type(layers[0])) is not type(layers[1]) or not has_statistics(layers[1]):
            kinds = f"{type(layers[0]).__name__} and {type(layers[1]).__name__}"
            why = f"they are {kinds}; a convolution and its batch norm with running statistics are needed"
            raise TransformError(f"fold {norm} into {conv}", why=why, do="name such a pair")
        checked.append((conv, norm))
    return checked


@torch.no_grad()
def fold_norms_(model: nn.Module, pairs: Iterable[Pair] | None = None) -> list[Pair]:
    """Fold every pair (found, or named), put Identity in the norms' places; returns what was folded."""
    if pairs is None:
        graph = trace(model)
        chosen = norm_pairs(model, graph) if graph is not None else []
    else:
        chosen = check_pairs(model, pairs)
    for conv, norm in chosen:
        fold_(model.get_submodule(conv), model.get_submodule(norm))
        put(model, norm, nn.Identity())
    return chosen


def put(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Replace the layer of that name, wherever else it also stands; its mode is kept."""
    if not name:
        raise TransformError("a model that is one layer", why="it cannot be replaced inside itself", do="wrap it in nn.Sequential")
    old = model.get_submodule(name)
    layer.train(old.training)
    for home in [module for module in model.modules() if any(child is old for child in module._modules.values())]:
        for key, child in home._modules.items():
            if child is old:
                home._modules[key] = layer
