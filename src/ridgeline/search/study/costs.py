"""What a network costs, before anything is trained: latency, energy, memory, parameters, FLOPs.

    (space, point) ──build──> module ──capture──> Workload ──estimate(target)──> seconds, joules, bytes
                   ──latency table──> seconds (and joules where it has them)
                   ──measure──> seconds of real passes, where the target is this machine

Estimated and tabled figures are the same each time; measured ones are not, and the journal keeps what was measured. Networks that
compute the same are costed once.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...core.dtypes import bytes_of
from ...core.errors import OptionError
from ...core.timing import time_callable
from ...target.load import LOCAL_TARGETS, load_target
from ...workload.capture import capture
from ..spaces.space import Point, Space
from .objectives import OBJECTIVES
from .request import settings_of

if TYPE_CHECKING:
    from ...core.profile import Profile
    from ...target.load import Target
    from ..latency.table import LatencyTable

MEASURED = ("float64", "float32", "float16", "bfloat16")
COSTS = tuple(name for name, one in OBJECTIVES.items() if not one.trained)


@dataclass(slots=True)
class Costing:
    """Costs on one target; `prepare` once, then `of` for each network."""

    target: str = "cpu"
    table: LatencyTable | None = None
    batch: int = 1
    dtype: str | None = None
    measure: bool = False
    _spec: Target | None = None
    _known: dict[tuple[Space, Point], dict[str, float]] = field(default_factory=dict)

    def check(self) -> None:
        """Wrong names are told before anything is trained; this machine is not calibrated for it."""
        if self.target not in LOCAL_TARGETS:
            load_target(self.target)
        if self.measure and self.target not in LOCAL_TARGETS:
            why = "only this machine can be measured"
            raise OptionError(f"measured latency on {self.target}", why=why, do=f"use {' or '.join(LOCAL_TARGETS)}, or leave measure out")
        if self.measure and self.table is not None:
            raise OptionError("measured latency and a table", why="each states the latency", do="give one of them")
        if self.measure and self.dtype not in (None, *MEASURED):
            why = "the network's own layers are timed, and they run in others"
            raise OptionError(f"measured latency in {self.dtype}", why=why, do=f"give one of {', '.join(MEASURED)}")
        if self.table is not None:
            self._check_table(self.table)

    def _check_table(self, table: LatencyTable) -> None:
        """A table answers for its own conditions alone."""
        places = (table.target.partition(":")[0], self.target.partition(":")[0])  # cuda:0 is cuda
        own = {"batch": (table.batch, self.batch), "target": places, "dtype": (table.dtype, self.dtype or "float32")}
        for name, (its, ours) in own.items():
            if its != ours:
                raise OptionError(
                    f"a table of {name} {its} for {name} {ours}", why="its latencies are those of its own conditions",
                    do=f"give {name} {its} (target and dtype are the table's where left out), or build another table",
                )  # fmt: skip

    def check_space(self, space: Space) -> None:
        """Whether the table was built for networks of this space and size."""
        if self.table is None:
            return
        settings = json.loads(json.dumps(settings_of(space)))
        differ = [name for name in settings if self.table.settings.get(name) != settings[name]]
        if self.table.space == space.name and differ:
            its, ours = ({name: values.get(name) for name in differ[:3]} for values in (self.table.settings, settings))
            do = "build the table with the settings of the search, those of --final in their place"
            raise OptionError(f"a table for {its}", why=f"the networks that ship have {ours}", do=do)

    def of(self, space: Space, point: Point, names: Iterable[str], report: Callable[[str], None] | None = None) -> dict[str, float]:
        """Those of `names` that need no training."""
        key, wanted = (space, space.canonical(point)), [name for name in names if name in COSTS]
        known = self._known.setdefault(key, {})
        if missing := [name for name in wanted if name not in known]:
            known.update(self._found(space, point, missing, report))
        return {name: known[name] for name in wanted}

    def _found(self, space: Space, point: Point, names: list[str], report: Callable[[str], None] | None) -> dict[str, float]:
        found = self.tabled(space, point, names)
        left = [name for name in names if name not in found]
        return {**self.of_model(space.build(point, seed=0), space.input_shape, left, report), **found} if left else found

    def tabled(self, space: Space, point: Point, names: Iterable[str]) -> dict[str, float]:
        """What the table says of these; nothing is built for it."""
        wanted, found = set(names), dict[str, float]()
        if self.table is not None and "latency" in wanted:
            found["latency"] = self.table.predict(space, point)
        if self.table is not None and "energy" in wanted and self.target == self.table.target:
            found["energy"] = self.table.energy_j(space, point)
        return found

    def of_model(
        self, model: nn.Module, shape: tuple[int, ...], names: Iterable[str], report: Callable[[str], None] | None = None
    ) -> dict[str, float]:
        """Of any network, `shape` being that of one input; more than `names` where it comes for nothing."""
        left, found = [name for name in names if name in COSTS], dict[str, float]()
        model = model.cpu().eval()
        found["parameters"] = float(sum(parameter.numel() for parameter in model.parameters()))
        if self.measure and "latency" in left:
            found["latency"] = self._measured(model, shape)
        left = [name for name in left if name not in found]  # estimating a latency that was measured could mean calibrating this machine
        if {"flops", "memory", "energy", "latency"} & set(left):
            found = {**self._estimated(model, shape, left, report), **found}
        return found

    def _estimated(
        self, model: nn.Module, shape: tuple[int, ...], names: list[str], report: Callable[[str], None] | None
    ) -> dict[str, float]:
        workload = capture(model, torch.zeros(self.batch, *shape), dtype=self.dtype, name="candidate")
        weights = sum(self._bytes_of(p) for p in [*model.parameters(), *model.buffers()])
        found = {"flops": float(workload.flops), "memory": float(weights + workload.peak_activation_bytes)}
        if "latency" in names or "energy" in names:
            profile = self._profile(workload, report)
            found["latency"] = profile.total.time_s
            if "energy" in names:
                if profile.total.energy_j is None:
                    why = "its file states no energies, or not those of every op"
                    raise OptionError(f"no energy of a network on {self.target}", why=why, do="use a target with energies, e.g. eyeriss")
                found["energy"] = profile.total.energy_j
        return found

    def _bytes_of(self, parameter: torch.Tensor) -> int:
        if self.dtype and parameter.is_floating_point():
            return bytes_of(parameter.numel(), self.dtype)
        return parameter.numel() * parameter.element_size()

    def _profile(self, workload: object, report: Callable[[str], None] | None) -> Profile:
        from ...estimate.processor import estimate

        if self._spec is None:
            self._spec = load_target(self.target, report)
        return estimate(workload, self._spec)  # type: ignore[arg-type]

    def _measured(self, model: nn.Module, shape: tuple[int, ...]) -> float:
        device = torch.device(self.target)
        dtype = getattr(torch, self.dtype or "float32")
        placed, inputs = copy.deepcopy(model).to(device, dtype), torch.zeros(self.batch, *shape, device=device, dtype=dtype)
        with torch.inference_mode():
            return time_callable(lambda: placed(inputs), device=self.target, budget_s=0.5).median_s


def load_costing(target: str, table: Path | str | None, batch: int, dtype: str | None, measure: bool) -> Costing:
    """Costing with its table read and everything checked."""
    from ..latency.table import LatencyTable

    costing = Costing(target, LatencyTable.load(table) if table else None, batch, dtype, measure)
    costing.check()
    return costing
