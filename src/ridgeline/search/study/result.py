"""What a search found: every trial, those no other beats, each seed's winner, mean ± std over seeds.

journal lines ──Trial.from_json──> [Trial] ──front_of──> places on the front        Front.to_json() ──> front.json, --json, report

The front holds trials trained to the end within every limit. The winner of a seed is the one its strategy would ship: the best in the
first objective as the strategy judges it.
"""

from __future__ import annotations

import importlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ...core.errors import OptionError
from .objectives import Objective, nondominated, signed

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
Count = Annotated[int, Field(ge=0)]
Figure = Annotated[float, Field(ge=0, le=1e30)]
Line = TypeVar("Line", "Trial", "Shipped")
RENDERERS = {"table": "ridgeline.report.search_table:render_search", "html": "ridgeline.report.search_html:render_search_html"}


@dataclass(frozen=True, slots=True)
class Trial:
    """One network a strategy asked for."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    number: Count  # over all seeds, in the order of the journal
    seed: Count
    point: tuple[Count, ...]
    fidelity: Annotated[float, Field(gt=0, le=1)]
    values: Mapping[str, Figure]
    feasible: bool
    seconds: Figure
    why: str = ""  # it is not feasible
    same_as: Count | None = None  # the trial whose figures it repeats: it computes the same, so nothing was trained
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
    def from_json(cls, entry: Mapping[str, Any], wanted: Iterable[str] = ("accuracy",)) -> Trial:
        """`wanted`: figures a feasible trial has."""
        trial = _read(cls, entry, "trial")
        missing = [name for name in wanted if name not in trial.values]
        if trial.feasible and missing:
            raise _bad("trial", f"trial {trial.number} has no {', '.join(missing)}")
        if trial.same_as is not None and trial.same_as >= trial.number:
            raise _bad("trial", f"trial {trial.number} repeats trial {trial.same_as}, which comes later")
        return trial


@dataclass(frozen=True, slots=True)
class Shipped:
    """The winner of one seed, trained on the whole training split and scored on the test split once."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    seed: Count
    trial: Count
    point: tuple[Count, ...]
    values: Mapping[str, Figure]  # costs of the network that ships, and the winner's held-out accuracy
    test: Mapping[str, Figure]  # accuracy (and crossbar_accuracy) on the test split
    seconds: Figure

    def to_json(self) -> dict[str, Any]:
        return {"kind": "final", **asdict(self), "point": list(self.point), "values": dict(self.values), "test": dict(self.test)}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Shipped:
        shipped = _read(cls, entry, "final training")
        if "accuracy" not in shipped.test:
            raise _bad("final training", "it has no test accuracy")
        return shipped


def _read(kind: type[Line], entry: Mapping[str, Any], what: str) -> Line:
    """A journal's line, every field of its own type and every number finite."""
    try:
        fields = {name: value for name, value in entry.items() if name != "kind"}
        line: Line = READERS[kind].validate_json(json.dumps(fields))
        return line
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part)[:80] for part in first["loc"][:4])
        raise _bad(what, f"{where}: {first['msg']}"[:200]) from error
    except RecursionError as error:
        raise _bad(what, "it is nested too deeply") from error


READERS: dict[Any, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (Trial, Shipped)}


def _bad(what: str, why: str) -> OptionError:
    return OptionError(f"a line of trials.jsonl is no {what}", why=why, do="put the file back as it was, or give another folder")


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
        for one in self.shipped:
            if (own := self.winners.get(one.seed)) != one.trial:
                raise _bad("final training", f"it is of trial {one.trial}, but seed {one.seed} ends with trial {own}")
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
