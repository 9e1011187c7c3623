"""Budgets, tables, fronts and searches over tables: against brute force, and with errors that must show."""

from __future__ import annotations

import io
import zipfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import OptionError, RidgelineError
from ridgeline.search.budget import Budget, parse_budget
from ridgeline.search.front import growth, hypervolume, nondominated
from ridgeline.search.run import Found, report_table, search_table
from ridgeline.search.spaces.cells201 import canonical_rows
from ridgeline.search.strategies import STRATEGIES
from ridgeline.search.strategy.acquisition import expected_improvement
from ridgeline.search.surrogate import NOISES, Surrogate, distances, fit, posterior, tamed
from ridgeline.search.table import Table, load_table
from tests.search.tables import made_table
from tests.support import full_or_tenth

TABLE, OTHER = made_table(), made_table(1)


@cache
def searched(strategy: str, seed: int) -> Found:
    """60 trials by the column seen."""
    return search_table(TABLE, strategy, Budget(trials=60), ["seen"], seed)


def test_budgets() -> None:
    assert parse_budget("40trials") == Budget(trials=40) and parse_budget("1trial") == Budget(trials=1)
    assert parse_budget("10m") == Budget(seconds=600) and parse_budget(" 1.5h ") == Budget(seconds=5400)
    assert parse_budget(f"{1e-5}s") == Budget(seconds=1e-5)
    for wrong in (
        "",
        "40",
        "0trials",
        "2.5trials",
        "-3s",
        "10 minutes",
        "trials",
        "1d",
        "9" * 400 + "trials",
        "9" * 400 + "h",
        "1e999s",
        "infs",
    ):
        with pytest.raises(OptionError, match="above 0, of at most 1,000,000,000"):
            parse_budget(wrong)
    assert Budget(trials=3).spent(3, 0) and not Budget(trials=3).spent(2, 1e9) and Budget(seconds=1).spent(0, 1.0)


@settings(max_examples=full_or_tenth(300), deadline=None)
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
    features = TABLE.listed.features[::50]
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
    at_once = posterior(features[rows], values, features, 6.0, 0.1)
    assert np.allclose(at_once[0], direct) and np.allclose(at_once[1], spread)


def test_fit_finds_the_likeliest() -> None:
    """Against the density of the normal distribution, written out; noise that was put in is found."""
    features, random = TABLE.listed.features[::200], np.random.default_rng(0)
    apart = distances(features, features)
    smooth = np.linalg.cholesky(np.exp(-apart / (2 * apart.mean())) + 1e-9 * np.eye(len(features))) @ random.normal(size=len(features))
    assert fit(features, smooth)[1] == NOISES[0]
    noisy = smooth + random.normal(0, 1.0, len(features))
    length, noise = fit(features, noisy)
    assert noise == NOISES[-1]
    values = tamed(noisy)[0]

    def likelihood(length: float, noise: float) -> float:
        spread = (np.exp(-apart / length) + noise * np.eye(len(values))) / (1 + noise)
        return float(-0.5 * values @ np.linalg.inv(spread) @ values - 0.5 * np.linalg.slogdet(spread)[1])

    assert all(likelihood(length, noise) >= likelihood(scale * apart.mean(), other) - 1e-9 for scale in (0.5, 1, 2, 4) for other in NOISES)


def test_expected_improvement_is_its_integral() -> None:
    for mean, deviation, best in ((0.0, 1.0, 0.5), (2.0, 0.5, 1.0), (-1.0, 0.3, 0.2)):
        drawn, step = np.linspace(best, mean + 12 * deviation, 200_001, retstep=True)
        density = np.exp(-(((drawn - mean) / deviation) ** 2) / 2) / (deviation * np.sqrt(2 * np.pi))
        integral = float(((drawn - best) * density).sum() * step)
        assert abs(float(expected_improvement(np.array(mean), np.array(deviation), best)) - integral) < 1e-6


@pytest.mark.parametrize("strategy", sorted({*STRATEGIES} - {"halving"}))
def test_a_search_sees_only_what_it_evaluates(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if strategy in ("tpe", "nsga2"):
        pytest.importorskip("optuna")
    table, table.revealed = OTHER, 0
    first = search_table(table, strategy, Budget(trials=30), ["seen"], 7)
    assert table.revealed == len(first.rows) == 30
    assert first.winner in first.rows
    table.revealed = 0
    for name in ("true", "latency"):
        monkeypatch.setitem(table.columns, name, np.full(len(table.points), 1e9))
    again = search_table(table, strategy, Budget(trials=30), ["seen"], 7)
    assert again.rows == first.rows and again.winner == first.winner


def test_a_part_of_a_table() -> None:
    """Points it lacks cost nothing, and the model never asks for one."""
    part = Table(TABLE.points[::5], {"seen": TABLE.column("seen")[::5]})
    for strategy in ("random", "evolution", "model"):
        assert len(search_table(part, strategy, Budget(trials=40), ["seen"], 1).rows) == 40 == part.revealed
        part.revealed = 0
    few = Table(TABLE.points[:3], {"seen": TABLE.column("seen")[:3]})
    assert len(search_table(few, "model", Budget(trials=40), ["seen"], 1).rows) == 3


def test_report_has_every_seed() -> None:
    found = report_table(TABLE, budget="15trials", columns=["seen", "-latency"], shown=["true"], seeds=2)
    assert [row["seed"] for row in found["seeds"]] == [0, 1] and all(row["trials"] == 15 and row["front"] for row in found["seeds"])
    values = [row["true"] for row in found["seeds"]]
    assert found["summary"]["true"] == {"mean": np.mean(values), "std": pytest.approx(np.std(values, ddof=1))}


def test_the_model_and_evolution_find_more_than_chance() -> None:
    """Which of the two finds more takes a hundred seeds to say: the tables of docs/search.md."""

    def reached(strategy: str) -> float:
        return float(np.mean([TABLE.column("true")[searched(strategy, seed).winner] for seed in range(8)]))

    model, evolution, chance = (reached(name) for name in ("model", "evolution", "random"))
    top = float(TABLE.column("true").max())
    assert top - model < 0.3 * (top - chance) and top - evolution < 0.3 * (top - chance)


def test_two_objectives_grow_the_front() -> None:
    columns = ["seen", "-latency"]

    def volume(strategy: str) -> float:
        found = [search_table(TABLE, strategy, Budget(trials=60), columns, seed).signed(columns) for seed in range(2)]
        return float(np.mean([hypervolume(one, (60.0, -14.0)) for one in found]))

    assert volume("model") > 1.02 * volume("random")


def test_the_model_never_asks_twice_for_one_computation() -> None:
    assert len(np.unique(canonical_rows(TABLE.points[searched("model", 0).rows]), axis=0)) == 60


def test_refusals(tmp_path: Path) -> None:
    for call in (
        lambda: search_table(TABLE, "modle", Budget(trials=3), ["seen"]),
        lambda: search_table(TABLE, "model", Budget(trials=3), ["sean"]),
        lambda: search_table(TABLE, "model", Budget(trials=3), ["seen", "true", "latency", "seen"]),
        lambda: search_table(TABLE, "halving", Budget(trials=3), ["seen"]),
        lambda: search_table(TABLE, "model", Budget(trials=3), ["seen"], frist=3),
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
