"""What docs/search.md and the README say of knowing latencies is benchmarks/results/search-known-cpu.json.

python -m tests.search.test_known_table     writes it there anew
"""

from __future__ import annotations

import json
import re
from statistics import mean, stdev
from typing import Any

from tests.support import ROOT

PAGE, README = ROOT / "docs" / "search.md", ROOT / "README.md"
BLOCK = re.compile(r"(?<=<!-- search-known -->\n).*?(?=<!-- end -->)", re.DOTALL)
ROW = re.compile(r"(?<=share of the best front's hypervolume after 16 trainings \| )[^|]*(?= \|)")
NAMES = {"edgegpu": "edge GPU", "eyeriss": "Eyeriss"}
Key = tuple[str, str, bool, int]


def rows() -> dict[Key, dict[str, list[float]]]:
    """(device searched for, strategy, known, trials) -> device -> share of every seed."""
    found: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / "search-known-cpu.json").read_text(encoding="utf-8"))[
        "rows"
    ]
    return {(row["device"], row["strategy"], row["known"], row["trials"]): row["shares"] for row in found}


def block() -> str:
    every = rows()
    devices, trials = (sorted({key[place] for key in every}) for place in (0, 3))
    heads = [f"{NAMES[device]}, {count}" for count in trials for device in devices]
    lines = [f"| strategy | latency | {' | '.join(heads)} |", "| --- | --- |" + " --- |" * len(heads)]
    for strategy, known in dict.fromkeys(key[1:3] for key in every):
        cells = []
        for count in trials:
            for device in devices:
                seen = every[device, strategy, known, count][device]
                cells.append(f"{mean(seen):.3f} ± {stdev(seen) / len(seen) ** 0.5:.3f}")
        lines.append(f"| `{strategy}` | {'known' if known else 'told'} | {' | '.join(cells)} |")
    most = trials[-1]
    own, other = ({here: mean(every[there, "model", True, most][here]) for here in devices for there in devices if (here == there) is same}
                  for same in (True, False))  # fmt: skip
    words = "; ".join(f"on {NAMES[device]} {own[device]:.3f} searched for it, {other[device]:.3f} for the other" for device in devices)
    return "\n" + "\n".join(lines) + f"\n\n`model`, known, {most} trials: {words}.\n\n"


def row_of_readme() -> str:
    every = rows()

    def both(strategy: str, known: bool) -> str:
        return " and ".join(f"{mean(every[device, strategy, known, 16][device]):.2f}" for device in ("edgegpu", "eyeriss"))

    return f"{both('model', True)} (guessing it {both('model', False)}, Optuna's TPE {both('tpe', False)}, random {both('random', False)})"


def test_page_has_the_measured_rows() -> None:
    assert BLOCK.findall(PAGE.read_text(encoding="utf-8")) == [block()]
    assert ROW.findall(README.read_text(encoding="utf-8")) == [row_of_readme()]


def test_knowing_pays_and_each_device_has_its_own_front() -> None:
    every = rows()
    for device in ("edgegpu", "eyeriss"):
        for count in (16, 40):
            told, known, tpe = (mean(every[device, *way, count][device]) for way in (("model", False), ("model", True), ("tpe", False)))
            assert known > told and known > tpe
        here, there = (
            mean(every[one, "model", True, 40][device]) for one in (device, {"edgegpu": "eyeriss", "eyeriss": "edgegpu"}[device])
        )
        assert here > there


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda _: block(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    README.write_text(ROW.sub(lambda _: row_of_readme(), README.read_text(encoding="utf-8")), encoding="utf-8")
