"""Spaces of architectures: DARTS cells, NAS-Bench-201 cells, mobile macro nets, residual nets, transformers, and your own.

load_space("darts", channels=16, cells=8) ──> Space ──random, mutated, crossed──> Point ──build──> nn.Module
                                                                     └──blocks──> what a latency table measures
"""

from .ops import register_op
from .space import Block, Decision, Point, Space, load_space, point_of, register_space, space_names

__all__ = ["Block", "Decision", "Point", "Space", "load_space", "point_of", "register_op", "register_space", "space_names"]
