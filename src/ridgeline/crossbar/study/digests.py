"""What results of a study depend on besides options, model and data: the simulator's code, as a digest in run.json."""

from __future__ import annotations

import hashlib
from pathlib import Path


def simulator_digest() -> str:
    """Changes with every line of this room and of what prices a chip, so that results of two simulators never mix."""
    digest, room = hashlib.sha256(), Path(__file__).parent.parent
    beside = [room.parent / "estimate" / "crossbar.py", room.parent / "target" / "crossbar.py"]
    for path in (*sorted(room.rglob("*.py")), *beside):
        digest.update(path.relative_to(room.parent).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]
