"""use_kernels: what is replaced, in eager and under torch.compile, and that the answers stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from ridgeline.kernel import replace
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


def test_fusing_asks_the_module_first(device: str) -> None:
    class Other(nn.Module):
        """Has the parts of a gated perceptron, but adds where one multiplies."""

        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(functional.silu(self.gate_proj(x)) + self.up_proj(x))

    class Gated(Other):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))

    other, gated = Other().to(device), Gated().to(device)
    use_kernels(other)
    kernels = use_kernels(nn.Sequential(gated))
    assert "swiglu" not in str(vars(other).get("forward")) and "forward" in vars(gated)
    x = torch.randn(4, 8, device=device)
    before = Gated.forward(gated, x)
    with replace.everywhere():
        torch.testing.assert_close(gated(x), before, rtol=1e-4, atol=1e-5)
    assert kernels.report()["swiglu"] == 1
    kernels.undo()
    assert "forward" not in vars(gated)


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
