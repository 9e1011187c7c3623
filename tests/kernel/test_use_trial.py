"""Whether a model keeps using our kernels for a shape: by trying, pass by pass, on clocks made up here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
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
        ours = not replace._thread.nowhere
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
    hook = model.register_forward_pre_hook(lambda module, args: seen.append(torch._C._len_torch_function_stack()))
    assert torch.equal(model(x), first) and torch.equal(first, forward(x, model.weight, model.bias))
    hook.remove()
    assert seen == [0]


class Large(torch.nn.Module):
    """Its softmax is replaced from a thousand numbers on."""

    def forward(self, batch: Any = None, other: Any = None, count: int = 1) -> torch.Tensor:
        x = batch if isinstance(batch, torch.Tensor) else other if batch is None else batch["x"][0]
        return torch.nn.functional.softmax(x.expand(count, 4), -1)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Large:
    use.load_operators()

    def stand_in(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return x if x.numel() >= 1000 else NotImplemented

    monkeypatch.setitem(replace.REPLACEMENTS, torch.nn.functional.softmax, ("softmax", stand_in))
    return Large()


@pytest.mark.parametrize(
    ("small", "big"),
    [
        (({"x": [torch.ones(1, 4)]}, None, 1), ({"x": [torch.ones(250, 4)]}, None, 250)),
        (({"x": (torch.ones(1, 4),)}, None, 2), ({"x": (torch.ones(1, 4),)}, None, 5000)),
        ((torch.ones(1, 4), None, 20), (torch.ones(1, 4), None, 5000)),
    ],
    ids=["list in a dict", "whole number", "larger whole number"],
)
def test_a_small_first_input_says_nothing_of_a_large_one(large: Large, small: Any, big: Any) -> None:
    kernels = use_kernels(large)
    large(*small)
    large(*small)
    assert kernels.report() == {}
    large(*big)
    assert kernels.report() == {"softmax": 1}
    kernels.undo()


def test_names_of_arguments_gradients_and_training_have_trials_of_their_own(large: Large) -> None:
    kernels = use_kernels(large)
    x = torch.ones(1, 4)
    large(other=x)
    large(batch=x)
    large(x)
    large.eval()(x)
    with torch.no_grad():
        large(x)
    assert len(large.forward.trials) == 5  # type: ignore[attr-defined]
    large(x, None, count=1)
    assert len(large.forward.trials) == 6  # type: ignore[attr-defined]
    kernels.undo()


def test_a_position_that_counts_up_and_odd_inputs_share_trials(large: Large) -> None:
    assert len({use.signature(position) for position in range(1 << 14, 1 << 15)}) == 1
    assert len({use.signature(number) for number in range(-8, 8)}) == 16
    assert use.signature(1) != use.signature(True) != use.signature("1") and use.signature(0) != use.signature(None)
    assert use.signature([1]) != use.signature((1,)) and use.signature({"a": 1}) != use.signature({"b": 1})
    endless: list[Any] = []
    endless.append(endless)
    hash(use.signature(endless))
    hash(use.signature({"x": [torch.ones(2), {"y": object()}], 3: {1, 2}}))


def test_the_trials_kept_are_the_last_used(large: Large) -> None:
    kernels = use_kernels(large)
    held = large.forward.trials  # type: ignore[attr-defined]
    large(torch.ones(1, 4), count=1)
    ((first, trial),) = held.items()
    for number in range(2, 3 * use.TRIALS):
        large(torch.ones(number, 4), count=number)
        large(torch.ones(1, 4), count=1)
    assert len(held) == use.TRIALS and held[first] is trial
    kernels.undo()


def test_threads_may_share_a_model(large: Large, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(use, "TRIALS", 2)
    kernels = use_kernels(large)

    def passes(number: int) -> None:
        for at in range(300):
            large(torch.ones(1 + (at + number) % 5, 4), count=1 + (at + number) % 5)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(passes, range(4)))
    kernels.undo()


def test_a_captured_pass_has_our_kernels_and_does_not_count(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the half without them, and where they do not pay: what is recorded costs the host nothing when it runs."""
    model = Model(clock, 3.0, 2.0)
    use_kernels(model)
    x, half = torch.ones(2), Trial.UNCOUNTED + Trial.COUNTED
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    captures = (half + 2, 50)
    for number in range(60):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda at=number: at in captures)
        model(x)
    assert all(model.turns[number] for number in captures)
    plain = [number for number in range(60) if not model.turns[number]]
    assert plain[0] == half and half + 1 in plain and half + 3 in plain and model.turns[51:] == [False] * 9
