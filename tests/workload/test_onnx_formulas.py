"""ONNX operators one by one: kind, FLOPs, loops and bytes against numbers worked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from onnx import TensorProto, helper

from ridgeline import capture
from tests.workload.onnx_nets import FLOAT, INT8, INT64, UINT8, int64s, save

# operator, input dimensions, attributes, (kind, FLOPs); conventions: see formulas.py
SINGLE: list[tuple[str, list[list[int]], dict[str, Any], tuple[str, int]]] = [
    ("Add", [[4, 1], [1, 5]], {}, ("pointwise", 20)),
    ("Gelu", [[4, 5]], {}, ("pointwise", 20)),
    ("Sum", [[4, 5], [4, 5], [4, 5]], {}, ("pointwise", 40)),
    ("ReduceSum", [[4, 5]], {"keepdims": 0}, ("reduction", 20)),
    ("ArgMax", [[4, 5]], {"axis": 1}, ("reduction", 20)),
    ("Softmax", [[4, 5]], {}, ("softmax", 100)),
    ("LogSoftmax", [[4, 5]], {}, ("softmax", 100)),
    ("LayerNormalization", [[4, 5], [5]], {}, ("norm", 140)),
    ("GroupNormalization", [[2, 4, 5], [4], [4]], {"num_groups": 2}, ("norm", 280)),
    ("InstanceNormalization", [[2, 4, 5], [4], [4]], {}, ("norm", 280)),
    ("RMSNormalization", [[4, 5], [5]], {}, ("norm", 80)),
    ("BatchNormalization", [[2, 4, 5], [4], [4], [4], [4]], {}, ("norm", 80)),
    ("LRN", [[1, 4, 2, 2]], {"size": 3}, ("norm", 128)),
    ("MaxPool", [[1, 2, 6, 6]], {"kernel_shape": [3, 2], "strides": [3, 2]}, ("pool", 6 * 2 * 2 * 3)),
    ("AveragePool", [[1, 2, 8]], {"kernel_shape": [2], "strides": [2]}, ("pool", 2 * 2 * 4)),
    ("GlobalAveragePool", [[1, 2, 6, 6]], {}, ("pool", 72)),
    ("DepthToSpace", [[1, 8, 2, 2]], {"blocksize": 2}, ("copy", 0)),
    ("Transpose", [[4, 5]], {}, ("copy", 0)),
    ("Concat", [[4, 5], [4, 5]], {"axis": 0}, ("copy", 0)),
    ("Cast", [[4, 5]], {"to": TensorProto.FLOAT16}, ("copy", 0)),
    ("Flatten", [[4, 5, 6]], {}, ("view", 0)),
    ("Identity", [[4, 5]], {}, ("view", 0)),
    ("Dropout", [[4, 5]], {}, ("view", 0)),
    ("RandomNormalLike", [[4, 5]], {}, ("create", 0)),
    ("Einsum", [[2, 3, 4], [2, 4, 5]], {"equation": "bij,bjk->bik"}, ("matmul", 2 * 2 * 3 * 4 * 5)),
    ("MatMul", [[2, 3, 4], [4, 5]], {}, ("matmul", 2 * 2 * 3 * 4 * 5)),
    ("Gemm", [[4, 3], [5, 4]], {"transA": 1, "transB": 1}, ("matmul", 2 * 3 * 5 * 4)),
    ("Conv", [[1, 4, 7, 7], [6, 2, 3, 3]], {"group": 2, "auto_pad": "SAME_UPPER", "strides": [2, 2]}, ("conv", 2 * 6 * 16 * 2 * 9)),
    ("Conv", [[1, 4, 7], [6, 4, 3]], {"auto_pad": "VALID"}, ("conv", 2 * 6 * 5 * 4 * 3)),
    ("ConvTranspose", [[1, 4, 5, 5], [4, 3, 2, 2]], {"strides": [2, 2]}, ("conv", 2 * 25 * 4 * 3 * 4)),
]


@pytest.mark.parametrize(("operator", "shapes", "attributes", "expected"), SINGLE, ids=[f"{case[0]}{i}" for i, case in enumerate(SINGLE)])
def test_operator(tmp_path: Path, operator: str, shapes: list[list[int]], attributes: dict[str, Any], expected: tuple[str, int]) -> None:
    names = [f"x{i}" for i in range(len(shapes))]
    inputs = {name: (FLOAT, shape) for name, shape in zip(names, shapes, strict=True)}
    workload = capture(save(tmp_path / "n.onnx", [helper.make_node(operator, names, ["y"], **attributes)], inputs, ["y"]))
    op = workload.ops[0]
    assert (op.kind, op.flops) == expected and workload.uncounted == ()
    read = 4 * sum(int(torch.tensor(shape).prod()) for shape in shapes)
    assert sum(o.bytes for o in op.inputs) == (0 if op.kind in ("view", "create") else read)


def test_same_padding_is_what_onnx_pads(tmp_path: Path) -> None:
    for auto, begin in (("SAME_UPPER", 0), ("SAME_LOWER", 1)):  # 8 wide, kernel 3, stride 2: one column in all
        node = helper.make_node("Conv", ["x", "w"], ["y"], auto_pad=auto, strides=[2])
        op = capture(save(tmp_path / f"{auto}.onnx", [node], {"x": (FLOAT, [1, 2, 8])}, ["y"], {"w": (FLOAT, [2, 2, 3])})).ops[0]
        assert op.loops[0].padding == (begin,) and op.loops[0].dims["P"] == 4


def test_resize_counts_its_taps(tmp_path: Path) -> None:
    scales = helper.make_tensor("scales", FLOAT, [4], [1.0, 1.0, 2.0, 2.0])
    for mode, flops in (("nearest", 0), ("linear", 2 * 4 * 72), ("cubic", 2 * 16 * 72)):
        node = helper.make_node("Resize", ["x", "", "scales"], ["y"], mode=mode)
        workload = capture(save(tmp_path / f"{mode}.onnx", [node], {"x": (FLOAT, [1, 2, 3, 3])}, ["y"], constants=[scales]))
        assert workload.flops == flops


def test_products_with_weights_are_linear(tmp_path: Path) -> None:
    weights = {"w": (FLOAT, [8, 16]), "b": (FLOAT, [16])}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Reshape", ["h", "shape"], ["f"]),
        helper.make_node("Gemm", ["f", "v", "b"], ["y"]),
    ]
    path = save(
        tmp_path / "n.onnx",
        nodes,
        {"x": (FLOAT, [2, 3, 8])},
        ["y"],
        weights | {"v": (FLOAT, [16, 16])},
        constants=[int64s("shape", [6, 16])],
    )
    first, view, second = capture(path).ops
    assert (first.kind, second.kind, view.kind, view.bytes) == ("linear", "linear", "view", 0)
    assert first.loops[0].dims == {"B": 1, "M": 6, "N": 16, "K": 8}
    assert second.inputs[0].value == first.outputs[0].value  # the reshape shares its storage
    assert second.bytes_of("weights") == 4 * (256 + 16)


def test_transposed_products_keep_their_loops(tmp_path: Path) -> None:
    for attributes, shapes in (({}, ([3, 4], [4, 5])), ({"transA": 1}, ([4, 3], [4, 5])), ({"transB": 1}, ([3, 4], [5, 4]))):
        inputs = {name: (FLOAT, shape) for name, shape in zip("ab", shapes, strict=True)}
        op = capture(save(tmp_path / "n.onnx", [helper.make_node("Gemm", ["a", "b"], ["y"], **attributes)], inputs, ["y"])).ops[0]
        assert op.loops[0].dims == {"B": 1, "M": 3, "N": 5, "K": 4}


def test_gather_touches_only_what_it_returns(tmp_path: Path) -> None:
    node = helper.make_node("Gather", ["table", "ids"], ["y"])
    op = capture(save(tmp_path / "n.onnx", [node], {"ids": (INT64, [2, 3])}, ["y"], {"table": (FLOAT, [1000, 8])})).ops[0]
    assert (op.kind, op.bytes_of("weights"), op.bytes_of("activations")) == ("embedding", 4 * 48, 8 * 6 + 4 * 48)


def test_quantised_products_compute_in_integers(tmp_path: Path) -> None:
    scale, zero = {"s": (FLOAT, [])}, {"z": (UINT8, []), "wz": (INT8, [])}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("QLinearConv", ["q", "s", "z", "cw", "s", "wz", "s", "z"], ["c"], kernel_shape=[3, 3]),
        helper.make_node("ConvInteger", ["q", "cw", "z", "wz"], ["ci"]),
        helper.make_node("QLinearMatMul", ["c", "s", "z", "mw", "s", "wz", "s", "z"], ["m"]),
        helper.make_node("MatMulInteger", ["c", "mw", "z", "wz"], ["y"]),
    ]
    weights = {**scale, **zero, "cw": (INT8, [4, 2, 3, 3]), "mw": (INT8, [6, 5])}
    workload = capture(save(tmp_path / "n.onnx", nodes, {"x": (FLOAT, [1, 2, 8, 8])}, ["ci", "m", "y"], weights))
    quantise, *rest = workload.ops
    assert (quantise.kind, quantise.flops) == ("pointwise", 128)
    assert [(op.kind, op.flops, op.dtype) for op in rest] == [("conv", 2 * 4 * 36 * 18, "uint8")] * 2 + [
        ("linear", 2 * 24 * 5 * 6, "uint8")
    ] * 2
    assert rest[0].bytes_of("weights") == 72 + 4 + 1 + 1
    assert workload.parameters == 72 + 30 + 1 and workload.uncounted == ()


def test_four_bit_weights_take_half_a_byte(tmp_path: Path) -> None:
    nodes = [helper.make_node("DequantizeLinear", ["w", "s"], ["d"]), helper.make_node("MatMul", ["x", "d"], ["y"])]
    weights = {"w": (TensorProto.INT4, [64, 32]), "s": (FLOAT, [])}
    unpack, product = capture(save(tmp_path / "n.onnx", nodes, {"x": (FLOAT, [2, 64])}, ["y"], weights)).ops
    assert sum(o.bytes for o in unpack.inputs) == 64 * 32 // 2 + 4
    assert product.kind == "linear"


@pytest.mark.parametrize("flat", [False, True])
def test_attention_operator(tmp_path: Path, flat: bool) -> None:
    """Four query heads share two key-value heads; five new keys follow three past ones."""
    query, key = ((FLOAT, [2, 5, 4 * 8]), (FLOAT, [2, 5, 2 * 8])) if flat else ((FLOAT, [2, 4, 5, 8]), (FLOAT, [2, 2, 5, 8]))
    inputs = {"q": query, "k": key, "v": key, "past_key": (FLOAT, [2, 2, 3, 8]), "past_value": (FLOAT, [2, 2, 3, 8])}
    heads = {"q_num_heads": 4, "kv_num_heads": 2} if flat else {}
    node = helper.make_node("Attention", ["q", "k", "v", "", "past_key", "past_value"], ["y", "present_key", "present_value"], **heads)
    op = capture(save(tmp_path / "n.onnx", [node], inputs, ["y", "present_key", "present_value"])).ops[0]
    assert (op.kind, op.flops, len(op.loops)) == ("attention", 2 * 2 * (2 * 4) * 5 * 8 * 8, 2)
    assert op.bytes_of("kv_cache") == 4 * 2 * (2 * 2 * 3 * 8 + 2 * 2 * 8 * 8)
