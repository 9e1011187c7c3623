"""What the C allocator costs: page faults of a pass, in several starts of the same program, and the time with memory kept.

python benchmarks/page_faults.py            Linux; two minutes on two cores

per model, batch, start: median latency, bytes faulted in a pass, beside what the estimate's allocator model says
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from statistics import median
from typing import Any

import torch
from common import write_results

from ridgeline import capture
from ridgeline.estimate.allocator import faulted_bytes
from ridgeline.measure.environment import machine_name
from ridgeline.target.calibrate import KEEP_MEMORY
from ridgeline.workload.capture import resolve
from ridgeline.workload.case import CaseOptions

CASES = (("resnet18", 8), ("mobilenet-v2", 1), ("mobilenet-v2", 8))
STARTS = 4
PASSES = 12


def one_start(model: str, batch: int) -> dict[str, float]:
    """Latency and faulted bytes of a pass in this process."""
    case = resolve(model, CaseOptions(batch=batch, device="cpu"))
    times = []
    with torch.inference_mode():
        for _ in range(3):
            case.module(*case.args)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(PASSES):
            start = time.perf_counter()
            case.module(*case.args)
            times.append(time.perf_counter() - start)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return {"measured_s": median(times), "faulted_bytes": faults * resource.getpagesize() / PASSES}


def fresh_start(model: str, batch: int, keep: bool) -> dict[str, float]:
    environment = {**os.environ, **(KEEP_MEMORY if keep else {})}
    done = subprocess.run([sys.executable, __file__, model, str(batch)], capture_output=True, text=True, check=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    if len(sys.argv) == 3:
        print(json.dumps(one_start(sys.argv[1], int(sys.argv[2]))))
        return
    rows: list[dict[str, Any]] = []
    for model, batch in CASES:
        modelled = sum(faulted_bytes(capture(model, batch=batch).ops))
        for start in range(STARTS + 1):
            keep = start == STARTS
            found = fresh_start(model, batch, keep)
            rows.append({"model": model, "batch": batch, "memory_kept": keep, **found, "modelled_bytes": 0 if keep else modelled})
            print(
                f"{model:<14}{batch:>3}  {'kept' if keep else f'start {start + 1}':<8}{found['measured_s'] * 1e3:>9.1f} ms"
                f"{found['faulted_bytes'] / 1e6:>9.1f} MB faulted in, {rows[-1]['modelled_bytes'] / 1e6:.1f} modelled",
                flush=True,
            )
    print(write_results("analyze", "page-faults", "cpu", {"device": machine_name("cpu"), "threads": torch.get_num_threads()}, rows))


if __name__ == "__main__":
    main()
