"""Mixed precision: the choice against brute force, sensitivities against single layers quantised by hand."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ridgeline.core.errors import TransformError
from ridgeline.transform.quantise import mixed
from ridgeline.transform.quantise.int8_layers import Int8Linear
from ridgeline.transform.quantise.mixed import choose, divergence, quantise_mixed_, sensitivities
from ridgeline.transform.quantise.packed import PackedLinear
from tests.support import full_or_tenth

LAYER = st.lists(st.tuples(st.integers(1, 40), st.floats(0, 8, width=16)), min_size=1, max_size=4)


def brute(costs: list[list[float]], losses: list[list[float]], budget: float) -> float | None:
    sums = [
        (sum(c[i] for c, i in zip(costs, way, strict=True)), sum(q[i] for q, i in zip(losses, way, strict=True)))
        for way in itertools.product(*(range(len(row)) for row in costs))
    ]
    return min((loss for cost, loss in sums if cost <= budget), default=None)


@given(st.lists(LAYER, min_size=1, max_size=5), st.integers(1, 160))
@settings(max_examples=full_or_tenth(1000), deadline=None)
def test_choice_is_the_best_there_is(layers: list[list[tuple[int, float]]], budget: int) -> None:
    costs, losses = [[float(c) for c, _ in layer] for layer in layers], [[q for _, q in layer] for layer in layers]
    best = brute(costs, losses, budget)
    if best is None:
        with pytest.raises(TransformError, match="budget"):
            choose(costs, losses, budget)
        return
    found = choose(costs, losses, budget)
    assert found.exact and found.cost <= budget
    assert found.loss == pytest.approx(best, abs=1e-9)
    assert found.cost == sum(row[i] for row, i in zip(costs, found.options, strict=True))
    assert found.loss == pytest.approx(sum(row[i] for row, i in zip(losses, found.options, strict=True)))


def test_merged_states_stay_within_the_budget_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.Generator().manual_seed(0)
    costs = (torch.rand(12, 3, generator=made) + 0.1).tolist()
    losses = torch.rand(12, 3, generator=made).tolist()
    exact = choose(costs, losses, 6.0)
    monkeypatch.setattr(mixed, "MOST_STATES", 10)
    rough = choose(costs, losses, 6.0)
    assert exact.exact and not rough.exact and rough.cost <= 6.0 and exact.loss <= rough.loss <= 1.5 * exact.loss


@pytest.fixture
def model() -> nn.Module:
    """The second layer is far more sensitive than the third: its answers are multiplied by 20 on the way."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    net[2].weight.data *= 3
    return net


@pytest.fixture
def batches() -> list[tuple[Tensor]]:
    return [(torch.randn(64, 16, generator=torch.Generator().manual_seed(seed)),) for seed in range(2)]


def test_sensitivity_is_that_of_one_layer_alone(model: nn.Module, batches: list[tuple[Tensor]]) -> None:
    layers = {"0": model[0], "2": model[2], "4": model[4]}
    make = mixed._maker(model, layers, batches, False, "mse", 99.99)
    with torch.no_grad():
        found = sensitivities(model, layers, (2, 4, 8, 32), make, batches)
        for name, row in found.items():
            twin = copy.deepcopy(model)
            twin[int(name)] = make(name, layers[name], 2)
            x = torch.cat([batch[0] for batch in batches])
            p, q = (one(x).double().log_softmax(-1) for one in (model, twin))
            assert row[0] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
            assert row[0] > row[1] > row[2] >= row[3] == 0.0
    assert model[0] is layers["0"]  # put back


@pytest.mark.parametrize("activations", [True, False])
def test_budget_in_bits_is_kept_and_spent_where_it_matters(model: nn.Module, batches: list[tuple[Tensor]], activations: bool) -> None:
    whole = copy.deepcopy(model)
    found = quantise_mixed_(model, batches, choices=(2, 4, 8), budget_bits=4, activations=activations)
    counts = {"0": 16 * 32, "2": 32 * 32, "4": 32 * 4}
    assert sum(counts[name] * bits for name, bits in found.bits.items()) == found.cost <= 4 * sum(counts.values())
    assert isinstance(model[0], Int8Linear if activations else PackedLinear)
    assert [row.bits for row in found.rows] == [found.bits[name] for name in ("0", "2", "4")]
    ways = {
        way: sum(found.table[i]["kl"][(2, 4, 8).index(bits)] for i, bits in enumerate(way))
        for way in itertools.product((2, 4, 8), repeat=3)
    }
    within = {way: kl for way, kl in ways.items() if sum(c * b for c, b in zip(counts.values(), way, strict=True)) <= found.budget}
    assert found.predicted_kl == pytest.approx(min(within.values()))
    with torch.no_grad():
        again = divergence(model, batches, mixed.answers(whole, batches))
    assert again == pytest.approx(found.measured_kl, rel=1e-3) and found.measured_kl > 0


def test_budget_in_bytes_counts_every_stored_tensor(model: nn.Module, batches: list[tuple[Tensor]]) -> None:
    found = quantise_mixed_(model, batches, choices=(2, 3, 4, 8), budget_bytes=1500)
    stored = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert found.cost - 5 == stored < 1500  # the last layer is not linked; its output grid was allowed for


def test_budget_in_seconds_leaves_float_where_that_is_cheaper(model: nn.Module, batches: list[tuple[Tensor]]) -> None:
    found = quantise_mixed_(model, batches, choices=(8, 32), budget_latency_s=10.0)
    assert set(found.bits.values()) == {32} and found.predicted_kl == 0.0 and found.rows == [] and found.unit == "s"


def test_impossible_budgets_are_refused(model: nn.Module, batches: list[tuple[Tensor]]) -> None:
    with pytest.raises(TransformError, match="cheapest"):
        quantise_mixed_(copy.deepcopy(model), batches, choices=(4, 8), budget_bits=3)
    with pytest.raises(TransformError, match="without a budget"):
        quantise_mixed_(copy.deepcopy(model), batches)
