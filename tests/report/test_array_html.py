"""The page of a mapped network: complete, self-contained, true to the mapping, safe whatever the names, silent in a browser."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.estimate.spatial.breakdown import cycle_parts, energy_by_part, level_roofs, port_roofs
from ridgeline.estimate.spatial.compare import DataflowComparison, compare_dataflows
from ridgeline.estimate.spatial.network import NetworkMapping, map_layers
from ridgeline.estimate.spatial.whatif import ArrayAdvice, advise_on_array
from ridgeline.report import roofline
from ridgeline.report.array_charts import NAME_WIDTH, Bar, classes, draw_bars, draw_levels
from ridgeline.report.array_html import MOST_BARS, costliest, render_mapping_html
from tests.estimate.spatial.nets import array, mapped, workload
from tests.report.test_browser import OPTIONS
from tests.report.test_html import Page, requests_of

CHROMIUM = shutil.which("chromium")
HOSTILE = "<script>alert('x')</script>[bold]\x1b[31m"


@pytest.fixture(scope="module")
def advice() -> list[ArrayAdvice]:
    return advise_on_array(mapped())


@pytest.fixture(scope="module")
def comparison() -> DataflowComparison:
    return compare_dataflows(workload(), array())


@pytest.fixture(scope="module")
def page(advice: list[ArrayAdvice], comparison: DataflowComparison) -> str:
    return render_mapping_html(mapped(), advice, comparison)


def hostile() -> NetworkMapping:
    """Names of the model, the array, a memory, a port and a layer that mean something to a browser."""
    good = array()
    dram = good.memories["dram"].model_copy(update={"ports": {"</script>": good.memories["dram"].ports["channel"]}})
    memories = {"registers": good.memories["registers"], "<b>": good.memories["buffer"], "dram": dram}
    # past the target file's own checks, which let no such name in
    bad = good.model_copy(update={"name": "<img src=x onerror=alert(1)>", "memories": memories, "description": "{{ 7*7 }}"})
    work = workload()
    ops = tuple(replace(op, layer=HOSTILE + op.layer) if op.loops else op for op in work.ops)
    return map_layers(replace(work, model=HOSTILE, ops=ops), bad)


def empty() -> NetworkMapping:
    return replace(mapped(), layers=(), host=())


def test_every_layer_is_in_every_chart_and_the_table(page: str) -> None:
    found = Page(page)
    network = mapped()
    rows = [row for row in found.all("tr") if "data-i" in row.attributes]
    assert sorted(row.attributes["data-i"] for row in rows) == ["0", "1", "2"]
    energies = [network.layers[int(row.attributes["data-i"])].energy_pj for row in rows]
    assert energies == sorted(energies, reverse=True)
    energy_parts = sum(value > 0 for layer in network.layers for value in energy_by_part(layer).values())
    cycle_count = sum(value > 0 for layer in network.layers for value in cycle_parts(layer, network.array).values())
    assert len(found.all("rect", "mapped")) == energy_parts + cycle_count
    levels = {(level.memory, level.port) for level in level_roofs(network.layers, network.array)}
    points = [roof for layer in network.layers for roof in port_roofs([layer], network.array) if (roof.memory, roof.port) in levels]
    assert len(found.all("circle", "op")) == len(points)
    assert {"advice", "dataflows", "energy", "cycles", "roofline", "mappings", "layers", "terms"} <= found.ids()


def test_bars_are_as_long_as_their_values() -> None:
    bars = [Bar(0, "a", {"x": 30.0, "y": 0.0, "z": 70.0}, "100"), Bar(5, "b", {"x": 50.0}, "50")]
    drawn = [rect.attributes for rect in Page(str(draw_bars(bars, classes("xyz"), str, "bars"))).all("rect")]
    assert [rect["data-i"] for rect in drawn] == ["0", "0", "5"] and [rect["class"] for rect in drawn] == [
        "mapped k0",
        "mapped k2",
        "mapped k0",
    ]
    widths = [float(rect["width"]) for rect in drawn]
    assert widths[1] / widths[0] == pytest.approx(70 / 30, rel=1e-3) and widths[2] == pytest.approx((widths[0] + widths[1]) / 2, abs=0.02)
    assert float(drawn[0]["x"]) == NAME_WIDTH and float(drawn[1]["x"]) == pytest.approx(NAME_WIDTH + widths[0], abs=0.02)


def test_circles_stand_under_their_roofs() -> None:
    network = mapped()
    found = Page(str(draw_levels(network.layers, network.array, "tiny")))
    for circle in found.all("circle", "op"):
        x, y = float(circle.attributes["cx"]), float(circle.attributes["cy"])
        assert roofline.LEFT <= x <= roofline.RIGHT and roofline.TOP <= y <= roofline.BOTTOM
    assert len(found.all("polyline", "target-roof")) == len(level_roofs(network.layers, network.array))
    # circles of one layer share its operations a second, hence their height
    heights: dict[str, set[str]] = {}
    for circle in found.all("circle", "op"):
        heights.setdefault(circle.attributes["data-i"], set()).add(circle.attributes["cy"])
    assert all(len(values) == 1 for values in heights.values()) and len(heights) == 3
    assert draw_levels((), network.array, "tiny") is None


def test_figures_and_loops_are_on_the_page(page: str, advice: list[ArrayAdvice], comparison: DataflowComparison) -> None:
    network = mapped()
    for part in (f"{network.cycles:,} cycles on the array", f"{network.utilisation * 100:.0f} %", advice[0].change, advice[0].basis):
        assert part in page
    assert len(Page(page).all("li", "card")) == len(advice)
    nests = Page(page).all("pre", "nest")
    assert len(nests) == 3 and "".join(nests[0].text).startswith(f"# {costliest(network, 1)[0].mapped.cost.layer.name}: ")
    assert all(f"<b>{one.dataflow}</b>" in page for one in comparison.candidates)
    assert len(Page(page).all("span", "best")) == 1
    data = Page(page).data()
    assert data["mapping"]["total"]["cycles"] == network.cycles and len(data["rows"]) == 3
    named = dict(zip(data["columns"], data["rows"][1], strict=True))
    assert named["layer"] == "2" and named["energy_pj"] == pytest.approx(network.layers[1].energy_pj, rel=1e-5)


def test_sections_appear_only_with_something_in_them() -> None:
    ids = Page(render_mapping_html(mapped())).ids()
    assert not {"advice", "dataflows"} & ids and {"energy", "cycles", "roofline"} <= ids
    bare = render_mapping_html(empty())
    assert not {"advice", "dataflows", "roofline", "mappings"} & Page(bare).ids() and "No layer runs on the array." in bare


def test_a_dataflow_that_cannot_run_says_why() -> None:
    found = compare_dataflows(workload(), array(dataflows=["os"]), layer="6")
    assert found.best.network is not None
    text = render_mapping_html(found.best.network, (), found)
    assert text.count("not possible") == 3 and "the control of two-by-two runs os" in text


def test_many_layers_stay_drawable() -> None:
    network = mapped()
    many = replace(network, layers=network.layers * 40)
    text = render_mapping_html(many)
    assert len({rect.attributes["data-i"] for rect in Page(text).all("rect", "mapped")}) == MOST_BARS
    assert f"The {120 - MOST_BARS} layers that spend least" in text and len(text) < 500_000
    assert len(Page(text).all("pre", "nest")) == 3, "of layers with the same loops one is shown"


@pytest.mark.parametrize("name", ["page", "hostile", "empty"])
def test_nothing_is_fetched_and_the_script_is_the_one_admitted(request: pytest.FixtureRequest, name: str) -> None:
    text = request.getfixturevalue("page") if name == "page" else render_mapping_html({"hostile": hostile, "empty": empty}[name]())
    assert requests_of(text) == [] and "http://" not in text and "https://" not in text and "default-src 'none'" in text
    script = "".join(next(element for element in Page(text).all("script") if "type" not in element.attributes).text)
    assert f"script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in text


def test_hostile_names_stay_text() -> None:
    text = render_mapping_html(hostile(), [ArrayAdvice("<img src=x>", 2.0, "<b>", "{{ 7*7 }}", 2.0, 1.0)])
    found = Page(text)
    assert len(found.all("script")) == 2 and not found.all("img")
    assert all(not name.startswith("on") for element in found.elements for name in element.attributes)
    assert "</" not in text.split('id="data">')[1].split("</script>")[0]
    assert found.data()["rows"][0][1].startswith("<script>") and "{{ 7*7 }}" in text and "\x1b" not in text.split('id="data">')[0]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_pages_open_without_a_console_message(page: str, tmp_path: Path) -> None:
    driver = (
        "addEventListener('load', () => { const cycles = document.querySelector('#op-table th[data-key=cycles]'); cycles.click();"
        "const order = [...document.querySelectorAll('#op-table tbody tr')].map((row) => row.dataset.i).join();"
        "document.querySelector('rect.mapped[data-i=\"1\"]').dispatchEvent(new MouseEvent('click', { bubbles: true }));"
        "const at = [...document.querySelectorAll('tr.at')].map((row) => row.dataset.i).join();"
        "document.body.dataset.found = `${order} ${at} ${document.documentElement.scrollWidth > innerWidth}`; });"
    )
    open_policy = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    pages = {"plain": page, "hostile": render_mapping_html(hostile()), "empty": render_mapping_html(empty())}
    pages["driven"] = open_policy.replace("</body>", f"<script>{driver}</script></body>")
    for name, text in pages.items():
        file = tmp_path / f"{name}.html"
        file.write_text(text, encoding="utf-8")
        command = [CHROMIUM, *OPTIONS, f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", file.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)  # type: ignore[arg-type]
        assert 'class="scripted"' in done.stdout, done.stderr[-2000:]
        assert [line for line in done.stderr.splitlines() if ":CONSOLE" in line] == [], name
    cycles = [layer.cycles for layer in mapped().layers]
    order = ",".join(str(index) for index in sorted(range(3), key=lambda index: -cycles[index]))
    assert f'data-found="{order} 1 false"' in done.stdout
