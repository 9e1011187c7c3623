"""`ridgeline search --table FILE`: a strategy over a table of finished trainings, seed by seed.

table ──strategy, budget, seeds──> the cell each search would ship, with every column asked for; --json
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .common import Json, emit_json, progress


def search(
    table: Annotated[
        Path | None, typer.Option("--table", help="A .npz table in NAS-Bench-201's form (default: that of RIDGELINE_DATA).")
    ] = None,
    objectives: Annotated[str, typer.Option(help="One or two columns, -name: smaller is better.")] = "c10_val12",
    shows: Annotated[str, typer.Option("--show", help="Columns of the chosen cell to look up afterwards.")] = "c10_test200",
    strategy: Annotated[str, typer.Option(help="model, evolution, random or tpe.")] = "model",
    budget: Annotated[str, typer.Option(help="40trials, 90s, 10m.")] = "100trials",
    seeds: Annotated[int, typer.Option(min=1, max=10_000, help="Searches, with seeds 0, 1, …")] = 5,
    as_json: Json = False,
) -> None:
    """Search a table of finished trainings: what would a strategy have found, how fast, how surely?"""
    import numpy as np

    from ..search.budget import parse_budget
    from ..search.front import nondominated
    from ..search.run import search_table
    from ..search.table import load_table
    from ..workload.data.find import find_file

    most, columns, shown = parse_budget(budget), _words(objectives), _words(shows)
    table = table or find_file("vision/nb201_tables.npz", "nb201_tables.npz", get="give --table FILE, or get a table of NAS-Bench-201")
    held = load_table(table)
    for name in shown:
        held.column(name)
    rows: list[dict[str, Any]] = []
    with progress(f"searching {table.name}") as report:
        for seed in range(seeds):
            found = search_table(held, strategy, most, columns, seed)
            row: dict[str, Any] = {
                "seed": seed,
                "trials": len(found.rows),
                "seconds": found.seconds,
                "cell": held.space.name(held.points[found.winner]),
            }
            row |= {name: float(held.column(name)[found.winner]) for name in [*(one.removeprefix("-") for one in columns), *shown]}
            if len(columns) == 2:
                row["front"] = nondominated(found.signed(columns)).tolist()
            rows.append(row)
            report(f"seed {seed}: {row['cell']}")
    summary = {
        name: {"mean": float(np.mean([row[name] for row in rows])), "std": float(np.std([row[name] for row in rows]))} for name in shown
    }
    whole = {"schema": 1, "strategy": strategy, "budget": budget, "objectives": columns, "seeds": rows, "summary": summary}
    if as_json:
        emit_json(whole)
        return
    for row in rows:
        told = "  ".join(f"{name} {row[name]:.2f}" for name in shown)
        typer.echo(f"seed {row['seed']}  {row['trials']} trials, {row['seconds']:.1f} s  {told}  {row['cell']}")
    for name, value in summary.items():
        typer.echo(f"{name}: {value['mean']:.3f} ± {value['std']:.3f} over {seeds} seeds")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
