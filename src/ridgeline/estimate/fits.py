"""Does it fit? What a run must hold at once, against the memory it runs from.

    weights + KV cache, split over the devices, + peak activations ──> needed bytes ──> None, or by how much it does not fit

Weights and caches count whole, whatever part of them the ops touch; activations are not taken to be split.
"""

from __future__ import annotations

from ..target.spec import ProcessorSpec
from ..workload.graph import Workload


def needed_bytes(workload: Workload, devices: int) -> int:
    """What each device holds."""
    return -(-(workload.weight_bytes + workload.peak_cache_bytes) // devices) + workload.peak_activation_bytes


def misfit(workload: Workload, spec: ProcessorSpec, devices: int) -> str | None:
    """Why the run is impossible, None where it fits."""
    needed, capacity = needed_bytes(workload, devices), spec.memories[spec.outermost].capacity_bytes.value
    if needed <= capacity:
        return None
    cache = ", KV cache" if workload.peak_cache_bytes else ""
    each = " on each device" if devices > 1 else ""
    return f"does not fit: {needed:,} B of weights{cache} and activations{each}, {spec.outermost} holds {capacity:,.0f} B"
