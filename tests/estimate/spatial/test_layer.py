"""Captured ops as loop nests: what each kind becomes, and that no multiplication or element is lost on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ridgeline.core.errors import OptionError
from ridgeline.estimate.spatial.layer import RELEVANT, Layer, layers_of
from ridgeline.target.array import DIMENSIONS, OperandBits
from ridgeline.workload.capture import capture
from tests.estimate.spatial.cases import Case, cases
from tests.estimate.support import pointwise

BITS = OperandBits(W=4, I=8, O=24, F=16)


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


class Product(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b


def layers(module: nn.Module, *shapes: tuple[int, ...]) -> list[Layer]:
    """The loop nests of a module's only op with any; its multiplications are all there."""
    work = capture(module, inputs=tuple(torch.zeros(shape) for shape in shapes))
    found = [(op, nests) for op in work.ops if (nests := layers_of(op, BITS))]
    assert len(found) == 1
    op, nests = found[0]
    assert sum(layer.macs for layer in nests) * 2 == op.matmul_flops
    assert all(layer.bits == BITS for layer in nests)
    return nests


def only(module: nn.Module, *shapes: tuple[int, ...]) -> Layer:
    (layer,) = layers(module, *shapes)
    return layer


def sizes(layer: Layer) -> dict[str, int]:
    return {dim: size for dim, size in layer.dims.items() if size > 1}


def test_convolution() -> None:
    layer = only(nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (2, 4, 9, 11))
    assert sizes(layer) == {"B": 2, "K": 6, "C": 4, "P": 5, "Q": 9, "R": 3, "S": 2}
    assert (layer.kind, layer.stride, layer.dilation, layer.padding, layer.input_size) == ("conv", (2, 1), (1, 2), (1, 0), (9, 11))
    assert [layer.elements(op) for op in "WIO"] == [6 * 4 * 3 * 2, 2 * 4 * 9 * 11, 2 * 6 * 5 * 9]


def test_input_rows_no_tap_reaches_are_not_touched() -> None:
    # Stride 2 with one tap on 8 rows and columns: rows 0 2 4 6, columns likewise.
    layer = only(nn.Conv2d(3, 5, 1, stride=2), (1, 3, 8, 8))
    assert (layer.input_size, layer.elements("I")) == ((8, 8), 3 * 4 * 4)


def test_grouped_convolution_has_channels_of_a_group() -> None:
    layer = only(nn.Conv2d(4, 6, 3, groups=2), (1, 4, 9, 9))
    assert sizes(layer) == {"G": 2, "K": 3, "C": 2, "P": 7, "Q": 7, "R": 3, "S": 3}
    assert layer.kind == "conv"
    assert [layer.elements(op) for op in "WIO"] == [6 * 2 * 9, 4 * 81, 6 * 49]


def test_depthwise_convolution_is_its_own_kind() -> None:
    layer = only(nn.Conv2d(4, 8, 3, groups=4, dilation=2), (1, 4, 9, 9))
    assert sizes(layer) == {"G": 4, "K": 2, "P": 5, "Q": 5, "R": 3, "S": 3}
    assert (layer.kind, layer.dilation) == ("depthwise", (2, 2))


def test_one_dimensional_convolution_runs_along_y() -> None:
    layer = only(nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 9))
    assert sizes(layer) == {"B": 2, "K": 6, "C": 4, "P": 5, "R": 3}
    assert (layer.stride, layer.padding, layer.input_size) == ((2, 1), (1, 0), (9, 1))
    assert layer.elements("I") == 2 * 4 * 9


def test_an_image_without_its_batch_is_as_large_as_with_it() -> None:
    conv = nn.Conv2d(3, 8, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(1, 2))
    alone, batched = only(conv, (3, 16, 20)), only(conv, (1, 3, 16, 20))
    assert alone.input_size == batched.input_size == (16, 20)
    assert alone.dims == batched.dims and alone.elements("I") == 3 * 16 * 20
    assert only(nn.Conv1d(4, 6, 3), (4, 9)).input_size == (9, 1)


@pytest.mark.parametrize(
    ("module", "shape", "dims"),
    [
        (nn.ConvTranspose2d(4, 6, 3, stride=2), (1, 4, 5, 5), {"K": 6, "C": 36, "P": 25}),
        (nn.ConvTranspose2d(4, 6, 3, groups=2), (1, 4, 5, 5), {"G": 2, "K": 3, "C": 18, "P": 25}),
        (nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4), {"K": 3, "C": 16, "P": 54}),
    ],
)
def test_what_has_no_such_window_is_the_matmul_with_its_multiplications(
    module: nn.Module, shape: tuple[int, ...], dims: dict[str, int]
) -> None:
    layer = only(module, shape)
    assert sizes(layer) == dims
    assert (layer.kind, layer.stride, layer.padding) == ("conv", (1, 1), (0, 0))


def test_linear_layer_is_a_matmul_over_all_rows() -> None:
    layer = only(nn.Linear(5, 7), (2, 3, 5))
    assert sizes(layer) == {"K": 7, "C": 5, "P": 6}
    assert (layer.kind, [layer.elements(op) for op in "WIO"]) == ("matmul", [35, 30, 42])


def test_attention_is_two_matmuls_with_a_group_a_head() -> None:
    scores, values = layers(Attention(), (2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4))
    assert sizes(scores) == {"G": 6, "P": 5, "K": 6, "C": 4}
    assert sizes(values) == {"G": 6, "P": 5, "K": 4, "C": 6}
    assert scores.kind == values.kind == "attention"
    assert (scores.name, values.name) == ("scaled_dot_product_attention.0", "scaled_dot_product_attention.1")


def test_batched_matmul_shares_its_second_operand_or_not() -> None:
    shared, own = only(Product(), (2, 3, 4), (4, 5)), only(Product(), (2, 3, 4), (2, 4, 5))
    assert (sizes(shared), shared.kind) == ({"B": 2, "P": 3, "K": 5, "C": 4}, "matmul")
    assert (sizes(own), own.kind) == ({"G": 2, "P": 3, "K": 5, "C": 4}, "attention")
    assert (shared.elements("W"), own.elements("W")) == (20, 40)


def test_first_operand_that_is_the_same_for_a_batch_is_read_as_weights() -> None:
    layer = only(Product(), (6, 4), (2, 4, 5))
    assert (sizes(layer), layer.kind) == ({"B": 2, "P": 5, "K": 6, "C": 4}, "matmul")
    assert [layer.elements(op) for op in "WIO"] == [6 * 4, 2 * 4 * 5, 2 * 6 * 5]


def test_op_without_multiplications_has_no_layer() -> None:
    assert layers_of(pointwise("relu", 8, "x", "y"), BITS) == []


def test_dimensions_are_filled_up_and_checked() -> None:
    assert set(Layer("l", {"K": 2}).dims) == set(DIMENSIONS)
    for dims, named in (({"K": 0}, "dims.K = 0"), ({"X": 3}, "dims.X = 3"), ({"P": -1}, "dims.P = -1")):
        with pytest.raises(OptionError, match=f"{named} in layer l"):
            Layer("l", dims)


def test_input_size_not_given_is_what_the_window_spans() -> None:
    assert Layer("l", {"P": 4, "R": 3}, stride=(2, 1), padding=(1, 0)).input_size == (7, 1)
    assert Layer("l", {"P": 4, "R": 3}, stride=(2, 1), dilation=(3, 1), padding=(1, 0)).input_size == (11, 1)
    assert Layer("l", {"P": 1, "R": 1}, padding=(2, 2)).input_size == (1, 1)


def test_changed_dimensions_keep_the_stored_input() -> None:
    part = Layer("l", {"P": 8, "R": 3, "K": 4}, padding=(1, 0)).with_dims(P=4, K=2)
    assert (part.dims["P"], part.dims["K"], part.input_size) == (4, 2, (8, 1))


def test_layer_in_json() -> None:
    data = Layer("l", {"K": 2, "P": 3}, bits=BITS, kind="matmul", calls=5).to_json()
    assert data["dims"] == {"B": 1, "G": 1, "K": 2, "C": 1, "P": 3, "Q": 1, "R": 1, "S": 1}
    assert (data["layer"], data["kind"], data["macs"], data["calls"], data["bits"]["O"]) == ("l", "matmul", 6, 5, 24)
    assert set(data) == {"layer", "kind", "dims", "stride", "dilation", "padding", "input_size", "bits", "macs", "calls"}


def test_relevant_dimensions_are_those_that_change_the_element() -> None:
    # Raising one dimension's size brings new elements of an operand exactly if it is relevant to it.
    small = dict.fromkeys(DIMENSIONS, 2)
    for operand, relevant in RELEVANT.items():
        for dim in DIMENSIONS:
            more = Layer("l", small | {dim: 3}).elements(operand) > Layer("l", small).elements(operand)
            assert more == (dim in relevant), (operand, dim)


@given(cases(), st.sampled_from("WIO"))
def test_elements_are_the_distinct_ones(case: Case, operand: str) -> None:
    layer = case.layer
    seen: set[Any] = set()
    d = layer.dims
    for b, g, k, c in ((b, g, k, c) for b in range(d["B"]) for g in range(d["G"]) for k in range(d["K"]) for c in range(d["C"])):
        for p, q, r, s in ((p, q, r, s) for p in range(d["P"]) for q in range(d["Q"]) for r in range(d["R"]) for s in range(d["S"])):
            y = p * layer.stride[0] + r * layer.dilation[0] - layer.padding[0]
            x = q * layer.stride[1] + s * layer.dilation[1] - layer.padding[1]
            if operand == "I" and 0 <= y < layer.input_size[0] and 0 <= x < layer.input_size[1]:
                seen.add((b, g, c, y, x))
            elif operand != "I":
                seen.add((g, k, c, r, s) if operand == "W" else (b, g, k, p, q))
    assert layer.elements(operand) == len(seen)
