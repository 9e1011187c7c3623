"""The terminal's view: text tables by rich.

    Profile ──render_profile──> heading, totals, heaviest ops, where time goes, advice, uncounted, notes
    [Profile, …] ──render_comparison──> one row a target, the fastest marked
    [{value, time_s, throughput_per_s, bottleneck, roof_fraction}, …] ──render_sweep──> one row a point, changes of bottleneck marked

Columns are dropped, least telling first, until the table fits the width, and the text says which. Text from outside is
printed as it stands: markup is off, control characters are replaced.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..core.profile import Profile
from . import format as fmt
from . import summary
from .basis import fastest_s, ranked

STYLES = {"compute": "cyan", "memory": "yellow", "communication": "magenta", "overhead": "red", "mixed": "green", "other": "default",
          "array": "cyan", "adc": "blue", "waiting": "red", "host": "white"}  # fmt: skip
BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a fitted table; `floor` is the least width a text column may shrink to, None keeps it whole."""

    title: str
    cell: Callable[[Any], str]
    right: bool = True
    floor: int | None = None
    drop: int = 0  # 0 never; otherwise the lowest is dropped first
    keep: str = "start"  # which end of a cropped text stays
    style: Callable[[Any], str] = lambda item: ""


def render_profile(profile: Profile, *, limit: int | None = 20, width: int | None = None, color: bool = False) -> str:
    """The whole profile as text; `limit` caps the op rows (None shows all), `width` defaults to the terminal's."""
    console = _console(width, color)
    console.print(_heading(f"{fmt.plain(profile.model)} on {fmt.plain(profile.target)}", *summary.setting_words(profile)))
    console.print(_pairs(_totals(profile)))
    _print_ops(console, profile, limit)
    _print_shares(console, profile)
    _print_advice(console, profile)
    _print_remarks(console, profile)
    return _text(console)


def render_comparison(profiles: Sequence[Profile], *, width: int | None = None, color: bool = False) -> str:
    """One model on several targets, fastest first; `x fastest` is the time over the fastest target's."""
    console = _console(width, color)
    if not profiles:
        return "nothing to compare\n"
    first = profiles[0]
    console.print(_heading(f"{fmt.plain(first.model)} on {fmt.many(len(profiles), 'target')}", *summary.setting_words(first)))
    _print_grid(console, _comparison_columns(fastest_s(profiles)), ranked(profiles))
    console.print("  * fastest" + ("; measured where a measurement exists" if any(p.total.measured for p in profiles) else ""))
    return _text(console)


def render_sweep(points: Sequence[Mapping[str, Any]], parameter: str, *, width: int | None = None, color: bool = False) -> str:
    """Time and throughput against one parameter; `<` marks the points where the bottleneck changes."""
    console = _console(width, color)
    console.print(_heading(f"sweep of {fmt.plain(parameter)}", f"{len(points)} points"))
    rates = [summary.finite(point.get("throughput_per_s")) for point in points]
    table = _table()
    for title in (fmt.plain(parameter), "time", "throughput", "of roof"):
        table.add_column(title, justify="right")
    table.add_column("", width=20)
    table.add_column("bottleneck")
    before = None
    for point, rate in zip(points, rates, strict=True):
        now = str(point.get("bottleneck", ""))
        changed = before is not None and now != before
        limiter = _bottleneck(now)
        if changed:
            limiter.append(f"  < was {fmt.plain(before)}", style="bold")
        if point.get("fits") is False:
            limiter.append("  does not fit", style="bold")
        value = point.get("value")
        shown = fmt.significant(value, 6) if isinstance(value, int | float) else fmt.plain(value)
        rate_text, roof_text = fmt.rate(point.get("throughput_per_s"), "/s"), fmt.percent(point.get("roof_fraction"))
        table.add_row(shown, fmt.seconds(point.get("time_s")), rate_text, roof_text, _bar(rate, max(rates), 20), limiter)
        before = now
    console.print(table)
    if any(rates):
        console.print(f"  throughput {_sparkline(rates)}  {fmt.rate(min(rates), '/s')} to {fmt.rate(max(rates), '/s')}")
    return _text(console)


def _totals(profile: Profile) -> Iterable[tuple[str, Text | str]]:
    total, timing = profile.total, profile.total.measured
    yield "work", f"{fmt.flop(total.flops)} ({fmt.flop(total.matmul_flops)} in matrix products), {fmt.count(total.parameters)} parameters"
    split = ", ".join(f"{name.replace('_', ' ')} {fmt.size(value)}" for name, value in total.bytes_by.items())
    yield "bytes", fmt.size(total.bytes) + (f" ({split})" if split else "")
    if total.limit_s:
        yield "limit", f"{fmt.seconds(total.limit_s)}: no implementation on this target can be faster"
    if (total.time_s or not timing) and (total.limit_s or not timing):
        yield "expected", f"{fmt.seconds(total.time_s)}, {fmt.percent(summary.ratio(total.limit_s, total.time_s))} of the limit"
    if timing:
        spread = f"p20 {fmt.seconds(timing.p20_s)}, p80 {fmt.seconds(timing.p80_s)}, {timing.repeats} repeats"
        reached = f", {fmt.percent(summary.ratio(total.limit_s, timing.median_s))} of the limit" if total.limit_s else ""
        yield "measured", f"{fmt.seconds(timing.median_s)} ({spread}){reached}"
        error = summary.prediction_error(total.time_s, timing.median_s)
        if total.limit_s:  # a profile that was only measured predicts nothing
            yield "prediction", f"{fmt.signed_percent(error)} against the measurement" if error is not None else fmt.MISSING
    limiters = ", ".join(f"{fmt.plain(part.name)} {fmt.percent(part.fraction)}" for part in summary.by_bottleneck(profile))
    yield "bottleneck", Text.assemble(_bottleneck(total.bottleneck), f" (of the time: {limiters})" if limiters else "")
    peak = f", {fmt.size(total.measured_peak_bytes)} measured beyond weights and inputs" if total.measured_peak_bytes is not None else ""
    cache = f", {fmt.size(total.kv_cache_bytes)} KV cache" if total.kv_cache_bytes else ""
    yield "memory", f"{fmt.size(total.peak_activation_bytes)} peak activations{cache}, {fmt.size(total.weight_bytes)} weights{peak}"
    rate, unit = summary.throughput(profile)
    yield "throughput", fmt.rate(rate, unit)
    if total.energy_j is not None:
        yield "energy", fmt.energy(total.energy_j)


def _op_columns(profile: Profile) -> list[Column]:
    whole = sum(map(summary.spent_s, profile.rows))
    columns = [
        Column("layer", summary.label, right=False, floor=14, keep="end"),
        Column("kind", lambda row: fmt.plain(row.kind), right=False, drop=7),
        Column("shape", lambda row: fmt.shape(row.output_shapes), right=False, floor=10, drop=1),
        Column("GFLOP", lambda row: fmt.fixed(row.flops / 1e9), drop=6),
        Column("MB", lambda row: fmt.fixed(row.bytes / 1e6), drop=5),
        Column("FLOP/B", lambda row: fmt.fixed(row.intensity), drop=3),
        Column("limit", lambda row: fmt.seconds(row.limit_s), drop=4),
        Column("expected", lambda row: fmt.seconds(row.time_s)),
        Column("share", lambda row: fmt.percent(summary.spent_s(row) / whole if whole else None)),
        Column("bottleneck", lambda row: fmt.plain(row.bottleneck), right=False, style=lambda row: _style(row.bottleneck)),
        Column("cause", lambda row: fmt.plain(row.cause), right=False, floor=16, drop=2),
    ]
    if any(row.measured for row in profile.rows):
        columns.insert(8, Column("measured", lambda row: fmt.seconds(row.measured.median_s if row.measured else None)))
    return columns


def _comparison_columns(least_s: float) -> list[Column]:
    def mark(profile: Profile) -> str:
        return "*" if least_s and summary.pass_s(profile) == least_s else ""

    return [
        Column("", mark, right=False),
        Column("target", lambda profile: fmt.plain(profile.target), right=False, style=lambda profile: "bold" if mark(profile) else ""),
        Column("time", lambda profile: fmt.seconds(summary.pass_s(profile) or None)),
        Column("x fastest", lambda profile: fmt.speedup(summary.ratio(summary.pass_s(profile), least_s))),
        Column("limit", lambda profile: fmt.seconds(profile.total.limit_s), drop=4),
        Column("of limit", lambda profile: fmt.percent(summary.limit_fraction(profile))),
        Column("throughput", lambda profile: fmt.rate(*summary.throughput(profile)), drop=3),
        Column("energy", lambda profile: fmt.energy(profile.total.energy_j), drop=2),
        Column("bottleneck", lambda profile: fmt.plain(profile.total.bottleneck), right=False, style=lambda p: _style(p.total.bottleneck)),
        Column("top cause", summary.top_cause, right=False, floor=16, drop=1),
    ]


def _print_ops(console: Console, profile: Profile, limit: int | None) -> None:
    rows = summary.shown_rows(profile)
    views = len(profile.rows) - len(rows)
    kept = rows if limit is None else rows[: max(limit, 0)]
    if not rows:
        console.print(f"  no ops to show ({fmt.many(views, 'view')})")
        return
    if kept:
        _print_grid(console, _op_columns(profile), kept)
    if rest := rows[len(kept) :]:
        left, whole = sum(map(summary.spent_s, rest)), sum(map(summary.spent_s, rows))
        console.print(
            f"  … {fmt.many(len(rest), 'more op')}, {fmt.seconds(left)} in all ({fmt.percent(left / whole if whole else None)} of the time)"
        )
    if views:
        console.print(f"  {fmt.many(views, 'view')} not shown: no bytes moved")


def _print_grid(console: Console, columns: list[Column], items: Sequence[Any]) -> None:
    """One line an item, in the columns that fit; says which did not."""
    cells = [[column.cell(item) for item in items] for column in columns]
    natural = [max(len(column.title), *map(len, texts)) for column, texts in zip(columns, cells, strict=True)]
    least = [full if column.floor is None else min(full, column.floor) for column, full in zip(columns, natural, strict=True)]
    kept = sorted(range(len(columns)), key=lambda index: columns[index].drop or len(columns), reverse=True)
    while sum(least[index] + 2 for index in kept) > console.width and columns[kept[-1]].drop:
        kept.pop()
    spare = max(console.width - sum(least[index] + 2 for index in kept), 0)
    table = _table()
    lines: list[list[Text]] = [[] for _ in items]
    for index in sorted(kept):
        column = columns[index]
        width = least[index] + min(spare, natural[index] - least[index])
        spare -= width - least[index]
        table.add_column(column.title, justify="right" if column.right else "left", width=width, no_wrap=True, overflow="ellipsis")
        for line, item, text in zip(lines, items, cells[index], strict=True):
            line.append(Text(fmt.crop(text, width, keep=column.keep), style=column.style(item)))
    for line in lines:
        table.add_row(*line)
    console.print(table)
    if dropped := [column.title for index, column in enumerate(columns) if index not in kept]:
        console.print(f"  not at this width: {', '.join(dropped)}")


def _print_shares(console: Console, profile: Profile) -> None:
    found = [share for share in summary.shares(profile) if summary.finite(share.time_s)]
    if not found:
        return
    console.print(_heading("where time goes", *filter(None, [summary.shares_basis(profile)])))
    table = _table()
    for title in ("kind", "time", "share", "", "whole pass if free"):
        table.add_column(title, justify="right" if title in ("time", "share", "whole pass if free") else "left")
    for share in found:
        bar = _bar(share.fraction, 1.0, 24)
        table.add_row(
            fmt.plain(share.kind), fmt.seconds(share.time_s), fmt.percent(share.fraction), bar, fmt.speedup(share.speedup_if_free)
        )
    console.print(table)


def _print_advice(console: Console, profile: Profile) -> None:
    if not profile.advice:
        return
    console.print(_heading("what would help", "the estimate run again with the change made"))
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right", style="bold", no_wrap=True)
    grid.add_column()
    for advice in summary.best_advice(profile):
        times = f" ({fmt.seconds(advice.before_s)} to {fmt.seconds(advice.after_s)})" if advice.before_s and advice.after_s else ""
        line = Text(f"{fmt.plain(advice.change)}{times}; next limit: {fmt.plain(advice.next_limit) or fmt.MISSING}")
        grid.add_row(fmt.speedup(advice.predicted_speedup), line)
        if advice.detail:
            grid.add_row("", Text(fmt.plain(advice.detail), style="dim"))
    console.print(Padding(grid, (0, 0, 0, 2)))


def _print_remarks(console: Console, profile: Profile) -> None:
    if profile.uncounted:
        console.print(_heading("uncounted ops", f"{len(profile.uncounted)} without a formula"))
        for op in profile.uncounted:
            named = (
                f"{fmt.plain(op.get('operator') or op.get('name') or 'unknown')} at {fmt.plain(op.get('layer') or op.get('name') or '?')}"
            )
            console.print(Padding(f"{named}: {fmt.plain(op.get('why') or 'no formula')}", (0, 0, 0, 2)))
    if profile.notes:
        console.print(_heading("notes"))
        for note in profile.notes:
            console.print(Padding(fmt.plain(note), (0, 0, 0, 2)))


def _console(width: int | None, color: bool) -> Console:
    columns = width if width is not None else shutil.get_terminal_size((120, 40)).columns
    return Console(
        file=io.StringIO(), width=max(columns, 40), force_terminal=color, color_system="standard" if color else None,
        no_color=not color, markup=False, emoji=False, highlight=False, legacy_windows=False,
    )  # fmt: skip


def _text(console: Console) -> str:
    stream = console.file
    assert isinstance(stream, io.StringIO)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).strip("\n") + "\n"


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", show_edge=False)


def _heading(title: str, *words: str) -> Padding:
    return Padding(Text.assemble((title, "bold"), *(f" · {word}" for word in words)), (1, 0, 0, 0))


def _pairs(pairs: Iterable[tuple[str, Text | str]]) -> Padding:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, value in pairs:
        grid.add_row(name, value)
    return Padding(grid, (0, 0, 1, 2))


def _style(bottleneck: str) -> str:
    return STYLES[summary.slug(bottleneck)]


def _bottleneck(name: str) -> Text:
    return Text(fmt.plain(name) or fmt.MISSING, style=_style(name))


def _bar(value: float, largest: float, width: int) -> str:
    """A horizontal bar in eighths of a character; anything above zero shows at least one eighth."""
    fraction = min(summary.ratio(value, largest) or 0.0, 1.0)
    eighths = max(round(fraction * width * 8), 1 if fraction else 0)
    return "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else "")


def _sparkline(values: Sequence[float]) -> str:
    largest = max(values, default=0.0)
    return "".join(BLOCKS[round((len(BLOCKS) - 1) * value / largest)] if largest else BLOCKS[0] for value in values)
