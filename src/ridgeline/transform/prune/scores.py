"""Which weights go: a score for each, and the exact set of the lowest.

    model ──weights_of──> {name: weight} ──score──> {name: score ≥ 0, float32} ──lowest──> {name: bool, True = pruned}
      magnitude |w|      gradient Σ_batches |g|      taylor Σ_batches |w·g|      random u ~ U(0, 1)

The LARGEST scores stay, whatever the method: a weight with a large gradient is one the loss depends on. `lowest` prunes
round(sparsity · N) weights to the weight, over the whole model or in each layer; of equal scores the lowest index goes first
(layers in model order). It is a radix selection: a float32 that is not negative orders like its bits, so three histograms (of
11, 11 and 10 bits) give the exact k-th score without a sort and without joining the layers, however many weights there are
(torch.quantile refuses more than 16 million). Scratch: 8 to 16 bytes a weight of at most CHUNK weights at once.

Ref: Han 2015 (magnitude), Molchanov 2017 (first-order Taylor), LeCun 1990 for the idea.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from ...core.checks import expect
from ...core.errors import OptionError, TransformError, nearest

if TYPE_CHECKING:
    from ...workload.data import Data

Method = Literal["magnitude", "gradient", "taylor", "random"]
Scope = Literal["global", "layer"]
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CHUNK = 1 << 24
DIGITS = ((21, 11), (10, 11), (0, 10))  # (shift, bits) of the 32-bit key, most significant first


def weights_of(model: nn.Module, include: Sequence[str] = ("*",), skip: Sequence[str] = ()) -> dict[str, nn.Parameter]:
    """Weights of linear and convolution layers by parameter name, a shared one once; patterns match the layer's name."""
    expect("model", model, nn.Module, do="give a torch.nn.Module")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LAYERS)}
    for pattern in (*include, *skip):
        if not any(fnmatchcase(name, pattern) for name in layers) and pattern != "*":
            close = nearest(pattern, layers)
            raise OptionError(
                f"pattern {pattern!r} fits no layer",
                why="layers that can be pruned are linear and convolution" + (f"; nearest: {', '.join(close)}" if close else ""),
                do="give a layer's name or a pattern such as layer1.*",
            )
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for name, layer in layers.items():
        chosen = any(fnmatchcase(name, p) for p in include) and not any(fnmatchcase(name, p) for p in skip)
        weight = layer.weight
        if chosen and isinstance(weight, nn.Parameter) and weight.is_floating_point() and id(weight) not in seen:
            seen.add(id(weight))
            found[f"{name}.weight" if name else "weight"] = weight
    if not found:
        raise TransformError("no weight to prune", why="the model has no linear or convolution layer left by the patterns", do="widen them")
    return found


def score(
    weights: Mapping[str, nn.Parameter],
    method: Method = "magnitude",
    *,
    model: nn.Module | None = None,
    data: Data | None = None,
    batches: int = 8,
    batch: int = 128,
    seed: int = 0,
) -> dict[str, Tensor]:
    """A score for each weight: float32, not negative, finite; gradient and taylor look at `batches` of the training data."""
    if method == "magnitude":
        scores = {name: weight.detach().abs().float() for name, weight in weights.items()}
    elif method == "random":
        generator = torch.Generator().manual_seed(seed)
        scores = {name: torch.rand(weight.shape, generator=generator).to(weight.device) for name, weight in weights.items()}
    elif model is None or data is None:
        raise TransformError(f"{method} scores without data", why="they are gradients of the loss on data", do="give data=")
    else:
        scores = _gradient_scores(model, weights, data, method == "taylor", batches, batch, seed)
    for name, values in scores.items():
        if not bool(torch.isfinite(values).all()):
            raise TransformError(
                f"{name} has a {method} score that is not finite",
                why="a weight or its gradient is NaN or infinite",
                do="repair the weights",
            )
    return scores


def _gradient_scores(
    model: nn.Module, weights: Mapping[str, nn.Parameter], data: Data, taylor: bool, batches: int, batch: int, seed: int
) -> dict[str, Tensor]:
    scores = {name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in weights.items()}
    for gradients in gradients_of(model, list(weights.values()), data, batches=batches, batch=batch, seed=seed):
        for total, weight, gradient in zip(scores.values(), weights.values(), gradients, strict=True):
            if gradient is not None:
                total += (gradient * weight.detach() if taylor else gradient).abs()
    return scores


def gradients_of(
    model: nn.Module, parameters: Sequence[Tensor], data: Data, *, batches: int, batch: int, seed: int = 0
) -> Iterator[tuple[Tensor | None, ...]]:
    """Gradients of the mean cross entropy, one tuple a batch of training data; the model's .grad, mode and statistics stay."""
    from ...train.evaluate import as_model
    from ...train.loss import call_model, cross_entropy

    device = parameters[0].device
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))
    was_on = [parameter.requires_grad for parameter in parameters]
    modes = {module: module.training for module in model.modules()}
    model.eval()  # statistics of batch norms must not move, and dropout would be noise
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        for rows in order[: batches * batch].split(batch):
            inputs = as_model(model, data.prepare(data.train.inputs[rows].to(device)))
            targets = data.train.targets[rows].to(device)
            with torch.enable_grad():
                loss = cross_entropy(call_model(model, inputs), targets)
                gradients = torch.autograd.grad(loss, list(parameters), allow_unused=True)
            yield tuple(None if gradient is None else gradient.detach() for gradient in gradients)
    finally:
        for parameter, on in zip(parameters, was_on, strict=True):
            parameter.requires_grad_(on)
        for module, training in modes.items():
            module.training = training


def lowest(
    scores: Mapping[str, Tensor], sparsity: float, scope: Scope = "global", *, pruned: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Boolean masks, True where a weight goes. What is `pruned` already goes first, so it never returns."""
    check_sparsity(sparsity)
    keys = {name: (lambda name=name: _keys(scores[name], pruned[name] if pruned else None)) for name in scores}
    groups = [list(scores)] if scope == "global" else [[name] for name in scores]
    masks: dict[str, Tensor] = {}
    for names in groups:
        count = round(sparsity * sum(scores[name].numel() for name in names))
        masks |= _select({name: keys[name] for name in names}, {name: scores[name].shape for name in names}, count)
    return masks


def check_sparsity(sparsity: float) -> None:
    """Between 0 and 1, 1 excluded."""
    if not (math.isfinite(sparsity) and 0.0 <= sparsity < 1.0):
        raise OptionError(f"sparsity {sparsity}", why="it is the share of weights to remove: 0 ≤ sparsity < 1", do="give e.g. 0.8")


Keys = Callable[[], Iterator[Tensor]]


def _keys(scores: Tensor, pruned: Tensor | None) -> Iterator[Tensor]:
    """Flat int32 keys in the order of the scores, chunk by chunk: 0 for what is pruned already, bits of the score + 1 for the rest."""
    flat = scores.reshape(-1)
    gone = None if pruned is None else pruned.reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        bits = flat[start : start + CHUNK].float().abs().view(torch.int32) + 1  # finite: at most 0x7f7fffff, + 1 does not overflow
        yield bits if gone is None else bits.masked_fill_(gone[start : start + CHUNK], 0)


def _select(keys: Mapping[str, Keys], shapes: Mapping[str, torch.Size], count: int) -> dict[str, Tensor]:
    """Masks of the `count` lowest keys over all tensors; ties by position."""
    threshold, left = _kth(keys, count)
    masks = {}
    for name, chunks in keys.items():
        parts = []
        for bits in chunks():
            mask = bits < threshold
            if left:
                ties = (bits == threshold).nonzero().flatten()[:left]
                mask[ties] = True
                left -= len(ties)
            parts.append(mask)
        masks[name] = torch.cat(parts).view(shapes[name]) if parts else torch.zeros(shapes[name], dtype=torch.bool)
    return masks


def _kth(keys: Mapping[str, Keys], count: int) -> tuple[int, int]:
    """(the count-th smallest key, how many equal to it are among the count); count 0: below every key."""
    if count == 0:
        return -1, 0
    prefix, left = 0, count
    for place, (shift, width) in enumerate(DIGITS):
        histogram = torch.zeros(1 << width, dtype=torch.int64)
        for chunks in keys.values():
            for bits in chunks():
                digits = bits >> shift
                if place:
                    digits = digits[(bits >> (shift + width)) == prefix] & ((1 << width) - 1)
                histogram += torch.bincount(digits, minlength=1 << width).cpu()
        reached = histogram.cumsum(0)
        digit = int((reached < left).sum())
        left -= int(reached[digit - 1]) if digit else 0
        prefix = (prefix << width) | digit
    return prefix, left
