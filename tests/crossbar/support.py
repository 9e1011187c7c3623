"""Chips for the crossbar's tests, and the same arithmetic done again with whole numbers and fractions.

chip(**changes) ──> CrossbarSpec of the reference cases' base configuration, changed
product_of_fractions(x, w, chip) ──> codes and outputs by plain loops, no tensor and no float rounding after quantisation
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product
from typing import Any

from ridgeline.core.spec import parse_spec
from ridgeline.target.crossbar import CrossbarSpec

Matrix = list[list[float]]


def chip(**changes: Any) -> CrossbarSpec:
    """Changes are named section_field: chip(adc_levels=16, operands_x_slices=[1, 3])."""
    data: dict[str, Any] = {
        "version": 1,
        "kind": "crossbar",
        "name": "case",
        "array": {"rows": 32, "columns": 32},
        "operands": {"x_slices": [1, 1, 2, 2], "w_slices": [1, 1, 2, 2], "x_granularity": [1, 64], "w_granularity": [64, 64]},
        "dac": {"levels": 4, "vread_v": 0.2},
        "cell": {"high_s": 1e-5, "low_s": 1e-8, "levels": 4},
        "adc": {"levels": 4096},
    }
    for name, value in changes.items():
        section, _, field = name.partition("_")
        data[section][field] = value
    return parse_spec(CrossbarSpec, data, "case.toml")


def chip_of_case(cfg: dict[str, Any]) -> CrossbarSpec:
    """The chip a reference case was computed on; its noise is not the chip's, it comes as conductances and voltages."""
    return chip(
        array_rows=cfg["wp"][0], array_columns=cfg["wp"][1], operands_format="bfp" if cfg["bw_e"] else "int",
        operands_x_slices=cfg["xs"], operands_w_slices=cfg["ws"], operands_x_granularity=cfg["xg"], operands_w_granularity=cfg["wg"],
        operands_x_tile_rows=cfg["xp"][0], dac_levels=cfg["rdac"], dac_vread_v=cfg["vread"], cell_high_s=cfg["HGS"], cell_low_s=cfg["LGS"],
        cell_levels=cfg["g_level"], adc_levels=cfg["radc"],
    )  # fmt: skip


class Quantised:
    """One matrix as integers, element by element: `integer[h][w]`, and the value of one in `step[h][w]`."""

    def __init__(self, matrix: Matrix, widths: tuple[int, ...], number_format: str, tile: tuple[int, int], granularity: Any) -> None:
        height, width, bits = len(matrix), len(matrix[0]), sum(widths)
        named = {"per-matrix": (height, width), "per-row": (1, width), "per-col": (height, 1)}
        wanted = named[granularity] if isinstance(granularity, str) else granularity
        block = [math.ceil(size / cells) * cells for size, cells in zip(wanted, tile, strict=True)]
        maxima: dict[tuple[int, int], float] = {}
        for h, w in product(range(height), range(width)):
            key = (h // block[0], w // block[1])
            maxima[key] = max(maxima.get(key, 0.0), abs(matrix[h][w]))
        self.widths, self.bits = widths, bits
        self.integer = [[0] * width for _ in range(height)]
        self.step = [[Fraction(0)] * width for _ in range(height)]
        for h, w in product(range(height), range(width)):
            largest = 2 ** (bits - 1) - 1
            m = maxima[h // block[0], w // block[1]]
            if number_format == "int":
                self.step[h][w] = Fraction(m) / largest
                self.integer[h][w] = round(matrix[h][w] / m * largest) if m else 0
            else:
                self.step[h][w] = Fraction(2) ** (math.floor(math.log2(m + 1e-10)) + 2 - bits)
                self.integer[h][w] = max(-largest - 1, min(largest, round(Fraction(matrix[h][w]) / self.step[h][w])))

    def digit(self, h: int, w: int, place: int) -> int:
        below = sum(self.widths[place + 1 :])
        return (self.integer[h][w] % 2**self.bits) // 2**below % 2 ** self.widths[place]

    def weight(self, place: int) -> int:
        return (-1 if place == 0 else 1) * 2 ** sum(self.widths[place + 1 :])


Codes = dict[tuple[int, int, int, int, int], int]


def product_of_fractions(x: Matrix, w: Matrix, on: CrossbarSpec) -> tuple[Codes, list[list[Fraction]]]:
    """Codes by (array along K, slice of x, slice of w, m, n), and the outputs."""
    o, rows = on.operands, on.array.rows
    a = Quantised(x, o.x_slices, o.format, (o.x_tile_rows, rows), o.x_granularity)
    b = Quantised(w, o.w_slices, o.format, (rows, on.array.columns), o.w_granularity)
    codes: Codes = {}
    out = [[Fraction(0)] * len(w[0]) for _ in x]
    for m, n, i, j in product(range(len(x)), range(len(w[0])), range(len(a.widths)), range(len(b.widths))):
        most_x, most_w, adc = 2 ** a.widths[i] - 1, 2 ** b.widths[j] - 1, on.adc_levels[j]
        for k in range(math.ceil(len(w) / rows)):
            share = Fraction(0)
            for r in range(k * rows, min(len(w), (k + 1) * rows)):
                voltage = Fraction(round(Fraction(a.digit(m, r, i), most_x) * (on.dac.levels - 1)), on.dac.levels - 1)
                conductance = Fraction(round(Fraction(b.digit(r, n, j), most_w) * (on.cell.levels - 1)), on.cell.levels - 1)
                share += voltage * conductance
            code = codes[k, i, j, m, n] = round(share / rows * (adc - 1))
            worth = Fraction(code, adc - 1) * rows * most_x * most_w * a.weight(i) * b.weight(j)
            out[m][n] += worth * a.step[m][k * rows] * b.step[k * rows][n]
    return codes, out
