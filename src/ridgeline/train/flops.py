"""FLOPs of a step and the peak they are held against: model FLOPs utilisation.

passes of the first step ──torch.utils.flop_counter──> FLOPs of forward + backward
  with activations computed again: 3 · forward, for recomputing is not the model's own work. Ref: Chowdhery 2022 (PaLM)
peak: a number [FLOP/s], a target's name, or on CUDA the catalog's entry of that name
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..core.errors import OptionError
from .options import TrainSettings

Shape = tuple[int, ...]
FUSED = ("flash", "efficient", "cudnn")


class FlopCount:
    """Counts the passes of one step."""

    def __init__(self, recomputes: bool) -> None:
        self.recomputes, self.forward, self.backward = recomputes, 0, 0

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        with _counted() as total:
            yield
        self.forward += total()

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        if self.recomputes:
            yield
            return
        with _counted() as total:
            yield
        self.backward += total()

    @property
    def total(self) -> int:
        return 3 * self.forward if self.recomputes else self.forward + self.backward


@contextmanager
def _counted() -> Iterator[Callable[[], int]]:
    from torch.utils.flop_counter import FlopCounterMode  # brings Triton along: half a second

    with FlopCounterMode(display=False, custom_mapping=_attention()) as counter:
        yield counter.get_total_flops


def _attention() -> dict[Any, Any]:
    """Formulas of fused attention with fewer heads of keys than of queries, which torch's own refuse before 2.13."""
    from torch.utils import flop_counter

    def forward(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
        return int(flop_counter.sdpa_flop_count(query, _heads_of(query, key), _heads_of(query, value)))

    def backward(grad: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
        return int(flop_counter.sdpa_backward_flop_count(grad, query, _heads_of(query, key), _heads_of(query, value)))

    aten = torch.ops.aten
    fused = [getattr(aten, f"_scaled_dot_product_{kind}_attention") for kind in FUSED]
    return {**dict.fromkeys(fused, forward), **{getattr(aten, f"{op.__name__}_backward"): backward for op in fused}}


def _heads_of(query: Shape, shape: Shape) -> Shape:
    return (shape[0], query[1], *shape[2:])


def peak_of(given: float | str | None, device: torch.device, settings: TrainSettings, ranks: int) -> float | None:
    """FLOP/s of all ranks' devices in the run's precision; None where nobody knows."""
    if isinstance(given, int | float):
        if not given > 0:
            raise OptionError(f"peak_flops = {given}", why="a peak is above 0 FLOP/s", do="give e.g. 989e12, or a target's name")
        return float(given) * ranks
    name = given or _catalog_name(device)
    if name is None:
        return None
    from ..target.load import load_processor

    dtype = "tfloat32" if settings.precision == "float32" and settings.tf32 and device.type == "cuda" else settings.precision
    return load_processor(name).peak("linear", dtype)[2] * ranks


def _catalog_name(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    from ..target.load import catalog_names

    words = torch.cuda.get_device_name(device).lower().split()
    return next((name for name in catalog_names() if name in words), None)
