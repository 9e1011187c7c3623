"""Generation on a GPU: one sequence of each shape and weight type, and a served load, beside the limit.

    case ──a process of its own, caches of kernels empty──> load (random weights) ──> ready: first tokens ──> bench_decode | bench_serving
    python benchmarks/llm_gpu.py [--cases 8b-bf16,8b-int8,…] [--alone N] [--label h200] [--out FOLDER]

Decode: batch 1, 128 + 128 tokens, the median of --repeats. ready_s: from the start of the process to the 16th token of a first request,
importing, drawing weights, compiling kernels and capturing graphs included. Serving: 256 requests of 128 to 1,024 tokens in and 128 out,
all at once, then --alone requests of the same lengths one after another. A case that fails gives a row with its error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import write_results

CASES: dict[str, dict[str, Any]] = {
    "8b-bf16": {"model": "llama-3-8b:random", "weights": None},
    "8b-int8": {"model": "llama-3-8b:random", "weights": "int8"},
    "8b-int4": {"model": "llama-3-8b:random", "weights": "int4"},
    "1.1b-bf16": {"model": "tinyllama-1.1b:random", "weights": None},
    "1.1b-int8": {"model": "tinyllama-1.1b:random", "weights": "int8"},
    "8b-bf16-serving": {"model": "llama-3-8b:random", "weights": None, "serving": True},
}
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "RIDGELINE_CACHE")
MARK = "row: "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--alone", type=int, default=64, help="requests of the served load measured one after another")
    parser.add_argument("--max-step-tokens", type=int, default=4096, help="of the served load")
    parser.add_argument("--limit-s", type=float, default=400.0, help="most seconds a case may take")
    parser.add_argument("--target", default="h200", help="target of the catalog to predict for")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--label", default="h200")
    parser.add_argument("--what", default="gpu", help="middle of the name of the results file")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(MARK + json.dumps(measured(options)), flush=True)
        return
    names = options.cases.split(",")
    if unknown := set(names) - CASES.keys():
        parser.error(f"unknown cases {sorted(unknown)}; there are {', '.join(CASES)}")
    from ridgeline.measure.environment import machine_name

    rows: list[dict[str, Any]] = []
    for name in names:
        rows.append({"name": name, **CASES[name], **in_process(name, options)})
        print({key: value for key, value in rows[-1].items() if key != "predicted"}, flush=True)
        path = write_results("llm", options.what, options.label, {"device": machine_name(options.device)}, rows, options.out)
    print(path)


def in_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A case's row, or its error; the process starts with no compiled kernel on disk."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **{variable: f"{folder}/{variable}" for variable in CACHES}}
        command = [sys.executable, *sys.argv, "--one", name, "--started", repr(time.time())]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=options.limit_s)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {options.limit_s:.0f} s"}
    found = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not found:
        return {"error": (done.stderr.strip() or f"exit code {done.returncode}")[-2000:]}
    row: dict[str, Any] = json.loads(found[-1])
    return row


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """In the case's own process."""
    import torch

    from ridgeline.llm.bench import bench_decode, bench_serving, jobs, serve
    from ridgeline.llm.engine.engine import Engine
    from ridgeline.llm.engine.options import EngineOptions
    from ridgeline.llm.load import load_model
    from ridgeline.target.load import load_target

    case = CASES[options.one]
    serving = case.get("serving", False)
    imported = time.time()
    loaded = load_model(case["model"], device=options.device, weights=case["weights"])
    read = time.time()
    sizes = {"max_batch": options.requests, "max_step_tokens": options.max_step_tokens} if serving else {"max_batch": 1}
    engine = Engine(loaded, EngineOptions(**sizes))
    serve(engine, jobs(1, (options.prompt, options.prompt), 16, loaded.config.vocab))
    ready = {"ready_s": time.time() - options.started, "import_s": imported - options.started, "load_s": read - imported}
    if serving:
        row = bench_serving(engine, requests=options.requests, prompt=(128, 1024), new=options.new, alone=options.alone)
    else:
        row = bench_decode(engine, prompt=options.prompt, new=options.new, repeats=options.repeats, target=load_target(options.target))
    if options.device.startswith("cuda"):
        ready["peak_bytes"] = torch.cuda.max_memory_allocated()
    return {**row, **ready}


if __name__ == "__main__":
    main()
