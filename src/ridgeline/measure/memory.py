"""How much memory one forward pass takes beyond what was held before it, and whether a model fits at all.

    CUDA: allocator peak − allocated before                    every byte, workspaces included
    CPU:  storages alive after each dispatched call, weakly held ──sum──> peak      tensors; scratch inside an op is not seen

Weights and inputs exist before the pass and are not counted; the result is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.errors import MeasureError
from ..workload.case import ModelCase


def measured_peak_bytes(case: ModelCase, device: torch.device) -> int:
    """The most bytes one forward pass adds to what is already held."""
    if device.type == "cuda":
        return _cuda_peak(case, device)
    tracker = StorageTracker()
    with torch.no_grad(), tracker:
        case.module(*case.args, **case.kwargs)
    return tracker.peak_bytes


def _cuda_peak(case: ModelCase, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.inference_mode():
        case.module(*case.args, **case.kwargs)
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


class StorageTracker(TorchDispatchMode):
    """Adds up the storages made under it that are still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._alive: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        weak: Any = StorageWeakRef
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._alive:
                self._alive[storage._cdata] = (weak(storage), storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Those with a storage to count: oneDNN's packed weights have none."""
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]


def require_room(case: ModelCase, device: torch.device) -> None:
    """MeasureError when the weights of a model built on the meta device are larger than what `device` has free."""
    needed, free = weight_bytes(case.module), free_bytes(device)
    if free is not None and needed > free:
        raise MeasureError(
            f"{case.name} does not fit on {device}",
            why=f"its weights take {needed / 1e9:.1f} GB in {case.dtype} and {free / 1e9:.1f} GB are free",
            do="choose a smaller model or dtype, or estimate it: `ridgeline analyze` allocates nothing",
        )


def weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones once."""
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in (*module.parameters(), *module.buffers())}
    return sum(sizes.values())


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be allocated; None where the machine does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return int(kib) * 1024 if kib else None
