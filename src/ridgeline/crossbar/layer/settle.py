"""Batch norms that follow a chip: their means and variances as its layers give them, measured; no weight changes.

    model on a chip ──batches──> norms alone in training mode, plain mean over batches ──> their running statistics

Show it images as the network saw them in training, shifted and mirrored: borders of zeros are part of what statistics were learned on.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...core.errors import OptionError
from ...train.evaluate import device_of, scoring


@torch.no_grad()
def settle_norms_(model: nn.Module, batches: Iterable[Tensor]) -> int:
    """Replaces the running statistics of every batch norm; how many there are. After an error they are as before."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    if not norms:
        raise OptionError(
            "a model without batch norms to settle",
            why="to_crossbar folds them into the weights",
            do="convert with to_crossbar(fold=False)",
        )
    before = [(norm, norm.momentum, [buffer.clone() for buffer in norm.buffers(recurse=False)]) for norm in norms]
    seen = 0
    try:
        with scoring([model], device_of(model)):
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # the plain mean
                norm.train()
            for batch in batches:
                model(batch)
                seen += len(batch)
        if not seen:
            raise OptionError("no batch to settle norms on", why="their statistics are measured", do="give some hundred training images")
    except BaseException:
        for norm, _, statistics in before:
            for buffer, value in zip(norm.buffers(recurse=False), statistics, strict=True):
                buffer.copy_(value)
        raise
    finally:
        for norm, momentum, _ in before:
            norm.momentum = momentum
    return len(norms)
