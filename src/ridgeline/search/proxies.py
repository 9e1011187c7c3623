"""Zero-cost proxies: how good an untrained net looks, from one pass over it.

model, images, labels ──> synflow   log of the sum of |weight| x gradient of the summed output, weights and input all positive (Tanaka 2020)
                          nwot      log det of how alike the on/off patterns of its activations are, image by image (Mellor 2021)
                          gradnorm  sum of the norms of the loss's gradients, one a parameter (Abdelfattah 2021)
rank_points(space, points, names) ──> [n]: mean rank by the named proxies, higher is better

Each works on a copy: weights, gradients, statistics and modes of the model are as they were. Only batch norms are in training mode (they
take the batch's statistics). synflow is in float64, for its sums span hundreds of orders of magnitude, and leaves norms out, as they would
make every layer's flow one. A net whose pass gives no finite number scores -inf.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..core.errors import unknown_name

if TYPE_CHECKING:
    from .spaces.space import Point, Space

NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.modules.instancenorm._InstanceNorm)
SWITCHES = {
    functional.relu, functional.relu6, functional.hardswish, functional.silu, functional.gelu, functional.leaky_relu, functional.elu,
    functional.hardtanh, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_,
}  # fmt: skip
"""Activations whose input's sign says whether they are on."""
BATCH = 16


def synflow(model: nn.Module, images: Tensor, labels: Tensor | None = None) -> float:
    """`images` give the shape only."""
    del labels
    copied = _copy(model).double()
    for parent in list(copied.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, NORMS):
                setattr(parent, name, nn.Identity())
    with torch.no_grad():
        for value in copied.parameters():
            value.abs_()
    total = _output(copied, torch.ones_like(images[:1], dtype=torch.float64)).sum()
    return _log(sum(float((weight.detach() * slope).sum()) for weight, slope in _slopes(copied, total)))


def nwot(model: nn.Module, images: Tensor, labels: Tensor | None = None) -> float:
    """-inf where two images switch everything alike."""
    del labels
    copied, patterns = _copy(model), _Patterns()
    with torch.no_grad(), patterns:
        _output(copied, _like(copied, images))
    if not patterns.found:
        return -math.inf
    alike = sum((code @ code.T + (1 - code) @ (1 - code).T).double() for code in patterns.found)
    sign, value = torch.linalg.slogdet(torch.as_tensor(alike))
    return float(value) if float(sign) > 0 and math.isfinite(float(value)) else -math.inf


def gradnorm(model: nn.Module, images: Tensor, labels: Tensor | None = None) -> float:
    """Of the cross-entropy; without labels they are 0, 1, 2, … over and over."""
    copied = _copy(model)
    logits = _output(copied, _like(copied, images))
    if labels is None:
        labels = torch.arange(len(images), device=images.device) % logits.shape[-1]
    found = sum(float(slope.norm()) for _, slope in _slopes(copied, functional.cross_entropy(logits, labels)))
    return found if math.isfinite(found) else -math.inf


PROXIES: dict[str, Callable[..., float]] = {"synflow": synflow, "nwot": nwot, "gradnorm": gradnorm}


def rank_points(
    space: Space, points: Sequence[Point], names: Sequence[str] = ("synflow", "nwot"), seed: int = 0, images: Tensor | None = None
) -> Any:
    """Nets built with one seed and one batch: the given images, or noise of the space's input shape. Equal points rank equal."""
    for name in names:
        if name not in PROXIES:
            raise unknown_name("proxy", name, PROXIES, see="docs/search.md")
    if images is None:
        images = torch.randn(BATCH, *space.input_shape, generator=torch.Generator().manual_seed(seed))
    scores = np.empty((len(names), len(points)))
    for place, point in enumerate(points):
        model = space.build(point, seed=seed)
        scores[:, place] = [PROXIES[name](model, images) for name in names]
    return np.mean([_ranks(row) for row in scores], axis=0)


class _Patterns(TorchFunctionMode):
    """Writes down which activations are on, called as modules or as functions alike."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SWITCHES:
            given = args[0] if args else kwargs["input"]
            self.found.append((given > 0).flatten(1).float())  # counts below 2^24 are exact
        return func(*args, **(kwargs or {}))


def _copy(model: nn.Module) -> nn.Module:
    """Dropout off, batch norms by the batch's own statistics."""
    copied = copy.deepcopy(model).eval()
    for module in copied.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()
    return copied.requires_grad_(True)


def _like(model: nn.Module, images: Tensor) -> Tensor:
    """Images in the weights' type."""
    first = next((value for value in model.parameters() if value.is_floating_point()), None)
    return images if first is None else images.to(first.dtype)


def _output(model: nn.Module, images: Tensor) -> Tensor:
    found = model(images)
    return found if isinstance(found, Tensor) else found[0]


def _slopes(model: nn.Module, total: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each parameter that matters with its gradient."""
    weights = list(model.parameters())
    if not total.requires_grad:
        return []
    found = torch.autograd.grad(total, weights, allow_unused=True)
    return [(weight, slope) for weight, slope in zip(weights, found, strict=True) if slope is not None]


def _log(value: float) -> float:
    return math.log(value) if 0 < value < math.inf else -math.inf


def _ranks(values: Any) -> Any:
    """0 for the lowest; equal values share the mean of their ranks."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + last - 1) / 2)[group.reshape(-1)]
