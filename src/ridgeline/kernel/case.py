"""What `ridgeline bench` needs to know of an operator, written in the operator's own file.

BENCH = Case(op="softmax", ours=…, plain=…, make=…, moved=…)
  make(shape, dtype, device) -> inputs;  ours(*inputs), plain(*inputs): the same result
  moved(inputs, backward) -> least bytes through device memory;  flops(inputs, backward) -> multiplications and additions
  backward: of forward and backward together
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Inputs = tuple[Any, ...]
Function = Callable[..., Any]

SIZES: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "small": ((256, 256), (512, 512)),
    "medium": ((2048, 2048),),
    "large": ((4096, 4096),),
    "xlarge": ((8192, 8192),),
    "batch": ((32, 128, 768), (16, 1024, 1024)),
}


@dataclass(frozen=True, slots=True)
class Anchor:
    """A row whose time elsewhere is known."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    backward: bool = False
    limit_ms: float | None = None
    """What the row must stay at or below on an H200."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the benchmark, at any size and dtype."""

    op: str
    ours: Function
    plain: Function
    """Torch's own; timed as it is and under torch.compile."""
    make: Callable[[tuple[int, ...], torch.dtype, str], Inputs]
    moved: Callable[[Inputs, bool], int]
    flops: Callable[[Inputs, bool], int] | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    sizes: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=lambda: SIZES)
    anchors: tuple[Anchor, ...] = ()
    differentiable: bool = False
    exact: Function | None = None
    """Result in float64; `plain` on inputs cast to float64 where left out."""
    peers: Mapping[str, Callable[[], Function]] = field(default_factory=dict)
    """Name -> imports a peer and returns its function; ImportError where it is not installed."""
    kind: Callable[[Inputs], tuple[str, int]] = lambda inputs: ("", inputs[0].numel())
    """Where a row stands in the dispatch table: (kind, size), as the op's replacement asks for it."""
    chooses: bool = False
    """`ours` looks in the dispatch table itself and may be torch's own: its rows say what a call costs, not where our kernels win."""
    in_graph: bool = False
    """GPU times are taken in a CUDA graph, ours and the others' alike: for ops of decoding, which runs in one."""


CASES: dict[str, Case] = {}


def benchmark(case: Case) -> Case:
    """Make the case known to `ridgeline bench`."""
    if case.op in CASES:
        raise ValueError(f"benchmark case {case.op} is defined twice")
    CASES[case.op] = case
    return case
