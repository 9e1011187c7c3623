"""A search killed again and again (SIGKILL) beside one that never was: `python -m tests.search.study.killed FOLDER KILLS TRIALS STRATEGY`.

One process imports torch and forks a child for every run, so that twenty kills cost twenty searches and not twenty imports. Prints a JSON
object: kills, finished runs, what was found wrong, and how far runs were when they were killed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import ridgeline.report.search_html
import ridgeline.search.strategies  # noqa: F401  (before the forks)
from ridgeline.search.recipe import train_network
from ridgeline.search.study.folder import read_trials
from ridgeline.search.study.search import run_search
from tests.search.study.tiny import TinySpace, register, tiny_data, tiny_recipe

DATA = tiny_data()
TIMES = ("seconds", "exported")
PARTS = ("front.json", "trials.jsonl", "weights")


def child(folder: Path, recipe: str, trials: int, strategy: str) -> int:
    """Start the search in a process of its own."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run_search(
            TinySpace(), DATA, strategy=strategy, objectives="accuracy,parameters", limits=["parameters<=250"], budget=f"{trials}trials",
            seeds=2, folder=folder, recipe=recipe, final_recipe=recipe, epochs=3, final_epochs=6, onnx=False,
        )  # fmt: skip
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def plain(value: Any) -> Any:
    """Without what may differ: times and paths."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items() if name not in TIMES}
    return [plain(one) for one in value] if isinstance(value, list) else value


def result(folder: Path) -> Any:
    weights = [(folder / "final" / str(seed) / "weights.safetensors").read_bytes().hex() for seed in (0, 1)]
    front = json.loads((folder / "front.json").read_text(encoding="utf-8"))
    return [plain(front), plain(read_trials(folder)), weights]


def stage(folder: Path) -> str:
    if not (folder / "run.json").exists():
        return "before the request"
    if any((folder / "final").glob("*/checkpoints/step-*")):
        return "in a final training"
    if any((folder / "trials").glob("*/*/step-*")):
        return "in a trial with a checkpoint"
    return "between"


def main(folder: Path, kills: int, trials: int, strategy: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    register()
    folder.mkdir(parents=True, exist_ok=True)
    train_network(TinySpace().build((0, 0, 0)), DATA, tiny_recipe(folder), epochs=1)  # torch imports much of itself at the first step
    recipe, draw = tiny_recipe(folder), random.Random(int(time.time() * 1e6) if "RIDGELINE_KILL_SEED" not in os.environ else 0)
    begun = time.perf_counter()
    assert os.waitpid(child(folder / "whole", recipe, trials, strategy), 0)[1] == 0
    span, wanted = time.perf_counter() - begun, result(folder / "whole")
    done: dict[str, Any] = {"kills": 0, "finished": 0, "wrong": [], "stages": {}, "span_s": span, "lines": len(wanted[1])}
    run, known = folder / "killed", 0
    while done["kills"] < kills or known or not done["finished"]:
        pid = child(run, recipe, trials, strategy)
        if done["kills"] < kills:
            time.sleep(draw.uniform(0.0, 0.7 * span))
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        lines = read_trials(run)
        if plain(lines) != wanted[1][: len(lines)] or len(lines) < known:
            done["wrong"].append(f"after {done['kills']} kills: {len(lines)} lines, {known} before")
        known = len(lines)
        if os.WIFSIGNALED(status):
            done["kills"] += 1
            done["stages"][stage(run)] = done["stages"].get(stage(run), 0) + 1
        else:
            differing = [name for name, now, then in zip(PARTS, result(run), wanted, strict=True) if now != then] if status == 0 else []
            if status != 0 or differing:
                done["wrong"].append(f"after {done['kills']} kills: exit {status}, {differing} differ")
            done["finished"] += 1
            shutil.rmtree(run)
            known = 0
            if status != 0:
                break
    return done


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
