"""The roofline: every counted op against the ceilings of the machine, log-log.

    Profile ──> x = FLOP a byte at the outermost memory level, y = FLOP/s reached (measured if it was), radius ~ share of time
    Roofs.memory  ──> slanted lines y = bandwidth * x          Roofs.compute ──> horizontal lines, equal peaks drawn once

One <circle class="op"> a row with FLOPs, whatever its values: what the axes cannot hold sits on their edge. Ref: Williams,
Waterman, Patterson 2009.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from markupsafe import Markup

from ..core.profile import OpRow, Profile, Roofs
from . import format as fmt
from .summary import achieved_flops, finite, label, outer_intensity, slug, spent_s
from .svg import Frame, Labels, LogScale, drawing, element, fitted, group, log_domain, spread

WIDTH, HEIGHT = 1080.0, 540.0
LEFT, TOP, RIGHT, BOTTOM = 52.0, 26.0, 828.0, 490.0
LABEL_GAP, LINE_HEIGHT = 16.0, 14.0  # compute roofs are named to the right of the plot, where no op can lie


def draw_roofline(profile: Profile, kinds: Mapping[str, str]) -> Markup:
    """The chart; `kinds` gives the colour class of each kind."""
    counted = [(index, row) for index, row in enumerate(profile.rows) if row.flops > 0]
    frame = frame_for(profile.roofs, [row for _, row in counted])
    levels = list(profile.roofs.memory)
    described = f"Roofline of {profile.model} on {profile.target}: {len(counted)} ops against {len(levels)} memory roofs"
    x_title = f"intensity: FLOP per byte{f' moved at {levels[-1]}' if levels else ''}"
    memory, memory_labels = _memory_roofs(profile.roofs, frame, Labels(_place(row, frame) for _, row in counted))
    compute, compute_labels = _compute_roofs(profile.roofs, frame, profile.dtype)
    return drawing(
        WIDTH,
        HEIGHT,
        described,
        frame.axes(x_title, "FLOP/s", fmt.significant, fmt.count),
        _attainable(profile, frame),
        group([*memory, *compute], class_="roofs"),
        group(_circles(counted, frame, kinds), class_="ops"),
        group([*memory_labels, *compute_labels], class_="roof-labels"),
        class_="chart roofline",
        id="roofline-chart",
        tabindex="0",
    )


def frame_for(roofs: Roofs, rows: Sequence[OpRow]) -> Frame:
    """Axes that hold every op, every compute roof and the ridge of the outermost memory."""
    peaks = [peak for peak in roofs.compute.values() if finite(peak)]
    outermost = [bandwidth for bandwidth in roofs.memory.values() if finite(bandwidth)][-1:]
    ridges = [max(peaks) / bandwidth for bandwidth in outermost if peaks]
    x_low, x_high = log_domain([*map(outer_intensity, rows), *ridges], decades=3.0)
    y_low, y_high = log_domain([*map(achieved_flops, rows), *peaks], decades=3.0)
    return Frame(LEFT, TOP, RIGHT, BOTTOM, LogScale(x_low, x_high, LEFT, RIGHT), LogScale(y_low, y_high, BOTTOM, TOP))


def slanted(bandwidth: float, frame: Frame, ceiling: float) -> tuple[float, float, float, float] | None:
    """The visible part of y = bandwidth * x up to `ceiling`, in pixels (left to right); None when all of it lies outside."""
    x, y = frame.x, frame.y
    assert isinstance(x, LogScale) and isinstance(y, LogScale)
    first, last = max(x.low, y.low / bandwidth), min(x.high, min(ceiling, y.high) / bandwidth)
    return (x(first), y(first * bandwidth), x(last), y(last * bandwidth)) if first < last else None


def _memory_roofs(roofs: Roofs, frame: Frame, labels: Labels) -> tuple[list[Markup], list[Markup]]:
    ceiling = max((peak for peak in roofs.compute.values() if finite(peak)), default=math.inf)
    lines, texts, above = [], [], -math.inf
    known = [(level, bandwidth) for level, bandwidth in roofs.memory.items() if finite(bandwidth)]
    for position, (level, bandwidth) in enumerate(known):
        if (ends := slanted(bandwidth, frame, ceiling)) is None:
            continue
        x1, y1, x2, y2 = ends
        outermost = " outermost" if position == len(known) - 1 else ""
        lines.append(element("line", class_=f"roof memory{outermost}", x1=x1, y1=y1, x2=x2, y2=y2))
        text = f"{fmt.plain(level)} {fmt.byte_rate(bandwidth)}"
        angle = math.degrees(math.atan2(y2 - y1, x2 - x1))
        starts = [0.06 + 0.04 * step for step in range(20)]
        anchors = [(x1 + part * (x2 - x1), y1 + part * (y2 - y1)) for part in starts]
        # Squeezed between two lines a name could belong to either; under the lower one it cannot.
        intercept = y1 - x1 * (y2 - y1) / (x2 - x1)
        crowded, above = intercept - above < 20, intercept
        texts.append(labels.place(text, anchors, angle, lift=-14.0 if crowded else 5.0, class_=f"label memory{outermost}"))
    return lines, texts


def _compute_roofs(roofs: Roofs, frame: Frame, dtype: str) -> tuple[list[Markup], list[Markup]]:
    fastest = max((bandwidth for bandwidth in roofs.memory.values() if finite(bandwidth)), default=0.0)
    merged = list(_merged(roofs.compute))
    used = any(dtype in name.split() for names, _ in merged for name in names)
    lines, texts = [], []
    for (names, peak), text_y in zip(merged, spread([frame.y(peak) for _, peak in merged], LINE_HEIGHT, frame.bottom), strict=True):
        y = frame.y(peak)
        start = frame.x(peak / fastest) if fastest else frame.left
        ours = "" if used and not any(dtype in name.split() for name in names) else " used"
        lines.append(element("line", class_=f"roof compute{ours}", x1=start, y1=y, x2=frame.right, y2=y))
        lines.append(element("line", class_="leader", x1=frame.right, y1=y, x2=frame.right + 12, y2=text_y))
        text = f"{fmt.flop_rate(peak)} {_names(names, dtype)}"
        shown = (element("title", text), fitted(text, WIDTH - frame.right - LABEL_GAP, bold=bool(ours)))
        texts.append(element("text", *shown, class_=f"label compute{ours}", x=frame.right + LABEL_GAP, y=text_y + 3.5))
    return lines, texts


def _merged(compute: Mapping[str, float]) -> Iterator[tuple[list[str], float]]:
    """Roofs within 2 % of each other as one, highest first: float16 and bfloat16 mostly share a peak."""
    names: list[str] = []
    level = 0.0
    for name, peak in sorted(((n, p) for n, p in compute.items() if finite(p)), key=lambda item: -item[1]):
        if names and peak < 0.98 * level:
            yield names, level
            names = []
        level = level if names else peak
        names.append(name)
    if names:
        yield names, level


def _names(names: Sequence[str], dtype: str) -> str:
    """`matrix float16`, `matrix bfloat16` → `matrix float16, bfloat16`; of more than two dtypes the pass's own stands for all."""
    units: dict[str, list[str]] = {}
    for name in names:
        unit, _, kind = fmt.plain(name).rpartition(" ")
        units.setdefault(unit, []).append(kind)
    texts = []
    for unit, kinds in units.items():
        first = dtype if dtype in kinds else kinds[0]
        listed = ", ".join(kinds) if len(kinds) <= 2 else f"{first} +{len(kinds) - 1}"
        texts.append(f"{unit} {listed}".strip())
    return "; ".join(texts)


def _attainable(profile: Profile, frame: Frame) -> Markup:
    """The region under the roofs that bind this pass: the outermost memory and the best peak of its dtype."""
    peaks = {name: peak for name, peak in profile.roofs.compute.items() if finite(peak)}
    ours = [peak for name, peak in peaks.items() if profile.dtype in name.split()] or list(peaks.values())
    outermost = [bandwidth for bandwidth in profile.roofs.memory.values() if finite(bandwidth)][-1:]
    if not ours or not outermost or (ends := slanted(outermost[0], frame, max(ours))) is None:
        return Markup("")
    x1, y1, x2, y2 = ends
    corners = [(x1, frame.bottom), (x1, y1), (x2, y2), (frame.right, y2), (frame.right, frame.bottom)]
    return element("polygon", class_="attainable", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in corners))


def _place(row: OpRow, frame: Frame) -> tuple[float, float]:
    """Where the op stands, in pixels; without bytes its intensity is infinite, without time it is drawn at its roof."""
    return frame.x(outer_intensity(row) or math.inf), frame.y(achieved_flops(row) or finite(row.roof_flops))


def _circles(counted: Sequence[tuple[int, OpRow]], frame: Frame, kinds: Mapping[str, str]) -> Iterator[Markup]:
    """Longest first, so that the small ones lie on top and stay reachable."""
    whole = sum(spent_s(row) for _, row in counted) or 1.0
    for index, row in sorted(counted, key=lambda pair: -spent_s(pair[1])):
        share = spent_s(row) / whole
        rate, (x, y) = achieved_flops(row), _place(row, frame)
        yield element(
            "circle",
            element("title", f"{label(row)} ({fmt.plain(row.kind)}): {fmt.flop_rate(rate or None)}, {fmt.seconds(spent_s(row))}"),
            class_=f"op b-{slug(row.bottleneck)} {kinds.get(row.kind, 'k7')}",
            data_name=row.name,
            data_i=index,
            cx=round(x, 1),
            cy=round(y, 1),
            r=round(min(3 + 22 * math.sqrt(share), 18.0), 1),
        )
