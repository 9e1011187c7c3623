"""Files that are whole or absent: write beside, flush, rename; and where Ridgeline keeps its own.

write_text(path, text) ──> path.tmp-XXXX ──fsync──> os.replace ──> path        (a crash leaves the old file)
check_writable(path) ──> the same error write_text would end in, before the work
cache_dir() = $RIDGELINE_CACHE or $XDG_CACHE_HOME/ridgeline or ~/.cache/ridgeline
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from .errors import OptionError


def write_text(path: Path | str, text: str) -> Path:
    """Write the whole file or nothing; the folder must exist or be creatable."""
    target = Path(path)
    handle, temporary = _beside(target)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644 & ~_umask())  # mkstemp's own mode is for its owner alone
        os.replace(temporary, target)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise OptionError(f"cannot write {target}", why=str(error), do="give a path in a folder you may write to") from error
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return target


def check_writable(path: Path | str) -> None:
    """Before work whose result is to be written there."""
    target = Path(path)
    if os.path.isdir(target):  # False too where the path is too long to be asked about
        raise OptionError(f"cannot write {target}", why="it is a folder", do="give the path of a file")
    handle, temporary = _beside(target)
    os.close(handle)
    Path(temporary).unlink()


def _beside(target: Path) -> tuple[int, str]:
    """(open file, its path): a new one in the target's folder, which is made where it can be."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise OptionError(f"cannot write {target}", why=str(error), do="give a path in a folder you may write to") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(path: Path | str, data: Any) -> Path:
    """Atomic JSON, indented, with a final newline."""
    return write_text(path, json.dumps(data, indent=1) + "\n")


def cache_dir() -> Path:
    """Where calibrations and baselines live."""
    if given := os.environ.get("RIDGELINE_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ridgeline"
