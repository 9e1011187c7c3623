"""The pass over time: one bar an op, on a lane for all, a lane for what was measured, and a lane for each kind.

    Profile.rows(start_s, time_s) ──> Timeline(lanes, stages, ticks, svg)      x in per cent of the pass, y in pixels

Horizontal positions are per cent of the drawing's width, so the page zooms by widening it and no text is stretched. Measured
medians are laid end to end: ops are timed one by one and have no common clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from ..core.profile import OpRow, Profile
from . import format as fmt
from .summary import finite, shares, slug
from .svg import element, group, nice_ticks

STAGE_HEIGHT, MAIN_HEIGHT, KIND_HEIGHT, GAP = 20, 30, 16, 8
KIND_LANES, STAGE_COUNT = 7, 100
CHARACTERS_ACROSS = 140  # of stage labels, on a page of the usual width
Placed = tuple[int, OpRow, float, float]  # index, row, start_s, duration_s


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    detail: str
    top: int
    height: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """What the page needs to lay the lanes out; `end_s` is the right edge."""

    svg: Markup
    lanes: tuple[Lane, ...]
    ticks: tuple[tuple[str, str], ...]  # position in per cent, text
    height: int
    end_s: float


def draw_timeline(profile: Profile, kinds: Mapping[str, str]) -> Timeline | None:
    """None when no row takes any time."""
    expected = [(i, row, finite(row.start_s), finite(row.time_s)) for i, row in enumerate(profile.rows) if finite(row.time_s)]
    measured = list(_end_to_end(profile.rows))
    end_s = max((start + time for _, _, start, time in (*expected, *measured)), default=0.0)
    if not end_s:
        return None
    drawn: list[Markup] = []
    lanes: list[Lane] = []
    top = 0

    def lane(name: str, placed: list[Placed], height: int) -> None:
        nonlocal top
        drawn.append(group(_bars(placed, end_s, kinds, top, height)))
        lanes.append(Lane(name, fmt.seconds(sum(time for *_, time in placed)), top, height))
        top += height + GAP

    if stages := _stages(expected or measured):
        drawn.append(group(_ribbon(stages, end_s, top), class_="stages"))
        lanes.append(Lane("stage", "", top, STAGE_HEIGHT))
        top += STAGE_HEIGHT + GAP
    for name, placed in (("expected", expected), ("measured", measured)):
        if placed:
            lane(name, placed, MAIN_HEIGHT)
    for kind, placed in _by_kind(profile, expected or measured):
        lane(kind, placed, KIND_HEIGHT)
    described = f"Timeline of {profile.model} on {profile.target}: {len(expected or measured)} ops over {fmt.seconds(end_s)}"
    svg = element("svg", *drawn, class_="timeline-bars", height=top, width="100%", role="img", aria_label=described)
    # A label that starts in the last few per cent would be cut off by the edge.
    ticks = tuple((f"{100 * value / end_s:.3f}", fmt.seconds(value)) for value in nice_ticks(0.0, end_s, 8) if value < 0.96 * end_s)
    return Timeline(svg, tuple(lanes), ticks, top, end_s)


def _end_to_end(rows: Iterable[OpRow]) -> Iterator[Placed]:
    clock = 0.0
    for index, row in enumerate(rows):
        if row.measured and finite(row.measured.median_s):
            yield index, row, clock, row.measured.median_s
            clock += row.measured.median_s


def _bars(placed: Iterable[Placed], end_s: float, kinds: Mapping[str, str], top: int, height: int) -> Iterator[Markup]:
    for index, row, start, time in placed:
        # Below a twentieth of a per cent a bar would vanish on screen.
        yield element(
            "rect",
            class_=f"b-{slug(row.bottleneck)} {kinds.get(row.kind, 'k7')}",
            data_i=index,
            x=_percent(start, end_s),
            width=_percent(max(time, 0.0005 * end_s), end_s),
            y=top,
            height=height,
        )


def _by_kind(profile: Profile, placed: list[Placed]) -> Iterator[tuple[str, list[Placed]]]:
    """A lane for each of the heaviest kinds, one for the rest; none when there is but one kind."""
    order = [share.kind for share in shares(profile) if any(row.kind == share.kind for _, row, _, _ in placed)]
    if len(order) < 2:
        return
    leading = order if len(order) <= KIND_LANES else order[: KIND_LANES - 1]
    for kind in leading:
        yield fmt.plain(kind), [item for item in placed if item[1].kind == kind]
    if rest := [item for item in placed if item[1].kind not in leading]:
        yield "other", rest


def _stages(placed: list[Placed]) -> list[tuple[str, float, float]]:
    """(name, start, end) of runs of ops under the same module, as deep as still gives few enough runs to read."""
    found: list[tuple[str, float, float]] = []
    for depth in range(1, 5):
        runs = []
        for name, items in groupby(placed, key=lambda item: ".".join(item[1].layer.split(".")[:depth])):
            members = list(items)
            runs.append((fmt.plain(name), members[0][2], members[-1][2] + members[-1][3]))
        if len(runs) > STAGE_COUNT:
            break
        found = runs
    return found if len(found) > 1 else []


def _ribbon(stages: list[tuple[str, float, float]], end_s: float, top: int) -> Iterator[Markup]:
    """Alternating boxes, named in full where that fits, else by the last part; of narrow numbered blocks only every so many."""
    across = CHARACTERS_ACROSS / end_s
    step = _number_step([(name.rpartition(".")[2], (end - start) * across) for name, start, end in stages])
    for position, (name, start, end) in enumerate(stages):
        place = {"x": _percent(start, end_s), "width": _percent(end - start, end_s), "y": top, "height": STAGE_HEIGHT}
        yield element("rect", element("title", name), class_="even" if position % 2 else "odd", **place)
        room, last = (end - start) * across, name.rpartition(".")[2]
        text = name if len(name) <= room else last
        if int(text) % step == 0 if text.isdecimal() else len(text) <= room:
            yield element("text", text, x=_percent((start + end) / 2, end_s), y=top + 14, text_anchor="middle", aria_hidden="true")


def _number_step(boxes: Sequence[tuple[str, float]]) -> int:
    """Of blocks numbered 0, 1, 2, …: label every how many, so that neighbours keep a character apart."""
    numbered = sorted((room, len(text)) for text, room in boxes if text.isdecimal())
    if not numbered:
        return 1
    typical, longest = numbered[len(numbered) // 2][0], max(length for _, length in numbered)
    return next((step for step in (1, 2, 5, 10, 20, 50) if step * typical >= longest + 1), 100)


def _percent(value: float, whole: float) -> str:
    return f"{100 * value / whole:.3f}".rstrip("0").rstrip(".") + "%"
