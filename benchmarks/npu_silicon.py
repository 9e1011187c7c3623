"""The model beside the chip: AlexNet's convolutions on Eyeriss, batch 4, with the mapping the chip was run with.

python benchmarks/npu_silicon.py    seconds; writes results/npu-silicon-eyeriss.json

per layer: measured processing time, modelled (array at work: computing, pass loading, drains), computing alone, and its mechanisms.
Plans and figures are those of tests/estimate/spatial/test_silicon.py and tests/estimate/npu_cases.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import write_results

from tests.estimate.spatial.test_silicon import LAYERS, MEASURED_MS, milliseconds, on_the_chip


def row(name: str) -> dict[str, Any]:
    cost = on_the_chip(name)
    modelled = milliseconds(cost.latency.on_chip)
    return {
        "layer": name, "measured_ms": MEASURED_MS[name], "modelled_ms": modelled, "error": modelled / MEASURED_MS[name] - 1,
        "computing_ms": milliseconds(cost.latency.compute), "passes": cost.latency.passes,
        "active_pes": round(cost.spatial_utilisation * 168, 1),
        "energy_pj_a_mac": cost.energy_pj / cost.layer.macs,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    options = parser.parse_args()
    rows = [row(name) for name in LAYERS]
    for r in rows:
        parts = f"computing {r['computing_ms']:6.2f} ms, {r['passes']} passes"
        print(f"{r['layer']}  measured {r['measured_ms']:5.1f} ms  modelled {r['modelled_ms']:6.2f} ms  {r['error']:+.1%}  {parts}")
    chip = {"chip": "Eyeriss, 65 nm, 168 PEs, 200 MHz", "kind": "modelled against published figures"}
    print(write_results("npu", "silicon", "eyeriss", chip, rows, options.out))


if __name__ == "__main__":
    main()
