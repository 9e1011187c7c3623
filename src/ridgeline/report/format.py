"""Numbers as people read them: three significant digits, a unit that keeps them between 1 and 1,000.

    3.13e-3 s ──seconds──> "3.13 ms"      15.01e9 B ──size──> "15 GB"      989e12 ──flop_rate──> "989 TFLOP/s"

Decimal prefixes only (1 kB = 1,000 B). Nothing here raises on a number: None reads "–", an infinity "∞", a NaN "n/a".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MISSING, NOT_A_NUMBER = "–", "n/a"
_LARGE = ("", "k", "M", "G", "T", "P", "E", "Z")
_SMALL = ("", "m", "µ", "n", "p", "f")


def significant(value: float | None, digits: int = 3) -> str:
    """`value` rounded to `digits` significant digits, plain notation, thousands separated, no trailing zeros."""
    if odd := _odd(value):
        return odd
    assert value is not None
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if not -4 <= magnitude < 15:
        return f"{value:.{digits - 1}e}"
    rounded = round(value, digits - 1 - magnitude)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    text = f"{rounded:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def scaled(value: float | None, unit: str, digits: int = 3) -> str:
    """`value` with the decimal prefix that suits it: scaled(236e6, "FLOP") = "236 MFLOP"."""
    if odd := _odd(value):
        return odd if odd in (MISSING, NOT_A_NUMBER) else f"{odd} {unit}"
    assert value is not None
    if value == 0:
        return f"0 {unit}"
    # Rounding first makes 999.96 µs read "1 ms" and not "1,000 µs".
    rounded = float(f"{value:.{digits - 1}e}")
    if math.isinf(rounded):  # rounds past the largest float
        rounded = value
    power = math.floor(math.floor(math.log10(abs(rounded))) / 3)
    power = max(1 - len(_SMALL), min(power, len(_LARGE) - 1))
    prefix = _LARGE[power] if power >= 0 else _SMALL[-power]
    return f"{significant(rounded / 1000.0**power, digits)} {prefix}{unit}"


def seconds(value: float | None) -> str:
    """Time, never below a nanosecond's prefix nor above the second's: "118 µs", "1,200 s"."""
    if value is not None and abs(value) >= 1 and math.isfinite(value):
        return f"{significant(value)} s"
    if value is not None and 0 < abs(value) < 1e-9:
        return f"{significant(value * 1e9)} ns"
    return scaled(value, "s")


def size(value: float | None) -> str:
    """Bytes, decimal: "1.93 MB"."""
    return scaled(value, "B") if value is None or abs(value) >= 1 or value == 0 else f"{significant(value)} B"


def flop(value: float | None) -> str:
    return scaled(value, "FLOP")


def flop_rate(value: float | None) -> str:
    return scaled(value, "FLOP/s")


def byte_rate(value: float | None) -> str:
    return scaled(value, "B/s")


def energy(value: float | None) -> str:
    return scaled(value, "J")


def count(value: float | None) -> str:
    """A number of things: "25.6 M", "512"."""
    return scaled(value, "").strip()


def rate(value: float | None, unit: str) -> str:
    """Things a second, kept whole up to a million: "2,310 samples/s"."""
    return f"{significant(value)} {unit}" if value is not None and 1 <= abs(value) < 1e6 else scaled(value, unit)


def fixed(value: float | None) -> str:
    """For columns under one unit: at most three decimals, "<0.001" below them."""
    odd = _odd(value)
    if odd or value is None:
        return odd
    if 0 < abs(value) < 0.001:
        return "<0.001"
    return significant(value) if abs(value) >= 1 else f"{value:.3f}".rstrip("0").rstrip(".")


def many(number: int, noun: str) -> str:
    """1 view, 2 views, 1,214 ops."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def percent(fraction: float | None) -> str:
    """0.623 → "62 %", 0.034 → "3.4 %", 0.0004 → "<0.1 %"."""
    if odd := _odd(fraction):
        return odd if odd in (MISSING, NOT_A_NUMBER) else f"{odd} %"
    assert fraction is not None
    points = 100 * fraction
    if 0 < abs(points) < 0.1:
        return "<0.1 %" if points > 0 else ">-0.1 %"
    return f"{points:,.1f} %" if 0 < abs(points) < 9.95 else f"{points:,.0f} %"


def signed_percent(fraction: float | None) -> str:
    """An error, with its sign: "+5.8 %", "-12 %"."""
    text = percent(fraction)
    return f"+{text}" if fraction is not None and fraction > 0 and not text.startswith("<") else text


def speedup(ratio: float | None) -> str:
    """1.8 → "1.8x"; what would take no time at all reads "∞"."""
    odd = _odd(ratio)
    return odd or f"{significant(ratio)}x"


def shape(shapes: Sequence[Sequence[int]]) -> str:
    """The first shape as "1x64x112x112"; further ones are counted."""
    if not shapes:
        return MISSING
    first = "x".join(str(extent) for extent in shapes[0]) or "scalar"
    return first if len(shapes) == 1 else f"{first} +{len(shapes) - 1}"


def plain(text: object) -> str:
    """User text on one line with nothing that could steer a terminal: control and bidirectional marks become "�"."""
    return "".join(character if character.isprintable() else "�" for character in str(text))


def crop(text: str, width: int, *, keep: str = "start") -> str:
    """At most `width` characters, the loss marked by "…"; of a layer path the end says most, so keep="end"."""
    if len(text) <= width:
        return text
    if width <= 1:
        return "…"[:width]
    return f"…{text[-(width - 1) :]}" if keep == "end" else f"{text[: width - 1]}…"


def _odd(value: float | None) -> str:
    if value is None:
        return MISSING
    if math.isnan(value):
        return NOT_A_NUMBER
    return ("∞" if value > 0 else "-∞") if math.isinf(value) else ""
