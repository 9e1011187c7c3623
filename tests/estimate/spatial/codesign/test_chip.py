"""Chips from choices: sizes as chosen, constants by the rules worked out by hand, files that load back."""

from __future__ import annotations

import tomllib

import pytest

from ridgeline.core.errors import TargetSpecError
from ridgeline.core.toml_out import dump_toml
from ridgeline.estimate.spatial.codesign.chip import build, describe
from ridgeline.estimate.spatial.codesign.rules import Rules
from ridgeline.estimate.spatial.codesign.space import Choice, RegisterBits
from ridgeline.target.array import Cores, OperandBits, SpatialArraySpec
from ridgeline.target.load import load_array
from tests.estimate.spatial.codesign.nets import BASE

RULES = Rules()
GBPS = 16 * 1e8 / 1e9  # BASE's channel
NARROW = OperandBits(W=4, I=4, O=12, F=4)


def test_the_base_itself_gains_its_interface_and_links_only() -> None:
    chip = build(BASE, Choice(), RULES)
    assert chip.memories["buffer"] == BASE.memories["buffer"] and chip.mac.energy_pj == BASE.mac.energy_pj
    assert chip.area_mm2 == pytest.approx(BASE.area_mm2 + 0.01 * GBPS + 4 * 64 * 2.5e-7)
    assert chip.static_w == pytest.approx(BASE.static_w + 1e-4 * GBPS)


def test_sizes_are_as_chosen() -> None:
    choice = Choice(rows=4, columns=8, register_bits=RegisterBits(W=64, I=32, O=128), buffer_bits=4096, bandwidth_bits=64, noc_bits=128,
                    cores=Cores(count=2, use="pipeline"))  # fmt: skip
    chip = build(BASE, choice, RULES)
    assert describe(chip) == {
        "axes": {"columns": 8, "rows": 4}, "register_bits": {"registers": 224}, "local_bits": {}, "buffer_bits": {"buffer": 4096},
        "bandwidth_bits": 64, "noc_bits": 128, "bits": {"W": 8, "I": 8, "O": 16, "F": 8}, "cores": {"count": 2, "use": "pipeline"},
    }  # fmt: skip
    assert [p.bits_per_cycle for p in chip.memories["buffer"].ports.values()] == [128, 128]  # twice the network, twice the ports
    assert chip.memories["dram"].ports["channel"].word_bits == 8 and chip.noc.bits_per_cycle == 128


def test_memory_rules_by_hand() -> None:
    chip = build(BASE, Choice(buffer_bits=16384 // 4), RULES).memories["buffer"]
    assert chip.read_pj.value == chip.write_pj.value == pytest.approx(1.0 / 2)  # a quarter of the capacity, half the energy
    assert chip.area_mm2.value == pytest.approx(0.05 * (0.1 + 0.9 / 4)) and chip.static_w.value == pytest.approx(0.0005 / 4)
    assert chip.read_pj.status == "assumed" and "capacity x 0.25 ^ 0.5" in chip.read_pj.source
    steeper = Rules(sram_energy_exponent=1.0, sram_fixed_area=0.0)  # type: ignore[arg-type]
    chip = build(BASE, Choice(buffer_bits=16384 * 2), steeper).memories["buffer"]
    assert (chip.read_pj.value, chip.area_mm2.value) == (pytest.approx(2.0), pytest.approx(0.1))


def test_precision_rules_by_hand() -> None:
    chip = build(BASE, Choice(precision=NARROW), RULES)
    factor = (3.1 * 16 / 1024 + 0.1 * 12 / 32) / (3.1 * 64 / 1024 + 0.1 * 16 / 32)
    assert chip.mac.energy_pj.value == pytest.approx(0.3 * factor) and chip.bits == NARROW
    assert chip.mac.area_mm2.value == pytest.approx(0.001 * factor + 64 * 2.5e-7)
    # the registers' read port carried W + I + O + O = 48 bits of words, now 32: 32 bits a cycle become 22, in words of 4 up to 24
    assert chip.memories["registers"].ports["read"].model_dump() | {"carries": ()} == {
        "direction": "read", "bits_per_cycle": 24, "word_bits": 4, "carries": ()
    }  # fmt: skip
    assert chip.memories["buffer"].ports == BASE.memories["buffer"].ports


def test_interface_follows_bandwidth() -> None:
    dram = build(BASE, Choice(bandwidth_bits=64), RULES).memories["dram"]
    assert dram.area_mm2.value == pytest.approx(0.01 * 4 * GBPS) and "6.4 Gb/s" in dram.area_mm2.source
    stated = BASE.model_copy(update={"memories": {**BASE.memories, "dram": BASE.memories["dram"].model_copy(
        update={"area_mm2": BASE.memories["buffer"].area_mm2})}})  # fmt: skip
    assert build(stated, Choice(bandwidth_bits=64), RULES).memories["dram"].area_mm2.value == pytest.approx(0.05 * 4)


def test_buffers_keep_their_proportions() -> None:
    base = load_array("eyeriss")
    half = sum(int(base.memories[name].capacity_bits.value) for name in ("global_buffer", "filter_buffer")) // 2
    chip = build(base, Choice(buffer_bits=half), RULES)
    for name in ("global_buffer", "filter_buffer"):
        assert chip.memories[name].capacity_bits.value == base.memories[name].capacity_bits.value // 2
    assert chip.axes == base.axes
    assert dict(build(base, Choice(rows=3), RULES).axes) == {"rows": 3, "columns": 14}  # by name, not by place


def test_impossible_chip_is_an_error_with_the_field() -> None:
    with pytest.raises(TargetSpecError, match="smaller than one element"):
        build(BASE, Choice(register_bits=RegisterBits(W=2, I=2, O=2)), RULES)


@pytest.mark.parametrize("choice", [Choice(), Choice(rows=3, buffer_bits=5000, precision=NARROW, bandwidth_bits=24, cores=Cores(count=4))])
@pytest.mark.parametrize("name", ["array-16", "eyeriss", "tpu-v1"])
def test_chips_load_back_from_toml(name: str, choice: Choice) -> None:
    chip = build(load_array(name), choice, RULES)
    assert SpatialArraySpec.model_validate(tomllib.loads(dump_toml(chip.model_dump()))) == chip
