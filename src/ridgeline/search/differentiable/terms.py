"""What the device asks for, as a term of the architecture's loss.

    costs [edges, ops] in any unit ──÷ cost of the uniform mixture──> DeviceTerm: weight · Σ share · cost
      1.0 is what the supernet costs while all shares are equal, so that one weight means the same for seconds, joules and bytes

Latency and energy add up over ops, and so do bytes of weights; the peak of the activations does not, and is no such term. Limits that must
hold on the derived network are derive.Limit's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.errors import OptionError

Costs = Tensor | np.ndarray[Any, Any]


class DeviceTerm:
    """weight · expected cost, relative to the uniform mixture's; called with the supernet inside a step."""

    def __init__(self, costs: Costs, weight: float, shape: tuple[int, int], device: torch.device | str = "cpu") -> None:
        given = torch.as_tensor(costs, dtype=torch.float64)
        if tuple(given.shape) != tuple(shape):
            raise OptionError(
                f"costs of shape {list(given.shape)}", why=f"the supernet has {list(shape)} edges and ops", do="build them for it"
            )
        if not bool(given.isfinite().all()) or bool((given < 0).any()) or not float(given.sum()) > 0:
            raise OptionError("costs that are negative, not finite or all 0", why="a term needs what each op costs", do="check the table")
        if not 0 <= weight < float("inf"):
            raise OptionError(f"cost_weight = {weight}", why="it is a share of the loss", do="give 0 or more, e.g. 0.1")
        self.unit = float(given.mean(dim=1).sum())  # of the uniform mixture
        self.weight = weight
        self.costs = (given / self.unit).to(device, torch.float32)

    def __call__(self, supernet: Any) -> Tensor:
        return self.weight * supernet.expected_cost(self.costs)  # type: ignore[no-any-return]


def combined(costs: Mapping[str, Costs], weights: Mapping[str, float]) -> Tensor:
    """Several terms as one matrix, each relative to its own uniform mixture, for `costs=` with cost_weight = the sum of the weights."""
    if set(costs) != set(weights) or not costs:
        raise OptionError(f"costs of {', '.join(costs)}, weights of {', '.join(weights)}", why="each cost has a weight", do="name the same")
    parts = []
    for name, given in costs.items():
        matrix = torch.as_tensor(given, dtype=torch.float64)
        parts.append(weights[name] * matrix / matrix.mean(dim=1).sum())
    total = torch.stack(parts).sum(0)
    return total
