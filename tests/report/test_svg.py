"""Labels beside a plot end within the drawing: by our own widths of characters, and as a browser draws them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ridgeline import capture, estimate, map_layers
from ridgeline.report.array_html import render_mapping_html
from ridgeline.report.html import render_comparison_html, render_profile
from ridgeline.report.svg import fitted, text_width
from tests.estimate.spatial.nets import array, workload
from tests.report.test_browser import OPTIONS

CHROMIUM = shutil.which("chromium")
MEASURE = """addEventListener("load", () => {
  const beyond = [...document.querySelectorAll("svg.roofline .roof-labels text")].map((label) => {
    const box = label.getBBox();
    return [label.lastChild.textContent, box.x + box.width - label.closest("svg").viewBox.baseVal.width];
  });
  document.body.append(Object.assign(document.createElement("pre"), { id: "found", textContent: JSON.stringify(beyond) }));
});"""


def test_a_fitted_text_is_no_wider_than_its_room() -> None:
    text = "990 TFLOP/s tensor float16, bfloat16"
    assert fitted(text, 1000) == text and text_width(text, bold=True) > text_width(text) > 6 * len(text) - 20
    for room in range(12, 240, 7):
        for bold in (False, True):
            short = fitted(text, room, bold=bold)
            assert text_width(short, bold=bold) <= room and (short == text or short.endswith("…"))


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_roof_labels_end_within_the_drawing(tmp_path: Path) -> None:
    decode = capture("llama-3-8b", phase="decode", context=192)
    profile = estimate(decode, "h200")
    digits = capture("digits-cnn")
    good = array()
    port = {"a_port_whose_name_is_far_too_long_for_the_margin": good.memories["dram"].ports["channel"]}
    memories = {**good.memories, "dram": good.memories["dram"].model_copy(update={"ports": port})}
    pages = (
        render_profile(profile),
        render_comparison_html([estimate(digits, target) for target in ("h200", "l4", "a100")]),
        render_mapping_html(map_layers(workload(), good.model_copy(update={"memories": memories})), [], None),
    )
    for text in pages:
        page = tmp_path / "page.html"
        bare = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
        page.write_text(bare.replace("</body>", f"<script>{MEASURE}</script></body>"))
        command = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", page.as_uri()]
        document = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout
        found = re.search(r'<pre id="found">(.*?)</pre>', document, re.DOTALL)
        assert found is not None
        labels = json.loads(found[1].replace("&amp;", "&").replace("&lt;", "<"))
        assert labels and [label for label in labels if label[1] > 0] == []
