"""What tests share: where the repository is, and how many generated cases to run.

RIDGELINE_FULL=1  ──>  full_or_tenth(n) = n          (make test-full)
otherwise         ──>  full_or_tenth(n) = ⌈n / 10⌉   (make test, always the same cases)
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FULL = os.environ.get("RIDGELINE_FULL") == "1"


def full_or_tenth(count: int) -> int:
    """How many of `count` generated cases this run takes."""
    return count if FULL else -(-count // 10)
