"""Several outputs, each with its own loss, weight and targets.

    model(inputs) ──> {"a": out, "b": out} or (out, out)
    heads = {"a": 1.0, "b": Head(0.3, loss=mse, targets=lambda t: t[:, 1])}
    loss = Σ weight · loss_head(output_head, targets_head)

A plain number is Head(number): the run's own loss (a mapping of losses by head is allowed there too) on the batch's targets.
Outputs in a tuple or list belong to the heads in the order given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..core.errors import OptionError, TrainError, nearest
from .loss import cross_entropy

Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Head:
    """One output's share of the loss."""

    weight: float = 1.0
    loss: Loss | None = None  # None: the run's loss
    targets: Callable[[Tensor], Tensor] | None = None  # picks this head's targets from the batch's; None: all of them


def whole_loss(loss: Loss | Mapping[str, Loss] | None, heads: Mapping[str, float | Head] | None) -> Loss:
    """One function of all outputs and targets; wrong names and weights are errors here, before training."""
    if heads is None:
        if isinstance(loss, Mapping):
            raise OptionError(
                f"losses for {', '.join(loss)} without heads", why="a mapping of losses names heads", do="give heads= as well"
            )
        return loss or cross_entropy
    if not heads:
        raise OptionError("heads = {}", why="no head would be trained", do="name at least one output, or leave heads out")
    chosen = {name: _head(name, head, loss, heads) for name, head in heads.items()}
    if isinstance(loss, Mapping) and (unknown := set(loss) - set(heads)):
        raise OptionError(f"loss for {sorted(unknown)[0]!r}", why=f"heads are {', '.join(heads)}", do="name the same heads in both")
    return lambda outputs, targets: _weighted(chosen, outputs, targets)


def _head(name: str, given: float | Head, loss: Loss | Mapping[str, Loss] | None, heads: Mapping[str, float | Head]) -> Head:
    head = given if isinstance(given, Head) else Head(float(given))
    if not math.isfinite(head.weight) or head.weight < 0:
        raise OptionError(f"heads[{name!r}] has weight {head.weight}", why="a weight must be finite and >= 0", do="give e.g. 0.3")
    own = loss.get(name) if isinstance(loss, Mapping) else loss
    return Head(head.weight, head.loss or own or cross_entropy, head.targets)


def _weighted(heads: Mapping[str, Head], outputs: Any, targets: Tensor) -> Tensor:
    by_name = _by_name(heads, outputs)
    parts = []
    for name, head in heads.items():
        assert head.loss is not None
        parts.append(head.weight * head.loss(by_name[name], head.targets(targets) if head.targets else targets))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _by_name(heads: Mapping[str, Head], outputs: Any) -> Mapping[str, Any]:
    if isinstance(outputs, Mapping):
        for name in heads:
            if name not in outputs:
                close = nearest(name, map(str, outputs))
                hint = f"; did you mean {', '.join(close)}?" if close else ""
                raise TrainError(f"no output {name!r}", why=f"the model gives {', '.join(map(str, outputs))}{hint}", do="name its outputs")
        return outputs
    if isinstance(outputs, tuple | list) and len(outputs) == len(heads):
        return dict(zip(heads, outputs, strict=True))
    given = f"{len(outputs)} outputs" if isinstance(outputs, tuple | list) else f"one {type(outputs).__name__}"
    raise TrainError(f"{len(heads)} heads, but the model gives {given}", why="each head needs an output", do="return a mapping or a tuple")
