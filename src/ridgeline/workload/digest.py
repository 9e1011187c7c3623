"""Models and data by content, for what is kept beside a run: equal digests, equal bytes.

model_digest(module)   every weight and buffer, saved or not, and what modules say of themselves
data_digest(data)      every image and label of both parts, and what `prepare` makes of the first of each
"""

from __future__ import annotations

import hashlib
import re
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .data import Data

DIGITS = 16


def model_digest(module: nn.Module) -> str:
    """Changes with every weight, every buffer, and with strides, kinds and options."""
    digest = hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", repr(module)).encode())
    for name, tensor in chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        _add(digest, name, tensor)
    return digest.hexdigest()[:DIGITS]


def data_digest(data: Data) -> str:
    """Changes with every image and label of both parts, and with what `prepare` makes of the first of each."""
    digest = hashlib.sha256()
    for part, split in (("train", data.train), ("test", data.test)):
        _add(digest, f"{part} inputs", split.inputs)
        _add(digest, f"{part} targets", split.targets)
        _add(digest, f"{part} prepared", data.prepare(split.inputs[:1]))
    return digest.hexdigest()[:DIGITS]


def _add(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
