"""Fusion opportunities: the right number in known models, and none where another consumer stands in the way."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ridgeline.transform.graph.capture import capture_graph
from ridgeline.transform.graph.manager import PassContext, find_pass
from ridgeline.transform.graph.opportunities import Opportunity, opportunities
from ridgeline.transform.graph.passes.merge_qkv import MergeLinears
from tests.support import FULL
from tests.transform.graph.pattern_cases import compare, hugging_face

BLOCK = {"attention": 2, "attention + projection": 2, "norm + residual": 4, "linear + residual": 4}
GATED = {**BLOCK, "qkv": 2, "gate + up": 2, "rms_norm": 5, "rope": 4, "swiglu": 2, "linear + activation": 2}
COUNTS = {  # fusable = total, for two layers
    "llama": GATED,
    "qwen2": GATED,
    "bert": {**BLOCK, "qkv": 2, "linear + activation": 3},
    "gpt2": {**BLOCK, "linear + activation": 2},
    "vit": {**BLOCK, "qkv": 2, "linear + activation": 3},
}
CHANGED = {  # by each pass on a CPU
    "llama": {"merge_qkv": 4, "attention": 2, "rope": 0, "norm": 5, "gated": 0},
    "qwen2": {"merge_qkv": 4, "attention": 2, "rope": 0, "norm": 5, "gated": 0},
    "bert": {"merge_qkv": 2, "attention": 2, "rope": 0, "norm": 0, "gated": 0},
    "gpt2": {"merge_qkv": 0, "attention": 2, "rope": 0, "norm": 0, "gated": 2},
    "vit": {"merge_qkv": 2, "attention": 2, "rope": 0, "norm": 0, "gated": 0},
}


@pytest.mark.parametrize("name", COUNTS if FULL else ("llama", "gpt2"))
def test_hugging_face_models(name: str) -> None:
    """Counted, then rewritten pass by pass; float32 answers within twice the model's own error of the float64 run."""
    pytest.importorskip("transformers")
    model, inputs = hugging_face(name)
    graph = capture_graph(model, inputs)
    found = {one.pattern: one for one in opportunities(graph)}
    assert {pattern: (one.fusable, one.total) for pattern, one in found.items()} == {key: (n, n) for key, n in COUNTS[name].items()}
    assert all(one.saved_bytes > 0 for one in found.values())
    done = {one: len(_pass(one).run(graph, PassContext()).changed) for one in CHANGED[name]}
    assert done == CHANGED[name]
    exact = [value.double() for value in _outputs(copy.deepcopy(model).double(), tuple(_wide(value) for value in inputs))]
    own, ours = (_outputs(net, inputs) for net in (model, graph.module))
    for wanted, plain, fused in zip(exact, own, ours, strict=True):
        allowed = 2 * (plain - wanted).abs().max() + torch.finfo(torch.float32).eps * wanted.abs().max()
        assert (fused - wanted).abs().max() <= allowed
    second = tuple(torch.cat((value, value[:1])) for value in inputs)
    compare(_outputs(graph.module, second), _outputs(model, second), 1e-5)


def _pass(name: str) -> object:
    return MergeLinears(always=True) if name == "merge_qkv" else find_pass(name)


def _wide(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _outputs(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    with torch.no_grad():
        return [value for value in torch.utils._pytree.tree_leaves(model(*inputs)) if isinstance(value, Tensor)]


class Block(nn.Module):
    """A residual block of convolutions; `leak` lets somebody else read the first convolution."""

    def __init__(self, leak: bool) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.leak = leak

    def forward(self, x: Tensor) -> Tensor:
        first = self.conv1(x)
        y = self.norm2(self.conv2(torch.relu(self.norm1(first)))) + x
        return torch.relu(y + first) if self.leak else torch.relu(y)


def found(*blocks: nn.Module) -> dict[str, Opportunity]:
    model = nn.Sequential(nn.ModuleList(blocks)[0], *blocks[1:]).eval()
    return {one.pattern: one for one in opportunities(capture_graph(model, (torch.randn(2, 4, 6, 6),)))}


def test_convolutions_across_modules() -> None:
    three = found(Block(False), Block(False), Block(False))
    assert (three["conv + norm"].fusable, three["conv + norm"].total) == (6, 6)
    assert three["conv + norm"].saved_bytes == 6 * 2 * (2 * 4 * 6 * 6 * 4)
    assert three["conv + norm"].examples == ("0.norm1", "0.norm2", "1.norm1")
    assert (three["conv + norm + activation"].fusable, three["conv + residual"].fusable) == (3, 3)


def test_a_second_consumer_counts_but_is_not_fusable() -> None:
    leaking = found(Block(True))
    assert (leaking["conv + norm"].fusable, leaking["conv + norm"].total) == (1, 2)
    assert (leaking["conv + norm + activation"].fusable, leaking["conv + norm + activation"].total) == (0, 1)
    assert leaking["conv + norm"].by == "fold_norm"
