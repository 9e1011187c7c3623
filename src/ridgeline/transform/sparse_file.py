"""Zeros stored as nothing: one bit an element says whether it is there, then the elements that are.

    float tensor [N] ──encode──> bitmap uint8 [⌈N/8⌉] (bit i of byte j: element 8j + i), values [non-zeros]
    bitmap, values, shape ──decode──> the same bits

An element is zero where all its bits are zero: −0.0 and NaN are values and come back as they went in. `worth` says whether
this is smaller than the dense form. A decoded tensor is at most MOST_GROWTH times what is stored, so a small file cannot ask for
much memory.
"""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from ..core.errors import ModelFileError

ENTRY_BYTES = 160  # a second tensor's line in the file's header, names of usual length
MOST_GROWTH = 64  # float64 elements that are all zero cost a bit each
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def nonzero_count(tensor: Tensor) -> int:
    """Elements with any bit set."""
    return int(torch.count_nonzero(_bits(tensor)))


def sparse_bytes(elements: int, kept: int, itemsize: int) -> int:
    """Bytes of the bitmap and the values."""
    return (elements + 7) // 8 + kept * itemsize


def worth(tensor: Tensor) -> int | None:
    """How many elements are kept where the sparse form of this tensor is smaller, else None."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return None
    dense = tensor.numel() * tensor.element_size()
    if sparse_bytes(tensor.numel(), 0, tensor.element_size()) + ENTRY_BYTES >= dense:
        return None  # too small to gain anything, whatever it holds
    kept = nonzero_count(tensor)
    return kept if sparse_bytes(tensor.numel(), kept, tensor.element_size()) + ENTRY_BYTES < dense else None


def encode(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """(bitmap, values), both one-dimensional and on the CPU."""
    bits = _bits(tensor).cpu()  # copied as integers: copying a signalling NaN as a float may change it
    there = bits != 0
    bitmap = numpy.packbits(there.numpy(), bitorder="little")
    return torch.from_numpy(bitmap), bits[there].view(tensor.dtype)


def decode(bitmap: Tensor, values: Tensor, shape: tuple[int, ...], name: str = "a tensor") -> Tensor:
    """The dense tensor; parts that do not belong together are a ModelFileError."""
    elements = 1
    for size in shape:
        elements *= size
    if bitmap.dtype != torch.uint8 or bitmap.dim() != 1 or values.dim() != 1 or bitmap.numel() != (elements + 7) // 8:
        raise _broken(name, f"its bitmap of {bitmap.numel()} {bitmap.dtype} does not fit {elements} elements")
    marks = bitmap.cpu().numpy()
    there = numpy.unpackbits(marks, bitorder="little")
    if there[elements:].any():
        raise _broken(name, "its bitmap marks elements beyond the last")
    mask = torch.from_numpy(there[:elements].astype(bool))
    if int(mask.sum()) != values.numel():
        raise _broken(name, f"its bitmap marks {int(mask.sum())} elements and {values.numel()} are stored")
    flat = torch.zeros(elements, dtype=_BITS[values.element_size()])
    flat[mask] = _bits(values).cpu()
    return flat.view(values.dtype).reshape(shape)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous().view(_BITS[tensor.element_size()])


def _broken(name: str, why: str) -> ModelFileError:
    return ModelFileError(f"{name} cannot be decoded", why=why, do="save the model again")
