"""Codes of 2 to 8 bits side by side in bytes.

    codes uint8 [.., K], each below 2**bits ──pack──> uint8 [.., ceil(K * bits / 8)] ──unpack(bits, K)──> the same codes

Little-endian bit order: code i of a row fills bits i * bits to (i + 1) * bits - 1, and bit j of the row is bit j % 8 of byte j // 8.
Each row starts on a byte, so that rows can be gathered without unpacking the others; the unused bits of its last byte are 0.
Signed codes are packed as two's complement of `bits` bits: 8-bit codes are then int8 as they lie.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...core.errors import TransformError

WIDTHS = range(2, 9)


def packed_width(bits: int, count: int) -> int:
    """Bytes that a row of `count` codes takes."""
    return -(-count * bits // 8)


def check_bits(bits: int) -> None:
    if not isinstance(bits, int) or bits not in WIDTHS:
        raise TransformError(f"bits = {bits}", why="codes have 2 to 8 bits", do="give bits = 2, 3, 4, 5, 6, 7 or 8")


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 [.., K] of values below 2**bits → uint8 [.., ceil(K * bits / 8)]."""
    check_bits(bits)
    if codes.dtype is not torch.uint8 or codes.dim() == 0:
        raise TransformError(f"pack of {codes.dtype} {tuple(codes.shape)}", why="codes are a uint8 tensor", do="use to_unsigned first")
    if bits == 8:
        return codes.contiguous().clone()
    if codes.numel() and int(codes.max()) >> bits:
        raise TransformError(f"code {int(codes.max())} in {bits} bits", why=f"codes must be below {1 << bits}", do="clamp the codes")
    count = codes.shape[-1]
    per_word, words = _words(bits, count)
    padded = torch.nn.functional.pad(codes, (0, words * per_word - count)).reshape(*codes.shape[:-1], words, per_word)
    # `per_word` codes fill a whole number of bytes (at most 7): one int64 holds them
    shifts = bits * torch.arange(per_word, device=codes.device)
    word = (padded.long() << shifts).sum(-1, keepdim=True)  # [.., words, 1]
    out = (word >> (8 * torch.arange(per_word * bits // 8, device=codes.device))) & 255
    return out.to(torch.uint8).flatten(-2)[..., : packed_width(bits, count)].contiguous()


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """uint8 [.., ceil(count * bits / 8)] → uint8 [.., count]."""
    check_bits(bits)
    width = packed_width(bits, count)
    if packed.dtype is not torch.uint8 or packed.dim() == 0 or packed.shape[-1] != width:
        raise TransformError(
            f"unpack of {packed.dtype} {tuple(packed.shape)}", why=f"{count} codes of {bits} bits fill {width} bytes of uint8",
            do="give the count and bits it was packed with",
        )  # fmt: skip
    if bits == 8:
        return packed.clone()
    per_word, words = _words(bits, count)
    step = per_word * bits // 8
    padded = torch.nn.functional.pad(packed, (0, words * step - width)).reshape(*packed.shape[:-1], words, step)
    word = padded if step == 1 else (padded.long() << (8 * torch.arange(step, device=packed.device))).sum(-1, keepdim=True)
    shifts = (bits * torch.arange(per_word, device=packed.device)).to(word.dtype)
    codes = (word >> shifts) & ((1 << bits) - 1)  # [.., words, per_word]
    return codes.to(torch.uint8).flatten(-2)[..., :count].contiguous()


def to_unsigned(codes: Tensor, bits: int) -> Tensor:
    """Codes as the uint8 that is packed: int8 becomes two's complement of `bits` bits, uint8 stays."""
    return codes.view(torch.uint8) & ((1 << bits) - 1) if codes.dtype is torch.int8 else codes


def to_signed(codes: Tensor, bits: int) -> Tensor:
    """int8 of two's complement codes of `bits` bits in uint8."""
    if bits == 8:
        return codes.view(torch.int8)
    half = 1 << (bits - 1)
    return ((codes ^ half).to(torch.int8) - half).contiguous()


def _words(bits: int, count: int) -> tuple[int, int]:
    """(codes that fill whole bytes, how many such words hold `count`)."""
    per_word = 8 // math.gcd(8, bits)
    return per_word, -(-count // per_word)
