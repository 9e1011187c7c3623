"""What every renderer asks of a Profile, answered once: which rows to show, where time goes, how far from the limit.

    Profile(rows, total) ──> shown rows, shares by kind and layer, per cent of limit, throughput, error of prediction, verdict

Times in seconds. A row's `spent_s` is its measured median where there is one, its expected time otherwise; so is the pass's.
Values that are not finite or not positive never divide: the answer is then None, which formats as "–".
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..core.profile import Advice, OpRow, Profile, Share
from .format import percent, plain, seconds, speedup

FAMILIES = {
    "compute": ("compute",),
    "array": ("array",),
    "memory": ("memory",),
    "adc": ("adc",),
    "waiting": ("exposed refills", "fill and drain"),
    "communication": ("communication", "noc"),
    "host": ("host",),
    "overhead": ("overhead",),
}
"""Drawing class → the bottlenecks drawn in its colour: array and adc of a crossbar, waiting and noc of a spatial array, host of both."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A named part of the pass's time."""

    name: str
    time_s: float
    fraction: float
    ops: int


def finite(value: float | None) -> float:
    """`value`, or 0 where it is missing, infinite, NaN or negative: safe to add and to draw."""
    return value if value is not None and math.isfinite(value) and value > 0 else 0.0


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """numerator / denominator, None unless both are positive and finite."""
    top, bottom = finite(numerator), finite(denominator)
    return top / bottom if top and bottom else None


def spent_s(row: OpRow) -> float:
    """What the row took if it was measured, what it is expected to take otherwise."""
    return finite(row.measured.median_s) if row.measured else finite(row.time_s)


def pass_s(profile: Profile) -> float:
    """The same for the whole pass."""
    return finite(profile.total.measured.median_s) if profile.total.measured else finite(profile.total.time_s)


def is_view(row: OpRow) -> bool:
    """A row that neither computes, moves bytes nor takes time: it only renames memory."""
    return row.kind == "view" or not (row.flops or row.bytes or spent_s(row) or finite(row.time_s))


def shown_rows(profile: Profile) -> list[OpRow]:
    """Rows that are not views, longest first; execution order among equals."""
    return sorted((row for row in profile.rows if not is_view(row)), key=spent_s, reverse=True)


def label(row: OpRow) -> str:
    """The layer path, or the op's name where it has none."""
    return plain(row.layer or row.name)


def outer_intensity(row: OpRow) -> float:
    """FLOP a byte moved at the outermost memory level, else FLOP a compulsory byte."""
    outermost = list(row.level_intensity.values())[-1:]
    return (finite(outermost[0]) if outermost else 0.0) or finite(row.intensity)


def achieved_flops(row: OpRow) -> float:
    """FLOP/s the op reaches; 0 where it has no time."""
    return ratio(row.flops, spent_s(row)) or 0.0


def measured_rows(profile: Profile) -> list[OpRow]:
    """Rows with both a prediction and a measurement to set against each other."""
    return [row for row in profile.rows if row.measured and finite(row.measured.median_s) and finite(row.time_s)]


def prediction_error(expected_s: float | None, measured_s: float | None) -> float | None:
    """expected / measured - 1: positive when the prediction was too slow."""
    found = ratio(expected_s, measured_s)
    return None if found is None else found - 1


def limit_fraction(profile: Profile) -> float | None:
    """How much of the attainable speed the pass reaches."""
    return ratio(profile.total.limit_s, pass_s(profile))


def throughput(profile: Profile) -> tuple[float | None, str]:
    """Items a second and what an item is: a token for a language model, a sample otherwise."""
    items = profile.batch * (profile.context or 1) if profile.phase == "prefill" else profile.batch
    return ratio(items, pass_s(profile)), "tokens/s" if profile.phase in ("prefill", "decode") else "samples/s"


def shares(profile: Profile) -> list[Share]:
    """Time by kind, largest first; summed from the rows when the profile brings none."""
    if profile.shares:
        return sorted(profile.shares, key=lambda share: finite(share.time_s), reverse=True)
    return [Share(s.name, s.time_s, s.fraction, _if_free(s.fraction)) for s in slices((row.kind, row) for row in profile.rows)]


def shares_basis(profile: Profile) -> str:
    """Whether the shares sum the expected or the measured times; says so only where both exist."""
    if not any(row.measured for row in profile.rows):
        return ""
    stated, expected = (sum(finite(part.time_s) for part in parts) for parts in (shares(profile), profile.rows))
    return "by expected time" if abs(stated - expected) <= 0.01 * expected else "by measured time"


def slices(named: Iterable[tuple[str, OpRow]]) -> list[Slice]:
    """Time summed by name, largest first; names that take none are left out."""
    times: dict[str, float] = defaultdict(float)
    ops: dict[str, int] = defaultdict(int)
    for name, row in named:
        times[name] += spent_s(row)
        ops[name] += 1
    total = sum(times.values())
    return [Slice(n, t, t / total, ops[n]) for n, t in sorted(times.items(), key=lambda item: -item[1]) if t > 0]


def by_layer(profile: Profile) -> list[Slice]:
    return slices((label(row), row) for row in profile.rows)


def by_bottleneck(profile: Profile) -> list[Slice]:
    """Time by limiter as the estimate states it, else summed from the rows."""
    stated = {name: finite(time_s) for name, time_s in profile.total.by_bottleneck.items()}
    total = sum(stated.values())
    if not total:
        return slices((row.bottleneck or "unknown", row) for row in profile.rows)
    ops: dict[str, int] = defaultdict(int)
    for row in profile.rows:  # an op limited by `a+b` counts with a where the estimate puts its time there
        ops[row.bottleneck if row.bottleneck in stated else row.bottleneck.partition("+")[0]] += 1
    return [Slice(n, t, t / total, ops[n]) for n, t in sorted(stated.items(), key=lambda item: -item[1]) if t > 0]


def top_cause(profile: Profile) -> str:
    """The cause behind most of the time, or "–"."""
    causes = slices((plain(row.cause), row) for row in profile.rows if row.cause)
    return causes[0].name if causes else "–"


def slug(bottleneck: str) -> str:
    """The drawing class of a bottleneck: a key of FAMILIES, "mixed" for `a+b`, "other" where it is not known.

    A name of no family is that of a memory: spatial arrays name theirs in their files.
    """
    if "+" in bottleneck:
        return "mixed"
    if bottleneck in ("", "unknown"):
        return "other"
    return next((family for family, names in FAMILIES.items() if bottleneck in names), "memory")


def limiters_present(profile: Profile) -> list[tuple[str, str]]:
    """(drawing class, names) of every bottleneck the rows show, in a fixed order, for a legend."""
    return limiters_named(row.bottleneck for row in profile.rows if not is_view(row))


def limiters_of(profiles: Iterable[Profile]) -> list[tuple[str, str]]:
    """The same for what the bars of several profiles show."""
    return limiters_named(part.name for profile in profiles for part in by_bottleneck(profile))


def limiters_named(bottlenecks: Iterable[str]) -> list[tuple[str, str]]:
    present: dict[str, dict[str, None]] = defaultdict(dict)
    for name in bottlenecks:
        present[slug(name)][plain(name)] = None
    words = {"mixed": "two at once", "other": "not known"}
    return [(family, words.get(family) or ", ".join(present[family])) for family in (*FAMILIES, *words) if family in present]


def setting_words(profile: Profile) -> list[str]:
    """batch 1 · float16 · decode, context 192 · eager."""
    words = [f"batch {profile.batch}", profile.dtype]
    if profile.phase or profile.context is not None:
        context = f"context {profile.context}" if profile.context is not None else ""
        words.append(", ".join(word for word in (profile.phase, context) if word))
    return [plain(word) for word in (*words, profile.mode) if word]


def verdict(profile: Profile) -> list[str]:
    """The report in up to three sentences, for those who read no further."""
    total, spent = profile.total, pass_s(profile)
    if not spent:
        return ["This profile holds no time: nothing was estimated or measured."]
    verb = "takes" if total.measured else "should take"
    reached = limit_fraction(profile)
    speed = f", {percent(reached)} of the speed this machine allows ({seconds(total.limit_s)})" if reached is not None else ""
    sentences = [f"One pass {verb} {seconds(spent)}{speed}."]
    if limiters := by_bottleneck(profile):
        sentences.append(f"{percent(limiters[0].fraction)} of the time goes to ops limited by {plain(limiters[0].name)}.")
    gains = best_advice(profile)
    if gains and gains[0].predicted_speedup > 1:
        sentences.append(f"Best next step: {plain(gains[0].change)}, {speedup(gains[0].predicted_speedup)} predicted.")
    return sentences


def best_advice(profile: Profile) -> list[Advice]:
    """Advice by predicted gain, largest first; another machine comes after what can be done on this one, no number last."""

    def rank(advice: Advice) -> tuple[bool, float]:
        return advice.change.startswith("device "), -finite(advice.predicted_speedup)

    return sorted(profile.advice, key=rank)


def agreement(rows: Sequence[OpRow], within: float = 0.3) -> tuple[int, float | None, float | None]:
    """Of measured rows: how many are predicted within a fraction, what part of the time they are, the median absolute error."""
    errors = [(abs(prediction_error(row.time_s, spent_s(row)) or 0.0), spent_s(row)) for row in rows]
    good = [time for error, time in errors if error <= within]
    ordered = sorted(error for error, _ in errors)
    return len(good), ratio(sum(good), sum(time for _, time in errors)), ordered[len(ordered) // 2] if ordered else None


def largest_misses(rows: Sequence[OpRow], most: int = 6) -> list[OpRow]:
    """The measured rows whose prediction is off by the most seconds."""
    return sorted(rows, key=lambda row: abs(finite(row.time_s) - spent_s(row)), reverse=True)[:most]


def _if_free(fraction: float) -> float:
    return 1 / (1 - fraction) if fraction < 1 else math.inf
