"""What every part of a running search shares: the request, spaces, data, costs, limits, the folder, and how results are kept.

Study ──keep(trial)──> journal line on disk ──> checkpoints gone        Study ──write_front──> front.json
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor

from ...workload.data import Data
from ..spaces.space import Point, Space
from ..strategy.base import Known
from .costs import Costing
from .evaluate import Report
from .folder import RunFolder
from .objectives import Limit, Objective, signed
from .request import Request
from .result import Front, Trial

Watch = Callable[[Front], None]


@dataclass(frozen=True, slots=True)
class Study:
    """What every trial needs."""

    request: Request
    space: Space
    final_space: Space
    data: Data
    parts: Data
    """The training split alone, divided: its test part is the held-out one."""
    costing: Costing
    objectives: tuple[Objective, ...]
    limits: tuple[Limit, ...]
    run: RunFolder
    report: Report
    watch: Watch | None
    grown: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    """Weights a seed's final training begins with, where its search ends with some."""

    def known(self, seed: int) -> list[Trial]:
        """Finished trials of a seed, as the journal has them."""
        mine = [one for one in self.run.journal.entries if one.get("kind") == "trial" and one.get("seed") == seed]
        return [Trial.from_json(entry, self.request.wanted) for entry in mine]

    def keep(self, trial: Trial) -> None:
        """On disk, then its checkpoints go."""
        self.run.journal.append(trial.to_json())
        self.run.finished(trial.number)

    def add(self, front: Front, trial: Trial) -> None:
        """One more trial of the result; whoever watches is told."""
        front.trials.append(trial)
        if self.watch is not None:
            self.watch(front)

    def write_front(self, front: Front) -> None:
        """front.json, with the genotypes of everything on it at the size that ships."""
        # those of now only: what was on the front when an earlier file was written depends on the clock
        numbers = sorted({*(trial.number for trial in front.front), *front.winners.values()})
        front.genotypes = {number: front.genotypes.get(number) or self._genotype(front.trials[number]) for number in numbers}
        self.run.write_front(front.to_json())

    def _genotype(self, trial: Trial) -> dict[str, Any]:
        return dict(trial.genotype) if trial.genotype else self.final_space.genotype(trial.point)


def known_costs(study: Study) -> Known | None:
    """What a latency table tells of any network before it is asked for; None without one."""
    names = [one.name for one in (*study.objectives, *(limit.objective for limit in study.limits))]

    @cache
    def known(point: Point) -> tuple[tuple[float | None, ...], bool]:
        values = study.costing.tabled(study.final_space, point, names)
        told = signed(study.objectives, values)
        return tuple(v if one.name in values else None for one, v in zip(study.objectives, told, strict=True)), not broken_limit(
            study.limits, values
        )

    return known if study.costing.table is not None else None


def broken_limit(limits: Sequence[Limit], values: Mapping[str, float]) -> str:
    """The first limit that does not hold, in words; "" where all do."""
    for limit in limits:
        if not limit.met(values):
            return f"{limit.objective.name} {values[limit.objective.name]:.4g} breaks {limit.text}"
    return ""
