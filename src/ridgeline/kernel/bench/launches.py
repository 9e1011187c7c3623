"""The Triton kernels a call launched, and how much of a multiprocessor each can fill.

    recorded() ──[(kernel, grid, compiled)]──> KernelUse(name, grid, registers, spills, shared, warps, occupancy)
      blocks on a multiprocessor = least of what registers, shared memory, warps and the block limit allow
      occupancy = blocks * warps a block / warps of a multiprocessor

Registers are handed out to warps in lots of 256, in four partitions; each block's shared memory in lots of 128 B, and 1 KiB for the system.
Defaults are compute capability 9.0's. The grid may be too small to fill the device: that is not in the number.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What one has to share out."""

    registers: int = 65536
    shared_bytes: int = 228 * 1024
    warps: int = 64
    blocks: int = 32


@dataclass(frozen=True, slots=True)
class KernelUse:
    """One kernel as it was launched; None where the compiler's answer could not be read."""

    name: str
    grid: tuple[int, ...]
    launches: int
    registers: int | None
    spills: int | None
    shared_bytes: int | None
    warps: int | None
    occupancy: float | None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "grid": list(self.grid)}


def occupancy(registers: int, shared_bytes: int, warps: int, sm: Multiprocessor | None = None) -> float:
    """Share of a multiprocessor's warps that can be resident; 0 for a block that does not fit at all."""
    sm = sm or Multiprocessor()
    a_warp = max(1, -(-registers * 32 // 256)) * 256
    by_registers = sm.registers // 4 // a_warp * 4 // warps
    by_shared = sm.shared_bytes // (-(-shared_bytes // 128) * 128 + 1024)
    return min(by_registers, by_shared, sm.warps // warps, sm.blocks) * warps / sm.warps


def multiprocessor(device: str) -> Multiprocessor:
    """Of this device, as far as torch knows it."""
    found: Any = torch.cuda.get_device_properties(torch.device(device)) if device.startswith("cuda") else None
    default = Multiprocessor()
    return Multiprocessor(
        getattr(found, "regs_per_multiprocessor", default.registers),
        getattr(found, "shared_memory_per_multiprocessor", default.shared_bytes),
        getattr(found, "max_threads_per_multi_processor", default.warps * 32) // 32,
        default.blocks,
    )


def kernels_used(launches: Iterable[tuple[Any, tuple[int, ...], Any]], sm: Multiprocessor | None = None) -> list[KernelUse]:
    """Each kernel once, in the order of first launch; the grid is its first."""
    counted: dict[tuple[str, Any], tuple[tuple[int, ...], int, Any]] = {}
    for kernel, grid, compiled in launches:
        key = (_name(kernel, compiled), getattr(compiled, "hash", None))
        first, count, _ = counted.get(key, (grid, 0, compiled))
        counted[key] = (first, count + 1, compiled)
    return [_use(name, grid, count, compiled, sm) for (name, _), (grid, count, compiled) in counted.items()]


def _use(name: str, grid: tuple[int, ...], count: int, compiled: Any, sm: Multiprocessor | None) -> KernelUse:
    _load(compiled)
    metadata = getattr(compiled, "metadata", None)
    registers, spills = _number(compiled, "n_regs"), _number(compiled, "n_spills")
    shared, warps = _number(metadata, "shared"), _number(metadata, "num_warps")
    known = registers is not None and shared is not None and bool(warps)
    filled = occupancy(registers or 0, shared or 0, warps or 1, sm) if known else None
    return KernelUse(name, tuple(grid), count, registers, spills, shared, warps, filled)


def _load(compiled: Any) -> None:
    """Registers and spills are known once the binary is loaded; a launched kernel's is, unless a fast path skipped it."""
    if compiled is not None and getattr(compiled, "n_regs", None) is None:
        with suppress(Exception):  # private to Triton: another version may want something else, and then we know less
            compiled._init_handles()


def _name(kernel: Any, compiled: Any) -> str:
    named = getattr(compiled, "name", None) or getattr(kernel, "__name__", None) or getattr(getattr(kernel, "fn", None), "__name__", None)
    return str(named or "kernel")


def _number(holder: Any, name: str) -> int | None:
    value = getattr(holder, name, None)
    return int(value) if isinstance(value, int) else None
