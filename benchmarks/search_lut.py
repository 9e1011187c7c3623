"""Latency tables against whole networks: 50 random networks of each space, predicted from blocks and measured; beside it FLOPs.

python benchmarks/search_lut.py                                    CPU, batch 1, 2 threads; about 4 minutes; results/search-lut-cpu.json
python benchmarks/search_lut.py --device cuda --label h200         eager (launches) and CUDA graphs; under 3 minutes
  --spaces nb201,darts,macro --nets 50 --calibration 24

Blocks and networks are timed in interleaved rounds. Calibration networks, which fix how blocks add up, are others than the 50. FLOPs get
the same chance: a line fitted on the calibration networks. The file is written after every row.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import write_results

from ridgeline.measure.environment import machine_name
from ridgeline.search.latency.build import Plan, build_table
from ridgeline.search.spaces.space import load_space

SMALL_MACRO = {
    "widths": ((16, 32), (32, 64), (64, 128)), "depths": (10, 16), "kernels": (3, 5), "activations": ("relu", "hswish"),
    "attentions": ("none", "se"), "reductions": (4,),
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {"nb201": {}, "darts": {}, "macro": SMALL_MACRO}
HEAD = (
    f"{'space':<7}{'mode':<7}{'blocks':>7}{'nets':>6}{'mean':>8}{'p90':>8}{'worst':>8}{'rank':>7}"
    f"   FLOPs: {'mean':>7}{'worst':>9}{'rank':>7}"
)


def row(space_name: str, device: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    plan = Plan(options.calibration, options.nets, options.passes, seed=options.seed)
    space = load_space(space_name, **SETTINGS[space_name])
    table = build_table(space, device, batch=options.batch, mode=mode, threads=options.threads, plan=plan)
    with tempfile.TemporaryDirectory() as folder:  # what is stated is what a saved table says
        table = type(table).load(table.save(Path(folder) / "table.json"))
    assert table.errors is not None
    found = {"space": space_name, "settings": table.settings, "mode": mode, "batch": table.batch, "dtype": table.dtype,
             "threads": table.threads, "blocks": len(table.entries), "calibration_nets": plan.calibration, "passes": plan.passes,
             "overhead_s": table.overhead_s, **table.correction.model_dump(exclude={"nets"}), **table.errors.model_dump(),
             "seconds": time.perf_counter() - start}  # fmt: skip
    print(line(found), flush=True)
    return found


def line(found: dict[str, Any]) -> str:
    ours = f"{found['mean']:>8.1%}{found['p90']:>8.1%}{found['worst']:>8.1%}{found['spearman']:>7.3f}"
    flops = f"{found['flops_mean']:>14.1%}{found['flops_worst']:>9.1%}{found['flops_spearman']:>7.3f}"
    return f"{found['space']:<7}{found['mode']:<7}{found['blocks']:>7}{found['nets']:>6}{ours}   {flops}   {found['seconds']:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--spaces", default="nb201,darts,macro")
    parser.add_argument("--nets", type=int, default=50)
    parser.add_argument("--calibration", type=int, default=24)
    parser.add_argument("--passes", type=int, default=None, help="over all blocks and networks (default: 5, on CUDA 2)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=min(2, torch.get_num_threads()))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--label", default=None, help="machine's name in the result file (default: the device)")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    options = parser.parse_args()
    options.passes = options.passes or (2 if options.device == "cuda" else 5)
    print(HEAD, flush=True)
    modes = ("eager", "graph") if options.device == "cuda" else ("eager",)
    rows, machine = [], {"device": machine_name(options.device)}
    for space in options.spaces.split(","):
        for mode in modes:
            rows.append(row(space, options.device, mode, options))
            path = write_results("search", "lut", options.label or options.device, machine, rows, options.out)
    print(path)


if __name__ == "__main__":
    main()
