"""Trains a few small nets under torchrun, or alone: two_ranks.py FOLDER. Every rank writes what it ended with."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ridgeline.train.fit import fit
from ridgeline.workload.data import Data, Split


def shift(batch: Tensor, generator: torch.Generator) -> Tensor:
    return batch + 0.1 * torch.randn(batch.shape, generator=generator, dtype=batch.dtype)


def made_data(ignored: bool = False) -> Data:
    inputs = torch.randn(90, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    targets = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()
    split = Split(inputs, torch.where(inputs[:, 2] > 0.5, -100, targets) if ignored else targets)
    return Data("made", "image", 3, split, split, augment=shift)


def net(norm: bool = False) -> nn.Module:
    torch.manual_seed(2 + int(os.environ.get("RANK", "0")))  # ranks differ at first: the run must make them equal
    middle: list[nn.Module] = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 3)).double()


CASES: dict[str, dict[str, Any]] = {
    "plain": {"batch": 16},
    "uneven": {"batch": 15, "accumulate": 2, "clip": 0.5},
    "adam": {"batch": 16, "optimiser": "adamw", "learning_rate": 0.01},
}


def main(folder: Path) -> None:
    rank = int(os.environ.get("RANK", "0"))
    ended: dict[str, Tensor] = {}
    losses: dict[str, Any] = {}
    for name, options in CASES.items():
        model = net()
        where = folder / "checkpoints" / name
        history = fit(model, made_data(), steps=8, checkpoint=where, checkpoint_every=4, progress=True, **options)
        ended |= {f"{name}.{key}": value for key, value in model.state_dict().items()}
        losses[name] = history.loss
    again = net()  # takes up what rank 0 wrote
    losses["again"] = fit(again, made_data(), steps=8, checkpoint=folder / "checkpoints" / "plain", progress=False, **CASES["plain"]).notes
    ended |= {f"again.{key}": value for key, value in again.state_dict().items()}
    model = net()
    losses["ignored"] = fit(model, made_data(ignored=True), steps=8, batch=15, progress=False).loss
    ended |= {f"ignored.{key}": value for key, value in model.state_dict().items()}
    normed = net(norm=True)
    losses["notes"] = fit(normed, made_data(), steps=4, batch=16, progress=False).notes
    ended |= {f"normed.{key}": value for key, value in normed.state_dict().items()}
    save_file(ended, folder / f"rank-{rank}.safetensors")
    (folder / f"rank-{rank}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
