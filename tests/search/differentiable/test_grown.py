"""The network of aso-se: growth preserves the function, opening and closing keep weights, plans survive JSON."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ridgeline.core.errors import OptionError
from ridgeline.search.differentiable.grow_net import branch, deeper, next_width, wider
from ridgeline.search.differentiable.grown import EDGES, GrownNet, Plan, close_stages, open_stages, plan_from_json

OPS = ("skip", "conv3x3", "conv1x1", "avgpool")
DARTS_OPS = ("sep_conv_3x3", "dil_conv_5x5", "max_pool_3x3", "skip_connect")


def make(ops: tuple[str, ...] = OPS, dtype: torch.dtype = torch.float32) -> tuple[GrownNet, torch.Tensor]:
    """A network that has seen some data, so that its batch norms have statistics."""
    torch.manual_seed(0)
    edges = tuple(tuple((ops[(stage + edge) % len(ops)],) for edge in range(len(EDGES))) for stage in range(3))
    net, x = GrownNet(Plan(8, (2, 1, 1), edges, classes=5)).to(dtype), torch.randn(6, 3, 8, 8, dtype=dtype)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.3)
            nn.init.normal_(module.bias, 0.0, 0.3)
    for _ in range(3):
        net(x + torch.randn_like(x))
    return net.eval(), x


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-11)])
@pytest.mark.parametrize("ops", [OPS, DARTS_OPS], ids=["nb201", "darts"])
def test_growth_preserves_the_function(ops: tuple[str, ...], dtype: torch.dtype, bound: float) -> None:
    net, x = make(ops, dtype)
    wanted = net(x).detach()
    for grow in (
        lambda n: wider(n, 12),
        lambda n: deeper(n, 1),
        lambda n: branch(n, 0, 2, ops[1]),
        lambda n: wider(n, 32),
        lambda n: deeper(n, 2),
    ):
        net = grow(net)
        assert (net(x) - wanted).abs().max() <= bound * wanted.abs().max()
    assert net.plan.channels == 32 and net.plan.cells == (2, 2, 2) and net.plan.edges[0][2] == (*make(ops)[0].plan.edges[0][2], ops[1])
    again = GrownNet(plan_from_json(net.plan.to_json())).to(dtype).eval()
    again.load_state_dict(net.state_dict())
    assert torch.equal(again(x), net(x))


def test_copied_channels_learn_different_things() -> None:
    net, x = make()
    net = wider(net, 16).train()
    net(x).square().sum().backward()
    gradient = net.stem[0].weight.grad
    assert gradient is not None
    old, copies = gradient[:8], gradient[8:]
    assert ((old - copies).flatten(1).norm(dim=1) > 0.01 * old.flatten(1).norm(dim=1)).all()


def test_growth_preserves_the_training_function_too() -> None:
    net, x = make(dtype=torch.float64)
    net.train()
    wanted = net(x).detach()
    assert (wider(net, 16)(x) - wanted).abs().max() < 1e-10 * wanted.abs().max()


def test_new_cells_and_branches_start_to_learn() -> None:
    net, x = make()
    net = branch(deeper(net, 0), 1, 0, "conv3x3").train()
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    cell, beside = net.stages[0][-1], net.stages[1][0].edges[0].paths[-1]
    before = [cell.edges[1].paths[0][1].weight.clone(), beside[1].weight.clone()]
    for _ in range(2):
        optimiser.zero_grad()
        net(x).logsumexp(1).sum().backward()
        optimiser.step()
    assert not torch.equal(cell.edges[1].paths[0][1].weight, before[0]) and not torch.equal(beside[1].weight, before[1])


def test_opening_gives_the_head_start_and_closing_keeps_the_chosen_weights() -> None:
    net, x = make()
    own = net.stages[1][0].edges[0].paths[0]
    wanted = net(x).detach()
    open_stages(net, (1,), OPS, head_start=0.6, seed=0)
    shares = net.mixture.softmax(-1)
    places = [OPS.index(names[0]) for names in net.plan.edges[1]]
    assert torch.allclose(shares[0, torch.arange(6), torch.tensor(places)], torch.tensor(0.6), atol=0.01)
    net(x).square().sum().backward()
    assert (net.mixture.grad.abs().sum(-1) > 0).all()  # no edge without a gradient
    with pytest.raises(OptionError, match="open"):
        wider(net, 16)
    close_stages(net, OPS, [places])
    assert net.stages[1][0].edges[0].paths[0] is own and torch.equal(net(x), wanted)
    open_stages(net, (1,), OPS, head_start=0.6, seed=0)
    chosen = net.stages[1][0].edges[3].candidates[1]
    close_stages(net, OPS, [[1] * 6])
    assert net.plan.edges[1] == (("conv3x3",),) * 6 and net.stages[1][0].edges[3].paths[0] is chosen


def test_branches_need_a_norm_at_their_end() -> None:
    with pytest.raises(OptionError, match="batch norm"):
        branch(make()[0], 0, 0, "avgpool")
    assert [next_width(c) for c in (8, 32, 64)] == [16, 48, 88]


@pytest.mark.parametrize("path", [("schema",), ("space",), ("settings", "channels"), ("settings", "cells"), ("stages",)])
@pytest.mark.parametrize("value", [None, -1, "x", [], {}, 1e9, [[["conv3x3"]]]])
def test_hostile_plans(path: tuple[str, ...], value: object) -> None:
    given = Plan(8, (1, 1, 1), ((("conv3x3",),) * len(EDGES),) * 3, classes=5).to_json()
    place = given
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(OptionError):
        plan_from_json(given)
