"""Whether a model keeps using our kernels for a shape: by trying, pass by pass, on clocks made up here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ridgeline.kernel import replace, use
from ridgeline.kernel.use import Trial, use_kernels


class Model(torch.nn.Module):
    """Takes so long with our kernels and so long without; the very first pass compiles."""

    def __init__(self, clock: list[float], ours_s: float, plain_s: float) -> None:
        super().__init__()
        self.clock, self.ours_s, self.plain_s = clock, ours_s, plain_s
        self.turns: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ours = not replace._nowhere
        self.clock[0] += (self.ours_s if ours else self.plain_s) + (100.0 if not self.turns else 0.0)
        self.turns.append(ours)
        return torch.nn.functional.softmax(x, -1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    use.load_operators()
    monkeypatch.setattr(use, "perf_counter", lambda: now[0])
    monkeypatch.setitem(replace.REPLACEMENTS, torch.nn.functional.softmax, ("softmax", lambda x, *args, **kwargs: x))
    return now


@pytest.mark.parametrize(("ours_s", "pays"), [(1.0, True), (1.9, True), (2.1, False)])
def test_a_model_goes_on_with_what_was_faster(clock: list[float], ours_s: float, pays: bool) -> None:
    model = Model(clock, ours_s, 2.0)
    kernels = use_kernels(model)
    x = torch.ones(2, 3)
    for _ in range(60):
        model(x)
    half = Trial.UNCOUNTED + Trial.COUNTED
    assert model.turns[:half] == [True] * half and model.turns[half : 2 * half] == [False] * half
    assert model.turns[2 * half + 1 :] == [pays] * (59 - 2 * half)
    assert kernels.report()["softmax"] == sum(model.turns)
    kernels.undo()


def test_a_pause_between_two_passes_does_not_decide(clock: list[float]) -> None:
    model = Model(clock, 1.0, 2.0)
    use_kernels(model)
    for number in range(40):
        model(torch.ones(2))
        clock[0] += 50.0 if number in (5, 7) else 0.0  # an evaluation, a checkpoint
    assert model.turns[-5:] == [True] * 5


def test_passes_of_another_shape_in_between_are_not_timed(clock: list[float]) -> None:
    model = Model(clock, 2.5, 2.0)
    use_kernels(model)
    model(torch.ones(2))
    for _ in range(60):
        model(torch.ones(3))
        model(torch.ones(3))
        clock[0] += 9.0
        model(torch.ones(2))  # never twice in a row: nothing is known of it
    turns: list[Any] = model.turns[-9:]
    assert turns[::3] == [False] * 3 and turns[2::3] == [True] * 3


def test_a_shape_in_which_nothing_is_replaced_runs_plain_at_once() -> None:
    model = torch.nn.Linear(4, 4)
    use_kernels(model)
    seen: list[int] = []
    forward = torch.nn.functional.linear
    x = torch.randn(2, 4)
    first = model(x)
    hook = model.register_forward_pre_hook(lambda module, args: seen.append(int(replace._nowhere)))
    assert torch.equal(model(x), first) and torch.equal(first, forward(x, model.weight, model.bias))
    hook.remove()
    with replace.nowhere():
        assert replace._nowhere
    assert not replace._nowhere
