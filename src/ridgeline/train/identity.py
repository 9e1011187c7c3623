"""What two runs must have in common for one to go on where the other stopped, as JSON.

    function, partial, dataclass, module ──told──> text: name, options, code        the same in every process
    tensor ──fingerprint──> CRC-32 of its first 64 MiB       ──rest_fingerprint──> of what follows

Told of a function: its code, its defaults and the plain values it closes over. Other things it holds are told by their type: two
teachers of one class look alike. Up to 2 GiB every byte of a tensor counts, beyond that every second, third, … MiB.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

FIRST_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20
MOST_CHUNKS = 2048
MOST_MEMBERS = 256  # of a list or mapping; a longer one is told by its length
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)


def fingerprint(tensor: Tensor) -> int:
    """CRC-32 of a tensor's first bytes."""
    return zlib.crc32(_bytes(tensor.detach().reshape(-1)[: FIRST_BYTES // tensor.element_size()]))


def rest_fingerprint(tensor: Tensor) -> int:
    """CRC-32 of what `fingerprint` does not see; 0 where it sees all."""
    flat, value = tensor.detach().reshape(-1), 0
    chunk = CHUNK_BYTES // tensor.element_size()
    starts = range(FIRST_BYTES // tensor.element_size(), flat.numel(), chunk)
    for start in starts[:: max(1, len(starts) // MOST_CHUNKS)]:
        value = zlib.crc32(_bytes(flat[start : start + chunk]), value)
    return value


def _bytes(flat: Tensor) -> bytes:
    return flat.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def told(thing: object, depth: int = 4) -> str:
    """Text that differs where the thing would compute something else, as far as that can be seen from outside."""
    if isinstance(thing, PLAIN):
        return repr(thing)
    if isinstance(thing, Tensor):
        return f"{thing.dtype} {list(thing.shape)} crc {fingerprint(thing):08x}"
    name = _name(thing)
    if depth == 0 or (isinstance(thing, Mapping | list | tuple) and len(thing) > MOST_MEMBERS):
        return f"{name} of {len(thing)}" if isinstance(thing, Mapping | list | tuple) else name
    if isinstance(thing, Mapping):
        return "{" + ", ".join(f"{told(key, 0)}: {told(value, depth - 1)}" for key, value in thing.items()) + "}"
    if isinstance(thing, list | tuple):
        return "[" + ", ".join(told(value, depth - 1) for value in thing) + "]"
    if isinstance(thing, functools.partial):
        return f"partial {told(thing.func, depth - 1)} {told(thing.args, depth - 1)} {told(thing.keywords, depth - 1)}"
    if isinstance(thing, types.MethodType):
        return f"{told(thing.__func__, depth - 1)} of {told(thing.__self__, depth - 1)}"
    if isinstance(thing, types.FunctionType):
        held = [cell.cell_contents for cell in thing.__closure__ or () if cell != types.CellType()]
        options = [*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values(), *held]
        return f"{name} code {zlib.crc32(_code(thing.__code__).encode()):08x} {told(options, depth - 1)}"
    return name + _options(thing, depth - 1)


def _options(thing: object, depth: int) -> str:
    """The plain settings of an object; tensors of a module may be trained, so they are no settings."""
    if isinstance(thing, type):
        return ""
    if dataclasses.is_dataclass(thing):
        found = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
    else:
        found = {name: value for name, value in getattr(thing, "__dict__", {}).items() if name != "training"}
    if isinstance(thing, nn.Module):
        found = {name: value for name, value in found.items() if name[:1] != "_" and isinstance(value, (*PLAIN, tuple))}
    return f"({', '.join(f'{key}={told(value, depth)}' for key, value in sorted(found.items()))})" if found else ""


def _code(code: types.CodeType) -> str:
    """Instructions and what they name; no addresses, no line numbers, sets in one order."""
    constants = [
        _code(one) if isinstance(one, types.CodeType) else sorted(map(repr, one)) if isinstance(one, frozenset) else repr(one)
        for one in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _name(thing: object) -> str:
    return str(getattr(thing, "__qualname__", type(thing).__qualname__))
