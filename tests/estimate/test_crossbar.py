"""Networks on crossbar chips: events counted by walking every tile, slice and column, prices, who runs what, and totals that are sums.

products, chips ──walk──> Events == events_of        workload ──estimate──> Profile: rows, energy, time, notes
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import product as every
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ridgeline.core.errors import OptionError
from ridgeline.core.profile import Profile
from ridgeline.estimate import crossbar
from ridgeline.estimate.advice import advise
from ridgeline.estimate.crossbar import Events, Product, area_mm2, energy_j, events_of, products_of
from ridgeline.estimate.processor import estimate
from ridgeline.target.crossbar import CrossbarSpec
from ridgeline.target.load import load_crossbar
from ridgeline.workload.capture import capture
from ridgeline.workload.graph import LoopNest, Op, Workload
from tests.estimate.support import matmul, pointwise, tensor, workload

PRICES = {"array_read_j": 1e-3, "dac_conversion_j": 1e-5, "adc_conversion_j": 1e-7, "shift_add_j": 1e-9, "buffer_bit_j": 1e-11,
          "array_read_s": 7e-9, "dac_conversion_s": 3e-9, "adc_conversion_s": 2e-9, "shift_add_s": 1e-9, "array_mm2": 1.0, "dac_mm2": 0.01,
          "adc_mm2": 0.1, "shift_add_mm2": 0.5, "buffer_mm2": 0.25, "static_w": 2.0}  # fmt: skip


def chip(rows: int = 4, columns: int = 4, x: tuple[int, ...] = (1, 2), w: tuple[int, ...] = (1, 1), **more: Any) -> CrossbarSpec:
    sign, cost = more.pop("sign", "slice"), more.pop("cost", {})
    data = {
        "version": 1, "kind": "crossbar", "name": "toy", "array": {"rows": rows, "columns": columns},
        "operands": {"x_slices": x, "w_slices": w, "sign": sign}, "dac": {"levels": 4, "vread_v": 0.2},
        "cell": {"high_s": 1e-5, "low_s": 1e-8, "levels": 4}, "adc": {"levels": 64}, "cost": PRICES | cost,
    }  # fmt: skip
    return CrossbarSpec.model_validate(data | more)


def walk(work: Product, spec: CrossbarSpec) -> Events:
    """Every array, vector, slice, row and column, one by one."""
    arrays = set()
    reads = drives = conversions = adds = bits = 0
    signs = ("plus", "minus") if spec.operands.sign == "differential" else ("",)
    for group, _vector in every(range(work.groups), range(work.vectors)):
        bits += (work.depth + work.columns) * spec.x_bits
        for top, left in every(range(0, work.depth, spec.array.rows), range(0, work.columns, spec.array.columns)):
            rows = [row for row in range(top, top + spec.array.rows) if row < work.depth]
            columns = [column for column in range(left, left + spec.array.columns) if column < work.columns]
            for w_slice, _x_slice in every(range(len(spec.operands.w_slices)), range(len(spec.operands.x_slices))):
                for sign in signs:
                    arrays.add((group, top, left, w_slice, sign))
                    reads += 1
                    drives += len(rows)
                codes = len(columns) + (1 if spec.operands.sign == "offset" else 0)
                conversions, adds = conversions + codes, adds + codes
    return Events(len(arrays), reads, drives, conversions, adds, bits)


chips = st.builds(
    chip, st.integers(1, 5), st.integers(1, 5), x=st.sampled_from([(1, 1), (1, 2), (1, 1, 2)]), w=st.sampled_from([(1, 1), (1, 2, 1)]),
    sign=st.sampled_from(["slice", "differential", "offset"]),
)  # fmt: skip
products = st.builds(Product, st.integers(1, 3), st.integers(1, 3), st.integers(1, 12), st.integers(1, 12))


@pytest.mark.parametrize("sign", ["slice", "differential", "offset"])
@given(work=products, spec=chips)
def test_events_equal_a_walk(sign: str, work: Product, spec: CrossbarSpec) -> None:
    signed = spec.model_copy(update={"operands": spec.operands.model_copy(update={"sign": sign})})
    assert events_of(work, signed) == walk(work, signed)


def test_a_wrong_count_is_caught() -> None:
    """The walk tells full tiles from partial ones, and every sign from the others."""
    work = Product(2, 3, 5, 6)
    counts = [walk(work, chip(sign=sign)) for sign in ("slice", "differential", "offset")]
    assert len(set(counts)) == 3
    padded = walk(Product(2, 3, 8, 8), chip())
    assert padded.array_reads == counts[0].array_reads and padded.dac_conversions != counts[0].dac_conversions
    assert padded.adc_conversions != counts[0].adc_conversions


def test_counts_by_hand() -> None:
    # 10 x 5 weights on 4 x 4 arrays: 3 x 2 tiles, 2 slices; 3 vectors of 2 slices
    work = Product(1, 3, 10, 5)
    assert events_of(work, chip()) == Events(12, 72, 3 * 2 * 2 * 2 * 10, 3 * 2 * 2 * 3 * 5, 180, 3 * 15 * 3)
    assert events_of(work, chip(sign="differential")) == Events(24, 144, 480, 180, 180, 180)  # a pair is converted once; its sign is a bit
    assert events_of(work, chip(sign="offset")) == Events(12, 72, 240, 180 + 72, 252, 135)  # one more column in every array


@given(products, chips)
def test_energy_is_the_sum_of_prices(work: Product, spec: CrossbarSpec) -> None:
    events = events_of(work, spec)
    whole = 1e-3 * events.array_reads + 1e-5 * events.dac_conversions + 1e-7 * events.adc_conversions + 1e-9 * events.shift_adds
    assert energy_j(events, spec) == pytest.approx(whole + 1e-11 * events.buffer_bits)


def test_area_is_of_arrays_with_all_that_belongs_to_them() -> None:
    assert area_mm2(10, chip(cost={"adcs_per_array": 2})) == pytest.approx(10 * (1.0 + 4 * 0.01 + 2 * 0.1 + 0.5 + 0.25))
    pairs = chip(cost={"adcs_per_array": 2}, sign="differential")
    assert area_mm2(10, pairs) == pytest.approx(10 * (1.0 + 4 * 0.01) + 5 * (2 * 0.1 + 0.5 + 0.25))


@pytest.mark.parametrize(
    ("columns", "adcs", "sign", "step_s", "limit"),
    [(4, 1, "slice", 10e-9, "array"), (8, 1, "slice", 16e-9, "adc"), (8, 2, "slice", 10e-9, "array"), (5, 1, "offset", 12e-9, "adc")],
)
def test_time_is_that_of_the_slower_half(columns: int, adcs: int, sign: str, step_s: float, limit: str) -> None:
    spec = chip(columns=columns, sign=sign, cost={"adcs_per_array": adcs})
    (row,) = estimate(workload(matmul(7, columns, 4)), spec).rows
    converted = -(-(columns + (sign == "offset")) // adcs) * 2e-9
    assert row.time_s == pytest.approx(7 * 2 * step_s + min(10e-9, converted) + 1e-9) and row.bottleneck == limit
    assert row.limit_s == row.time_s


def test_leakage_is_of_every_array_all_the_time() -> None:
    ops = (matmul(2, 4, 4, "a", source="x", result="y"), matmul(2, 8, 4, "b", source="y", result="z"))
    paid, free = (estimate(workload(*ops), chip(cost={"static_w": watts})) for watts in (2.0, 0.0))
    arrays = 2 + 4
    for row, without in zip(paid.rows, free.rows, strict=True):
        assert row.energy_j == pytest.approx((without.energy_j or 0.0) + arrays * 2.0 * row.time_s)


# Whole networks


class Net(nn.Module):
    """conv, batch norm, relu (on the way out), depthwise, add (host), pool (host), linear twice with the same weights, attention (host)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.dw = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8)
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dw(torch.relu(self.bn(self.conv(x)))) + 1
        x = self.fc(self.fc(x.flatten(2).transpose(1, 2)))
        return x @ x.transpose(1, 2)


@cache
def net() -> Workload:
    return capture(Net().eval(), inputs=(torch.zeros(2, 3, 6, 6),))


def on_chip(work: Workload, spec: CrossbarSpec) -> Profile:
    return estimate(work, spec)


def test_each_op_goes_where_it_belongs() -> None:
    profile = on_chip(net(), chip())
    where = {row.name: row.bottleneck for row in profile.rows}
    assert {name for name, place in where.items() if place != "host"} == {"conv2d", "conv2d_1", "linear", "linear_1"}
    assert "relu" not in where and "batch_norm" not in where and where["add"] == where["matmul"] == "host"
    causes = {row.name: row.cause for row in profile.rows}
    assert "both operands are activations" in causes["matmul"] and "no stored weights" in causes["add"]
    assert any("not run by the arrays" in note and "1 matmul" in note for note in profile.notes)


def test_products_are_those_of_the_network() -> None:
    ops = {op.name: op for op in net().ops}
    assert products_of(ops["conv2d"]) == (Product(1, 2 * 36, 27, 8),)
    assert products_of(ops["conv2d_1"]) == (Product(8, 2 * 16, 9, 1),)
    assert products_of(ops["linear"]) == (Product(1, 2 * 16, 8, 8),)
    assert products_of(ops["matmul"]) == ()


def test_a_batch_shares_its_weights_and_experts_do_not() -> None:
    nest = LoopNest("matmul", {"B": 3, "M": 2, "N": 5, "K": 4}, shared=("b",))
    op = Op("m", "", "matmul", "bmm", "float32", (tensor("x", 24), tensor("w", 20, "weights")), (tensor("y", 30),), 0, 0, (nest,))
    assert products_of(op) == (Product(1, 6, 4, 5),)
    apart = replace(op, loops=(replace(nest, shared=()),), inputs=(tensor("x", 24), tensor("w", 60, "weights")))
    assert products_of(apart) == (Product(3, 2, 4, 5),)
    assert products_of(replace(apart, inputs=(tensor("x", 24), tensor("w", 60)))) == ()


def test_shared_weights_take_their_arrays_once_and_are_read_twice() -> None:
    profile = on_chip(net(), chip())
    tiles = {"conv2d": 7 * 2, "conv2d_1": 8 * 3, "linear": 2 * 2}
    assert any(note.startswith(f"{2 * sum(tiles.values())} arrays of 4 x 4") for note in profile.notes)
    reads = 2 * 2 * (72 * 14 + 32 * 24 + 2 * 32 * 4)
    assert any(note.startswith(f"{reads:,} array reads") for note in profile.notes)


def test_repeated_calls_repeat_events_not_arrays() -> None:
    once, thrice = (crossbar.layer_on_crossbar(replace(matmul(2, 3, 4), calls=calls), chip()) for calls in (1, 3))
    assert once and thrice and thrice.events.arrays == once.events.arrays
    assert thrice.events.array_reads == 3 * once.events.array_reads and thrice.seconds == pytest.approx(3 * once.seconds)
    assert thrice.energy_j == pytest.approx(3 * once.energy_j)


def test_totals_are_sums_and_the_report_is_whole() -> None:
    profile = on_chip(net(), load_crossbar("rram-64"))
    assert profile.total.energy_j == pytest.approx(sum(row.energy_j or 0.0 for row in profile.rows))
    assert (
        profile.total.time_s
        == pytest.approx(sum(row.time_s for row in profile.rows))
        == pytest.approx(sum(profile.total.by_bottleneck.values()))
    )
    starts = [row.start_s for row in profile.rows]
    assert starts == sorted(starts) and profile.rows[-1].start_s + profile.rows[-1].time_s == pytest.approx(profile.total.time_s)
    assert (profile.target, profile.dtype, profile.spec) == ("rram-64", "int8", load_crossbar("rram-64"))
    assert json.loads(json.dumps(profile.to_json()))["total"]["energy_j"] > 0 and "arrays of 64 x 64" in profile.table()
    assert profile.to_html().startswith("<!doctype html>") and profile.to_trace() and advise(profile) == []


def test_the_host_costs_what_the_file_says() -> None:
    host = {"ops_per_s": 1e9, "bytes_per_s": 2e9, "pj_per_op": 3.0, "pj_per_byte": 5.0}
    (row,) = estimate(workload(pointwise("add", 1000, "x", "y", "add")), chip(host=host)).rows
    moved = 2000 * 3 / 8
    assert row.time_s == pytest.approx(max(1000 / 1e9, moved / 2e9)) and row.energy_j == pytest.approx((3000 + 5 * moved) * 1e-12)


def test_an_activation_of_something_else_is_the_hosts() -> None:
    assert [row.name for row in estimate(workload(pointwise("relu", 8, "x", "y")), chip()).rows] == ["relu"]
    after = (matmul(2, 4, 4), pointwise("relu", 8, "y", "z"), pointwise("gelu", 8, "z", "u", "gelu"))
    assert [row.name for row in estimate(workload(*after), chip()).rows] == ["linear"]
    added = Op("add_", "add_", "pointwise", "add_", "float32", (tensor("y", 8), tensor("x", 8)), (tensor("y", 8),), 8)
    changed = (matmul(2, 4, 4), added, pointwise("relu", 8, "y", "z"))
    assert [row.name for row in estimate(workload(*changed), chip()).rows] == ["linear", "add_", "relu"]


def test_what_cannot_be_said_is_an_error() -> None:
    with pytest.raises(OptionError, match="crossbar-ideal states no time"):
        estimate(workload(matmul(2, 4, 4)), "crossbar-ideal")
    with pytest.raises(OptionError, match="devices 2 on toy"):
        estimate(workload(matmul(2, 4, 4)), chip(), devices=2)


def test_compare_puts_it_beside_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    from ridgeline.cli.compare import compare

    compare("resnet18", on="rram-64,h200,pcm-128", as_json=True)
    rows = {row["target"]: row for row in json.loads(capsys.readouterr().out)["targets"]}
    assert list(rows) == ["h200", "rram-64", "pcm-128"] and rows["rram-64"]["dtype"] == "int8"
    assert all(rows[name]["total"]["energy_j"] > 0 and rows[name]["total"]["time_s"] > 0 for name in ("rram-64", "pcm-128"))
