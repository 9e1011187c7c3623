"""Removed channels: budgets met, the function proved against zeroed channels, what cannot be removed left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ridgeline.core.errors import OptionError, TransformError
from ridgeline.transform.kinds import describe
from ridgeline.transform.prune.channels import channel_scores, find_sets, remove
from ridgeline.transform.prune.structured import check_same, count_flops, prune_channels
from ridgeline.workload.models.cifar_resnet import CifarResNet
from tests.transform.prune.nets import Residual, images, warm

IMAGE = (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)),)


def residual(seed: int = 0) -> Residual:
    torch.manual_seed(seed)
    model = warm(Residual())
    assert isinstance(model, Residual)
    return model


def test_sets_of_a_net_with_everything() -> None:
    """Blocks' inner channels, both branches of a concatenation through a depthwise layer, a flattened head; the rest with reasons."""
    found = find_sets(residual(), IMAGE)
    sets = {each.root: each for each in found.sets}
    assert set(sets) == {"inner1", "inner2", "depthwise", "head"}
    members = {m.layer: m for m in sets["depthwise"].members if m.side == "in" or m.layer != "depthwise"}
    assert {m.layer for m in sets["depthwise"].members} == {"left", "right", "depthwise", "head"}
    pairs = {name: dict(zip(m.places.tolist(), m.channels.tolist(), strict=True)) for name, m in members.items()}
    assert pairs["left"] == {i: i for i in range(10)} and pairs["right"] == {i: i + 10 for i in range(6)}
    assert pairs["head"] == {i: i // 16 for i in range(256)}
    reasons = " ".join(found.left)
    assert "out: its channels are the model's output" in reasons and "changes the channel count" in reasons
    assert find_sets(residual(), IMAGE, skip=("inner*",)).left != found.left


def test_zero_channels_leave_the_function_unchanged() -> None:
    """Channels whose layer and norm give exactly zero are removed; outputs stay equal to float64 rounding."""
    model = residual().double()
    inputs = (IMAGE[0].double(),)
    gone = {"inner1": [0, 5, 11], "depthwise": [2, 9, 10], "head": [3, 4, 19]}
    with torch.no_grad():
        for root, channels in gone.items():
            layer = model.get_submodule(root)
            layer.weight[channels] = 0  # type: ignore[index,operator]
            if layer.bias is not None:
                layer.bias[channels] = 0  # type: ignore[index,operator]
        model.inner1_bn.weight[gone["inner1"]] = 0
        model.inner1_bn.bias[gone["inner1"]] = 0
    wanted = model(*inputs)
    remove(model, inputs, gone)
    assert (model.inner1.out_channels, model.depthwise.groups, model.head.in_features, model.out.in_features) == (9, 13, 13 * 16, 17)
    assert torch.allclose(model(*inputs), wanted, rtol=0, atol=1e-12)
    assert not model.training and all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("importance", ["l1", "l2", "taylor", "random"])
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_flops_budget_is_met_and_near(importance: str, scope: str) -> None:
    model = residual()
    before = count_flops(model, IMAGE)
    shapes = model(*IMAGE).shape
    removed = prune_channels(model, IMAGE, 0.6, importance=importance, scope=scope, data=images())  # type: ignore[arg-type]
    assert removed.flops == (before, count_flops(model, IMAGE)) and 0.5 < removed.flops[1] / before <= 0.6
    assert removed.parameters[1] == sum(p.numel() for p in model.parameters()) < removed.parameters[0]
    assert model(*IMAGE).shape == shapes
    for module in (model.inner1, model.inner1_bn, model.head, model.depthwise):
        assert describe(module) is not None
    assert model.inner1.weight.shape[0] == model.inner1_bn.num_features == removed.widths["inner1"][1]


def test_parameter_budget_rounding_and_floor() -> None:
    model = residual()
    removed = prune_channels(model, IMAGE, 0.5, budget="parameters", round_to=2, most=0.75)
    assert removed.parameters[1] <= 0.5 * removed.parameters[0]
    for before, after in removed.widths.values():
        assert after % 2 == 0 and after >= before / 4


def test_scores_follow_the_definition() -> None:
    """l1 over rows, norm and columns of inner1; bn_scale the norm alone; taylor the gate's gradient, by putting the gate in."""
    model = residual()
    sets = [each for each in find_sets(model, IMAGE).sets if each.root == "inner1"]
    rows = model.inner1.weight.abs().sum((1, 2, 3)) + model.outer1.weight.abs().sum((0, 2, 3))
    assert torch.allclose(channel_scores(model, sets, "l1")[0], (rows / rows.mean()).detach(), rtol=1e-5)
    gamma = model.inner1_bn.weight.abs().detach()
    assert torch.allclose(channel_scores(model, sets, "bn_scale")[0], gamma / gamma.mean(), rtol=1e-5)
    data = images(8)
    got = channel_scores(model, sets, "taylor", data=data, batches=1, batch=8)[0]
    gate = torch.ones(12, requires_grad=True)
    model.outer1.register_forward_pre_hook(lambda module, args: (args[0] * gate[None, :, None, None],))
    nn.functional.cross_entropy(model(data.train.inputs), data.train.targets).backward()
    assert gate.grad is not None and torch.allclose(got, gate.grad.abs(), rtol=1e-3, atol=1e-7)


def test_option_a_shortcuts_survive() -> None:
    """Of the CIFAR ResNet only the inner channels of each block go; half the FLOPs is met, rounded to eight too."""
    torch.manual_seed(0)
    model = CifarResNet(1)
    warm(model)
    inputs = (torch.randn(1, 3, 32, 32),)
    for round_to in (1, 8):
        pruned = copy.deepcopy(model)
        removed = prune_channels(pruned, inputs, 0.5, round_to=round_to)
        assert set(removed.widths) == {f"layer{i}.0.conv1" for i in (1, 2, 3)}
        assert removed.flops[1] <= 0.5 * removed.flops[0] and pruned(torch.randn(4, 3, 32, 32)).shape == (4, 10)
        assert pruned.conv1.out_channels == 16 and pruned.layer3[0].conv2.out_channels == 64
        assert all(after % round_to == 0 for _, after in removed.widths.values())


class Shuffled(nn.Module):
    """Reverses channels between two layers: the dependency graph takes the flip for an elementwise operation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.first(x).relu().flip(1)).relu())


def test_a_hidden_tie_is_caught() -> None:
    """Removal along a wrong map changes the function, and that is an error; with the layer skipped it goes through."""
    torch.manual_seed(0)
    model = Shuffled()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TransformError, match="changed the function"):
        prune_channels(model, IMAGE, 0.5)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    removed = prune_channels(model, IMAGE, 0.7, skip=("first",))
    assert list(removed.widths) == ["second"]


def test_the_check_sees_a_planted_error() -> None:
    model, found = residual(), find_sets(residual(), IMAGE)
    gone = {each.root: [0] for each in found.sets}
    pruned = copy.deepcopy(model)
    remove(pruned, IMAGE, gone)
    check_same(model, pruned, IMAGE, found, gone)
    pruned.outer2.weight.data *= 1.01
    with pytest.raises(TransformError, match="changed the function"):
        check_same(model, pruned, IMAGE, found, gone)


def test_frozen_parameters_and_modes_are_kept() -> None:
    model = residual().train()
    model.inner1.weight.requires_grad_(False)
    model.inner2_bn.eval()
    prune_channels(model, IMAGE, 0.7)
    assert not model.inner1.weight.requires_grad and model.inner2.weight.requires_grad
    assert model.training and not model.inner2_bn.training and all(p.grad is None for p in model.parameters())


def test_channels_last_stays() -> None:
    """Weights taken apart keep the layout they had, or every pass would convert them."""
    model = residual().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    prune_channels(model, IMAGE, 0.7)
    for layer in (model.inner1, model.outer1, model.stem):
        assert layer.weight.is_contiguous(memory_format=torch.channels_last) and not layer.weight.is_contiguous()


def test_what_is_refused() -> None:
    with pytest.raises(OptionError, match="ratio"):
        prune_channels(residual(), IMAGE, 1.5)
    with pytest.raises(TransformError, match="cannot be reached"):
        prune_channels(residual(), IMAGE, 0.01)
    with pytest.raises(TransformError, match="no channel"):
        prune_channels(nn.Sequential(nn.Linear(4, 2)), (torch.randn(1, 4),), 0.5)
    with pytest.raises(TransformError, match="without data"):
        prune_channels(residual(), IMAGE, 0.5, importance="taylor")
    with pytest.raises(TransformError, match="no batch norm"):
        prune_channels(residual(), IMAGE, 0.5, importance="bn_scale")
    with pytest.raises(TransformError, match="traced"):
        prune_channels(residual(), (torch.randn(1, 4, 8, 8),), 0.5)
    broken = residual()
    broken.inner1.weight.data[0] = float("nan")
    with pytest.raises(TransformError, match="not finite"):
        prune_channels(broken, IMAGE, 0.5)
