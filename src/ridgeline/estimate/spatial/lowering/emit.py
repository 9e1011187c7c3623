"""A loop nest as one C function.

    Nest ──emit_c──> void layer(const T *W, const T *I, T *O)        T = float or int32_t
      W [G*K, C, R, S]    I [B, G*C, H, W]    O [B, G*K, P, Q]       contiguous, as torch has them; O is overwritten

      copy of the input with zeros around it, where one is needed            c_input
      loops outermost first, each ending where a guard says
        accumulators = 0
        the reduction loops that are innermost
          loads and multiply-adds of the unrolled and vectorised loops       c_block
        O = or += accumulators

Serial and parallel loops become `for`: lanes of an array run one after the other on a CPU. Transfers become comments, as
caches move tiles by themselves. A matmul is a convolution with one tap: I [B, G*C, P, 1], W [G*K, C, 1, 1].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ....core.errors import OptionError
from ..layer import REDUCTION
from .c_block import Block, block_of
from .c_terms import Sum, turns
from .nest import Guard, Loop, Nest, check_nest

TYPES = {"float32": "float", "int32": "int32_t"}
PRELUDE = """#include <stdint.h>
#include <string.h>

static inline long least(long a, long b) { return a < b ? a : b; }
"""


def emit_c(nest: Nest, dtype: str = "float32", *, name: str = "layer") -> str:
    """A C file with one function; a nest that does not reach every index once is refused."""
    return PRELUDE + "\n" + emit_function(nest, dtype, name=name)


def emit_function(nest: Nest, dtype: str = "float32", *, name: str = "layer") -> str:
    """The function alone, for several in one file after one PRELUDE."""
    if dtype not in TYPES:
        raise OptionError(f"dtype {dtype!r}", why="C is emitted for float32 and int32", do=f"give one of {', '.join(TYPES)}")
    if not re.fullmatch(r"[A-Za-z]\w{0,60}", name, re.ASCII):
        raise OptionError(f"function name {name!r}", why="it must be a C identifier", do="use letters, digits and underscores")
    check_nest(nest)
    return "\n".join(_function_lines(nest, TYPES[dtype], name)) + "\n"


def _function_lines(nest: Nest, type_name: str, name: str) -> Iterator[str]:
    live = _without_single_turns(nest)
    block = block_of(live)
    first_summed = len(block.outside)
    while first_summed and block.outside[first_summed - 1].dim in REDUCTION:
        first_summed -= 1
    goes_on = any(loop.dim in REDUCTION for loop in block.outside[:first_summed])
    yield f"/* {_comment(nest.layer.name)} */"
    yield f"void {name}(const {type_name} *restrict W, const {type_name} *restrict I, {type_name} *restrict O)"
    yield "{"
    yield f"  typedef {type_name} T;"
    if block.vector:
        yield f"  typedef T vec __attribute__((vector_size({4 * block.width}), aligned(4), may_alias));"
    yield from _indent(block.access.copy_lines() if block.access.copied else [])
    if goes_on:
        yield f"  memset(O, 0, sizeof(T)*{nest.layer.elements('O')});"
    yield from _indent(_transfer_lines(live, block, None, at_end=False))
    yield from _indent(_level_lines(live, block, 0, first_summed, "+=" if goes_on else "="))
    yield from _indent(_transfer_lines(live, block, None, at_end=True))
    yield "}"


def _without_single_turns(nest: Nest) -> Nest:
    """The nest without loops of one turn, whose index is always 0."""
    loops = tuple(loop for loop in nest.loops if loop.extent > 1)
    live = {loop.index for loop in loops}
    guards = [Guard(g.dim, tuple(term for term in g.terms if term[0] in live), g.limit) for g in nest.guards]
    transfers = []
    for transfer in nest.transfers:
        around = nest.order[: nest.order.index(transfer.inside) + 1] if transfer.inside else ()
        transfers.append(replace(transfer, inside=next((name for name in reversed(around) if name in live), None)))
    return Nest(nest.layer, loops, tuple(g for g in guards if g.terms), tuple(transfers))


def _level_lines(nest: Nest, block: Block, position: int, first_summed: int, assign: str) -> Iterator[str]:
    """The loop at `position` and all inside it; accumulators live around the first of the innermost reduction loops."""
    if position == first_summed:
        yield from block.zero_lines()
    if position == len(block.outside):
        yield from block.multiply_lines()
    else:
        loop = block.outside[position]
        yield from _head_lines(nest, position, loop)
        yield from _indent(_transfer_lines(nest, block, loop.index, at_end=False))
        yield from _indent(_level_lines(nest, block, position + 1, first_summed, assign))
        yield from _indent(_transfer_lines(nest, block, loop.index, at_end=True))
        yield "}"
    if position == first_summed:
        yield from block.store_lines(assign)


def _head_lines(nest: Nest, position: int, loop: Loop) -> Iterator[str]:
    """The head of a loop; the loops around it are inside every guard, so what is left of one is at least 1."""
    around = {other.index for other in nest.loops[:position]}
    end = str(loop.extent)
    for guard in nest.guards:
        if factor := dict(guard.terms).get(loop.index):
            end = turns(end, guard.limit, Sum(tuple(t for t in guard.terms if t[0] in around)), factor)
    if loop.kind == "unrolled":
        yield f"#pragma GCC unroll {loop.extent}"
    i, note = loop.index, _comment(loop.text().partition("# ")[2])
    if end.isdigit():
        yield f"for (long {i} = 0; {i} < {end}; ++{i}) {{  /* {note} */"
    else:
        yield f"for (long {i} = 0, {i}_end = {end}; {i} < {i}_end; ++{i}) {{  /* {note} */"


def _transfer_lines(nest: Nest, block: Block, inside: str | None, *, at_end: bool) -> Iterator[str]:
    """Comments for the transfers of a loop; the innermost `for` also speaks for the loops of the block."""
    places = {inside}
    if inside == (block.outside[-1].index if block.outside else None):
        places |= set(nest.order[len(block.outside) :])
    return (f"/* {_comment(t.text())} */" for t in nest.transfers if t.inside in places and (t.kind == "store") == at_end)


def _indent(lines: Iterable[str]) -> Iterator[str]:
    return ("  " + line for line in lines)


def _comment(text: str) -> str:
    """Text that cannot end a comment: layer and memory names come from files."""
    return re.sub(r"[^\w .,:()<>|-]", "_", text, flags=re.ASCII)[:200]
