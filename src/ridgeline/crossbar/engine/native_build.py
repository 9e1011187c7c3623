"""A C text to functions Python can call: compiled by gcc for this processor, kept on disk and in the process.

    source ──gcc -O3 -march=native──> <cache>/native/<hash>.so ──ctypes──> CDLL
      hash: of the source, the flags, and what gcc says of itself and this processor

gcc gets a list of arguments and a time limit. A library is written beside its place and renamed, so half of one is never loaded; where
the cache cannot be written, it is compiled again in each process.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

from ...core.errors import MeasureError, MissingExtraError
from ...core.files import cache_dir

# -fwrapv: shifted bytes and masks are patterns of bits, whatever sign C gives them
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fwrapv", "-shared", "-fPIC", "-pthread")
COMPILE_LIMIT_S = 120.0

_LOCK = threading.Lock()


def build(source: str) -> ctypes.CDLL:
    """The library of a C text; an error tells why there is none."""
    with _LOCK:
        return _build(source)


@cache
def _build(source: str) -> ctypes.CDLL:
    key = hashlib.sha256("\0".join([*FLAGS, source, run_gcc(["-march=native", "-dM", "-E", "-x", "c", "/dev/null"])]).encode()).hexdigest()
    kept = cache_dir() / "native" / f"{key[:32]}.so"
    if kept.is_file() and (found := _load(kept)) is not None:
        return found
    with tempfile.TemporaryDirectory(prefix="ridgeline-c-") as folder:
        code, library = Path(folder, "source.c"), Path(folder, "library.so")
        code.write_text(source, encoding="utf-8")
        run_gcc([*FLAGS, str(code), "-o", str(library), "-lm"])
        _keep(library, kept)
        return ctypes.CDLL(str(library))  # stays loaded when the folder is gone


def _load(path: Path) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # broken: compiled anew
        return None


def _keep(library: Path, kept: Path) -> None:
    beside = kept.with_suffix(f".{os.getpid()}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, beside)
        os.replace(beside, kept)
    except OSError:
        beside.unlink(missing_ok=True)


def run_gcc(arguments: list[str]) -> str:
    """What gcc prints."""
    gcc = shutil.which("gcc")
    if gcc is None:
        raise MissingExtraError("gcc is not installed", why="the native engine is compiled on the spot", do="install gcc, or use blocked")
    try:
        done = subprocess.run([gcc, *arguments], capture_output=True, text=True, check=False, timeout=COMPILE_LIMIT_S)
    except (subprocess.TimeoutExpired, OSError) as error:
        raise MeasureError("gcc did not finish", why=str(error), do="use the blocked engine") from error
    if done.returncode:
        raise MeasureError("gcc refused the native engine", why=done.stderr.strip()[:2000], do="use the blocked engine, and report this")
    return done.stdout
