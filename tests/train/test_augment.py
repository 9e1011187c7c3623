"""Shift, mirror, cut out and mix against a loop over pixels; drawn for a whole epoch as for one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from ridgeline.core.errors import DataError, OptionError
from ridgeline.train.augment import Augmentation
from ridgeline.train.feed import batches
from ridgeline.train.seeds import epoch_order, step_generator
from ridgeline.workload.data import Split

WHOLE = Augmentation(3, "reflect", "alternate", 4, (7, 9))


def bounced(place: int, size: int) -> int:
    while not 0 <= place < size:
        place = -place if place < 0 else 2 * (size - 1) - place
    return place


def by_hand(made: Augmentation, images: Tensor, drawn: Tensor) -> Tensor:
    """Pixel by pixel."""
    out = images.clone()
    count, channels, height, width = images.shape
    for n in range(count):
        top, left, mirrored, cut_y, cut_x, *_ = drawn[:, n].tolist()
        for y in range(height):
            for x in range(width):
                from_y, from_x = y + top - made.shift, (width - 1 - x if mirrored else x) + left - made.shift
                outside = not (0 <= from_y < height and 0 <= from_x < width)
                half = made.cutout // 2
                cut = made.cutout and cut_y - half <= y < cut_y - half + made.cutout and cut_x - half <= x < cut_x - half + made.cutout
                for c in range(channels):
                    filled = cut or (outside and made.border == "zeros")
                    fill = made.fill[c] if len(made.fill) > 1 else made.fill[0]
                    out[n, c, y, x] = fill if filled else images[n, c, bounced(from_y, height), bounced(from_x, width)]
    mixed = out.clone()
    for n in range(count):
        top, bottom, left, right = drawn[5:9, n].tolist()
        mixed[n, :, top:bottom, left:right] = out[(n + 1) % count, :, top:bottom, left:right]
    return mixed


@settings(max_examples=12, deadline=None)
@given(
    shift=st.integers(0, 4), border=st.sampled_from(("zeros", "reflect")), flip=st.sampled_from(("none", "random", "alternate")),
    cutout=st.integers(0, 7), fill=st.sampled_from(((0,), (3, 250))), cutmix=st.sampled_from((0.0, 0.5, 1.0)), height=st.integers(5, 8),
    width=st.integers(5, 7), seed=st.integers(0, 99),
)  # fmt: skip
def test_pixels_are_those_of_a_plain_loop(height: int, width: int, seed: int, **fields: Any) -> None:
    made = Augmentation(**fields, classes=3)
    generator = Generator().manual_seed(seed)
    images = torch.randint(10, 240, (4, 2, height, width), generator=generator, dtype=torch.uint8)
    drawn = made.draw(torch.arange(4), (height, width), seed, 1, generator)
    assert torch.equal(made.apply(images, drawn), by_hand(made, images, drawn))


def test_labels_count_by_what_is_seen_of_their_images() -> None:
    """Images of one brightness each, so that the share of a label is the share of its pixels."""
    labels = torch.tensor([2, 0, 1, 1, 0, 2])
    images = (10 * labels + 1).to(torch.uint8)[:, None, None, None].expand(6, 1, 8, 12).contiguous()
    made, boxes = Augmentation(cutmix=0.7, classes=3), 0
    for seed in range(20):
        drawn = made.draw(torch.arange(6), (8, 12), 0, 0, Generator().manual_seed(seed))
        seen = made.apply(images, drawn)
        for n, share in enumerate(made.shares(labels, drawn, (8, 12)).tolist()):
            pixels = [float((seen[n] == 10 * label + 1).float().mean()) for label in range(3)]
            assert share == pytest.approx(pixels, abs=1e-6)
            boxes += max(share) < 1
    assert boxes > 30
    plain = Augmentation(shift=1, classes=3)
    assert plain.shares(labels, plain.draw(torch.arange(6), (8, 12), 0, 0, Generator()), (8, 12)) is labels


def test_boxes_take_all_sizes_and_spare_images_from_being_cut_out() -> None:
    made, size = Augmentation(cutmix=0.6, classes=2, cutout=16), (32, 32)
    drawn = made.draw(torch.arange(20_000), size, 0, 0, Generator().manual_seed(0))
    boxed, area = drawn[6] > 0, ((drawn[6] - drawn[5]) * (drawn[8] - drawn[7])).float() / 1024
    assert boxed.float().mean() == pytest.approx(0.6, abs=0.02)
    assert (drawn[5:, ~boxed] == 0).all() and (drawn[3, boxed] == 32 + 16).all() and (drawn[3, ~boxed] < 32).all()
    assert area.min() >= 0 and area.max() > 0.95 and drawn.min() >= 0 and drawn[5:].max() == 32
    images = torch.full((500, 1, 32, 32), 7, dtype=torch.uint8)
    cut = (made.apply(images, drawn[:, :500]) == 0).any(dim=(1, 2, 3))
    neighbour = torch.cat([boxed[1:500], boxed[:1]])
    assert not (cut & boxed[:500] & neighbour).any() and cut[~boxed[:500]].all()


def test_labels_that_cannot_be_mixed_are_refused() -> None:
    with pytest.raises(OptionError, match="share of the images"):
        Augmentation(cutmix=0.5)
    with pytest.raises(OptionError, match="labels change"):
        Augmentation(cutmix=0.5, classes=3)(a_split().inputs, Generator())
    with pytest.raises(DataError, match="one of 3 classes"):
        fed(a_split(), augment=Augmentation(cutmix=0.5, classes=3))


def test_every_second_epoch_is_mirrored() -> None:
    rows, made = torch.arange(4000), Augmentation(flip="alternate")
    sides = [made.draw(rows, (8, 8), 5, epoch, Generator().manual_seed(epoch))[2] for epoch in range(3)]
    assert torch.equal(sides[0], 1 - sides[1]) and torch.equal(sides[0], sides[2])
    assert 0.45 < sides[0].float().mean() < 0.55
    neighbours = (sides[0][:-1] == sides[0][1:]).float().mean()
    assert 0.45 < neighbours < 0.55  # no pattern along the rows
    other = made.draw(rows, (8, 8), 6, 0, Generator())[2]
    assert 0.4 < (other == sides[0]).float().mean() < 0.6  # another seed, other images


def fed(split: Split, start: int = 0, augment: Any = WHOLE, **options: Any) -> list[Tensor]:
    def order(epoch: int) -> Tensor:
        return epoch_order(len(split), 3, epoch)

    wanted: dict[str, Any] = {"batch": 8, "steps": 7, "device": torch.device("cpu"), "seed": 3, **options}
    return [one.inputs.clone() for one in batches(split, order, start_step=start, augment=augment, **wanted)]


def a_split() -> Split:
    return Split(torch.randint(0, 255, (30, 2, 9, 9), generator=Generator().manual_seed(1), dtype=torch.uint8), torch.arange(30))


def test_an_epoch_drawn_at_once_is_what_each_step_draws() -> None:
    split, each = a_split(), 30 // 8
    for step, images in enumerate(fed(split)):
        epoch = step // each
        rows = epoch_order(30, 3, epoch)[step % each * 8 : step % each * 8 + 8]
        drawn = WHOLE.draw(rows, (9, 9), 3, epoch, step_generator(3, step))
        assert torch.equal(images, WHOLE.apply(split.inputs[rows], drawn))


@pytest.mark.parametrize("mode", ["resident", "prefetch", "blocking"])
def test_modes_resumed_runs_and_ranks_see_the_same_images(mode: str) -> None:
    split = a_split()
    whole = fed(split)
    assert all(map(torch.equal, fed(split, start=2, mode=mode), whole[2:]))
    halves = zip(fed(split, rank=0, world=2, mode=mode), fed(split, rank=1, world=2, mode=mode), strict=True)
    assert all(torch.equal(torch.cat(pair), one) for pair, one in zip(halves, whole, strict=True))


def test_mixed_labels_are_the_same_for_ranks_and_resumed_runs() -> None:
    made, split = Augmentation(2, flip="random", cutmix=0.5, classes=30), a_split()

    def labels(**given: Any) -> list[Tensor]:
        options = {"batch": 8, "steps": 7, "device": torch.device("cpu"), "seed": 3, **given}
        return [one.targets.clone() for one in batches(split, lambda epoch: epoch_order(30, 3, epoch), augment=made, **options)]

    whole = labels()
    assert all(one.shape == (8, 30) and torch.allclose(one.sum(1), torch.ones(8)) for one in whole)
    assert all(map(torch.equal, labels(start_step=3), whole[3:]))
    halves = zip(labels(rank=0, world=2), labels(rank=1, world=2), strict=True)
    assert all(torch.equal(torch.cat(pair), one) for pair, one in zip(halves, whole, strict=True))


def test_a_plain_function_still_augments() -> None:
    plain: Callable[[Tensor, Generator], Tensor] = lambda images, generator: images + torch.randint(9, (1,), generator=generator)  # noqa: E731
    assert not torch.equal(torch.stack(fed(a_split(), augment=plain)), torch.stack(fed(a_split(), augment=None)))
    assert WHOLE(a_split().inputs, Generator().manual_seed(0)).shape == (30, 2, 9, 9)


def test_a_shift_beyond_the_image_is_refused() -> None:
    with pytest.raises(OptionError, match="shift = 9"):
        Augmentation(shift=9).draw(torch.arange(2), (8, 8), 0, 0, Generator())
