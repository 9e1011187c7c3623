"""How area, leakage and energy change when a part of the base array is made larger, narrower or wider.

    base part, its new size ──Rules──> factor or addition, each rule a Constant with unit, source and status

    memory of capacity c (base c0)     energy of an access  x (c / c0) ^ exponent       area  x fixed + (1 - fixed) * c / c0
                                       leakage              x  c / c0
    multiply-add of W x I + O bits     energy, area, leakage  x e(W, I, O) / e(base),   e = multiply * W * I / 32^2 + add * O / 32
    outermost interface of B Gb/s      area and leakage in proportion to B              (a base that states an area: scaled)
    network of N bits                  a link of N bits into every PE

These are rules of thumb: right within a factor of two or so, meant for choosing between neighbours of one base array.
"""

from __future__ import annotations

from math import isfinite
from typing import Annotated

from ....core.spec import Constant, Spec, quantity
from ....target.array import OperandBits

WORD = 32  # bits of the words Horowitz gives energies for
HOROWITZ = "Horowitz, ISSCC 2014, 45 nm and 0.9 V, as cited in PMC8934428 table 3"


def _constant(value: float, unit: str, source: str, status: str = "assumed") -> Constant:
    return Constant(value=value, unit=unit, source=source, status=status)  # type: ignore[arg-type]


class Rules(Spec):
    """Scaling rules; every one can be set in the [rules] table of a design space."""

    sram_energy_exponent: Annotated[Constant, quantity("1", least=0.0, most=2.0)] = _constant(
        0.5, "1", f"bit lines grow with the side of a square; {HOROWITZ} has 10 pJ at 8 kB, and as remembered 20 at 32 kB and 100 at 1 MB"
    )
    """Energy of an access grows with this power of the capacity."""
    sram_fixed_area: Annotated[Constant, quantity("1", least=0.0, most=1.0)] = _constant(
        0.1, "1", "decoders and sense amplifiers of a middle-sized array, order of magnitude"
    )
    """Share of a base memory's area that does not shrink with its capacity."""
    multiply_pj: Annotated[Constant, quantity("pJ", least=0.0, most=1e6)] = _constant(3.1, "pJ", HOROWITZ, "read")
    """32-bit integer multiplication; others in proportion to the product of their widths."""
    add_pj: Annotated[Constant, quantity("pJ", least=0.0, most=1e6)] = _constant(0.1, "pJ", HOROWITZ, "read")
    """32-bit integer addition; others in proportion to their width."""
    interface_mm2_per_gbps: Annotated[Constant, quantity("mm2", least=0.0, most=1e3)] = _constant(
        0.01, "mm2", "a 32-bit LPDDR4 interface of about 136 Gb/s in 1 to 3 mm2, 16 nm class, order of magnitude"
    )
    """Area of the outermost memory's interface, each Gb/s, where the base states none."""
    interface_w_per_gbps: Annotated[Constant, quantity("W", least=0.0, most=1e3)] = _constant(
        1e-4, "W", "idle power of such an interface, order of magnitude"
    )
    """Leakage of the outermost memory's interface, each Gb/s, where the base states none."""
    link_mm2_per_bit: Annotated[Constant, quantity("mm2", least=0.0, most=1.0)] = _constant(
        2.5e-7, "mm2", "a quarter of a flip-flop of 1 um2 for each bit of the network and PE, 16 nm class, order of magnitude"
    )
    """Area of each PE's link to the network, each bit of its width."""

    def memory_energy(self, ratio: float) -> float:
        """Factor on a memory's energies when its capacity changes by `ratio`."""
        return float(ratio**self.sram_energy_exponent.value)

    def memory_area(self, ratio: float) -> float:
        fixed = self.sram_fixed_area.value
        return 1.0 if ratio == 1 else fixed + (1 - fixed) * ratio

    def arithmetic(self, bits: OperandBits, base: OperandBits) -> float:
        """Factor on a PE's arithmetic when operand widths change; 1 if the rules give the base no energy at all."""
        factor = self._multiply_add_pj(bits) / energy if (energy := self._multiply_add_pj(base)) else 1.0
        return factor if isfinite(factor) else 1.0

    def _multiply_add_pj(self, bits: OperandBits) -> float:
        return self.multiply_pj.value * bits.W * bits.I / WORD**2 + self.add_pj.value * bits.O / WORD
