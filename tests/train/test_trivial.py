"""Changes of shape and colour against loops over pixels, in Python's whole numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Generator, Tensor

from ridgeline.core.errors import OptionError
from ridgeline.train.augment import Augmentation
from ridgeline.train.trivial import KINDS, LEVELS, changed, draw

FILL = (3, 200, 77)
Image = list[list[list[int]]]  # [C][H][W]


def nearest(number: float) -> int:
    return math.floor(number + 0.5)


def clipped(number: float) -> int:
    return min(255, max(0, nearest(number)))


def grey(image: Image) -> list[list[int]]:
    channels, height, width = len(image), len(image[0]), len(image[0][0])
    weights = (0.299, 0.587, 0.114) if channels == 3 else (1 / channels,) * channels
    return [
        [nearest(1e-9 + sum(w * image[c][y][x] for c, w in enumerate(weights))) for x in range(width)] for y in range(height)
    ]  # fmt: skip


def placed(kind: str, level: int, x: float, y: float) -> tuple[float, float]:
    """Where a pixel at (x, y) from the centre comes from."""
    turn = math.radians(level)
    return {
        "shear_x": (x + level / 100 * y, y),
        "shear_y": (x, y + level / 100 * x),
        "translate_x": (x + level / 3, y),
        "translate_y": (x, y + level / 3),
        "rotate": (math.cos(turn) * x - math.sin(turn) * y, math.sin(turn) * x + math.cos(turn) * y),
    }[kind]


def by_shape(image: Image, kind: str, level: int) -> tuple[Image, list[tuple[int, int]]]:
    """The moved image, and the pixels that lie so near a border of two that rounding decides."""
    height, width = len(image[0]), len(image[0][0])
    out, open_ = [[[0] * width for _ in range(height)] for _ in image], []
    for y in range(height):
        for x in range(width):
            from_x, from_y = placed(kind, level, x - (width - 1) / 2, y - (height - 1) / 2)
            from_x, from_y = from_x + (width - 1) / 2, from_y + (height - 1) / 2
            if any(abs(at + 0.5 - round(at + 0.5)) < 1e-3 for at in (from_x, from_y)):
                open_.append((y, x))
            column, row = nearest(from_x), nearest(from_y)
            for c, channel in enumerate(image):
                out[c][y][x] = channel[row][column] if 0 <= column < width and 0 <= row < height else FILL[c % len(FILL)]
    return out, open_


def table(values: list[int], kind: str, level: int, mean: int) -> list[int]:
    """What each value of a channel with these pixels becomes."""
    factor, low, high = 1 + 0.03 * level, min(values), max(values)
    if kind == "brightness":
        return [clipped(factor * v + 1e-9) for v in range(256)]
    if kind == "contrast":
        return [clipped(mean + factor * (v - mean) + 1e-9) for v in range(256)]
    if kind == "posterize":
        return [v - v % 2 ** nearest(4 * abs(level) / 30) for v in range(256)]
    if kind == "solarize":
        return [v if v < 256 - 256 * abs(level) // 30 else 255 - v for v in range(256)]
    if kind == "autocontrast":
        return [clipped(255 * (v - low) / (high - low)) if high > low else v for v in range(256)]
    histogram = [values.count(v) for v in range(256)]
    step = sum(histogram[:high]) // 255  # Pillow: all but the last value that occurs
    return [min(255, (step // 2 + sum(histogram[:v])) // step) if step else v for v in range(256)]


def by_hand(image: Image, kind: str, level: int) -> Image:
    """Changes of colour."""
    height, width, bright, factor = len(image[0]), len(image[0][0]), grey(image), 1 + 0.03 * level
    if kind == "color":
        blend = [
            [[clipped(bright[y][x] + factor * (ch[y][x] - bright[y][x]) + 1e-9) for x in range(width)] for y in range(height)]
            for ch in image
        ]
        return blend
    if kind == "sharpness":
        out = [[list(row) for row in channel] for channel in image]
        for c, channel in enumerate(image):
            for y in range(height):
                for x in range(width):
                    plain = channel[y][x]
                    if 0 < y < height - 1 and 0 < x < width - 1:
                        around = sum(channel[y + i][x + j] for i in (-1, 0, 1) for j in (-1, 0, 1)) + 4 * channel[y][x]
                        plain = nearest(around / 13)
                    out[c][y][x] = clipped(plain + factor * (channel[y][x] - plain) + 1e-9)
        return out
    flat = [v for row in bright for v in row]
    mean = nearest(sum(flat) / len(flat))
    out = []
    for channel in image:
        made = table([v for row in channel for v in row], kind, level, mean)
        out.append([[made[v] for v in row] for row in channel])
    return out


def pictures(count: int, channels: int, height: int, width: int) -> Tensor:
    """Gradients with noise: no two values as often as each other, not all values there."""
    generator = Generator().manual_seed(count * 7 + height)
    slope = torch.linspace(20, 230, width)[None, None, None, :] * torch.rand(count, channels, height, 1, generator=generator)
    return (slope + 25 * torch.rand(count, channels, height, width, generator=generator)).to(torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels, height, width", [(3, 17, 18), (1, 24, 20)])
def test_a_change_is_that_of_a_loop_over_pixels(kind: str, channels: int, height: int, width: int) -> None:
    levels = [-30, -29, -13, -1, 0, 1, 8, 17, 30]
    images = pictures(len(levels), channels, height, width)
    images[3] = 90  # one value only: nothing to stretch
    drawn = torch.stack((torch.full((len(levels),), KINDS.index(kind)), torch.tensor(levels)))
    found, differs = changed(images, drawn, FILL[:channels]), 0
    for n, level in enumerate(levels):
        image, open_ = images[n].tolist(), []
        if kind in KINDS[1:6]:
            wanted, open_ = by_shape(image, kind, level)
        else:
            wanted = image if kind == "identity" else by_hand(image, kind, level)
        for c in range(channels):
            pairs = [(found[n, c, y, x].item(), wanted[c][y][x]) for y in range(height) for x in range(width) if (y, x) not in open_]
            assert len(pairs) >= height * width // 2
            assert all(one == other for one, other in pairs), (kind, level, c)
        differs += int((found[n] != images[n]).any())
    assert differs == 0 if kind == "identity" or (kind == "color" and channels == 1) else differs >= 4


def test_each_image_has_its_own_change() -> None:
    """A batch is what its images are alone; drawn levels and kinds all occur, evenly."""
    images, drawn = pictures(64, 3, 12, 12), draw(64, Generator().manual_seed(3))
    together = changed(images, drawn, FILL)
    for n in range(64):
        assert torch.equal(together[n], changed(images[n : n + 1], drawn[:, n : n + 1], FILL)[0])
    kinds, levels = draw(60_000, Generator().manual_seed(1))
    share = torch.bincount(kinds, minlength=len(KINDS)) * len(KINDS) / 60_000
    assert float((share - 1).abs().max()) < 0.06 and set(levels.tolist()) == set(range(-LEVELS, LEVELS + 1))


def test_in_an_augmentation_it_comes_first() -> None:
    made = Augmentation(2, flip="random", cutout=5, fill=FILL, trivial=True)
    images = pictures(32, 3, 16, 16)
    drawn = made.draw(torch.arange(32), (16, 16), 0, 0, Generator().manual_seed(5))
    after = Augmentation(2, flip="random", cutout=5, fill=FILL).apply(changed(images, drawn[9:], FILL), drawn)
    assert torch.equal(made.apply(images, drawn), after) and made.changes and not Augmentation().changes
    assert torch.equal(made(images, Generator().manual_seed(5)), made.apply(images, drawn))
    with pytest.raises(OptionError, match="uint8"):
        made.apply(images.float(), drawn)
