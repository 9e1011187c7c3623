"""Data parallel under torchrun: every rank takes its rows of each batch, gradients are summed before the step.

    torchrun --nproc-per-node 4 script.py     RANK, WORLD_SIZE, LOCAL_RANK ──join_world──> World (nccl on CUDA, gloo on CPU)
    rank r: rows [r·B/W, (r+1)·B/W) of the batch, loss weighted by rows / B ──backward──> gradients ──sum over ranks──> step

The same batches and the same steps as one process, to rounding. Gradients travel in buckets of 25 MB after the backward pass.
BatchNorm: synchronised on CUDA (torch.nn.SyncBatchNorm, for the time of the run); on the CPU, where torch has no such layer,
each rank normalises by its own rows and running statistics are averaged. Ref: Li 2020 (DistributedDataParallel).
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.errors import TrainError

BUCKET_BYTES = 25 << 20

LEAVE = timedelta(seconds=10)
"""At most, at the end of a process, for the other ranks."""


@dataclass(frozen=True, slots=True)
class World:
    """Which of how many processes this is."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def leads(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def rows(self, batch: int) -> int:
        """How many rows of a batch are this rank's."""
        return (self.rank + 1) * batch // self.size - self.rank * batch // self.size


def join_world(device_type: str) -> World:
    """The world torchrun made, joined on first use and left when the process ends; one process without torchrun."""
    if distributed.is_available() and distributed.is_initialized():
        return World(distributed.get_rank(), distributed.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")))
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return World()
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise TrainError(
            f"WORLD_SIZE = {os.environ['WORLD_SIZE']} without {', '.join(missing)}",
            why="the processes cannot find each other",
            do="start the script with torchrun, or unset WORLD_SIZE",
        )
    world = World(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0")))
    if device_type == "cuda":
        torch.cuda.set_device(world.local_rank)
    distributed.init_process_group("nccl" if device_type == "cuda" else "gloo")
    # Not after each run: a second group in one process would meet the first one's addresses in torchrun's store.
    atexit.register(_leave)
    return world


def _leave() -> None:
    if distributed.is_initialized():
        if distributed.get_backend() == "gloo" and not hasattr(sys, "last_value"):  # a rank that ends by an error waits for nobody
            with suppress(RuntimeError):  # all leave together: gloo's threads may abort a process whose peer is gone
                distributed.monitored_barrier(timeout=LEAVE)
        distributed.destroy_process_group()


def share_model(model: nn.Module, world: World) -> None:
    """Every rank starts from rank 0's weights and buffers."""
    if world.size > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            distributed.broadcast(tensor.data, src=0)


def share_number(number: int, world: World, device: torch.device) -> int:
    """Rank 0's number on every rank."""
    if world.size == 1:
        return number
    told = torch.tensor(number, device=device)
    distributed.broadcast(told, src=0)
    return int(told)


class GradientSum:
    """Sums gradients, and a few numbers beside them, over all ranks."""

    def __init__(self, parameters: Sequence[nn.Parameter], world: World) -> None:
        self.parameters, self.world = parameters, world
        self.used: list[bool] | None = None  # which parameters any rank has a gradient for, agreed in the first step

    def __call__(self, numbers: Tensor) -> Tensor:
        """Sum `.grad` of all parameters in place, and give the sum of `numbers`."""
        if self.world.size == 1:
            return numbers
        if self.used is None:
            flags = torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.int32, device=numbers.device)
            distributed.all_reduce(flags, distributed.ReduceOp.MAX)
            self.used = [bool(flag) for flag in flags.tolist()]
        gradients = [self._gradient(index, p) for index, p in enumerate(self.parameters) if self.used[index] or p.grad is not None]
        buckets = [*_buckets(gradients), [numbers]]
        flats = [torch.cat([tensor.reshape(-1) for tensor in bucket]) for bucket in buckets]
        waiting = [distributed.all_reduce(flat, async_op=True) for flat in flats]
        for work, flat, bucket in zip(waiting, flats, buckets, strict=True):
            work.wait()
            if bucket[0] is not numbers:
                parts = flat.split([tensor.numel() for tensor in bucket])
                torch._foreach_copy_(bucket, [part.view(tensor.shape) for part, tensor in zip(parts, bucket, strict=True)])
        return flats[-1].view(numbers.shape)

    def _gradient(self, index: int, parameter: nn.Parameter) -> Tensor:
        assert self.used is not None
        if not self.used[index]:
            raise TrainError(
                f"parameter {index} of shape {list(parameter.shape)} has a gradient now, but had none in the first step",
                why="under torchrun the same parameters must be used in every step",
                do="use every parameter in every step, or freeze those that are not used",
            )
        if parameter.grad is None:  # other ranks have one: their rows took another way through the model
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of tensors of one dtype, up to BUCKET_BYTES each."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def average_buffers(model: nn.Module, world: World) -> None:
    """One set of running statistics from every rank's own; nothing to do where they are synchronised already."""
    if world.size == 1:
        return
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            for buffer in module.buffers(recurse=False):
                if buffer.is_floating_point():
                    distributed.all_reduce(buffer)
                    buffer.div_(world.size)


@contextmanager
def synchronised_norms(model: nn.Module, world: World, device: torch.device) -> Iterator[list[str]]:
    """BatchNorm over all ranks' rows while inside; yields what the user should know."""
    norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if world.size == 1 or not norms:
        yield []
        return
    if device.type != "cuda":
        yield [f"{len(norms)} BatchNorm layers normalise by each rank's own rows: torch synchronises them on CUDA only"]
        return
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, _BatchNorm) and not isinstance(child, nn.SyncBatchNorm):
                    replaced.append((parent, name, child))
                    setattr(parent, name, nn.SyncBatchNorm.convert_sync_batchnorm(child))
        yield []
    finally:
        for parent, name, child in replaced:  # the same weights and buffers: only the class was another
            setattr(parent, name, child)
