"""Capture: the graph is the model's, whatever its signature, sizes, modes and wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.core.errors import TransformError
from ridgeline.transform.graph.capture import Captured, capture_graph
from ridgeline.transform.graph.check import Checker
from ridgeline.transform.graph.edit import bytes_of, is_op, layer_of, shape_of
from ridgeline.workload.models import bert, decoder, gpt2, vit
from ridgeline.workload.models.digits_cnn import DigitsCNN
from tests.support import FULL

aten = torch.ops.aten


class Net(nn.Module):
    """Wrappers, shared weights, dropout, a dict out, and arguments that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.left, self.right = nn.Linear(4, 5), nn.Linear(4, 5)
        self.right.weight = self.left.weight
        self.drop = nn.Dropout(0.5)

    def forward(self, image: Tensor, pair: tuple[Tensor, Tensor], scale: float = 1.0, *, mask: Tensor | None = None) -> dict[str, Any]:
        with torch.enable_grad():
            hidden = self.norm(self.conv(image)).relu_()
        with torch.autocast("cpu", enabled=False):
            hidden = hidden.mean((2, 3)) + pair[0] * pair[1]
        hidden = hidden if mask is None else hidden * mask
        return {"left": self.drop(self.left(hidden)) * scale, "rest": [self.right(hidden), None]}


def net_inputs(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(batch, 3, 6, 6), (torch.randn(batch, 4), torch.randn(4)), 3.0), {"mask": torch.ones(batch, 4)}


@pytest.fixture(scope="module")
def net() -> tuple[Net, Captured]:
    torch.manual_seed(0)
    model = Net()
    args, kwargs = net_inputs(1)
    return model, capture_graph(model, args, kwargs)


def test_the_graph_has_whole_ops_tensors_only_and_one_shared_weight(net: tuple[Net, Captured]) -> None:
    model, graph = net
    calls = [node for node in graph.module.graph.nodes if node.op == "call_function"]
    assert [sum(is_op(node, op) for node in calls) for op in (aten.conv2d, aten.batch_norm, aten.linear, aten.dropout)] == [1, 1, 2, 1]
    assert not any("wrap" in str(node.target) or "assert" in str(node.target) for node in calls)
    assert [str(node.target) for node in graph.module.graph.nodes if node.op == "placeholder"] == ["image", "pair_0", "pair_1", "mask"]
    weights = {node.args[1] for node in calls if is_op(node, aten.linear)}
    assert len(weights) == 1 and len(graph.inputs) == 4
    assert all("val" in node.meta for node in graph.module.graph.nodes if node.op != "output")
    assert layer_of(next(node for node in calls if is_op(node, aten.conv2d))) == "conv"
    assert graph.module.conv.weight is model.conv.weight  # type: ignore[union-attr]


def test_a_batch_of_one_stays_open_and_the_model_keeps_its_mode(net: tuple[Net, Captured]) -> None:
    model, graph = net
    assert graph.batch_dynamic and graph.notes == () and graph.batch == 1
    assert model.training and model.norm.training
    model.eval()
    for batch in (1, 2, 5):
        args, kwargs = net_inputs(batch)
        expected, found = model(*args, **kwargs), graph.module(args[0], *args[1], mask=kwargs["mask"])
        assert set(found) == {"left", "rest"} and found["rest"][1] is None
        torch.testing.assert_close(found["left"], expected["left"])
        torch.testing.assert_close(found["rest"][0], expected["rest"][0])
    model.train()


def test_sizes_are_those_of_the_example(net: tuple[Net, Captured]) -> None:
    conv = next(node for node in net[1].module.graph.nodes if is_op(node, aten.conv2d))
    assert shape_of(net[1], conv) == (1, 4, 4, 4) and bytes_of(net[1], conv) == 256


def test_it_exports_again_and_compiles(net: tuple[Net, Captured]) -> None:
    graph = net[1]
    with torch.no_grad():
        expected = graph.module(*graph.inputs)["left"]
        torch.testing.assert_close(torch.export.export(graph.module, graph.inputs).module()(*graph.inputs)["left"], expected)
        torch.testing.assert_close(torch.compile(graph.module, backend="aot_eager")(*graph.inputs)["left"], expected)
    assert len(graph.copy().module.graph.nodes) == len(graph.module.graph.nodes)


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(2, -1) if x.shape[0] == 2 else x[:0]


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Casts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.linear(x, x)


def test_a_batch_that_cannot_be_open_is_noted() -> None:
    graph = capture_graph(Fixed(), (torch.randn(2, 3),))
    assert not graph.batch_dynamic and "only for batch 2" in graph.notes[0]
    assert graph.module(torch.ones(2, 3)).shape == (2, 3)


def test_what_cannot_be_captured_says_why() -> None:
    with pytest.raises(TransformError, match="Branches cannot be captured"):
        capture_graph(Branches(), (torch.randn(2, 3),))
    with pytest.raises(TransformError, match="autocast"):
        capture_graph(Casts(), (torch.randn(3, 3),))


def own_models() -> Iterator[tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """The shapes of workload/models at small sizes."""
    ids, positions = torch.randint(50, (1, 6)), torch.arange(6)
    yield "cnn", DigitsCNN(), (torch.randn(1, 1, 8, 8),), {}
    yield "vit", vit.VisionTransformer(vit.ViTConfig(32, 8, 2, 16, 4, 24, 5)), (torch.randn(1, 3, 32, 32),), {}
    yield "bert", bert.Bert(bert.BertConfig(2, 16, 4, 24, 50, 8)), (ids, torch.zeros_like(ids)), {}
    yield "gpt2", gpt2.GPT2(gpt2.GPT2Config(2, 16, 4, 50, 8)), (ids, positions), {}
    llama = decoder.CausalLM(decoder.DecoderConfig(2, 16, 24, 4, 2, 50, 1e4, tied=True))
    yield "llama", llama, (ids, positions), {}
    cache = [(torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4)) for _ in range(2)]
    yield "llama, decoding", llama, (ids[:, :1], torch.full((1,), 5)), {"kv_cache": cache}


@pytest.mark.parametrize("name,model,args,kwargs", list(own_models()), ids=lambda value: value if isinstance(value, str) else "")
def test_models_of_every_family_are_captured(name: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    graph = capture_graph(model, args, kwargs)
    assert graph.batch_dynamic, graph.notes
    assert Checker.of(graph).check(graph, "nothing") < 1e-5


def hugging_face() -> Iterator[tuple[nn.Module, tuple[Any, ...]]]:
    transformers = pytest.importorskip("transformers")
    ids, image = torch.randint(0, 90, (1, 7)), torch.randn(1, 3, 32, 32)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    words = {**sizes, "vocab_size": 99, "max_position_embeddings": 64}
    pixels = {**sizes, "image_size": 32, "patch_size": 8}
    for how in {"attn_implementation": "eager"}, {"attn_implementation": "sdpa"}:
        yield transformers.BertModel(transformers.BertConfig(**words, **how)), (ids, torch.ones_like(ids))
        small = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=64, **how)
        yield transformers.GPT2LMHeadModel(small), (ids,)
        yield transformers.LlamaForCausalLM(transformers.LlamaConfig(**words, num_key_value_heads=2, **how)), (ids,)
        yield transformers.ViTForImageClassification(transformers.ViTConfig(**pixels, **how)), (image,)
    yield (
        transformers.ResNetForImageClassification(transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])),
        (image,),
    )
    yield transformers.MobileNetV2ForImageClassification(transformers.MobileNetV2Config(depth_multiplier=0.35, image_size=32)), (image,)


@pytest.mark.skipif(not FULL, reason="imports and builds ten Hugging Face models")
def test_hugging_face_models_are_captured() -> None:
    for model, args in hugging_face():
        graph = capture_graph(model, args)
        assert graph.batch_dynamic, (type(model).__name__, graph.notes)
        assert type(graph.module(*args)) is type(model.eval()(*args))
        assert Checker.of(graph).check(graph, "nothing") < 1e-4
        if getattr(model.config, "use_cache", False) and not model.config.is_encoder_decoder and "Causal" in type(model).__name__:
            assert "use_cache" in graph.notes[0]
