"""ONNX files against torch's own capture of the same nets, the options that shape them, and files that are broken or unsafe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from torch import nn

from ridgeline import capture
from ridgeline.core.errors import CaptureError, MissingExtraError, ModelFileError, OptionError, RidgelineError
from ridgeline.workload.case import CaseOptions
from ridgeline.workload.graph import Op, Workload
from ridgeline.workload.onnx_file import capture_onnx
from ridgeline.workload.onnx_walk import layer_of
from tests.workload.onnx_nets import BOOL, FLOAT, INT64, Block, ConvNet, Recurrent, ResponseNorm, export, save


def products(workload: Workload) -> list[Op]:
    return [op for op in workload.ops if op.kind in ("conv", "linear")]


def flops_by_kind(workload: Workload, *kinds: str) -> dict[str, int]:
    return {kind: sum(op.flops for op in workload.ops if op.kind == kind) for kind in kinds}


def test_convolutions_equal_torch(tmp_path: Path) -> None:
    module, x = ConvNet(), torch.randn(2, 3, 32, 32)
    ours, theirs = capture(export(module, x, tmp_path / "n.onnx")), capture(module, x)
    assert ours.matmul_flops == theirs.matmul_flops > 0
    assert [op.bytes for op in products(ours)] == [op.bytes for op in products(theirs)]
    assert [op.loops for op in products(ours)] == [op.loops for op in products(theirs)]
    assert [op.layer for op in products(ours)] == [op.layer for op in products(theirs)] == ["stem.0", "grouped", "depthwise", "up", "head"]
    assert flops_by_kind(ours, "pointwise", "pool", "reduction") == flops_by_kind(theirs, "pointwise", "pool", "reduction")
    assert (ours.parameters, ours.input_bytes, ours.output_bytes) == (theirs.parameters, theirs.input_bytes, theirs.output_bytes)
    assert ours.peak_activation_bytes == theirs.peak_activation_bytes
    assert (ours.batch, ours.dtype, ours.captured_by, ours.uncounted) == (2, "float32", "onnx", ())


def test_encoder_block_equals_torch(tmp_path: Path) -> None:
    module, x = Block(), torch.randn(2, 10, 32)
    ours, theirs = capture(export(module, x, tmp_path / "n.onnx")), capture(module, x)
    assert ours.matmul_flops == theirs.matmul_flops > 0
    assert [op.bytes for op in products(ours)] == [op.bytes for op in products(theirs)]
    assert flops_by_kind(ours, "softmax", "norm") == flops_by_kind(theirs, "softmax", "norm")
    assert ours.uncounted == ()


@pytest.mark.parametrize(("kind", "layers", "both_ways"), [("LSTM", 2, True), ("GRU", 1, False), ("RNN", 1, True)])
def test_recurrent_nets_equal_torch(tmp_path: Path, kind: str, layers: int, both_ways: bool) -> None:
    module, x = Recurrent(kind, layers, both_ways), torch.randn(5, 2, 8)
    ours, theirs = capture(export(module, x, tmp_path / "n.onnx")), capture(module, x)
    assert ours.matmul_flops == theirs.matmul_flops > 0
    assert flops_by_kind(ours, "recurrent") == flops_by_kind(theirs, "recurrent")


def test_shape_arithmetic_is_followed_through_branches(tmp_path: Path) -> None:
    module, x = ResponseNorm(), torch.randn(1, 6, 4, 4)
    path = export(module, x, tmp_path / "n.onnx", dynamic_axes={"x": {0: "batch"}})
    assert any(node.op_type == "If" for node in onnx.load(path).graph.node)
    ours, theirs = capture(path, batch=3), capture(module, torch.randn(3, 6, 4, 4))
    assert ours.flops == theirs.flops and ours.uncounted == ()
    assert any("done when the model is loaded" in note for note in ours.notes)


def test_open_batch_takes_the_option(tmp_path: Path) -> None:
    module, x = ConvNet(), torch.randn(1, 3, 32, 32)
    path = export(module, x, tmp_path / "n.onnx", dynamic_axes={"x": {0: "images"}})
    one, four = capture(path), capture(path, batch=4)
    assert (one.batch, four.batch) == (1, 4)
    assert four.flops == 4 * one.flops and four.parameters == one.parameters
    assert four.matmul_flops == capture(module, torch.randn(4, 3, 32, 32)).matmul_flops
    assert "input dimension images set to 4" in four.notes
    assert one.rebatch is not None and one.rebatch(4).flops == four.flops


def test_fixed_batch_refuses_another(tmp_path: Path) -> None:
    path = export(ConvNet(), torch.randn(2, 3, 32, 32), tmp_path / "n.onnx")
    assert capture(path, batch=2).batch == 2
    with pytest.raises(OptionError, match="fixes the batch to 2"):
        capture(path, batch=3)


@pytest.mark.parametrize("options", [CaseOptions(phase="decode"), CaseOptions(batch=0), CaseOptions(context=0), CaseOptions(context=8)])
def test_options_that_make_no_sense(tmp_path: Path, options: CaseOptions) -> None:
    path = save(tmp_path / "n.onnx", [helper.make_node("Relu", ["x"], ["y"])], {"x": (FLOAT, ["n", 4])}, ["y"])
    with pytest.raises(OptionError):
        capture_onnx(path, options)


def test_lengths_take_the_context(tmp_path: Path) -> None:
    path = save(tmp_path / "n.onnx", [helper.make_node("Relu", ["x"], ["y"])], {"x": (FLOAT, ["batch", "sequence_length", 4])}, ["y"])
    with pytest.raises(CaptureError, match=r"(?s)'x'.*dimension 1 \(sequence_length\).*--context"):
        capture(path)
    assert capture(path, batch=2, context=16).flops == 2 * 16 * 4


@pytest.mark.parametrize(
    ("shape", "named"), [(["n", 3, "height", 8], r"dimension 2 \(height\)"), (["n", 3, None, 8], "dimension 2"), (None, "no shape")]
)
def test_other_open_dimensions_are_named(tmp_path: Path, shape: list[Any], named: str) -> None:
    path = save(tmp_path / "n.onnx", [helper.make_node("Relu", ["pixels"], ["y"])], {"pixels": (FLOAT, shape)}, ["y"])
    with pytest.raises(CaptureError, match=f"'pixels' has .*{named}"):
        capture(path)


def cached_attention(path: Path) -> str:
    """One new token against `past` keys: Concat, Transpose, MatMul, as decoders are exported."""
    nodes = [
        helper.make_node("Concat", ["past_key_values.0.key", "key"], ["present.0.key"], axis=2),
        helper.make_node("Transpose", ["present.0.key"], ["turned"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["query", "turned"], ["scores"]),
        helper.make_node("Add", ["scores", "attention_mask"], ["y"]),
    ]
    new = (FLOAT, ["batch", 2, "sequence", 8])
    inputs = {"query": new, "key": new, "past_key_values.0.key": (FLOAT, ["batch", 2, "past_sequence", 8])}
    return save(path, nodes, inputs | {"attention_mask": (FLOAT, ["batch", 1, 1, "total_length"])}, ["y", "present.0.key"])


def test_past_keys_are_cache_and_fill_the_context(tmp_path: Path) -> None:
    workload = capture(cached_attention(tmp_path / "n.onnx"), batch=3, context=16)
    assert workload.matmul_flops == 2 * (3 * 2) * 1 * 16 * 8
    joined = workload.ops[0]
    assert joined.bytes_of("kv_cache") == 4 * 3 * 2 * 8 * (15 + 16) and joined.bytes_of("activations") == 4 * 3 * 2 * 8
    assert workload.ops[2].bytes_of("kv_cache") == 4 * 3 * 2 * 8 * 16
    assert workload.input_bytes == 4 * (2 * 3 * 2 * 8 + 3 * 16)
    assert workload.peak_cache_bytes == 4 * 3 * 2 * 8 * (15 + 16 + 16)  # passed in, joined, and turned while it is multiplied


def test_what_a_runtime_does_at_load_is_folded(tmp_path: Path) -> None:
    nodes = [helper.make_node("Transpose", ["w"], ["t"]), helper.make_node("MatMul", ["x", "t"], ["y"])]
    workload = capture(save(tmp_path / "n.onnx", nodes, {"x": (FLOAT, [2, 64])}, ["y"], {"w": (FLOAT, [32, 64])}))
    assert [op.kind for op in workload.ops] == ["linear"] and workload.bytes_of("weights") == 4 * 32 * 64
    assert workload.weight_bytes == 4 * 32 * 64
    assert any("1 nodes only compute shapes" in note for note in workload.notes)


def test_what_has_no_formula_is_listed_with_its_bytes(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Magic", ["x"], ["m"], domain="my.ops"),
        helper.make_node("Det", ["x"], ["d"]),
        helper.make_node("NonZero", ["x"], ["n"]),
        helper.make_node("Transpose", ["n"], ["t"]),
        helper.make_node("Relu", ["x"], ["y"]),
    ]
    path = save(tmp_path / "n.onnx", nodes, {"x": (FLOAT, [4, 4])}, ["m", "d", "t", "y"], opsets=[helper.make_opsetid("my.ops", 1)])
    workload = capture(path)
    assert [(u.operator, u.why.split()[0]) for u in workload.uncounted] == [
        ("Magic", "an"),
        ("Det", "no"),
        ("NonZero", "a"),
        ("Transpose", "a"),
    ]
    assert [op.kind for op in workload.ops] == ["other", "other", "other", "other", "pointwise"]
    assert workload.ops[0].bytes == 64 and workload.ops[1].bytes == 64 + 4
    assert any("depend on data" in note for note in workload.notes)


def test_loops_are_listed(tmp_path: Path) -> None:
    turn = [helper.make_node("Identity", ["go"], ["again"]), helper.make_node("Relu", ["a"], ["b"])]
    scalars = [helper.make_tensor_value_info("i", INT64, []), helper.make_tensor_value_info("go", BOOL, [])]
    carried = [helper.make_tensor_value_info(name, FLOAT, [4]) for name in ("a", "b")]
    body = helper.make_graph(turn, "body", [*scalars, carried[0]], [helper.make_tensor_value_info("again", BOOL, []), carried[1]])
    path = save(
        tmp_path / "n.onnx", [helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)], {"n": (INT64, []), "x": (FLOAT, [4])}, ["y"]
    )
    listed = capture(path).uncounted
    assert [(u.operator, u.zero_flop) for u in listed] == [("Loop", False)] and "data-dependent" in listed[0].why


def test_claimed_shapes_stand_in_only_where_nothing_is_inferred(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Magic", ["x"], ["m"], domain="my.ops"),
        helper.make_node("Relu", ["m"], ["r"]),
        helper.make_node("Exp", ["x"], ["e"]),
    ]
    claims = [helper.make_tensor_value_info("m", FLOAT, ["n", 6]), helper.make_tensor_value_info("e", FLOAT, [99, 99])]
    inputs = {"x": (FLOAT, ["n", 4])}
    path = save(tmp_path / "n.onnx", nodes, inputs, ["r", "e"], opsets=[helper.make_opsetid("my.ops", 1)], claims=claims)
    workload = capture(path, batch=2)
    assert [op.outputs[0].shape for op in workload.ops] == [(2, 6), (2, 6), (2, 4)]
    assert [u.operator for u in workload.uncounted] == ["Magic"] and workload.flops == 12 + 8


SLICE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
from ridgeline import capture
print(len(capture(sys.argv[1]).ops))
"""


def test_a_damaged_slice_does_not_take_all_memory(tmp_path: Path) -> None:
    """onnx's data propagation makes one entry for each of the 2⁴⁹ starts this slice claims to have."""
    nodes = [helper.make_node("Slice", ["x", "start", "start"], ["part"]), helper.make_node("Relu", ["x"], ["y"])]
    path = save(tmp_path / "n.onnx", nodes, {"x": (FLOAT, [2, 3]), "start": (INT64, [2**49])}, ["part", "y"])
    result = subprocess.run([sys.executable, "-c", SLICE, path], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "2"), result.stderr


def function(name: str, nodes: list[Any]) -> Any:
    return helper.make_function("f", name, ["x"], ["y"], nodes, [helper.make_opsetid("", 20), helper.make_opsetid("f", 1)])


def test_functions_of_the_file_are_written_out(tmp_path: Path) -> None:
    twice = function("Twice", [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("Exp", ["h"], ["y"])])
    nodes = [helper.make_node("Twice", ["x"], ["y"], domain="f")]
    path = save(tmp_path / "n.onnx", nodes, {"x": (FLOAT, [4])}, ["y"], functions=[twice], opset=20, opsets=[helper.make_opsetid("f", 1)])
    assert [op.operator for op in capture(path).ops] == ["Relu", "Exp"]


@pytest.mark.parametrize("levels", [0, 40])
def test_functions_without_end_are_refused(tmp_path: Path, levels: int) -> None:
    """One that calls itself, and forty that each call the next twice: 2⁴⁰ nodes from a file of 3 kB."""
    calls = [(f"F{i}", f"F{i + 1}") for i in range(levels)] or [("F0", "F0")]
    functions = [
        function(name, [helper.make_node(other, ["x"], ["h"], domain="f"), helper.make_node(other, ["h"], ["y"], domain="f")])
        for name, other in calls
    ]
    last = [function(f"F{levels}", [helper.make_node("Relu", ["x"], ["y"])])] if levels else []
    options: dict[str, Any] = {"functions": functions + last, "opset": 20, "opsets": [helper.make_opsetid("f", 1)]}
    path = save(tmp_path / "n.onnx", [helper.make_node("F0", ["x"], ["y"], domain="f")], {"x": (FLOAT, [4])}, ["y"], **options)
    with pytest.raises(ModelFileError, match="functions without end"):
        capture(path)


def test_layers_are_module_paths() -> None:
    def layer(name: str) -> str:
        return layer_of(helper.make_node("Conv", ["x"], ["y"], name=name))

    assert layer("/layer1/layer1.0/conv1/Conv") == "layer1.0.conv1"
    assert layer("/encoder/layer.0/attention/self/query/MatMul") == "encoder.layer.0.attention.self.query"
    assert layer("model/conv1/Conv2D") == "model.conv1"
    assert (layer("/Relu"), layer("Conv_3"), layer("")) == ("", "Conv_3", "")
    scoped = helper.make_node("Conv", ["x"], ["y"], name="node_conv2d")
    scoped.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'layer1', 'layer1.0', 'conv2d']")
    assert layer_of(scoped) == "layer1.0"


def test_half_precision_is_the_models_dtype(tmp_path: Path) -> None:
    path = export(ConvNet().half(), torch.randn(1, 3, 32, 32).half(), tmp_path / "n.onnx")
    assert {capture(path).dtype, *(op.dtype for op in products(capture(path)))} == {"float16"}
    assert capture(path, dtype="int8").dtype == "int8"


def with_external(path: Path, location: str, nested: bool = False) -> str:
    tensor = helper.make_tensor("w", FLOAT, [4], bytes(16), raw=True)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    if not nested:
        return save(path, [helper.make_node("Add", ["x", "w"], ["y"])], {"x": (FLOAT, [4])}, ["y"], constants=[tensor])
    branch = helper.make_graph(
        [helper.make_node("Constant", [], ["w"], value=tensor)], "b", [], [helper.make_tensor_value_info("w", FLOAT, [4])]
    )
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    return save(path, [node], {"c": (BOOL, [])}, ["y"])


def test_external_data_is_never_opened(tmp_path: Path) -> None:
    assert capture(with_external(tmp_path / "n.onnx", "absent.data")).bytes_of("weights") == 16
    (tmp_path / "sub").mkdir()
    assert capture(with_external(tmp_path / "n.onnx", "sub/absent.data")).parameters == 4


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("location", ["/etc/passwd", "../outside.data", "sub/../../outside.data", "link.data", "linked/x.data", "", "a\0b"])
def test_external_data_outside_the_folder_is_refused(tmp_path: Path, location: str, nested: bool) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside.data").write_bytes(bytes(16))
    (folder / "link.data").symlink_to(tmp_path / "outside.data")
    (folder / "linked").symlink_to(tmp_path)
    with pytest.raises(ModelFileError, match="inside the model's folder"):
        capture(with_external(folder / "n.onnx", location, nested))


def test_files_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        capture(str(tmp_path / "absent.onnx"))
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(ModelFileError, match="folder"):
        capture(str(tmp_path / "folder.onnx"))
    for content in (b"", b"\x00" * 64, b"not a model at all", helper.make_model(helper.make_graph([], "g", [], [])).SerializeToString()):
        (tmp_path / "n.onnx").write_bytes(content)
        with pytest.raises(ModelFileError):
            capture(str(tmp_path / "n.onnx"))


def test_files_beyond_protobufs_limit_are_not_read(tmp_path: Path) -> None:
    with (tmp_path / "n.onnx").open("wb") as stream:
        stream.truncate(2**31)  # sparse: takes no room
    with pytest.raises(ModelFileError, match="2 GiB"):
        capture(str(tmp_path / "n.onnx"))


def test_negative_dimensions_are_refused(tmp_path: Path) -> None:
    tensor = helper.make_tensor("w", FLOAT, [4], [0.0] * 4)
    tensor.dims[0] = -4
    with pytest.raises(ModelFileError, match="below zero"):
        capture(save(tmp_path / "n.onnx", [helper.make_node("Add", ["x", "w"], ["y"])], {"x": (FLOAT, [4])}, ["y"], constants=[tensor]))


def test_without_onnx_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"ridgeline\[onnx\]"):
        capture(str(tmp_path / "n.onnx"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A valid file with convolutions, shape arithmetic and a branch."""
    path = tmp_path_factory.mktemp("whole") / "n.onnx"
    module = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), ResponseNorm(), nn.Flatten(), nn.Linear(32, 2))
    return Path(export(module, torch.randn(1, 2, 4, 4), path, dynamic_axes={"x": {0: "batch"}})).read_bytes()


@given(data=st.data())
def test_damaged_files_load_or_say_why(data: st.DataObject, whole: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    content = bytearray(whole)
    for position, bit in data.draw(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 7)), max_size=8), "flips"):
        content[position] ^= 1 << bit
    path = tmp_path_factory.getbasetemp() / "damaged.onnx"
    path.write_bytes(content[: data.draw(st.integers(0, len(whole)) | st.just(len(whole)), "length")])
    try:
        assert capture_onnx(str(path), CaseOptions()).ops
    except RidgelineError as error:
        assert error.what and error.why and error.do


def test_the_undamaged_file_loads(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "n.onnx").write_bytes(whole)
    assert capture(str(tmp_path / "n.onnx")).uncounted == ()
    (tmp_path / "n.onnx").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelFileError, match="truncated"):
        capture(str(tmp_path / "n.onnx"))
