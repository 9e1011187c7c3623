"""Save and load: the same bits, the size foretold, and nothing a file can say runs code, crashes or takes memory."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ridgeline.core.change import Change, State
from ridgeline.core.errors import ModelFileError, OptionError, RidgelineError
from ridgeline.transform import tensor_file
from ridgeline.transform.saved import load_model, read_document, save_model, stored_bytes
from ridgeline.transform.tensor_file import file_bytes, plan
from tests.support import full_or_tenth


class Block(nn.Module):
    """A residual block: a class the file knows nothing of."""

    def __init__(self, width: int, inner: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, inner), nn.Linear(inner, width)
        self.inner = inner
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).relu()) * self.table.sum()


class Net(nn.Module):
    """Blocks, a tied pair, a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.blocks = nn.Sequential(Block(16), Block(16), Block(16))
        self.up = nn.Linear(16, 16)
        self.down = nn.Linear(16, 16)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).mean(1).flatten(1)
        return self.down(self.up(self.blocks(x)))


INPUT = torch.linspace(-1, 1, 2 * 16).view(2, 1, 4, 4)


def make() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def prune_inside(net: Net) -> None:
    net.blocks[1].first, net.blocks[1].second = nn.Linear(16, 2), nn.Linear(2, 16)
    net.blocks[1].inner = 2


def low_rank(net: Net) -> None:
    net.up = nn.Sequential(nn.Linear(16, 2, bias=False), nn.Linear(2, 16))


def drop_block(net: Net) -> None:
    del net.blocks[1]


def drop_first_and_prune(net: Net) -> None:
    del net.blocks[0]
    prune_inside(net)


def add_layer(net: Net) -> None:
    net.blocks.append(nn.ReLU())


def fold(net: Net) -> None:
    net.norm = nn.Identity()
    net.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)


def zeros(net: Net) -> None:
    with torch.no_grad():
        net.up.weight[torch.rand(16, 16) < 0.8] = 0


def half(net: Net) -> None:
    net.bfloat16()


def untie(net: Net) -> None:
    net.down.weight = nn.Parameter(net.up.weight.detach().clone() + 1)


CHANGES = [prune_inside, low_rank, drop_block, drop_first_and_prune, add_layer, fold, zeros, half, untie]


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and left[name].numpy(force=True).tobytes() == right[name].numpy(force=True).tobytes()
        if left[name].dtype != torch.bfloat16
        else torch.equal(left[name].view(torch.int16), right[name].view(torch.int16))
        for name in left
    )


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("base", ["module", "function", "described"])
def test_round_trip(change: Any, base: str, tmp_path: Path) -> None:
    net = make()
    change(net)
    structural = change in (drop_block, drop_first_and_prune, add_layer, prune_inside)
    if base == "described" and structural and change is not prune_inside:
        pytest.skip("without a base at saving, a changed container cannot be told from another")
    given_base: Any = {"module": make(), "function": make, "described": None}[base]
    save_model(net, tmp_path / "net", base=given_base)
    if base == "described" and change is prune_inside:
        with pytest.raises(ModelFileError):  # the number `inner` is only known from a base, but shapes fit: see below
            load_model(tmp_path / "net")
        return
    loaded = load_model(tmp_path / "net", base=make)
    assert same_bits(loaded, net)
    dtype = next(net.parameters()).dtype
    assert torch.equal(loaded(INPUT.to(dtype)), net.eval()(INPUT.to(dtype)))
    tied = change not in (low_rank, untie)
    assert (loaded.get_submodule("down").weight is getattr(loaded.get_submodule("up"), "weight", None)) == tied
    assert (tmp_path / "net" / "model.safetensors").stat().st_size == stored_bytes(net)


def test_numbers_a_transform_changed_come_back(tmp_path: Path) -> None:
    net = make()
    prune_inside(net)
    save_model(net, tmp_path, base=make)
    document = json.loads((tmp_path / "model.json").read_text())
    assert document["attributes"] == {"blocks.1": {"inner": 2}}
    assert load_model(tmp_path, base=make).get_submodule("blocks.1").inner == 2


def test_named_base_and_single_file(tmp_path: Path) -> None:
    model = load_model("digits-cnn")
    model.fc1 = nn.Sequential(nn.Linear(128, 4, bias=False), nn.Linear(4, 48))
    save_model(model, tmp_path / "small.safetensors", base="digits-cnn")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.json", "small.safetensors"]
    x = torch.randn(3, 1, 8, 8)
    for path in ("small.json", "small.safetensors"):
        loaded = load_model(tmp_path / path)
        assert torch.equal(loaded(x), model.eval()(x))
        assert not loaded.training and all(p.requires_grad for p in loaded.parameters())


def test_a_model_of_known_kinds_needs_no_base(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Sequential(nn.Linear(3, 2)))
    save_model(model, tmp_path)
    x = torch.randn(5, 4)
    assert torch.equal(load_model(tmp_path)(x), model(x))


def test_channels_last_comes_back(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(loaded[0].weight, model[0].weight)


def test_buffers_no_file_holds_are_the_base_s(tmp_path: Path) -> None:
    save_model(make(), tmp_path, base=make)
    assert load_model(tmp_path, base=make).get_submodule("blocks.0").table.tolist() == [0, 1, 2]


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    state = {
        "a": torch.randn(3, 5),
        "b": torch.arange(7, dtype=torch.int16),
        "c": torch.randn(4).bfloat16(),
        "flag": torch.tensor(True),
        "empty": torch.zeros(0, 3),
        "odd": torch.arange(5, dtype=torch.uint8),
        "wide": torch.tensor(1.5, dtype=torch.float64),
    }
    entries = plan(state)
    tensor_file.write_tensors(tmp_path / "x.safetensors", state, entries)
    read = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], state[name]) and read[name].dtype == state[name].dtype for name in state)
    assert (tmp_path / "x.safetensors").stat().st_size == file_bytes(entries)


@settings(max_examples=full_or_tenth(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=6),
        st.tuples(
            st.lists(st.integers(0, 40), max_size=3),
            st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64]),
            st.sampled_from([0.0, 0.3, 0.95, 1.0]),
        ),
        max_size=6,
    )
)
def test_size_is_foretold_for_any_state_dict(tmp_path: Path, shapes: dict[str, tuple[list[int], torch.dtype, float]]) -> None:
    state = {}
    for name, (shape, dtype, share) in shapes.items():
        tensor = (torch.rand(shape) + 0.5) * 100
        state[name] = torch.where(torch.rand(shape) < share, 0.0, tensor).to(dtype)
    entries = plan(state)
    path = tmp_path / "any.safetensors"
    tensor_file.write_tensors(path, state, entries)
    assert path.stat().st_size == file_bytes(entries)
    described = json.loads(json.dumps({entry.name: entry.to_json() for entry in entries}))
    back = tensor_file.read_tensors(path, tensor_file.read_entries(described))
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)


def test_zeros_are_left_out_and_tied_weights_stored_once(tmp_path: Path) -> None:
    dense, thin = nn.Sequential(nn.Linear(256, 256)), nn.Sequential(nn.Linear(256, 256))
    with torch.no_grad():
        thin[0].weight.view(-1)[: 256 * 256 * 4 // 5] = 0
    assert stored_bytes(thin) < 0.27 * stored_bytes(dense)
    net = make()
    own = sum(t.numel() * t.element_size() for n, t in net.state_dict().items() if n != "down.weight")
    assert sum(entry.stored_bytes for entry in plan(net.state_dict())) == own


def test_change_is_kept(tmp_path: Path) -> None:
    state = State(10, 4, 2, quality={"accuracy": float("nan")})
    change = Change("x", "m", "cpu", state, state, notes=("a",), steps=(Change("y", "m", "cpu", state, state),))
    save_model(nn.Sequential(nn.ReLU()), tmp_path, change=change)
    kept = Change.from_json(read_document(tmp_path / "model.json")["change"])
    assert kept.steps[0].name == "y" and kept.notes == ("a",) and kept.before.quality == {"accuracy": None}
    assert kept.to_json() == change.to_json()


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda *_: None)
    return model


def replaced() -> nn.Module:
    model = nn.Sequential(nn.ReLU())
    model[0].forward = lambda x: x + 1  # type: ignore[method-assign]
    return model


def extra_state() -> nn.Module:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"x": 1}

    return nn.Sequential(Extra(2, 2))


def unknown_part() -> nn.Module:
    net = make()
    net.up = nn.GRUCell(16, 16)
    return net


def changed_text() -> nn.Module:
    net = make()
    net.blocks[0].mode = "other"
    return net


@pytest.mark.parametrize(
    ("model", "base", "said"),
    [
        (hooked, None, "forward hooks"),
        (replaced, None, "was replaced"),
        (extra_state, None, "only tensors are stored"),
        (unknown_part, make, "up, a GRUCell, cannot be saved"),
        (changed_text, make, "attribute mode"),
        (make, lambda: 3, "base= gave a int"),
        (make, "no-such-model", "unknown model"),
        (lambda: nn.Sequential(nn.Linear(2, 2, device="meta")), None, "meta device"),
        (lambda: nn.Sequential(nn.Linear(2, 2).to(torch.complex64)), None, "complex64"),
    ],
)
def test_what_cannot_be_saved_is_said(model: Any, base: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(RidgelineError, match=said):
        save_model(model(), tmp_path / "x", base=base)
    assert not (tmp_path / "x").exists()


def test_unwritable_and_missing_paths(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelFileError, match="is a file"):
        save_model(nn.Sequential(), tmp_path / "file")
    with pytest.raises(OptionError, match="cannot write"):
        save_model(nn.Sequential(nn.ReLU()), tmp_path / "file" / "deeper")
    with pytest.raises(ModelFileError, match="no such file"):
        load_model(tmp_path / "nothing")
    save_model(make(), tmp_path / "net", base=make)
    with pytest.raises(ModelFileError, match="without a base"):
        load_model(tmp_path / "net")


def test_a_save_that_is_cut_short_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = nn.Sequential(nn.Linear(2, 2))
    second = nn.Sequential(nn.Linear(2, 2))
    save_model(first, tmp_path)
    for cut in ("replace", "fsync"):
        seen: list[int] = []
        real = getattr(os, cut)
        for at in (1, 2):  # the tensors, then the JSON

            def dies(*args: Any, at: int = at, seen: list[int] = seen, real: Any = real) -> Any:
                seen.append(1)
                if len(seen) == at:
                    raise KeyboardInterrupt
                return real(*args)

            seen.clear()
            monkeypatch.setattr(os, cut, dies)
            with pytest.raises(KeyboardInterrupt):
                save_model(second, tmp_path)
            monkeypatch.undo()
            assert same_bits(load_model(tmp_path), first)
    save_model(second, tmp_path)
    assert same_bits(load_model(tmp_path), second)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, bytes, dict[str, Any]]:
    net = make()
    low_rank(net)
    zeros_in = net.blocks[0].first.weight
    with torch.no_grad():
        zeros_in[:] = 0
    save_model(net, tmp_path, base=make)
    return tmp_path, (tmp_path / "model.safetensors").read_bytes(), json.loads((tmp_path / "model.json").read_text())


def write(folder: Path, data: bytes, document: Any) -> None:
    """A file whose digest is right: hostile, not just broken."""
    (folder / "model.safetensors").write_bytes(data)
    if isinstance(document, dict):
        document = {**document, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "model.json").write_text(json.dumps(document))


def test_any_changed_byte_of_the_tensors_is_seen(saved: tuple[Path, bytes, dict[str, Any]]) -> None:
    folder, data, _ = saved
    for place in range(0, len(data), 97):
        (folder / "model.safetensors").write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ModelFileError, match="changed or cut short"):
            load_model(folder, base=make)
    (folder / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(ModelFileError, match="changed or cut short"):
        load_model(folder, base=make)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="cannot open"):
        load_model(folder, base=make)


def edits(document: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    def with_(**fields: Any) -> dict[str, Any]:
        return {**copy.deepcopy(document), **fields}

    def tensor(name: str, **fields: Any) -> dict[str, Any]:
        changed = copy.deepcopy(document)
        changed["tensors"][name] = {**changed["tensors"][name], **fields}
        return changed

    huge = {"kind": "linear", "in_features": 10**6, "out_features": 10**7, "bias": False}
    return {
        "list": ([], "schema"),
        "schema": (with_(schema=99), "schema 99"),
        "extra": (with_(code="import os"), "field 'code'"),
        "file": (with_(file="../../secret.safetensors"), "beside the JSON"),
        "absolute": (with_(file="/etc/passwd"), "beside the JSON"),
        "base": (with_(base="evil.py:main"), "not known"),
        "type": (with_(layers=[]), "wrong type"),
        "unknown kind": (with_(layers={"up": {"kind": "subprocess"}}), "only known kinds"),
        "huge layer": (with_(layers={**document["layers"], "up": {"kind": "sequential", "parts": {"0": huge}}}), "lacks tensor|is torch"),
        "no such layer": (with_(layers={**document["layers"], "nowhere.else": {"kind": "relu"}}), "no layer"),
        "base path": (with_(layers={"blocks": {"kind": "sequential", "parts": {"0": {"kind": "base", "path": "nope"}}}}), "no layer"),
        "attribute": (with_(attributes={"": {"forward": 1}}), "no number"),
        "attribute type": (with_(attributes={"blocks.0": {"inner": "x"}}), "no number"),
        "attribute list": (with_(attributes={"blocks.0": 5}), "no number"),
        "dtype": (tensor("conv.weight", dtype="float16"), "in the file and"),
        "int dtype": (tensor("conv.weight", dtype="int32"), "conv.weight"),
        "bad dtype": (tensor("conv.weight", dtype="object"), "dtype 'object'"),
        "shape": (tensor("conv.weight", shape=[4, 1, 9, 1]), "conv.weight"),
        "huge shape": (tensor("conv.weight", shape=[2**40, 2**40]), "conv.weight"),
        "negative": (tensor("conv.weight", shape=[-1]), "conv.weight"),
        "kept": (tensor("blocks.0.first.weight", kept=10**12), "blocks.0.first.weight"),
        "encoding": (tensor("conv.weight", encoding="pickle", kept=3), "encoding 'pickle'"),
        "alias": (tensor("conv.bias", same_as="conv.weight"), "conv"),
        "alias of itself": (tensor("conv.bias", same_as="conv.bias"), "conv.bias"),
        "missing tensor": (with_(tensors={k: v for k, v in document["tensors"].items() if k != "up.1.bias"}), "up.1.bias"),
        "extra tensor": (with_(tensors={**document["tensors"], "more": {"dtype": "float32", "shape": [1]}}), "more"),
    }


def test_hostile_json_meets_clear_errors(saved: tuple[Path, bytes, dict[str, Any]]) -> None:
    folder, data, document = saved
    for name, (changed, said) in edits(document).items():
        write(folder, data, changed)
        with pytest.raises(ModelFileError, match=said):
            load_model(folder, base=None if name == "base" else make)
    write(folder, data, document)
    load_model(folder, base=make)


def test_a_buffer_tied_to_a_parameter_is_refused(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in make().state_dict().items() if name != "norm.running_mean"}
    save_model(make(), tmp_path, base=make)
    document = json.loads((tmp_path / "model.json").read_text())
    document["tensors"]["norm.running_mean"]["same_as"] = "norm.weight"
    tensor_file.write_tensors(tmp_path / "model.safetensors", state, plan(state))
    write(tmp_path, (tmp_path / "model.safetensors").read_bytes(), document)
    with pytest.raises(ModelFileError, match="do not fit"):
        load_model(tmp_path, base=make)


def test_nested_and_broken_json(saved: tuple[Path, bytes, dict[str, Any]]) -> None:
    folder, _, _ = saved
    for text in ("[" * 100_000, "{", "", "\0", '{"schema": 1e999}', '{"schema": NaN}'):
        (folder / "model.json").write_text(text)
        with pytest.raises(ModelFileError):
            load_model(folder, base=make)
    (folder / "model.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ModelFileError):
        load_model(folder, base=make)


@settings(max_examples=full_or_tenth(1000), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_headers_load_or_are_refused(saved: tuple[Path, bytes, dict[str, Any]], draw: st.DataObject) -> None:
    """Bytes of the header and of the JSON changed at random, the digest right: an answer or a ModelFileError, never anything else."""
    folder, data, document = saved
    length = struct.unpack("<Q", data[:8])[0]
    header = bytearray(data[: 8 + length])
    text = bytearray(json.dumps(document).encode())
    for target, most in ((header, len(header) - 1), (text, len(text) - 1)):
        for _ in range(draw.draw(st.integers(0, 3))):
            target[draw.draw(st.integers(0, most))] = draw.draw(st.integers(0, 255))
    changed = bytes(header) + data[8 + length :]
    (folder / "model.safetensors").write_bytes(changed)
    digest = hashlib.sha256(changed).hexdigest().encode()
    (folder / "model.json").write_bytes(bytes(text).replace(document["sha256"].encode(), digest))
    try:
        load_model(folder, base=make)
    except ModelFileError:
        return


def test_a_saved_model_of_a_name_is_compressed_again_under_that_name(tmp_path: Path) -> None:
    """`ridgeline compress FOLDER --out OTHER`: what it writes must load by itself."""
    from ridgeline.cli.compress import _model

    save_model(load_model("resnet20"), tmp_path / "first", base="resnet20")
    module, base, _ = _model(str(tmp_path / "first"), None, None, 0, print)
    save_model(module, tmp_path / "second", base=base)
    assert type(load_model(tmp_path / "second")) is type(module)
