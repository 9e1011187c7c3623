"""Timing primitives: repeat, summarise, and say how sure a ratio is.

    function ──collect_samples(warm-up, repeats, budget)──> [s, …] ──summarise──> Timing(median, p20, p80)
    [s, …] of a, [s, …] of b ──median_ratio_interval──> (median a / median b, low, high) by bootstrap

On CUDA a sample runs between two events on the current stream, the device idle before the first: it holds the launch and
the work, not the wait of the host. On the CPU it is a perf_counter difference. The garbage collector is off meanwhile.
Samples of less than about a microsecond measure the clock as much as the function; repeat such a function inside.
Ref: Efron 1979 for the bootstrap (percentile interval).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from .errors import MeasureError, OptionError
from .profile import Timing

RESAMPLES = 4000


def summarise(samples_s: Sequence[float]) -> Timing:
    """Median, 20th and 80th percentile (linear between neighbours) of at least one sample."""
    ordered = sorted(samples_s)
    if not ordered:
        raise MeasureError("no samples to summarise", why="nothing was measured", do="measure with at least one repeat")
    return Timing(_quantile(ordered, 0.5), _quantile(ordered, 0.2), _quantile(ordered, 0.8), len(ordered))


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    place = fraction * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def time_callable(
    function: Callable[[], object],
    *,
    device: str = "cpu",
    warmup: int = 3,
    min_repeats: int = 5,
    max_repeats: int = 50,
    budget_s: float = 2.0,
) -> Timing:
    """How long one call takes: at least `min_repeats`, then on until the budget or `max_repeats` is reached."""
    return summarise(
        collect_samples(function, device=device, warmup=warmup, min_repeats=min_repeats, max_repeats=max_repeats, budget_s=budget_s)
    )


def collect_samples(
    function: Callable[[], object],
    *,
    device: str = "cpu",
    warmup: int = 3,
    min_repeats: int = 5,
    max_repeats: int = 50,
    budget_s: float = 2.0,
) -> list[float]:
    """The samples behind `time_callable`, in the order they were taken [s]."""
    if min_repeats < 1 or max_repeats < min_repeats or warmup < 0:
        raise OptionError(
            f"warmup={warmup}, min_repeats={min_repeats}, max_repeats={max_repeats}",
            why="there must be at least one repeat, and no negative counts",
            do="give warmup >= 0 and 1 <= min_repeats <= max_repeats",
        )
    sample = sampler(function, device)
    samples: list[float] = []
    with garbage_collector_off():
        for _ in range(warmup):
            sample()
        start = perf_counter()
        while len(samples) < min_repeats or (len(samples) < max_repeats and perf_counter() - start < budget_s):
            samples.append(sample())
    return samples


def sampler(function: Callable[[], object], device: str = "cpu") -> Callable[[], float]:
    """A function that runs `function` once and returns the seconds it took on `device`."""
    return _cuda_sampler(function, device) if device.partition(":")[0] == "cuda" else _host_sampler(function)


def _host_sampler(function: Callable[[], object]) -> Callable[[], float]:
    def sample() -> float:
        start = perf_counter()
        function()
        return perf_counter() - start

    return sample


def _cuda_sampler(function: Callable[[], object], device: str) -> Callable[[], float]:
    import torch

    if not torch.cuda.is_available():
        raise MeasureError(f"cannot time on {device}", why="torch finds no CUDA device here", do="use device='cpu'")
    place = torch.device(device)
    cuda: Any = torch.cuda  # parts of it are untyped
    begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)

    def sample() -> float:
        with cuda.device(place):
            cuda.synchronize()
            begin.record()
            function()
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return sample


@contextmanager
def garbage_collector_off() -> Iterator[None]:
    """No collection pauses inside; what was on before is on after."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def median_ratio_interval(
    a: Sequence[float], b: Sequence[float], confidence: float = 0.95, seed: int = 0, *, paired: bool = False
) -> tuple[float, float, float]:
    """(ratio, low, high) of median(a) / median(b); `paired` takes the median of a[i] / b[i] instead, so drift common to a pair cancels."""
    import numpy

    if not a or not b or min(*a, *b) <= 0 or (paired and len(a) != len(b)):
        raise MeasureError(
            f"no ratio of {len(a)} and {len(b)} samples",
            why="both sides need samples above zero, as many on each side when paired",
            do="time something long enough for the clock to see",
        )
    random = numpy.random.default_rng(seed)
    first, second = numpy.asarray(a, dtype=float), numpy.asarray(b, dtype=float)

    def drawn(values: Any) -> Any:
        return numpy.median(random.choice(values, (RESAMPLES, len(values))), axis=1)

    if paired:
        ratio, ratios = float(numpy.median(first / second)), drawn(first / second)
    else:
        ratio, ratios = float(numpy.median(first) / numpy.median(second)), drawn(first) / drawn(second)
    tail = (1 - confidence) / 2
    low, high = numpy.quantile(ratios, [tail, 1 - tail])
    return ratio, float(low), float(high)
