"""The table's file and its predictions: sums that can be done by hand, and files that are not tables."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline.core.errors import OptionError
from ridgeline.search.latency import Entry, LatencyTable
from ridgeline.search.latency import table as table_module
from ridgeline.search.latency.predict import cost_matrix
from ridgeline.search.spaces.space import load_space
from tests.search.latency.tiny import made_table, tiny_space

SPACE = tiny_space()
TABLE = made_table(SPACE)
NETS = [SPACE.random(np.random.default_rng(seed)) for seed in range(8)]


def test_a_network_takes_the_sum_of_its_blocks_and_the_overhead() -> None:
    for point in NETS:
        seconds, joules, flops = 5e-6, 0.0, 0
        for block in SPACE.blocks(point):
            for _ in range(block.count):
                seconds += TABLE.entries[block.key].seconds
                joules += TABLE.entries[block.key].seconds * 1e-6
                flops += TABLE.entries[block.key].flops
        assert TABLE.predict(SPACE, point) == pytest.approx(seconds, rel=1e-12)
        assert TABLE.energy_j(SPACE, point) == pytest.approx(joules, rel=1e-9)
        assert TABLE.flops(SPACE, point) == flops


def test_a_limit_keeps_what_is_at_or_below_it() -> None:
    limit_s = sorted(TABLE.predict(SPACE, point) for point in NETS)[3]
    kept = TABLE.within(SPACE, NETS, limit_s)
    assert kept == [point for point in NETS if TABLE.predict(SPACE, point) <= limit_s] and 4 <= len(kept) < len(NETS)


def test_the_file_comes_back_as_it_was(tmp_path: Path) -> None:
    assert LatencyTable.load(TABLE.save(tmp_path / "t.json")) == TABLE
    assert json.loads((tmp_path / "t.json").read_text())["schema"] == 1


@pytest.mark.parametrize("name", ["nb201", "darts"])
def test_a_choice_on_an_edge_costs_what_it_adds_to_the_network(name: str) -> None:
    space = load_space(name, channels=4, image=8, cells=3)
    table = made_table(space)
    matrix = table.cost_matrix(space)
    assert matrix.shape == {"nb201": (6, 5), "darts": (28, 8)}[name]
    assert (matrix[:, list(space.ops).index("none")] == 0).all()  # type: ignore[attr-defined]
    if name == "nb201":  # one edge from input to output, all else none: no sums, so the difference is the op's alone
        for op in (0, 2, 3, 4):
            alone, skip = (1, 1, op, 1, 1, 1), (1, 1, 0, 1, 1, 1)
            assert matrix[2, op] - matrix[2, 0] == pytest.approx(table.predict(space, alone) - table.predict(space, skip), rel=1e-9)
    assert cost_matrix(table, space, "energy_j") == pytest.approx(matrix * 1e-6, rel=1e-9)


def test_a_table_of_other_blocks_is_refused() -> None:
    wider = load_space("nb201", channels=4, cells=1, image=8, ops=("skip", "none", "conv3x3"))
    with pytest.raises(OptionError, match="is not in the table"):
        TABLE.predict(wider, NETS[0])
    other = load_space("darts", channels=2, cells=3, image=8)
    with pytest.raises(OptionError, match="a table of space 'nb201'"):
        TABLE.predict(other, other.random(np.random.default_rng(0)))
    with pytest.raises(OptionError, match="a table of space 'nb201'"):
        TABLE.cost_matrix(other)
    macro = load_space("macro")
    with pytest.raises(OptionError, match="no edges"):
        TABLE.cost_matrix(macro)
    silent = made_table(SPACE, entries={key: Entry(seconds=1.0) for key in TABLE.entries})
    with pytest.raises(OptionError, match="no energy"):
        silent.energy_j(SPACE, NETS[0])
    with pytest.raises(OptionError, match="no energy_j"):
        cost_matrix(silent, SPACE, "energy_j")


def changed(**changes: Any) -> bytes:
    return json.dumps({**json.loads(TABLE.model_dump_json(by_alias=True)), **changes}).encode()


HOSTILE = {
    "empty": b"", "pickle": pickle.dumps({"schema": 1}), "list": b"[]", "deep": b"[" * 100_000, "no table": b"{}",
    "cut": changed()[:-40], "other schema": changed(schema=2), "unknown field": changed(run="rm"), "negative": changed(overhead_s=-1.0),
    "not finite": changed(overhead_s=float("nan")), "infinite": changed(overhead_s=float("inf")), "a word": changed(overhead_s="0"),
    "no entries": changed(entries={}), "an entry below 0": changed(entries={"a": {"seconds": -1}}),
    "an entry of another kind": changed(entries={"a": 1}), "batch 0": changed(batch=0), "no object": changed(settings=[1]),
    "a key without end": changed(entries={"k" * 501: {"seconds": 1.0}}), "a time beyond any": changed(entries={"a": {"seconds": 1e308}}),
    "a count beyond any": changed(entries={"a": {"seconds": 1, "flops": 10**31}}),
    "measured on what is not here": changed(method="measured", target="eyeriss"), "not text": b"\xff\xfe" + changed(),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_table_is_told_so(name: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(HOSTILE[name])
    with pytest.raises(OptionError, match=r"t\.json is no latency table"):
        LatencyTable.load(tmp_path / "t.json")


def test_a_missing_or_too_large_file_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(OptionError, match="cannot read"):
            LatencyTable.load(path)
    monkeypatch.setattr(table_module, "MOST_BYTES", 100)
    with pytest.raises(OptionError, match="larger than"):
        LatencyTable.load(TABLE.save(tmp_path / "t.json"))
