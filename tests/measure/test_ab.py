"""A planted slowdown is seen, equal things are not told apart, and variants mean what they say."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

import pytest
import torch

from ridgeline.core import timing
from ridgeline.core.errors import OptionError, UnknownNameError
from ridgeline.measure.ab import MARGIN, Variant, ab, ab_models, parse_variant, verdict


class Machine:
    """A clock that only work moves, on a machine that slows down by half while it is watched, with 5 % noise."""

    def __init__(self, seed: int) -> None:
        self.now_s, self.speed, self.noise = 0.0, 1.0, random.Random(seed)

    def work(self, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.now_s += seconds * self.speed * self.noise.lognormvariate(0, 0.05)
            self.speed *= 1.004

        return run


@pytest.fixture(params=range(3))
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine(request.param)
    monkeypatch.setattr(timing, "perf_counter", lambda: found.now_s)
    return found


@pytest.mark.parametrize("slowdown", [1.5, 1.1])
def test_a_planted_slowdown_is_seen(machine: Machine, slowdown: float) -> None:
    quick, slow = machine.work(0.004), machine.work(0.004 * slowdown)
    found = ab(quick, slow)
    assert found.verdict == "a faster"
    assert 1 + MARGIN < found.low <= found.ratio <= found.high
    assert found.ratio == pytest.approx(slowdown, rel=0.05)
    assert ab(slow, quick).verdict == "b faster"


def test_equal_things_are_not_told_apart(machine: Machine) -> None:
    found = ab(machine.work(0.004), machine.work(0.004))
    assert found.verdict == "no significant difference"
    assert found.ratio == pytest.approx(1, rel=0.03)


def test_real_time_is_taken() -> None:
    found = ab(lambda: time.sleep(0.001), lambda: time.sleep(0.02), rounds=5, warmup=0)
    assert found.verdict == "a faster" and found.b.median_s >= 0.019


def test_each_round_is_mirrored_and_the_order_drawn() -> None:
    calls: list[str] = []
    ab(lambda: calls.append("a"), lambda: calls.append("b"), rounds=12, warmup=0)
    rounds = ["".join(calls[i : i + 4]) for i in range(0, len(calls), 4)]
    assert set(rounds) == {"abba", "baab"} and len(rounds) == 12


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (1.02, 1.3, "a faster"),
        (0.7, 0.98, "b faster"),
        (0.9, 1.1, "no significant difference"),
        (1.001, 1.005, "no significant difference"),
        (0.995, 0.999, "no significant difference"),
    ],
)
def test_verdict_needs_the_whole_interval_beyond_the_margin(low: float, high: float, said: str) -> None:
    assert verdict(low, high) == said


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(OptionError, match="at least 5 rounds"):
        ab(lambda: None, lambda: None, rounds=4)


@pytest.mark.parametrize(
    ("spec", "variant"),
    [
        ("resnet18", Variant("resnet18")),
        ("resnet18@channels_last", Variant("resnet18", channels_last=True)),
        ("resnet18@channels-last=no,compile", Variant("resnet18", compile=True)),
        ("resnet18@dtype=bfloat16, batch=8", Variant("resnet18", dtype="bfloat16", batch=8)),
        ("gpt2@phase=decode,context=128,threads=1,device=cpu", Variant("gpt2", phase="decode", context=128, threads=1, device="cpu")),
        ("some@folder/model.py:build", Variant("some@folder/model.py:build")),
        ("some@folder/model.py:build@batch=2", Variant("some@folder/model.py:build", batch=2)),
    ],
)
def test_variants_are_read(spec: str, variant: Variant) -> None:
    assert parse_variant(spec) == variant


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("resnet18@chanels_last", "did you mean channels_last"),
        ("resnet18@zzz=1", "unknown key 'zzz'"),
        ("resnet18@batch=two", "whole number"),
        ("resnet18@batch=0", "whole number"),
        ("resnet18@batch", "whole number"),
        ("resnet18@compile=maybe", "true or false"),
        ("resnet18@dtype=", "a word"),
        ("resnet18@batch=1,batch=2", "given twice"),
        ("resnet18@", "MODEL@key=value"),
        ("@batch=1", "MODEL@key=value"),
        ("", "MODEL@key=value"),
    ],
)
def test_wrong_variants_say_what_is_right(spec: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        parse_variant(spec)


def test_models_of_different_batch_are_compared_per_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(timing, "perf_counter", lambda: float(next(ticks)))  # every call takes one second
    found = ab_models("mobilenet-v2", "mobilenet-v2@batch=2", device="cpu", rounds=5, warmup=0)
    assert found.per_sample and found.names == ("mobilenet-v2", "mobilenet-v2@batch=2")
    assert (found.a.median_s, found.b.median_s, found.ratio, found.verdict) == (1.0, 0.5, 0.5, "b faster")


def test_threads_are_set_and_put_back() -> None:
    torch.set_num_threads(2)
    try:
        found = ab_models("mobilenet-v2@threads=1", "mobilenet-v2@threads=1,channels_last", device="cpu", rounds=5, warmup=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert not found.per_sample and found.a.median_s > 0


def test_unknown_models_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="resnet18"):
        ab_models("resnet81", "resnet18", device="cpu")
