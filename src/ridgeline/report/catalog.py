"""Listings: the targets, the models, and facts about this machine, as terminal tables.

processors ──render_targets──> text        model infos ──render_models──> text
arrays ──render_arrays──> text             nested facts ──render_facts──> text
crossbars ──render_crossbars──> text
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import format as fmt

if TYPE_CHECKING:
    from ..target.array import SpatialArraySpec
    from ..target.crossbar import CrossbarSpec
    from ..target.spec import ProcessorSpec
    from ..workload.models import ModelInfo

SHOWN_DTYPES = ("float32", "bfloat16", "int8")


def _text(table: Table, width: int = 140) -> str:
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(table)
    stream = console.file
    return stream.getvalue().rstrip() if isinstance(stream, StringIO) else ""


def _table(*columns: tuple[str, bool]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, right in columns:
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    return table


def render_targets(specs: Sequence[ProcessorSpec]) -> str:
    """One row a target: matmul peaks, outermost memory, and what it is."""
    numbers = [(f"{dtype}", True) for dtype in SHOWN_DTYPES]
    table = _table(("target", False), *numbers, ("memory", True), ("bandwidth", True), ("levels", False), ("what", False))
    for spec in specs:
        memory = spec.memories[spec.outermost]
        peaks = []
        for dtype in SHOWN_DTYPES:
            _, used, rate = spec.peak("matmul", dtype)
            peaks.append(fmt.flop_rate(rate) if used == dtype else "–")
        table.add_row(
            escape(spec.name),
            *peaks,
            fmt.size(memory.capacity_bytes.value),
            fmt.byte_rate(memory.bandwidth_bps.value),
            escape(" ".join(spec.memories)),
            escape(spec.description),
        )
    if len(specs) > 1:
        for name in ("cpu", "cuda"):
            table.add_row(name, *["" for _ in SHOWN_DTYPES], "", "", "", "this machine, calibrated on first use")
    return _text(table)


def render_arrays(specs: Sequence[SpatialArraySpec]) -> str:
    """One row a spatial array: its PEs, clock, peak, area, memories nearest first, and what it is."""
    table = _table(("array", False), ("PEs", True), ("clock", True), ("peak", True), ("area", True), ("memories", False), ("what", False))
    for spec in specs:
        copies = f"{spec.cores.count} x " if spec.cores.count > 1 else ""
        memories = [f"{name} {_memory_size(spec, name)}" for name in spec.memories]
        table.add_row(
            escape(fmt.plain(spec.name)),
            f"{copies}{'x'.join(map(str, spec.axes.values()))}",
            fmt.scaled(spec.clock_hz.value, "Hz"),
            fmt.scaled(spec.cores.count * spec.pes * spec.clock_hz.value, "MAC/s"),
            f"{fmt.significant(spec.area_mm2)} mm²" if spec.area_mm2 else fmt.MISSING,
            escape(fmt.plain(", ".join(memories))),
            escape(fmt.plain(spec.description)),
        )
    return _text(table)


def render_crossbars(specs: Sequence[CrossbarSpec]) -> str:
    """One row an analog chip: array size, slices, conductances, converters, and what it is."""
    columns = (("array", True), ("slices x", False), ("slices w", False), ("sign", False), ("cell", True), ("levels", True), ("ADC", True))
    table = _table(("crossbar", False), *columns, ("random", False), ("what", False))
    for spec in specs:
        cell, levels = spec.cell, dict.fromkeys(spec.adc_levels)
        table.add_row(
            escape(fmt.plain(spec.name)),
            f"{spec.array.rows}x{spec.array.columns}",
            "+".join(map(str, spec.operands.x_slices)),
            "+".join(map(str, spec.operands.w_slices)),
            spec.operands.sign,
            f"{fmt.scaled(cell.low_s.value, 'S')} – {fmt.scaled(cell.high_s.value, 'S')}",
            str(cell.levels),
            "/".join(f"{count:,}" for count in levels),
            "no" if spec.ideal else "yes",
            escape(fmt.plain(spec.description)),
        )
    return _text(table)


def _memory_size(spec: SpatialArraySpec, name: str) -> str:
    """Capacity, and how many instances there are: "448 B x168"."""
    instances = spec.instances(name)
    return fmt.size(spec.memories[name].capacity_bits.value / 8) + (f" x{instances:,}" if instances > 1 else "")


def render_models(infos: Sequence[ModelInfo]) -> str:
    """One row a named model."""
    table = _table(("model", False), ("parameters", True), ("dtype", False), ("context", True), ("phases", False), ("what", False))
    for info in infos:
        context = f"{info.default_context:,}" if info.default_context else ""
        table.add_row(info.name, f"{info.parameters:,}", info.default_dtype, context, ", ".join(info.phases), escape(info.description))
    return _text(table)


def render_facts(facts: Mapping[str, Any]) -> str:
    """Nested facts as `key  value` lines."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in _flat(facts):
        table.add_row(escape(key), escape(fmt.plain(value)))
    return _text(table)


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
