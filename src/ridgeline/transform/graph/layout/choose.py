"""Choose a layout for every op: dynamic programming over the graph, conversions as costs of its edges.

    Problem: seconds of each op in (plain, last), values with producer, consumers and conversion seconds
       fixed ops (inputs, outputs, rigid ops) are cut points: their label is filled in and the graph falls apart there
       the rest: eliminate one op after the other, the one with the fewest neighbours first; its table of
       best seconds for every labelling of its neighbours takes its place        (trees: width 1, residual nets: 2)
    ──> Choice(labels, seconds, exact)

A value that several consumers want converted is converted once: a variable "a copy exists" stands for that. Exact wherever no
table needs more than `width` neighbours; beyond that the op with the most neighbours becomes a cut point, with the label a
descent from the uniform labellings gives it. Ref: Bertele and Brioschi 1972, nonserial dynamic programming.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PLAIN, LAST = 0, 1
NEVER = (math.inf, math.inf)
Table = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor between ops (numbers are positions in `Problem.seconds`)."""

    producer: int
    consumers: tuple[int, ...]
    convert_s: tuple[float, float]  # of a plain tensor to channels-last, of a channels-last one to plain
    shared: bool = True  # one copy serves all consumers; False: a copy each (something writes the tensor in between)


@dataclass(frozen=True, slots=True)
class Problem:
    """Seconds of every op in (plain, channels-last), infinite where it cannot run so; and the tensors between them."""

    seconds: tuple[tuple[float, float], ...]
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """A label for every op of the problem."""

    labels: tuple[int, ...]
    seconds: float
    exact: bool  # no labelling is faster


def total_seconds(problem: Problem, labels: Sequence[int]) -> float:
    """What a labelling takes, conversions and all."""
    ops = sum(seconds[label] for seconds, label in zip(problem.seconds, labels, strict=True))
    return ops + sum(
        conversions(value, labels) * value.convert_s[labels[value.producer]] for value in problem.values if conversions(value, labels)
    )


def conversions(value: Value, labels: Sequence[int]) -> int:
    """How many copies of a value a labelling needs."""
    differing = sum(labels[consumer] != labels[value.producer] for consumer in value.consumers)
    return min(differing, 1) if value.shared else differing


def choose(problem: Problem, *, width: int = 12) -> Choice:
    """The fastest labelling."""
    tables = Tables()
    for op, seconds in enumerate(problem.seconds):
        tables.add((op,), np.array(seconds, dtype=np.float64))
    copies = _add_values(tables, problem)
    for op, seconds in enumerate(problem.seconds):
        if math.inf in seconds:
            tables.fix(op, int(seconds[PLAIN] == math.inf))
    guess: list[int] | None = None
    while (smallest := tables.smallest()) is not None:
        variable, neighbours = smallest
        if neighbours <= width:
            tables.eliminate(variable)
            continue
        if guess is None:
            guess = _descend(problem)
            guess += [int(conversions(problem.values[value], guess) > 0) for value in copies]
        widest = tables.widest()
        tables.fix(widest, guess[widest])
    found = tables.backtrack()
    labels = [found[op] for op in range(len(problem.seconds))]
    seconds_found = total_seconds(problem, labels)
    if guess is not None and (guessed := total_seconds(problem, guess[: len(labels)])) < seconds_found:
        labels, seconds_found = guess[: len(labels)], guessed
    return Choice(tuple(labels), seconds_found, exact=guess is None)


def _add_values(tables: Tables, problem: Problem) -> list[int]:
    """Tables of the conversions; gives back which value each "a copy exists" variable belongs to."""
    copies: list[int] = []
    for position, value in enumerate(problem.values):
        to_last, to_plain = value.convert_s
        if not value.shared or len(value.consumers) < 2:
            for consumer in value.consumers:
                tables.add((value.producer, consumer), np.array([[0.0, to_last], [to_plain, 0.0]]))
            continue
        copy = len(problem.seconds) + len(copies)
        copies.append(position)
        tables.add((value.producer, copy), np.array([[0.0, to_last], [0.0, to_plain]]))
        for consumer in value.consumers:  # [producer, consumer, copy]: without a copy the labels must agree
            agree = np.zeros((2, 2, 2))
            agree[0, 1, 0] = agree[1, 0, 0] = math.inf
            tables.add((value.producer, consumer, copy), agree)
    return copies


def _descend(problem: Problem) -> list[int]:
    """A good labelling without tables: from all plain, all last and each op's own favourite, flip while it helps."""
    count = len(problem.seconds)
    near: list[list[Value]] = [[] for _ in range(count)]
    for value in problem.values:
        for op in {value.producer, *value.consumers}:
            near[op].append(value)

    def local(op: int, labels: list[int]) -> float:
        paid = [conversions(value, labels) * value.convert_s[labels[value.producer]] for value in near[op] if conversions(value, labels)]
        return problem.seconds[op][labels[op]] + sum(paid)

    best: list[int] = []
    for start in (PLAIN, LAST, None):
        labels = [
            start if start is not None and seconds[start] < math.inf else int(seconds[LAST] < seconds[PLAIN]) for seconds in problem.seconds
        ]
        improved = True
        while improved:
            improved = False
            for op in range(count):
                before = local(op, labels)
                labels[op] ^= 1
                if local(op, labels) < before:
                    improved = True
                else:
                    labels[op] ^= 1
        if not best or total_seconds(problem, labels) < total_seconds(problem, best):
            best = labels
    return best


class Tables:
    """A sum of tables over binary variables, and its smallest value by elimination."""

    def __init__(self) -> None:
        self.of: dict[int, list[tuple[tuple[int, ...], Table]]] = {}
        self.near: dict[int, set[int]] = {}
        self.queue: list[tuple[int, int]] = []
        self.solved: list[tuple[int, tuple[int, ...], npt.NDArray[np.int8]]] = []

    def add(self, scope: tuple[int, ...], table: Table) -> None:
        """Add a table; its axes are put in rising order of their variables."""
        axes = sorted(range(len(scope)), key=scope.__getitem__)
        entry = tuple(scope[axis] for axis in axes), table.transpose(axes)
        for variable in scope:
            self.of.setdefault(variable, []).append(entry)
            self.near.setdefault(variable, set()).update(other for other in scope if other != variable)
        self._requeue(scope)

    def _requeue(self, variables: Sequence[int]) -> None:
        for variable in variables:
            heapq.heappush(self.queue, (len(self.near[variable]), variable))

    def _take(self, variable: int) -> tuple[list[tuple[tuple[int, ...], Table]], list[int]]:
        """Remove a variable and its tables."""
        tables, neighbours = self.of.pop(variable), sorted(self.near.pop(variable))
        taken = {id(table) for _, table in tables}
        for other in neighbours:
            self.of[other] = [entry for entry in self.of[other] if id(entry[1]) not in taken]
            self.near[other] = {near for scope, _ in self.of[other] for near in scope if near != other}
        self._requeue(neighbours)
        return tables, neighbours

    def smallest(self) -> tuple[int, int] | None:
        """The variable with the fewest neighbours, and how many those are."""
        while self.queue:
            count, variable = self.queue[0]
            if variable in self.near and len(self.near[variable]) == count:
                return variable, count
            heapq.heappop(self.queue)
        return None

    def widest(self) -> int:
        """The variable with the most neighbours."""
        return max(self.near, key=lambda variable: len(self.near[variable]))

    def fix(self, variable: int, label: int) -> None:
        """Give a variable its label: what is left of its tables goes to its neighbours."""
        tables, _ = self._take(variable)
        self.solved.append((variable, (), np.array(label, dtype=np.int8)))
        for scope, table in tables:
            rest = tuple(other for other in scope if other != variable)
            if rest:
                self.add(rest, np.take(table, label, axis=scope.index(variable)))

    def eliminate(self, variable: int) -> None:
        """Take the best label of a variable for every labelling of its neighbours."""
        tables, neighbours = self._take(variable)
        scope = (variable, *neighbours)
        total = np.zeros((2,) * len(scope))
        for names, table in tables:
            axes = sorted(range(len(names)), key=lambda axis: scope.index(names[axis]))
            total = total + table.transpose(axes).reshape([2 if name in names else 1 for name in scope])
        self.solved.append((variable, tuple(neighbours), total.argmin(axis=0).astype(np.int8)))
        if neighbours:
            self.add(tuple(neighbours), total.min(axis=0))

    def backtrack(self) -> dict[int, int]:
        """The label of every variable, last solved first."""
        found: dict[int, int] = {}
        for variable, neighbours, best in reversed(self.solved):
            found[variable] = int(best[tuple(found[other] for other in neighbours)])
        return found
