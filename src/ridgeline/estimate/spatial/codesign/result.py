"""The answer: the front, the chip to build and why, and how much of the space it rests on.

Problem, DesignSpace, Limits ──codesign──> Codesign(front, knee, reason, counts)  .to_json()  .best_toml()
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ....core.errors import OptionError
from ....core.toml_out import dump_toml
from ....target.array import SpatialArraySpec
from .chip import build
from .evaluate import Evaluated, Problem
from .front import knee
from .journal import Journal
from .search import Goal, Limits, Search, chosen_method, run
from .space import Choice, DesignSpace, check_space, choice_from_json
from .workers import Evaluator

SCHEMA = "ridgeline/codesign/1"
ROW = ("chip", "latency_s", "sample_s", "energy_j", "area_mm2", "power_w", "static_w", "utilisation", "fusion", "kept_bytes", "models")


@dataclass(frozen=True, slots=True)
class Codesign:
    """What a search found."""

    problem: Problem
    space: DesignSpace
    limits: Limits
    goal: Goal
    method: str
    seed: int
    front: tuple[Evaluated, ...]
    """Fastest first."""
    knee: int
    """Place in the front of the chip to build."""
    reason: str
    counts: dict[str, int]
    """Chips seen, by what became of them."""

    @property
    def best(self) -> Evaluated:
        return self.front[self.knee]

    def best_array(self) -> SpatialArraySpec:
        """The recommended chip as a target."""
        return array_of(self.problem, choice_from_json(self.best.choice))

    def best_toml(self) -> str:
        """The same as a file that `ridgeline map --on` loads."""
        return dump_toml(self.best_array().model_dump())

    def to_json(self) -> dict[str, Any]:
        """The documented schema of `ridgeline codesign --json`."""
        batches = next(iter(self.problem.workloads.values()))
        return {
            "schema": SCHEMA,
            "models": [workload.model for workload in batches],
            "base": self.problem.base.name,
            "goal": self.goal,
            "limits": {"area_mm2": self.limits.area_mm2, "power_w": self.limits.power_w},
            "method": self.method,
            "seed": self.seed,
            "space": self.space.size,
            "whole_space": self.method == "grid",
            "counts": self.counts,
            "front": [row_of(one) for one in self.front],
            "best": self.knee,
            "reason": self.reason,
        }


def row_of(one: Evaluated) -> dict[str, Any]:
    """A chip of the front: what was chosen, what it is worth."""
    whole = one.to_json()
    return {"batch": one.choice["batch"], "dataflow": one.choice["dataflow"], **{name: whole[name] for name in ROW}, "choice": one.choice}


def array_of(problem: Problem, choice: Choice) -> SpatialArraySpec:
    """The chip of a choice, its description saying what was chosen."""
    array = build(problem.base, choice, problem.rules)
    chosen = ", ".join(f"{name} {value}" for name, value in choice.to_json().items() if name not in ("batch", "dataflow", "fusion"))
    return array.model_copy(update={"description": f"{array.description}: {chosen}"[:400]})


def codesign(
    problem: Problem,
    space: DesignSpace,
    *,
    limits: Limits | None = None,
    goal: Goal = "latency",
    method: str = "auto",
    budget: int = 64,
    seed: int = 0,
    journal: Journal | None = None,
    workers: int = 1,
    prune: bool = True,
    progress: Callable[[Search], None] | None = None,
) -> Codesign:
    """Search; `problem.rules` are those of the space."""
    problem, limits = replace(problem, rules=space.rules), limits or Limits()
    check_space(space, problem.base)
    with Evaluator(problem, workers) as evaluator:
        search = Search(problem, space, limits, goal, journal or Journal(problem), evaluator, progress or (lambda _: None), prune)
        run(search, method, budget, seed)
    found = search.front()
    if not found:
        raise _nothing_fits(search)
    points = [search.objectives(one) for one in found]
    best, distance = knee(points)
    return Codesign(
        problem, space, limits, goal, chosen_method(method, space.size, budget), seed, tuple(found), best,
        _reason(points, best, distance, goal), _counts(search),
    )  # fmt: skip


def _counts(search: Search) -> dict[str, int]:
    by_cause = Counter(one.why or "within the limits" for one in search.seen.values())
    return {"seen": len(search.seen), "mapped": search.mapped, **{name.replace(" ", "_"): by_cause[name] for name in sorted(by_cause)}}


def _reason(points: list[tuple[float, float, float]], best: int, distance: float, goal: Goal) -> str:
    """Why the knee is the knee, in numbers of the front."""
    if len(points) == 1:
        return "it is the only chip on the front: no other is better in anything"
    names = ("latency" if goal == "latency" else "time a sample", "energy", "area")
    least = [min(column) for column in zip(*points, strict=True)]
    costs = [f"{value / low:.3g}x the least {name}" if value > low else f"the least {name}" for name, value, low in
             zip(names, points[best], least, strict=True) if low > 0]  # fmt: skip
    text = f"nearest of {len(points)} to the best of all three at once (distance {distance:.2f} on logarithmic scales): {', '.join(costs)}"
    fastest = points[0]
    if best and fastest[0] > 0 and points[best][2] > 0:
        ratio = fastest[2] / points[best][2]
        size = f"{ratio:.3g}x its area" if ratio >= 1 else f"{1 / ratio:.3g}x less area"
        text += (
            f"; the fastest is {points[best][0] / fastest[0]:.3g}x as fast with {size} and {fastest[1] / points[best][1]:.3g}x its energy"
        )
    return text


def _nothing_fits(search: Search) -> OptionError:
    """Say how near the nearest chip came."""
    over = [one for one in search.seen.values() if one.why == "over a limit"]
    if not over:
        reasons = Counter(one.why for one in search.seen.values())
        return OptionError(
            f"none of {len(search.seen)} chips can run these models", why=_first_reason(search) or str(dict(reasons)),
            do="give the design space larger memories, or another --base",
        )  # fmt: skip
    nearest = min(over, key=lambda one: one.violation)
    array = build(search.problem.base, search.space.choice(nearest.picks), search.problem.rules)
    power = nearest.result.power_w if nearest.result else array.static_w
    limits = [
        f"--{name} {value:g}" for name, value in (("area", search.limits.area_mm2), ("power", search.limits.power_w)) if value is not None
    ]
    return OptionError(
        f"none of {len(search.seen)} chips keeps to {' and '.join(limits)}",
        why=f"the nearest takes {array.area_mm2:.4g} mm2 and {'' if nearest.result else 'at least '}{power:.4g} W",
        do="raise the limits, or give the design space smaller chips",
    )


def _first_reason(search: Search) -> str:
    known = (search.journal.get(search.space.choice(picks)) for picks in search.seen)
    return next((one.infeasible for one in known if one is not None and one.infeasible), "")
