"""The HTML page: complete, self-contained, true to the profile, and safe whatever the names in it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from ridgeline import capture, estimate
from ridgeline.report import html, roofline
from ridgeline.report.summary import achieved_flops, outer_intensity
from ridgeline.report.svg import Labels, LinearScale, LogScale, log_domain, nice_ticks, spread
from ridgeline.report.timeline import draw_timeline

LOADING = {"src", "href", "srcset", "data", "action", "poster", "xlink:href", "formaction", "background"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    text: list[str] = field(default_factory=list)

    def has(self, name):
        return name in self.attributes.get("class", "").split()


class Page(HTMLParser):
    """Every element in order, with the text directly inside it."""

    VOID = ("meta", "link", "br", "input", "img")

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self._open = [], []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {[element.tag for element in self._open]}"

    def handle_starttag(self, tag, attributes):
        self.elements.append(Element(tag, dict(attributes)))
        if tag not in self.VOID:
            self._open.append(self.elements[-1])

    def handle_startendtag(self, tag, attributes):
        self.elements.append(Element(tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop().tag == tag

    def handle_data(self, data):
        if self._open:
            self._open[-1].text.append(data)

    def all(self, tag, name=None):
        return [element for element in self.elements if element.tag == tag and (name is None or element.has(name))]

    def ids(self):
        return {element.attributes["id"] for element in self.elements if "id" in element.attributes}

    def data(self):
        return json.loads("".join(next(e for e in self.all("script") if e.attributes.get("id") == "data").text))


def requests_of(text):
    """Everything in the page that would make a browser fetch something."""
    page = Page(text)
    values = [value or "" for element in page.elements for name, value in element.attributes.items() if name in LOADING]
    styles = ["".join(element.text) for element in page.all("style")] + [element.attributes.get("style", "") for element in page.elements]
    values += [found for style in styles for found in re.findall(r"url\(([^)]*)\)|@import\s*([^;]*)", style) for found in found if found]
    return [value for value in values if not value.startswith(("#", "data:"))]


PROFILES = ["estimate_profile", "measured_profile", "large_profile", "empty_profile", "odd_profile", "hostile_profile"]


@pytest.mark.parametrize("name", PROFILES)
def test_one_circle_a_counted_op(request, counted, name):
    profile = request.getfixturevalue(name)
    circles = Page(html.render_profile(profile)).all("circle", "op")
    assert len(circles) == counted(profile)
    assert Counter(circle.attributes["data-name"] for circle in circles) == Counter(row.name for row in profile.rows if row.flops > 0)
    for circle in circles:
        x, y, radius = (float(circle.attributes[key]) for key in ("cx", "cy", "r"))
        assert roofline.LEFT <= x <= roofline.RIGHT and roofline.TOP <= y <= roofline.BOTTOM and 0 < radius <= 18


@pytest.mark.parametrize("name", PROFILES)
def test_nothing_is_fetched(request, name):
    text = html.render_profile(request.getfixturevalue(name))
    assert requests_of(text) == []
    assert "http://" not in text and "https://" not in text
    assert "default-src 'none'" in text


def test_the_fetch_check_can_fail():
    assert requests_of('<p style="background:url(//x.org/a.png)"><img src="https://x.org/b.png"></p>') == [
        "https://x.org/b.png",
        "//x.org/a.png",
    ]
    assert requests_of('<style>@import "x.css";</style>')


def test_circles_lie_where_intensity_and_speed_put_them(measured_profile):
    rows = [row for row in measured_profile.rows if row.flops > 0]
    frame = roofline.frame_for(measured_profile.roofs, rows)
    circles = {circle.attributes["data-i"]: circle.attributes for circle in Page(html.render_profile(measured_profile)).all("circle", "op")}
    for index, row in enumerate(measured_profile.rows):
        if row.flops > 0:
            place = circles[str(index)]
            assert float(place["cx"]) == pytest.approx(frame.x(row.level_intensity["HBM"]), abs=0.06)
            assert float(place["cy"]) == pytest.approx(frame.y(row.flops / row.measured.median_s), abs=0.06)
            assert f"b-{'mixed' if '+' in row.bottleneck else row.bottleneck}" in place["class"].split()


def test_no_op_of_an_estimate_stands_above_its_roof(estimate_profile):
    bandwidth = estimate_profile.roofs.memory["HBM"]
    for row in estimate_profile.rows:
        if row.flops > 0:
            assert achieved_flops(row) <= min(128e12, bandwidth * outer_intensity(row)) * 1.0001


def test_a_roof_for_every_level_and_every_peak(large_profile):
    page = Page(html.render_profile(large_profile))
    memory = [line for line in page.all("line") if line.has("roof") and line.has("memory")]
    compute = [line for line in page.all("line") if line.has("roof") and line.has("compute")]
    assert len(memory) == len(large_profile.roofs.memory)
    assert len(compute) == len({peak for peak in large_profile.roofs.compute.values()})
    text = " ".join("".join(element.text) for element in page.all("text"))
    for part in ("HBM3e 4.8 TB/s", "L2 12 TB/s", "989 TFLOP/s matrix float16, bfloat16", "494 TFLOP/s matrix tfloat32"):
        assert part in text
    used = [line for line in compute if line.has("used")]
    assert len(used) == 1


def test_figures_of_the_profile_are_on_the_page(measured_profile):
    text = html.render_profile(measured_profile)
    for part in (
        "3.46 ms",
        "3.24 ms",
        "45 %",
        "65.8 GFLOP",
        "1.39 GB",
        "2,310",
        "149 mJ",
        "-6.2 %",
        "p20 3.35 ms",
        "measured peak 60.2 MB",
        "1.63x",
    ):
        assert part in text
    page = Page(text)
    assert {"advice", "roofline", "timeline", "time", "prediction", "ops", "terms"} <= page.ids()
    gains = ["".join(element.text) for element in page.all("div", "gain")]
    assert gains == ["2.64x", "1.82x", "1.21x", "1.04x"]
    rows = [row for row in page.all("tr") if "data-i" in row.attributes]
    assert len(rows) == len(measured_profile.rows)
    times = [measured_profile.rows[int(row.attributes["data-i"])].measured for row in rows]
    medians = [timing.median_s if timing else 0.0 for timing in times]
    assert medians == sorted(medians, reverse=True)
    assert len(page.all("circle", "point")) == sum(row.measured is not None for row in measured_profile.rows)


def test_sections_appear_only_with_something_in_them(estimate_profile, empty_profile):
    ids = Page(html.render_profile(estimate_profile)).ids()
    assert "prediction" not in ids and {"advice", "remarks"} <= ids
    assert not {"prediction", "advice", "timeline", "remarks"} & Page(html.render_profile(empty_profile)).ids()
    text = html.render_profile(estimate_profile)
    assert "torchvision.roi_align" in text and "layout conversions are not modelled" in text


def test_embedded_data_is_the_profile(measured_profile):
    data = Page(html.render_profile(measured_profile)).data()
    assert len(data["rows"]) == len(measured_profile.rows)
    for values, row in zip(data["rows"], measured_profile.rows, strict=True):
        named = dict(zip(data["columns"], values, strict=True))
        assert named["name"] == row.name and named["flops"] == row.flops
        assert named["time_s"] == pytest.approx(row.time_s, rel=1e-5)
        assert named["measured_s"] == (pytest.approx(row.measured.median_s, rel=1e-5) if row.measured else None)
    assert data["total"]["flops"] == measured_profile.total.flops


def test_hostile_names_stay_text(hostile_profile):
    text = html.render_profile(hostile_profile)
    page = Page(text)
    assert len(page.all("script")) == 2 and not page.all("img")
    assert all(not name.startswith("on") for element in page.elements for name in element.attributes)
    assert hostile_profile.model in "".join(page.all("h1")[0].text)
    data = page.data()
    assert data["model"] == hostile_profile.model and data["rows"][0][0] == hostile_profile.rows[0].name
    assert "</" not in text.split('id="data">')[1].split("</script>")[0]
    assert "{{ 7*7 }}" in text


def test_script_matches_the_policy_that_admits_it(estimate_profile):
    text = html.render_profile(estimate_profile)
    script = "".join(next(element for element in Page(text).all("script") if "type" not in element.attributes).text)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text


def test_a_large_profile_stays_small(large_profile):
    assert len(large_profile.rows) > 1500
    assert len(html.render_profile(large_profile).encode()) < 3_000_000


def test_timeline_bars_span_the_pass(measured_profile, empty_profile):
    drawn = draw_timeline(measured_profile, {})
    assert drawn.end_s == pytest.approx(max(measured_profile.total.time_s, measured_profile.total.measured.median_s))
    assert [lane.name for lane in drawn.lanes[:3]] == ["stage", "expected", "measured"]
    bars = [rect.attributes for rect in Page(str(drawn.svg)).all("rect") if "data-i" in rect.attributes]
    timed = sum(row.time_s > 0 for row in measured_profile.rows)
    assert len(bars) == 3 * timed
    ends = [float(bar["x"].rstrip("%")) + float(bar["width"].rstrip("%")) for bar in bars]
    assert max(ends) == pytest.approx(100, abs=0.1)
    assert draw_timeline(empty_profile, {}) is None


def test_sweep_page_draws_points_and_regions(sweep_points):
    text = html.render_sweep_html(list(reversed(sweep_points)), "batch", "resnet50", "h200")
    page = Page(text)
    assert len(page.all("circle", "mark")) == 3 * len(sweep_points)
    assert len(page.all("rect", "region")) == 3 * 2
    assert "Between batch 4 and 8 the bottleneck changes from overhead to memory." in text
    assert [point["value"] for point in page.data()["points"]] == [point["value"] for point in sweep_points]
    x = [float(circle.attributes["cx"]) for circle in page.all("circle", "mark")[: len(sweep_points)]]
    steps = [after - before for before, after in pairwise(x)]
    assert min(steps) == pytest.approx(max(steps), abs=0.05), "doublings are evenly spaced on a log axis"
    assert requests_of(text) == []


@pytest.mark.parametrize(
    "points",
    [
        [],
        [{"value": 1}],
        [{"value": 0, "time_s": math.inf}, {"value": 5, "time_s": 0.0, "throughput_per_s": math.nan, "roof_fraction": 2.0}],
        [{"value": "x"}, {"value": math.nan}],
    ],
)
def test_sweep_page_survives_odd_points(points):
    assert requests_of(html.render_sweep_html(points, "<b>", "<script>", "t")) == []


def test_comparison_page_ranks_and_draws_each_target(comparison):
    text = html.render_comparison_html(comparison)
    page = Page(text)
    assert [target["target"] for target in page.data()["targets"]] == ["h200", "npu-256", "cpu"]
    assert len(page.all("circle", "target")) == 3 and len(page.all("polyline", "target-roof")) == 3
    assert "h200 is the fastest: 466 µs" in text
    assert len(page.all("span", "best")) == 1
    places = [
        float(re.search(r"left:([\d.]+)%", dot.attributes["style"]).group(1))
        for dot in page.all("span", "dot-expected")
        if "style" in dot.attributes
    ]
    assert places == sorted(places) and 0 < places[0] < places[-1] < 100
    assert requests_of(text) == []


def test_comparison_page_survives_nothing_and_odd(empty_profile, odd_profile):
    for profiles in ([], [empty_profile], [odd_profile, empty_profile]):
        assert requests_of(html.render_comparison_html(profiles)) == []


def test_many_kinds_share_the_last_colour(estimate_profile):
    rows = tuple(replace(row, kind=f"kind{index % 12}") for index, row in enumerate(estimate_profile.rows))
    profile = replace(estimate_profile, rows=rows, shares=())
    classes = html.kind_classes(profile)
    assert len(classes) == 12 and Counter(classes.values())["k7"] == 5
    assert "other kinds" in html.render_profile(profile)


def test_scales_map_ends_and_clamp_the_rest():
    log = LogScale(1.0, 1000.0, 0.0, 300.0)
    assert [log(value) for value in (0.0, 1.0, 10.0, 1e9, math.inf, math.nan)] == pytest.approx([0, 0, 100, 300, 300, 0])
    assert log.ticks() == [1, 10, 100, 1000]
    assert LogScale(1.0, 20.0, 0, 1).ticks() == [1, 2, 5, 10, 20]
    linear = LinearScale(0.0, 1.0, 100.0, 0.0)
    assert [linear(value) for value in (-1.0, 0.25, 2.0)] == [100, 75, 0]
    assert nice_ticks(0.0, 3.46e-3, 8) == pytest.approx([step * 5e-4 for step in range(7)])
    assert nice_ticks(0.0, 0.0, 8) == [0.0]
    low, high = log_domain([0.0, math.inf, 5.0])
    assert low < 5 < high and high / low == pytest.approx(100)


def test_labels_move_along_their_line_until_free():
    def left_end(text):
        return float(re.search(r' x="([\d.]+)"', text).group(1))

    labels = Labels()
    anchors = [(100.0 * step, 50.0) for step in range(5)]
    assert [left_end(labels.place("ten letter", anchors)) for _ in range(3)] == [0, 100, 200]
    assert left_end(Labels(avoided=[(5.0, 47.0), (130.0, 44.0)]).place("ten letter", anchors)) == 200
    assert left_end(Labels(avoided=[(x, 45.0) for x in range(0, 600, 5)]).place("ten letter", anchors)) == 0, "none free: the first"


def test_spread_keeps_labels_apart_and_inside():
    placed = spread([10.0, 12.0, 13.0, 90.0, 99.0], 14.0, 100.0)
    assert all(after - before >= 14 - 1e-9 for before, after in pairwise(placed))
    assert placed[-1] <= 100 and placed[0] == 10


def test_the_profile_finds_its_renderers(estimate_profile):
    assert estimate_profile.to_html() == html.render_profile(estimate_profile)
    assert estimate_profile.to_trace()["traceEvents"]


@pytest.mark.parametrize(("target", "limits"), [("rram-64", {"adc": "adc", "host": "host"}), ("tpu-v1", {"host": "host"})])
def test_bottlenecks_of_arrays_and_crossbars_have_a_name_and_a_colour(target, limits):
    profile = estimate(capture("digits-cnn"), target)
    text = html.render_profile(profile)
    legend = text.split('class="legend by-bottleneck"')[1].split("</ul>")[0]
    for kind, name in limits.items():
        assert f'swatch b-{kind}"></span>{name}' in legend
        assert f'class="swatch b-{kind}" style="opacity:1.0"></span>{name}' in text, "named among what the heaviest ops wait for"
    assert "not known" not in legend and "b-other" not in text.split("<body")[1]
    if target == "rram-64":
        assert "></span>compute" not in text, "nothing of a crossbar's time is shown as a processor's"
    compared = html.render_comparison_html([profile])
    drawn = set(re.findall(r'<span class="b-(\w+)" style="width', compared))
    assert drawn == set(re.findall(r'<li><span class="swatch b-(\w+)"', compared))
