"""Design spaces: every combination once, errors that name the field, defaults that fit any base."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.core.errors import OptionError, TargetSpecError
from ridgeline.estimate.spatial.codesign.chip import build
from ridgeline.estimate.spatial.codesign.rules import Rules
from ridgeline.estimate.spatial.codesign.space import (
    PARAMETERS,
    Choice,
    DesignSpace,
    check_space,
    choice_from_json,
    default_space,
    load_space,
    parts_of,
)
from ridgeline.target.array import Cores, OperandBits
from ridgeline.target.load import catalog_names, load_array
from tests.estimate.spatial.codesign.nets import BASE, SPACE
from tests.support import ROOT

FULL = """
version = 1
rows = [2, 4]
columns = [8]
register_bits = [512, { W = 1024, I = 128, O = 256 }]
buffer_bits = [65536]
bandwidth_bits = [32, 64]
noc_bits = [128]
precision = [{ W = 8, I = 8, O = 24, F = 8 }]
cores = [{ count = 1 }, { count = 2, use = "pipeline" }]
batch = [1, 4]
dataflow = ["ws", "any"]
fusion = [true]
[rules]
sram_energy_exponent = 0.4
interface_mm2_per_gbps = { value = 0.02, unit = "mm2", source = "a datasheet", status = "read" }
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "space.toml"
    path.write_text(text)
    return path


def test_a_choice_has_every_parameter_of_a_space() -> None:
    assert list(PARAMETERS) == [name for name in DesignSpace.model_fields if name not in ("version", "rules")]


def test_every_combination_once() -> None:
    choices = [SPACE.choice(SPACE.picks(number)) for number in range(SPACE.size)]
    assert SPACE.size == len({choice.key for choice in choices}) == len({SPACE.picks(n) for n in range(SPACE.size)}) == 200
    assert {(c.rows, c.columns) for c in choices} == {(1, 1), (1, 2), (2, 1), (2, 2)} and all(c.noc_bits is None for c in choices)
    assert choices[0] == Choice(rows=1, columns=1, buffer_bits=1024, bandwidth_bits=8) and choices[1].fusion is False


def test_full_file(tmp_path: Path) -> None:
    space = load_space(written(tmp_path, FULL))
    assert space.size == 2 * 2 * 2 * 2 * 2 * 2 and space.rules.sram_energy_exponent.value == 0.4
    assert space.rules.interface_mm2_per_gbps.status == "read"
    choice = space.choice((1, 0, 1, 0, 0, 1, 0, 0, 1, 1, 0, 0))
    assert choice.rows == 4 and choice.bandwidth_bits == 64 and choice.cores == Cores(count=2, use="pipeline") and choice.batch == 4
    assert choice.register_bits is not None and choice.register_bits.model_dump() == {"W": 1024, "I": 128, "O": 256}
    assert space.choice((0,) * 12).register_bits.model_dump() == {"W": 512, "I": 512, "O": 512}
    assert choice_from_json(choice.to_json()) == choice and choice_from_json(Choice().to_json()) == Choice()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rows = [0]", "rows.0"),
        ("rows = [2.0]", "rows.0"),
        ("row = [2]", "did you mean rows"),
        ("rows = [2, 2]", "listed twice"),
        ("batch = []", "batch"),
        ('dataflow = ["nlr"]', "dataflow.0"),
        ("version = 2", "version"),
        ("register_bits = [{ W = 8 }]", "register_bits.0"),
        ("precision = [{ W = 0 }]", "precision.0.W"),
        ("cores = [{ count = 2, use = 'ring' }]", "cores.0.use"),
        ("[rules]\nsram_fixed_area = 2", "sram_fixed_area"),
        ("rows = [", "not valid TOML"),
    ],
)
def test_bad_files_name_the_field(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(TargetSpecError) as error:
        load_space(written(tmp_path, text))
    assert words in str(error.value) and "docs/codesign.md" in error.value.do


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TargetSpecError, match="no such file"):
        load_space(tmp_path / "none.toml")


def test_a_parameter_without_anything_to_apply_to() -> None:
    with pytest.raises(OptionError, match="local_bits") as error:
        check_space(DesignSpace(local_bits=(8,)), BASE)
    assert "no memory behind" in error.value.why
    with pytest.raises(OptionError, match="dataflow 'rs'"):
        check_space(DesignSpace(dataflow=("rs",)), BASE.model_copy(update={"dataflows": ("ws",)}))


def test_parts_of_the_catalog() -> None:
    assert parts_of(load_array("array-16")).local == ("pe_buffer",)
    assert parts_of(load_array("eyeriss")).registers == ("filter_spad", "ifmap_spad", "psum_spad")
    assert parts_of(load_array("tpu-v1")).buffers == ("unified_buffer",)  # accumulators serve a column, and stay as they are


@pytest.mark.parametrize("name", catalog_names("array"))
def test_default_space_of_every_base(name: str) -> None:
    base = load_array(name)
    space = default_space(base)
    check_space(space, base)
    assert space.size >= 100 and not space.precision
    ends = [(0,) * len(PARAMETERS), tuple(length - 1 for length in space.lengths)]
    small, large = (build(base, space.choice(picks), space.rules) for picks in ends)
    assert small.area_mm2 < base.area_mm2 * 1.5 < large.area_mm2 and small.pes * 4 <= base.pes <= large.pes // 4
    assert base.bits == small.bits == OperandBits(**large.bits.model_dump())


def test_the_page_shows_a_design_space_that_loads(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "codesign.md").read_text()
    start = page.index("    version = 1")
    text = "\n".join(line[4:] for line in page[start : page.index("What fewer bits")].splitlines())
    space = load_space(written(tmp_path, text))
    assert space.size == 3 * 2 * 2 * 2 * 2 * 2 * 3 * 2 * 2 and space.rules.sram_energy_exponent.status == "measured"
    for name in (*PARAMETERS, *Rules.model_fields):
        assert f"`{name}`" in page or f"{name} = " in page, name
