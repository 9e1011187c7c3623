"""The best architecture the shares allow, under a skip budget and a limit on its cost.

    scores [edges, ops]: log of an op's share on an edge (times the edge's, where edges have weights)        costs [edges, ops]
    groups: nb201, an edge; darts, a node (its pair of inputs and an op for each) ──> options (choices, score, cost, skips)
    maximise Σ score   subject to   Σ skips in the normal cell ≤ budget,  Σ cost ≤ limit

Without limits the answer is the space's own `derive`, ties aside. With them it is a multiple-choice knapsack, solved group by group: of
partial answers with equally many skips only those stay that no other beats in cost and score. Costs are rounded up to 1/4096 of what the
limit leaves, so that the answer always keeps the limit and is the best up to that rounding. Where a cost is no sum over edges (in nb201
an edge may lead nowhere), a space of up to MOST_LISTED points is gone through from the largest score down, which is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import numpy as np

from ...core.errors import OptionError
from ..spaces.space import Point, Space

Matrix = np.ndarray[Any, np.dtype[np.float64]]
SKIPS = frozenset({"skip", "skip_connect"})
BINS = 4096
Edges = tuple[tuple[int, int], ...]
ATTEMPTS = 8  # at a limit, where the predictor is not a sum over edges
MOST_LISTED = 1 << 16


@dataclass(frozen=True, slots=True)
class Limit:
    """`predict(point)` must be at most `most`; `costs` [edges, ops] says what each choice adds, in the same unit."""

    costs: Matrix
    most: float
    predict: Callable[[Point], float] | None = None  # default: the sum of `costs` over the point's choices


@dataclass(frozen=True, slots=True)
class Option:
    """One way to decide a group: its part of the point, and the (edge, op) it puts into the net."""

    values: Point
    entries: tuple[tuple[int, int], ...]


def cell_space(space: Space) -> Any:
    """A space with edges and ops that a supernet can have, or an error."""
    if not hasattr(space, "derive") or not hasattr(space, "ops"):
        raise OptionError(f"space {space.name} by gradient", why="it has no edges whose ops could be mixed", do="use darts or nb201")
    return space


def groups_of(space: Space) -> list[list[Option]]:
    """The decisions of a cell space as groups that can be decided one by one."""
    cells = cell_space(space)
    return _groups(tuple(cells.ops), tuple(cells.edges) if space.name == "darts" else None, len(space.decisions))


@lru_cache(maxsize=16)  # all that decides them is in the key
def _groups(ops: tuple[str, ...], edges: Edges | None, decisions: int) -> list[list[Option]]:
    if edges is not None:
        return [_node_options(ops, edges, kind, node) for kind in range(2) for node in sorted({target for _, target in edges})]
    return [[Option((op,), ((edge, op),)) for op in range(len(ops))] for edge in range(decisions)]


def _node_options(ops: tuple[str, ...], edges: Edges, kind: int, node: int) -> list[Option]:
    real = [place for place, name in enumerate(ops) if name != "none"]
    found: list[Option] = []
    for pair, sources in enumerate((low, high) for low in range(node) for high in range(low + 1, node)):
        rows = [kind * len(edges) + edges.index((source, node)) for source in sources]
        found += [
            Option((pair, first, second), ((rows[0], real[first]), (rows[1], real[second])))
            for first, second in product(range(len(real)), repeat=2)
        ]
    return found


def entries_of(space: Space, point: Point) -> list[tuple[int, int]]:
    """The (edge, op) a point puts into the net."""
    place, found = 0, list[tuple[int, int]]()
    for options in groups_of(space):
        width = len(options[0].values)
        found += next(option.entries for option in options if option.values == point[place : place + width])
        place += width
    return found


def skip_flags(space: Space) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[edges, ops]: 1 where the op is a skip in the normal cell (of nb201: the cell)."""
    cells = cell_space(space)
    rows = 2 * len(cells.edges) if space.name == "darts" else len(space.decisions)
    flags = np.tile(np.array([name in SKIPS for name in cells.ops], dtype=np.int64), (rows, 1))
    if space.name == "darts":
        flags[len(cells.edges) :] = 0
    return flags


def skip_count(space: Space, point: Point) -> int:
    """Skips in the normal cell."""
    flags = skip_flags(space)
    return int(sum(flags[entry] for entry in entries_of(space, point)))


def summed_cost(space: Space, point: Point, costs: Matrix) -> float:
    return float(sum(costs[entry] for entry in entries_of(space, point)))


def scores_of(weights: Matrix, edge_shares: Matrix | None = None) -> Matrix:
    """Log shares [edges, ops] of architecture weights."""
    logits = np.asarray(weights, dtype=np.float64)
    logs: Matrix = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    return logs if edge_shares is None else logs + np.log(np.asarray(edge_shares, dtype=np.float64))[:, None]


def derive(space: Space, scores: Matrix, *, skips: int | None = None, limit: Limit | None = None) -> Point:
    """The point of largest summed score that has at most `skips` skips in its normal cell and keeps the limit."""
    scores = np.asarray(scores, dtype=np.float64)
    plain = _best(space, scores, None)
    if (skips is None or skip_count(space, plain) <= skips) and (limit is None or _predicted(space, plain, limit) <= limit.most):
        return plain
    if limit is None:
        return _best(space, scores, skips)
    if limit.predict and prod(len(options) for options in groups_of(space)) <= MOST_LISTED:
        return _listed(space, scores, skips, limit)
    fixed, cheapest = -np.inf, _best(space, -np.asarray(limit.costs, dtype=np.float64), skips)
    point = plain
    for _ in range(ATTEMPTS):
        # stem, head, launches: those of the dearest network so far, so that each attempt leaves less room than the one before
        fixed = max(fixed, _predicted(space, point, limit) - summed_cost(space, point, limit.costs))
        found = _within(space, scores, skips, limit.costs, limit.most - fixed)
        if found is None:
            break
        point = found
        if _predicted(space, point, limit) <= limit.most:
            return point
    if (least := _predicted(space, cheapest, limit)) <= limit.most:
        return cheapest
    raise _too_little(limit, least)


def _listed(space: Space, scores: Matrix, skips: int | None, limit: Limit) -> Point:
    """The first point within the limit, from the largest score down."""
    groups, flags = groups_of(space), skip_flags(space)
    total, counts = np.zeros(1), np.zeros(1, dtype=np.int64)
    for options in groups:
        total, counts = (
            np.add.outer(sums, [sum(values[entry] for entry in option.entries) for option in options]).ravel()
            for sums, values in ((total, scores), (counts, flags))
        )
    sizes, least = [len(options) for options in groups], np.inf
    for place in np.argsort(-total, kind="stable"):
        if skips is not None and counts[place] > skips:
            continue
        picked = zip(groups, np.unravel_index(int(place), sizes), strict=True)
        point = tuple(value for options, index in picked for value in options[int(index)].values)
        predicted = _predicted(space, point, limit)
        if predicted <= limit.most:
            return point
        least = min(least, predicted)
    raise _too_little(limit, least)


def _too_little(limit: Limit, least: float) -> OptionError:
    why = f"the cheapest found is predicted at {least:g}"
    return OptionError(f"no architecture within {limit.most:g}", why=why, do="give a larger limit")


def _predicted(space: Space, point: Point, limit: Limit) -> float:
    return limit.predict(point) if limit.predict else summed_cost(space, point, limit.costs)


def _best(space: Space, scores: Matrix, skips: int | None) -> Point:
    """Whatever it costs."""
    found = _within(space, scores, skips, np.zeros_like(scores), np.inf)
    if found is None:
        raise OptionError(f"at most {skips} skips", why="no architecture keeps the budget", do="give a larger one")
    return found


def _within(space: Space, scores: Matrix, skips: int | None, costs: Matrix, room: float) -> Point | None:
    """Group by group: `front` holds (skips, cost in bins, score, choice of each group so far). None where nothing fits into the room."""
    flags, limited = skip_flags(space), np.isfinite(room)
    unit = max(room, 0.0) / BINS or 1.0 if limited else 1.0
    groups = groups_of(space)
    front, chosen = np.zeros((1, 3)), np.zeros((1, 0), dtype=np.int64)
    for options in groups:
        table = _table(options, flags, np.asarray(costs, dtype=np.float64), scores, unit)
        joined = (front[:, None, :] + table[None, :, :]).reshape(-1, 3)
        keep = _undominated(joined, (BINS if room > 0 else 0) if limited else None, skips)
        before, option = np.divmod(keep, len(table))
        front, chosen = joined[keep], np.concatenate([chosen[before], option[:, None]], axis=1)
        if not len(front):
            return None
    winner = chosen[int(front[:, 2].argmax())]
    return tuple(value for options, index in zip(groups, winner, strict=True) for value in options[int(index)].values)


def _table(options: Sequence[Option], flags: np.ndarray[Any, Any], costs: Matrix, scores: Matrix, unit: float) -> Matrix:
    """[options, (skips, cost in bins rounded up, score)]"""
    edge, op = np.array([option.entries for option in options]).transpose(2, 0, 1)  # [options, entries of one]
    bins = np.ceil(costs / unit - 1e-9)
    return np.stack([values[edge, op].sum(axis=1) for values in (flags, bins, scores)], axis=1).astype(np.float64)


def _undominated(rows: Matrix, bins: int | None, skips: int | None) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Rows within the limits that no row of as many or fewer skips beats in both cost and score."""
    allowed = np.ones(len(rows), dtype=bool)
    if bins is not None:
        allowed &= rows[:, 1] <= bins
    if skips is not None:
        allowed &= rows[:, 0] <= skips
    else:
        rows = rows * np.array([0.0, 1.0, 1.0])
    places = np.flatnonzero(allowed)
    order = places[np.lexsort((-rows[places, 2], rows[places, 1], rows[places, 0]))]
    kept = []
    for count in np.unique(rows[order, 0]):
        same = order[rows[order, 0] == count]
        best_before = np.concatenate([[-np.inf], np.maximum.accumulate(rows[same, 2])[:-1]])
        kept.append(same[rows[same, 2] > best_before])
    return np.concatenate(kept) if kept else np.zeros(0, dtype=np.int64)
