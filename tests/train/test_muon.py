"""Orthogonal steps against the singular value decomposition; the rest against torch's SGD."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ridgeline.core.errors import OptionError
from ridgeline.train.muon import Muon, is_matrix, orthogonal
from ridgeline.train.optimiser import build_optimiser
from ridgeline.train.options import check_settings


@pytest.mark.parametrize("shape", [(2, 20, 50), (1, 50, 20), (3, 32, 32)])
def test_singular_vectors_stay_and_values_become_one(shape: tuple[int, int, int]) -> None:
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made = orthogonal(given)
    left, sizes, right = torch.linalg.svd(given, full_matrices=False)
    inner = left.mT @ made @ right.mT  # diagonal where the vectors are the same
    values = inner.diagonal(dim1=1, dim2=2)
    assert (inner - torch.diag_embed(values)).abs().max() < 2e-3
    large = sizes >= 0.002 * given.flatten(1).norm(dim=1)[:, None]
    assert large.float().mean() > 0.9 and values[large].min() > 0.65 and values.max() < 1.25 and values.min() > 0
    torch.testing.assert_close(orthogonal(given * 1e-4), made, rtol=1e-3, atol=1e-4)  # the size of the gradient does not matter


def test_a_step_is_what_the_formula_says() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(16, 32, 3, bias=False)
    before, gradient = layer.weight.detach().clone(), torch.randn(32, 16, 3, 3)
    made = Muon([{"params": [layer.weight], "orthogonal": True}], 0.1, 0.9, True, 0.5)
    layer.weight.grad = gradient.clone()
    made.step()
    direction = orthogonal(gradient.reshape(1, 32, -1)).reshape(before.shape)
    torch.testing.assert_close(layer.weight.detach(), before * (1 - 0.1 * 0.5) - 0.1 * direction)
    assert direction.norm() / 32**0.5 == pytest.approx(1.0, abs=0.25)  # the relative change is the rate in every layer


def test_the_rest_is_nesterov_sgd() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    made = Muon([{"params": list(ours.parameters())}], 0.1, 0.9, True, 0.01)
    wanted = torch.optim.SGD(theirs.parameters(), 0.1, 0.9, nesterov=True, weight_decay=0.01)
    for _ in range(5):
        x = torch.randn(4, 5)
        for model, optimiser in ((ours, made), (theirs, wanted)):
            optimiser.zero_grad()
            model(x).square().mean().backward()
            optimiser.step()
    torch.testing.assert_close(ours.weight, theirs.weight)


def test_groups_and_rates() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3, groups=32), nn.Conv2d(32, 64, 1), nn.BatchNorm2d(64), nn.Linear(64, 10))
    assert [name for name, p in model.named_parameters() if is_matrix(p)] == ["2.weight"]
    settings = check_settings(steps=1, optimiser="muon", learning_rate=0.05, rest_rate=0.5, weight_decay=0.02, decay="matrices")
    made = build_optimiser(model.named_parameters(), settings, None)
    found = {(group["orthogonal"], group["initial_lr"], group["weight_decay"], len(group["params"])) for group in made.param_groups}
    assert found == {(True, 0.05, 0.02, 1), (False, 0.5, 0.002, 3), (False, 0.5, 0.0, 6)}
    with pytest.raises(OptionError, match="rest_rate"):
        check_settings(steps=1, optimiser="sgd", rest_rate=0.5)


def test_a_tall_matrix_takes_a_larger_step() -> None:
    """√(R/C) for R above C: every output changes as much as in a square one."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 64, bias=False)
    before, gradient = layer.weight.detach().clone(), torch.randn(64, 16)
    made = Muon([{"params": [layer.weight], "orthogonal": True}], 0.1, 0.9, True)
    layer.weight.grad = gradient.clone()
    made.step()
    torch.testing.assert_close(layer.weight.detach(), before - 0.1 * 2.0 * orthogonal(gradient[None])[0])
