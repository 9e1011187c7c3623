"""TrivialAugment: one change of shape or colour an image, of random strength.

    draw(count, generator) ──> int64 [2,B] on the CPU: which of KINDS, level -30 … 30
    changed(images uint8 [B,C,H,W], drawn [2,B] on their device, fill) ──> uint8 of the same shape
      shear, translate, rotate       pixel p = the image's nearest pixel to A (p - centre) + centre + t, `fill` where that is outside
      brightness, contrast, posterize, solarize, autocontrast, equalize       a table of 256 values for each image and channel
      color, sharpness               blends with grey, and with the 3x3 mean whose middle counts 5 times (edge pixels stay)

Of level l: shear 0.01 l, translate l/3 pixels, rotate l degrees; brightness, color, contrast and sharpness by 1 + 0.03 l; posterize
drops 2|l|/15 bits, solarize inverts from 256 (1 - |l|/30) on. All of it is whole numbers, A in 65536ths, so that every device makes the
same images. Every image of a batch goes through every change, which costs less than telling them apart.
Ref: Müller and Hutter 2021 (the smaller of their two spaces); grey, equalize and autocontrast as Pillow has them.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Generator, Tensor

KINDS = ("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "contrast", "posterize", "solarize",
         "autocontrast", "equalize", "color", "sharpness")  # fmt: skip
LEVELS = 30
ONE = 1 << 16
"""1 in the matrices."""


def draw(count: int, generator: Generator) -> Tensor:
    """Which change, and its level, of each image."""
    kind = torch.randint(len(KINDS), (count,), generator=generator)
    level = torch.randint(LEVELS + 1, (count,), generator=generator)
    return torch.stack((kind, torch.where(torch.randint(2, (count,), generator=generator) == 1, -level, level)))


def changed(images: Tensor, drawn: Tensor, fill: tuple[int, ...]) -> Tensor:
    """The images, each with its own change."""
    kind, level = drawn[0][:, None, None, None], drawn[1].int()[:, None, None, None]
    wide = images.int()  # [B,C,H,W]
    grey = _grey(wide)  # [B,1,H,W]
    out = _through(images, _tables(wide, grey, kind[..., 0], level[..., 0]))
    out = torch.where(kind == KINDS.index("color"), _blend(grey, wide, level), out)
    out = torch.where(kind == KINDS.index("sharpness"), _blend(_smooth(wide), wide, level), out)
    return _moved(out.to(images.dtype), drawn, fill)


def _grey(wide: Tensor) -> Tensor:
    """Luma of three channels, the mean of any other number."""
    if wide.shape[1] != 3:
        return (2 * wide.sum(1, keepdim=True, dtype=torch.int32) + wide.shape[1]) // (2 * wide.shape[1])
    red, green, blue = wide.unbind(1)
    return ((299 * red + 587 * green + 114 * blue + 500) // 1000)[:, None]


def _blend(plain: Tensor, wide: Tensor, level: Tensor) -> Tensor:
    """plain where the factor, 1 + 0.03 level, is 0, the image where it is 1; to the nearest whole number."""
    factor = 100 + 3 * level
    return ((plain * (100 - factor) + wide * factor + 50) // 100).clamp(0, 255)


def _smooth(wide: Tensor) -> Tensor:
    """3x3 mean with the middle five times; the outermost pixels as they are."""
    across = wide[..., :-2] + wide[..., 1:-1] + wide[..., 2:]
    inner = (across[..., :-2, :] + across[..., 1:-1, :] + across[..., 2:, :] + 4 * wide[..., 1:-1, 1:-1] + 6) // 13
    out = wide.clone()
    out[..., 1:-1, 1:-1] = inner
    return out


def _tables(wide: Tensor, grey: Tensor, kind: Tensor, level: Tensor) -> Tensor:
    """int32 [B,C,256]: what each value becomes; `kind` and `level` [B,1,1]. Values as they are for the changes that are no tables."""
    value = torch.arange(256, device=wide.device, dtype=torch.int32)
    mean = (2 * grey.flatten(1).sum(1, dtype=torch.int32) + grey[0].numel()) // (2 * grey[0].numel())
    dropped = (4 * level.abs() + LEVELS // 2) // LEVELS
    flat = wide.flatten(2)
    low, high = flat.amin(2, keepdim=True), flat.amax(2, keepdim=True)
    span = (high - low).clamp(min=1)
    made = {
        "brightness": _blend(torch.zeros_like(value), value, level),
        "contrast": _blend(mean[:, None, None], value, level),
        "posterize": value >> dropped << dropped,
        "solarize": torch.where(value < 256 - 256 * level.abs() // LEVELS, value, 255 - value),
        "autocontrast": torch.where(high > low, ((2 * 255 * (value - low) + span) // (2 * span)).clamp(0, 255), value),
        "equalize": _equal(flat, high, value),
    }
    out = value.expand(*flat.shape[:2], 256)
    for name, table in made.items():
        out = torch.where(kind == KINDS.index(name), table, out)
    return out


def _equal(flat: Tensor, high: Tensor, value: Tensor) -> Tensor:
    """int32 [B,C,256]: about as many pixels of each value, in the order of the old values."""
    count = torch.zeros(*flat.shape[:2], 256, dtype=torch.int32, device=flat.device)
    count.scatter_add_(2, flat.long(), torch.ones_like(flat))
    step = (flat.shape[2] - count.gather(2, high.long())) // 255  # [B,C,1]
    below = count.cumsum(2, dtype=torch.int32) - count
    return torch.where(step > 0, ((step // 2 + below) // step.clamp(min=1)).clamp(max=255), value)


def _through(images: Tensor, tables: Tensor) -> Tensor:
    """int32, each pixel by the table of its image and channel."""
    return tables.gather(2, images.flatten(2).long()).view(images.shape)


def _moved(images: Tensor, drawn: Tensor, fill: tuple[int, ...]) -> Tensor:
    """Sheared, shifted or turned about the centre, to the nearest pixel."""
    height, width = images.shape[2:]
    device = images.device
    xx, xy, yx, yy, right, down = _matrices(device)[drawn[0], drawn[1] + LEVELS].unbind(1)  # [B] each
    u = (2 * torch.arange(width, device=device) - (width - 1))[None, None, :]  # twice the distance from the centre
    v = (2 * torch.arange(height, device=device) - (height - 1))[None, :, None]
    from_x = (_each(xx) * u + _each(xy) * v + 2 * _each(right) + ONE * width) // (2 * ONE)  # [B,H,W]
    from_y = (_each(yx) * u + _each(yy) * v + 2 * _each(down) + ONE * height) // (2 * ONE)
    outside = (from_x < 0) | (from_x >= width) | (from_y < 0) | (from_y >= height)
    at = (from_y.clamp(0, height - 1) * width + from_x.clamp(0, width - 1)).flatten(1)[:, None]  # [B,1,HW]
    seen = images.flatten(2).gather(2, at.expand(*images.shape[:2], -1)).view(images.shape)
    return torch.where(outside[:, None], _paint(fill, device), seen)


def _each(number: Tensor) -> Tensor:
    return number[:, None, None]


@lru_cache(maxsize=8)
def _paint(fill: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(fill, dtype=torch.uint8).to(device)[:, None, None]


@lru_cache(maxsize=8)
def _matrices(device: torch.device) -> Tensor:
    """int64 [kinds, levels, 6]: xx, xy, yx, yy of A and x, y of t, in 65536ths."""
    table = torch.zeros(len(KINDS), 2 * LEVELS + 1, 6, dtype=torch.int64)
    table[:, :, 0] = table[:, :, 3] = ONE
    for level in range(-LEVELS, LEVELS + 1):
        here, turn = level + LEVELS, math.radians(level)
        table[KINDS.index("shear_x"), here, 1] = table[KINDS.index("shear_y"), here, 2] = round(ONE * level / 100)
        table[KINDS.index("translate_x"), here, 4] = table[KINDS.index("translate_y"), here, 5] = round(ONE * level / 3)
        sine, cosine = round(ONE * math.sin(turn)), round(ONE * math.cos(turn))
        table[KINDS.index("rotate"), here] = torch.tensor((cosine, -sine, sine, cosine, 0, 0))
    return table.to(device)
