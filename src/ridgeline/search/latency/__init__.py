"""Latency tables: what every block of a space costs on a device, and what a whole network is predicted to take there.

space.all_blocks() ──build_table(space, "cpu")──> LatencyTable ──predict(space, point)──> seconds
                                                              ──cost_matrix(space)──> [edges, ops] seconds, for supernets
"""

from __future__ import annotations

from .build import build_table
from .table import Entry, Errors, LatencyTable

__all__ = ["Entry", "Errors", "LatencyTable", "build_table"]
