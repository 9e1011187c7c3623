"""`ridgeline map MODEL --on ARRAY`: every layer's best mapping, its energy, cycles and bottleneck, and what would help.

capture ──> map_layers ──> advise_on_array ──> table | --json | --html      --layer L: that layer in full, --trace its schedule
        ──> compare_dataflows (--dataflow compare)                          --save-mappings, --mapping: to a file and back
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import Batch, Context, Html, Json, Model, Phase, Rows, check_outputs, emit_json, progress, say

if TYPE_CHECKING:
    from ..estimate.spatial.compare import DataflowComparison
    from ..estimate.spatial.network import NetworkMapping
    from ..estimate.spatial.whatif import ArrayAdvice
    from ..target.array import SpatialArraySpec

COMPARE = "compare"


def map_model(
    model: Model = "resnet18",
    on: Annotated[str, typer.Option("--on", help="An array from `ridgeline targets list`, or a path to a .toml file.")] = "tpu-v1",
    layer: Annotated[str | None, typer.Option("--layer", help="This layer only, in full.")] = None,
    dataflow: Annotated[str, typer.Option("--dataflow", help="ws, is, os, rs, any, or compare: all four side by side.")] = "any",
    objective: Annotated[str, typer.Option("--objective", help="What to make least: edp, energy or latency.")] = "edp",
    batch: Batch = None,
    phase: Phase = None,
    context: Context = None,
    mapping: Annotated[Path | None, typer.Option("--mapping", help="Evaluate this mapping of --layer instead of searching.")] = None,
    save_mappings: Annotated[Path | None, typer.Option("--save-mappings", help="Write every layer's mapping here, as JSON.")] = None,
    show_mapping: Annotated[bool, typer.Option("--show-mapping", help="Print the loops of every layer.")] = False,
    advice: Annotated[bool, typer.Option("--advice/--no-advice", help="Map again with each change to the array made.")] = True,
    as_json: Json = False,
    html: Html = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write the schedule of --layer as a Perfetto trace here.")] = None,
    rows: Rows = 40,
) -> None:
    """Map a model onto an array of processing elements: energy, cycles and bottleneck of every layer."""
    from ..core.files import write_json, write_text
    from ..estimate.spatial.replay import mappings_to_json, read_mappings
    from ..report.array_html import render_mapping_html
    from ..target.load import load_array
    from ..workload.capture import capture

    _check_options(layer, dataflow, objective, mapping, trace)
    check_outputs(html, trace, save_mappings)
    array = load_array(on)
    given = read_mappings(mapping) if mapping else None
    with progress(f"mapping {model} onto {array.name}") as report:
        report("capturing")
        workload = capture(model, batch=batch, phase=phase, context=context)
        network, comparison = _map(workload, array, layer, dataflow, objective, given, report)
        found = _advise(network, report) if advice and not given and (comparison is None or html) else []
        schedule = _schedule(network, report) if trace else None
        page = render_mapping_html(network, found, comparison) if html else ""
    if save_mappings:
        say(f"mappings: {write_json(save_mappings, mappings_to_json(network))}")
    if html:
        say(f"report: {write_text(html, page)}")
    if trace and schedule:
        say(f"trace: {write_json(trace, schedule)}")
    if as_json:
        emit_json(_json(network, comparison, found, with_loops=show_mapping or layer is not None))
    else:
        sys.stdout.write(_text(network, comparison, found, in_full=layer is not None, loops=show_mapping, rows=rows))


def _check_options(layer: str | None, dataflow: str, objective: str, mapping: Path | None, trace: Path | None) -> None:
    from ..core.errors import OptionError, unknown_name
    from ..estimate.spatial.mapper import OBJECTIVES
    from ..target.array import DATAFLOWS

    if dataflow not in (*DATAFLOWS, "any", COMPARE):
        raise unknown_name("dataflow", dataflow, (*DATAFLOWS, "any", COMPARE), "`ridgeline map --help`")
    if objective not in OBJECTIVES:
        raise unknown_name("objective", objective, OBJECTIVES, "`ridgeline map --help`")
    for option, value in (("--mapping", mapping), ("--trace", trace)):
        if value and layer is None:
            raise OptionError(f"{option} without --layer", why="it concerns one layer", do="name it, e.g. --layer layer1.0.conv1")
    if mapping and dataflow != "any":
        raise OptionError(
            f"--mapping with --dataflow {dataflow}", why="a mapping that is given is not searched for", do="leave one of them out"
        )


def _map(
    workload: Any, array: SpatialArraySpec, layer: str | None, dataflow: str, objective: str, given: dict[str, Any] | None, report: Any
) -> tuple[NetworkMapping, DataflowComparison | None]:
    from ..estimate.spatial.compare import compare_dataflows
    from ..estimate.spatial.network import map_layers
    from ..estimate.spatial.replay import replay

    if given is not None and layer is not None:
        return replay(workload, array, layer, given, objective), None
    if dataflow != COMPARE:
        return map_layers(workload, array, dataflow=dataflow, objective=objective, layer=layer, progress=report), None
    comparison = compare_dataflows(workload, array, objective=objective, layer=layer, progress=report)
    assert comparison.best.network is not None
    return comparison.best.network, comparison


def _advise(network: NetworkMapping, report: Any) -> list[ArrayAdvice]:
    from ..estimate.spatial.whatif import advise_on_array

    return advise_on_array(network, lambda change: report(f"advice: {change}"))


def _schedule(network: NetworkMapping, report: Any) -> dict[str, Any]:
    """The schedule of the layer, or of its longest loop nest, as trace events."""
    from ..estimate.spatial.schedule.stream import schedule_layer
    from ..report.timeline_trace import render_timeline
    from ..target.array import Cores

    report("scheduling")
    longest = max(network.layers, key=lambda one: one.cycles)
    one_core = network.array.model_copy(update={"cores": Cores()})
    cost = longest.mapped.cost
    return render_timeline(schedule_layer(cost.layer, one_core, cost.plan), f"{cost.layer.name} on {network.array.name}")


def _json(network: NetworkMapping, comparison: DataflowComparison | None, advice: list[ArrayAdvice], *, with_loops: bool) -> dict[str, Any]:
    from ..estimate.spatial.breakdown import port_roofs
    from ..report.array_table import nest_text

    if comparison is not None:
        return comparison.to_json()
    data = network.to_json()
    for row, layer in zip(data["layers"], network.layers, strict=True):
        row["ports"] = [roof.to_json() for roof in port_roofs([layer], network.array)]
        if with_loops:
            row["loops"] = nest_text(layer, network)
    return {**data, "advice": [one.to_dict() for one in advice]}


def _text(
    network: NetworkMapping, comparison: DataflowComparison | None, advice: list[ArrayAdvice], *, in_full: bool, loops: bool, rows: int
) -> str:
    from ..report.array_table import render_dataflows, render_layers, render_mappings, render_network

    color = sys.stdout.isatty()
    if comparison is not None:
        return render_dataflows(comparison, color=color) + ("\n" + render_mappings(network) if loops else "")
    if in_full:
        return render_layers(network, advice, color=color)
    return render_network(network, advice, limit=rows or None, color=color) + ("\n" + render_mappings(network) if loops else "")
