"""Index arithmetic of the emitted C: sums of named things times whole numbers.

4*k1 + k0 + 3   =   Sum((("k1", 4), ("k0", 1)), 3)        a name may be any C expression that binds tightly
turns(5, …)     =   how often a loop may turn before a guard's limit: a number where nothing outside matters
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .nest import affine


@dataclass(frozen=True, slots=True)
class Sum:
    """Σ name * factor + constant."""

    terms: tuple[tuple[str, int], ...] = ()
    constant: int = 0

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.terms + other.terms, self.constant + other.constant)

    def times(self, factor: int) -> Sum:
        return Sum(tuple((name, f * factor) for name, f in self.terms), self.constant * factor) if factor else Sum()

    def __str__(self) -> str:
        return affine(self.terms, self.constant)


def offset_of(index: Mapping[str, Sum], strides: Mapping[str, int]) -> Sum:
    """Where the element lies, from the index and the stride of each dimension."""
    return total(index[dim].times(stride) for dim, stride in strides.items())


def total(parts: Iterable[Sum]) -> Sum:
    found = Sum()
    for part in parts:
        found += part
    return found


def turns(most: str, limit: int, done: Sum, factor: int) -> str:
    """min(most, ⌈(limit - done) / factor⌉), zero or less where the limit is passed already."""
    left = limit - done.constant
    if not done.terms:
        found = max(0, -(-left // factor))
        return str(min(int(most), found)) if most.isdigit() else f"least({most}, {found})"
    rest = f"{left + factor - 1} - ({Sum(done.terms)})"
    return f"least({most}, {rest})" if factor == 1 else f"least({most}, ({rest}) / {factor})"
