"""A Change states what is true of two models."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.core.change import Change, State
from ridgeline.core.errors import NoGainError
from ridgeline.core.profile import Timing
from ridgeline.transform.compare import change_between, count_parameters, example_inputs, speedup_interval, state_of, timed
from ridgeline.transform.saved import stored_bytes
from ridgeline.transform.step import Context, Done
from tests.transform import toy


class Slow(nn.Module):
    """Waits, then passes on."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x * self.weight.sum()


class Packed(nn.Module):
    """Stands for more parameters than it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(10, dtype=torch.uint8))
        self.inner = nn.Linear(1, 1)

    def logical_parameters(self) -> int:
        return 80

    def logical_nonzeros(self) -> int:
        return 20


def test_parameters_are_counted_once_and_packed_ones_for_what_they_stand_for() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3), Packed())
    model[1].weight = model[0].weight
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].weight[0, 0] = 1.0
        model[0].bias.fill_(2.0)
        model[1].bias.fill_(0.0)
    assert count_parameters(model) == (12 + 3 + 3 + 80, 1 + 3 + 20)


def test_state_of_a_trained_net() -> None:
    source = toy.data()
    model = toy.net()
    found = state_of(model, Context(data=source))
    assert found.bytes_on_disk == stored_bytes(model)
    with torch.no_grad():
        right = (model(source.test.inputs).argmax(1) == source.test.targets).float().mean()
    assert found.quality["accuracy"] == pytest.approx(float(right))
    # one sample: conv 8x4x4, relu 8x4x4, (flatten is a view), linear 32, relu 32, linear 2: conv and relu live together
    assert found.peak_bytes == 2 * 8 * 4 * 4 * 4
    assert state_of(model, Context(quality=lambda _: {"own": 0.5})).quality == {"own": 0.5}
    assert state_of(model, Context()).peak_bytes is None


def test_latency_is_taken_in_alternation() -> None:
    seen: list[str] = []

    def watched(name: str) -> nn.Module:
        model = Slow(0.001 if name == "a" else 0.003)
        model.register_forward_pre_hook(lambda *_: seen.append(name))
        return model

    timing = timed(watched("a"), watched("b"), Context(inputs=(torch.ones(2, 3),)))
    assert timing is not None
    assert 2.0 < timing.ratio < 4.0
    rounds = ["".join(seen[place : place + 4]) for place in range(len(seen) % 4, len(seen), 4)]
    assert sum(one in ("abba", "baab") for one in rounds[-7:]) == 7


def test_change_has_both_states_and_notes() -> None:
    model = toy.net()
    smaller = copy.deepcopy(model)
    smaller[3], smaller[5] = nn.Linear(128, 4), nn.Linear(4, 2)
    done = Done(smaller, "thin", notes=("said",), target_sparsity=0.5, storage_only=("x",), details={"a": 1})
    change = change_between(model, done, {"k": 1}, Context(inputs=(torch.ones(1, 1, 4, 4),), name="toy", latency=False))
    assert change.speedup is None and "latency was not measured: not asked for" in change.notes and "said" in change.notes
    assert change.compression_ratio == stored_bytes(model) / stored_bytes(smaller) > 3
    assert (change.name, change.model, change.target, change.target_sparsity) == ("thin", "toy", "cpu", 0.5)
    assert change.settings == {"k": 1} and change.details == {"a": 1} and change.storage_only == ("x",)
    assert any("no example inputs" in note for note in change_between(model, done, {}, Context()).notes)
    assert model.training is False


def test_modes_come_back() -> None:
    model = toy.net().train()
    model[1].eval()
    state_of(model, Context(data=toy.data()))
    assert [child.training for child in model] == [True, False, True, True, True, True]


def state(size: int, seconds: float | None = None) -> State:
    return State(size, 1, 1, Timing(seconds, seconds, seconds, 5) if seconds else None)


@pytest.mark.parametrize(
    ("before", "after", "gains"),
    [
        (state(10), state(9), True),
        (state(10), state(10), False),
        (state(10), state(11), False),
        (state(10, 1.0), state(10, 0.9), True),
        (state(10, 1.0), state(10, 0.99), False),  # within the clock
        (state(10, 1.0), state(20, 0.5), True),
        (state(10, 1.0), state(9, 5.0), True),
    ],
)
def test_no_gain_is_an_error(before: State, after: State, gains: bool) -> None:
    change = Change("x", "m", "cpu", before, after)
    if gains:
        assert change.require_gain() is change
    else:
        with pytest.raises(NoGainError, match="gained nothing"):
            change.require_gain()


def test_a_speed_up_that_may_be_chance_is_no_gain() -> None:
    change = Change("x", "m", "cpu", state(10, 1.0), state(10, 0.9), speedup_interval=(0.97, 1.3))
    with pytest.raises(NoGainError):
        change.require_gain()
    assert Change("x", "m", "cpu", state(10, 1.0), state(10, 0.9), speedup_interval=(1.05, 1.3)).faster


def test_change_survives_json() -> None:
    inner = Change("y", "m", "cpu", state(5), state(4), details={"rows": [{"a": float("inf")}]})
    change = Change("x", "m", "cpu", state(10, 1.0), state(5, 0.5), {"bits": 4}, 0.5, 1.9, (1.8, 2.2), ("int4",), ("note",), {}, (inner,))
    back = Change.from_json(change.to_json())
    assert back.to_json() == change.to_json()
    assert back.speedup == 2.0 and back.steps[0].details == {"rows": [{"a": None}]}


def test_example_inputs_follow_the_model() -> None:
    source = toy.data()

    class Language(nn.Module):
        def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
            return ids + positions

    sample: Any = example_inputs(toy.net().bfloat16(), Context(data=source))
    assert sample[0].dtype == torch.bfloat16 and sample[0].shape == (1, 1, 4, 4)
    given: Any = example_inputs(Language(), Context(data=source))
    assert len(given) == 2 and given[1].tolist() == [0]
    assert example_inputs(toy.net(), Context()) is None


def test_the_interval_is_of_the_speedup_not_of_the_slowdown() -> None:
    """Whether a change counts as faster hangs on its lower end."""
    inputs = (torch.ones(2, 3),)
    for before_s, after_s in ((0.006, 0.001), (0.001, 0.006)):
        found = speedup_interval(timed(Slow(before_s), Slow(after_s), Context(inputs=inputs)))
        assert found is not None and found[0] <= found[1]
        assert (found[0] > 1) == (before_s > after_s) and (found[1] < 1) == (before_s < after_s)
