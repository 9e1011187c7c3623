"""Spatial arrays as targets: the catalog has its figures, each kind goes to its own commands, and a broken file names its field.

catalog array ──breakages──> (what was done, file text, field the error must name) ──load_file──> TargetSpecError
"""

from __future__ import annotations

import copy
import json
import re
import textwrap
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import OptionError, RidgelineError, TargetSpecError
from ridgeline.core.toml_out import dump_toml
from ridgeline.report.catalog import render_arrays
from ridgeline.target.array import DIMENSIONS, SpatialArraySpec
from ridgeline.target.load import as_processor, catalog_names, check_processor, load_array, load_file, load_processor, load_target
from tests.support import FULL, ROOT

ARRAYS = ["array-16", "eyeriss", "eyeriss-like", "tpu-like", "tpu-v1"]
Breakage = tuple[str, str, str]


def catalog_text(name: str) -> str:
    return (resources.files("ridgeline.target") / "catalog" / f"{name}.toml").read_text(encoding="utf-8")


def loaded(folder: Path, text: str) -> SpatialArraySpec:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    spec = load_file(path)
    assert isinstance(spec, SpatialArraySpec)
    return spec


# The catalog


def test_the_catalog_knows_its_kinds() -> None:
    assert catalog_names("array") == ARRAYS
    processors = catalog_names("processor")
    assert {*processors, *ARRAYS, *catalog_names("crossbar")} == set(catalog_names()) and "h200" in processors


def held_bytes(spec: SpatialArraySpec) -> dict[str, float]:
    return {name: memory.capacity_bits.value / 8 * spec.instances(name) for name, memory in spec.memories.items()}


def test_eyeriss_has_the_chips_figures() -> None:
    chip = load_array("eyeriss")
    assert (chip.axes, chip.pes, chip.clock_hz.value) == ({"rows": 12, "columns": 14}, 168, 200e6)
    words = {name: memory.capacity_bits.value / 16 for name, memory in chip.memories.items()}
    assert [words[spad] for spad in ("filter_spad", "ifmap_spad", "psum_spad")] == [224, 12, 24]
    assert held_bytes(chip)["global_buffer"] + held_bytes(chip)["filter_buffer"] == 108 * 1024
    assert chip.ladder("W") == ["filter_spad", "filter_buffer", "dram"] and chip.ladder("O") == ["psum_spad", "global_buffer", "dram"]
    costs = {name: (m.read_pj.value, m.write_pj.value, m.access_bits) for name, m in chip.memories.items()}
    assert costs == {
        "filter_spad": (1, 1, 16), "ifmap_spad": (1, 1, 16), "psum_spad": (1, 1, 16), "global_buffer": (6, 6, 16),
        "filter_buffer": (6, 6, 16), "dram": (200, 200, 16),
    }  # fmt: skip
    assert (chip.mac.energy_pj.value, chip.noc.hop_pj.value, chip.noc.hop_bits) == (1, 2, 16)
    buses = {("dram", "W", "rd_down"): 64, ("global_buffer", "I", "rd_down"): 16, ("global_buffer", "O", "rd_down"): 64,
             ("global_buffer", "O", "wr_up"): 64}  # fmt: skip
    for (name, operand, direction), bits in buses.items():
        memory = chip.memories[name]
        assert memory.ports[memory.port_of(operand, direction)].bits_per_cycle == bits
    assert chip.area_mm2 == pytest.approx(3.5 * 3.5, rel=1e-3)


def test_tpu_v1_has_its_figures() -> None:
    tpu = load_array("tpu-v1")
    assert (tpu.pes, tpu.clock_hz.value, tpu.systolic, tpu.dataflows) == (65536, 700e6, True, ("ws",))
    assert 2 * tpu.pes * tpu.clock_hz.value == pytest.approx(92e12, rel=0.01)
    assert tpu.bits.model_dump() == {"W": 8, "I": 8, "O": 32, "F": 8}
    held = held_bytes(tpu)
    assert held["unified_buffer"] == 24 << 20 and held["accumulators"] == 4 << 20 and held["weight_register"] == 2 * 65536
    assert tpu.memories["dram"].ports["weights"].bits_per_cycle / 8 * 700e6 == pytest.approx(34e9, rel=0.002)
    assert tpu.memories["unified_buffer"].ports["to_array"].bits_per_cycle / 8 * 700e6 / 2**30 == pytest.approx(167, rel=0.01)
    assert tpu.area_mm2 < 331


def test_tpu_v1_draws_what_the_card_draws() -> None:
    tpu = load_array("tpu-v1")
    each_cycle_pj = tpu.pes * (tpu.mac.energy_pj.value + 8 * tpu.memories["weight_register"].energy_per_bit_pj("rd_down"))
    each_cycle_pj += tpu.pes * (8 + 32) / tpu.noc.hop_bits * tpu.noc.hop_pj.value  # an input and a partial sum pass every PE
    each_cycle_pj += 256 * 8 * tpu.memories["unified_buffer"].energy_per_bit_pj("rd_down")
    each_cycle_pj += 256 * 32 * sum(tpu.memories["accumulators"].energy_per_bit_pj(way) for way in ("rd_down", "wr_up"))
    assert tpu.static_w == pytest.approx(28, rel=0.02)
    assert tpu.static_w + each_cycle_pj * 1e-12 * tpu.clock_hz.value == pytest.approx(40, rel=0.02)


def test_the_teaching_array_has_its_figures() -> None:
    array = load_array("array-16")
    assert (list(array.axes.values()), array.clock_hz.value) == ([16, 16], 1e9)
    one = {name: memory.capacity_bits.value / 8 for name, memory in array.memories.items()}
    assert one == {"register_file": 2 << 10, "pe_buffer": 8 << 10, "global_buffer": 512 << 10, "dram": 16e9}
    assert [m.read_pj.value for m in array.memories.values()] == [m.write_pj.value for m in array.memories.values()] == [0.1, 0.5, 5, 200]
    assert all(m.access_bits == 16 and set(m.operands) == {"W", "I", "O"} for m in array.memories.values())
    assert (array.noc.hop_pj.value, array.instances("pe_buffer"), array.instances("global_buffer")) == (0.3, 256, 1)


def test_the_listing_shows_pes_clock_memories_and_area() -> None:
    text = render_arrays([load_array("eyeriss"), load_array("tpu-v1").model_copy(update={"name": "[red]x\x1b"})])
    for words in ("12x14", "200 MHz", "33.6 GMAC/s", "448 B x168", "102 kB", "12.3 mm²", "256x256", "45.9 TMAC/s", "[red]x�"):
        assert words in text, words


def test_targets_list_and_show_take_arrays(capsys: pytest.CaptureFixture[str]) -> None:
    from ridgeline.cli.targets import list_targets, show

    list_targets(as_json=True)
    kinds = {row["name"]: row["kind"] for row in json.loads(capsys.readouterr().out)}
    assert {kinds[name] for name in ARRAYS} == {"array"} and kinds["h200"] == kinds["cpu"] == "processor"
    list_targets(as_json=False)
    listed = capsys.readouterr().out
    assert all(name in listed for name in (*ARRAYS, "h200", "cuda"))
    show("eyeriss", as_json=False)
    shown = tomllib.loads(capsys.readouterr().out)
    assert shown["memories"]["psum_spad"]["capacity_bits"]["status"] == "read" and shown["axes"] == {"rows": 12, "columns": 14}
    show("eyeriss", as_json=True)
    assert json.loads(capsys.readouterr().out)["memories"]["global_buffer"]["operands"] == ["I", "O"]


# Each kind to its own commands


def test_an_array_is_no_processor_and_the_other_way_round() -> None:
    for attempt in (lambda: load_processor("eyeriss"), lambda: check_processor("eyeriss"), lambda: as_processor(load_target("eyeriss"))):
        with pytest.raises(OptionError, match=r"eyeriss is a spatial array[\s\S]*ridgeline map"):
            attempt()
    for name in ("h200", "cpu", "cuda"):  # the local ones without being calibrated
        with pytest.raises(OptionError, match=rf"{name} is a processor[\s\S]*ridgeline analyze"):
            load_array(name)
    check_processor("cpu")
    assert load_processor("h200").name == "h200"


@pytest.mark.parametrize("kind", ['"toaster"', "3", '["array"]', "{ array = 1 }", "true"])
def test_a_kind_that_is_none(kind: str, tmp_path: Path) -> None:
    with pytest.raises(TargetSpecError, match="processor, array"):
        loaded(tmp_path, re.sub('kind = "array"', f"kind = {kind}", catalog_text("eyeriss")))


# Ports


def test_a_stream_takes_the_port_that_names_it() -> None:
    memory = load_array("eyeriss").memories["global_buffer"]
    assert (
        memory.port_of("I", "rd_down") == "ifmap_bus"
        and memory.port_of("O", "rd_up") == "link_out"
        and memory.port_of("W", "rd_down") == ""
    )
    spad = load_array("eyeriss").memories["psum_spad"]
    assert [spad.port_of("O", way) for way in ("rd_down", "wr_up", "wr_down", "rd_up")] == ["read", "write", "write", "read"]
    sram = load_array("tpu-like").memories["sram_2MB"]
    assert sram.ports["r_port_1"].granule == 64 and sram.energy_per_bit_pj("rd_up") == 416.16 / 2048


def test_a_prefix_gives_whole_bits(tmp_path: Path) -> None:
    text = catalog_text("eyeriss").replace('value = 800, unit = "Kib"', 'value = 1.1, unit = "kb"')
    assert loaded(tmp_path, text).memories["global_buffer"].capacity_bits.value == 1100


def test_the_example_in_the_docs_loads(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "targets.md").read_text(encoding="utf-8").split("## Arrays")[1]
    block = re.search(r"(?:^ {4}.*\n|^\n)+", page[page.index("    version = 1") :], re.MULTILINE)
    assert block
    spec = loaded(tmp_path, textwrap.dedent(block[0]))
    assert (spec.pes, spec.ladder("W"), spec.ladder("I")) == (16, ["registers", "dram"], ["dram"])


# Broken files

NUMBERS = ("clock_hz", "energy_pj", "area_mm2", "static_w", "capacity_bits", "read_pj", "write_pj", "hop_pj", "ops_per_s", "bytes_per_s",
           "pj_per_op", "pj_per_byte")  # fmt: skip
ABOVE_ZERO = ("clock_hz", "capacity_bits", "ops_per_s", "bytes_per_s")
WHOLES = ("access_bits", "latency_cycles", "bits_per_cycle", "word_bits", "hop_bits", "W", "I", "O", "F", "rows", "columns", "D1", "D2")
REQUIRED = ("version", "name", "clock_hz", "axes", "mac", "memories", "energy_pj", "operands", "capacity_bits", "read_pj", "write_pj",
            "access_bits", "ports", "direction", "bits_per_cycle")  # fmt: skip
FREE_NAMES = ("axes", "memories", "ports", "unroll")
Path_ = tuple[str, ...]


def fields_of(data: dict[str, Any], path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Every field and table of a file, but not the inside of a constant."""
    for key, value in data.items():
        yield (*path, key), value
        if isinstance(value, dict) and key not in NUMBERS:
            yield from fields_of(value, (*path, key))


def changed(data: dict[str, Any], path: Path_, value: Any = None, *, rename: str | None = None) -> str:
    """The file with one field set, renamed, or (given neither) dropped."""
    data = copy.deepcopy(data)
    table = data
    for key in path[:-1]:
        table = table[key]
    old = table.pop(path[-1]) if value is None else None
    if rename:
        table[rename] = old
    elif value is not None:
        table[path[-1]] = value
    return dump_toml(data)


def wrong_values(key: str, value: Any) -> Iterator[tuple[str, Any, str]]:
    """(what is wrong, the value, what the error adds to the field's path)."""
    if key in NUMBERS:
        for wrong in (-1, float("nan"), float("inf"), 1e300, "fast", [1], True, *((0,) if key in ABOVE_ZERO else ())):
            yield f"= {wrong}", wrong, ""
        yield "unit", {**value, "unit": "parsec"}, ""
        yield "overflow", {**value, "value": 1e308, "unit": "P" + value["unit"].lstrip("kKMGTPunpm")}, ""
        yield "status", {**value, "status": "guessed"}, ".status"
        yield "source", {**value, "source": 5}, ".source"
        yield "no value", {"unit": value["unit"]}, ""
        yield "misspelt constant", {**value, "sauce": "me"}, ".sauce"
    elif key in WHOLES and isinstance(value, int):
        for wrong in (-1, 1.5, float("nan"), float("inf"), 2**70, "64", True, [1], *(() if key == "latency_cycles" else (0,))):
            yield f"= {wrong}", wrong, ""
    elif key in ("operands", "dataflows", "runs"):
        yield "unknown name", [*value[:-1], "X"], f".{len(value) - 1}"
        yield "not a list", "W", ""
        yield "number", 7, ""
    elif key in ("direction", "refill", "use"):
        yield "unknown name", "sideways", ""
        yield "wrong type", 4, ""
    elif key in FREE_NAMES:
        yield "not a table", 5, ""
    elif key in ("systolic", "shared_over", "carries", "name", "version"):
        yield "wrong type", {"systolic": "yes", "version": 2}.get(key, 5), ""


def field_breakages(data: dict[str, Any]) -> Iterator[Breakage]:
    for path, value in fields_of(data):
        dotted, key = ".".join(path), path[-1]
        named_freely = len(path) > 1 and path[-2] in FREE_NAMES
        if key in REQUIRED and not named_freely and path[0] != "noc":
            yield "dropped", changed(data, path), dotted
        if not named_freely and key != "kind":
            wrong = key[:-1] + "q" if key not in ("W", "I", "O", "F") else key + "q"
            yield "misspelt", changed(data, path, rename=wrong), ".".join([*path[:-1], wrong])
        for what, replacement, below in wrong_values(key, value):
            yield what, changed(data, path, replacement), dotted + below


def memory_breakages(data: dict[str, Any]) -> Iterator[Breakage]:
    """Values that are fine alone and wrong together."""
    for name, memory in data["memories"].items():
        at: Path_ = ("memories", name)
        dotted = f"memories.{name}"
        yield "no ports", changed(data, (*at, "ports"), {}), f"{dotted}.ports"
        yield "below one element", changed(data, (*at, "capacity_bits"), 1), f"{dotted}.capacity_bits"
        yield "half a bit", changed(data, (*at, "capacity_bits"), 1000.5), f"{dotted}.capacity_bits"
        yield "operand twice", changed(data, (*at, "operands"), [*memory["operands"][:1]] * 2), f"{dotted}.operands"
        yield "no operand", changed(data, (*at, "operands"), []), f"{dotted}.operands"
        yield "unknown axis", changed(data, (*at, "shared_over"), ["diagonal"]), f"{dotted}.shared_over"
        yield "axis twice", changed(data, (*at, "shared_over"), [next(iter(data["axes"]))] * 2), f"{dotted}.shared_over"
        yield from port_breakages(data, name)


def port_breakages(data: dict[str, Any], name: str) -> Iterator[Breakage]:
    memory = data["memories"][name]
    for label, port in memory["ports"].items():
        at: Path_ = ("memories", name, "ports", label)
        dotted, carries = ".".join(at), port.get("carries", [])
        yield "port dropped", changed(data, at), f"memories.{name}.ports"
        yield "unknown stream", changed(data, (*at, "carries"), [*carries, "W sideways"]), f"{dotted}.carries"
        yield "unknown operand", changed(data, (*at, "carries"), [*carries, "X rd_down"]), f"{dotted}.carries"
        yield "no direction", changed(data, (*at, "carries"), ["W"]), f"{dotted}.carries"
        yield "word does not divide", changed(data, (*at, "word_bits"), port["bits_per_cycle"] + 1), f"{dotted}.word_bits"
        first = memory["operands"][0]
        if port["direction"] != "read_write":
            way = "wr_down" if port["direction"] == "read" else "rd_down"
            yield "against the port", changed(data, (*at, "carries"), [*carries, f"{first} {way}"]), f"{dotted}.carries"
        for stranger in {"W", "I", "O"} - set(memory["operands"]):
            stream = f"{stranger} {'wr_down' if port['direction'] == 'write' else 'rd_down'}"
            yield "operand not here", changed(data, (*at, "carries"), [*carries, stream]), f"{dotted}.carries"
        if carries:
            yield "stream twice", changed(data, (*at, "carries"), [carries[0], carries[0]]), f"{dotted}.carries"
            rival = {"direction": "read_write", "bits_per_cycle": 8, "carries": [carries[0]]}
            yield "two ports for one", changed(data, (*at[:-1], "rival"), rival), f"memories.{name}.ports.rival.carries"


def array_breakages(data: dict[str, Any]) -> Iterator[Breakage]:
    axes, memories = list(data["axes"]), data["memories"]
    last = list(memories)[-1]
    yield "axis unknown to unroll", changed(data, ("unroll",), {"diagonal": ["K"]}), "unroll.diagonal"
    for wrong in ("k", "KC", "X", ""):
        assert wrong not in DIMENSIONS
        yield "unknown dimension", changed(data, ("unroll",), {axes[0]: [wrong]}), f"unroll.{axes[0]}"
    yield "no axes", changed(data, ("axes",), {}), "axes"
    yield "five axes", changed(data, ("axes",), {f"a{i}": 2 for i in range(5)}), "axes"
    yield "no memories", changed(data, ("memories",), {}), "memories"
    yield "thirteen memories", changed(data, ("memories",), {f"m{i}": memories[last] for i in range(13)}), "memories"
    yield "no dataflow", changed(data, ("dataflows",), []), "dataflows"
    yield "no such work", changed(data, ("runs",), ["conv", "cooking"]), "runs.1"
    yield "no cores", changed(data, ("cores",), {"count": 0}), "cores.count"
    yield "cores misused", changed(data, ("cores",), {"count": 2, "use": "juggle"}), "cores.use"
    for partial in (["W", "I"], ["O"]):
        yield "last holds too little", changed(data, ("memories", last, "operands"), partial), f"memories.{last}.operands"
    yield "last is not shared", changed(data, ("memories", last, "shared_over"), axes[:1]), f"memories.{last}.shared_over"
    farthest_first = dict(reversed(memories.items()))
    nearest = next(iter(memories))
    expected = "operands" if len(memories[nearest]["operands"]) < 3 else "shared_over"
    yield "farthest first", changed(data, ("memories",), farthest_first), f"memories.{nearest}.{expected}"
    # a PE-side memory that spans an axis its parent does not
    operand = memories[nearest]["operands"][0]
    parents = [name for name in memories if operand in memories[name]["operands"]][1:]
    if len(parents) > 1:
        broken = copy.deepcopy(data)
        broken["memories"][nearest]["shared_over"] = axes
        broken["memories"][parents[0]]["shared_over"] = axes[:1]
        yield "ladder narrows", dump_toml(broken), f"memories.{parents[0]}.shared_over"


def text_breakages(text: str) -> Iterator[Breakage]:
    """TOML that does not parse; the error can name only the file and the line."""
    for what, broken in {
        "bracket": text.replace("[mac]", "[mac"),
        "duplicate key": text.replace("[mac]\n", "[mac]\nenergy_pj = 1\n"),
        "duplicate table": text + "\n[mac]\n",
        "bare word": text.replace("= 1\n", "= one\n", 1),
        "unfinished string": text + '\n[host]\nops = "',
        "cut": text[: text.rindex('"')],
        "control character": text.replace("name = ", "name =\x00 "),
        "half a constant": text.replace(" }", "", 1),
    }.items():
        yield what, broken, "mine.toml is not valid TOML"


def breakages(name: str) -> list[Breakage]:
    text = catalog_text(name)
    data = tomllib.loads(text)
    return [*field_breakages(data), *memory_breakages(data), *array_breakages(data), *text_breakages(text)]


def names_field(message: str, field: str) -> bool:
    """Whether the field stands in the message by its whole path: `memories.a.ports` is not `memories.a.ports.b`."""
    return re.search(rf"(?<![\w.]){re.escape(field)}(?![\w.])", message) is not None


@pytest.mark.parametrize("name", ARRAYS)
def test_every_broken_array_file_names_its_field(name: str, tmp_path: Path) -> None:
    loaded(tmp_path, dump_toml(tomllib.loads(catalog_text(name))))  # unbroken, it loads
    cases = breakages(name)
    assert len({text for _, text, _ in cases}) > 700
    silent = []
    for what, text, field in cases[:: 1 if FULL else 4]:
        try:
            loaded(tmp_path, text)
        except TargetSpecError as error:
            if not (names_field(f"{error.what} {error.why}", field) and error.do):
                silent.append((what, field, str(error)))
        else:
            silent.append((what, field, "loaded"))
    assert silent == []


def test_the_check_of_messages_can_fail() -> None:
    assert names_field("memories.a.ports in mine.toml", "memories.a.ports")
    assert not names_field("memories.a.ports.b in mine.toml", "memories.a.ports")
    assert not names_field("a.memories.a in mine.toml", "memories.a") and not names_field("memories in mine.toml", "memories.a")


def test_a_broken_array_is_shown_an_array(tmp_path: Path) -> None:
    with pytest.raises(TargetSpecError, match=r"did you mean capacity_bits[\s\S]*targets show eyeriss"):
        loaded(tmp_path, catalog_text("tpu-v1").replace("capacity_bits", "capacity_bit", 1))


EYERISS = catalog_text("eyeriss")


@given(st.integers(0, len(EYERISS)), st.text(max_size=4), st.integers(0, 40))
def test_any_damage_loads_or_meets_our_own_error(position: int, junk: str, lost: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.toml"
        path.write_text(EYERISS[:position] + junk + EYERISS[position + lost :], encoding="utf-8", errors="replace")
        try:
            load_file(path)
        except RidgelineError as error:
            assert error.what and error.why and error.do
