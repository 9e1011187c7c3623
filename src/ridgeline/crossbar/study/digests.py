"""What results of a study depend on besides its options, as digests in run.json: the simulator's code, the model and the data."""

from __future__ import annotations

import hashlib
import re
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from ...workload.data import Data


def simulator_digest() -> str:
    """Changes with every line of this room and of what prices a chip, so that results of two simulators never mix."""
    digest, room = hashlib.sha256(), Path(__file__).parent.parent
    beside = [room.parent / "estimate" / "crossbar.py", room.parent / "target" / "crossbar.py"]
    for path in (*sorted(room.rglob("*.py")), *beside):
        digest.update(path.relative_to(room.parent).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def model_digest(module: nn.Module) -> str:
    """Changes with every weight, every buffer, saved or not, and with what modules say of themselves: strides, kinds, options."""
    digest = hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", repr(module)).encode())
    for name, tensor in chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        _add(digest, name, tensor)
    return digest.hexdigest()[:16]


def data_digest(data: Data) -> str:
    """Changes with every image and label of both parts, and with what `prepare` makes of the first image."""
    digest = hashlib.sha256()
    for part, split in (("train", data.train), ("test", data.test)):
        _add(digest, f"{part} inputs", split.inputs)
        _add(digest, f"{part} targets", split.targets)
        _add(digest, f"{part} prepared", data.prepare(split.inputs[:1]))
    return digest.hexdigest()[:16]


def _add(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
