"""Shift, mirror, cut out and mix, for a batch of images on whatever device it is.

    draw(rows [B], size, seed, epoch, generator) ──> int64 [11,B] on the CPU: top, left, mirrored, cut centre y, x, the box's four sides,
      kind and level of trivial.py
    apply(images [B,C,H,W], drawn [11,B] on their device) ──trivial.py, one gather, one where──> images of the same shape and dtype
    shares(targets [B], drawn, size) ──> the same targets, or where images are mixed float32 [B,classes]

    pixel (y, x) of the result = pixel (reflect(y + top - shift), reflect(x' + left - shift)), x' = W-1-x where mirrored
    cutout: |y - centre| within half the side is filled, clipped at the image's edge. Ref: DeVries 2017
    alternate: an image is mirrored in every second epoch, half of the images beginning mirrored. Ref: Jordan 2024 (airbench)
    cutmix: through a box the next image of the batch is seen, and its label counts by the box's area; an image with a box has nothing
    cut out. The area before clipping is uniform, the centre anywhere. Ref: Yun 2019

Numbers are small integers drawn on the CPU for a whole epoch and copied once (feed.py), so every device sees the same images.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn import functional

from ..core.errors import OptionError
from . import trivial

TOP, LEFT, MIRRORED, CUT_Y, CUT_X, BOX_TOP, BOX_BOTTOM, BOX_LEFT, BOX_RIGHT, KIND, LEVEL = range(11)


@dataclass(frozen=True, slots=True)
class Augmentation:
    """What is done to training images."""

    shift: int = 0  # pixels
    border: Literal["zeros", "reflect"] = "reflect"  # "zeros": `fill` comes in
    flip: Literal["none", "random", "alternate"] = "none"
    cutout: int = 0  # side of the square [pixels]
    fill: tuple[int, ...] = (0,)  # of each channel, or one for all
    cutmix: float = 0.0  # share of the images that show a box of another
    classes: int = 0  # of the labels; needed for cutmix
    trivial: bool = False  # a random change of shape or colour comes first; for images of bytes

    def __post_init__(self) -> None:
        if self.cutmix and (not 0 < self.cutmix <= 1 or self.classes < 2):
            raise OptionError(
                f"cutmix = {self.cutmix}, {self.classes} classes", why="it is a share of the images, whose labels are mixed too",
                do="give a share from 0 to 1 and the number of classes",
            )  # fmt: skip

    @property
    def changes(self) -> bool:
        """Whether anything is done at all."""
        return bool(self.shift or self.cutout or self.cutmix or self.flip != "none" or self.trivial)

    def __call__(self, images: Tensor, generator: Generator) -> Tensor:
        """For a loop of your own, which has no row numbers: alternate then means random. Labels stay, so nothing can be mixed."""
        if self.cutmix:
            raise OptionError(
                "cutmix without labels", why="labels change with the images", do="use draw, apply and shares, or fit, which does"
            )
        plain = replace(self, flip="random") if self.flip == "alternate" else self
        rows = torch.arange(len(images))
        drawn = plain.draw(rows, (images.shape[2], images.shape[3]), 0, 0, generator)
        return plain.apply(images, drawn.to(images.device, non_blocking=True))

    def draw(self, rows: Tensor, size: tuple[int, int], seed: int, epoch: int, generator: Generator) -> Tensor:
        """What happens to these rows of the split in this epoch; int64 [11,B] on the CPU."""
        count, (height, width) = len(rows), size
        if 0 < max(height, width) <= self.shift:
            raise OptionError(
                f"shift = {self.shift} for images of {height}x{width}", why="nothing of the image would be left", do="shift less"
            )
        drawn = torch.zeros(11, count, dtype=torch.int64)
        drawn[:2] = torch.randint(2 * self.shift + 1, (2, count), generator=generator)
        if self.flip == "random":
            drawn[MIRRORED] = torch.randint(2, (count,), generator=generator)
        elif self.flip == "alternate":
            drawn[MIRRORED] = (_first_side(rows, seed) + epoch) % 2
        if self.cutout:
            drawn[CUT_Y] = torch.randint(height, (count,), generator=generator)
            drawn[CUT_X] = torch.randint(width, (count,), generator=generator)
        if self.cutmix:
            self._draw_boxes(drawn, size, generator)
        if self.trivial:
            drawn[KIND:] = trivial.draw(count, generator)
        return drawn

    def _draw_boxes(self, drawn: Tensor, size: tuple[int, int], generator: Generator) -> None:
        """A box for some of the images, none (0 to 0) for the others."""
        count = drawn.shape[1]
        mixed = torch.rand(count, generator=generator) < self.cutmix
        share = torch.rand(count, generator=generator).sqrt()  # of each side
        for length, low, high in ((size[0], BOX_TOP, BOX_BOTTOM), (size[1], BOX_LEFT, BOX_RIGHT)):
            side = (share * length).round().long()
            first = torch.randint(length, (count,), generator=generator) - side // 2
            drawn[low], drawn[high] = first.clamp(min=0) * mixed, (first + side).clamp(max=length) * mixed
        drawn[CUT_Y] = torch.where(mixed, size[0] + self.cutout, drawn[CUT_Y])  # outside: nothing is cut out of it

    def apply(self, images: Tensor, drawn: Tensor) -> Tensor:
        """The images, changed as drawn."""
        if self.trivial:
            if images.dtype is not torch.uint8:
                raise OptionError(f"trivial of {images.dtype} images", why="its colours are bytes", do="keep uint8, or leave it out")
            images = trivial.changed(images, drawn[KIND:], self.fill)
        batch, channels, height, width = images.shape
        device = images.device
        y, x = torch.arange(height, device=device), torch.arange(width, device=device)
        from_y = y + (drawn[TOP] - self.shift)[:, None]  # [B,H]
        from_x = torch.where(drawn[MIRRORED][:, None] == 1, width - 1 - x, x) + (drawn[LEFT] - self.shift)[:, None]  # [B,W]
        inside_y, inside_x = _reflected(from_y, height), _reflected(from_x, width)
        flat = (inside_y[:, :, None] * width + inside_x[:, None, :]).reshape(batch, 1, height * width)  # [B,1,HW]
        moved = images.reshape(batch, channels, -1).gather(2, flat.expand(batch, channels, -1)).reshape(images.shape)
        hidden = None
        if self.border == "zeros" and self.shift:
            hidden = (from_y != inside_y)[:, None, :, None] | (from_x != inside_x)[:, None, None, :]  # [B,1,H,W]
        if self.cutout:
            cut = _near(y, drawn[CUT_Y], self.cutout)[:, None, :, None] & _near(x, drawn[CUT_X], self.cutout)[:, None, None, :]
            hidden = cut if hidden is None else hidden | cut
        shown = moved if hidden is None else _painted(moved, hidden, self.fill)
        if not self.cutmix:
            return shown
        box_y, box_x = _between(y, drawn[BOX_TOP], drawn[BOX_BOTTOM]), _between(x, drawn[BOX_LEFT], drawn[BOX_RIGHT])
        return torch.where(box_y[:, None, :, None] & box_x[:, None, None, :], shown.roll(-1, 0), shown)

    def shares(self, targets: Tensor, drawn: Tensor, size: tuple[int, int]) -> Tensor:
        """What each image shows of every class; without cutmix the targets as they are."""
        if not self.cutmix:
            return targets
        area = (drawn[BOX_BOTTOM] - drawn[BOX_TOP]) * (drawn[BOX_RIGHT] - drawn[BOX_LEFT]) / (size[0] * size[1])  # [B]
        own = functional.one_hot(targets, self.classes).to(area.dtype)
        return own + area[:, None] * (own.roll(-1, 0) - own)


def _first_side(rows: Tensor, seed: int) -> Tensor:
    """0 or 1 for each row number, of about equal number: one bit of a multiplicative hash."""
    mixed = (rows + 1 + (seed & 0xFFFFFF) * 0x9E3779B1) * 0x85EBCA6B & 0xFFFFFFFF
    return ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D >> 17) & 1


def _reflected(places: Tensor, size: int) -> Tensor:
    """Places outside 0 … size - 1 mirrored at the edge pixel, which is not repeated."""
    inside = places.abs()
    return torch.where(inside >= size, 2 * (size - 1) - inside, inside).clamp_(0, size - 1)


def _near(places: Tensor, centre: Tensor, side: int) -> Tensor:
    """[B,n]: within `side` places around the centre, one more before it than after it where the side is even."""
    offset = places - centre[:, None]
    return (offset >= -(side // 2)) & (offset < side - side // 2)


def _between(places: Tensor, first: Tensor, end: Tensor) -> Tensor:
    """[B,n]: from `first` to before `end`."""
    return (places >= first[:, None]) & (places < end[:, None])


def _painted(images: Tensor, hidden: Tensor, fill: tuple[int, ...]) -> Tensor:
    if len(set(fill)) == 1:
        return images.masked_fill(hidden, fill[0])
    parts = [part.masked_fill(hidden[:, 0], value) for part, value in zip(images.unbind(1), fill, strict=True)]
    return torch.stack(parts, 1)
