"""A run that is killed at any point and goes on: killed_run.py FOLDER KILLS.

    fork ──> run to its end, never killed ──> FOLDER/wanted
    again and again: fork ──> run ──SIGKILL a moment after a random step──> fork ──> it goes on … ──> FOLDER/final-<round>

Momentum, dropout, loss scale, warm-up, BatchNorm and augmentation are all in it, so that forgetting any of them shows. The
parent imports torch once and computes nothing, so that a fork costs milliseconds where a new interpreter costs seconds.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ridgeline.train.fit import fit
from ridgeline.train.options import Scaling
from ridgeline.workload.data import Data, Split

STEPS = 40


def crop(batch: Tensor, generator: torch.Generator) -> Tensor:
    return batch + 0.1 * torch.randn(batch.shape, generator=generator)


def run(folder: Path, final: Path, told: int) -> None:
    """Train, a byte into the pipe after each step; the final state is written whole."""
    torch.set_num_threads(1)
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Linear(8, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3)
    )
    inputs = torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
    split = Split(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long())
    data = Data("made", "image", 3, split, split, augment=crop)
    fit(model, data, steps=STEPS, batch=32, learning_rate=0.05, warmup=5, precision="float16", scaling=Scaling(initial=2.0**30, interval=7),
        checkpoint=folder, checkpoint_every=2, progress=False, after_step=lambda _, step: os.write(told, b"."))  # fmt: skip
    save_file(dict(model.state_dict()), f"{final}.part")
    os.replace(f"{final}.part", final)


def forked(folder: Path, final: Path, kill_at: int | None, then_s: float = 0.0) -> bool:
    """Run in a child; kill it a moment after `kill_at` steps of its own. Whether it was killed."""
    heard, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(heard)
        code = 1
        try:
            run(folder, final, told)
            code = 0
        finally:
            os._exit(code)
    os.close(told)
    steps = 0
    while kill_at is None or steps < kill_at:
        said = os.read(heard, 1)
        if not said:  # it ended
            break
        steps += 1
    else:
        time.sleep(then_s)
        os.kill(child, signal.SIGKILL)
    os.close(heard)
    status = os.waitpid(child, 0)[1]
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
        sys.exit("the run failed")
    return os.WIFSIGNALED(status)


def main(folder: Path, kills: int) -> None:
    forked(folder / "whole", folder / "wanted", None)
    chance, done, rounds = random.Random(5), 0, 0
    while done < kills:
        final = folder / f"final-{rounds}"
        while not final.exists():
            kill_at = chance.randrange(1, STEPS // 2) if done < kills else None
            done += forked(folder / f"run-{rounds}", final, kill_at, chance.random() * 0.01)
        rounds += 1
    print(done, rounds)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
