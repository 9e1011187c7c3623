"""use_kernels: what is replaced, in eager and under torch.compile, and that the answers stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ridgeline.kernel import pointwise, replace
from ridgeline.kernel.softmax import softmax
from ridgeline.kernel.use import use_kernels
from ridgeline.workload.models.decoder import CausalLM, DecoderConfig

CONFIG = DecoderConfig(2, 64, 96, 4, 2, 128, 1e4)


def tiny(device: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return CausalLM(CONFIG).to(device), torch.randint(128, (2, 16), device=device), torch.arange(16, device=device)


def loss_of(model: nn.Module, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    logits = model(ids, positions)
    return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def test_block_replaces_and_gradients_agree(device: str) -> None:
    model, ids, positions = tiny(device)
    loss_of(model, ids, positions).backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with replace.everywhere(), use_kernels() as kernels:
        loss = loss_of(model, ids, positions)
    loss.backward()
    assert {"rms_norm", "rope", "swiglu", "cross_entropy"} <= set(kernels.report())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name], rtol=2e-3, atol=2e-4)


def test_nothing_is_replaced_outside_the_block(device: str) -> None:
    x = torch.randn(4, 8, device=device)
    with replace.everywhere(), use_kernels() as kernels:
        functional.softmax(x, -1)
        inside = dict(kernels.report())
    functional.softmax(x, -1)
    assert inside.get("softmax") == 1 and kernels.report().get("softmax") == 1


def test_compiled_graph_holds_our_operators(device: str) -> None:
    from torch._dynamo.testing import EagerAndRecordGraphs

    recorder = EagerAndRecordGraphs()
    x = torch.randn(8, 64, device=device, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        return functional.softmax(functional.layer_norm(x, (64,)), dim=-1).square().sum()

    with replace.everywhere(), use_kernels() as kernels:
        compiled = torch.compile(function, fullgraph=True, backend=recorder)
        ours = compiled(x)
    targets = {str(node.target) for node in recorder.graphs[0].graph.nodes}
    assert {"ridgeline.softmax.default", "ridgeline.layer_norm.default"} <= targets, targets
    assert kernels.report()["compiled softmax"] >= 1
    torch.testing.assert_close(ours, function(x))


def test_compiled_training_step_agrees(device: str) -> None:
    model, ids, positions = tiny(device)
    plain = loss_of(model, ids, positions)
    plain.backward()
    before = model.lm_head.weight.grad.clone()
    model.zero_grad()
    with replace.everywhere():
        kernels = use_kernels(model)
        step = torch.compile(lambda ids, positions: loss_of(model, ids, positions), fullgraph=True, backend="aot_eager")
        loss = step(ids, positions)
        loss.backward()
        kernels.undo()
    torch.testing.assert_close(loss, plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.lm_head.weight.grad, before, rtol=2e-3, atol=2e-4)


def test_without_a_table_torch_runs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replace, "_wins", {})
    x = torch.randn(64, 64, device=device)
    with use_kernels() as kernels:
        functional.softmax(x, -1)
    assert kernels.replaced == {}


def test_model_stops_looking_up_where_it_does_not_pay(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replace, "_wins", {})
    model = nn.Sequential(*(nn.Tanh() for _ in range(5)))
    kernels = use_kernels(model)
    x = torch.randn(4, device=device)
    depths: list[int] = []
    model[0].register_forward_pre_hook(lambda module, args: depths.append(torch._C._len_torch_function_stack()))
    model(x)
    model(x)
    assert depths == [1, 0]
    kernels.undo()
    assert "forward" not in vars(model)


class Quantised(torch.Tensor):
    """Looks like a weight of ones; holds whole numbers and a scale."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)  # type: ignore[attr-defined]

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(arg.codes.float() / 8 if isinstance(arg, Quantised) else arg for arg in args), **(kwargs or {}))


def test_subclasses_and_other_layouts_are_torchs(device: str) -> None:
    x, codes = torch.randn(5, 8, device=device), torch.randint(1, 9, (8,), device=device)
    square = Quantised(codes.expand(8, 8).contiguous())
    jagged = torch.nested.nested_tensor([torch.randn(3, 8, device=device), torch.randn(5, 8, device=device)], layout=torch.jagged)
    nested = torch.nested.nested_tensor([torch.randn(3, 8, device=device), torch.randn(5, 8, device=device)])
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "weight of a norm": lambda: functional.layer_norm(x, (8,), Quantised(codes)),
        "weight of an rms norm": lambda: functional.rms_norm(x, (8,), Quantised(codes), 1e-5),
        "weight of a linear": lambda: functional.linear(x, square),
        "right of @": lambda: x @ square,
        "softmax": lambda: torch.softmax(square, -1),
        "sum": lambda: square.sum(-1),
        "jagged": lambda: functional.silu(jagged).values(),
        "jagged linear": lambda: functional.linear(jagged, torch.ones(4, 8, device=device)).values(),
        "nested": lambda: torch.softmax(nested, -1).to_padded_tensor(0.0),
        "sparse": lambda: x.to_sparse().sum(),
        "sparse @": lambda: x.to_sparse() @ torch.ones(8, 3, device=device),
        "csr @": lambda: x.to_sparse_csr() @ torch.ones(8, 3, device=device),
    }
    for name, call in calls.items():
        expected = call()
        with replace.everywhere(), use_kernels() as kernels:
            found = call()
        assert not kernels.replaced, name
        torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")


def test_transformers_llama_agrees(device: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = transformers.LlamaForCausalLM(config).to(device).eval()
    ids = torch.randint(64, (2, 12), device=device)
    before = model(ids).logits
    with replace.everywhere():
        kernels = use_kernels(model)
        after = model(ids).logits
    assert {"swiglu", "rms_norm", "rope"} <= set(kernels.report()), kernels.report()
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4)
    kernels.undo()
    torch.testing.assert_close(model(ids).logits, before)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_operators_under_vmap(device: str) -> None:
    """Inside a transform the dispatcher has to see them: what a kernel would get has no memory of its own."""
    x = torch.randn(3, 4, 8, device=device)
    torch.testing.assert_close(torch.func.vmap(lambda t: softmax(t, -1))(x), torch.softmax(x, -1))
    torch.testing.assert_close(torch.func.vmap(lambda t: pointwise.add(t, t))(x), x + x)
