"""What top_k and sample compute, and the gradients they give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from ridgeline.search.spaces import load_space
from ridgeline.search.supernet.architecture import Architecture, Temperature
from ridgeline.search.supernet.network import Supernet, make_supernet
from ridgeline.search.supernet.plain import plain_of
from ridgeline.search.supernet.step import SearchStep, make_optimisers, set_rate
from tests.support import full_or_tenth


def small(policy: str, name: str = "nb201", **options: object) -> Supernet:
    settings = {"channels": 4, "cells": 1 if name == "nb201" else 3, "image": 8}
    return make_supernet(load_space(name, **settings), policy=policy, **options).double()  # type: ignore[arg-type]


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, 8, 8, generator=random).double(), torch.randint(0, 10, (4,), generator=random)


def spread_out(supernet: Supernet, factor: float = 1.0, seed: int = 0) -> None:
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        weights = supernet.architecture.weights
        weights.copy_(factor * torch.randn(weights.shape, generator=random))


@pytest.mark.parametrize("name", ["darts", "nb201"])
def test_top_k_is_all_with_the_other_shares_zero(name: str) -> None:
    supernet = small("top_k", name, k=2, threshold=0.05)
    spread_out(supernet)
    x, y = batch()
    loss = functional.cross_entropy(supernet(x), y)
    loss.backward()
    plain = plain_of(supernet)
    mask = torch.zeros_like(supernet.architecture.weights)
    for row, columns in enumerate(supernet.top()):
        mask[row, list(columns)] = 1
        assert 1 <= len(columns) <= 2
    shares = plain.architecture.shares
    plain.architecture.shares = lambda: shares() * mask  # type: ignore[method-assign]
    expected = functional.cross_entropy(plain(x), y)
    expected.backward()
    assert abs((loss - expected).item()) <= 1e-12
    found, exact = supernet.architecture.weights.grad, plain.architecture.weights.grad
    assert found is not None and exact is not None and float((found - exact).abs().max()) <= 1e-10 and float(found.abs().max()) > 1e-6


def test_top_k_skips_most_of_the_work_once_weights_separate() -> None:
    supernet = small("top_k", "darts")
    supernet(batch()[0])
    early = supernet.skipped_share
    spread_out(supernet, 6.0)
    assert supernet.refresh() and not supernet.refresh()
    supernet(batch()[0])
    assert 0.5 < early < supernet.skipped_share and supernet.skipped_share > 0.6
    spread_out(supernet, 1e6)  # every edge but one op below the threshold: one is left, never none
    assert supernet.refresh() and {len(columns) for columns in supernet.top()} == {1}


@pytest.mark.parametrize("estimator", ["straight_through", "score"])
def test_sample_runs_one_op_an_edge_and_has_a_gradient(estimator: str) -> None:
    supernet = small("sample", "darts", estimator=estimator)
    spread_out(supernet)
    x, y = batch()
    first = supernet(x)
    functional.cross_entropy(first, y).backward()
    gradient = supernet.architecture.weights.grad
    assert gradient is not None and float(gradient.abs().max()) > 1e-6 and supernet.skipped_share > 0.5
    assert torch.isfinite(gradient).all() and supernet.draws == 1
    assert not torch.allclose(first, supernet(x))  # another draw
    again = small("sample", "darts", estimator=estimator)
    again.load_state_dict(supernet.state_dict())
    assert again.draws == 2 and torch.equal(again(x), supernet(x))  # seed and draws are all it depends on


def test_a_draw_of_nothing_is_a_step_too() -> None:
    supernet = small("sample")
    with torch.no_grad():
        supernet.architecture.weights[:, supernet.ops.index("none")] = 1e6
    step = SearchStep(supernet, *make_optimisers(supernet))
    assert torch.isfinite(step(batch(), batch(1)).weights) and supernet.skipped_share == 1.0


def test_draws_follow_the_shares() -> None:
    supernet = small("sample")
    spread_out(supernet)
    draws = 1500
    counts = np.zeros(supernet.architecture.weights.shape)
    with torch.no_grad():
        for _ in range(draws):
            for row, (column,) in enumerate(supernet.draw()[1]):
                counts[row, column] += 1
    shares = supernet.architecture.shares().detach().numpy()
    assert np.abs(counts / draws - shares).max() < 5 * 0.5 / draws**0.5


def test_score_is_unbiased_where_the_loss_is_linear_in_each_edge() -> None:
    """A loss Σ of products over the paths of a cell, linear in each edge: averaged over draws, the gradient is the expected loss's own."""
    supernet = small("sample", estimator="score")
    spread_out(supernet)
    ops = torch.tensor([1.0, 0.0, -2.0, 0.5, 3.0]).double() * torch.linspace(0.5, 1.5, 6).double()[:, None]  # value of each op, [6, 5]

    def value(edges: torch.Tensor) -> torch.Tensor:  # paths 0->3: (2), (0, 4), (1, 5), (0, 3, 5)
        return edges[2] + edges[0] * edges[4] + edges[1] * edges[5] + edges[0] * edges[3] * edges[5]

    weights = supernet.architecture.weights
    (exact,) = torch.autograd.grad(value((supernet.architecture.shares() * ops).sum(1)), [weights])
    draws, drawn = full_or_tenth(12_000), []
    for _ in range(draws):
        gains, active = supernet.draw()
        chosen = torch.tensor([columns[0] for columns in active])[:, None]
        (one,) = torch.autograd.grad(value((gains * ops).gather(1, chosen)[:, 0]), [weights])
        drawn.append(one)
    found = torch.stack(drawn)
    error = (found.mean(0) - exact).abs() / (found.std(0) / draws**0.5 + 1e-3)
    assert float(error.max()) < 4.5 and float(exact.abs().max()) > 0.5
    assert float((1.3 * found.mean(0) - exact).abs().div(found.std(0) / draws**0.5 + 1e-3).max()) > 4.5  # a wrong scale is seen


def test_evaluation_takes_the_largest_op() -> None:
    supernet = small("all").eval()
    spread_out(supernet)
    x, _ = batch()
    with torch.no_grad():
        out = supernet(x)
        supernet.evaluate_all = True
        assert not torch.allclose(out, supernet(x))
        supernet.architecture.weights.mul_(1e4)  # the shares are one-hot now
        assert torch.allclose(out, supernet(x))
    assert supernet.derive() == tuple(columns[0] for columns in supernet.largest())


@pytest.mark.parametrize("policy", ["all", "top_k", "sample", "partial"])
def test_steps_learn_and_are_each_of_their_own_batch(policy: str) -> None:
    torch.manual_seed(0)
    supernet = (
        small(policy) if policy != "partial" else make_supernet(load_space("nb201", channels=8, cells=1, image=8), policy=policy).double()
    )
    step = SearchStep(supernet, *make_optimisers(supernet, rate=0.05, architecture_rate=0.01), refresh_every=3)
    before = supernet.architecture.weights.detach().clone()
    losses = [step(batch(), batch(1)) for _ in range(15)]
    assert float(losses[-1].weights) < float(losses[0].weights) and not torch.equal(before, supernet.architecture.weights)
    assert all(parameter.requires_grad for parameter in supernet.parameters())
    set_rate(step.weight_optimiser, 0.0)
    set_rate(step.architecture_optimiser, 0.0)
    if policy != "sample":
        first, second, again = (step(batch(seed), batch(seed + 1)) for seed in (5, 6, 5))
        assert float(first.weights) == float(again.weights) != float(second.weights)
        assert first.architecture is not None and second.architecture is not None
        assert float(first.architecture) != float(second.architecture)
    assert step(batch()).architecture is None


def test_a_step_is_the_two_plain_steps() -> None:
    supernet = small("all")
    plain = plain_of(supernet)
    step = SearchStep(supernet, *make_optimisers(supernet), clip=None)
    found = step(batch(0), batch(1))
    architecture = torch.optim.Adam(plain.architecture.parameters(), lr=3e-4, betas=(0.5, 0.999), weight_decay=1e-3)
    functional.cross_entropy(plain(batch(1)[0]), batch(1)[1]).backward()
    architecture.step()
    assert torch.allclose(plain.architecture.weights, supernet.architecture.weights, atol=1e-12)
    expected = functional.cross_entropy(plain(batch(0)[0]), batch(0)[1])
    assert abs((found.weights - expected).item()) < 1e-12


def test_expected_cost_and_temperature() -> None:
    supernet = small("all")
    costs = torch.arange(30.0).view(6, 5)
    cost = supernet.expected_cost(costs)
    assert abs((cost - (supernet.architecture.shares() * costs).sum()).item()) < 1e-12
    cost.backward()
    assert supernet.architecture.weights.grad is not None and float(supernet.architecture.weights.grad.abs().max()) > 0.1
    for kind in ("exponential", "linear", "cosine"):
        schedule = Temperature(8.0, 0.5, 10, kind)
        values = [schedule.at(step) for step in range(14)]
        assert values[0] == 8.0 and values[10:] == pytest.approx([0.5] * 4) and values == sorted(values, reverse=True)


def test_gumbel_softmax_is_one_call_for_all_edges() -> None:
    architecture = Architecture(3, 4)
    draw = torch.Generator().manual_seed(1)
    drawn = [architecture.shares(0.5, hard=True, generator=draw) for _ in range(300)]
    hard = torch.stack(drawn).detach()
    assert torch.allclose(hard.sum(-1), torch.ones(300, 3), atol=1e-6) and torch.allclose(
        hard.max(-1).values, torch.ones(300, 3), atol=1e-6
    )
    assert float((hard.mean(0) - 0.25).abs().max()) < 0.13
    drawn[0].sum(0)[0].backward()
    assert architecture.weights.grad is not None and float(architecture.weights.grad.abs().max()) > 0
