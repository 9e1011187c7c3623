"""Where data files are, and the one way arrays are read from them.

    find_file("text/a.txt", "a.txt") ──each folder of RIDGELINE_DATA, in order──> the first that exists, else DataError with all of them
    read_array(path, shape=(None, 32, 32, 3), dtypes=("uint8",)) ──map, check──> numpy array

An array file is mapped, never unpickled: its header is checked against the file's size and against what is wanted before
anything is read.
"""

from __future__ import annotations

import os
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import DataError

if TYPE_CHECKING:
    import numpy

VARIABLE = "RIDGELINE_DATA"
MOST_BYTES = 2**36  # a data set is held in memory whole
LABEL_DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "int64")


def data_folders() -> list[Path]:
    """The folders of RIDGELINE_DATA, in the order they are searched."""
    return [Path(part).expanduser() for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part]


def find_file(*names: str, get: str) -> Path:
    """The first of `names` (paths inside a folder) in the first folder that has one; `get` tells how to come by it."""
    folders = data_folders()
    for folder in folders:
        for name in names:
            if (folder / name).is_file():
                return folder / name
    if not folders:
        why = f"{VARIABLE}, the list of folders to look in, is not set"
    else:
        why = f"looked for {' or '.join(names)} in {', '.join(map(str, folders))}"
    raise DataError(f"{names[0]} was not found", why=why, do=f"{get}, then put its folder into {VARIABLE} ('{os.pathsep}' between folders)")


def read_array(path: Path, *, dtypes: Sequence[str], shape: Sequence[int | None]) -> numpy.ndarray[Any, Any]:
    """A .npy file as a read-only map; None in `shape` stands for any length of at least one."""
    import numpy

    wanted = f"{' or '.join(dtypes)} [{','.join('N' if n is None else str(n) for n in shape)}]"
    try:
        array = numpy.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError as error:
        raise DataError(f"no file {path}", why="it does not exist", do=f"give a .npy file of {wanted}") from error
    # What numpy's header parser raises on a broken file; object arrays (pickles) are refused as ValueError.
    except (OSError, ValueError, EOFError, OverflowError, SyntaxError, TypeError, MemoryError, tokenize.TokenError) as error:
        raise DataError(
            f"cannot read {path}",
            why=str(error).splitlines()[0] if str(error) else type(error).__name__,
            do=f"give a whole .npy file of {wanted}; pickled arrays are never read",
        ) from error
    fits = len(array.shape) == len(shape) and all(n >= 1 if want is None else n == want for n, want in zip(array.shape, shape, strict=True))
    if array.dtype.name not in dtypes or not array.dtype.isnative or not fits:
        raise DataError(f"{path} holds {array.dtype} {list(array.shape)}", why=f"{wanted} is wanted", do="convert it, or give another file")
    if array.nbytes > MOST_BYTES:
        raise DataError(
            f"{path} holds {array.nbytes:,} bytes", why=f"a data set is held in memory; at most {MOST_BYTES:,}", do="give a part of it"
        )
    return array


def check_labels(path: Path, labels: numpy.ndarray[Any, Any], rows: int, classes: int) -> None:
    """One label from 0 to classes - 1 for each row."""
    if len(labels) != rows:
        raise DataError(f"{path} holds {len(labels)} labels", why=f"there are {rows} inputs", do="give one label for each input")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        raise DataError(f"label {wrong} in {path}", why=f"labels run from 0 to {classes - 1}", do="number the classes from 0")
