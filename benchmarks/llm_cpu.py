"""Decoding on the CPU: a real model with its weights in each type, in turns within one run, beside this machine's bandwidth.

    model ──load_model(weights=None | int8 | int4)──> Engine each ──turn by turn: 128 + 64 tokens of one sequence──> tokens/s
    python benchmarks/llm_cpu.py [--model smollm2-135m] [--variants bf16,int8,int4] [--turns 5] [--out FOLDER]

Turns: each variant runs once, then all again, so that whatever else the machine does falls on all of them. Bandwidth is measured in every
turn, too, and its best is the limit. times_bf16: the median over the turns of the ratio within a turn.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import write_results

from ridgeline.llm.bench import bench_decode
from ridgeline.llm.engine.engine import Engine
from ridgeline.llm.engine.options import EngineOptions
from ridgeline.llm.limits import read_bandwidth
from ridgeline.llm.load import load_model
from ridgeline.measure.environment import machine_name

VARIANTS = {"bf16": ("bfloat16", None), "int8": ("bfloat16", "int8"), "int4": ("bfloat16", "int4"), "float32": ("float32", None)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--variants", default="bf16,int8,int4")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--label", default="cpu")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    names = options.variants.split(",")
    if unknown := set(names) - VARIANTS.keys():
        parser.error(f"unknown variants {sorted(unknown)}; there are {', '.join(VARIANTS)}")
    if options.threads:
        torch.set_num_threads(options.threads)
    rows = compared(options, names)
    machine = {"device": machine_name("cpu"), "threads": torch.get_num_threads()}
    print(write_results("llm", "cpu", options.label, machine, rows, options.out))


def compared(options: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    engines = {name: opened(options.model, *VARIANTS[name]) for name in names}
    turns: list[dict[str, dict[str, Any]]] = []
    bandwidths = []
    for turn in range(options.turns):
        read_bandwidth.cache_clear()
        bandwidths.append(read_bandwidth("cpu"))
        sizes = {"prompt": options.prompt, "new": options.new, "repeats": 1, "warm_up": turn == 0}
        turns.append({name: bench_decode(engine, **sizes) for name, engine in engines.items()})
        print(f"turn {turn + 1}: " + ", ".join(f"{name} {row['tokens_per_s']:.1f} tokens/s" for name, row in turns[-1].items()), flush=True)
    return [summary(name, turns, max(bandwidths), names) for name in names]


def opened(model: str, dtype: str, weights: str | None) -> Engine:
    return Engine(load_model(model, dtype=dtype, device="cpu", weights=weights), EngineOptions(max_batch=1, context=1024))


def summary(name: str, turns: list[dict[str, dict[str, Any]]], bandwidth_bps: float, names: list[str]) -> dict[str, Any]:
    """One variant over all turns."""
    own = [turn[name] for turn in turns]
    rate = median(row["tokens_per_s"] for row in own)
    least_s = own[0]["bytes_per_token"] / bandwidth_bps
    row = {key: own[0][key] for key in ("model", "prompt", "new", "weight_bytes", "cache_bytes", "bytes_per_token")}
    row |= {
        "weights": name, "turns": len(own), "tokens_per_s": rate, "turns_tokens_per_s": [one["tokens_per_s"] for one in own],
        "first_token_ms": median(one["first_token_ms"] for one in own), "bandwidth_bps": bandwidth_bps,
        "limit_tokens_per_s": 1 / least_s, "percent_of_limit": 100 * rate * least_s,
    }  # fmt: skip
    if "bf16" in names:
        row["times_bf16"] = median(turn[name]["tokens_per_s"] / turn["bf16"]["tokens_per_s"] for turn in turns)
    return row


if __name__ == "__main__":
    main()
