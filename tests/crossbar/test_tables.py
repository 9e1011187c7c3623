"""The tables of docs/crossbar.md are those of the committed results.

results/crossbar-WHAT-LABEL.json ──rows──> WHAT_table(rows) == what stands between <!-- crossbar-WHAT-LABEL --> and <!-- end -->
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support import ROOT
from tests.test_docs import between, results

Row = dict[str, Any]
PAGE = "docs/crossbar.md"
PARTS = ("im2col", "slices", "products", "adc")
WANTED_CPU = {"blocked": "at most 25x", "native": "at most 12x"}
WANTED_GPU = {"resnet18-64": 5300, "resnet18-32": 3500, "resnet50-64": 2000}
NOISY_SHARE = 0.6


def table(head: tuple[str, ...], lines: list[str]) -> str:
    return "\n".join(["", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *lines]) + "\n\n"


def mib(size: float | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.1f}"


def times(ratio: float | None) -> str:
    """Three digits, and no more where there are more before the point."""
    if ratio is None:
        return "-"
    return f"{ratio:,.0f}x" if ratio >= 100 else f"{ratio:#.3g}x"


def ablation_table(rows: list[Row]) -> str:
    """A line a step and batch; the two that read noisy cells are compared with each other only."""
    head = ("step", "batch", "ms a pass", "images/s", "times as fast as before", "as naive", "peak memory, MiB", "of before", "of naive")
    lines = []
    for row in rows:
        if row["kind"] != "step":
            continue
        if row["ms"] is None:
            lines.append(f"| {row['step']} | {row['batch']} | {row['why']} |{' - |' * 6}")
            continue
        faster = f"{times(row['times_as_fast_as_before'])} | {times(row['times_as_fast_as_naive'])}"
        speed = f"{row['ms']:,.1f} | {row['images_per_s']:#.3g} | {faster}"
        memory = f"{mib(row['peak_bytes'])} | {times(row['peak_over_before'])} | {times(row['peak_over_naive'])}"
        lines.append(f"| {row['step']} | {row['batch']} | {speed} | {memory} |")
    return table(head, lines)


def bytes_table(rows: list[Row]) -> str:
    """A line a distinct layer: MiB by formula, what the tensors had where that differs, and the peak of the layer's pass."""
    head = ("layer", "how often", "M x K x N", "im2col", "slices", "products", "ADC", "sum", "measured / predicted", "peak of the layer")
    lines = []
    for row in rows:
        if row["kind"] == "layer":
            predicted, found = row["predicted_bytes"], row["measured_bytes"]
            cells = [both(predicted[part], found[part]) for part in PARTS]
            cells += [mib(sum(predicted.values())), f"{row['measured_over_predicted']:.3f}", mib(row["peak_bytes"])]
            lines.append(f"| {row['layer']} | {row['times']} | {row['m']} x {row['k']} x {row['n']} | {' | '.join(cells)} |")
    return table(head, lines)


def both(predicted: int, found: int) -> str:
    return mib(predicted) if predicted == found else f"{mib(predicted)} (measured {mib(found)})"


def cpu_table(rows: list[Row]) -> str:
    """ResNet-18, batch 1: times and memory against the digital network's."""
    head = (
        "engine",
        "threads",
        "ms a pass",
        "times digital (starts)",
        "wanted",
        "peak above the model, MiB",
        "times digital",
        "wanted",
        "cells, MiB",
    )
    lines = []
    for row in rows:
        starts = row["times_digital_of_starts"]
        spread = f" ({min(starts):.1f} to {max(starts):.1f}x)" if row["engine"] in WANTED_CPU else ""
        speed = f"{1e3 * row['median_s']:,.0f} | {row['times_digital']:.1f}x{spread} | {WANTED_CPU.get(row['engine'], '-')}"
        wanted = "at most 2x" if row["engine"] in WANTED_CPU else "-"
        memory = f"{mib(row['peak_above_model_bytes'])} | {row['memory_times_digital']:.2f}x | {wanted} | {mib(row['cell_bytes'])}"
        lines.append(f"| {row['engine']} | {row['threads']} | {speed} | {memory} |")
    return table(head, lines)


def gpu_table(rows: list[Row]) -> str:
    """Whole networks: images a second beside digital and the limit, and peak memory."""
    head = ("model", "batch", "array rows", "read noise", "images/s", "wanted", "of the limit", "digital images/s", "peak, GiB")
    quiet = {row["case"]: row["images_per_s"] for row in rows if not row["read_sigma"]}
    lines = []
    for row in rows:
        least = WANTED_GPU.get(row["case"])
        if row["read_sigma"]:
            same = row["case"].removesuffix("-noise")
            least = NOISY_SHARE * max(quiet.get(same, 0), WANTED_GPU.get(same, 0)) or None
        noise = f"{row['read_sigma']:.0%}" if row["read_sigma"] else "-"
        speed = f"{row['images_per_s']:,.0f} | {'runs' if least is None else f'at least {least:,.0f}'} | {row['percent_of_limit']:.0f} %"
        where = f"| {row['model']} | {row['batch']} | {row['rows']} | {noise} | "
        lines.append(f"{where}{speed} | {row['digital_images_per_s']:,.0f} | {row['peak_gib']:.2f} |")
    return table(head, lines)


def accuracy_table(rows: list[Row]) -> str:
    """Digital, perfect arrays, imperfect chips, and the same chips after training with their imperfections."""
    head = ("model", "images", "digital", "perfect arrays", "points lost (at most 0.5)", "chips x images", "imperfect chips",
            "norms settled", "fine-tuned", "fine-tuned, norms settled", "loss won back by training (at least half)")  # fmt: skip
    lines = []
    for row in rows:
        won = row.get("share_won_back_by_training")
        first = f"{row['digital']['accuracy']:.2%} | {row['perfect']['accuracy']:.2%} | {row['points_lost_perfect']:.2f}"
        chips = " | ".join(spread(row.get(name)) for name in ("before", "settled", "trained", "after"))
        share = "-" if won is None else f"{won:.0%}"
        tried = f"{len(row['before']['accuracy_of_chip'])} x {row['before']['images'] or row['digital']['images']:,}"
        lines.append(f"| {row['model']} | {row['digital']['images']:,} | {first} | {tried} | {chips} | {share} |")
    return table(head, lines)


def presets_table(rows: list[Row]) -> str:
    head = ("chip", "built perfectly", "chips", "worst", "energy of an image")
    lines = []
    for row in rows:
        name = f"`{row['chip']}`" + (f", {row['change']}" if row["change"] else "")
        chips = f"{row['mean']:.1%} ± {100 * row['std']:.1f}"
        energy = "-" if row["energy_j"] is None or row["change"] else f"{1e6 * row['energy_j']:.0f} µJ"
        lines.append(f"| {name} | {row['perfect']:.1%} | {chips} | {row['worst']:.1%} | {energy} |")
    return table(head, lines)


def spread(found: Row | None) -> str:
    return "-" if found is None else f"{found['mean']:.2%} ± {100 * found['std']:.2f}, worst {found['worst']:.2%}"


TABLES: dict[str, tuple[str, Callable[[list[Row]], str]]] = {  # marker on the page: (result file, builder)
    "crossbar-ablation-cpu": ("crossbar-ablation-cpu", ablation_table),
    "crossbar-ablation-h200": ("crossbar-ablation-h200", ablation_table),
    "crossbar-bytes-cpu": ("crossbar-ablation-cpu", bytes_table),
    "crossbar-bytes-h200": ("crossbar-ablation-h200", bytes_table),
    "crossbar-cpu": ("crossbar-cpu-cpu", cpu_table),
    "crossbar-gpu": ("crossbar-gpu-h200", gpu_table),
    "crossbar-accuracy-cpu": ("crossbar-accuracy-cpu", accuracy_table),
    "crossbar-accuracy-h200": ("crossbar-accuracy-h200", accuracy_table),
    "crossbar-presets": ("crossbar-presets-cpu", presets_table),
}


@pytest.mark.parametrize("marker", TABLES)
def test_page_equals_its_results(marker: str) -> None:
    name, build = TABLES[marker]
    if f"<!-- {marker} -->" not in (ROOT / PAGE).read_text():
        pytest.skip(f"{PAGE} has no table {marker}")
    assert between(PAGE, marker) == build(results(name)["rows"])


@pytest.mark.parametrize("label", ["cpu", "h200"])
def test_ablation_ends_faster_and_smaller_than_it_began(label: str) -> None:
    if not (ROOT / "benchmarks" / "results" / f"crossbar-ablation-{label}.json").exists():
        pytest.skip(f"not measured on {label}")
    rows = results(f"crossbar-ablation-{label}")["rows"]
    for row in (row for row in rows if row["kind"] == "layer"):
        assert sum(row["measured_bytes"].values()) / sum(row["predicted_bytes"].values()) == pytest.approx(row["measured_over_predicted"])
        assert 0.95 <= row["measured_over_predicted"] <= 1.05
    steps = [row for row in rows if row["kind"] == "step" and row["ms"] is not None]
    for batch in {row["batch"] for row in steps}:
        mine = {row["step"]: row for row in steps if row["batch"] == batch}
        last = mine["engine native" if label == "cpu" else "engine fused"]
        assert all(last["ms"] <= row["ms"] and last["peak_bytes"] <= row["peak_bytes"] for row in mine.values())
        assert all(row["images_per_s"] == pytest.approx(1e3 * batch / row["ms"]) for row in mine.values())


def test_ablation_table_says_what_did_not_fit() -> None:
    row = {"kind": "step", "step": "a", "batch": 2, "ms": 1500.0, "images_per_s": 4 / 3, "times_as_fast_as_before": None,
           "peak_over_naive": 0.5, "times_as_fast_as_naive": 123.4, "peak_bytes": 3 << 20, "peak_over_before": 0.25}  # fmt: skip
    lines = ablation_table(
        [row, {"kind": "layer"}, {"kind": "step", "step": "b", "batch": 2, "ms": None, "why": "out of memory"}]
    ).splitlines()
    assert lines[3] == "| a | 2 | 1,500.0 | 1.33 | - | 123x | 3.0 | 0.250x | 0.500x |"
    assert lines[4].startswith("| b | 2 | out of memory |") and {line.count("|") for line in lines if line} == {10}


def test_bytes_table_shows_where_prediction_and_tensor_differ() -> None:
    row = {"kind": "layer", "layer": "conv1", "times": 1, "m": 4, "k": 5, "n": 6, "predicted_bytes": dict.fromkeys(PARTS, 1 << 20),
           "measured_bytes": {**dict.fromkeys(PARTS, 1 << 20), "im2col": 2 << 20}, "measured_over_predicted": 1.25,
           "peak_bytes": 9 << 20}  # fmt: skip
    line = bytes_table([row, {"kind": "step"}]).splitlines()[3]
    assert line == "| conv1 | 1 | 4 x 5 x 6 | 1.0 (measured 2.0) | 1.0 | 1.0 | 1.0 | 4.0 | 1.250 | 9.0 |"


def test_gpu_table_wants_a_share_of_the_quiet_speed() -> None:
    quiet = {"case": "resnet18-64", "model": "resnet18", "batch": 32, "rows": 64, "read_sigma": 0.0, "images_per_s": 6000.0,
             "percent_of_limit": 43.2, "digital_images_per_s": 14000.0, "peak_gib": 0.5}  # fmt: skip
    lines = gpu_table(
        [quiet, {**quiet, "case": "resnet18-64-noise", "read_sigma": 0.05}, {**quiet, "case": "mobilenet-v2-64"}]
    ).splitlines()
    assert lines[3] == "| resnet18 | 32 | 64 | - | 6,000 | at least 5,300 | 43 % | 14,000 | 0.50 |"
    assert "| 5% | 6,000 | at least 3,600 |" in lines[4] and "| runs |" in lines[5]


def test_cpu_and_accuracy_tables() -> None:
    row = {"engine": "native", "threads": 2, "median_s": 0.25, "times_digital": 5.04, "times_digital_of_starts": [5.04, 4.9, 6.0],
           "peak_above_model_bytes": 1 << 20, "cell_bytes": 2 << 20, "memory_times_digital": 0.756}  # fmt: skip
    assert cpu_table([row]).splitlines()[3] == "| native | 2 | 250 | 5.0x (4.9 to 6.0x) | at most 12x | 1.0 | 0.76x | at most 2x | 2.0 |"
    chips = {"mean": 0.9, "std": 0.011, "worst": 0.88, "accuracy_of_chip": [0.88, 0.92], "images": None}
    model = {
        "model": "resnet20",
        "digital": {"accuracy": 0.9173, "images": 10000},
        "perfect": {"accuracy": 0.915},
        "points_lost_perfect": 0.23,
        "before": chips,
    }
    line = accuracy_table([model | {"trained": chips, "share_won_back_by_training": 0.62}]).splitlines()[3]
    said = "90.00% ± 1.10, worst 88.00%"
    assert line == f"| resnet20 | 10,000 | 91.73% | 91.50% | 0.23 | 2 x 10,000 | {said} | - | {said} | - | 62% |"


def test_page_says_what_settling_and_training_win_back() -> None:
    rows = {row["model"]: row for row in results("crossbar-accuracy-h200")["rows"]}
    small, large = rows["resnet20"], rows["resnet56"]
    shares = [f"{100 * small[name]:.0f} %" for name in ("share_won_back_settled", "share_won_back_by_training", "share_won_back")]
    for row in (small, large):
        lost = row["digital"]["accuracy"] - row["before"]["mean"]
        assert row["share_won_back_by_training"] == pytest.approx((row["trained"]["mean"] - row["before"]["mean"]) / lost)
        assert row["reached"] and len(row["before"]["accuracy_of_chip"]) == len(row["trained"]["accuracy_of_chip"]) == 16
    said = f"settling alone wins {shares[0]} of the loss back, training alone {shares[1]}, both together {shares[2]}"
    more = f"for ResNet-56 training alone {100 * large['share_won_back_by_training']:.0f} % after one epoch"
    page = " ".join((ROOT / PAGE).read_text().split())
    assert said in page and more in page and large["training"]["epochs"] == 1


def test_readme_states_what_was_measured() -> None:
    readme = (ROOT / "README.md").read_text()
    gpu = {row["case"]: row for row in results("crossbar-gpu-h200")["rows"]}
    wide, narrow = gpu["resnet18-64"], gpu["resnet18-32"]
    speed = f"{wide['images_per_s']:,.0f} images/s on 64-row arrays (goal 5,300), {narrow['images_per_s']:,.0f} on 32-row"
    memory = f"at {wide['peak_gib']:.2f} and {narrow['peak_gib']:.2f} GiB"
    share = f"{wide['percent_of_limit']:.0f} and {narrow['percent_of_limit']:.0f}% of the limit"
    assert f"{speed}, {memory}; {share}" in readme
    rows = {row["engine"]: row for row in results("crossbar-cpu-cpu")["rows"]}
    assert max(rows["blocked"]["times_digital_of_starts"]) <= 25 and max(rows["native"]["times_digital_of_starts"]) <= 12
    assert max(row["memory_times_digital"] for row in rows.values()) <= 2
    cpu = {engine: row["times_digital"] for engine, row in rows.items()}
    assert f"{cpu['native']:.1f}x its time by C compiled on the spot, {cpu['blocked']:.1f}x in plain torch" in readme
