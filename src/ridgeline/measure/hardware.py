"""What the machine's own meters say of one pass: energy and event counts, or why there are none.

    call ──repeated for 0.3 s under an EnergyMeter──> joules a pass          ──once under perf──> instructions, cycles, misses

Each line says plainly where a meter is missing; nothing is estimated here.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from .counters import count_events
from .power import EnergyMeter, Unavailable

METERED_S = 0.3  # energy counters are refreshed every 20 to 100 ms


def hardware_notes(call: Callable[[], object], device: str, pass_s: float) -> list[str]:
    """One line on energy, and on the CPU one on its event counters."""
    notes = [_energy(call, device, pass_s)]
    return notes if device.startswith("cuda") else [*notes, _events(call)]


def _energy(call: Callable[[], object], device: str, pass_s: float) -> str:
    passes = min(max(ceil(METERED_S / max(pass_s, 1e-6)), 1), 100_000)
    with EnergyMeter(device) as meter:
        if meter.why is None:
            for _ in range(passes):
                call()
    if meter.energy_j is None:
        return f"energy: unavailable: {meter.why}"
    watts = meter.energy_j / meter.duration_s
    return f"energy: {meter.energy_j / passes:.4g} J a pass at {watts:.0f} W ({meter.source}, {passes} passes)"


def _events(call: Callable[[], object]) -> str:
    found = count_events(call)
    if isinstance(found, Unavailable):
        return f"hardware counters: {found}"
    shown = {name: getattr(found, name) for name in ("instructions", "cycles", "cache_misses", "branch_misses", "page_faults")}
    counted = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in shown.items() if value is not None)
    lacking = f"; without the rest: {found.lacking}" if found.lacking else ""
    return f"hardware counters of one pass: {counted or 'none'}{lacking}"
