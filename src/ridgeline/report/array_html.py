"""The HTML report of a mapped network: one self-contained page, as `html` makes them.

NetworkMapping, advice ──> summary, energy and cycles of every layer, memories under their roofs, loops of the costliest, table ──> page
DataflowComparison ──> the same for its best dataflow, and the four side by side

The script of the other reports sorts and filters the table and ties the drawings to it; nothing else runs, nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..estimate.spatial.breakdown import bottleneck_of, bottlenecks, cycle_parts, energy_by_part, outermost_of, port_roofs
from ..estimate.spatial.compare import DataflowComparison
from ..estimate.spatial.network import MappedOp, NetworkMapping
from ..estimate.spatial.whatif import ArrayAdvice
from ..target.array import OPERANDS
from . import array_table as text
from . import format as fmt
from .array_charts import Bar, classes, draw_bars, draw_levels
from .html import _json_value, _page

MOST_BARS, LOOPS_SHOWN = 60, 3
COLUMNS = ("name", "layer", "kind", "macs", "energy_pj", "cycles", "utilisation", "gap", "bottleneck", "cause")


def render_mapping_html(network: NetworkMapping, advice: Sequence[ArrayAdvice] = (), comparison: DataflowComparison | None = None) -> str:
    """The whole report."""
    model, array = network.workload.model, network.array
    rows = [_row(layer, network) for layer in network.layers]
    parts = {name: value for name, value in text.energy_parts(network).items() if value}
    cycles = {name: value for name, value in text.cycle_totals(network).items() if value}
    energy_colours, cycle_colours = classes(name for name in parts if name != "host"), classes(cycles)
    return _page(
        "mapping.html",
        title=f"{model} on {array.name}",
        data={
            "columns": list(COLUMNS),
            "rows": [[_json_value(row[name]) for name in COLUMNS] for row in rows],
            "mapping": _summary(network),
        },
        network=network,
        text=text,
        words=text.setting_words(network),
        verdict=verdict(network, advice),
        advice=advice,
        comparison=comparison,
        matrices=_matrices(comparison) if comparison else [],
        rows=sorted(enumerate(rows), key=lambda item: -item[1]["energy_pj"]),
        energy_parts=parts,
        cycle_totals=cycles,
        energy_colours=energy_colours,
        cycle_colours=cycle_colours,
        energy_chart=_energy_chart(network, energy_colours),
        cycle_chart=_cycle_chart(network, cycle_colours),
        left_out=max(0, len(network.layers) - MOST_BARS),
        roofline=draw_levels(network.layers, array, model),
        ports=port_roofs(network.layers, array),
        loops=[(layer, text.nest_text(layer, network)) for layer in costliest(network, LOOPS_SHOWN)],
        limits=bottlenecks(network.layers, array),
    )


def costliest(network: NetworkMapping, most: int) -> list[MappedOp]:
    """Layers of distinct loops that cost most by the objective, costliest first."""
    ordered = sorted(network.layers, key=lambda layer: -layer.mapped.cost.objective(network.objective) * layer.op.calls)
    distinct = {text.shape_text(layer.mapped.cost.layer): layer for layer in reversed(ordered)}
    return sorted(distinct.values(), key=ordered.index)[:most]


def verdict(network: NetworkMapping, advice: Sequence[ArrayAdvice]) -> list[str]:
    """The report in a few sentences."""
    if not network.layers:
        return ["Nothing of this model runs on the array."]
    outermost, energy = outermost_of(network.array), text.energy_parts(network)
    share = energy.get(outermost, 0.0) / network.energy_pj if network.energy_pj else 0.0
    name, cycles = next(iter(bottlenecks(network.layers, network.array).items()))
    sentences = [
        f"One pass takes {fmt.seconds(network.seconds)} and {fmt.energy(network.energy_pj * 1e-12)}, "
        f"{fmt.percent(share)} of it at {fmt.plain(outermost)}.",
        f"{fmt.percent(network.utilisation)} of the PEs' cycles multiply; "
        f"{fmt.percent(cycles / network.cycles)} of the cycles go to layers limited by {fmt.plain(name)}.",
    ]
    if advice:
        best = advice[0]
        gains = f"{fmt.speedup(best.predicted_speedup)} in time and {fmt.speedup(best.energy_gain)} in energy"
        sentences.append(f"Best next step: {fmt.plain(best.change)}, {gains} predicted.")
    return sentences


def _row(layer: MappedOp, network: NetworkMapping) -> dict[str, Any]:
    """One line of the table, as numbers; the script sorts by these."""
    cost = layer.mapped.cost
    name = bottleneck_of(layer, network.array)
    return {
        "name": layer.op.name,
        "layer": cost.layer.name,
        "kind": cost.layer.kind,
        "macs": layer.macs,
        "energy_pj": layer.energy_pj,
        "cycles": layer.cycles,
        "utilisation": text.utilisation(layer, network),
        "gap": layer.mapped.gap,
        "bottleneck": name,
        "cause": f"{name} takes {cost.limits[name]:,} of {cost.cycles:,} cycles",
        "loops": text.shape_text(cost.layer),
        "gap_text": text.gap_text(layer),
    }


def _summary(network: NetworkMapping) -> Any:
    """The figures of the page for whoever takes them elsewhere; every layer's own are in the rows."""
    data = network.to_json()
    return {
        **{name: data[name] for name in ("schema", "model", "target", "batch", "dataflow", "objective")},
        "total": _json_value(data["total"]),
    }


def _shown(network: NetworkMapping) -> list[tuple[int, MappedOp]]:
    """Layers to draw: all in order, or those that spend most where there are too many."""
    ranked = sorted(enumerate(network.layers), key=lambda item: -item[1].energy_pj)[:MOST_BARS]
    return sorted(ranked, key=lambda item: item[0])


def _energy_chart(network: NetworkMapping, colours: dict[str, str]) -> Any:
    bars = [
        Bar(index, layer.mapped.cost.layer.name, energy_by_part(layer), fmt.energy(layer.energy_pj * 1e-12))
        for index, layer in _shown(network)
    ]
    described = f"Energy of {len(bars)} layers by memory"
    return draw_bars(bars, colours, lambda value: fmt.energy(value * 1e-12), described)


def _cycle_chart(network: NetworkMapping, colours: dict[str, str]) -> Any:
    bars = [
        Bar(index, layer.mapped.cost.layer.name, cycle_parts(layer, network.array),
            f"{fmt.count(layer.cycles)}, {fmt.percent(text.utilisation(layer, network))} utilised")
        for index, layer in _shown(network)
    ]  # fmt: skip
    return draw_bars(bars, colours, lambda value: f"{value:,.0f} cycles", f"Cycles of {len(bars)} layers by cause")


def _matrices(comparison: DataflowComparison) -> list[tuple[str, list[tuple[str, str, list[str]]]]]:
    """[(what, [(memory, operand, a cell a dataflow)])]"""
    found = []
    for name, cells in (("Largest tile", text.tile_cells), ("MACs an element", text.reuse_cells), ("Words moved", text.access_cells)):
        columns = [cells(one) for one in comparison.feasible]
        keys = [(memory, operand) for memory in comparison.array.memories for operand in OPERANDS]
        rows = [(*key, [column.get(key, fmt.MISSING) for column in columns]) for key in keys if any(key in column for column in columns)]
        found.append((name, rows))
    return found
