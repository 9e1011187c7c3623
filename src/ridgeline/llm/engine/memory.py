"""How many pages the cache gets: as asked, or a share of what is free.

pages given ──────────────────────────────────────────────┐
kv_memory_bytes, or a share of the free memory ──pages_for──┴──> pages, at least one full context, at most max_batch of them
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...core.errors import OptionError
from ...measure.memory import free_bytes
from ..cache.kv import formula_bytes, pages_for

if TYPE_CHECKING:
    from ..model.config import ModelConfig
    from .options import EngineOptions

CPU_MOST_BYTES = 2 * 2**30
CPU_SHARE = 0.25
CUDA_SHARE = 0.9  # the rest is for activations and the graphs' memory


def page_count(config: ModelConfig, options: EngineOptions, context: int, dtype: torch.dtype, device: torch.device) -> int:
    """Pages of the cache; an error that says the bytes where they would not hold one full context."""
    shape = (options.page_size, dtype.itemsize, options.kv_int8)
    needed = -(-context // options.page_size)
    needed_bytes = formula_bytes(config, needed, *shape)
    if options.pages is not None:
        pages, given = options.pages, f"{options.pages} pages ({formula_bytes(config, options.pages, *shape):,} bytes)"
    else:
        memory = options.kv_memory_bytes or default_bytes(device)
        if memory < needed_bytes:
            raise _short(f"{memory:,} bytes", context, needed_bytes)
        pages, given = pages_for(config, memory, *shape), f"{memory:,} bytes"
        if options.kv_memory_bytes is None:
            pages = min(pages, needed * options.max_batch)  # more could never be used at once
    if pages < needed:
        raise _short(given, context, needed_bytes)
    return pages


def default_bytes(device: torch.device) -> int:
    """The share of the free memory the cache takes when nothing is said."""
    free = free_bytes(device)
    if device.type == "cuda":
        return int((free or 0) * CUDA_SHARE)
    return CPU_MOST_BYTES if free is None else min(CPU_MOST_BYTES, int(free * CPU_SHARE))


def _short(given: str, context: int, needed_bytes: int) -> OptionError:
    return OptionError(
        f"a key-value cache of {given}",
        why=f"one full context of {context:,} tokens takes {needed_bytes:,} bytes",
        do="give a smaller context, more kv_memory_bytes, or kv_int8=True",
    )
