"""Whether a model keeps using our kernels for a shape: the rule, and what feeds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ridgeline.kernel import replace, use
from ridgeline.kernel.use import Kernels, Trial, look_up_us, use_kernels


class Event:
    """Stands for a CUDA event: a time, and whether the GPU has come there."""

    def __init__(self, ms: float, done: bool = True) -> None:
        self.ms, self.done = ms, done

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, end: Event) -> float:
        return end.ms - self.ms


def trial(gpu_ms: float, saved_us: float, host_us: float, done: bool = True) -> Trial:
    one = Trial()
    one.saved_us, one.host_us, one.looked_up_us = saved_us, host_us, 100.0
    one.spans = [(10.0, Event(0.0), Event(gpu_ms, done)) for _ in range(Trial.PASSES)]
    return one


@pytest.mark.parametrize(
    ("gpu_ms", "saved_us", "host_us", "pays"),
    [
        (20.0, 150.0, -50.0, True),  # the GPU is behind: its time counts
        (20.0, 50.0, -50.0, False),
        (10.5, 150.0, -50.0, False),  # it keeps up: only the host's counts
        (10.5, 150.0, 120.0, True),
    ],
)
def test_who_is_behind_decides_what_counts(gpu_ms: float, saved_us: float, host_us: float, pays: bool) -> None:
    assert trial(gpu_ms, saved_us, host_us).pays() is pays


def test_nothing_is_known_before_the_gpu_is_there() -> None:
    one = trial(20.0, 150.0, 0.0, done=False)
    assert one.pays() is None
    one.spans[-1][2].done = True
    assert one.pays() is True and one.spans == []


def test_a_pass_that_saves_nothing_ends_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(use, "look_up_us", lambda: 1.0)
    one, kernels = Trial(), Kernels()
    with one.watched(kernels), kernels:
        torch.ones(2).add(1)
    assert one.known is False and one.looked_up_us > 0


def test_a_pass_that_saves_goes_on_and_counts_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(use, "look_up_us", lambda: 1.0)
    one, kernels = Trial(), Kernels()
    with one.watched(kernels), kernels:
        replace.saved.us += 500.0
        replace.saved.host_us -= 5.0
    assert one.known is None and (one.saved_us, one.host_us) == (500.0, -5.0)


def test_a_look_up_costs_something_but_not_much() -> None:
    assert 0.0 < look_up_us() < 100.0


def test_a_model_runs_plain_where_nothing_is_replaced() -> None:
    model = torch.nn.Linear(4, 4)
    kernels = use_kernels(model)
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda module, args: seen.append(torch._C._len_torch_function_stack()))
    x = torch.randn(2, 4)
    first, calls = model(x), kernels.calls
    assert calls > 0
    assert torch.equal(model(x), first) and kernels.calls == calls
    kernels.undo()
