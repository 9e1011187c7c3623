"""A reader of GGUF model files that trusts nothing in them.

    magic "GGUF", version, counts ──> metadata {key: value} ──> tensor table (name, shape, kind, offset) ──> data, aligned
    open_gguf(path) ──> Gguf(metadata, tensors)
      .tensor(name) ──dequantise──> float32 torch tensor      .raw_blocks(name) ──> the file's own codes and scales

The file is mapped, not read. Every count and length is checked against the bytes that are left and every tensor against the
size of the file before anything is allocated for it; whatever does not fit is a ModelFileError that says where. Versions 2 and 3,
little-endian. Shapes are given the torch way round (rows first). Ref: the GGUF specification (ggml, docs/gguf.md).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import ModelFileError, unknown_name

if TYPE_CHECKING:
    from torch import Tensor

    from .gguf_blocks import Bytes

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_ITEMS = 2**22  # in all arrays of the metadata together; the largest vocabularies with their merges hold under a million
MOST_NAME_BYTES = 2**16
MOST_SHOWN = 300  # characters of a name in an error
MOST_DIMENSIONS = 4
MOST_DEPTH = 4  # arrays of arrays
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY, BOOL = 8, 9, 7


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the file: where its blocks lie and what they hold."""

    name: str
    shape: tuple[int, ...]  # as torch has it: the last dimension is contiguous
    kind: str
    start: int  # byte of the file
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Gguf:
    """An open file: what it says about itself, and its tensors on demand."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]
    data: Bytes

    def entry(self, name: str) -> TensorEntry:
        """The table's row of one tensor."""
        if name not in self.tensors:
            raise unknown_name(f"tensor in {self.path.name}", name, self.tensors, see="Gguf.tensors")
        return self.tensors[name]

    def tensor(self, name: str) -> Tensor:
        """One tensor as float32, dequantised where it is stored in blocks."""
        import torch

        from .gguf_blocks import DEQUANTISE

        entry = self.entry(name)
        if entry.kind not in DEQUANTISE:
            raise ModelFileError(
                f"tensor {name} in {self.path} is stored as {entry.kind}",
                why="that format is not read",
                do=f"convert the file to one of {', '.join(DEQUANTISE)}",
            )
        values = DEQUANTISE[entry.kind](self._blocks(entry))
        return torch.from_numpy(values.reshape(entry.shape))

    def raw_blocks(self, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes uint8 [rows, groups, 32], scale fp16 [rows, groups], minimum fp16 [rows, groups] or None, as they are in the file.

        Q4_0: value = scale · (code - 8); Q4_1: scale · code + minimum; Q8_0: scale · the code seen as int8. Rows are the
        file's: those of Llama's q and k are in another order than the model's (`pretrained.half_split`).
        """
        import torch

        from .gguf_blocks import split_blocks

        entry = self.entry(name)
        if entry.kind not in ("Q4_0", "Q4_1", "Q8_0"):
            raise ModelFileError(
                f"tensor {name} in {self.path} is stored as {entry.kind}",
                why="its blocks are not 32 codes with one scale",
                do="ask for a tensor of Q4_0, Q4_1 or Q8_0",
            )
        codes, scale, minimum = split_blocks(entry.kind, self._blocks(entry))
        shape = (math.prod(entry.shape[:-1]), entry.shape[-1] // 32)
        return (
            torch.from_numpy(codes.reshape(*shape, 32)),
            torch.from_numpy(scale.reshape(shape)),
            None if minimum is None else torch.from_numpy(minimum.reshape(shape)),
        )

    def _blocks(self, entry: TensorEntry) -> Bytes:
        from .gguf_blocks import KINDS

        block = next(kind for kind in KINDS.values() if kind.name == entry.kind)
        return self.data[entry.start : entry.start + entry.size].reshape(-1, block.bytes)


def open_gguf(path: str | Path) -> Gguf:
    """Map the file and read its header."""
    import numpy

    path = Path(path)
    try:
        data: Bytes = numpy.memmap(path, dtype=numpy.uint8, mode="r")
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelFileError(f"cannot read {path}", why=str(error), do="give a GGUF file") from error
    cursor = Cursor(path, data)
    version, tensor_count, pair_count = _opening(cursor)
    metadata = _metadata(cursor, pair_count)
    tensors = _table(cursor, tensor_count, _alignment(cursor, metadata))
    return Gguf(path, version, metadata, tensors, numpy.asarray(data))


class Cursor:
    """A place in the file that moves forward and never past the end."""

    def __init__(self, path: Path, data: Bytes) -> None:
        # A memoryview: slicing one is several times cheaper than slicing an array, and a vocabulary is a hundred thousand slices.
        self.path, self.data, self.place, self.items = path, data.data, 0, 0

    def broken(self, what: str, why: str) -> ModelFileError:
        """The error for this place; what a hostile file calls a thing may be long."""
        what = what if len(what) <= MOST_SHOWN else f"{what[:MOST_SHOWN]}…"
        return ModelFileError(f"{what} in {self.path} at byte {self.place}", why=why, do="download the file again, or make it again")

    @property
    def left(self) -> int:
        return len(self.data) - self.place

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes."""
        if count > self.left:
            raise self.broken(f"{what} of {count:,} bytes", f"only {self.left:,} bytes are left")
        taken = bytes(self.data[self.place : self.place + count])
        self.place += count
        return taken

    def number(self, form: str, what: str) -> Any:
        """One scalar."""
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def text(self, what: str, most: int | None = None) -> str:
        """A string: its length in eight bytes, then UTF-8."""
        length = self.number("<Q", f"length of {what}")
        if most is not None and length > most:
            raise self.broken(f"{what} of {length:,} bytes", f"at most {most:,} are read")
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.broken(what, f"not UTF-8 ({error.reason})") from error


def _opening(cursor: Cursor) -> tuple[int, int, int]:
    """Version, number of tensors, number of metadata pairs."""
    if cursor.left < 4 or cursor.take(4, "magic") != MAGIC:
        raise ModelFileError(f"{cursor.path} is not a GGUF file", why="it does not begin with GGUF", do="give a .gguf file")
    version = cursor.number("<I", "version")
    if version not in VERSIONS:
        order = "it is big-endian" if version & 0xFFFF == 0 else "only versions 2 and 3 are read"
        raise ModelFileError(f"GGUF version {version} in {cursor.path}", why=order, do="convert the file with a current tool")
    tensors, pairs = cursor.number("<Q", "tensor count"), cursor.number("<Q", "metadata count")
    # A tensor row takes at least 8 + 4 + 8 + 4 + 8 bytes, a pair at least 8 + 4 + 1.
    if tensors * 32 + pairs * 13 > cursor.left:
        raise cursor.broken(f"{tensors:,} tensors and {pairs:,} metadata pairs", f"they cannot fit in the {cursor.left:,} bytes left")
    return version, tensors, pairs


def _metadata(cursor: Cursor, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text("metadata key", MOST_NAME_BYTES)
        if key in found:
            raise cursor.broken(f"metadata key {key!r}", "it stands in the file twice")
        found[key] = _value(cursor, cursor.number("<I", f"type of {key}"), key, 0)
    return found


def _value(cursor: Cursor, kind: int, key: str, depth: int) -> Any:
    if kind == BOOL:
        return cursor.number("<B", key) != 0
    if kind in SCALARS:
        return cursor.number(SCALARS[kind], key)
    if kind == STRING:
        return cursor.text(key)
    if kind != ARRAY or depth >= MOST_DEPTH:
        raise cursor.broken(
            f"{key} of type {kind}", "no such type" if kind != ARRAY else f"more than {MOST_DEPTH} arrays inside each other"
        )
    inner, count = cursor.number("<I", f"type of {key}"), cursor.number("<Q", f"length of {key}")
    least = struct.calcsize(SCALARS[inner]) if inner in SCALARS else 8 if inner == STRING else 12
    cursor.items += count
    if count * least > cursor.left or cursor.items > MOST_ITEMS:
        limit = f"{cursor.left:,} bytes are left" if count * least > cursor.left else f"at most {MOST_ITEMS:,} items are read"
        raise cursor.broken(f"{key} of {count:,} items", limit)
    if inner in SCALARS and inner != BOOL:  # one read for all: vocabularies hold their scores and types this way
        return list(struct.unpack(f"<{count}{SCALARS[inner][1]}", cursor.take(count * least, key)))
    return [_value(cursor, inner, key, depth + 1) for _ in range(count)]


def _alignment(cursor: Cursor, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**20 or value & (value - 1):
        raise cursor.broken(f"general.alignment = {value!r}", "it is a power of two")
    return value


def _table(cursor: Cursor, count: int, alignment: int) -> dict[str, TensorEntry]:
    rows = [_row(cursor) for _ in range(count)]
    begin = -(-cursor.place // alignment) * alignment
    found: dict[str, TensorEntry] = {}
    for name, shape, kind, offset, size in rows:
        if name in found:
            raise cursor.broken(f"tensor {name!r}", "it stands in the file twice")
        if offset % alignment:
            raise cursor.broken(f"tensor {name} at offset {offset}", f"offsets are multiples of {alignment}")
        if begin + offset + size > len(cursor.data):
            raise cursor.broken(
                f"tensor {name}, {kind} {list(shape)}", f"it ends at byte {begin + offset + size:,} of {len(cursor.data):,}: truncated?"
            )
        found[name] = TensorEntry(name, shape, kind, begin + offset, size)
    _refuse_overlap(cursor, found)
    return found


def _row(cursor: Cursor) -> tuple[str, tuple[int, ...], str, int, int]:
    """Name, shape, kind, offset in the data, bytes."""
    from .gguf_blocks import KINDS

    name = cursor.text("tensor name", MOST_NAME_BYTES)
    dimensions = cursor.number("<I", f"dimensions of {name}")
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise cursor.broken(f"tensor {name} of {dimensions} dimensions", f"1 to {MOST_DIMENSIONS} are read")
    sizes = [cursor.number("<Q", f"shape of {name}") for _ in range(dimensions)]
    number = cursor.number("<I", f"kind of {name}")
    if number not in KINDS:
        raise cursor.broken(f"tensor {name} of kind {number}", "no known format has that number")
    kind, shape = KINDS[number], tuple(reversed(sizes))
    if min(shape) < 1 or shape[-1] % kind.values:
        raise cursor.broken(
            f"tensor {name} of shape {list(shape)}", f"a row of {kind.name} holds a whole number of blocks of {kind.values}"
        )
    size = math.prod(shape) // kind.values * kind.bytes
    return name, shape, kind.name, cursor.number("<Q", f"offset of {name}"), size


def _refuse_overlap(cursor: Cursor, found: dict[str, TensorEntry]) -> None:
    """Two tensors over the same bytes: a small file could stand for any amount of memory."""
    ordered = sorted(found.values(), key=lambda entry: entry.start)
    for first, second in pairwise(ordered):
        if first.start + first.size > second.start:
            raise cursor.broken(f"tensors {first.name} and {second.name}", "they lie over the same bytes")
