"""Histograms that do not depend on how the data came, and ranges against brute force."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import TransformError
from ridgeline.transform.quantise.observe import BINS, CANDIDATES, Histogram, grid_of, range_of
from tests.support import full_or_tenth

VALUES = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=60)


def seen(*parts: torch.Tensor) -> Histogram:
    histogram = Histogram()
    for part in parts:
        histogram.add(part)
    return histogram


@given(VALUES, st.integers(0, 60), st.integers(0, 1000))
@settings(max_examples=full_or_tenth(1000), deadline=None)
def test_any_order_and_any_cut_give_the_same_histogram(values: list[float], cut: int, seed: int) -> None:
    x = torch.tensor(values)
    mixed = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))]
    whole, parts = seen(x), seen(mixed[:cut], mixed[cut:])
    assert whole.counts is not None and parts.counts is not None
    assert torch.equal(whole.counts, parts.counts)
    assert (whole.start, whole.exponent, whole.zeros, whole.low, whole.high) == (
        parts.start, parts.exponent, parts.zeros, parts.low, parts.high)  # fmt: skip
    assert int(whole.counts.sum()) + whole.zeros == len(values)


def test_bins_hold_what_lies_in_them_and_are_at_least_half_used() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    histogram = seen(*x.split(7_000))
    edges = (numpy.arange(BINS + 1) + histogram.start) * 2.0**histogram.exponent
    assert histogram.counts is not None
    assert numpy.array_equal(histogram.counts.numpy(), numpy.histogram(x.numpy(), edges)[0])
    assert (histogram.high - histogram.low) / 2.0**histogram.exponent > BINS / 2 - 1


def test_minmax_is_exact_and_holds_zero() -> None:
    assert range_of(seen(torch.tensor([0.5, 3.25])), "minmax") == (0.0, 3.25)
    assert range_of(seen(torch.tensor([-2.0, -1.0])), "minmax") == (-2.0, 0.0)


@pytest.mark.parametrize("percentile", [99.0, 99.9])
def test_percentile_is_within_a_bin_of_the_sorted_one(percentile: float) -> None:
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    histogram = seen(*x.split(50_000))
    low, high = range_of(histogram, "percentile", percentile=percentile)
    width = 2.0**histogram.exponent
    assert abs(high - numpy.quantile(x.numpy(), percentile / 100)) <= 2 * width
    assert abs(low - numpy.quantile(x.numpy(), 1 - percentile / 100)) <= 2 * width


def quantised(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    scale, zero = grid_of(low, high)
    return (torch.clamp(torch.round(x / scale) + zero, 0, 255) - zero) * scale


@pytest.mark.parametrize("kind", ["gaussian", "relu", "outlier"])
def test_mse_range_is_as_good_as_trying_every_candidate_on_the_data(kind: str) -> None:
    x = torch.randn(30_000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x = x.relu() if kind == "relu" else torch.cat((x, torch.tensor([60.0, -40.0]))) if kind == "outlier" else x
    low, high = range_of(seen(x), "mse")
    errors = []
    for share in range(1, CANDIDATES + 1):
        least, most = min(float(x.min()), 0) * share / CANDIDATES, max(float(x.max()), 0) * share / CANDIDATES
        errors.append(float((quantised(x, least, most) - x).square().mean()))
    assert float((quantised(x, low, high) - x).square().mean()) <= 1.02 * min(errors)


def reference_divergence(x: numpy.ndarray, width: float, start: int, low: float, high: float) -> float:
    """Migacz's KL in plain loops: clipped P against Q, 256 levels, exact zeros left out."""
    bins: dict[int, int] = {}
    for value in x[x != 0]:
        key = math.floor(value / width)
        bins[key] = bins.get(key, 0) + 1
    step = (high - low) / 255
    zero = round(-low / step)
    inside, p = {}, {}
    below = above = 0
    for key in sorted(bins):
        code = round((key + 0.5) * width / step) + zero
        if code < 0:
            below += bins[key]
        elif code > 255:
            above += bins[key]
        else:
            inside[key], p[key] = code, float(bins[key])
    keys = sorted(inside)
    p[keys[0]] += below
    p[keys[-1]] += above
    q = {}
    for level in set(inside.values()):
        members = [key for key in keys if inside[key] == level]
        for key in members:
            q[key] = sum(bins[one] for one in members) / len(members)
    total_p, total_q = sum(p.values()), sum(q.values())
    return sum(p[key] / total_p * math.log(p[key] / total_p / (q[key] / total_q)) for key in keys)


def test_entropy_range_has_the_least_divergence_of_a_plain_loop() -> None:
    x = torch.randn(4_000, generator=torch.Generator().manual_seed(3)).relu()
    x = torch.cat((x, torch.tensor([25.0])))
    histogram = seen(x)
    width, high = 2.0**histogram.exponent, float(x.max())
    found = {
        share: reference_divergence(x.double().numpy(), width, histogram.start, 0.0, high * share / CANDIDATES)
        for share in range(2, CANDIDATES + 1, 2)
    }
    low, chosen = range_of(histogram, "entropy")
    assert low == 0.0 and chosen < 12.0  # the outlier is cut off
    ours = reference_divergence(x.double().numpy(), width, histogram.start, 0.0, chosen)
    assert ours <= min(found.values()) + 1e-9


def test_zero_is_always_exact_and_degenerate_ranges_work() -> None:
    assert grid_of(0.0, 0.0) == (1.0, 0)
    for low, high in [(0.0, 1.0), (-1.0, 0.0), (-3.0, 5.0), (-1e-44, 1e-44), (-1e38, 1e38)]:
        scale, zero = grid_of(low, high)
        assert scale > 0 and 0 <= zero <= 255 and float(quantised(torch.zeros(1), low, high)) == 0.0
    for method in ("minmax", "percentile", "mse", "entropy"):
        assert range_of(seen(torch.zeros(5)), method) == (0.0, 0.0)
        low, high = range_of(seen(torch.full((5,), 2.0)), method)
        assert low == 0.0 and 1.9 < high < 2.1


@given(VALUES, st.sampled_from(["minmax", "percentile", "mse", "entropy"]))
@settings(max_examples=full_or_tenth(300), deadline=None)
def test_ranges_lie_within_what_was_seen(values: list[float], method: str) -> None:
    x = torch.tensor(values)
    low, high = range_of(seen(x), method)  # type: ignore[arg-type]
    assert min(float(x.min()), 0.0) <= low <= 0.0 <= high <= max(float(x.max()), 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused(bad: float) -> None:
    with pytest.raises(TransformError, match="conv7"):
        Histogram().add(torch.tensor([1.0, bad]), "conv7")


def test_a_layer_never_seen_is_an_error() -> None:
    with pytest.raises(TransformError, match="no calibration data"):
        range_of(Histogram(), "mse")
