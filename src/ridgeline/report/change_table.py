"""A Change as text: before and after of everything that was measured, one line a step, then what must be said beside it.

    Change ──render_change──> heading, table (before, after, change), table of steps, notes
      rows(change)   [(what, before, after, change)]      step_rows(change)   one line a step of a recipe

A share such as accuracy is shown in per cent and its change in points; what has no number reads "–".
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from ..core.change import Change, State
from . import format as fmt

HEADINGS = ("", "before", "after", "change")
SHARES = ("accuracy", "top1", "top5")


def summary(change: Change) -> str:
    """The whole Change in one line."""
    words = [f"{fmt.size(change.before.bytes_on_disk)} to {fmt.size(change.after.bytes_on_disk)} ({change.compression_ratio:.2f}x smaller)"]
    if change.speedup is not None:
        words.append(f"{change.speedup:.2f}x as fast on {fmt.plain(change.target)}")
    for name in _qualities(change):
        old, new = change.before.quality.get(name), change.after.quality.get(name)
        words.append(f"{fmt.plain(name)} {score(name, old)} to {score(name, new)}")
    return " · ".join(words)


def rows(change: Change) -> list[tuple[str, str, str, str]]:
    """Everything that was measured, one line each."""
    before, after = change.before, change.after
    found = [
        ("bytes on disk", f"{before.bytes_on_disk:,}", f"{after.bytes_on_disk:,}", f"{change.compression_ratio:.2f}x smaller"),
        ("parameters", f"{before.parameters:,}", f"{after.parameters:,}", _relative(before.parameters, after.parameters)),
        ("zeros", _sparsity(before), _sparsity(after), _target(change)),
        ("latency", _latency(before), _latency(after), _speed(change)),
        ("peak memory", fmt.size(before.peak_bytes), fmt.size(after.peak_bytes), _relative(before.peak_bytes, after.peak_bytes)),
    ]
    for name in _qualities(change):
        old, new = before.quality.get(name), after.quality.get(name)
        found.append((fmt.plain(name), score(name, old), score(name, new), _cost(name, old, new)))
    if change.predicted_speedup is not None:
        measured = f"{change.speedup:.2f}x" if change.speedup is not None else fmt.MISSING
        found.append(("speed-up, predicted and measured", f"{change.predicted_speedup:.2f}x", measured, _agreement(change)))
    return found


def step_headings(change: Change) -> list[str]:
    """Of the table of steps."""
    return ["step", "bytes", "smaller", "parameters", "zeros", "latency", "as fast", *map(fmt.plain, _qualities(change))]


def step_rows(change: Change) -> list[list[str]]:
    """The model the recipe began with, then what each step left."""
    first = [change.model, f"{change.before.bytes_on_disk:,}", "", f"{change.before.parameters:,}", _sparsity(change.before)]
    lines = [[*first, _latency(change.before), "", *(score(name, change.before.quality.get(name)) for name in _qualities(change))]]
    for step in change.steps:
        after = step.after
        speed = f"{step.speedup:.2f}x" if step.speedup is not None else fmt.MISSING
        own = [step.name, f"{after.bytes_on_disk:,}", f"{step.compression_ratio:.2f}x", f"{after.parameters:,}", _sparsity(after)]
        lines.append([*own, _latency(after), speed, *(score(name, after.quality.get(name)) for name in _qualities(change))])
    return [[fmt.plain(cell) for cell in line] for line in lines]


def notes(change: Change) -> list[str]:
    """What the tables have no room for, of the whole and of each step."""
    said = []
    if change.storage_only:
        said.append(
            f"storage only on {change.target}: {', '.join(change.storage_only)} (fewer bytes, no kernel: the time is not the format's)"
        )
    said += change.notes
    said += [f"{step.name}: {note}" for step in change.steps for note in step.notes]
    return [fmt.plain(line) for line in dict.fromkeys(said)]


def render_change(change: Change, *, color: bool = False, width: int | None = None) -> str:
    """The whole answer as text."""
    columns = width or max(100, shutil.get_terminal_size((160, 24)).columns)
    console = Console(file=io.StringIO(), width=columns, markup=False, highlight=False, force_terminal=color, soft_wrap=True)
    console.print(f"{fmt.plain(change.name)} · {fmt.plain(change.model)} on {fmt.plain(change.target)}", style="bold" if color else None)
    console.print(_table(HEADINGS, rows(change)))
    if change.steps:
        console.print(_table(step_headings(change), step_rows(change)))
    for note in notes(change):
        console.print(f"  {note}")
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.rstrip("\n").splitlines())


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table


def score(name: str, value: float | None) -> str:
    """A quality as people read it."""
    if value is None or name not in SHARES:
        return fmt.significant(value, 4)
    return f"{100 * value:.2f} %"


def _qualities(change: Change) -> list[str]:
    return list(dict.fromkeys([*change.before.quality, *change.after.quality]))


def _cost(name: str, before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return fmt.MISSING
    if name in SHARES:
        return f"{100 * (after - before):+.2f} points"
    return fmt.signed_percent(after / before - 1) if before else fmt.MISSING


def _relative(before: int | None, after: int | None) -> str:
    return fmt.signed_percent(after / before - 1) if before and after is not None else fmt.MISSING


def _speed(change: Change) -> str:
    if change.speedup is None:
        return fmt.MISSING
    interval = change.speedup_interval
    return f"{change.speedup:.2f}x as fast" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")


def _sparsity(state: State) -> str:
    return f"{100 * state.sparsity:.1f} %"


def _target(change: Change) -> str:
    return f"target {100 * change.target_sparsity:.1f} %" if change.target_sparsity is not None else ""


def _latency(state: State) -> str:
    return fmt.seconds(state.latency.median_s) if state.latency is not None else fmt.MISSING


def _agreement(change: Change) -> str:
    if change.speedup is None or not change.predicted_speedup:
        return fmt.MISSING
    return f"{fmt.signed_percent(change.speedup / change.predicted_speedup - 1)} against the prediction"
