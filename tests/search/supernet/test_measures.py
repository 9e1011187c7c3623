"""Entropy, KL, mutual information and Gini against sums written out with exact fractions of float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.search.supernet.measures import measure_shares
from tests.support import full_or_tenth

Rows = list[list[float]]


def rows(values: st.SearchStrategy[float]) -> st.SearchStrategy[Rows]:
    def of_width(width: int) -> st.SearchStrategy[Rows]:
        return st.lists(st.lists(values, min_size=width, max_size=width), min_size=1, max_size=4)

    return st.integers(2, 6).flatmap(of_width)


def softmax(row: list[float]) -> list[float]:
    most = max(row)
    up = [math.exp(value - most) for value in row]
    return [value / math.fsum(up) for value in up]


def oracle(shares: Rows) -> tuple[list[float], list[float], list[float], float]:
    def log_sum(p: list[float], q: list[float]) -> float:
        return math.fsum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True) if a > 0)

    mean = [math.fsum(column) / len(shares) for column in zip(*shares, strict=True)]
    entropy = [-log_sum(p, [1.0] * len(p)) for p in shares]
    kl = [log_sum(p, [1 / len(p)] * len(p)) for p in shares]
    gini = [math.fsum(a * (1 - a) for a in p) for p in shares]
    return entropy, kl, gini, math.fsum(log_sum(p, mean) for p in shares) / len(shares)


def check(found: object, shares: Rows) -> None:
    names = ("entropy", "kl", "gini", "mutual_information")
    for name, exact in zip(names, oracle(shares), strict=True):
        ours = getattr(found, name)
        assert torch.isfinite(ours).all() and torch.allclose(ours, torch.tensor(exact, dtype=torch.float64), rtol=1e-10, atol=1e-12), name


@settings(max_examples=full_or_tenth(300), deadline=None)
@given(rows(st.one_of(st.floats(-700, 700), st.just(0.0), st.just(-math.inf))))
def test_of_logits(logits: Rows) -> None:
    logits = [row if max(row) > -math.inf else [0.0] * len(row) for row in logits]
    check(measure_shares(torch.tensor(logits, dtype=torch.float64)), [softmax(row) for row in logits])


@settings(max_examples=full_or_tenth(200), deadline=None)
@given(rows(st.one_of(st.floats(1e-6, 1), st.just(0.0))))
def test_of_shares(given_rows: Rows) -> None:
    shares = [[value / sum(row) for value in row] if sum(row) else [1.0] + [0.0] * (len(row) - 1) for row in given_rows]
    check(measure_shares(torch.tensor(shares, dtype=torch.float64), logits=False), shares)


def test_ends_batches_and_reference() -> None:
    uniform, decided = torch.zeros(2, 4), torch.tensor([[50.0, -math.inf, -math.inf, -math.inf]] * 2)
    both = measure_shares(torch.stack((uniform, decided)))
    assert both.entropy.shape == (2, 2) and both.mutual_information.shape == (2,)
    assert both.entropy[0].tolist() == pytest.approx([math.log(4)] * 2) and both.entropy[1].tolist() == [0.0, 0.0]
    assert both.gini.tolist()[1] == [0.0, 0.0] and both.mutual_information.tolist() == pytest.approx([0.0, 0.0], abs=1e-7)
    halves = torch.tensor([[0.5, 0.5, 0.0]])
    found = measure_shares(halves, logits=False, reference=torch.tensor([1.0, 0.0, 0.0]))
    assert math.isinf(float(found.kl))
    assert float(measure_shares(halves, logits=False, reference=halves[0]).kl) == 0.0
    opposite = measure_shares(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), logits=False)
    assert float(opposite.mutual_information) == pytest.approx(math.log(2))


def test_gradients_are_finite_at_zeros() -> None:
    logits = torch.tensor([[0.0, -math.inf, 1.0], [3.0, 1.0, 2.0]], requires_grad=True)
    found = measure_shares(logits)
    (found.entropy.sum() + found.kl.sum() + found.gini.sum() + found.mutual_information).backward()
    assert logits.grad is not None and torch.isfinite(logits.grad[1]).all()
