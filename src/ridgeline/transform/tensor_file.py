"""The tensors of a model as one safetensors file, its size known before a byte is written.

    state_dict ──plan──> Entry(name, dtype, shape, encoding, twin) ... ──file_bytes──> the exact size
                                                                    ──write_tensors──> model.safetensors     (atomic)
    model.safetensors + entries ──read_tensors──> state_dict

    file = header length (u64, little endian) · header (JSON, padded with blanks to 8) · data, widest elements first

Written here and not by the safetensors library because a Change must state the size of models that are never saved; read by the
library. A tensor that shares all its memory with an earlier one is stored once. Unstructured zeros: see sparse_file.py.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from ..core.errors import ModelFileError, OptionError
from .sparse_file import decode, encode, sparse_bytes, worth

BITMAP, VALUES = "#bitmap", "#values"  # what a sparse tensor's two parts are called after its name
MOST_DIMENSIONS = 16
CODES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.uint16: "U16", torch.int16: "I16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.uint32: "U32", torch.int32: "I32", torch.float32: "F32", torch.uint64: "U64", torch.int64: "I64",
    torch.float64: "F64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a state dict, and how it is stored."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    kept: int | None = None  # elements stored, where the zeros are left out
    same_as: str | None = None  # the tensor it shares its memory with: nothing of its own is stored

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    def parts(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, dtype and shape of each tensor of the file that holds this one."""
        if self.same_as is not None:
            return []
        if self.kept is None:
            return [(self.name, self.dtype, self.shape)]
        return [(self.name + BITMAP, torch.uint8, ((self.elements + 7) // 8,)), (self.name + VALUES, self.dtype, (self.kept,))]

    @property
    def stored_bytes(self) -> int:
        """Bytes of data this tensor takes in the file."""
        if self.same_as is not None:
            return 0
        size = self.dtype.itemsize
        return self.elements * size if self.kept is None else sparse_bytes(self.elements, self.kept, size)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"dtype": str(self.dtype).removeprefix("torch."), "shape": list(self.shape)}
        if self.kept is not None:
            found |= {"encoding": "bitmap", "kept": self.kept}
        return found | ({"same_as": self.same_as} if self.same_as is not None else {})


def plan(state: Mapping[str, Any]) -> list[Entry]:
    """How each tensor of a state dict would be stored; what a file cannot hold is an error that names it."""
    entries: list[Entry] = []
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        _require_plain(name, tensor)
        key = _memory(tensor)
        if key is not None and key in first:
            entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), same_as=first[key]))
            continue
        if key is not None:
            first[key] = name
        entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), worth(tensor)))
    names = [part[0] for entry in entries for part in entry.parts()]
    if len(names) != len(set(names)):
        raise ModelFileError("two tensors of one name", why=f"a name ends in {BITMAP} or {VALUES}", do="rename that parameter or buffer")
    return entries


def _require_plain(name: str, tensor: Any) -> None:
    why = None
    if not isinstance(tensor, Tensor):
        why = f"it is a {type(tensor).__name__}, and only tensors are stored"
    elif type(tensor) not in (Tensor, torch.nn.Parameter):
        why = f"it is a {type(tensor).__name__}: only plain tensors are stored"
    elif tensor.is_meta:
        why = "it is on the meta device and has no values"
    elif tensor.layout != torch.strided or tensor.dtype not in CODES:
        why = f"its layout is {tensor.layout} and its dtype {tensor.dtype}"
    elif tensor.dim() > MOST_DIMENSIONS:
        why = f"it has {tensor.dim()} dimensions"
    if why is not None:
        raise ModelFileError(f"{name} cannot be saved", why=why, do="keep packed bytes and scales as ordinary parameters or buffers")


def _memory(tensor: Tensor) -> tuple[Any, ...] | None:
    """What two tensors have in common that share all their memory."""
    if tensor.numel() == 0:
        return None
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _layout(entries: list[Entry]) -> tuple[bytes, list[str]]:
    """The header, and the names of the file's tensors in the order of their data: widest first keeps every one aligned."""
    parts = sorted((part for entry in entries for part in entry.parts()), key=lambda part: (-part[1].itemsize, part[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in parts:
        start, size = end, dtype.itemsize
        for length in shape:
            size *= length
        end = start + size
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % 8), [part[0] for part in parts]


def file_bytes(entries: list[Entry]) -> int:
    """The size of the file that write_tensors would make."""
    return 8 + len(_layout(entries)[0]) + sum(entry.stored_bytes for entry in entries)


def write_tensors(path: Path, state: Mapping[str, Tensor], entries: list[Entry]) -> None:
    """The whole file or nothing."""
    header, order = _layout(entries)
    homes = {part[0]: entry for entry in entries for part in entry.parts()}

    def pieces() -> Iterator[bytes]:
        yield struct.pack("<Q", len(header)) + header
        for name in order:
            yield from _chunks(_part(state, homes[name], name))

    write_pieces(path, pieces())


def write_pieces(path: Path, pieces: Iterable[bytes]) -> Path:
    """Bytes, piece by piece, into a file that is whole or absent."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise OptionError(f"cannot write {path}", why=str(error), do="give a path in a folder you may write to") from error
    try:
        with os.fdopen(handle, "wb") as stream:
            for piece in pieces:
                stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's own mode is for its owner alone
        os.replace(temporary, path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise OptionError(f"cannot write {path}", why=str(error), do="free some space, or give another folder") from error
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def _part(state: Mapping[str, Tensor], entry: Entry, name: str) -> Tensor:
    tensor = state[entry.name].detach()
    if entry.kept is None:
        return tensor
    bitmap, values = encode(tensor)
    return bitmap if name.endswith(BITMAP) else values


def _chunks(tensor: Tensor, size: int = 1 << 26) -> Iterator[bytes]:
    flat = tensor.contiguous().reshape(-1).cpu()
    if flat.numel() == 0:
        return
    data = flat.view(torch.uint8).numpy()
    for start in range(0, len(data), size):
        yield data[start : start + size].tobytes()


def read_entries(described: Any) -> list[Entry]:
    """Entries from the JSON of a saved model; anything odd in it is an error that names the tensor."""
    if not isinstance(described, dict):
        raise ModelFileError("a saved model without its tensors", why="'tensors' must be an object", do="save the model again")
    entries = []
    for name, one in described.items():
        try:
            entries.append(_entry(name, one))
        except (KeyError, TypeError, ValueError) as error:
            raise ModelFileError(f"tensor {name!r} is described wrongly", why=f"{error}", do="save the model again") from error
    return entries


def _entry(name: str, one: Any) -> Entry:
    if not isinstance(one, dict) or one.keys() - {"dtype", "shape", "encoding", "kept", "same_as"}:
        raise ValueError(f"it is {one!r:.80}, not dtype and shape")
    shape = one["shape"]
    if one["dtype"] not in DTYPES:
        raise ValueError(f"dtype {one['dtype']!r:.40}: known are {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS or not all(type(size) is int and 0 <= size < 2**48 for size in shape):
        raise ValueError(f"shape {shape!r:.80}")
    kept, same_as = one.get("kept"), one.get("same_as")
    if (one.get("encoding") is None) != (kept is None) or one.get("encoding") not in (None, "bitmap"):
        raise ValueError(f"encoding {one.get('encoding')!r:.40}")
    if kept is not None and (type(kept) is not int or kept < 0):
        raise ValueError(f"kept {kept!r:.40}")
    if same_as is not None and not isinstance(same_as, str):
        raise ValueError(f"same_as {same_as!r:.40}")
    return Entry(name, DTYPES[one["dtype"]], tuple(shape), kept, same_as)


def read_tensors(path: Path, entries: list[Entry]) -> dict[str, Tensor]:
    """The state dict, after the file is found to hold exactly what the entries say."""
    wanted = {part[0]: part for entry in entries for part in entry.parts()}
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            _require_same(path, set(file.keys()), wanted)
            for name, dtype, shape in wanted.values():
                part = file.get_slice(name)
                if part.get_dtype() != CODES[dtype] or tuple(part.get_shape()) != shape:
                    found = f"it is {part.get_dtype()} {part.get_shape()} in the file and {CODES[dtype]} {list(shape)} in the JSON"
                    raise ModelFileError(f"{path}: tensor {name}", why=found, do="save the model again")
            state = {entry.name: _read(file, entry) for entry in entries if entry.same_as is None}
    except safetensors.SafetensorError as error:
        raise ModelFileError(f"{path} is not a whole safetensors file", why=str(error)[:200], do="save or copy it again") from error
    except OSError as error:
        raise ModelFileError(f"cannot open {path}", why=str(error), do="check the path and its permissions") from error
    for entry in entries:
        if entry.same_as is not None:
            twin = state.get(entry.same_as)
            if twin is None or twin.dtype != entry.dtype or tuple(twin.shape) != entry.shape:
                raise ModelFileError(
                    f"{path}: tensor {entry.name}", why=f"it shares {entry.same_as!r:.80}, which is not like it", do="save the model again"
                )
            state[entry.name] = twin
    return state


def _read(file: Any, entry: Entry) -> Tensor:
    if entry.kept is None:
        tensor: Tensor = file.get_tensor(entry.name)
        return tensor
    return decode(file.get_tensor(entry.name + BITMAP), file.get_tensor(entry.name + VALUES), entry.shape, entry.name)


def _require_same(path: Path, found: set[str], wanted: Mapping[str, Any]) -> None:
    if missing := sorted(wanted.keys() - found):
        raise ModelFileError(f"{path} lacks tensor {missing[0]}", why=f"{len(missing)} are missing", do="save the model again")
    if extra := sorted(found - wanted.keys()):
        raise ModelFileError(f"{path} holds a tensor {extra[0]!r:.80} that its JSON does not name", why=f"{len(extra)} of them",
                             do="save the model again")  # fmt: skip
