"""Random numbers that depend on the seed and the place in the run alone, so that a resumed run needs no stream state.

    (seed, epoch) ──epoch_order──> permutation of the rows        the same on every rank
    (seed, step)  ──step_generator──> CPU generator: crops, flips  the same on every rank and device
    (seed, step, rank) ──seed_step──> torch's own generators: dropout

Two numbers that differ in one part give unrelated streams: the parts are hashed (BLAKE2b) to 63 bits.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Generator, Tensor

ORDER, AUGMENT, MODEL = 1, 2, 3  # which stream, so that the order of epoch 5 and the crops of step 5 are unrelated


def mix(*parts: int) -> int:
    """A seed of 63 bits from any whole numbers."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def epoch_order(rows: int, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch takes the rows: an int64 permutation on the CPU."""
    return torch.randperm(rows, generator=Generator().manual_seed(mix(seed, ORDER, epoch)))


def step_generator(seed: int, step: int) -> Generator:
    """The CPU generator that augmentation of this step draws from."""
    return Generator().manual_seed(mix(seed, AUGMENT, step))


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed the generators a model draws from (dropout) for one step; costs the host a few microseconds."""
    value = mix(seed, MODEL, step, rank)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(value)
