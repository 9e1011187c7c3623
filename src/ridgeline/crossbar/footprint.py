"""Bytes of the intermediate tensors of one product, were all of them written to memory at once.

    plan, m rows ──materialised_bytes──> {im2col, slices, products, adc}      [B], all groups together
      im2col     m * K                                   patches of the input
      slices     (m * Sx + N * Sw * planes) * K'         digits of both operands; K' = whole arrays
      products   m * N * arrays * Sx * Sw                column sums of every slice pair
      adc        2 * products                            what is rounded, and the codes

No engine but `reference` does this: it is what the others save. Voltages, conductances and random numbers would come on top.
"""

from __future__ import annotations

from .plan import Plan

FLOAT32_BYTES = 4
ADC_TENSORS = 2  # a conversion's argument and its result; both exist while it runs


def materialised_bytes(plan: Plan, m: int, element_bytes: int = FLOAT32_BYTES) -> dict[str, int]:
    """Of m rows: images times output positions, or rows of a matrix."""
    padded_k = plan.arrays * plan.rows
    planes = 2 if plan.signed else 1
    columns = plan.n + (plan.chip.operands.sign == "offset")  # the column that tells the sum of inputs
    x_slices, w_slices = len(plan.x.widths), len(plan.w.widths)
    products = m * columns * plan.arrays * x_slices * w_slices
    elements = {
        "im2col": m * plan.k,
        "slices": (m * x_slices + columns * w_slices * planes) * padded_k,
        "products": products,
        "adc": ADC_TENSORS * products,
    }
    return {name: count * plan.groups * element_bytes for name, count in elements.items()}
