"""How batches reach the device: one iterator, three ways, the same batches.

    order(epoch) [N] ──rows of step s──> gather ──> augment(generator of (seed, step)) ──> prepare ──> Batch(inputs, targets)

    resident   the whole split moved once, rows indexed on the device; on the CPU the split itself, so the gather is the only copy
    prefetch   a thread gathers the next step into one of 3 reused pinned buffers and copies it on a stream of its own into one of
               3 reused device buffers; the compute stream waits for an event, the host for nothing but a gather that is late
    blocking   gather, then copy, while the loop waits
    auto       on CUDA resident where the split takes at most RESIDENT_SHARE of the free memory, else prefetch; on the CPU resident

Three buffers: one the loop holds, one it held before (still in use by queued kernels), one being filled. Augmentation runs on the
device with random numbers from a CPU generator, so every device, mode, world size and resumed run sees the same crops.
Rank r of w keeps rows [r·batch/w, (r+1)·batch/w); with augment the whole batch is augmented first, so that w does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Generator as Yields
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Generator, Tensor

from ..core.errors import DataError, OptionError
from ..measure.memory import free_bytes
from ..workload.data import Split, unchanged
from .augment import Augmentation
from .seeds import step_generator

Mode = Literal["auto", "resident", "prefetch", "blocking"]
Order = Callable[[int], Tensor]
Augment = Callable[[Tensor, Generator], Tensor] | Augmentation
Change = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]  # inputs and targets of this step, augmented
Raw = Yields[tuple[Tensor, Tensor, float], None, None]  # inputs and targets on the device, seconds waited
MODES = ("auto", "resident", "prefetch", "blocking")
RESIDENT_SHARE = 0.25  # of the free device memory: what is left must hold weights, optimiser and activations
SLOTS = 3


@dataclass(frozen=True, slots=True)
class Batch:
    """One optimiser step's rows of this rank; valid until the next but one is asked for."""

    inputs: Tensor  # augmented and prepared
    targets: Tensor
    wait_s: float  # the host waited for it: gather and copy, or the late part of a prefetched gather
    step: int  # of the whole run, from 0
    epoch: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Which rows each step takes."""

    rows: int
    order: Order
    batch: int
    steps: int
    start_step: int
    first: int  # of the batch, the rows that are gathered
    last: int

    def epochs(self) -> Iterator[tuple[int, Tensor, range]]:
        """(epoch, its order, the steps of it that are to be run)."""
        each, step = self.rows // self.batch, self.start_step
        while step < self.steps:
            epoch = step // each
            until = min(self.steps, (epoch + 1) * each)
            yield epoch, _checked(self.order(epoch), self.rows, epoch), range(step, until)
            step = until

    def slice(self, order: Tensor, step: int) -> Tensor:
        """Row numbers of one step."""
        start = step % (self.rows // self.batch) * self.batch
        return order[start + self.first : start + self.last]

    def indices(self) -> Iterator[tuple[int, Tensor]]:
        """(step, row numbers) on the CPU."""
        for _, order, steps in self.epochs():
            for step in steps:
                yield step, self.slice(order, step)


def batches(
    split: Split, order: Order, *, batch: int, steps: int, start_step: int = 0, device: torch.device, mode: Mode = "auto",
    augment: Augment | None = None, prepare: Callable[[Tensor], Tensor] = unchanged, seed: int = 0, rank: int = 0, world: int = 1,
) -> Iterator[Batch]:  # fmt: skip
    """Batches `start_step` to `steps` - 1; only whole ones: an epoch has len(split) // batch steps, the rest of its order is dropped."""
    _check(split, batch, steps, start_step, rank, world)
    own = (rank * batch // world, (rank + 1) * batch // world)
    first, last = (0, batch) if augment else own
    plan = Plan(len(split), order, batch, steps, start_step, first, last)
    way = {"resident": _resident, "prefetch": _prefetch, "blocking": _blocking}[choose_mode(split, device, mode)]
    change = _drawn_ahead(augment, plan, split, device, seed) if isinstance(augment, Augmentation) else _drawn_by_step(augment, seed)
    return _finished(way(split, plan, device), plan, own, change if augment else None, prepare)


def _drawn_by_step(augment: Callable[[Tensor, Generator], Tensor] | None, seed: int) -> Change:
    def change(images: Tensor, targets: Tensor, step: int) -> tuple[Tensor, Tensor]:
        return (augment(images, step_generator(seed, step)) if augment else images), targets

    return change


def _drawn_ahead(augment: Augmentation, plan: Plan, split: Split, device: torch.device, seed: int) -> Change:
    """Numbers of a whole epoch drawn on the CPU, step by step, and copied at once: the same as drawn one by one."""
    size, drawn = (split.inputs.shape[-2], split.inputs.shape[-1]), dict[int, Tensor]()
    if augment.cutmix:
        _check_labels(split.targets, augment.classes)

    def draw(epoch: int, order: Tensor, steps: range) -> None:
        parts = [augment.draw(plan.slice(order, s), size, seed, epoch, step_generator(seed, s)) for s in steps]
        drawn.update(zip(steps, torch.stack(parts).to(device).unbind(0), strict=True))

    epochs = plan.epochs()

    def change(images: Tensor, targets: Tensor, step: int) -> tuple[Tensor, Tensor]:
        if step not in drawn:
            draw(*next(epochs))
        here = drawn.pop(step)
        return augment.apply(images, here), augment.shares(targets, here, size)

    return change


def _finished(raw: Raw, plan: Plan, own: tuple[int, int], change: Change | None, prepare: Callable[[Tensor], Tensor]) -> Iterator[Batch]:
    """Augment and prepare on the device."""
    each = plan.rows // plan.batch
    try:
        for step in range(plan.start_step, plan.steps):
            inputs, targets, wait_s = next(raw)
            if change is not None:
                inputs, targets = (changed[own[0] : own[1]] for changed in change(inputs, targets, step))
            yield Batch(prepare(inputs), targets, wait_s, step, step // each)
    finally:
        raw.close()


def choose_mode(split: Split, device: torch.device, mode: str = "auto") -> str:
    """What `mode` means here: itself, or what auto chooses; an error where a resident split cannot fit."""
    if mode not in MODES:
        raise OptionError(f"feed = {mode!r}", why=f"it is one of {', '.join(MODES)}", do="choose one of them; auto suits most runs")
    if device.type == "cpu":
        return "resident" if mode == "auto" else mode
    needed, free = split_bytes(split), free_bytes(device)
    if mode == "resident" and free is not None and needed > free:
        raise OptionError(
            f"feed = 'resident' with {needed / 1e9:.2f} GB of data on {device}",
            why=f"only {free / 1e9:.2f} GB are free there",
            do="use feed='prefetch', which holds three batches there, or feed='auto'",
        )
    if mode != "auto":
        return mode
    return "resident" if free is not None and needed <= RESIDENT_SHARE * free else "prefetch"


def split_bytes(split: Split) -> int:
    """What inputs and targets take."""
    return sum(t.numel() * t.element_size() for t in (split.inputs, split.targets))


def _resident(split: Split, plan: Plan, device: torch.device) -> Raw:
    start = perf_counter()
    inputs, targets = (t.to(device).contiguous() if device.type != "cpu" else t for t in (split.inputs, split.targets))
    moved_s = perf_counter() - start  # once: the first batch has waited for it
    for _, order, steps in plan.epochs():
        here = order.to(device)
        for step in steps:
            start = perf_counter()
            index = plan.slice(here, step)
            rows = inputs.index_select(0, index), targets.index_select(0, index)
            yield *rows, perf_counter() - start + moved_s
            moved_s = 0.0


def _blocking(split: Split, plan: Plan, device: torch.device) -> Raw:
    for _, index in plan.indices():
        start = perf_counter()
        rows = split.inputs.index_select(0, index).to(device), split.targets.index_select(0, index).to(device)
        yield *rows, perf_counter() - start


def _prefetch(split: Split, plan: Plan, device: torch.device) -> Raw:
    """Step s + 1 is gathered and copied while step s is computed on."""
    slots = _slots(split, plan.last - plan.first, device)
    rows = plan.indices()
    worker = ThreadPoolExecutor(1, thread_name_prefix="ridgeline-feed")
    late: dict[int, Future[None]] = {}

    def ahead() -> None:
        step, index = next(rows, (None, None))
        if step is not None and index is not None:
            late[step] = worker.submit(slots[step % SLOTS].fill, split, index)

    try:
        ahead()
        for step in range(plan.start_step, plan.steps):
            # Batch step - 2 is no longer held: what was queued so far may still read it, what fills its slot must come after.
            slots[(step + 1) % SLOTS].release()
            ahead()
            start = perf_counter()
            late.pop(step).result()
            slot = slots[step % SLOTS]
            slot.acquire()
            yield slot.inputs, slot.targets, perf_counter() - start
    finally:
        worker.shutdown(wait=True, cancel_futures=True)
        for slot in slots:
            slot.close()


class _Slot:
    """Reused buffers of one batch on the CPU: what is gathered is what is given out."""

    def __init__(self, split: Split, rows: int) -> None:
        self.host = [torch.empty((rows, *t.shape[1:]), dtype=t.dtype) for t in (split.inputs, split.targets)]
        self.inputs, self.targets = self.host

    def fill(self, split: Split, index: Tensor) -> None:
        for source, buffer in zip((split.inputs, split.targets), self.host, strict=True):
            torch.index_select(source, 0, index, out=buffer)

    def acquire(self) -> None:
        """The loop may read the buffers from here on."""

    def release(self) -> None:
        """The loop queues no more work on the buffers."""

    def close(self) -> None:
        """The buffers may be freed after this."""


class _CudaSlot(_Slot):
    """Pinned host buffers, device buffers, and the events that order the copy between them."""

    def __init__(self, split: Split, rows: int, device: torch.device, stream: Any) -> None:
        super().__init__(split, rows)
        cuda: Any = torch.cuda  # parts of it are untyped
        self.host = [buffer.pin_memory() for buffer in self.host]
        self.inputs, self.targets = (torch.empty_like(buffer, device=device, pin_memory=False) for buffer in self.host)
        self.device, self.stream = device, stream
        # blocking: the thread sleeps instead of spinning on a core while it waits for its buffer.
        self.copied, self.released = cuda.Event(blocking=True), cuda.Event()
        self.release()  # the allocator may have given out memory that queued kernels still use

    def fill(self, split: Split, index: Tensor) -> None:
        self.copied.synchronize()  # the host buffer may still be on its way; an event never recorded is complete
        super().fill(split, index)
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.released)
            for source, buffer in zip(self.host, (self.inputs, self.targets), strict=True):
                buffer.copy_(source, non_blocking=True)
            self.copied.record(self.stream)

    def acquire(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.copied)

    def release(self) -> None:
        self.released.record(torch.cuda.current_stream(self.device))

    def close(self) -> None:
        self.copied.synchronize()  # a copy on its way into freed memory would land in somebody else's tensor


def _slots(split: Split, rows: int, device: torch.device) -> list[_Slot]:
    if device.type != "cuda":
        return [_Slot(split, rows) for _ in range(SLOTS)]
    cuda: Any = torch.cuda
    stream = cuda.Stream(device)
    return [_CudaSlot(split, rows, device, stream) for _ in range(SLOTS)]


def _checked(order: Tensor, rows: int, epoch: int) -> Tensor:
    wrong = order.dtype != torch.int64 or order.shape != (rows,) or order.device.type != "cpu"
    if wrong or (rows and not 0 <= int(order.min()) <= int(order.max()) < rows):
        raise DataError(
            f"order of epoch {epoch}: {order.dtype} {list(order.shape)} on {order.device}",
            why=f"it must hold {rows} row numbers from 0 to {rows - 1} as int64 on the CPU",
            do="return torch.randperm(len(split), generator=…)",
        )
    return order


def _check_labels(targets: Tensor, classes: int) -> None:
    """Whether there is a class for each image to mix."""
    if targets.is_floating_point() or targets.ndim != 1 or not 0 <= int(targets.min()) <= int(targets.max()) < classes:
        raise DataError(
            f"targets {targets.dtype} {list(targets.shape)} with cutmix",
            why=f"labels are mixed, so each image needs one of {classes} classes",
            do="give a label from 0 for each image, or leave cutmix out",
        )


def _check(split: Split, batch: int, steps: int, start_step: int, rank: int, world: int) -> None:
    if len(split.inputs) != len(split.targets):
        raise DataError(
            f"{len(split.inputs)} inputs and {len(split.targets)} targets",
            why="row i of one belongs to row i of the other",
            do="cut both alike",
        )
    if not world <= batch <= len(split) or world < 1 or not 0 <= rank < world:
        raise OptionError(
            f"batch = {batch}, rank {rank} of {world}, {len(split)} rows",
            why="a batch has at least one row for each rank and at most the whole split",
            do=f"give world <= batch <= {len(split)} and 0 <= rank < world",
        )
    if not 0 <= start_step <= steps:
        raise OptionError(
            f"start_step = {start_step} of {steps}", why="a run starts at or before its end", do="give 0 <= start_step <= steps"
        )
