"""A line on stderr that says how far a run is, how fast, and how much of the machine it uses.

    epoch 3/10 ━━━━━━━━────────────  41 % · loss 0.5121 · 12,345 samples/s · MFU 31 % · 2:05 left

On a terminal the line is rewritten in place; elsewhere a plain one is written every ten seconds. Speed is that of the last
window, not of the whole run, so that compiling and the first step do not weigh on it.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

from .history import History

QUIET_S, BAR = 10.0, 20


class Progress:
    """Shows a history as it grows; `show` costs little enough to be called after every flush."""

    def __init__(self, history: History, total: int, stream: TextIO | None = None) -> None:
        self.history, self.total, self.stream = history, total, stream or sys.stderr
        self.live = self.stream.isatty()
        self.said_s = 0.0 if self.live else time.monotonic()
        self.width = 0

    def show(self, last: bool = False) -> None:
        """Write the line where it is due."""
        now = time.monotonic()
        if len(self.history) and (last or now - self.said_s >= (0.1 if self.live else QUIET_S)):
            self.said_s = now
            text = line(self.history, self.total)
            if self.live:
                padded = text.ljust(self.width)
                self.width = len(text)
                self.stream.write(f"\r{padded}" + ("\n" if last else ""))
            else:
                self.stream.write(text + "\n")
            self.stream.flush()


def line(history: History, total: int, window: int = 100) -> str:
    """The text for the steps done so far of `total`."""
    done = len(history)
    recent = history.step_s[-window:]
    step_s = sum(recent) / len(recent)
    filled, epochs = BAR * done // total, -(-total // history.steps_per_epoch)
    parts = [
        f"epoch {(done - 1) // history.steps_per_epoch + 1}/{epochs} {'━' * filled}{'─' * (BAR - filled)} {done / total:4.0%}",
        f"loss {history.loss[-1]:.4f}",
        f"{history.batch / max(step_s, 1e-9):,.0f} samples/s",
    ]
    if history.flops_per_step and history.peak_flops:
        parts.append(f"MFU {history.flops_per_step / max(step_s, 1e-9) / history.peak_flops:.0%}")
    if history.skipped_steps:
        parts.append(f"{history.skipped_steps} skipped")
    left = round((total - done) * step_s)
    parts.append(f"{left // 60}:{left % 60:02d} left" if done < total else f"{sum(history.step_s):.1f} s")
    return " · ".join(parts)
