"""The page of an optimised graph: each pass with a picture of a region it changed, what was refused, what could be fused, the memory map.

    Change of `optimize` ──tables (graph_table), drawings (graph_picture)──> page

Self-contained as every page of ours: drawn here, nothing fetched, readable without its script.
"""

from __future__ import annotations

from typing import Any

from ..core.change import Change
from . import format as fmt
from .change_table import HEADINGS, notes, rows, summary
from .graph_picture import draw_memory, draw_region
from .graph_table import (
    OPPORTUNITY_HEADINGS,
    PASS_HEADINGS,
    REFUSAL_HEADINGS,
    idle_line,
    memory_lines,
    merged_pictures,
    opportunity_rows,
    pass_rows,
    refusal_rows,
)
from .html import _page


def render_optimized_html(change: Change) -> str:
    """The whole page."""
    plan = change.details.get("memory")
    return _page(
        "optimize.html",
        title=f"{change.name} of {change.model}",
        data=change.to_json(),
        change=change,
        verdict=summary(change),
        tables=[
            ("measured", "Before and after", HEADINGS, rows(change)),
            ("passes", "Passes", PASS_HEADINGS, pass_rows(change)),
            ("refused", "Where a pass could not", REFUSAL_HEADINGS, refusal_rows(change)),
            ("opportunities", "Fusion opportunities of the model as it came", OPPORTUNITY_HEADINGS, opportunity_rows(change)),
        ],
        idle=idle_line(change),
        nodes=change.details.get("nodes"),
        pictures=_pictures(change),
        memory=draw_memory(plan) if plan else None,
        memory_said=memory_lines(change),
        notes=notes(change),
    )


def _pictures(change: Change) -> list[dict[str, Any]]:
    """For each run of a pass that changed something: a place, before and after."""
    found = []
    for one, place in merged_pictures(change.details.get("passes", ())):
        where = f"{one['name']}, round {one['round']}: {place['what']}"
        found.append(
            {
                "name": one["name"],
                "round": one["round"],
                "sites": one["changed_sites"],
                "what": place["what"],
                "layer": place["layer"],
                "saved": fmt.size(place["saved_bytes"]) if place["saved_bytes"] else "",
                "before": draw_region(place["picture"]["before"], f"{where}, before", new=False),
                "after": draw_region(place["picture"]["after"], f"{where}, after", new=True),
            }
        )
    return found
