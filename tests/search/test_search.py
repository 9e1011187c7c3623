"""Budgets, spaces, tables, fronts and strategies: against brute force, and with errors that must show."""

from __future__ import annotations

import io
import zipfile
from contextlib import suppress
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import OptionError, RidgelineError
from ridgeline.search.budget import Budget, parse_budget
from ridgeline.search.front import growth, hypervolume, nondominated
from ridgeline.search.run import search_table
from ridgeline.search.space import EDGES, NONE, CellSpace
from ridgeline.search.strategies import STRATEGIES, _expected_improvement
from ridgeline.search.surrogate import Surrogate
from ridgeline.search.table import load_table
from tests.search.tables import made_table

TABLE = made_table()


def test_budgets() -> None:
    assert parse_budget("40trials") == Budget(trials=40) and parse_budget("1trial") == Budget(trials=1)
    assert parse_budget("10m") == Budget(seconds=600) and parse_budget(" 1.5h ") == Budget(seconds=5400)
    for wrong in ("", "40", "0trials", "2.5trials", "-3s", "10 minutes", "trials", "1d"):
        with pytest.raises(OptionError):
            parse_budget(wrong)
    assert Budget(trials=3).spent(3, 0) and not Budget(trials=3).spent(2, 1e9) and Budget(seconds=1).spent(0, 1.0)


def computed(point: tuple[int, ...]) -> frozenset[tuple[tuple[int, int], ...]]:
    """What a cell computes, as the set of (edge, op) sequences from input to output: every walk, by brute force."""
    walks = set()

    def walk(node: int, taken: tuple[tuple[int, int], ...]) -> None:
        if node == 3:
            walks.add(taken)
        for place, (source, target) in enumerate(EDGES):
            if source == node and point[place] != NONE:
                walk(target, (*taken, (place, point[place])))

    walk(0, ())
    return frozenset(walks)


def test_cells_that_compute_the_same_have_one_form() -> None:
    space, points = CellSpace(), np.array(list(product(range(5), repeat=6)), dtype=np.uint8)
    forms = space.canonical(points)
    by_form: dict[bytes, set[object]] = {}
    by_meaning: dict[object, set[bytes]] = {}
    for point, form in zip(points[::7], forms[::7], strict=True):
        meaning = computed(tuple(int(op) for op in point))
        by_form.setdefault(form.tobytes(), set()).add(meaning)
        by_meaning.setdefault(meaning, set()).add(form.tobytes())
    assert all(len(found) == 1 for found in (*by_form.values(), *by_meaning.values()))
    assert np.array_equal(space.canonical(forms), forms)
    assert space.name(np.array([0, 1, 2, 3, 4, 0], dtype=np.uint8)) == "|skip~0|+|none~0|conv1x1~1|+|conv3x3~0|avgpool~1|skip~2|"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 6), st.integers(-3, 6)), min_size=1, max_size=12))
def test_hypervolume_counts_cells(points: list[tuple[int, int]]) -> None:
    given_points, reference = np.array(points, dtype=float), (0.0, -1.0)
    cells = {(x, y) for a, b in points for x in range(a) for y in range(-1, b)}
    assert hypervolume(given_points, reference) == len(cells)
    front = nondominated(given_points)
    assert {tuple(point) for point in front} == {
        p
        for p in {tuple(map(float, q)) for q in points}
        if not any(q[0] >= p[0] and q[1] >= p[1] and tuple(map(float, q)) != p for q in points)
    }
    candidates = np.array([[x, y] for x in (-1, 1, 4) for y in (-2, 0, 5)], dtype=float)
    added = [hypervolume(np.concatenate([given_points, one[None]]), reference) - len(cells) for one in candidates]
    assert np.allclose(growth(front, candidates, reference), added)


def test_surrogate_is_the_direct_solution() -> None:
    features = TABLE.space.features(TABLE.points)[::50]
    model = Surrogate(features, 6.0, 0.1, 30)
    rows, values = list(range(0, 300, 13)), []
    for row in rows:
        values.append(float(np.sin(row)) if row else -50.0)  # one far below the others
        model.observe(row, values[-1])
    mean, deviation = model.posterior()
    differing = (features[:, None, :] != features[rows][None]).sum(-1)
    cross = np.exp(-differing / 6.0)
    gram = cross[rows] + 0.1 * np.eye(len(rows))
    seen = np.maximum(values, np.median(values) - 2 * (max(values) - np.median(values)))
    assert seen[0] > -5
    direct = seen.mean() + cross @ np.linalg.solve(gram, seen - seen.mean())
    spread = np.sqrt(1 - np.einsum("ij,ji->i", cross, np.linalg.solve(gram, cross.T))) * seen.std()
    assert np.abs(mean - direct).max() < 1e-4 and np.abs(deviation - spread).max() < 1e-4


def test_expected_improvement_is_its_integral() -> None:
    random = np.random.default_rng(0)
    for mean, deviation, best in ((0.0, 1.0, 0.5), (2.0, 0.5, 1.0), (-1.0, 0.3, 0.2)):
        draws = np.maximum(random.normal(mean, deviation, 2_000_000) - best, 0).mean()
        assert abs(float(_expected_improvement(np.array(mean), np.array(deviation), best)) - draws) < 2e-3


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_a_search_sees_only_what_it_evaluates(strategy: str) -> None:
    if strategy == "tpe":
        pytest.importorskip("optuna")
    table = made_table(1)
    first = search_table(table, strategy, Budget(trials=30), ["seen"], 7)
    assert table.revealed == len(first.rows) == 30
    again = search_table(table, strategy, Budget(trials=30), ["seen"], 7)
    assert again.rows == first.rows and again.winner == first.winner
    assert first.winner in first.rows
    hidden = made_table(1)
    for name in ("true", "latency"):
        hidden.columns[name] = np.full(len(hidden.points), 1e9)
    assert search_table(hidden, strategy, Budget(trials=30), ["seen"], 7).rows == first.rows


def test_the_model_finds_more_than_chance_and_evolution() -> None:
    def reached(strategy: str) -> float:
        found = [search_table(TABLE, strategy, Budget(trials=60), ["seen"], seed) for seed in range(5)]
        return float(np.mean([TABLE.column("true")[one.winner] for one in found]))

    model, evolution, chance = (reached(name) for name in ("model", "evolution", "random"))
    top = float(TABLE.column("true").max())
    assert chance < evolution < model and top - model < 0.35 * (top - chance)


def test_two_objectives_grow_the_front() -> None:
    columns = ["seen", "-latency"]

    def volume(strategy: str) -> float:
        found = [search_table(TABLE, strategy, Budget(trials=60), columns, seed).signed(columns) for seed in range(4)]
        return float(np.mean([hypervolume(one, (60.0, -14.0)) for one in found]))

    assert volume("model") > 1.02 * volume("random")


def test_the_model_never_asks_twice_for_one_computation() -> None:
    found = search_table(TABLE, "model", Budget(trials=80), ["seen"], 3)
    assert len(np.unique(TABLE.space.canonical(TABLE.points[found.rows]), axis=0)) == 80


def test_refusals(tmp_path: Path) -> None:
    for call in (
        lambda: search_table(TABLE, "modle", Budget(trials=3), ["seen"]),
        lambda: search_table(TABLE, "model", Budget(trials=3), ["sean"]),
        lambda: search_table(TABLE, "model", Budget(trials=3), ["seen", "true", "latency"]),
        lambda: load_table(tmp_path / "none.npz"),
    ):
        with pytest.raises(RidgelineError):
            call()


def test_hostile_tables(tmp_path: Path) -> None:
    """Truncated, foreign, pickled and misshapen files: a clear error, never code from the file."""
    path = tmp_path / "table.npz"
    np.savez(path, ops=TABLE.points[:50], seen=np.arange(50.0))
    whole = path.read_bytes()
    assert load_table(path).column("seen")[3] == 3
    random = np.random.default_rng(0)
    for _ in range(60):
        broken = bytearray(whole[: random.integers(1, len(whole))]) if random.random() < 0.5 else bytearray(whole)
        for place in random.integers(0, len(broken), 3):
            broken[place] = random.integers(256)
        path.write_bytes(bytes(broken))
        with suppress(RidgelineError):
            load_table(path)
    np.savez(path, ops=np.array([{"a": 1}], dtype=object))
    with pytest.raises(OptionError):
        load_table(path)
    np.savez(path, ops=np.full((4, 6), 9))
    with pytest.raises(OptionError):
        load_table(path)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ops.npy", b"\0" * (3 << 20))
    path.write_bytes(buffer.getvalue())
    with pytest.raises(OptionError):
        load_table(path)
