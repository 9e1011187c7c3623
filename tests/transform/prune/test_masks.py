"""Masks hold through real optimiser steps with momentum, and leave +0.0 behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ridgeline.core.errors import TransformError
from ridgeline.transform.prune.masks import Masks
from ridgeline.transform.prune.scores import lowest, score, weights_of
from tests.transform.prune.nets import blobs, perceptron


@pytest.mark.parametrize("optimiser", [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, 0.01)])
def test_momentum_does_not_revive(optimiser) -> None:  # type: ignore[no-untyped-def]
    """Momentum gathered before the pruning pushes pruned weights at every step after it."""
    model, data = perceptron(), blobs()
    updates = optimiser(model.parameters())

    def train_step() -> None:
        updates.zero_grad()
        nn.functional.cross_entropy(model(data.train.inputs), data.train.targets).backward()
        updates.step()

    for _ in range(5):
        train_step()
    masks = Masks(model, lowest(score(weights_of(model)), 0.8))
    revived = 0
    for step in range(10):
        train_step()
        revived += sum(int(torch.count_nonzero(masks.parameters[name][mask])) for name, mask in masks.pruned.items())
        masks(model, step)
        for name, mask in masks.pruned.items():
            assert not masks.parameters[name][mask].any()
            assert masks.parameters[name][~mask].all()  # the others live
    assert revived > 0  # the hook had something to do
    masks.close()
    assert not masks.pruned and not any(name.endswith("mask") for name, _ in model.named_buffers())


def test_zeros_are_true_zeros() -> None:
    """Negative weights and NaN become +0.0, bit for bit."""
    layer = nn.Linear(3, 1, bias=False)
    layer.weight.data = torch.tensor([[-1.0, float("nan"), 2.0]])
    Masks(layer, {"weight": torch.tensor([[True, True, False]])}).close()
    assert layer.weight.view(torch.int32).tolist()[0][:2] == [0, 0]


def test_rows_and_sparsity() -> None:
    masks = Masks(perceptron(), {"4.weight": torch.eye(4, 32, dtype=torch.bool)})
    assert masks.rows() == [{"layer": "4.weight", "weights": 128, "pruned": 4}]
    assert masks.sparsity == 4 / 128


def test_masks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TransformError, match="no such parameter"):
        Masks(perceptron(), {"9.weight": torch.ones(1, dtype=torch.bool)})
    with pytest.raises(TransformError, match=r"torch\.float32"):
        Masks(perceptron(), {"4.weight": torch.ones(4, 32)})
    with pytest.raises(TransformError, match="shape"):
        Masks(perceptron(), {"4.weight": torch.ones(4, 4, dtype=torch.bool)})
