"""What a table says of choices: seconds each op adds on each edge of a cell.

space.edge_blocks(): [edge][op] -> blocks of the whole net ──table──> [edges, ops] seconds
expected latency of a supernet ≈ frame + Σ edges Σ ops share[edge, op] · matrix[edge, op]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...core.errors import OptionError

if TYPE_CHECKING:
    from ..spaces.space import Block, Space
    from .table import LatencyTable


def cost_matrix(table: LatencyTable, space: Space, what: str = "seconds") -> NDArray[np.float64]:
    """[edges, ops]: what choosing an op on an edge adds to the whole network, in `seconds` or `energy_j`."""
    edges: Any = getattr(space, "edge_blocks", None)
    if edges is None:
        raise OptionError(
            f"space {space.name!r} has no edges",
            why="only cell spaces have one op to choose on each edge",
            do="use darts or nb201, or search this space by asking for whole networks",
        )
    if space.name != table.space:
        raise OptionError(
            f"a table of space {table.space!r} for {space.name!r}", why="their blocks differ", do="build a table of this space"
        )

    def added(blocks: list[Block]) -> float:
        values = [(getattr(table.entry(block.key), what), block.count) for block in blocks]
        if any(value is None for value, _ in values):
            raise OptionError(f"no {what} in the table of {table.target}", why="the target gives none", do="use seconds")
        return float(sum(value * count for value, count in values))

    return np.array([[added(blocks) for blocks in ops] for ops in edges()], dtype=np.float64)
