"""What results of a study depend on besides its options: the simulator's code and the model's weights, as digests in run.json."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import nn


def simulator_digest() -> str:
    """Changes with every line of this room, so that results of two simulators never mix."""
    digest, room = hashlib.sha256(), Path(__file__).parent.parent
    for path in sorted(room.rglob("*.py")):
        digest.update(path.relative_to(room).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def model_digest(module: nn.Module) -> str:
    """Changes with every weight."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
