"""The exact lowest scores against a full sort, gradient scores against a hand-made network, and what is refused."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ridgeline.core.errors import OptionError, TransformError
from ridgeline.transform.prune import scores as scores_module
from ridgeline.transform.prune.scores import gradients_of, lowest, score, weights_of
from ridgeline.workload.data import Data, Split
from tests.support import full_or_tenth
from tests.transform.prune.nets import Residual, blobs, images, perceptron


def sorted_masks(scores: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """The oracle: a stable sort of everything."""
    flat = torch.cat([s.flatten() for s in scores.values()])
    mask = torch.zeros(len(flat), dtype=torch.bool)
    mask[flat.argsort(stable=True)[:count]] = True
    parts = mask.split([s.numel() for s in scores.values()])
    return {name: part.view(s.shape) for (name, s), part in zip(scores.items(), parts, strict=True)}


values = st.sampled_from([0.0, 1e-45, 1e-38, 0.5, 0.5, 1.0, 1.0000001, 3.4e38])
tensors = st.lists(st.lists(values, min_size=1, max_size=40), min_size=1, max_size=4)


@settings(max_examples=full_or_tenth(300), deadline=None)
@given(tensors, st.floats(0, 0.999), st.sampled_from(["global", "layer"]), st.integers(1, 7))
def test_lowest_is_a_stable_sort(rows: list[list[float]], sparsity: float, scope: str, chunk: int) -> None:
    """Ties, denormals and extremes included; chunks of any size give the same."""
    scores = {f"w{i}": torch.tensor(row) for i, row in enumerate(rows)}
    whole, scores_module.CHUNK = scores_module.CHUNK, chunk
    try:
        got = lowest(scores, sparsity, scope)  # type: ignore[arg-type]
    finally:
        scores_module.CHUNK = whole
    if scope == "global":
        want = sorted_masks(scores, round(sparsity * sum(len(r) for r in rows)))
    else:
        want = {name: sorted_masks({name: s}, round(sparsity * len(s)))[name] for name, s in scores.items()}
    assert all(torch.equal(got[name], want[name]) for name in scores)


def test_what_is_pruned_stays_pruned() -> None:
    """Also where a pruned weight has the highest score and live ones score zero."""
    scores = {"w": torch.tensor([9.0, 0.0, 0.0, 5.0])}
    pruned = {"w": torch.tensor([True, False, False, True])}
    assert lowest(scores, 0.5, pruned=pruned)["w"].tolist() == [True, False, False, True]
    assert lowest(scores, 0.75, pruned=pruned)["w"].tolist() == [True, True, False, True]


def test_twenty_million_weights() -> None:
    """Exact to one weight where torch.quantile gives up, in seconds."""
    big = torch.rand(20_000_003, generator=torch.Generator().manual_seed(0))
    big[:1000] = 0.8  # ties at about the threshold
    start = time.perf_counter()
    mask = lowest({"a": big[:15_000_000].view(3000, 5000), "b": big[15_000_000:]}, 0.8)
    took_s = time.perf_counter() - start
    assert int(mask["a"].sum()) + int(mask["b"].sum()) == round(0.8 * len(big))
    gone = torch.cat([mask["a"].flatten(), mask["b"]])
    assert float(big.masked_fill(~gone, 0.0).max()) <= float(big.masked_fill(gone, 1.0).min())
    assert took_s < 20


def test_magnitude_keeps_the_largest() -> None:
    layer = nn.Linear(4, 1, bias=False)
    layer.weight.data = torch.tensor([[-3.0, 0.1, 2.0, -0.2]])
    mask = lowest(score(weights_of(layer)), 0.5)
    assert mask["weight"].tolist() == [[False, True, False, True]]


def linear_data() -> tuple[nn.Module, Data]:
    """Class 1 is decided by feature 0 alone; feature 2 is constant zero, so its weights have no gradient."""
    inputs = torch.zeros(64, 3)
    targets = torch.arange(64) % 2
    inputs[:, 0] = targets * 2.0 - 1.0
    inputs[:, 1] = 0.1 * inputs[:, 0]
    model = nn.Linear(3, 2, bias=False)
    model.weight.data = torch.tensor([[0.1, 5.0, 5.0], [0.1, 5.0, 5.0]])
    split = Split(inputs, targets)
    return model, Data("line", "image", 2, split, split)


def test_gradient_keeps_the_largest_gradients() -> None:
    """Planted: weights of a dead feature are large but have no gradient; the bug that keeps the smallest would keep them."""
    model, data = linear_data()
    weights = weights_of(model)
    mask = lowest(score(weights, "gradient", model=model, data=data), 1 / 3)["weight"]
    assert mask.tolist() == [[False, False, True], [False, False, True]]
    assert lowest(score(weights), 1 / 3)["weight"][:, 0].all()  # magnitude would drop the feature that decides


@pytest.mark.parametrize("taylor", [False, True])
def test_gradient_scores_equal_autograd(taylor: bool) -> None:
    """Σ over batches of |g| or |w·g|, each batch's gradient by backward() in float64."""
    model, data = perceptron().double(), blobs(seed=3)
    data = Data("d", "image", 4, Split(data.train.inputs.double(), data.train.targets), data.test)
    got = score(weights_of(model), "taylor" if taylor else "gradient", model=model, data=data, batches=3, batch=20, seed=5)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(5))[:60]
    want = {name: torch.zeros_like(p) for name, p in model.named_parameters() if name.endswith("weight")}
    for rows in order.split(20):
        model.zero_grad()
        nn.functional.cross_entropy(model(data.train.inputs[rows]), data.train.targets[rows]).backward()
        for name, parameter in model.named_parameters():
            if name in want:
                want[name] += (parameter.grad * parameter.detach() if taylor else parameter.grad).abs()
    for name in want:
        assert torch.allclose(got[name].double(), want[name], rtol=1e-5, atol=1e-9)


def test_scoring_leaves_the_model_alone() -> None:
    """No gradients, statistics, modes or flags change."""
    model = Residual().train()
    model.stem.weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    score(weights_of(model), "gradient", model=model, data=images(), batches=2, batch=8)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and not model.stem.weight.requires_grad
    assert all(module.training for module in model.modules())
    left = gradients_of(model, [model.out.weight], images(), batches=2, batch=8)
    next(left)
    left.close()
    assert model.training


def test_random_scores_are_seeded() -> None:
    weights = weights_of(perceptron())
    first, again, other = (score(weights, "random", seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in weights)
    assert not torch.equal(first["0.weight"], other["0.weight"])


def test_patterns_and_shared_weights() -> None:
    model = perceptron()
    model.append(nn.Linear(4, 32))
    model[5].weight = model[4].weight  # shared
    assert list(weights_of(model)) == ["0.weight", "2.weight", "4.weight"]
    assert list(weights_of(model, include=("2", "4"), skip=("4",))) == ["2.weight"]
    with pytest.raises(OptionError, match="fits no layer"):
        weights_of(model, skip=("layer9.*",))
    with pytest.raises(TransformError, match="no weight"):
        weights_of(nn.ReLU())


def test_bad_values_are_refused() -> None:
    model = perceptron()
    for sparsity in (-0.1, 1.0, float("nan")):
        with pytest.raises(OptionError, match="sparsity"):
            lowest({"w": torch.ones(3)}, sparsity)
    with pytest.raises(TransformError, match="without data"):
        score(weights_of(model), "gradient")
    model[2].weight.data[0, 0] = float("nan")
    with pytest.raises(TransformError, match=r"2\.weight"):
        score(weights_of(model))
