"""Static int8: ranges of activations found once on calibration data, then integers from end to end of a layer.

    model ──fold batch norms──> ──calibration batches, a histogram a layer──> input grids (uint8, affine)
          ──weights per channel (int8, symmetric)──> Int8Conv2d, Int8Linear ──link──> codes handed on where the graph allows

Two layers are linked where nothing but ReLU, Identity, Dropout or Flatten lies between them and nobody else reads the value: the
first then gives the second's codes, ReLU included. A ReLU left in the module sees uint8 and changes nothing. Residual sums stay float.
Left as they are, and said: layers that `skip` names, padding other than zeros, weights of other types, sums too long for int32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from ...core.errors import TransformError
from .fold import calls, fold_norms_, put, trace
from .grid import Grid, Quantised, quantise, sqnr_db
from .int8_layers import ACTIVATION_LEVELS, MOST_TERMS, Activation, Int8Conv2d, Int8Layer, Int8Linear
from .observe import Histogram, Method, grid_of, range_of

Batch = tuple[Any, ...]
PASSING = (nn.ReLU, nn.Identity, nn.Dropout, nn.Flatten)  # what codes may pass through unchanged, in eval mode
RELUS = (functional.relu, torch.relu, torch.relu_)


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One quantised layer, for the Change."""

    name: str
    bits: int
    sqnr_db: float  # of the weight
    weight_bytes: int  # codes and scales as stored
    low: float | None = None  # of the input, as kept; None: not quantised, or at run time
    high: float | None = None
    seen_low: float | None = None  # as calibration saw it
    seen_high: float | None = None
    gives_codes: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a layer's name fits one of the patterns (`layer3.*`, `fc`)."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def bits_for(name: str, default: int, layer_bits: Mapping[str, int]) -> int:
    """The first pattern that fits decides."""
    return next((bits for pattern, bits in layer_bits.items() if fnmatchcase(name, pattern)), default)


def candidates(model: nn.Module, skip: Sequence[str] = ()) -> tuple[dict[str, nn.Module], list[str]]:
    """(layers to quantise by name, sentences on those left as they are)."""
    chosen: dict[str, nn.Module] = {}
    left = []
    holders = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    for name, module in model.named_modules():
        if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear | nn.ConvTranspose2d):
            continue
        reason = "skipped by name" if matches(name, skip) else _unfit(module)
        if not reason and holders[id(module.weight)] > 1:
            reason = "it shares its weight with another layer"
        if reason:
            left.append(f"{name} stays as it is: {reason}")
        else:
            chosen[name] = module
    unused = [pattern for pattern in skip if not any(fnmatchcase(name, pattern) for name, _ in model.named_modules())]
    if unused:
        names = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
        raise TransformError(f"skip = {unused[0]!r}", why="no layer has such a name", do=f"layers are {', '.join(names[:8])} …")
    if not chosen:
        raise TransformError("no layer to quantise", why="; ".join(left[:3]) or "it has no Conv2d and no Linear", do="see skip")
    return chosen, left


def _unfit(module: Any) -> str:
    if type(module) not in (nn.Conv2d, nn.Linear):
        return f"{type(module).__name__} has no int8 form here"
    if not module.weight.is_floating_point():
        return f"its weight is {module.weight.dtype}"
    if module.weight[0].numel() > MOST_TERMS:
        return f"sums of {module.weight[0].numel():,} terms do not fit int32"
    if isinstance(module, nn.Conv2d):
        if module.padding_mode != "zeros":
            return f"padding_mode is {module.padding_mode}"
        uneven = any(d * (k - 1) % 2 for d, k in zip(module.dilation, module.kernel_size, strict=True))
        if module.padding == "same" and uneven:
            return "padding is not the same on both sides"
    return ""


@contextmanager
def watching(layers: Mapping[str, nn.Module], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Inside: `see(name, input)` for every call of these layers."""
    handles = [module.register_forward_pre_hook(lambda _, inputs, name=name: see(name, inputs[0])) for name, module in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def calibrate(model: nn.Module, layers: Mapping[str, nn.Module], batches: Iterable[Batch]) -> dict[str, Histogram]:
    """A histogram of every layer's input over the batches, in eval mode."""
    seen = {name: Histogram() for name in layers}
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with watching(layers, lambda name, x: seen[name].add(x, name)):
        for batch in batches:
            model(*batch)
    for module, training in modes:
        module.training = training
    if silent := [name for name, one in seen.items() if one.counts is None]:
        raise TransformError(
            f"calibrate {silent[0]}: it was never called", why="the calibration inputs do not reach it", do="skip it, or give other inputs"
        )
    return seen


def entries_of(histograms: Mapping[str, Histogram], method: Method, percentile: float) -> dict[str, Activation]:
    """The input grid of each layer."""
    ends = {name: range_of(one, method, percentile=percentile, levels=ACTIVATION_LEVELS) for name, one in histograms.items()}
    return {name: Activation(*grid_of(low, high, ACTIVATION_LEVELS)) for name, (low, high) in ends.items()}


def weight_grid(bits: int) -> Grid:
    """Of weights that run in integers."""
    return Grid(bits, symmetric=True, granularity="channel")


def int8_layer(module: nn.Module, quantised: Quantised, bias: Tensor | None, entry: Activation) -> Int8Layer:
    """The layer in integers that stands for `module`."""
    if isinstance(module, nn.Conv2d):
        return Int8Conv2d.from_quantised(quantised, module, bias, entry)
    return Int8Linear.from_quantised(quantised, bias, entry)


def converted(name: str, module: Any, bits: int, entry: Activation) -> tuple[Int8Layer, float]:
    """(the layer in integers, SQNR of its weight in dB)."""
    quantised = quantise(module.weight.detach().float(), weight_grid(bits), name)
    layer = int8_layer(module, quantised, module.bias, entry)
    return layer, sqnr_db(module.weight.detach(), layer.dequantised())


@torch.no_grad()
def quantise_static_(
    model: nn.Module, batches: Iterable[Batch], *, bits: int = 8, layer_bits: Mapping[str, int] | None = None, method: Method = "mse",
    percentile: float = 99.99, skip: Sequence[str] = (), pairs: Sequence[tuple[str, str]] | None = None,
) -> tuple[list[LayerRow], list[str]]:  # fmt: skip
    """Fold, calibrate, replace and link in place; returns a row a layer and notes."""
    model.eval()
    folded = fold_norms_(model, pairs)
    layers, notes = candidates(model, skip)
    notes += fold_notes(model, folded, pairs)
    histograms = calibrate(model, layers, batches)
    entries = entries_of(histograms, method, percentile)
    rows = []
    for name, module in layers.items():
        seen, entry = histograms[name], entries[name]
        layer, sqnr = converted(name, module, bits_for(name, bits, layer_bits or {}), entry)
        put(model, name, layer)
        rows.append(LayerRow(name, layer.grid.bits, sqnr, layer.packed_bytes(), entry.low, entry.high, seen.low, seen.high))
    linked = link_(model)
    notes.append(f"{len(folded)} batch norms folded, {len(linked)} of {len(rows)} layers hand on codes")
    return [_with_link(row, linked) for row in rows], notes


def _with_link(row: LayerRow, linked: Mapping[str, str]) -> LayerRow:
    return LayerRow(**{**row.to_dict(), "gives_codes": row.name in linked})


def fold_notes(model: nn.Module, folded: Sequence[Any], pairs: Sequence[Any] | None) -> list[str]:
    """What was not folded, and why."""
    left = [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if not left:
        return []
    untraced = pairs is None and not folded and trace(model) is None
    why = "its forward cannot be traced: name the pairs" if untraced else "no convolution that only it reads stands before it"
    return [f"batch norm {name} stays in float: {why}" for name in left]


def link_(model: nn.Module) -> dict[str, str]:
    """Let layers hand on codes where the graph allows; returns giver → taker."""
    graph = trace(model)
    if graph is None:
        return {}
    layers, times = dict(model.named_modules()), calls(graph)
    made = {}
    for node in graph.nodes:
        giver = layers.get(str(node.target)) if node.op == "call_module" else None
        if not isinstance(giver, Int8Layer) or times[str(node.target)] != 1:
            continue
        end, relu = _follow(node, layers)
        taker = layers.get(str(end.target)) if end is not None and end.op == "call_module" else None
        if end is None or not isinstance(taker, Int8Layer) or times[str(end.target)] != 1 or giver.exit is not None:
            continue
        giver.link_to(taker, relu=relu)
        made[str(node.target)] = str(end.target)
    return made


def _follow(node: fx.Node, layers: Mapping[str, nn.Module]) -> tuple[fx.Node | None, bool]:
    """(the first reader that is more than a passage, whether a ReLU lies before it); None where there are several readers."""
    relu = False
    while len(node.users) == 1:
        node = next(iter(node.users))
        passes, is_relu = _passage(node, layers)
        if not passes:
            return node, relu
        relu |= is_relu
    return None, relu


def _passage(node: fx.Node, layers: Mapping[str, nn.Module]) -> tuple[bool, bool]:
    """(whether codes pass through this node unchanged, whether it is a ReLU)."""
    if node.op == "call_module":
        layer = layers.get(str(node.target))
        return type(layer) in PASSING, type(layer) is nn.ReLU
    if node.op == "call_function":
        return node.target in (*RELUS, torch.flatten), node.target in RELUS
    return node.op == "call_method" and node.target in ("relu", "relu_", "flatten", "contiguous"), node.target in ("relu", "relu_")
