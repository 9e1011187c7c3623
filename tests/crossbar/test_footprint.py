"""Bytes of the tensors a product would write, against the tensors themselves."""

from __future__ import annotations

import pytest
import torch

from ridgeline.crossbar.engine.reference import encode_input, encode_weight, matmul
from ridgeline.crossbar.footprint import materialised_bytes
from ridgeline.crossbar.plan import Plan
from tests.crossbar.support import chip


@pytest.mark.parametrize(("rows", "m", "k", "n"), [(32, 5, 128, 64), (64, 3, 64, 128), (16, 7, 192, 64)])
def test_bytes_are_those_of_the_reference_tensors(rows: int, m: int, k: int, n: int) -> None:
    """K and N of whole blocks, so that the reference fills in no more than the arrays do."""
    on = chip(array_rows=rows, array_columns=rows)
    x, w = torch.randn(m, k), torch.randn(k, n)
    analog = matmul(x, w, on)
    digits = encode_input(x, on).digits.numel() + encode_weight(w, on).digits.numel()
    wanted = {"im2col": x.numel(), "slices": digits, "products": analog.codes.numel(), "adc": 2 * analog.codes.numel()}
    assert materialised_bytes(Plan(on, k, n), m) == {name: 4 * count for name, count in wanted.items()}


def test_rows_not_in_use_are_held_too() -> None:
    """70 rows are three arrays of 32."""
    found = materialised_bytes(Plan(chip(), 70, 40), 5)
    assert found == {"im2col": 5 * 70 * 4, "slices": (5 + 40) * 96 * 4 * 4, "products": 5 * 40 * 3 * 16 * 4, "adc": 5 * 40 * 3 * 32 * 4}


def test_groups_and_wider_elements_multiply() -> None:
    one = materialised_bytes(Plan(chip(), 70, 40), 5)
    assert materialised_bytes(Plan(chip(), 70, 40, groups=3), 5, element_bytes=8) == {name: 6 * size for name, size in one.items()}


def test_signs_cost_cells_of_their_own() -> None:
    pair = materialised_bytes(Plan(chip(operands_sign="differential"), 64, 40), 5)
    assert pair["slices"] == (5 * 4 + 40 * 4 * 2) * 64 * 4
    offset = materialised_bytes(Plan(chip(operands_sign="offset"), 64, 40), 5)
    assert offset["products"] == 5 * 41 * 2 * 16 * 4 and offset["slices"] == (5 + 41) * 4 * 64 * 4
