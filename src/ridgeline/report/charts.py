"""The smaller charts: predicted against measured, a sweep, several targets under one roof.

rows with both times ──draw_scatter──> log-log, diagonal, ±30 % band
sweep points ──draw_sweep──> time, throughput and per cent of roof over the parameter, shaded by bottleneck
profiles ──draw_targets──> each target's roof and where the model stands under it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from ..core.profile import OpRow, Profile
from . import format as fmt
from .roofline import BOTTOM, HEIGHT, LABEL_GAP, LEFT, LINE_HEIGHT, RIGHT, TOP, WIDTH, slanted
from .summary import finite, label, pass_s, prediction_error, ratio, slug, spent_s
from .svg import CHARACTER_WIDTH, Frame, Labels, LinearScale, LogScale, Scale, drawing, element, fitted, group, log_domain, spread

BAND = 0.3


def draw_scatter(profile: Profile, rows: Sequence[tuple[int, OpRow]], kinds: Mapping[str, str]) -> Markup:
    """One point a measured row; on the diagonal the prediction was right."""
    size, left, top, right, bottom = 520.0, 62.0, 30.0, 506.0, 466.0
    low, high = log_domain([time for _, row in rows for time in (finite(row.time_s), spent_s(row))], decades=1.0)
    x, y = LogScale(low, high, left, right), LogScale(low, high, bottom, top)
    frame = Frame(left, top, right, bottom, x, y)
    # On log axes the band runs parallel to the diagonal; corners outside the plot would bend it, hence the clip.
    corners = [(low, low * (1 - BAND)), (high, high * (1 - BAND)), (high, high * (1 + BAND)), (low, low * (1 + BAND))]
    shift = (bottom - top) / math.log(high / low)
    band = " ".join(f"{x(px):.1f},{bottom - shift * math.log(py / low):.1f}" for px, py in corners)
    clip = element("clipPath", element("rect", x=left, y=top, width=right - left, height=bottom - top), id="scatter-clip")
    diagonal = element("line", class_="diagonal", x1=left, y1=bottom, x2=right, y2=top)
    described = f"Expected against measured time of {len(rows)} ops of {profile.model}"
    return drawing(
        size,
        size,
        described,
        clip,
        frame.axes("measured", "expected", fmt.seconds, fmt.seconds),
        group([element("polygon", class_="band", points=band), diagonal], clip_path="url(#scatter-clip)"),
        group(_points(rows, frame, kinds), class_="points"),
        class_="chart scatter",
    )


def _points(rows: Sequence[tuple[int, OpRow]], frame: Frame, kinds: Mapping[str, str]) -> Iterator[Markup]:
    for index, row in rows:
        error = fmt.signed_percent(prediction_error(row.time_s, spent_s(row)))
        yield element(
            "circle",
            element("title", f"{label(row)}: {error}"),
            class_=f"point b-{slug(row.bottleneck)} {kinds.get(row.kind, 'k7')}",
            data_i=index,
            cx=round(frame.x(spent_s(row)), 1),
            cy=round(frame.y(finite(row.time_s)), 1),
            r=3.5,
        )


@dataclass(frozen=True, slots=True)
class _Panel:
    key: str
    title: str
    text: Callable[[float], str]
    linear: bool = False


PANELS = (
    _Panel("time_s", "time of one pass", fmt.seconds),
    _Panel("throughput_per_s", "throughput per second", fmt.count),
    _Panel("roof_fraction", "per cent of the roof", fmt.percent, linear=True),
)


def draw_sweep(points: Sequence[Mapping[str, Any]], parameter: str) -> Markup:
    """Three panels over one x axis, with the regions where each bottleneck rules behind them."""
    left, right, top, height, gap = 66.0, 1064.0, 58.0, 160.0, 36.0
    values = [float(point["value"]) for point in points]
    x = _parameter_scale(values, left, right)
    bands = list(_bands(points, [x(value) for value in values], left, right))
    drawn = [_band_names(bands)]
    for position, panel in enumerate(PANELS):
        start = top + position * (height + gap)
        box = (left, start, right, start + height)
        drawn.append(_band_shades(bands, start, start + height))
        drawn.append(_panel(panel, points, values, box, x, parameter if position == len(PANELS) - 1 else ""))
    described = f"Sweep of {parameter} over {len(points)} points: time, throughput and per cent of the roof"
    bottom = top + len(PANELS) * height + (len(PANELS) - 1) * gap
    return drawing(WIDTH, bottom + 46, described, *drawn, class_="chart sweep")


def _parameter_scale(values: Sequence[float], left: float, right: float) -> Scale:
    low, high = min(values, default=1.0), max(values, default=10.0)
    if low <= 0:
        return LinearScale(low, high if high > low else low + 1, left + 12, right - 12)
    return LogScale(low, high, left + 12, right - 12) if high > low else LogScale(low / 2, high * 2, left, right)


def _panel(
    panel: _Panel,
    points: Sequence[Mapping[str, Any]],
    values: Sequence[float],
    box: tuple[float, float, float, float],
    x: Scale,
    x_title: str,
) -> Markup:
    left, top, right, bottom = box
    heights = [finite(point.get(panel.key)) for point in points]
    if panel.linear:
        y: Scale = LinearScale(0.0, max(1.0, *heights) if heights else 1.0, bottom, top)
    else:
        y = LogScale(*log_domain(heights, margin=1.3, decades=1.0), bottom, top)
    frame = Frame(left, top, right, bottom, _Values(x, tuple(values)), y)
    dots = [
        element(
            "circle",
            element("title", f"{fmt.significant(value, 6)}: {panel.text(height)}, {fmt.plain(point.get('bottleneck', ''))}"),
            class_=f"mark b-{slug(str(point.get('bottleneck', '')))}",
            cx=x(value),
            cy=y(height),
            r=4.5,
        )
        for point, value, height in zip(points, values, heights, strict=True)
    ]
    path = " ".join(f"{x(value):.1f},{y(height):.1f}" for value, height in zip(values, heights, strict=True))
    axes = frame.axes(x_title, panel.title, lambda value: fmt.significant(value, 6), panel.text)
    return group([axes, element("polyline", class_="curve", points=path), *dots])


@dataclass(frozen=True, slots=True)
class _Values:
    """A scale whose ticks are the swept values themselves."""

    scale: Scale
    values: tuple[float, ...]

    def __call__(self, value: float) -> float:
        return self.scale(value)

    def ticks(self) -> list[float]:
        return list(self.values)


def _bands(points: Sequence[Mapping[str, Any]], places: Sequence[float], left: float, right: float) -> Iterator[tuple[str, float, float]]:
    """(bottleneck, start, end) in pixels, meeting halfway between the points where it changes."""
    start = left
    for index, point in enumerate(points):
        name = str(point.get("bottleneck", ""))
        last = index == len(points) - 1
        if last or str(points[index + 1].get("bottleneck", "")) != name:
            end = right if last else (places[index] + places[index + 1]) / 2
            yield name, start, end
            start = end


def _band_names(bands: Sequence[tuple[str, float, float]]) -> Markup:
    texts = []
    for name, start, end in bands:
        text = fmt.crop(f"{fmt.plain(name)}-bound" if name else "", int((end - start) / CHARACTER_WIDTH))
        if len(text) > 3:  # less says nothing; the shade and the table do
            texts.append(element("text", text, class_="region-label", x=(start + end) / 2, y=16, text_anchor="middle"))
    return group(texts)


def _band_shades(bands: Sequence[tuple[str, float, float]], top: float, bottom: float) -> Markup:
    shades = [
        element("rect", class_=f"region b-{slug(name)}", x=start, y=top, width=max(end - start, 0.0), height=bottom - top)
        for name, start, end in bands
    ]
    edges = [element("line", class_="change", x1=end, x2=end, y1=top, y2=bottom) for _, _, end in bands[:-1]]
    return group([*shades, *edges])


def draw_targets(profiles: Sequence[Profile]) -> Markup | None:
    """The outermost memory and best peak of every target that has them, with the whole pass as one point under each."""
    drawable = [(position, *found) for position, profile in enumerate(profiles) if (found := _stand(profile))]
    if not drawable:
        return None
    x_low, x_high = log_domain([v for _, _, peak, bandwidth, at, _ in drawable for v in (at, peak / bandwidth)], margin=4, decades=3)
    y_low, y_high = log_domain([v for _, _, peak, _, _, rate in drawable for v in (rate, peak)], margin=2, decades=3)
    frame = Frame(LEFT, TOP, RIGHT, BOTTOM, LogScale(x_low, x_high, LEFT, RIGHT), LogScale(y_low, y_high, BOTTOM, TOP))
    parts, texts = [], []
    drawable.sort(key=lambda found: -found[2])
    heights = spread([frame.y(peak) for _, _, peak, *_ in drawable], LINE_HEIGHT, frame.bottom)
    labels = Labels()
    for (position, profile, peak, bandwidth, at, rate), text_y in zip(drawable, heights, strict=True):
        if (ends := slanted(bandwidth, frame, peak)) is None:
            continue
        x1, y1, x2, y2 = ends
        path = f"{x1:.1f},{y1:.1f} {x2:.1f},{y2:.1f} {frame.right:.1f},{frame.y(peak):.1f}"
        colour = f"k{position % 8}"
        parts.append(element("polyline", class_=f"target-roof {colour}", points=path))
        title = element("title", f"{fmt.plain(profile.target)}: {fmt.flop_rate(rate)} at {fmt.significant(at)} FLOP/B")
        parts.append(element("circle", title, class_=f"target {colour}", cx=frame.x(at), cy=frame.y(rate), r=7.0))
        text = f"{fmt.plain(profile.target)} {fmt.flop_rate(peak)}, {fmt.byte_rate(bandwidth)}"
        parts.append(element("line", class_="leader", x1=frame.right, y1=frame.y(peak), x2=frame.right + 12, y2=text_y))
        shown = (element("title", text), fitted(text, WIDTH - frame.right - LABEL_GAP))
        texts.append(element("text", *shown, class_="label", x=frame.right + LABEL_GAP, y=text_y + 3.5))
        beside = [(frame.x(at) + 12, frame.y(rate) + 9), (frame.x(at) + 12, frame.y(rate) - 6), (frame.x(at) + 12, frame.y(rate) + 22)]
        texts.append(labels.place(fmt.plain(profile.target), beside, class_="label used"))
    described = f"Roofline of {fmt.many(len(drawable), 'target')} with the model under each"
    axes = frame.axes("intensity: FLOP per byte", "FLOP/s", fmt.significant, fmt.count)
    return drawing(WIDTH, HEIGHT, described, axes, group(parts), group(texts, class_="roof-labels"), class_="chart roofline")


def _stand(profile: Profile) -> tuple[Profile, float, float, float, float] | None:
    """Best peak of the dtype, outermost bandwidth, intensity and FLOP/s of the pass; None when any is missing."""
    peaks = {name: peak for name, peak in profile.roofs.compute.items() if finite(peak)}
    ours = [peak for name, peak in peaks.items() if profile.dtype in name.split()] or list(peaks.values())
    bandwidths = [bandwidth for bandwidth in profile.roofs.memory.values() if finite(bandwidth)]
    at, rate = ratio(profile.total.flops, profile.total.bytes), ratio(profile.total.flops, pass_s(profile))
    if not ours or not bandwidths or at is None or rate is None:
        return None
    return profile, max(ours), bandwidths[-1], at, rate
