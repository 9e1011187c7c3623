"""Target files: every bad one meets an error that names the field; every good one survives a round trip."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import RidgelineError, TargetSpecError, UnknownNameError
from ridgeline.core.toml_out import dump_toml
from ridgeline.target.load import catalog_names, load_file, load_target

GOOD = """
version = 1
kind = "processor"
name = "mine"
[units.alu.peak_flops]
float32 = 2e12
[memories.dram]
bandwidth_bps = { value = 1, unit = "TB/s", source = "datasheet", status = "read" }
capacity_bytes = 80e9
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_plain_file_is_in_base_units(tmp_path: Path) -> None:
    spec = load_file(write(tmp_path, GOOD))
    bandwidth = spec.memories["dram"].bandwidth_bps
    assert (bandwidth.value, bandwidth.unit, bandwidth.status) == (1e12, "B/s", "read")
    assert spec.units["alu"].peak_flops["float32"].status == "assumed"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("capacity_bytes = 80e9", "capacity_bytes = -8", "memories.dram.capacity_bytes = -8"),
        ("value = 1,", "value = -1,", "memories.dram.bandwidth_bps"),
        ("capacity_bytes = 80e9", "capacity_bytes = 80e9\ncapacity_bytes = 1", "not valid TOML"),
        ("capacity_bytes = 80e9", "capacity_byte = 80e9", "did you mean capacity_bytes"),
        ("capacity_bytes = 80e9", "", "memories.dram.capacity_bytes"),
        ("float32 = 2e12", "float23 = 2e12", "float23"),
        ("float32 = 2e12", "float32 = nan", "finite"),
        ("float32 = 2e12", 'float32 = "fast"', "peak_flops.float32"),
        ('unit = "TB/s"', 'unit = "parsec"', "parsec"),
        ('status = "read"', 'status = "guessed"', "status"),
        ('kind = "processor"', 'kind = "toaster"', "toaster"),
        ("version = 1", "version = 2", "version"),
        ('name = "mine"', 'name = "../../etc"', "name"),
        ("[memories.dram]", "[memories.dram", "not valid TOML"),
        ("[units.alu.peak_flops]\nfloat32 = 2e12", "[units]", "units"),
        ("capacity_bytes = 80e9", "capacity_bytes = 80e9\n[memories.far]\nbandwidth_bps = 1e9\ncapacity_bytes = 1e3", "nearest first"),
        ("capacity_bytes = 80e9", "capacity_bytes = 80e9\n[power]\nlimit_w = 10\nidle_w = 20", "limit_w"),
        ("capacity_bytes = 80e9", "capacity_bytes = 80e9\n[links.moon]\nlatency_s = 1\nbandwidth_bps = 1", "moon"),
    ],
)
def test_a_bad_file_names_what_is_wrong(tmp_path: Path, old: str, new: str, words: str) -> None:
    with pytest.raises(TargetSpecError) as caught:
        load_file(write(tmp_path, GOOD.replace(old, new)))
    assert words in str(caught.value) and "do:" in str(caught.value)


def test_missing_binary_and_huge_files(tmp_path: Path) -> None:
    with pytest.raises(TargetSpecError, match="no such file"):
        load_target(str(tmp_path / "none.toml"))
    with pytest.raises(TargetSpecError, match="folder"):
        load_target(str(tmp_path) + "/")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TargetSpecError, match="not valid TOML"):
        load_target(str(tmp_path / "binary.toml"))
    (tmp_path / "huge.toml").write_bytes(b"#" * (5 << 20))
    with pytest.raises(TargetSpecError, match="too large"):
        load_target(str(tmp_path / "huge.toml"))


def test_unknown_target_shows_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="h200"):
        load_target("h20")


@given(st.integers(0, len(GOOD)), st.text(max_size=4))
def test_any_damage_loads_or_meets_our_own_error(position: int, junk: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.toml"
        path.write_text(GOOD[:position] + junk + GOOD[position + 1 :], encoding="utf-8", errors="replace")
        try:
            load_file(path)
        except RidgelineError as error:
            assert error.what and error.why and error.do


@pytest.mark.parametrize("name", catalog_names())
def test_catalog_constants_have_sources_and_round_trip(name: str, tmp_path: Path) -> None:
    spec = load_target(name)
    assert spec.name == name and spec.description
    constants = [c for c in _constants(spec.model_dump()) if c["source"] == "given without a source"]
    assert not constants
    assert load_file(write(tmp_path, dump_toml(spec.model_dump(exclude_none=True)))) == spec


def _constants(data: Any) -> list[dict[str, Any]]:
    if isinstance(data, dict):
        if set(data) == {"value", "unit", "source", "status"}:
            return [data]
        return [found for value in data.values() for found in _constants(value)]
    if isinstance(data, list | tuple):
        return [found for value in data for found in _constants(value)]
    return []


def test_the_teaching_npu_has_its_figures() -> None:
    npu = load_target("npu-256")
    assert npu.peak("linear", "int8") == ("matrix", "int8", 512e12)
    assert npu.peak("linear", "float32") == ("core", "float32", 64e12)
    assert npu.units["core"].peak_flops["int8"].value == 256e12 and npu.units["core"].peak_flops["float16"].value == 128e12
    assert npu.peak("pointwise", "float16")[2] == 32e12
    assert {k: (m.bandwidth_bps.value, m.capacity_bytes.value) for k, m in npu.memories.items()} == {
        "l1": (8192e9, 1e6), "l2": (4096e9, 8e6), "hbm": (1024e9, 32e9),
    }  # fmt: skip
    assert npu.power is not None and npu.power.limit_w.value == 400


scalars = st.one_of(st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=8))
keys = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=6)
tables = st.recursive(
    st.dictionaries(keys, st.one_of(scalars, st.lists(scalars, max_size=3)), max_size=4),
    lambda inner: st.dictionaries(keys, st.one_of(scalars, inner, st.lists(inner, min_size=1, max_size=2)), max_size=4),
    max_leaves=8,
)


@given(tables)
def test_written_toml_reads_back_the_same(data: dict[str, Any]) -> None:
    assert tomllib.loads(dump_toml(data)) == data
