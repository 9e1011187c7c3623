"""The cubic schedule to the formula, and gradual pruning through real training."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import OptionError
from ridgeline.train.evaluate import evaluate
from ridgeline.transform.prune.schedule import Gradual, cubic_sparsity, prune_gradually
from ridgeline.transform.prune.scores import weights_of
from tests.support import full_or_tenth
from tests.transform.prune.nets import blobs, perceptron


def test_the_formula() -> None:
    """Ends exact; half way seven eighths are done; flat outside."""
    assert [cubic_sparsity(t, 0.8, begin=10, end=20) for t in (0, 10, 15, 20, 99)] == pytest.approx([0, 0, 0.7, 0.8, 0.8])
    assert cubic_sparsity(15, 0.8, begin=10, end=20, initial=0.4) == pytest.approx(0.75)
    assert cubic_sparsity(3, 0.5, begin=3, end=3) == 0.5


@settings(max_examples=full_or_tenth(200), deadline=None)
@given(st.integers(0, 50), st.integers(0, 50), st.floats(0, 0.99), st.integers(-5, 120))
def test_it_never_falls(begin: int, length: int, final: float, step: int) -> None:
    here, there = (cubic_sparsity(t, final, begin=begin, end=begin + length) for t in (step, step + 1))
    assert 0 <= here <= there + 1e-12 <= final + 1e-9


@pytest.mark.parametrize("method", ["magnitude", "taylor"])
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_gradually_to_the_exact_count(method: str, scope: str) -> None:
    model, data = perceptron(), blobs()
    masks, record = prune_gradually(
        model, data, 0.8, epochs=10, batch=32, every=7, method=method, scope=scope, learning_rate=0.05, progress=False  # type: ignore[arg-type]
    )  # fmt: skip
    weights = weights_of(model)
    wanted = [round(0.8 * 1664)] if scope == "global" else [round(0.8 * n) for n in (512, 1024, 128)]
    zeros = [int((w == 0).sum()) for w in weights.values()]
    assert sum(zeros) == sum(wanted) and (scope == "global" or zeros == wanted)
    shares = [share for _, share in record["sparsity"]]
    assert shares == sorted(shares) and len(shares) > 5 and record["sparsity"][-1][0] == record["ramp_steps"] == 48
    assert all(torch.equal(masks.pruned[name], weight == 0) for name, weight in weights.items())
    assert evaluate(model, data).accuracy > 0.9
    assert not any("mask" in name for name in model.state_dict())


def test_zeros_of_before_stay_and_early_end_is_made_good() -> None:
    """A weight that was zero stays zero; a ramp that training did not finish is finished after it."""
    model, data = perceptron(), blobs()
    model[0].weight.data[:8] = 0
    masks, record = prune_gradually(model, data, 0.5, epochs=1, batch=64, ramp=1.0, every=1, learning_rate=0.05, progress=False)
    assert not model[0].weight[:8].any() and masks.sparsity == pytest.approx(0.5, abs=1e-3)
    first = record["sparsity"][0][1]
    assert first == pytest.approx(128 / 1664, abs=1e-3)  # the schedule starts from what was there


def test_masks_hold_between_events() -> None:
    """Planted: a weight revived between two events is zero again after the hook."""
    model, data = perceptron(), blobs()
    hook = Gradual(model, data, 0.5, begin=0, end=10, every=5)
    for step in range(11):
        model[2].weight.data += 0.01
        hook(model, step)
        gone = hook.masks.pruned["2.weight"]
        assert not model[2].weight[gone].any()
    assert hook.masks.sparsity == pytest.approx(0.5, abs=1e-3) and [at for at, _ in hook.history] == [0, 5, 10]


def test_what_is_refused() -> None:
    for bad in ({"epochs": 0}, {"epochs": 1, "ramp": 2.0}, {"epochs": float("nan")}):
        with pytest.raises(OptionError, match="epochs"):
            prune_gradually(perceptron(), blobs(), 0.5, **bad)
    with pytest.raises(OptionError, match="sparsity"):
        prune_gradually(perceptron(), blobs(), 1.5, epochs=1)


def test_more_zeros_than_asked_for_all_stay() -> None:
    """A model that is sparser than the goal: none of its zeros may learn again."""
    model, data = perceptron(), blobs()
    model[2].weight.data[:28] = 0
    before = model[2].weight == 0
    masks, _ = prune_gradually(model, data, 0.1, epochs=1, batch=64, every=1, learning_rate=0.05, progress=False)
    assert int(before.sum()) > 0.5 * 1664 and not model[2].weight[before].any() and masks.sparsity > 0.5
