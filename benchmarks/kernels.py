"""The kernels on this machine's GPU: anchors, any sizes, or the table that says where they win.

python benchmarks/kernels.py                        anchors of every op; writes results/kernel-anchors-<machine>.json
python benchmarks/kernels.py --everything           all sizes and anchors, forward and backward; results/kernel-rows-<machine>.json
python benchmarks/kernels.py --sizes large,xlarge   these size classes, forward and backward
python benchmarks/kernels.py --wins                 also writes src/ridgeline/kernel/tables/<device>-wins.json: from which size on
                                                    ours beat eager torch and torch.compile; rows and lines of what is not measured stay
python benchmarks/kernels.py --wins --measured FILE the same from rows of --sizes or --everything, for the machine they are of
python benchmarks/kernels.py --steady               anchors that tensor cores limit, under load; results/kernel-steady-<machine>.json
--ops a,b,c and --dtypes x,y choose, rows of others stay, each with its commit; --budget SECONDS starts no row after that; --out DIR puts
every file there.

Rows are written after every op, so a run that is stopped loses little. In --wins an op whose rows were not all measured gets no
lines, and is named at the end: go on with --ops.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

from common import RESULTS, commit, write_results

from ridgeline.core.errors import MeasureError, RidgelineError, unknown_name
from ridgeline.core.files import write_json
from ridgeline.kernel.bench import (
    SIZE_CLASSES,
    Settings,
    Wanted,
    check_device,
    load_cases,
    machine,
    measure_ceilings,
    planned,
    run,
    wins_table,
)
from ridgeline.kernel.bench.rows import parse_dtype
from ridgeline.kernel.case import Case
from ridgeline.kernel.tuning import TABLES
from ridgeline.report.bench_table import cells, heading, summary

Row = dict[str, Any]
WINS_SIZES = ("small", "medium", "large", "xlarge", "batch")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only-anchors", action="store_true", help="anchors alone (the default)")
    which.add_argument("--everything", action="store_true", help="all sizes and anchors")
    which.add_argument("--sizes", help="size classes, separated by commas")
    which.add_argument(
        "--steady", action="store_true", help="anchors that tensor cores limit, each sample after 0.1 s of the same function"
    )
    which.add_argument("--wins", action="store_true", help="measure where ours win, and write the table")
    parser.add_argument("--measured", type=Path, help="rows file that --wins takes instead of measuring")
    parser.add_argument("--ops", help="operators, separated by commas")
    parser.add_argument("--dtypes", help="dtypes, separated by commas")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no row is started")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out; the table keeps what it had of it")
    parser.add_argument("--tune", action="store_true", help="tune launch configurations before each row")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="folder for every file written")
    given = parser.parse_args()
    if given.measured and not given.wins:
        parser.error("--measured goes with --wins")
    return given


def plan(cases: dict[str, Case], given: argparse.Namespace) -> list[Wanted]:
    """The rows asked for."""
    for name in (given.ops or "").split(",") if given.ops else ():
        if name not in cases:
            raise unknown_name("op", name, cases, "`ridgeline bench`")
    chosen = [case for name, case in cases.items() if not given.ops or name in given.ops.split(",")]
    if given.wins:
        rows = [row for case in chosen if not case.chooses for row in wins_rows(case)]
    elif given.everything or given.sizes:
        rows = planned(chosen, given.sizes.split(",") if given.sizes else SIZE_CLASSES, backward=True)
    else:
        rows = planned(chosen, ["anchors"])
        if given.steady:
            rows = [row for row in rows if row.case.flops and not row.case.in_graph]
    dtypes = {parse_dtype(name) for name in given.dtypes.split(",")} if given.dtypes else None
    return [row for row in rows if dtypes is None or row.dtype in dtypes]


def wins_rows(case: Case) -> list[Wanted]:
    """Every size and the anchors' shapes, each in every direction the op has."""
    directions = (False, True) if case.differentiable else (False,)
    anchors = [Wanted(case, anchor.shape, anchor.dtype, backward, "anchors") for anchor in case.anchors for backward in directions]
    return list({row.key: row for row in (*planned([case], WINS_SIZES, backward=True), *anchors)}.values())


class Files:
    """What a run leaves behind, whole after every op."""

    def __init__(self, given: argparse.Namespace, of: dict[str, Any], made_at: str) -> None:
        self.given, self.machine, self.commit = given, of, made_at
        slug = of["name"].lower().replace(" ", "-") if of["device"].startswith("cuda") else "cpu"
        self.label = slug.removeprefix("nvidia-")
        self.what = "steady" if given.steady else "wins" if given.wins else "rows" if given.everything or given.sizes else "anchors"
        self.table = (given.out or TABLES) / f"{slug}-wins.json"

    def write(self, rows: list[Row], whole: set[str]) -> Path:
        """The rows, with --ops beside those of before; in --wins of the ops in `whole`, all of whose rows were measured, and the table."""
        folder = self.given.out or RESULTS
        if self.given.wins:
            rows = self.kept([trimmed(row, self.commit) for row in rows if row["op"] in whole], folder)
            lines = wins_table(rows)
            write_json(self.table, {name: lines[name] for name in sorted(lines) if any(at is not None for at in lines[name].values())})
        else:
            rows = [{"commit": self.commit, **row} for row in rows]
            rows = self.kept(rows, folder) if self.given.ops or self.given.dtypes else rows
        return write_results("kernel", self.what, self.label, self.machine, rows, folder)

    def kept(self, rows: list[Row], folder: Path) -> list[Row]:
        """These and those of before, except of ops and dtypes that are measured now; each has the commit it was measured at."""
        name = f"kernel-{self.what}-{self.label}.json"
        files = [json.loads(path.read_text()) for path in (folder / name, RESULTS / name) if path.is_file()]
        before: list[Row] = [{"commit": files[0]["commit"], **row} for row in files[0]["rows"]] if files else []
        if self.given.wins and self.given.no_compile:
            compiled = {place(row): row["compile"] for row in before}
            rows = [{**row, "compile": compiled.get(place(row))} for row in rows]
        now, chosen = {row["op"] for row in rows}, self.given.dtypes  # kinds an op no longer has go
        measured = {(row["op"], row["dtype"]) for row in rows}
        stay = [row for row in before if row["op"] not in now or (chosen and (row["op"], row["dtype"]) not in measured)]
        return sorted([*stay, *rows], key=lambda row: row["op"])


def taken(given: argparse.Namespace) -> tuple[list[Row], list[str], Path]:
    """As `measure`, from a file and for its machine."""
    measured = json.loads(given.measured.read_text(encoding="utf-8"))
    rows = [row for row in measured["rows"] if not given.ops or row["op"] in given.ops.split(",")]
    return rows, [], Files(given, measured["machine"], measured["commit"]).write(rows, {row["op"] for row in rows})


def trimmed(row: Row, made_at: str) -> Row:
    """What the table needs to know of a row, and the commit it was measured at: its own, or else this one."""
    times = {who: row[who] and {name: row[who][name] for name in ("gpu_ms", "host_us")} for who in ("ours", "eager", "compile")}
    names = ("op", "kind", "shape", "dtype", "backward", "elements")
    return {"commit": row.get("commit", made_at), **{name: row[name] for name in names}, **times}


def place(row: Row) -> tuple[Any, ...]:
    return row["op"], tuple(row["shape"]), row["dtype"], row["backward"]


def in_time(rows: Iterable[Wanted], until: float) -> Iterator[Wanted]:
    """Rows, as long as there is time to start one."""
    for row in rows:
        if monotonic() >= until:
            return
        yield row


def line_of(row: dict[str, Any]) -> str:
    """One row in about a hundred characters."""
    op, shape, dtype, direction, ours, host, eager, compiled, peer, fraction, _, _, status, issue, anchor = cells(row)
    others = f"eager {eager:>6} compile {compiled:>6} peer {peer:>16}"
    return f"{op:<20} {shape:<18} {dtype:<8} {direction} {ours:>10} {host:>9} {others} {fraction:>12} {status}, {issue}, {anchor}"


def measure(rows: list[Wanted], given: argparse.Namespace, until: float) -> tuple[list[dict[str, Any]], list[str], Path | None]:
    """(rows measured, ops not all measured, file)."""
    ceilings = measure_ceilings(given.device)
    quick = given.wins
    settings = Settings(given.device, repeats=given.repeats, compiled=not given.no_compile, peers=not quick, errors=not quick,
                        tune=given.tune, keep=not quick, steady=given.steady)  # fmt: skip
    files = Files(given, {**machine(given.device), "ceilings": ceilings.to_json()}, commit())
    sys.stderr.write(heading({"machine": files.machine, "ceilings": ceilings.to_json()}) + "\n")
    done: list[dict[str, Any]] = []
    whole: set[str] = set()
    ops = list(dict.fromkeys(row.case.op for row in rows))
    path = None
    for op in ops:
        mine = [row for row in rows if row.case.op == op]
        count = len(done)
        try:
            for row in run(in_time(mine, until), ceilings, settings):
                done.append(row.to_json())
                sys.stderr.write(line_of(done[-1]) + "\n")
        except MeasureError as error:
            sys.stderr.write(f"{error}\n")
            until = 0.0
        if len(done) - count == len(mine):
            whole.add(op)
        if len(done) > count:
            path = files.write(done, whole)
    return done, [op for op in ops if op not in whole], path


def main() -> None:
    """Measure, write, and print a short table last."""
    given = options()
    start = monotonic()
    try:
        if given.measured:
            done, missing, path = taken(given)
        else:
            check_device(given.device)
            done, missing, path = measure(plan(load_cases(), given), given, start + given.budget)
    except RidgelineError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    sys.stderr.flush()
    for row in done:
        print(line_of(row))
        errors = {"ours": row["ours"], "eager": row["eager"], "compile": row["compile"], **row["peers"]}
        for name, timed in errors.items():
            if timed and timed["error"]:
                print(f"  {name}: {timed['error']}")
    print(summary({"rows": done}), f"in {monotonic() - start:.0f} s; {path}")
    if missing:
        print("not all measured:", ",".join(missing))


if __name__ == "__main__":
    main()
