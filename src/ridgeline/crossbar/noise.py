"""Random numbers by counter: each has a name, and the same name gives the same number on any device, engine and order.

    key = (seed, chip), counter = (index low, index high, layer * 16 + kind, call) ──Philox4x32-10──> four words of 32 bits
      normal   number index % 4 of counter index // 4: words 0, 1 → cos, sin; words 2, 3 → cos, sin
               u1 = ((first >> 8) + 1) * 2^-24, u2 = (second >> 8) * 2^-24, sqrt(-2 ln u1) * cos or sin(2 pi u2)     (Box and Muller 1958)
      uniform  word index % 4 of counter index // 4: (word >> 8) * 2^-24, in [0, 1)
      cells    PROGRAM alone has one counter for each cell: words 0, 1 → two normals (write, drift); word 2 → the uniform (stuck)
    index of a cell = ((group * S + slice) * K + k) * N + n over unpadded K and N, the second plane of a pair: + groups * S * K * N
             a DAC value = ((b * M + m) * K + k) * Sx + i
             a conversion = (((b * M + m) * N_total + n) * arrays + a) * P + j * Sx + i, P = Sx * Sw or the next multiple of 4:
                            the four numbers of a counter are four slice pairs of one conversion
             a converter's offset = (a * N_total + n) * Sw + j          N_total = groups * N, n counted over all groups

A chip is programmed once: PROGRAM and OFFSET have call 0 whatever the draw says. Words are int64, as torch has no unsigned arithmetic
everywhere; 24 bits of each are used, which float32 holds, so that a normal differs between devices by rounding only.
Work is done in pieces that stay in a cache, so that memory is bounded by what is returned. Philox: Salmon et al., SC 2011.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum

import torch
from torch import Tensor

from ..core.errors import OptionError
from ..kernel.jit import HAVE_TRITON, cdiv, launch
from .plan import Draw

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LOW_WORD = 0xFFFFFFFF
KINDS_A_LAYER = 16
MOST_LAYERS = (1 << 32) // KINDS_A_LAYER
UNIT = 2.0**-24
PIECE_CPU, PIECE_GPU = 1 << 16, 1 << 22  # counters at once: half a megabyte a temporary stays in a core's cache; a GPU wants more


class Kind(IntEnum):
    """What a number is for."""

    PROGRAM = 0
    READ = 1
    DAC = 2
    ADC = 3
    OFFSET = 4


ONCE_A_CHIP = (Kind.PROGRAM, Kind.OFFSET)


def words(draw: Draw, kind: Kind, index: Tensor) -> Tensor:
    """int64 (…) → int64 (…, 4): the four 32-bit words of counter `index`."""
    out = torch.empty((index.numel(), 4), dtype=torch.int64, device=index.device)
    flat = index.reshape(-1)
    for piece in _pieces(len(flat), index.device):
        for place, word in enumerate(_philox(flat[piece], draw, kind)):
            out[piece, place] = word
    return out.reshape(*index.shape, 4)


def normal(draw: Draw, kind: Kind, index: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The standard normal of each index (int64, any shape)."""

    def of_piece(piece: Tensor) -> Tensor:
        number, four = piece & 3, _philox(piece >> 2, draw, kind)
        second = number >= 2
        cosine, sine = _two_normals(torch.where(second, four[2], four[0]), torch.where(second, four[3], four[1]))
        return torch.where((number & 1) == 1, sine, cosine)

    return _each_piece(index, of_piece, dtype)


def uniform(draw: Draw, kind: Kind, index: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The number in [0, 1) of each index (int64, any shape)."""

    def of_piece(piece: Tensor) -> Tensor:
        four = torch.stack(_philox(piece >> 2, draw, kind), dim=-1)
        return as_uniform(four.gather(-1, (piece & 3)[:, None])[:, 0])

    return _each_piece(index, of_piece, dtype)


def normals(draw: Draw, kind: Kind, start: int, count: int, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    """normal() of start, start + 1, …: a quarter of its work, as each counter gives all of its four."""
    first, last = start // 4, -(-(start + count) // 4)
    out = torch.empty((last - first, 4), dtype=dtype, device=device)
    for piece in _pieces(last - first, device):
        counters = torch.arange(first + piece.start, first + piece.stop, dtype=torch.int64, device=device)
        four = _philox(counters, draw, kind)
        for place in (0, 2):
            out[piece, place], out[piece, place + 1] = _two_normals(four[place], four[place + 1])
    return out.reshape(-1)[start - 4 * first :][:count]


def four_normals(draw: Draw, kind: Kind, counter: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """normal() of 4 * counter … 4 * counter + 3: int64 (…) → (4, …)."""
    flat = counter.reshape(-1)
    out = torch.empty((4, len(flat)), dtype=dtype, device=counter.device)
    for piece in _pieces(len(flat), counter.device):
        four = _philox(flat[piece], draw, kind)
        for place in (0, 2):
            out[place, piece], out[place + 1, piece] = _two_normals(four[place], four[place + 1])
    return out.reshape(4, *counter.shape)


def cell_words(draw: Draw, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words that decide how each cell (flat int64) is programmed; not in pieces, so the caller gives few at once."""
    four = _philox(index, draw, Kind.PROGRAM)
    return four[0], four[1], four[2], four[3]


def cell_normals(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Words 0 and 1 of a cell → its normals (write, drift), float64."""
    return _two_normals(first, second)


def as_uniform(word: Tensor) -> Tensor:
    """A word → float64 in [0, 1)."""
    return (word >> 8).to(torch.float64) * UNIT


def piece_of(device: torch.device) -> int:
    """How many counters are worked on at once."""
    return PIECE_CPU if device.type == "cpu" else PIECE_GPU


def _pieces(count: int, device: torch.device) -> list[slice]:
    size = piece_of(device)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _each_piece(index: Tensor, of_piece: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
    flat = index.reshape(-1)
    out = torch.empty(len(flat), dtype=dtype, device=index.device)
    for piece in _pieces(len(flat), index.device):
        out[piece] = of_piece(flat[piece])
    return out.reshape(index.shape)


def _two_normals(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """In float64 whatever the dtype asked for: a float32 angle alone would cost 1e-6."""
    radius = ((first >> 8) + 1).to(torch.float64).mul_(UNIT).log_().mul_(-2.0).sqrt_()
    angle = (second >> 8).to(torch.float64).mul_(2.0 * math.pi * UNIT)
    return angle.cos().mul_(radius), angle.sin().mul_(radius)


def _philox(index: Tensor, draw: Draw, kind: Kind) -> list[Tensor]:
    """int64 (n,) → the four words, int64 (n,) each. A product of two 32-bit words wraps in int64, but its bits are right."""
    stream, call = stream_of(draw, kind)
    if index.is_cuda and HAVE_TRITON:
        return _philox_on_gpu(index.contiguous(), stream, call, draw)
    key = [draw.seed, draw.chip]
    c = [index & LOW_WORD, (index >> 32) & LOW_WORD, torch.full_like(index, stream), torch.full_like(index, call)]
    for _ in range(ROUNDS):
        left, right = c[0] * MULTIPLIERS[0], c[2] * MULTIPLIERS[1]
        first = (right >> 32).bitwise_and_(LOW_WORD).bitwise_xor_(c[1]).bitwise_xor_(key[0])
        third = (left >> 32).bitwise_and_(LOW_WORD).bitwise_xor_(c[3]).bitwise_xor_(key[1])
        c = [first, right.bitwise_and_(LOW_WORD), third, left.bitwise_and_(LOW_WORD)]
        key = [(word + step) & LOW_WORD for word, step in zip(key, KEY_STEPS, strict=True)]
    return c


def _philox_on_gpu(index: Tensor, stream: int, call: int, draw: Draw) -> list[Tensor]:
    from .engine.fused_noise import draw_words

    count = index.numel()
    out = torch.empty((4, count), dtype=torch.int64, device=index.device)
    if count:
        launch(draw_words, (cdiv(count, 512),), index, out, count, stream, call, draw.seed, draw.chip, BLOCK=512)
    return list(out.unbind())


def stream_of(draw: Draw, kind: Kind) -> tuple[int, int]:
    """Words 2 and 3 of the counter."""
    limits = (
        ("seed", draw.seed, LOW_WORD),
        ("chip", draw.chip, LOW_WORD),
        ("layer", draw.layer, MOST_LAYERS - 1),
        ("call", draw.call, LOW_WORD),
    )
    for name, given, most in limits:
        if not 0 <= given <= most:
            raise OptionError(
                f"{name} {given}", why="it would be cut, and two names would share their random numbers", do=f"give 0 to {most}"
            )
    return draw.layer * KINDS_A_LAYER + int(kind), 0 if kind in ONCE_A_CHIP else draw.call
