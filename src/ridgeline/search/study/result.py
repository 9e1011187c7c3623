"""What a search found: every trial, those no other beats, each seed's winner, mean ± std over seeds.

journal lines ──Trial.from_json──> [Trial] ──front_of──> places on the front        Front.to_json() ──> front.json, --json, report

The front holds trials trained to the end within every limit. The winner of a seed is the one its strategy would ship: the best in the
first objective as the strategy judges it.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...core.errors import OptionError
from .objectives import Objective, nondominated, signed

RENDERERS = {"table": "ridgeline.report.search_table:render_search", "html": "ridgeline.report.search_html:render_search_html"}


@dataclass(frozen=True, slots=True)
class Trial:
    """One network a strategy asked for."""

    number: int  # over all seeds, in the order of the journal
    seed: int
    point: tuple[int, ...]
    fidelity: float
    values: Mapping[str, float]
    feasible: bool
    seconds: float
    why: str = ""  # it is not feasible
    same_as: int | None = None  # the trial whose figures it repeats: it computes the same, so nothing was trained
    genotype: Mapping[str, Any] | None = None  # of a network that is no point of the space

    @property
    def whole(self) -> bool:
        return self.feasible and self.fidelity >= 1.0

    @property
    def counts(self) -> bool:
        """Whether it took a training."""
        return self.same_as is None and "accuracy" in self.values

    def to_json(self) -> dict[str, Any]:
        return {"kind": "trial", **asdict(self), "point": list(self.point), "values": dict(self.values)}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Trial:
        try:
            return cls(
                int(entry["number"]), int(entry["seed"]), tuple(int(one) for one in entry["point"]), float(entry["fidelity"]),
                {str(name): float(value) for name, value in entry["values"].items()}, bool(entry["feasible"]), float(entry["seconds"]),
                str(entry["why"]), None if entry["same_as"] is None else int(entry["same_as"]),
                None if entry["genotype"] is None else dict(entry["genotype"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise OptionError("a line of trials.jsonl is no trial", why=why, do="remove the line, or give another folder") from error


@dataclass(frozen=True, slots=True)
class Shipped:
    """The winner of one seed, trained on the whole training split and scored on the test split once."""

    seed: int
    trial: int
    point: tuple[int, ...]
    values: Mapping[str, float]  # costs of the network that ships, and the winner's held-out accuracy
    test: Mapping[str, float]  # accuracy (and crossbar_accuracy) on the test split
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {"kind": "final", **asdict(self), "point": list(self.point), "values": dict(self.values), "test": dict(self.test)}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Shipped:
        try:
            return cls(
                int(entry["seed"]), int(entry["trial"]), tuple(int(one) for one in entry["point"]),
                {str(name): float(value) for name, value in entry["values"].items()},
                {str(name): float(value) for name, value in entry["test"].items()}, float(entry["seconds"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise OptionError("a line of trials.jsonl is no final training", why=why, do="give another folder") from error


def front_of(trials: Sequence[Trial], objectives: Sequence[Objective]) -> list[Trial]:
    """Trials no other beats, the best in the first objective first; of networks that compute the same the first."""
    whole = [trial for trial in trials if trial.whole and trial.same_as is None]
    rows = [signed(objectives, trial.values) for trial in whole]
    kept = [whole[place] for place in nondominated(rows)]
    return sorted(kept, key=lambda trial: (signed(objectives, trial.values), -trial.number), reverse=True)


@dataclass(slots=True)
class Front:
    """The result of `run_search`."""

    request: dict[str, Any]
    objectives: tuple[Objective, ...]
    trials: list[Trial] = field(default_factory=list)
    winners: dict[int, int] = field(default_factory=dict)  # seed → number of its winning trial
    shipped: list[Shipped] = field(default_factory=list)
    genotypes: dict[int, dict[str, Any]] = field(default_factory=dict)  # of trials on the front and of winners
    exported: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def front(self) -> list[Trial]:
        return front_of(self.trials, self.objectives)

    @property
    def winner(self) -> Trial | None:
        """Of all seeds the best by what was known before the test split was touched; None before any search has ended."""
        ends = [self.trials[number] for number in self.winners.values()]
        return max(ends, key=lambda trial: (signed(self.objectives, trial.values), -trial.number)) if ends else None

    def summary(self) -> dict[str, dict[str, float]]:
        """Mean and standard deviation (of the sample) over seeds: of winners as found, and on the test split as test_*."""
        columns: dict[str, list[float]] = {}
        for number in self.winners.values():
            for one in self.objectives:
                columns.setdefault(one.name, []).append(self.trials[number].values[one.name])
        for shipped in self.shipped:
            for name, value in shipped.test.items():
                columns.setdefault(f"test_{name}", []).append(value)
        return {
            name: {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else 0.0, "seeds": len(values)}
            for name, values in columns.items()
        }

    def to_json(self) -> dict[str, Any]:
        winner = self.winner
        return {
            "schema": 1,
            "request": self.request,
            "objectives": [one.name for one in self.objectives],
            "trials": [trial.to_json() for trial in self.trials],
            "front": [trial.number for trial in self.front],
            "winners": [{"seed": seed, "trial": number} for seed, number in self.winners.items()],
            "winner": winner.number if winner else None,
            "genotypes": {str(number): genotype for number, genotype in self.genotypes.items()},
            "shipped": [one.to_json() for one in self.shipped],
            "summary": self.summary(),
            "exported": self.exported,
            "notes": self.notes,
        }

    def table(self, **options: Any) -> str:
        return str(_renderer("table")(self.to_json(), **options))

    def to_html(self) -> str:
        return str(_renderer("html")(self.to_json()))


def _renderer(kind: str) -> Any:
    """The function that shows a search; it lives downstream."""
    module, _, function = RENDERERS[kind].partition(":")
    return getattr(importlib.import_module(module), function)
