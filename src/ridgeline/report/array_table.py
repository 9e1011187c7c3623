"""A mapped network in the terminal: every layer in a line, one layer in full, four dataflows side by side.

    NetworkMapping, advice ──render_network──> totals, layers, host, advice
    NetworkMapping, advice ──render_layers──> of each layer: its loops, accesses, energy, cycles, ports under their roofs
    DataflowComparison ──render_dataflows──> one row a dataflow, footprints, reuse, the recommendation and its reasons

Energy in J, cycles whole. "optimal" means that no mapping of the searched space is better; otherwise the gap says what share of the
objective a better one could at most save.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..estimate.spatial.breakdown import bottleneck_of, bottlenecks, cycle_parts, energy_by_part, peak_ops, port_roofs, total_of
from ..estimate.spatial.compare import PHRASES, Candidate, DataflowComparison
from ..estimate.spatial.layer import Layer
from ..estimate.spatial.lowering.from_plan import lower
from ..estimate.spatial.network import MappedOp, NetworkMapping
from ..estimate.spatial.whatif import ArrayAdvice
from ..target.array import OPERANDS
from . import format as fmt
from .table import Column, _bar, _console, _heading, _pairs, _print_grid, _table, _text

BAR = 30  # characters
ADDS_UP = 0.001  # parts below this share of the whole are left out of a list


def render_network(
    network: NetworkMapping, advice: Sequence[ArrayAdvice] = (), *, limit: int | None = 20, width: int | None = None, color: bool = False
) -> str:
    """The whole network; `limit` caps the layers shown, costliest first (None: all, in order)."""
    console = _console(width, color)
    console.print(_heading(title(network), *setting_words(network)))
    console.print(_pairs(_totals(network)))
    layers = list(network.layers)
    if limit is not None and len(layers) > limit:
        layers = sorted(layers, key=lambda layer: -layer.mapped.cost.objective(network.objective) * layer.op.calls)[:limit]
    if layers:
        _print_grid(console, _layer_columns(network), layers)
    if left := len(network.layers) - len(layers):
        console.print(f"  … {fmt.many(left, 'cheaper layer')} not shown")
    _print_host(console, network)
    _print_advice(console, advice)
    return _text(console)


def title(network: NetworkMapping) -> str:
    return f"{fmt.plain(network.workload.model)} on {fmt.plain(network.array.name)}"


def setting_words(network: NetworkMapping) -> list[str]:
    """batch 1 · W 8, I 8, O 32, F 8 bits · any dataflow · for least edp."""
    bits, work = network.array.bits, network.workload
    words = [
        f"batch {work.batch}",
        *([fmt.plain(work.phase)] if work.phase else []),
        *([f"context {work.context}"] if work.context else []),
    ]
    flow = "mapping given" if network.dataflow == "given" else f"{network.dataflow} dataflow"
    return [*words, f"W {bits.W}, I {bits.I}, O {bits.O}, F {bits.F} bits", flow, f"for least {PHRASES[network.objective]}"]


def _totals(network: NetworkMapping) -> Iterator[tuple[str, Text | str]]:
    array = network.array
    pace = f", a result every {fmt.seconds(network.interval_s)}" if faster_than_one_by_one(network) else ""
    on_host = sum(op.seconds for op in network.host)
    yield "time", fmt.seconds(network.seconds) + (f", {fmt.seconds(on_host)} of it on the host" if on_host else "") + pace
    yield "energy", fmt.energy(network.energy_pj * 1e-12) + f" ({_listed(energy_parts(network), network.energy_pj)})"
    yield "cycles", f"{network.cycles:,} at {fmt.scaled(array.clock_hz.value, 'Hz')} ({_listed(cycle_totals(network), network.cycles)})"
    pes = array.pes * array.cores.count
    yield "utilisation", f"{fmt.percent(network.utilisation)} of {pes:,} PEs, {fmt.count(network.macs)} MACs"
    limits = bottlenecks(network.layers, array)
    yield "bottleneck", _listed(limits, network.cycles) if limits else fmt.MISSING
    yield "optimality", optimality(network)
    if array.area_mm2:
        yield "area", f"{fmt.significant(array.area_mm2)} mm²"


def faster_than_one_by_one(network: NetworkMapping) -> bool:
    """Whether cores in a pipeline work on several inputs at once."""
    return network.interval_s < 0.999 * network.seconds


def optimality(network: NetworkMapping) -> str:
    """How sure the search is of its mappings."""
    if network.dataflow == "given":
        return "not searched: the mapping was given"
    optimal = sum(layer.mapped.optimal for layer in network.layers)
    largest = max((layer.mapped.gap for layer in network.layers), default=0.0)
    text = f"{optimal} of {fmt.many(len(network.layers), 'layer')} optimal within the space"
    return text if optimal == len(network.layers) else f"{text}; elsewhere a better mapping could save at most {fmt.percent(largest)}"


def energy_parts(network: NetworkMapping) -> dict[str, float]:
    """Energy of the pass by memory, arithmetic, network, leakage and host [pJ]."""
    parts = total_of(energy_by_part(layer) for layer in network.layers)
    host = sum(op.energy_pj for op in network.host)
    return {**parts, "host": host} if host else parts


def cycle_totals(network: NetworkMapping) -> dict[str, float]:
    return total_of(cycle_parts(layer, network.array) for layer in network.layers)


def _listed(parts: Mapping[str, float], whole: float) -> str:
    shown = sorted(((value, name) for name, value in parts.items() if whole and value / whole >= ADDS_UP), key=lambda item: -item[0])
    return ", ".join(f"{fmt.plain(name)} {fmt.percent(value / whole)}" for value, name in shown) or fmt.MISSING


def shape_text(layer: Layer) -> str:
    """K64 C3 P112 Q112 R7 S7, with stride and dilation where they are not 1."""
    dims = " ".join(f"{dim}{size}" for dim, size in layer.dims.items() if size > 1) or "1"
    return (
        dims + (f" /{max(layer.stride)}" if max(layer.stride) > 1 else "") + (f" ×{max(layer.dilation)}" if max(layer.dilation) > 1 else "")
    )


def gap_text(layer: MappedOp) -> str:
    if not layer.mapped.unrollings:
        return "given"
    return "optimal" if layer.mapped.optimal else fmt.percent(layer.mapped.gap)


def layer_name(layer: MappedOp) -> str:
    return fmt.plain(layer.mapped.cost.layer.name) + (f" ({layer.op.calls} calls)" if layer.op.calls > 1 else "")


def utilisation(layer: MappedOp, network: NetworkMapping) -> float:
    array = network.array
    cores = array.cores.count if array.cores.use == "split" else 1
    return layer.macs / (layer.cycles * array.pes * cores)


def _layer_columns(network: NetworkMapping) -> list[Column]:
    energy, cycles = sum(layer.energy_pj for layer in network.layers), network.cycles
    columns = [
        Column("layer", layer_name, right=False, floor=14, keep="end"),
        Column("kind", lambda layer: fmt.plain(layer.mapped.cost.layer.kind), right=False, drop=2),
        Column("loops", lambda layer: shape_text(layer.mapped.cost.layer), right=False, floor=12, drop=1),
        Column("MMAC", lambda layer: fmt.fixed(layer.macs / 1e6), drop=3),
        Column("energy", lambda layer: fmt.energy(layer.energy_pj * 1e-12)),
        Column("share", lambda layer: fmt.percent(layer.energy_pj / energy), drop=4),
        Column("cycles", lambda layer: f"{layer.cycles:,}"),
        Column("share", lambda layer: fmt.percent(layer.cycles / cycles), drop=5),
        Column("utilisation", lambda layer: fmt.percent(utilisation(layer, network))),
        Column("bottleneck", lambda layer: fmt.plain(bottleneck_of(layer, network.array)), right=False, floor=20),
        Column("gap", gap_text),
    ]
    if any(layer.cores > 1 for layer in network.layers):
        columns.insert(4, Column("cores", lambda layer: f"{layer.cores} ({layer.split})" if layer.cores > 1 else "1", drop=6))
    return columns


def _print_host(console: Console, network: NetworkMapping) -> None:
    if not network.host:
        return
    seconds, energy = sum(op.seconds for op in network.host), sum(op.energy_pj for op in network.host)
    console.print(_heading("on the host", fmt.many(len(network.host), "op"), fmt.seconds(seconds), fmt.energy(energy * 1e-12)))
    causes: dict[str, list[float]] = {}
    for op in network.host:
        causes.setdefault(op.why, []).append(op.seconds)
    for why, times in sorted(causes.items(), key=lambda item: -sum(item[1])):
        console.print(Padding(f"{fmt.seconds(sum(times))}: {fmt.plain(why)} ({fmt.many(len(times), 'op')})", (0, 0, 0, 2)))


def _print_advice(console: Console, advice: Sequence[ArrayAdvice]) -> None:
    if not advice:
        return
    console.print(_heading("what would help", "mapped again with the change made"))
    console.print(Padding(fmt.plain(advice[0].basis), (0, 0, 0, 2)))
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right", style="bold", no_wrap=True)
    grid.add_column()
    for one in advice:
        area = f", {fmt.significant(one.area_ratio)}x the area" if abs(one.area_ratio - 1) > 0.005 else ""
        grid.add_row(
            f"{fmt.speedup(one.predicted_speedup)} time", Text(f"{fmt.plain(one.change)}; next limit: {fmt.plain(one.next_limit)}")
        )
        grid.add_row(f"{fmt.speedup(one.energy_gain)} energy", Text(fmt.plain(one.detail) + area, style="dim"))
    console.print(Padding(grid, (0, 0, 0, 2)))


def render_layers(network: NetworkMapping, advice: Sequence[ArrayAdvice] = (), *, width: int | None = None, color: bool = False) -> str:
    """Every layer of the network in full."""
    console = _console(width, color)
    console.print(_heading(title(network), *setting_words(network)))
    for layer in network.layers:
        _print_layer(console, layer, network)
    _print_advice(console, advice)
    return _text(console)


def nest_text(layer: MappedOp, network: NetworkMapping) -> str:
    """The mapping as the loops it stands for."""
    cost = layer.mapped.cost
    return "\n".join(map(fmt.plain, lower(cost.layer, network.array, cost.plan).text().splitlines()))


def render_mappings(network: NetworkMapping) -> str:
    """The loops of every layer, one after another."""
    return "\n\n".join(nest_text(layer, network) for layer in network.layers) + "\n"


def _print_layer(console: Console, layer: MappedOp, network: NetworkMapping) -> None:
    cost = layer.mapped.cost
    share = f"one of {layer.cores} cores, cut along {layer.split}" if layer.cores > 1 else ""
    console.print(_heading(f"{fmt.plain(cost.layer.name)}", shape_text(cost.layer), *filter(None, [share])))
    console.print(_pairs(_layer_facts(layer, network)))
    console.print(_heading("mapping", "outermost loop first"))
    for line in nest_text(layer, network).splitlines():
        console.print(Text("  " + line), soft_wrap=True)
    console.print(_heading("accesses", "of one call and core"))
    _print_grid(console, _access_columns(cost.energy_pj), [access for access in cost.accesses if access.words])
    console.print(_heading("tiles", "on chip"))
    _print_grid(console, _tile_columns(network), cost.refills)
    _print_bars(console, "energy", {name: value for name, value in energy_by_part(layer).items()}, lambda pj: fmt.energy(pj * 1e-12))
    _print_bars(console, "cycles", cycle_parts(layer, network.array), lambda cycles: f"{cycles:,.0f}")
    _print_ports(console, [layer], network)


def _layer_facts(layer: MappedOp, network: NetworkMapping) -> Iterator[tuple[str, str]]:
    cost = layer.mapped.cost
    yield "work", f"{fmt.count(layer.macs)} MACs" + (f" in {layer.op.calls} calls" if layer.op.calls > 1 else "")
    yield "energy", f"{fmt.energy(layer.energy_pj * 1e-12)}, {fmt.significant(layer.energy_pj / layer.macs)} pJ a MAC"
    yield "cycles", f"{layer.cycles:,}, {fmt.seconds(layer.cycles / network.array.clock_hz.value)}"
    yield "utilisation", f"{fmt.percent(utilisation(layer, network))} ({fmt.percent(cost.spatial_utilisation)} while computing)"
    name = bottleneck_of(layer, network.array)
    yield "bottleneck", f"{fmt.plain(name)}: {cost.limits[name]:,} of {cost.cycles:,} cycles"
    if layer.mapped.unrollings:
        searched = f"{layer.mapped.solved} of {layer.mapped.unrollings} unrollings searched, the others ruled out by their bounds"
        best = "optimal within the space" if layer.mapped.optimal else f"a better one could save at most {fmt.percent(layer.mapped.gap)}"
        yield "search", f"{best} ({PHRASES[network.objective]}); {searched}"


def _access_columns(energy_pj: float) -> list[Column]:
    return [
        Column("memory", lambda a: fmt.plain(a.memory), right=False),
        Column("operand", lambda a: a.operand, right=False),
        Column("direction", lambda a: a.direction, right=False),
        Column("port", lambda a: fmt.plain(a.port), right=False, drop=2),
        Column("elements", lambda a: f"{a.elements:,}", drop=3),
        Column("words", lambda a: f"{a.words:,}"),
        Column("bits", lambda a: str(a.word_bits)),
        Column("transfers", lambda a: f"{a.transfers:,}", drop=1),
        Column("port cycles", lambda a: f"{a.cycles:,}", drop=4),
        Column("energy", lambda a: fmt.energy(a.energy_pj * 1e-12)),
        Column("share", lambda a: fmt.percent(a.energy_pj / energy_pj if energy_pj else None)),
    ]


def _tile_columns(network: NetworkMapping) -> list[Column]:
    memories = network.array.memories
    return [
        Column("memory", lambda r: fmt.plain(r.memory), right=False),
        Column("operand", lambda r: r.operand, right=False),
        Column("tile", lambda r: bits_text(r.tile_bits)),
        Column("of", lambda r: bits_text(memories[r.memory].capacity_bits.value), drop=1),
        Column("refills", lambda r: f"{r.events:,}"),
        Column("cycles each", lambda r: f"{r.cycles_each + r.returned_cycles:,}"),
        Column("computing", lambda r: "goes on" if r.hidden else "waits", right=False),
        Column("from", lambda r: fmt.plain(r.port), right=False, drop=2),
    ]


def bits_text(bits: float) -> str:
    """Bytes, or bits where it is less than one or no whole number of them."""
    return f"{bits:.0f} b" if bits < 8 else fmt.size(bits / 8)


def _print_bars(console: Console, name: str, parts: Mapping[str, float], text: Any) -> None:
    whole = sum(parts.values())
    console.print(_heading(f"{name}: {text(whole)}"))
    table = _table()
    for column in ("part", name, "share", ""):
        table.add_column(column, justify="right" if column in (name, "share") else "left")
    for part, value in parts.items():
        if value:
            table.add_row(fmt.plain(part), text(value), fmt.percent(value / whole), _bar(value, whole, BAR))
    console.print(table)


def _print_ports(console: Console, layers: Sequence[MappedOp], network: NetworkMapping) -> None:
    """Every port against its roof."""
    roofs = port_roofs(layers, network.array)
    peak = peak_ops(network.array)
    reached = f"{fmt.scaled(roofs[0].achieved, 'op/s')} reached" if roofs else "nothing moved"
    console.print(_heading("roofline of each memory", f"peak {fmt.scaled(peak, 'op/s')}", reached))
    columns = [
        Column("port", lambda r: fmt.plain(f"{r.memory}.{r.port}"), right=False),
        Column("moved", lambda r: fmt.size(r.bytes)),
        Column("op/B", lambda r: fmt.significant(r.intensity)),
        Column("bandwidth", lambda r: fmt.byte_rate(r.bandwidth_bps)),
        Column("allows", lambda r: fmt.scaled(r.attainable, "op/s")),
        Column("busy", lambda r: fmt.percent(r.busy)),
        Column("", lambda r: _bar(r.busy, 1.0, 20), right=False, drop=1),
    ]
    _print_grid(console, columns, roofs)


def render_dataflows(comparison: DataflowComparison, *, width: int | None = None, color: bool = False) -> str:
    """One row a dataflow, then what its tiles take, how often its operands are used, and why the best one is."""
    console = _console(width, color)
    first = comparison.best.network
    assert first is not None
    what = [f"layer {fmt.plain(comparison.layer)}"] if comparison.layer else [fmt.many(len(first.layers), "layer")]
    console.print(_heading(f"dataflows for {title(first)}", *what, *setting_words(first)[:1], f"for least {PHRASES[comparison.objective]}"))
    _print_grid(console, _dataflow_columns(comparison), comparison.feasible)
    for one in comparison.candidates:
        if one.network is None:
            console.print(Padding(f"{one.dataflow}: not possible; {fmt.plain(one.why_not)}", (0, 0, 0, 2)))
    console.print(_heading(f"take {comparison.best.dataflow}", *_wins(comparison)))
    for flow, reason in comparison.reasons.items():
        console.print(Padding(f"{flow}: {fmt.plain(reason)}", (0, 0, 0, 2)))
    _print_matrix(console, "largest tile", comparison, tile_cells)
    _print_matrix(console, "MACs an element", comparison, reuse_cells)
    _print_matrix(console, "words moved", comparison, access_cells)
    return _text(console)


def _wins(comparison: DataflowComparison) -> list[str]:
    wins = comparison.wins()
    return [] if comparison.layer else ["best for: " + ", ".join(f"{flow} {fmt.many(count, 'layer')}" for flow, count in wins.items())]


def _dataflow_columns(comparison: DataflowComparison) -> list[Column]:
    best, objective = comparison.best, comparison.objective
    return [
        Column("", lambda one: "*" if one is best else "", right=False),
        Column("dataflow", lambda one: one.dataflow, right=False),
        Column("energy", lambda one: fmt.energy(one.energy_pj * 1e-12)),
        Column("cycles", lambda one: f"{one.cycles:,}"),
        Column("x best", lambda one: fmt.speedup(one.value(objective) / best.value(objective))),
        Column("utilisation", lambda one: fmt.percent(one.network.utilisation)),
        Column("bandwidth used", lambda one: fmt.percent(one.bandwidth_efficiency)),
        Column("bottleneck", lambda one: fmt.plain(one.bottleneck), right=False),
    ]


def _print_matrix(console: Console, name: str, comparison: DataflowComparison, cells: Any) -> None:
    """One line a memory and operand, one column a dataflow."""
    found: list[dict[tuple[str, str], str]] = [cells(one) for one in comparison.feasible]
    keys = [(memory, operand) for memory in comparison.array.memories for operand in OPERANDS]
    rows = [key for key in keys if any(key in column for column in found)]
    columns = [
        Column(name, lambda key: fmt.plain(key[0]), right=False),
        Column("of", lambda key: key[1], right=False),
        *(
            Column(one.dataflow, lambda key, column=column: column.get(key, fmt.MISSING))  # type: ignore[misc]
            for one, column in zip(comparison.feasible, found, strict=True)
        ),
    ]
    console.print("")
    _print_grid(console, columns, rows)


def tile_cells(one: Candidate) -> dict[tuple[str, str], str]:
    return {(memory, op): bits_text(bits) for memory, tiles in one.footprints().items() for op, bits in tiles.items()}


def reuse_cells(one: Candidate) -> dict[tuple[str, str], str]:
    return {(memory, op): fmt.significant(times) for op, levels in one.reuse().items() for memory, times in levels.items()}


def access_cells(one: Candidate) -> dict[tuple[str, str], str]:
    words: dict[tuple[str, str], int] = {}
    for row in one.accesses():
        key = row["memory"], row["operand"]
        words[key] = words.get(key, 0) + row["words"]
    return {key: fmt.count(count) for key, count in words.items() if count}
