"""The page in a real browser: no console message, one circle an op, and the controls do what they say.

    profile ──to_html──> file ──chromium --headless --dump-dom──> (document, console lines)

For the controls, the page's policy (which admits no script but its own) is taken out of a copy and a script that presses
them is put in; what it found is read back from the document.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from ridgeline.report import html

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")

OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
           "--disable-sync", "--disable-dev-shm-usage", "--enable-logging=stderr", "--v=0", "--window-size=1440,2600"]  # fmt: skip


@pytest.fixture
def browse(tmp_path):
    """Open a page; gives the document after its scripts ran, and every line the page wrote to the console."""

    def open_page(text, fragment=""):
        page = tmp_path / "page.html"
        page.write_text(text, encoding="utf-8")
        command = [CHROMIUM, *OPTIONS, f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", f"{page.as_uri()}{fragment}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert "<html" in done.stdout, done.stderr[-2000:]
        return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]

    return open_page


def circles(document):
    return re.findall(r'<circle class="op [^>]*', document)


@pytest.mark.parametrize("name", ["measured_profile", "large_profile", "odd_profile", "hostile_profile"])
def test_page_opens_without_a_console_message(request, browse, counted, name):
    profile = request.getfixturevalue(name)
    document, console = browse(html.render_profile(profile))
    assert console == []
    assert len(circles(document)) == counted(profile)
    assert 'class="scripted"' in document, "the script ran"
    assert re.search(r'id="shown"[^>]*>[\d,]+ of [\d,]+ rows', document), "and reached the table"


def test_sweep_and_comparison_open_without_a_console_message(browse, sweep_points, comparison):
    for text in (html.render_sweep_html(sweep_points, "batch", "resnet50", "h200"), html.render_comparison_html(comparison)):
        document, console = browse(text, "#dark")
        assert console == []
        assert 'data-theme="dark"' in document


def test_the_console_check_can_fail(browse, estimate_profile):
    _, console = browse("<!doctype html><html><script>missing.call()</script></html>")
    assert any("Uncaught ReferenceError" in line for line in console)
    tampered = html.render_profile(estimate_profile).replace("</main>", "<script>alert(1)</script></main>")
    _, console = browse(tampered)
    assert any("Content Security Policy" in line for line in console), "a script that is not ours is refused"


DRIVER = """
addEventListener("load", () => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  const rows = () => all("#op-table tbody tr").filter((row) => row.offsetParent !== null).map((row) => Number(row.dataset.i));
  const found = {};
  const head = (key) => document.querySelector(`#op-table th[data-key="${key}"]`);
  const type = (selector, value) => {
    const box = document.querySelector(selector);
    box.value = value;
    box.dispatchEvent(new Event("input"));
  };
  found.first = rows().slice(0, 5);
  head("flops").click(); found.by_flops = rows().slice(0, 5);
  head("order").click(); found.by_order = rows().slice(0, 5);
  found.sorted = head("order").getAttribute("aria-sort");
  type("#find", "downsample bn"); found.filtered = rows();
  const circle = document.querySelector('circle.op[data-i="0"]');
  circle.dispatchEvent(new MouseEvent("click", { bubbles: true }));
  found.selected = all("tr.at").map((row) => Number(row.dataset.i)); found.cleared = document.querySelector("#find").value;
  circle.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: 300, clientY: 300 }));
  found.tip = document.querySelector("#tip").hidden ? null : document.querySelector("#tip").textContent;
  const colour = () => getComputedStyle(circle).fill;
  found.colour = colour(); document.querySelector('[data-colour-by="kind"]').click(); found.recoloured = colour();
  type("#only-bottleneck", "compute"); found.compute = rows().length; type("#only-bottleneck", "");
  document.querySelector("#views").click(); found.with_views = rows().length;
  const inner = document.querySelector(".gantt-inner"), ticks = () => all(".ticks span").length;
  found.width = inner.offsetWidth; found.ticks = ticks();
  for (const _ of [1, 2]) document.querySelector('[data-zoom="2"]').click();
  found.zoomed = inner.offsetWidth; found.more_ticks = ticks();
  document.querySelector('[data-zoom="0"]').click(); found.whole = inner.offsetWidth;
  const paper = () => getComputedStyle(document.body).backgroundColor;
  found.light = paper(); document.querySelector("#theme").click(); found.dark = paper();
  document.querySelector("#roofline-chart").dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  found.stepped = all("circle.op.at").map((element) => Number(element.dataset.i));
  found.wide = document.documentElement.scrollWidth > innerWidth;
  const box = Object.assign(document.createElement("pre"), { id: "found", textContent: JSON.stringify(found) });
  document.body.append(box);
});
"""


def test_controls_do_what_they_say(browse, measured_profile):
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html.render_profile(measured_profile))
    document, console = browse(text.replace("</body>", f"<script>{DRIVER}</script></body>"), "#light")
    assert console == []
    found = json.loads(re.search(r'<pre id="found">(.*?)</pre>', document, re.DOTALL).group(1).replace("&amp;", "&"))
    rows = measured_profile.rows
    spent = [row.measured.median_s if row.measured else 0.0 for row in rows]
    shown = [index for index, row in enumerate(rows) if row.kind != "view"]
    assert found["first"] == sorted(shown, key=lambda index: -spent[index])[:5]
    assert found["by_flops"] == sorted(shown, key=lambda index: (-rows[index].flops, index))[:5]
    assert found["by_order"] == [0, 1, 2, 3, 4] and found["sorted"] == "ascending"
    assert found["filtered"] == [index for index in shown if "downsample.bn" in rows[index].layer]
    assert found["selected"] == [0] and found["cleared"] == ""
    assert rows[0].layer in found["tip"] and "limit" in found["tip"]
    assert found["colour"] != found["recoloured"]
    assert found["compute"] == sum(row.bottleneck == "compute" for row in rows)
    assert found["with_views"] == len(rows)
    assert found["zoomed"] == pytest.approx(4 * found["width"], abs=4) and found["whole"] == found["width"]
    assert found["more_ticks"] > found["ticks"]
    assert found["light"] != found["dark"]
    assert found["stepped"] == [max(range(len(rows)), key=lambda index: spent[index])]
    assert not found["wide"], "the page does not scroll sideways"
