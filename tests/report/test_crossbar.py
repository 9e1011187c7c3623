"""Studies on a chip as text and as a page: every number is there, any part may be missing, nothing from a name can run."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ridgeline.report.crossbar_html import draw_chips, draw_sweep, render_crossbar_html
from ridgeline.report.crossbar_table import render_crossbar

HOSTILE = "</script><img src=x onerror=alert(1)>"


def run(**changes: Any) -> dict[str, Any]:
    cost = {"energy_j": 2e-6, "latency_s": 1e-5, "arrays": 60, "area_mm2": 0.5, "adc_conversions": 9, "layers": {}}
    base = {"model": "net", "chip": "rram-64", "data": "digits", "images": 100, "seed": 3, "engine": "native 2",
            "digital": 0.95, "ideal": 0.94, "mean": 0.9, "std": 0.01, "worst": 0.89, "images_per_s": 1234.0, "digital_s": 0.1,
            "accuracies": [0.91, 0.89], "seconds": [1, 2], "notes": ["a note"], "cost": cost}  # fmt: skip
    return {**base, **changes}


def layer(name: str, **changes: Any) -> dict[str, Any]:
    base = {"name": name, "k": 144, "n": 32, "groups": 1, "arrays": 15, "engine": "native", "why": "", "snr_db": 23.4, "codes_used": 0.5,
            "range_used": 0.8, "clipped": 0.02, "energy_j": 1e-9, "accuracy_alone": 0.93, "kl_alone": 0.2, "accuracy_without": 0.94,
            "kl_without": 0.1}  # fmt: skip
    return {**base, **changes}


def diagnosis(**changes: Any) -> dict[str, Any]:
    layers = [layer("conv1"), layer("dw", groups=8, snr_db=None, kl_alone=0.4)]
    base = {"model": "net", "chip": "rram-64", "images": 64, "digital": 0.95, "analog": 0.9, "analog_kl": 0.5, "layers": layers,
            "ranking": ["dw", "conv1"], "notes": []}  # fmt: skip
    return {**base, **changes}


def sweep(**changes: Any) -> dict[str, Any]:
    def row(settings: dict[str, Any], accuracy: float, energy_j: float | None, pareto: bool) -> dict[str, Any]:
        return {"settings": settings, "accuracy": accuracy, "images_per_s": 50.0, "peak_bytes": 3_000_000, "energy_j": energy_j,
                "latency_s": 1e-5, "arrays": 60, "area_mm2": 0.5, "error": 1e-7, "codes_differ": 0.0, "pareto": pareto}  # fmt: skip

    rows = [row({"slices": [1, 1, 2], "sign": "offset"}, 0.9, 1e-6, True), row({"slices": [1, 3], "sign": "slice"}, 0.8, 2e-5, False)]
    return {"model": "net", "chip": "rram-64", "data": "digits", "images": 100, "digital": 0.95, "rows": rows, **changes}


def test_table_has_every_number() -> None:
    text = render_crossbar({"run": run(), "diagnosis": diagnosis(), "sweep": sweep()}, width=250)
    for said in ("95.00 %", "94.00 %", "90.00 ± 1.00 %", "89.00 %", "-5.00 points", "1,230 images/s", "2 µJ", "60 arrays", "native 2",
                 "a note", "23.4 dB", "exact", "144 x 32 x 8", "50 %", "2.0 %", "dw loses most", "1,1,2", "offset",
                 "3 MB", "20 µJ"):  # fmt: skip
        assert said in text, said
    assert len([line for line in text.splitlines() if line.strip().startswith("* ") and "offset" in line]) == 1


def test_a_slow_simulation_reads_as_one() -> None:
    assert "0.253 images/s" in render_crossbar({"run": run(images_per_s=0.253)})


def test_layers_that_were_not_ranked_show_no_rank() -> None:
    layers = [layer("conv1", accuracy_alone=None, kl_alone=None, accuracy_without=None, kl_without=None)]
    text = render_crossbar({"diagnosis": diagnosis(layers=layers, ranking=["conv1"])}, width=200)
    assert "23.4 dB" in text and "rank" not in text and "loses most" not in text


@pytest.mark.parametrize("parts", [("run",), ("diagnosis",), ("sweep",), ("run", "diagnosis"), ("run", "diagnosis", "sweep")])
def test_page_draws_the_parts_it_has(parts: tuple[str, ...]) -> None:
    every = {"run": run(), "diagnosis": diagnosis(), "sweep": sweep()}
    page = render_crossbar_html({name: every[name] for name in parts})
    for name, section in (("run", "chips"), ("diagnosis", "layers"), ("sweep", "sweep")):
        assert (f'<section id="{section}"' in page) == (name in parts)
    assert "http" not in re.sub(r"http-equiv", "", page).replace("http://www.w3.org", "")


def test_every_chip_is_a_dot_within_the_plot() -> None:
    drawn = draw_chips(run(accuracies=[0.5, 0.9, 1.0]))
    assert len(re.findall(r'<circle class="target k0"', drawn)) == 3
    heights = [float(y) for y in re.findall(r'cy="([\d.]+)"', drawn)]
    assert heights == sorted(heights, reverse=True) and all(30 <= y <= 250 for y in heights)


@pytest.mark.parametrize("same", [1, 5])
def test_chips_that_are_all_alike_are_drawn(same: int) -> None:
    assert "<circle" in draw_chips(run(accuracies=[0.9] * same, digital=0.9, ideal=0.9, mean=0.9, std=0.0))


def test_a_sweep_without_prices_is_drawn_over_speed() -> None:
    rows = [{**row, "energy_j": None, "latency_s": None, "arrays": None, "area_mm2": None} for row in sweep()["rows"]]
    page = render_crossbar_html({"sweep": sweep(rows=rows)})
    assert (
        "no prices are stated" in page and "images/s simulated" in page and "–" in render_crossbar({"sweep": sweep(rows=rows)}, width=200)
    )


def test_a_hostile_name_cannot_run() -> None:
    page = render_crossbar_html(
        {"run": run(model=HOSTILE, chip=HOSTILE), "diagnosis": diagnosis(layers=[layer(HOSTILE)], ranking=[HOSTILE])}
    )
    assert HOSTILE not in page and page.count("<script") == 2
    embedded = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert embedded and json.loads(embedded[1])["run"]["model"] == HOSTILE


def test_no_axis_goes_beyond_what_an_accuracy_can_be() -> None:
    perfect = run(accuracies=[1.0, 0.96], digital=1.0, ideal=0.99, mean=0.98, std=0.03)
    rows = [{**row, "accuracy": 1.0} for row in sweep()["rows"][:1]] + sweep()["rows"][1:]
    for drawing in (draw_chips(perfect), draw_sweep(sweep(rows=rows, digital=0.98))):
        ticks = [float(tick) for tick in re.findall(r">([\d.]+) %<", drawing)]
        assert ticks and max(ticks) <= 100
