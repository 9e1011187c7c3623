"""Building: the fit finds planted coefficients, a killed build goes on where it was, real clocks give a whole table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.core.errors import MeasureError, OptionError
from ridgeline.search.latency import LatencyTable, build_table, estimated
from ridgeline.search.latency import build as build_module
from ridgeline.search.latency.build import Plan, distinct_points
from ridgeline.search.latency.check import check_table
from ridgeline.search.latency.clock import CALLS, Conditions, added_by_each, time_in_rounds, under
from ridgeline.search.latency.fit import fit_nonnegative, spearman
from ridgeline.search.spaces.space import load_space
from tests.search.latency.tiny import tiny_space
from tests.support import FULL, ROOT

SPACE = tiny_space()
SHORT = Plan(calibration=6, check=3, passes=1, block_rounds=1, net_rounds=1)


def test_the_fit_finds_planted_coefficients_and_none_below_zero() -> None:
    random = np.random.default_rng(0)
    features = np.concatenate([np.ones((12, 1)), random.random((12, 3))], axis=1)
    for wanted in ([0.5, 0.0, 1.5, 0.25], [0.0, 2.0, 0.0, 1.0], [0.1, 0.2, 0.3, 0.4]):
        assert fit_nonnegative(features, features @ np.array(wanted)) == pytest.approx(np.array(wanted), abs=1e-9)
    found = fit_nonnegative(features, features @ np.array([3.0, -0.5, 1.0, 0.5]))
    assert (found >= 0).all() and found[1] == 0


def test_the_fit_is_the_best_of_a_grid() -> None:
    random = np.random.default_rng(1)
    features, seconds = random.random((9, 2)) + 0.1, random.random(9) + 0.5

    def off(coefficients: Any) -> float:
        return float(((features @ coefficients / seconds - 1) ** 2).sum())

    grid = min(off(np.array([a, b])) for a in np.linspace(0, 4, 81) for b in np.linspace(0, 4, 81))
    assert off(fit_nonnegative(features, seconds)) <= grid + 1e-12


def test_rank_correlation_by_hand() -> None:
    assert spearman(np.array([1.0, 2, 3, 4]), np.array([10.0, 20, 30, 40])) == pytest.approx(1)
    assert spearman(np.array([1.0, 2, 3, 4]), np.array([4.0, 3, 2, 1])) == pytest.approx(-1)
    # ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4: covariance 4.5 over the root of 4.5 · 5
    assert spearman(np.array([1.0, 2, 2, 3]), np.array([1.0, 3, 2, 4])) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert spearman(np.ones(4), np.arange(4.0)) == 0


def test_waiting_is_no_part_of_a_block_even_where_one_wait_was_slow() -> None:
    waits, work_s = iter([3e-5, 1e-5, 2e-5]), 4e-6

    def seconds(call: object) -> float:
        return next(waits) if call is none else 1e-5 + CALLS * work_s

    def none() -> None: ...

    def calls() -> None: ...

    assert added_by_each(seconds, calls, none) == pytest.approx([work_s] * 3)
    waits = iter([1.0] * 3)
    assert added_by_each(seconds, calls, none) == [0.0] * 3  # never negative


def test_rounds_visit_all_and_one_slow_moment_does_not_count() -> None:
    seen: list[str] = []

    def turn(name: str, slow_at: int) -> Any:
        def call() -> list[tuple[float, ...]]:
            seen.append(name)
            return [(100.0 if seen.count(name) == slow_at else 1.0, 2.0)]

        return call

    names = list("abcdefgh")
    found = time_in_rounds({name: turn(name, 3) for name in names}, 6, seed=0)
    assert found == dict.fromkeys(names, (1.0, 2.0))
    rounds = [seen[start : start + 8] for start in range(0, len(seen), 8)]
    assert len(rounds) == 7 and all(sorted(visited) == names for visited in rounds) and len({tuple(visited) for visited in rounds}) > 4


def planted(monkeypatch: pytest.MonkeyPatch, wrong: float = 1.0) -> list[list[str]]:
    """Clocks that tell what the space's sums give: net = 50 µs + 2 µs a block + 0.5 alone + 0.75 cold; block n: n µs, cold 2n + 3 µs."""
    points, places = distinct_points(SPACE, SHORT.calibration + SHORT.check, 0), {b.key: n for n, b in enumerate(SPACE.all_blocks())}
    asked: list[list[str]] = []

    def seconds(name: str) -> tuple[float, ...]:
        kind, _, rest = name.partition(" ")
        if kind == "block":
            return places[rest] * 1e-6, (2 * places[rest] + 3) * 1e-6
        blocks = SPACE.blocks(points[int(rest)])
        net = 50e-6 + sum(b.count * (2e-6 + places[b.key] * 0.5e-6 + (2 * places[b.key] + 3) * 0.75e-6) for b in blocks)
        return (net * (wrong if int(rest) >= SHORT.calibration else 1.0),)

    def timed(makers: dict[str, Any], *_: object) -> dict[str, tuple[float, ...]]:
        asked.append(sorted(makers))
        return {name: seconds(name) for name in makers}

    monkeypatch.setattr(build_module, "_timed", timed)
    monkeypatch.setattr(build_module, "counted", lambda block, batch: (batch, places[block.key] ** 2))
    return asked


@pytest.mark.parametrize("wrong", [1.0, 1.25])
def test_blocks_that_add_up_are_predicted_and_those_that_do_not_are_told(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    planted(monkeypatch, wrong)
    table = build_table(SPACE, "cpu", plan=SHORT)
    assert table.errors is not None and table.errors.nets == 3
    assert table.errors.mean == pytest.approx(1 - 1 / wrong, abs=1e-6) and table.errors.worst == pytest.approx(1 - 1 / wrong, abs=1e-6)
    assert table.errors.spearman == pytest.approx(1) and table.errors.flops_mean > 0.01
    assert len(table.errors.missed_most) == 3
    assert abs(table.errors.missed_most[0].predicted_s / table.errors.missed_most[0].measured_s - 1) == pytest.approx(table.errors.worst)


def test_passes_on_a_busy_machine_are_followed_by_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = planted(monkeypatch)
    quiet, calls = build_module._timed, 2  # groups of a pass: blocks, networks

    def busy(until: int) -> Any:
        def timed(*given: Any) -> dict[str, tuple[float, ...]]:
            slow = 1.3 if len(asked) < until * calls else 1.0
            return {name: tuple(slow * value for value in values) for name, values in quiet(*given).items()}

        return timed

    plan = Plan(SHORT.calibration, SHORT.check, passes=2)
    expected = build_table(SPACE, "cpu", plan=plan)
    assert len(asked) == 2 * calls  # a quiet machine: what was planned
    for slow_passes, passes in ((1, 3), (2, 2)):  # fast from the second pass on: a third finds nothing more; always slow: nobody knows
        asked.clear()
        monkeypatch.setattr(build_module, "_timed", busy(slow_passes))
        found = build_table(SPACE, "cpu", plan=plan)
        assert len(asked) == passes * calls and (found == expected) == (slow_passes == 1)


def test_a_build_cut_off_goes_on_and_ends_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build_module, "GROUP", 6)
    asked, journal = planted(monkeypatch), tmp_path / "t.journal"
    whole = build_table(SPACE, "cpu", plan=SHORT)
    groups = len(asked)
    stand = build_module._timed

    def breaks(*given: Any) -> Any:
        if len(asked) == groups + 3:
            raise KeyboardInterrupt
        return stand(*given)

    monkeypatch.setattr(build_module, "_timed", breaks)
    with pytest.raises(KeyboardInterrupt):
        build_table(SPACE, "cpu", plan=SHORT, journal=journal)
    with journal.open("ab") as stream:
        stream.write(b'{"pass": 0, "times": {"block')  # as a kill in the middle of a line leaves it
    monkeypatch.setattr(build_module, "_timed", stand)
    again = build_table(SPACE, "cpu", plan=SHORT, journal=journal)
    assert again == whole and len(asked) == 2 * groups
    assert asked[groups:] == asked[:groups]  # nothing was timed twice
    with pytest.raises(OptionError, match="these differ: batch"):
        build_table(SPACE, "cpu", batch=2, plan=SHORT, journal=journal)
    with journal.open("ab") as stream:
        stream.write(b'{"pass": 0, "times": {"a": [NaN]}}\n')
    with pytest.raises(OptionError, match="cannot be read"):
        build_table(SPACE, "cpu", plan=SHORT, journal=journal)


def first_key(line: dict[str, Any], kind: str) -> str:
    return next(key for key in line["times"] if key.startswith(kind))


@pytest.mark.parametrize(
    ("change", "told"),
    [(lambda line: line["times"].update({first_key(line, "block"): [1.0]}), "1 numbers for"),
     (lambda line: line["times"].update({first_key(line, "block"): [1.0] * 9}), "9 numbers for"),
     (lambda line: line["times"].update({first_key(line, "block"): "12"}), "valid list"),
     (lambda line: line["times"].update({first_key(line, "block"): [1e308, 1e308]}), "less than or equal"),
     (lambda line: line["times"].update({first_key(line, "block"): [-1.0, 1.0]}), "greater than or equal"),
     (lambda line: line["times"].update({first_key(line, "block"): [True, 1.0]}), "valid number"),
     (lambda line: line["times"].update({"block zzz": [1.0, 1.0]}), "nothing of this build"),
     (lambda line: line.update({"pass": float("inf")}), "valid integer"), (lambda line: line.update({"pass": -1}), "greater than"),
     (lambda line: line.update(times=3), "valid dict"), (lambda line: line.update(more=3), "Extra")],
)  # fmt: skip
def test_a_damaged_journal_names_its_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: Any, told: str) -> None:
    planted(monkeypatch)
    journal = tmp_path / "t.journal"
    build_table(SPACE, "cpu", plan=SHORT, journal=journal)
    header, first, *rest = journal.read_text().splitlines()
    line = json.loads(first)
    change(line)
    journal.write_text("\n".join([header, json.dumps(line), *rest, ""]))
    with pytest.raises(OptionError, match=f"(?s)line 2 of .*{told}"):
        build_table(SPACE, "cpu", plan=SHORT, journal=journal)


def test_networks_that_take_no_time_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planted(monkeypatch)
    build_table(SPACE, "cpu", plan=SHORT, journal=tmp_path / "t.journal")
    lines = [json.loads(line) for line in (tmp_path / "t.journal").read_text().splitlines()]
    lines[-1]["times"] = {key: [0.0] for key in lines[-1]["times"]}
    (tmp_path / "t.journal").write_text("\n".join([*map(json.dumps, lines), ""]))
    with pytest.raises(MeasureError, match="a network of 0 s"):
        build_table(SPACE, "cpu", plan=SHORT, journal=tmp_path / "t.journal")


@pytest.mark.parametrize("given", [{"dtype": "bfloat16"}, {"mode": "graph"}, {"threads": 9}])
def test_what_an_estimate_does_not_take_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(given))} for eyeriss"):
        build_table(SPACE, "eyeriss", **given)


def test_real_clocks_give_a_whole_table(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    table = build_table(SPACE, "cpu", threads=1, plan=SHORT, journal=tmp_path / "j")
    assert torch.get_num_threads() == threads and table.threads == 1 and table.method == "measured"
    assert set(table.entries) == {block.key for block in SPACE.all_blocks()} and table.correction.nets == 6
    for entry in table.entries.values():
        assert entry.alone_s is not None and 1e-8 < entry.alone_s < 1 and entry.cold_s is not None and 1e-8 < entry.cold_s < 1
    assert LatencyTable.load(table.save(tmp_path / "t.json")) == table
    conv = next(block for block in SPACE.all_blocks() if block.key.startswith("conv3x3"))
    assert table.entries[conv.key].flops > 2 * 2 * 2 * 9 * 64
    assert check_table(table, nets=2).nets == 2
    with pytest.raises(MeasureError, match="this machine is"):
        check_table(table.model_copy(update={"machine": "another"}), nets=2)


def test_an_estimated_table_adds_up_to_the_estimate_of_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = build_table(SPACE, "rram-64", plan=SHORT, journal=tmp_path / "j")
    assert table.method == "estimated" and table.errors is not None and table.errors.worst < 0.02
    assert table.errors.spearman > 0.99 and check_table(table, nets=2).worst < 0.02
    assert all(entry.energy_j is not None for entry in table.entries.values())
    monkeypatch.setattr(estimated, "estimator", lambda *_: None)  # blocks come from the journal, none is estimated twice
    monkeypatch.setattr(estimated, "estimated_errors", lambda *_: table.errors)
    assert build_table(SPACE, "rram-64", plan=SHORT, journal=tmp_path / "j") == table


@pytest.mark.parametrize(
    ("given", "match"),
    [({"mode": "graph"}, "graphs are CUDA's"), ({"mode": "fast"}, "mode 'fast'"), ({"dtype": "int8"}, "dtype 'int8'"),
     ({"batch": 0}, "batch 0"), ({"batch": 65537}, "batch is 1 to 65,536"), ({"threads": 4097}, "threads are 1 to 4,096")],
)  # fmt: skip
def test_what_cannot_be_measured_is_told_before_anything_is(given: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        build_table(SPACE, "cpu", **given)
    with pytest.raises(OptionError, match="calibration"):
        Plan(calibration=3)
    few = load_space("nb201", channels=2, cells=1, image=8, ops=("none", "skip"))
    with pytest.raises(OptionError, match="random draws found"):
        build_table(few, "cpu", plan=Plan(check=60))


@pytest.mark.parametrize(("target", "given", "mode"), [("cpu", None, "eager"), ("cuda:0", None, "graph"), ("cuda", "eager", "eager")])
def test_graphs_are_usual_on_cuda(monkeypatch: pytest.MonkeyPatch, target: str, given: str | None, mode: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen: list[Conditions] = []

    def stop(_: object, conditions: Conditions) -> None:
        seen.append(conditions)
        raise InterruptedError

    monkeypatch.setattr(build_module, "identity", stop)
    with pytest.raises(InterruptedError):
        build_table(SPACE, target, mode=given, plan=SHORT)
    assert seen[0].mode == mode


def test_no_cuda_is_told_where_there_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    with pytest.raises(MeasureError, match="no CUDA device"):
        build_table(SPACE, "cuda")
    with under(Conditions(threads=1)):
        assert torch.is_inference_mode_enabled()


@pytest.mark.skipif(not FULL, reason="twenty kills take minutes: RIDGELINE_FULL=1")
def test_killed_at_random_times_it_ends_with_a_whole_table(tmp_path: Path) -> None:
    out, random = tmp_path / "t.json", np.random.default_rng(0)
    command = [sys.executable, "-m", "ridgeline.cli.main", "lut", "build", "--space", "nb201", "--out", str(out), "--threads", "1",
               "--set", "channels=4", "--set", "cells=2", "--set", "image=16"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    for _ in range(20):
        started = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(float(random.uniform(1.5, 6.0)))
        started.send_signal(signal.SIGKILL)
        started.wait()
        if out.exists():
            LatencyTable.load(out)
            out.unlink()
    assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0
    assert json.loads(out.read_text())["errors"]["nets"] == 12 and not out.with_name("t.json.journal").exists()
