"""Proxies: closed forms on tiny nets, a model left as it was, and ranks that mean something."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from ridgeline.core.errors import RidgelineError, UnknownNameError
from ridgeline.search.proxies import PROXIES, gradnorm, nwot, rank_points, synflow
from ridgeline.search.spaces.cells201 import Cells201Space
from ridgeline.search.table import load_table
from ridgeline.workload.data.find import find_file
from tests.support import FULL


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 36, 5))


IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("depth", [1, 3, 60])
def test_synflow_of_a_chain(depth: int) -> None:
    """Each layer's sum of weight x gradient is the whole flow: the product of |weights|, summed. 60 layers pass float32's range."""
    torch.manual_seed(depth)
    layers = [nn.Linear(7, 7, bias=False) for _ in range(depth)]
    for layer in layers:
        layer.weight.data *= 30
    chain = nn.Sequential(*(part for layer in layers for part in (layer, nn.BatchNorm1d(7), nn.ReLU())))
    flow = torch.ones(7, dtype=torch.float64)
    for layer in layers:
        flow = layer.weight.double().abs() @ flow
    assert math.isclose(synflow(chain, torch.zeros(2, 7)), math.log(depth) + float(flow.detach().sum().log()), rel_tol=1e-12)
    layers[0].weight.data.zero_()
    assert synflow(chain, torch.zeros(2, 7)) == -math.inf


def test_nwot_of_known_patterns() -> None:
    """Three images switch (on, off), (off, on), (on, on): of two activations they share 0, 1 and 1."""
    identity = nn.Linear(2, 2, bias=False)
    identity.weight.data = torch.eye(2)
    images = torch.tensor([[1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]])
    alike = np.array([[2.0, 0, 1], [0, 2, 1], [1, 1, 2]])
    expected = math.log(np.linalg.det(alike))
    assert math.isclose(nwot(nn.Sequential(identity, nn.ReLU()), images), expected, rel_tol=1e-9)

    class ByFunction(nn.Module):
        def forward(self, x: Any) -> Any:
            return functional.relu(x)

    assert math.isclose(nwot(ByFunction(), images), expected, rel_tol=1e-9)
    assert math.isclose(nwot(nn.Sequential(nn.ReLU(), nn.ReLU()), torch.cat([images])), _twice(alike, images), rel_tol=1e-9)
    assert nwot(nn.Sequential(identity, nn.ReLU()), images[[0, 0]]) == -math.inf
    assert nwot(identity, images) == -math.inf


def _twice(alike: Any, images: Any) -> float:
    """A second ReLU sees 0 where the first was off: the same patterns once more."""
    return math.log(np.linalg.det(2 * alike))


def test_gradnorm_of_one_layer() -> None:
    layer, labels = nn.Linear(4, 3).double(), torch.tensor([0, 2, 1, 1, 0])
    images = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    error = (torch.softmax(layer(images), 1) - torch.eye(3, dtype=torch.float64)[labels]).detach() / 5
    assert math.isclose(gradnorm(layer, images, labels), float((error.T @ images).norm() + error.sum(0).norm()), rel_tol=1e-12)


@pytest.mark.parametrize("name", sorted(PROXIES))
@pytest.mark.parametrize("mode", [True, False])
def test_the_model_is_left_as_it_was(name: str, mode: bool) -> None:
    model = net().train(mode)
    model(IMAGES).sum().backward()
    model[0].weight.requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    slopes = [None if value.grad is None else value.grad.clone() for value in model.parameters()]
    modes, draws = [module.training for module in model.modules()], torch.get_rng_state()
    first = PROXIES[name](model, IMAGES)
    assert math.isfinite(first) and first == PROXIES[name](model, IMAGES) and torch.equal(torch.get_rng_state(), draws)
    assert all(torch.equal(value, before[key]) and value.dtype == before[key].dtype for key, value in model.state_dict().items())
    for value, slope in zip(model.parameters(), slopes, strict=True):
        assert (value.grad is None and slope is None) or torch.equal(value.grad, slope)  # type: ignore[arg-type]
    assert [module.training for module in model.modules()] == modes
    assert [value.requires_grad for value in model.parameters()] == [False, True, True, True, True, True]


def test_rank_points() -> None:
    space = Cells201Space(channels=4, cells=1, image=8)
    points = [(1, 1, 1, 1, 1, 1), (2, 2, 2, 2, 2, 2), (0, 1, 0, 1, 1, 1), (1, 1, 0, 1, 1, 1)]
    ranks = rank_points(space, points, ("synflow",), seed=3)
    assert ranks[1] == 3 and ranks[0] == 0 and ranks[2] == ranks[3] == 1.5  # the last two compute the same
    assert np.array_equal(rank_points(space, points, seed=3), rank_points(space, points, seed=3))
    with pytest.raises(UnknownNameError):
        rank_points(space, points, ("synflop",))


@pytest.mark.skipif(not FULL, reason="half a minute and NAS-Bench-201's table; RIDGELINE_FULL=1")
def test_ranks_go_with_trained_accuracy() -> None:
    try:
        table = load_table(find_file("vision/nb201_tables.npz", "nb201_tables.npz", get=""))
    except RidgelineError:
        pytest.skip("no table under RIDGELINE_DATA")
    rows = np.random.default_rng(0).choice(len(table.points), 80, replace=False)
    points = [table.listed.points[row] for row in rows]
    truth = np.argsort(np.argsort(table.column("c10_test200")[rows]))
    for name, least in (("synflow", 0.6), ("nwot", 0.5), ("gradnorm", 0.3)):
        assert np.corrcoef(rank_points(Cells201Space(), points, (name,)), truth)[0, 1] > least
