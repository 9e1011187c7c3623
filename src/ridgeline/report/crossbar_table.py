"""A study of a network on a chip as text: accuracy digital, perfect and of real chips; layer by layer; a sweep's rows.

{"run": ChipsResult, "diagnosis": Diagnosis, "sweep": SweepResult, each as JSON and each optional} ──render_crossbar──> tables
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from . import format as fmt

LAYER_HEADINGS = ("layer", "K x N", "arrays", "engine", "SNR", "codes used", "range used", "clipped", "energy", "rank", "alone on the chip",
                  "KL alone", "alone digital", "KL then")  # fmt: skip
SWEEP_HEADINGS = ("accuracy", "loss", "images/s", "peak memory", "codes off", "error", "energy", "time", "arrays", "area")


def heading(data: Mapping[str, Any]) -> str:
    """One line: what was studied."""
    study = data.get("run") or data.get("sweep") or data["diagnosis"]
    words = [f"{fmt.plain(study['model'])} on {fmt.plain(study['chip'])}"]
    words += [f"{fmt.plain(study['data'])}, {fmt.many(study['images'], 'image')}"] if "data" in study else []
    if run := data.get("run"):
        words.append(f"{fmt.many(len(run['accuracies']), 'chip')}, seed {run['seed']}")
    if sweep := data.get("sweep"):
        words.append(fmt.many(len(sweep["rows"]), "variant"))
    return " · ".join(words)


def run_rows(run: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(what, value, beside it)."""
    cost = run["cost"]
    rows = [
        ("digital", share(run["digital"]), f"{fmt.significant(run['images'] / run['digital_s'])} images/s"),
        ("chip built perfectly", share(run["ideal"]), points(run["ideal"], run["digital"])),
        ("chips, mean ± std", f"{100 * run['mean']:.2f} ± {100 * run['std']:.2f} %", points(run["mean"], run["digital"])),
        ("worst chip", share(run["worst"]), points(run["worst"], run["digital"])),
        ("simulated", f"{fmt.significant(run['images_per_s'])} images/s", f"engines: {fmt.plain(run['engine'])}"),
    ]
    if cost:
        rows.append(("an image on the chip", fmt.energy(cost["energy_j"]), f"{fmt.seconds(cost['latency_s'])}, one after the other"))
        rows.append(("the chip", fmt.many(cost["arrays"], "array"), f"{fmt.significant(cost['area_mm2'])} mm²" if cost["area_mm2"] else ""))
    return rows


def layer_rows(diagnosis: Mapping[str, Any]) -> list[list[str]]:
    """One a layer, in the order of the network."""
    rank = {name: place for place, name in enumerate(diagnosis["ranking"], 1)}
    lines = []
    for layer in diagnosis["layers"]:
        groups = f" x {layer['groups']}" if layer["groups"] > 1 else ""
        lines.append(
            [
                fmt.crop(fmt.plain(layer["name"]), 40, keep="end"), f"{layer['k']} x {layer['n']}{groups}", f"{layer['arrays']:,}",
                fmt.plain(layer["engine"]), decibel(layer["snr_db"]), fmt.percent(layer["codes_used"]), fmt.percent(layer["range_used"]),
                fmt.percent(layer["clipped"]), fmt.energy(layer["energy_j"]), str(rank[layer["name"]]), share(layer["accuracy_alone"]),
                fmt.fixed(layer["kl_alone"]), share(layer["accuracy_without"]), fmt.fixed(layer["kl_without"]),
            ]
        )  # fmt: skip
    return lines


def sweep_headings(sweep: Mapping[str, Any]) -> list[str]:
    return ["", *setting_names(sweep), *SWEEP_HEADINGS]


def setting_names(sweep: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(name for row in sweep["rows"] for name in row["settings"]))


def sweep_rows(sweep: Mapping[str, Any]) -> list[list[str]]:
    """One a variant; * marks the Pareto front."""
    names, digital = setting_names(sweep), sweep["digital"]
    return [
        [
            "*" if row["pareto"] else "", *(setting(row["settings"].get(name)) for name in names), share(row["accuracy"]),
            points(row["accuracy"], digital), fmt.significant(row["images_per_s"]), fmt.size(row["peak_bytes"]),
            fmt.percent(row["codes_differ"]), f"{row['error']:.1e}", fmt.energy(row["energy_j"]), fmt.seconds(row["latency_s"]),
            fmt.count(row["arrays"]), f"{fmt.significant(row['area_mm2'])} mm²" if row["area_mm2"] else fmt.MISSING,
        ]
        for row in sweep["rows"]
    ]  # fmt: skip


def notes(data: Mapping[str, Any]) -> list[str]:
    """What the tables have no room for."""
    said: list[str] = []
    for part in ("run", "diagnosis"):
        said += (data.get(part) or {}).get("notes", [])
    if (diagnosis := data.get("diagnosis")) and diagnosis["layers"] and diagnosis["layers"][0]["kl_alone"] is not None:
        worst = diagnosis["layers"][[layer["name"] for layer in diagnosis["layers"]].index(diagnosis["ranking"][0])]
        alone = f"alone on the chip KL {fmt.fixed(worst['kl_alone'])} nats, with all layers {fmt.fixed(diagnosis['analog_kl'])}"
        scores = f"accuracy {share(worst['accuracy_alone'])} alone, {share(diagnosis['digital'])} digital, on {diagnosis['images']} images"
        said.append(f"{worst['name']} loses most: {alone}; {scores}")
    if sweep := data.get("sweep"):
        priced = all(row["energy_j"] is not None for row in sweep["rows"])
        rule = "for at most its energy; prices follow sizes by rule" if priced else "at its speed; no prices are stated"
        said.append(f"* no other variant has at least its accuracy {rule}")
    return [fmt.plain(line) for line in said]


def render_crossbar(data: Mapping[str, Any], *, color: bool = False, width: int | None = None) -> str:
    """Whatever the study holds, as text."""
    columns = width or max(100, shutil.get_terminal_size((180, 24)).columns)
    console = Console(file=io.StringIO(), width=columns, markup=False, highlight=False, force_terminal=color, soft_wrap=True)
    console.print(heading(data), style="bold" if color else None)
    if run := data.get("run"):
        console.print(_table(("accuracy", "", ""), run_rows(run)))
    if diagnosis := data.get("diagnosis"):
        shown = [place for place, name in enumerate(LAYER_HEADINGS) if not _unranked(diagnosis) or place < LAYER_HEADINGS.index("rank")]
        lines = [[line[place] for place in shown] for line in layer_rows(diagnosis)]
        console.print(_table([LAYER_HEADINGS[place] for place in shown], lines))
    if sweep := data.get("sweep"):
        console.print(_table(sweep_headings(sweep), sweep_rows(sweep)))
    for note in notes(data):
        console.print(f"  {note}")
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.rstrip("\n").splitlines())


def _unranked(diagnosis: Mapping[str, Any]) -> bool:
    return all(layer["kl_alone"] is None for layer in diagnosis["layers"])


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place, name in enumerate(headings):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table


def share(value: float | None) -> str:
    return fmt.MISSING if value is None else f"{100 * value:.2f} %"


def points(value: float, digital: float) -> str:
    return f"{100 * (value - digital):+.2f} points"


def decibel(value: float | None) -> str:
    return "exact" if value is None else f"{value:.1f} dB"


def setting(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return fmt.plain(value if isinstance(value, str) else json.dumps(value))
