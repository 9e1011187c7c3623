"""Every way to feed gives the same batches, cut alike for every rank, and buffers are overwritten no sooner than promised."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator, Tensor

from ridgeline.core.errors import DataError, OptionError
from ridgeline.train import feed
from ridgeline.train.feed import Batch, Mode, batches, choose_mode, split_bytes
from ridgeline.train.seeds import epoch_order, step_generator
from ridgeline.workload.data import Split

CPU = torch.device("cpu")
MODES: tuple[Mode, ...] = ("resident", "prefetch", "blocking")


def made(rows: int) -> Split:
    return Split(torch.arange(rows * 6, dtype=torch.int32).view(rows, 2, 3), torch.arange(rows) * 10)


def flip(inputs: Tensor, generator: Generator) -> Tensor:
    """Mirrors each row or not, by a draw of the whole batch."""
    draw = torch.rand(len(inputs), generator=generator) < 0.5
    return torch.where(draw[:, None, None], inputs.flip(-1), inputs)


def expected(split: Split, batch: int, step: int, seed: int, augmented: bool) -> tuple[Tensor, Tensor]:
    each = len(split) // batch
    rows = epoch_order(len(split), seed, step // each)[step % each * batch :][:batch]
    inputs = split.inputs[rows]
    return (flip(inputs, step_generator(seed, step)) if augmented else inputs) + 1, split.targets[rows]


def run(split: Split, mode: Mode, batch: int, steps: int, start: int, rank: int, world: int, seed: int, augmented: bool) -> Iterator[Batch]:
    return batches(
        split, lambda epoch: epoch_order(len(split), seed, epoch), batch=batch, steps=steps, start_step=start, device=CPU, mode=mode,
        augment=flip if augmented else None, prepare=lambda x: x + 1, seed=seed, rank=rank, world=world,
    )  # fmt: skip


@given(
    rows=st.integers(3, 20), share=st.floats(0, 1), world=st.integers(1, 3), start=st.integers(0, 9), more=st.integers(0, 9),
    mode=st.sampled_from(MODES), augmented=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_ranks_together_hold_the_batch(
    rows: int, share: float, world: int, start: int, more: int, mode: Mode, augmented: bool, seed: int
) -> None:
    split, batch = made(rows), max(world, round(share * rows))
    ranks = [run(split, mode, batch, start + more, start, rank, world, seed, augmented) for rank in range(world)]
    seen = 0
    for step, parts in enumerate(zip(*ranks, strict=True), start):
        inputs, targets = expected(split, batch, step, seed, augmented)
        assert torch.equal(torch.cat([part.inputs for part in parts]), inputs)
        assert torch.equal(torch.cat([part.targets for part in parts]), targets)
        assert {(part.step, part.epoch) for part in parts} == {(step, step // (rows // batch))}
        assert all(part.wait_s >= 0 and len(part.targets) >= batch // world for part in parts)
        seen += 1
    assert seen == more


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_stays_valid_until_the_next_but_one(mode: Mode) -> None:
    """Nothing copies here, so prefetch hands out its own buffers."""
    split = made(40)
    found = batches(split, lambda epoch: epoch_order(40, 0, epoch), batch=4, steps=30, device=CPU, mode=mode)
    held = [next(found)]
    for batch in found:
        held = [*held[-1:], batch]
        for one in held:
            assert torch.equal(one.targets, expected(split, 4, one.step, 0, False)[1])
            assert torch.equal(one.inputs[:, 0, 0].long() // 6, one.targets // 10)


def test_prefetch_reuses_three_buffers_and_ends_its_thread() -> None:
    before = threading.active_count()
    split = made(40)
    found = batches(split, lambda epoch: epoch_order(40, 0, epoch), batch=4, steps=30, device=CPU, mode="prefetch")
    places = [next(found).inputs.data_ptr() for _ in range(12)]
    assert len(set(places)) == feed.SLOTS == 3 and places[:3] == places[3:6] == places[9:12]
    assert threading.active_count() == before + 1
    found.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_prefetch_gathers_before_the_loop_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    filled = threading.Semaphore(0)
    plain = feed._Slot.fill

    def noted(slot: feed._Slot, split: Split, index: Tensor) -> None:
        plain(slot, split, index)
        filled.release()

    monkeypatch.setattr(feed._Slot, "fill", noted)
    found = batches(made(8), lambda epoch: torch.arange(8), batch=2, steps=4, device=CPU, mode="prefetch")
    next(found)
    assert filled.acquire(timeout=10) and filled.acquire(timeout=10), "batch 1 was not gathered while batch 0 was held"
    assert not filled.acquire(timeout=0.05), "batch 2 has no free buffer yet"
    found.close()  # type: ignore[attr-defined]


def test_a_failing_gather_reaches_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(slot: feed._Slot, split: Split, index: Tensor) -> None:
        raise RuntimeError("disk gone")

    monkeypatch.setattr(feed._Slot, "fill", broken)
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="disk gone"):
        next(batches(made(8), lambda epoch: torch.arange(8), batch=2, steps=4, device=CPU, mode="prefetch"))
    assert threading.active_count() == before


def test_the_order_is_asked_once_an_epoch() -> None:
    asked: list[int] = []

    def order(epoch: int) -> Tensor:
        asked.append(epoch)
        return epoch_order(10, 0, epoch)

    for mode in MODES:
        asked.clear()
        assert len(list(batches(made(10), order, batch=3, steps=8, start_step=2, device=CPU, mode=mode))) == 6
        assert asked == [0, 1, 2]


def test_resident_on_the_cpu_copies_rows_only() -> None:
    """One gather a batch: no tensor as large as the split is made."""
    from ridgeline.measure.memory import StorageTracker

    split = Split(torch.zeros(4096, 64), torch.zeros(4096, dtype=torch.int64))
    tracker, order = StorageTracker(), torch.arange(4096)
    with tracker:
        next(batches(split, lambda epoch: order, batch=8, steps=1, device=CPU, mode="resident"))
    assert tracker.peak_bytes < 3 * (8 * 64 * 4 + 8 * 8)


def test_auto_chooses_by_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    split, cuda = made(100), torch.device("cuda")
    size = split_bytes(split)
    assert size == 100 * (6 * 4 + 8) and choose_mode(split, CPU) == "resident"
    for free, chosen in ((size / feed.RESIDENT_SHARE, "resident"), (size / feed.RESIDENT_SHARE - 1, "prefetch"), (None, "prefetch")):
        monkeypatch.setattr(feed, "free_bytes", lambda device, free=free: free)
        assert choose_mode(split, cuda) == chosen
    monkeypatch.setattr(feed, "free_bytes", lambda device: size - 1)
    with pytest.raises(OptionError, match="prefetch"):
        choose_mode(split, cuda, "resident")
    assert choose_mode(split, cuda, "blocking") == "blocking"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch": 0}, "batch = 0"),
        ({"batch": 9}, "batch = 9"),
        ({"batch": 2, "world": 3}, "rank 0 of 3"),
        ({"rank": 1}, "rank 1 of 1"),
        ({"start_step": 5}, "start_step = 5"),
        ({"mode": "fast"}, "feed = 'fast'"),
    ],
)
def test_bad_options_are_named_at_once(options: dict[str, object], says: str) -> None:
    given = {"batch": 2, "steps": 4, "device": CPU, **options}
    with pytest.raises(OptionError, match=says):
        batches(made(8), lambda epoch: torch.arange(8), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [torch.arange(7), torch.arange(8).float(), torch.arange(1, 9), torch.arange(-1, 7)])
def test_a_wrong_order_is_refused(order: Tensor) -> None:
    with pytest.raises(DataError, match="order of epoch 0"):
        next(batches(made(8), lambda epoch: order, batch=2, steps=4, device=CPU))


def test_unequal_halves_are_refused() -> None:
    with pytest.raises(DataError, match="3 inputs and 4 targets"):
        batches(Split(torch.zeros(3, 1), torch.zeros(4)), lambda epoch: torch.arange(4), batch=1, steps=1, device=CPU)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("mode", MODES)
def test_cuda_gives_the_same_batches(mode: Mode) -> None:
    """Work queued on a batch still reads it right although its buffer is filled again behind it."""
    cuda, split = torch.device("cuda"), made(4096)
    found = batches(split, lambda epoch: epoch_order(4096, 0, epoch), batch=512, steps=40, device=cuda, mode=mode, augment=None)
    sums = []
    for batch in found:
        torch.cuda._sleep(2_000_000)  # the copy of a later batch overtakes the kernel below unless events hold it back
        sums.append((batch.inputs.double().sum(), batch.targets.sum()))
    for step, (inputs, targets) in enumerate(sums):
        rows = epoch_order(4096, 0, step // 8)[step % 8 * 512 :][:512]
        assert inputs.item() == split.inputs[rows].double().sum().item() and targets.item() == split.targets[rows].sum().item()
