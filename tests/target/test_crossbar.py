"""Crossbar chips as targets: the catalog has its figures, each kind goes to its own commands, and an impossible chip names its field.

catalog chip ──breakages──> (what was done, file data, field the error must name) ──load_file──> TargetSpecError
"""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Iterator
from importlib import resources
from math import log, sqrt
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import OptionError, RidgelineError, TargetSpecError
from ridgeline.core.toml_out import dump_toml
from ridgeline.report.catalog import render_crossbars
from ridgeline.target.crossbar import CrossbarSpec
from ridgeline.target.load import as_processor, catalog_names, check_processor, load_array, load_crossbar, load_file, load_target
from tests.support import ROOT

CHIPS = ["crossbar-ideal", "pcm-128", "rram-128", "rram-64"]
Breakage = tuple[str, dict[str, Any], str]


def catalog_data(name: str) -> dict[str, Any]:
    return tomllib.loads((resources.files("ridgeline.target") / "catalog" / f"{name}.toml").read_text(encoding="utf-8"))


def loaded(folder: Path, data: dict[str, Any]) -> CrossbarSpec:
    path = folder / "mine.toml"
    path.write_text(dump_toml(data), encoding="utf-8")
    spec = load_file(path)
    assert isinstance(spec, CrossbarSpec)
    return spec


# The catalog


def test_the_catalog_knows_its_chips() -> None:
    assert catalog_names("crossbar") == CHIPS
    assert [load_crossbar(name).ideal for name in CHIPS] == [True, False, False, False]


def test_the_ideal_chip_is_the_usual_configuration() -> None:
    chip = load_crossbar("crossbar-ideal")
    assert chip.operands.x_slices == chip.operands.w_slices == (1, 1, 2, 2) and (chip.x_bits, chip.w_bits) == (6, 6)
    assert (chip.array.rows, chip.array.columns, chip.dac.levels, chip.cell.levels, chip.adc_levels) == (64, 64, 4, 4, (4096,) * 4)
    assert chip.cell.read_sigmas == chip.cell.write_sigmas == (0.0,) * 4 and (chip.adc.range, chip.adc.clip) == ("full", False)


def test_pcm_has_its_models_figures() -> None:
    cell = load_crossbar("pcm-128").cell
    shares = [1 / 3, 2 / 3, 1]
    write = [(-1.1731 * g**2 + 1.965 * g + 0.2635) / (25 * g) for g in shares]
    read = [0.0088 / g**0.65 * sqrt(log((1 + 250e-9) / 500e-9)) for g in shares]
    assert cell.write_sigmas == pytest.approx([0, *write], rel=2e-3) and cell.read_sigmas == pytest.approx([0, *read], rel=2e-3)
    assert cell.high_s.value == pytest.approx(25e-6) and cell.drift_nu.value == 0.049


@pytest.mark.parametrize("name", CHIPS[1:])
def test_a_read_costs_what_ohm_says(name: str) -> None:
    """Digits evenly spread: 0 to 3 of two bits, 0 and 3 of one bit; of a pair one cell holds the digit and the other is low."""
    chip = load_crossbar(name)
    low, high = chip.cell.low_s.value, chip.cell.high_s.value
    squares = [sum((digit / (2**width - 1)) ** 2 for digit in range(2**width)) / 2**width for width in chip.operands.x_slices]
    mean_square = chip.dac.vread_v.value**2 * sum(squares) / len(squares)
    assert chip.operands.sign == "differential"
    power_w = chip.array.rows * chip.array.columns * ((low + high) / 2 + low) / 2 * mean_square
    assert chip.cost.array_read_j.value == pytest.approx(power_w * chip.cost.array_read_s.value, rel=0.02)


def test_one_value_or_one_each(tmp_path: Path) -> None:
    data = catalog_data("rram-64")
    data["adc"]["levels"] = [2, 16, 64, 4096]
    data["cell"]["read_sigma"] = [0.0, {"value": 0.01, "unit": "ratio", "source": "mine", "status": "measured"}, 0.02, 0.03]
    chip = loaded(tmp_path, data)
    assert chip.adc_levels == (2, 16, 64, 4096) and chip.cell.read_sigmas == (0.0, 0.01, 0.02, 0.03)
    assert chip.cell.write_sigmas == (0.05,) * 4
    assert loaded(tmp_path, chip.model_dump(exclude_none=True)) == chip


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("cell", "write_sigma", 0.1), ("cell", "read_sigma", [0, 0, 0, 0.1]), ("cell", "stuck_high", 0.1), ("cell", "stuck_low", 0.1),
        ("cell", "drift_nu", 0.1), ("cell", "drift_nu_sigma", 0.1), ("cell", "retention_s", 1e8), ("cell", "line_resistance_ohm", 1),
        ("dac", "noise_sigma", 0.1), ("adc", "noise_lsb", 0.1), ("adc", "offset_lsb", 0.1),
    ],
)  # fmt: skip
def test_each_non_ideality_makes_a_chip_not_ideal(tmp_path: Path, section: str, field: str, value: Any) -> None:
    data = catalog_data("crossbar-ideal")
    data[section][field] = value
    assert not loaded(tmp_path, data).ideal


def test_the_listing_and_the_commands_take_crossbars(capsys: pytest.CaptureFixture[str]) -> None:
    from ridgeline.cli.targets import list_targets, show

    text = render_crossbars([load_crossbar("pcm-128"), load_crossbar("rram-64").model_copy(update={"name": "[red]x\x1b"})])
    for words in ("128x128", "64x64", "differential", "1+2+2+2", "9.8 µS – 167 µS", "256", "[red]x�"):
        assert words in text, words
    list_targets(as_json=True)
    kinds = {row["name"]: row["kind"] for row in json.loads(capsys.readouterr().out)}
    assert {kinds[name] for name in CHIPS} == {"crossbar"} and kinds["eyeriss"] == "array"
    list_targets(as_json=False)
    assert all(name in capsys.readouterr().out for name in ("rram-64",))
    show("rram-64", as_json=False)
    shown = tomllib.loads(capsys.readouterr().out)
    assert shown["cell"]["high_s"]["status"] == "read" and shown["cost"]["adcs_per_array"] == 1


def test_a_crossbar_is_of_no_other_kind() -> None:
    for attempt in (lambda: check_processor("rram-64"), lambda: as_processor(load_target("rram-64"))):
        with pytest.raises(OptionError, match=r"rram-64 is a crossbar[\s\S]*ridgeline analyze"):
            attempt()
    with pytest.raises(OptionError, match="rram-64 is a crossbar"):
        load_array("rram-64")
    for name, kind in {"h200": "processor", "cpu": "processor", "eyeriss": "spatial array"}.items():
        with pytest.raises(OptionError, match=rf"{name} is a {kind}[\s\S]*rram-64"):
            load_crossbar(name)


def test_the_example_in_the_docs_loads(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "crossbar.md").read_text(encoding="utf-8")
    lines = page[page.index("    version = 1") :].splitlines()
    end = next(number for number, line in enumerate(lines) if line and not line.startswith("    "))
    chip = loaded(tmp_path, tomllib.loads("\n".join(line.removeprefix("    ") for line in lines[:end])))
    assert chip.ideal and chip.x_bits == 4


# Impossible chips


def with_field(data: dict[str, Any], section: str, field: str, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(data)
    data[section][field] = value
    return data


WHOLES = {("array", "rows"): 1, ("array", "columns"): 1, ("operands", "x_tile_rows"): 1, ("dac", "levels"): 2, ("cell", "levels"): 2,
          ("adc", "levels"): 2, ("cost", "adcs_per_array"): 1}  # fmt: skip
NUMBERS = [("dac", "vread_v"), ("dac", "noise_sigma"), ("adc", "noise_lsb"), ("adc", "offset_lsb")]
CELL = ("high_s", "low_s", "write_sigma", "read_sigma", "stuck_high", "stuck_low", "drift_nu", "drift_nu_sigma", "drift_time_s",
        "drift_from_s", "retention_s", "line_resistance_ohm")  # fmt: skip
NUMBERS += [("cell", name) for name in CELL]
PRICES = [f"{thing}_{what}" for thing in ("array_read", "dac_conversion", "adc_conversion", "shift_add") for what in "js"]
PRICES += ["buffer_bit_j", "static_w", *(f"{thing}_mm2" for thing in ("array", "dac", "adc", "shift_add", "buffer"))]
NUMBERS += [("cost", name) for name in PRICES]
ABOVE_ZERO = ("vread_v", "high_s", "drift_from_s", "retention_s")
RATES = ("stuck_high", "stuck_low", "drift_nu")
SETTINGS = [("operands", "format"), ("operands", "sign"), ("adc", "range"), ("adc", "kind")]


def single_breakages(data: dict[str, Any]) -> Iterator[Breakage]:
    """One field wrong by itself."""
    for (section, field), least in WHOLES.items():
        for wrong in (least - 1, -1, 2**70, 1.5, float("nan"), "64", True):
            yield f"= {wrong}", with_field(data, section, field, wrong), f"{section}.{field}"
    for section, field in NUMBERS:
        more = ((0,) if field in ABOVE_ZERO else ()) + ((1.01,) if field in RATES else ())
        for wrong in (-1e-3, float("nan"), float("inf"), 1e300, "much", True, {"value": 1, "unit": "parsec"}, *more):
            yield f"= {wrong}", with_field(data, section, field, wrong), f"{section}.{field}"
    for section, field in SETTINGS:
        for wrong in ("sideways", 4):
            yield f"= {wrong}", with_field(data, section, field, wrong), f"{section}.{field}"
    for section, field in (("array", "rowz"), ("cell", "lowest_s"), ("adc", "bits"), ("cost", "adc_j")):
        yield "no such field", with_field(data, section, field, 1), f"{section}.{field}"
    for section in ("array", "operands", "dac", "cell", "adc"):
        yield "dropped", {name: value for name, value in data.items() if name != section}, section
    yield "clip", with_field(data, "adc", "clip", "yes"), "adc.clip"


def joint_breakages(data: dict[str, Any]) -> Iterator[Breakage]:
    """Fields that are fine alone and wrong together."""
    for side in "xw":
        slices, bits, granularity = f"{side}_slices", f"{side}_bits", f"{side}_granularity"
        free = copy.deepcopy(data)
        free["operands"].pop(bits)
        for wrong in ([2, 2, 2, 2], [1], [4, 1], [], [1, 0, 2], [1, -1], [1, 17], [1, *[2] * 16], "1,1,2", [1, 1.5], [1, True]):
            yield f"{slices} {wrong}", with_field(free, "operands", slices, wrong), f"operands.{slices}"
        for total in (1, 7, 9, 32):
            yield f"slices do not sum to {total}", with_field(data, "operands", bits, total), f"operands.{bits}"
        for wrong in ("per-cell", [1], [0, 64], [64, -1], [1, 2, 3], [1.5, 2], 64):
            yield f"{granularity} {wrong}", with_field(data, "operands", granularity, wrong), f"operands.{granularity}"
    for levels in (2, 3):
        yield f"{levels} levels for 2 bits", with_field(data, "cell", "levels", levels), "cell.levels"
    for low in (166.7e-6, 1.0):
        yield "low >= high", with_field(data, "cell", "low_s", low), "cell.low_s"
    for field in ("write_sigma", "read_sigma"):
        for wrong in ([0.1] * 3, [0.1] * 5, [], [0, 0, 0, -0.1], [0, 0, 0, {"value": 0.1, "status": "guessed"}]):
            yield f"{field} {wrong}", with_field(data, "cell", field, wrong), f"cell.{field}"
    for wrong_levels in ([256] * 4, [256] * 6, [256, 256, 256, 256, 1], [256, 0, 256, 256, 256], []):
        yield f"ADC {wrong_levels}", with_field(data, "adc", "levels", wrong_levels), "adc.levels"
    yield "more stuck than there are", with_field(with_field(data, "cell", "stuck_high", 0.6), "cell", "stuck_low", 0.6), "cell.stuck_low"


def test_only_a_twos_complement_needs_a_sign_slice(tmp_path: Path) -> None:
    """Of an offset chip the inputs, of a differential one neither operand."""
    data = catalog_data("rram-64")
    data["operands"] = {"x_slices": [1, 1, 2], "w_slices": [2, 2], "sign": "offset"}
    assert loaded(tmp_path, data).operands.w_slices == (2, 2)
    without_sign = with_field(data, "operands", "x_slices", [2, 2])
    with pytest.raises(TargetSpecError, match=r'operands.x_slices: with sign = "offset"'):
        loaded(tmp_path, without_sign)
    assert loaded(tmp_path, with_field(without_sign, "operands", "sign", "differential")).operands.x_slices == (2, 2)


def with_a_sign_slice() -> dict[str, Any]:
    """The chip of most fields, in two's complement: what its slices must be is checked too."""
    data = catalog_data("rram-64")
    slices = [1, 1, 2, 2, 2]
    data["operands"] |= {"x_slices": slices, "w_slices": slices, "x_bits": 8, "w_bits": 8, "sign": "slice"}
    return data


def test_impossible_chips_name_their_field(tmp_path: Path) -> None:
    data = with_a_sign_slice()
    breakages = [*single_breakages(data), *joint_breakages(data)]
    assert len(breakages) >= 200
    for what, broken, field in breakages:
        with pytest.raises(TargetSpecError) as caught:
            loaded(tmp_path, broken)
            pytest.fail(f"{field} {what} was accepted")
        assert field in f"{caught.value.what} {caught.value.why}", (what, field, str(caught.value))
        assert "rram-64" in caught.value.do


def test_the_breakages_start_from_a_good_chip(tmp_path: Path) -> None:
    assert loaded(tmp_path, with_a_sign_slice()).operands.x_slices == (1, 1, 2, 2, 2)
    assert loaded(tmp_path, catalog_data("rram-64")) == load_target("rram-64")


def test_a_magnitude_has_a_sign_beside_its_bits(tmp_path: Path) -> None:
    for name in CHIPS[1:]:
        chip = load_crossbar(name)
        assert chip.operands.sign == "differential" and chip.operands.x_bits == chip.operands.w_bits == 7
        assert (chip.x_bits, chip.w_bits) == (8, 8)
    chip = loaded(tmp_path, with_a_sign_slice())
    assert chip.x_bits == chip.operands.x_bits == 8


@given(section=st.sampled_from(["array", "operands", "dac", "cell", "adc", "cost", "host"]), data=st.data())
def test_any_value_anywhere_loads_or_meets_our_own_error(section: str, data: st.DataObject) -> None:
    from ridgeline.core.spec import parse_spec

    known = CrossbarSpec.model_fields[section].annotation
    assert known is not None and hasattr(known, "model_fields")
    field = data.draw(st.sampled_from(sorted(known.model_fields)))
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
    value = data.draw(
        st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3))
    )
    broken = copy.deepcopy(catalog_data("rram-64"))
    broken.setdefault(section, {})[field] = value
    try:
        parse_spec(CrossbarSpec, broken, "mine.toml")
    except RidgelineError as error:
        assert error.what and error.why and error.do
