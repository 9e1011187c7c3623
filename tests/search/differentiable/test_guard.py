"""When a search is stopped, and what it is answered with; device terms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ridgeline.core.errors import OptionError
from ridgeline.search.differentiable.guard import Guard, check, smoothed_rise
from ridgeline.search.differentiable.terms import DeviceTerm, combined


def test_skips_stop_and_the_last_good_epoch_answers() -> None:
    guard = Guard(stop_skips=2, rise=None)
    assert check(guard, [0, 1, 2], []) is None
    stop = check(guard, [0, 2, 3], [])
    assert stop is not None and stop.epoch == 1 and stop.reason.startswith("skips: 3")
    first = check(guard, [5], [])
    assert first is not None and first.epoch == 0
    assert check(Guard(stop_skips=None, rise=None), [14], []) is None


def test_a_risen_eigenvalue_stops_and_the_epoch_before_the_rise_answers() -> None:
    guard = Guard(stop_skips=None, rise=1.3, window=2)
    assert check(guard, [0] * 4, [1.0, 1.0, 1.2, 1.2]) is None
    assert check(guard, [0] * 3, [1.0, 9.0, 9.0]) is None  # too few to smooth
    stop = check(guard, [0] * 5, [1.0, 1.0, -1.1, 1.6, 1.8])
    assert stop is not None and stop.epoch == 2 and stop.reason.startswith("eigenvalue")
    assert smoothed_rise([0.0, 0.0, 1.0, 1.0], 2) == float("inf") and smoothed_rise([0.0] * 4, 2) == 1.0


@pytest.mark.parametrize("wrong", [{"skips": -1}, {"rise": 0.9}, {"window": 0}, {"skip_dropout": 1.0}])
def test_guards_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        Guard(**wrong)  # type: ignore[arg-type]


class Shares:
    """What a term needs of a supernet."""

    def __init__(self) -> None:
        self.weights = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)

    def expected_cost(self, costs: torch.Tensor) -> torch.Tensor:
        return (self.weights.softmax(-1) * costs).sum()


def test_the_term_is_its_weight_at_equal_shares_and_pushes_to_cheap_ops() -> None:
    costs, net = np.random.default_rng(0).uniform(1, 5, size=(3, 4)), Shares()
    term = DeviceTerm(costs, 0.2, (3, 4))
    assert float(term(net).detach()) == pytest.approx(0.2)
    term(net).backward()
    steps = -net.weights.grad.numpy()
    for row, cost in zip(steps, costs, strict=True):
        assert (np.argsort(row) == np.argsort(-cost)).all()  # the cheaper, the larger its share becomes
    assert (steps[np.arange(3), costs.argmin(1)] > 0).all()


def test_terms_of_several_units_weigh_as_told() -> None:
    random = np.random.default_rng(1)
    costs = {"latency": random.uniform(size=(3, 4)) * 1e-3, "energy": random.uniform(size=(3, 4)) * 1e9}
    both = DeviceTerm(combined(costs, {"latency": 0.3, "energy": 0.1}), 0.4, (3, 4))
    apart = [DeviceTerm(costs["latency"], 0.3, (3, 4)), DeviceTerm(costs["energy"], 0.1, (3, 4))]
    net = Shares()
    with torch.no_grad():
        net.weights.normal_(generator=torch.Generator().manual_seed(0))
    assert float(both(net).detach()) == pytest.approx(float(sum(term(net).detach() for term in apart)), rel=1e-6)


@pytest.mark.parametrize("costs", [np.zeros((3, 4)), -np.ones((3, 4)), np.full((3, 4), np.nan), np.ones((2, 4))])
def test_costs_that_make_no_sense(costs: np.ndarray) -> None:
    with pytest.raises(OptionError):
        DeviceTerm(costs, 0.1, (3, 4))
