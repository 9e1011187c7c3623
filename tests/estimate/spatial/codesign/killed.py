"""A search in a process of its own, to be killed: python killed.py FOLDER prints the front when it gets that far."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from ridgeline.estimate.spatial.codesign import codesign, header_of, open_journal
from tests.estimate.spatial.codesign.nets import SPACE, pebble_problem

BUDGET, SEED = 24, 7


def main(folder: Path) -> None:
    problem = replace(pebble_problem(), rules=SPACE.rules)
    with open_journal(problem, folder, header_of(problem, [{"model": "pebble-net"}])) as journal:
        found = codesign(problem, SPACE, method="evolve", budget=BUDGET, seed=SEED, journal=journal)
    sys.stdout.write(json.dumps(found.to_json()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
