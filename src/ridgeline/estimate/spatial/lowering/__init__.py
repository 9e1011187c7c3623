"""A mapped layer as a loop nest one can read, the nest as C, the C as numbers.

lower(layer, array, plan) ─┐
naive(layer, order) ───────┼──> Nest ──tile, reorder, vectorise, unroll──> Nest ──emit_c──> C ──compile_layer──> outputs
recommended(layer) ────────┘        (each checked before it is made)
"""

from .emit import emit_c
from .from_plan import lower
from .nest import Guard, Loop, Nest, Transfer, check_nest, naive
from .recommend import recommended
from .run_c import CompiledLayer, compile_layer, compile_layers, shapes
from .transforms import reorder, tile, unroll, vectorise

__all__ = [
    "CompiledLayer",
    "Guard",
    "Loop",
    "Nest",
    "Transfer",
    "check_nest",
    "compile_layer",
    "compile_layers",
    "emit_c",
    "lower",
    "naive",
    "recommended",
    "reorder",
    "shapes",
    "tile",
    "unroll",
    "vectorise",
]
