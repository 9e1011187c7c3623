"""What happens to a batch of images before a model sees it, on whatever device the batch is.

    uint8 [B,C,H,W] ──RandomCropFlip (training only)──> uint8 [B,C,H,W] ──Normalise──> float32 (x / top - mean) / std

Random numbers come from the caller's generator on the CPU, so that a run gives the same images on every device; the pixels
are moved by one gather on the batch's own device. Ref: He 2015, section 4.2 (4 pixels of zeros on each side, a crop, a flip).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Generator, Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Normalise:
    """Bytes to float32: 0..top becomes 0..1, then each channel loses its mean and is divided by its deviation."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    top: float = 255.0

    def __call__(self, images: Tensor) -> Tensor:
        gain, offset = _line(self, images.device)
        return images.to(torch.float32).mul_(gain).add_(offset)


@lru_cache(maxsize=32)
def _line(normalise: Normalise, device: torch.device) -> tuple[Tensor, Tensor]:
    """(x / top - mean) / std as gain · x + offset, each [C,1,1]; kept, because a copy to a GPU would stop the host each batch."""
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (normalise.mean, normalise.std))
    gain, offset = 1.0 / (normalise.top * std), -mean / std
    return gain.to(device, torch.float32), offset.to(device, torch.float32)


@dataclass(frozen=True, slots=True)
class RandomCropFlip:
    """Each image moved by up to `padding` pixels in both directions, zeros coming in, and mirrored half of the time."""

    padding: int = 4
    flip: bool = True

    def __call__(self, images: Tensor, generator: Generator) -> Tensor:
        batch, channels, height, width = images.shape
        chosen = torch.randint(2 * self.padding + 1, (3, batch), generator=generator)
        chosen[2] = torch.randint(2, (batch,), generator=generator) if self.flip else 0
        top, left, mirrored = chosen.to(images.device, non_blocking=True)  # [B] each
        rows = top[:, None] + torch.arange(height, device=images.device)  # [B,H]
        columns = torch.arange(width, device=images.device).expand(batch, width)
        columns = left[:, None] + torch.where(mirrored[:, None] == 1, width - 1 - columns, columns)  # [B,W]
        padded = functional.pad(images, (self.padding,) * 4)
        places = (
            torch.arange(batch, device=images.device)[:, None, None, None],
            torch.arange(channels, device=images.device)[:, None, None],
        )
        return padded[(*places, rows[:, None, :, None], columns[:, None, None, :])]
