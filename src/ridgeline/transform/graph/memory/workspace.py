"""How many bytes a region of code allocates through torch: its peak, and what it still holds at its end.

    run(): with region(3): step() ──allocations──> torch.profiler memory events, in time order
      ──> {3: Allocated(peak, kept)}        peak = highest sum of allocations less frees since the region began

Seen are allocations of torch's allocators (CPU and GPU). What a library takes from the system by itself (oneDNN's
scratchpads outside torch's allocator, threads' stacks) is not seen by the profiler and not counted here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

PREFIX = "ridgeline step "


@dataclass(frozen=True, slots=True)
class Allocated:
    """What a region allocated [B]."""

    peak: int
    kept: int


def region(number: int) -> record_function:
    """Mark code as region `number` of an `allocations` run."""
    return record_function(f"{PREFIX}{number}")


def allocations(run: Callable[[], Any], device: torch.device) -> tuple[dict[int, Allocated], Allocated]:
    """Run once under the profiler: what each marked region allocated on `device`, and the whole run."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    memory = sorted(
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type().name == device.type.upper()
    )
    marked = {}
    place = 0
    host = [event for event in events if event.name().startswith(PREFIX) and event.device_type().name == "CPU"]
    for event in sorted(host, key=lambda event: event.start_ns()):
        while place < len(memory) and memory[place][0] < event.start_ns():
            place += 1
        inside = []
        while place < len(memory) and memory[place][0] <= event.end_ns():
            inside.append(memory[place][1])
            place += 1
        marked[int(event.name().removeprefix(PREFIX))] = _summed(inside)
    return marked, _summed([size for _, size in memory])


def _summed(sizes: list[int]) -> Allocated:
    now = peak = 0
    for size in sizes:
        now += size
        peak = max(peak, now)
    return Allocated(peak, now)
