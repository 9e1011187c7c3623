"""Recomputed blocks give the same gradients, buffers and random numbers, bit for bit, for less memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.core.errors import OptionError
from ridgeline.train import recompute
from ridgeline.train.recompute import checkpoint_activations, checkpoint_blocks, recompute_cost
from ridgeline.workload.models.decoder import CausalLM, DecoderConfig


class Block(nn.Module):
    """Everything that could go wrong: statistics, dropout, a keyword argument, two uses of the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.Dropout(0.3)

    def forward(self, x: Tensor, *, gain: float = 1.0) -> Tensor:
        out: Tensor = x + gain * self.drop(self.norm(self.conv(x)).relu())
        return out


class Averaged(nn.Module):
    """An observer: what it multiplies by depends on a buffer that moves with every forward pass."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(0.1 * x.detach().abs().amax())
        out: Tensor = self.inner(x).tanh() * self.seen
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.layers = nn.ModuleList(Block(4) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, gain=0.5)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def after_steps(model: nn.Module, inputs: tuple[Tensor, ...], steps: int = 3) -> dict[str, Tensor]:
    """Weights, buffers, gradients and the next random number after some steps of gradient descent."""
    torch.manual_seed(3)
    model.train()
    for _ in range(steps):
        model.zero_grad()
        model(*inputs).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * (parameter.grad if parameter.grad is not None else 0)
    found = dict(model.state_dict()) | {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {"random": torch.rand(4)}


def run_of_layers() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2))))


CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "blocks": (Net, (5, 1, 6, 6)),
    "observers": (lambda: nn.Sequential(Averaged(), Averaged(), nn.Linear(6, 2)), (5, 6)),
    "run of layers": (run_of_layers, (5, 6)),
    "nested": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)), nn.Sequential(nn.Linear(6, 6), nn.Dropout())),
        (5, 6),
    ),
}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_training_is_the_same_to_the_bit(case: str, every: int) -> None:
    make, shape = CASES[case]
    plain, inputs = make(), (torch.randn(shape),)
    other = copy.deepcopy(plain)
    wanted = after_steps(plain, inputs)
    with checkpoint_activations(other, every) as names:
        found = after_steps(other, inputs)
    assert names and found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []


def test_the_blocks_really_run_twice() -> None:
    """Otherwise the test above proves nothing."""
    model, calls = Net(), []
    for block in model.layers:
        block.conv.register_forward_hook(lambda *_: calls.append(1))
    with checkpoint_activations(model, every=2):
        model(torch.randn(2, 1, 6, 6)).sum().backward()
    assert len(calls) == 3 + 2
    with checkpoint_activations(model), torch.no_grad():
        model(torch.randn(2, 1, 6, 6))
    assert len(calls) == 3 + 2 + 3


def test_without_the_care_for_buffers_statistics_would_move_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "_may_move", lambda buffer: False)
    plain, inputs = Net(), (torch.randn(5, 1, 6, 6),)
    other = copy.deepcopy(plain)
    wanted = after_steps(plain, inputs)
    with checkpoint_activations(other):
        found = after_steps(other, inputs)
    assert found["layers.0.norm.num_batches_tracked"] == 2 * wanted["layers.0.norm.num_batches_tracked"]


def test_a_graph_kept_for_a_second_backward_pass() -> None:
    plain, x = Net(), torch.randn(4, 1, 6, 6)
    other = copy.deepcopy(plain)
    found = []
    for model, wrap in ((plain, False), (other, True)):
        torch.manual_seed(0)
        with checkpoint_activations(model) if wrap else torch.enable_grad():
            loss = model(x).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        found.append([p.grad for p in model.parameters()] + list(model.buffers()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_nothing_is_left_behind() -> None:
    model = Net()
    kinds, names = [type(m) for m in model.modules()], list(model.state_dict())
    with checkpoint_activations(model):
        assert list(model.state_dict()) == names and all(isinstance(block, Block) and type(block) is not Block for block in model.layers)
        assert type(model.layers[0]).__name__ == "Block"
    assert [type(m) for m in model.modules()] == kinds
    with pytest.raises(ZeroDivisionError), checkpoint_activations(model):
        raise ZeroDivisionError
    assert [type(m) for m in model.modules()] == kinds


def test_a_copy_made_inside_has_its_own_weights() -> None:
    model, x = Net().eval(), torch.randn(2, 1, 6, 6)
    with checkpoint_activations(model):
        other = copy.deepcopy(model)
        before = other(x)
        with torch.no_grad():
            model.layers[0].conv.weight.zero_()
        assert torch.equal(other(x), before)


def test_decoder_layers_are_found_and_agree() -> None:
    model = CausalLM(DecoderConfig(3, 16, 32, 2, 1, 11, 1e4))
    other = copy.deepcopy(model)
    inputs = (torch.randint(11, (2, 5)), torch.arange(5))
    with checkpoint_activations(other) as names:
        found = after_steps(other, inputs)
    assert names == ["model.layers.0", "model.layers.1", "model.layers.2"]
    wanted = after_steps(model, inputs)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_compiled_training_agrees() -> None:
    model, x = Net(), torch.randn(4, 1, 6, 6)
    for block in model.layers:
        block.drop.p = 0.0  # compiled random numbers are others
    other = copy.deepcopy(model)
    model(x).square().mean().backward()
    with checkpoint_activations(other):
        torch.compile(other, backend="aot_eager")(x).square().mean().backward()
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
    for (name, a), b in zip(model.named_buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_which_blocks() -> None:
    deep = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(Block(2), Block(2)), nn.Linear(2, 2))
    assert [name for name, _ in checkpoint_blocks(deep)] == ["0", "1.0", "1.1"]
    assert [name for name, _ in checkpoint_blocks(deep, every=2)] == ["0", "1.1"]
    assert [name for name, _ in checkpoint_blocks(Net(), names=["layers.[01]"])] == ["layers.0", "layers.1"]
    assert [name for name, _ in checkpoint_blocks(Net(), names=["layers.0*"])] == ["layers.0"], "not the parts of a part"
    assert [name for name, _ in checkpoint_blocks(run_of_layers())] == [""]


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        (nn.Linear(2, 2), {}, "no blocks to recompute in Linear"),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), {}, "no blocks"),
        (Net(), {"every": 0}, "every = 0"),
        (Net(), {"names": ["layer.*"]}, "no module matches 'layer.\\*'"),
    ],
)
def test_bad_options_are_named(model: nn.Module, options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says), checkpoint_activations(model, **options):
        pass


def test_a_replaced_forward_is_refused_and_nothing_changes() -> None:
    model = Net()
    model.layers[2].forward = lambda x, gain: x  # type: ignore[method-assign]
    with pytest.raises(OptionError, match=r"layers\.2"), checkpoint_activations(model):
        pass
    assert type(model.layers[0]) is Block


def test_cost_is_measured_and_memory_falls() -> None:
    """Eight equal blocks: all their activations become their inputs and the inside of one."""
    width, rows = 32, 256
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.Tanh()) for _ in range(8)))
    for layer in model:
        layer[0].requires_grad_(layer is model[0])
    cost = recompute_cost(model, (torch.randn(rows, width),), repeats=2)
    one = rows * width * 4
    assert cost.blocks == 8
    assert cost.before_bytes >= 8 * 4 * one and cost.after_bytes <= (8 + 7 + 4) * one, (cost.before_bytes / one, cost.after_bytes / one)
    assert cost.memory_ratio < 0.6 and cost.time_ratio > 0 and cost.to_dict()["after"]["repeats"] == 2
    assert all(p.grad is None for p in model.parameters())


def test_a_model_that_is_not_trained_has_no_cost() -> None:
    with pytest.raises(OptionError, match="without a trained parameter"):
        recompute_cost(Net().requires_grad_(False), (torch.randn(2, 1, 6, 6),))
