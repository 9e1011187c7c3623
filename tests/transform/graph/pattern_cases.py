"""What the tests of patterns share: a model captured, a pass run with its check, and small Hugging Face models.

run(model, inputs, "attention")  ──capture, pass, check──>  Ran(changed, refused, graph); the answers are compared again here
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.transform.graph.capture import Captured, capture_graph
from ridgeline.transform.graph.manager import Pass, PassContext, find_pass, op_name
from tests.support import FULL

VOCABULARY = 64


class Formula(nn.Module):
    """A function of tensors as a module; tensors given by name become buffers that the function gets too."""

    def __init__(self, function: Callable[..., Any], **buffers: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs, **dict(self.named_buffers()))


@dataclass(frozen=True)
class Ran:
    """What a pass did to a graph."""

    graph: Captured
    changed: list[str]
    refused: list[str]
    saved_bytes: int

    def count(self, *names: str) -> int:
        """Calls of ops with these names."""
        return sum(op_name(node) in names for node in self.graph.module.graph.nodes)

    def only(self, name: str) -> Any:
        """The one call of this name."""
        (node,) = (node for node in self.graph.module.graph.nodes if op_name(node) == name)
        return node


def run(model: nn.Module, inputs: tuple[Any, ...], *passes: str | Pass, tolerance: float = 1e-9, dynamic_batch: bool = FULL) -> Ran:
    """Capture, run the passes once, and compare with the model; with an open batch (twice as slow) at a second batch size too."""
    model = model.eval()
    graph = capture_graph(copy.deepcopy(model), inputs, dynamic_batch=dynamic_batch)
    changed, refused, saved = [], [], 0
    for one in passes:
        done = (find_pass(one) if isinstance(one, str) else one).run(graph, PassContext(dtype=inputs[0].dtype))
        changed += [place.what for place in done.changed]
        refused += [place.what for place in done.refused]
        saved += sum(place.saved_bytes for place in done.changed)
    graph.module.graph.lint()
    trials = [inputs]
    if graph.batch_dynamic:
        trials.append(tuple(torch.cat((value, value[:1] if value.dtype == torch.int64 else value[:1] * 0.5 + 0.1)) for value in inputs))
    with torch.no_grad():
        for trial in trials:
            compare(graph.module(*trial), model(*trial), tolerance)
    for node in graph.module.graph.nodes:
        _check_meta(node)
    return Ran(graph, changed, refused, saved)


def compare(found: Any, wanted: Any, tolerance: float) -> None:
    """Every tensor of a result, relative to its largest value."""
    for one, other in zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(wanted), strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        scale = other.abs().max().clamp(min=1e-12)
        assert ((one - other).abs().max() / scale).item() <= tolerance


def _check_meta(node: Any) -> None:
    """A pass leaves no call without the value other passes read its sizes from."""
    if node.op == "call_function":
        assert "val" in node.meta, node


def hugging_face(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A tiny model of two layers, attention written by hand."""
    import transformers

    small: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "attn_implementation": "eager"}
    ids = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    if name == "llama":
        config = transformers.LlamaConfig(**small, **text, num_key_value_heads=2, use_cache=False)
        return transformers.LlamaForCausalLM(config).eval(), (ids,)
    if name == "qwen2":
        config = transformers.Qwen2Config(**small, **text, num_key_value_heads=2, use_cache=False)
        return transformers.Qwen2ForCausalLM(config).eval(), (ids,)
    if name == "bert":
        return transformers.BertModel(transformers.BertConfig(**small, **text)).eval(), (ids,)
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32, attn_implementation="eager", use_cache=False,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config).eval(), (ids,)
    config = transformers.ViTConfig(**small, image_size=32, patch_size=8, attn_implementation="eager")
    return transformers.ViTModel(config).eval(), (torch.randn(2, 3, 32, 32),)
