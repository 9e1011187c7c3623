"""Figures of docs/search.md and the README are those of benchmarks/results/search-tables-cpu.json.

python -m tests.search.test_tables     writes them there anew
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from tests.support import ROOT

PAGE, README = ROOT / "docs" / "search.md", ROOT / "README.md"
BLOCK = re.compile(r"(?<=<!-- search-tables -->\n).*?(?=<!-- end -->)", re.DOTALL)
ROW = re.compile(r"(?<=of the cell chosen \| )[^|]*(?= \|)")


def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "search-tables-cpu.json").read_text(encoding="utf-8"))
    return found


def rows(part: str) -> list[dict[str, Any]]:
    return [row for row in results()["rows"] if row["part"] == part]


def table() -> str:
    lines = ["| strategy | test accuracy | worst seed | hypervolume, as seen | by test accuracy |", "| --- | --- | --- | --- | --- |"]
    fronts = {row["strategy"]: row for row in rows("front")}
    for row in rows("accuracy"):
        front = fronts[row["strategy"]]
        lines.append(
            f"| `{row['strategy']}` | {row['test_mean']:.2f} ± {row['test_std']:.2f} | {row['test_worst']:.2f} "
            f"| {front['seen_mean']:.2f} ± {front['seen_std']:.2f} | {front['test_mean']:.2f} ± {front['test_std']:.2f} |"
        )
    best = rows("best")[0]
    lines.append(
        f"| all {best['points']:,} cells | {best['test']:.2f} | - | {best['seen_hypervolume']:.2f} | {best['test_hypervolume']:.2f} |"
    )
    return "\n".join(lines)


def verdict() -> str:
    """How the default stands against each other strategy on accuracy: the same seeds, so differences are paired."""
    by = {row["strategy"]: row for row in rows("accuracy")}
    own, words = by.pop("model"), []
    for name, row in by.items():
        apart = [a - b for a, b in zip(own["each"], row["each"], strict=True)]
        mean = sum(apart) / len(apart)
        error = math.sqrt(sum((one - mean) ** 2 for one in apart) / (len(apart) - 1) / len(apart))
        words.append(f"{name} {mean:+.3f} ± {error:.3f}")
    front = rows("front")[0]
    said = (
        f"Accuracy over {own['seeds']} seeds after {own['trials']} evaluations, hypervolume over {front['seeds']} after {front['trials']}."
    )
    less = f"`model` less each other, mean and its standard error over the same seeds: {', '.join(words)}"
    return f"{said} {less}; within two of them nothing is decided."


def row_of_readme() -> str:
    by = {row["strategy"]: row for row in rows("accuracy")}
    model, random, tpe, evolution = (by[name]["test_mean"] for name in ("model", "random", "tpe", "evolution"))
    return f"{model:.2f} % over {by['model']['seeds']} seeds (random {random:.2f}, Optuna's TPE {tpe:.2f}, our evolution {evolution:.2f})"


def block() -> str:
    return f"\n{table()}\n\n{verdict()}\n\n"


def test_page_has_the_measured_rows() -> None:
    assert BLOCK.findall(PAGE.read_text(encoding="utf-8")) == [block()]


def test_readme_and_goals() -> None:
    assert ROW.findall(README.read_text(encoding="utf-8")) == [row_of_readme()]
    by = {row["strategy"]: row for row in rows("accuracy")}
    assert by["model"]["seeds"] == 100 and by["model"]["trials"] == 100 and by["model"]["test_mean"] >= 94.15
    fronts = {row["strategy"]: row for row in rows("front")}
    assert fronts["model"]["seen_mean"] > fronts["tpe"]["seen_mean"]


def test_the_command_names_no_folder() -> None:
    assert results()["command"] == "python benchmarks/search_tables.py --table nb201_tables.npz"


def write() -> None:
    for path, pattern, text in ((PAGE, BLOCK, block()), (README, ROW, row_of_readme())):
        changed, count = pattern.subn(lambda _, text=text: text, path.read_text(encoding="utf-8"))
        assert count == 1, f"{path.name}: {count} places for the figures"
        path.write_text(changed, encoding="utf-8")


if __name__ == "__main__":
    write()
