"""Just enough SVG to draw a chart on the server: escaped elements, scales, axes, labels that do not overlap.

    values ──LogScale / LinearScale──> pixels ──Frame.axes, element──> Markup (safe to place in a page)

Colours come from the page's style sheet by class, so one drawing serves the light and the dark theme. Values that a scale
cannot show (zero, infinite) are drawn at the edge of the plot, never left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from markupsafe import Markup, escape

CHARACTER_WIDTH = 6.3  # px of an average character at the 11 px of chart labels

EM = 11.0  # px, of the same labels
NARROW, WIDE = frozenset(" .,;:'|!()[]/-fijlrt"), frozenset("mwMW@%…")


def text_width(text: str, *, bold: bool = False) -> float:
    """At least the px of a label in the fonts of the page: by kinds of character, since thirty of them add up to 30 px of difference."""
    ems = sum(0.38 if c in NARROW else 1.0 if c in WIDE else 0.74 if c.isupper() else 0.63 for c in text)
    return EM * ems * (1.06 if bold else 1.0)


def fitted(text: str, room: float, *, bold: bool = False) -> str:
    """As much of the start of `text` as `room` px hold, the loss marked by "…"."""
    if text_width(text, bold=bold) <= room:
        return text
    kept = next((count for count in range(len(text) - 1, 0, -1) if text_width(f"{text[:count]}…", bold=bold) <= room), 0)
    return f"{text[:kept].rstrip()}…"


def number(value: float) -> str:
    """Two decimals at most: 0.01 px is below what a screen shows and shorter files load faster."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """<tag attributes>children</tag>; `class_` becomes class, `data_name` data-name; None leaves an attribute out."""
    parts = [f"<{tag}"]
    for name, value in attributes.items():
        if value is not None:
            text = number(value) if isinstance(value, float) else escape(value)
            parts.append(f' {name.rstrip("_").replace("_", "-") if name != "viewBox" else name}="{text}"')
    body = "".join(str(escape(child)) for child in children)
    parts.append(f">{body}</{tag}>" if body else "/>")
    return Markup("".join(parts))


def group(children: Iterable[object], **attributes: object) -> Markup:
    return element("g", *children, **attributes)


class Scale(Protocol):
    """From data to pixels."""

    def __call__(self, value: float) -> float: ...

    def ticks(self) -> list[float]: ...


@dataclass(frozen=True, slots=True)
class LogScale:
    """`low` to `high` (both > 0) over `start` to `end` pixels, a decade everywhere the same length."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        if math.isnan(value) or value <= self.low:
            return self.start
        if value >= self.high:
            return self.end
        return self.start + (self.end - self.start) * math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[float]:
        """Decades; of a narrow range also 2 and 5 of each."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        factors = (1.0, 2.0, 5.0) if math.log10(self.high / self.low) < 2.2 else (1.0,)
        found = (factor * 10.0**power for power in range(first, last + 1) for factor in factors)
        return [value for value in found if self.low * 0.999 <= value <= self.high * 1.001]


@dataclass(frozen=True, slots=True)
class LinearScale:
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        bounded = self.low if math.isnan(value) else min(max(value, self.low), self.high)
        return self.start + (self.end - self.start) * (bounded - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        return nice_ticks(self.low, self.high, 5)


def nice_ticks(low: float, high: float, about: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within low..high, roughly `about` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def log_domain(values: Iterable[float], *, margin: float = 1.6, decades: float = 2.0, most: float = 10.0) -> tuple[float, float]:
    """A range that holds the positive finite values with a margin, at least `decades` and at most `most` decades long."""
    usable = [value for value in values if math.isfinite(value) and value > 0]
    if not usable:
        return 1.0, 10.0**decades
    low, high = min(usable) / margin, max(usable) * margin
    low = max(low, high / 10.0**most)
    lacking = decades - math.log10(high / low)
    return (low / 10 ** (lacking / 2), high * 10 ** (lacking / 2)) if lacking > 0 else (low, high)


@dataclass(frozen=True, slots=True)
class Frame:
    """The plot area in pixels, and the scales over it."""

    left: float
    top: float
    right: float
    bottom: float
    x: Scale
    y: Scale

    def axes(self, x_title: str, y_title: str, x_text: Callable[[float], str], y_text: Callable[[float], str]) -> Markup:
        """Grid, tick labels and titles; labels thin out where they would touch, and an x axis without a title has none."""
        parts: list[Markup] = []
        x_ticks, y_ticks = self.x.ticks(), self.y.ticks()
        x_every, y_every = self._every(x_ticks, x_text), max(1, math.ceil(len(y_ticks) * 18 / (self.bottom - self.top)))
        for index, value in enumerate(x_ticks):
            at = self.x(value)
            parts.append(element("line", class_="grid", x1=at, x2=at, y1=self.top, y2=self.bottom))
            if index % x_every == 0 and x_title:
                parts.append(element("text", x_text(value), class_="tick", x=at, y=self.bottom + 16.0, text_anchor="middle"))
        for index, value in enumerate(y_ticks):
            at = self.y(value)
            parts.append(element("line", class_="grid", x1=self.left, x2=self.right, y1=at, y2=at))
            if index % y_every == 0:
                parts.append(element("text", y_text(value), class_="tick", x=self.left - 8.0, y=at + 3.5, text_anchor="end"))
        middle = (self.left + self.right) / 2
        if x_title:
            parts.append(element("text", x_title, class_="axis", x=middle, y=self.bottom + 36.0, text_anchor="middle"))
        parts.append(element("text", y_title, class_="axis", x=self.left, y=self.top - 10.0, text_anchor="start"))
        return group(parts, class_="axes", aria_hidden="true")

    def _every(self, ticks: Sequence[float], text: Callable[[float], str]) -> int:
        needed = sum(len(text(value)) * CHARACTER_WIDTH + 10 for value in ticks)
        return max(1, math.ceil(needed / (self.right - self.left)))


class Labels:
    """Texts along lines, each moved along its line until it touches none placed before, nor any of the `avoided` points."""

    def __init__(self, avoided: Iterable[tuple[float, float]] = (), clearance: float = 13.0) -> None:
        self._clearance = clearance
        # Points closer than 4 px to each other block the same places: one of them is enough to look at.
        self._taken = list({(round(x / 4) * 4.0, round(y / 4) * 4.0) for x, y in avoided})

    def place(
        self, text: str, anchors: Sequence[tuple[float, float]], angle: float = 0.0, *, lift: float = 5.0, class_: str = "label"
    ) -> Markup:
        """`text` at the first free anchor (its left end, px), else at the first; turned by `angle` degrees, lifted off its line."""
        turned, length = math.radians(angle), len(text) * CHARACTER_WIDTH
        options = [(x + lift * math.sin(turned), y - lift * math.cos(turned)) for x, y in anchors]
        covered = [[(x + s * math.cos(turned), y + s * math.sin(turned)) for s in _steps(length)] for x, y in options]
        chosen = next((index for index, points in enumerate(covered) if self._free(points)), 0)
        self._taken += covered[chosen]
        x, y = options[chosen]
        rotation = f"rotate({number(angle)} {number(x)} {number(y)})" if angle else None
        return element("text", text, class_=class_, x=x, y=y, transform=rotation)

    def _free(self, points: Sequence[tuple[float, float]]) -> bool:
        return all(math.dist(ours, theirs) > self._clearance for ours in points for theirs in self._taken)


def spread(wanted: Sequence[float], least: float, bottom: float) -> list[float]:
    """Ascending positions (px) moved apart to at least `least`, as near to where they were wanted as a sweep down and up gives."""
    placed: list[float] = []
    for position in wanted:
        placed.append(max(position, placed[-1] + least) if placed else position)
    ceiling = bottom
    for index in reversed(range(len(placed))):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - least
    return placed


def _steps(length: float) -> list[float]:
    count = max(2, math.ceil(length / 6))
    return [length * index / (count - 1) for index in range(count)]


def drawing(width: float, height: float, description: str, *children: object, class_: str = "chart", **attributes: object) -> Markup:
    """The <svg> itself, scaling with the page, described for those who cannot see it."""
    view = f"0 0 {number(width)} {number(height)}"
    return element("svg", *children, class_=class_, viewBox=view, role="img", aria_label=description, **attributes)
