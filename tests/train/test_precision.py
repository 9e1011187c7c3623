"""Loss scaling: an overflow costs one step and one halving, and what cannot go on raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.core.errors import OptionError, TrainError
from ridgeline.train.fit import fit
from ridgeline.train.history import History
from ridgeline.train.loss import cross_entropy
from ridgeline.train.options import Scaling

ROWS = 64


def problem() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def overflowing(*steps: int) -> Any:
    """An objective whose gradients overflow in the given calls."""
    calls = iter(range(10**9))

    def objective(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(model(inputs), targets)
        return loss * 1e38 * 1e38 if next(calls) in steps else loss

    return objective


def trained(objective: Any = None, **options: Any) -> tuple[nn.Module, History, list[list[Tensor]]]:
    """Model, history, and the weights after every step."""
    model, weights = net(), []

    def keep(inner: nn.Module, step: int) -> None:
        weights.append([parameter.detach().clone() for parameter in inner.parameters()])

    given: dict[str, Any] = {"steps": 12, "batch": 16, "precision": "float16", "progress": False, "objective": objective, **options}
    return model, fit(model, problem(), after_step=keep, **given), weights


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_planted_overflow_costs_one_step_and_one_halving(clip: float | None) -> None:
    _, history, weights = trained(overflowing(3), clip=clip)
    assert history.scale == [65536.0] * 4 + [32768.0] * 8
    assert history.skipped == [step == 3 for step in range(12)] and history.skipped_steps == 1
    assert same(weights[2], weights[3]), "the skipped step must leave the weights alone"
    assert all(not same(weights[step], weights[step - 1]) for step in range(1, 12) if step != 3)
    assert history.loss[-1] < history.loss[0] and history.epochs[0].skipped == 1


def test_a_skipped_step_leaves_momentum_alone() -> None:
    """Twelve steps of which one is skipped go on as if its gradient had never been."""
    optimisers: list[torch.optim.Optimizer] = []
    buffers: list[Tensor] = []

    def build(parameters: Any) -> torch.optim.Optimizer:
        optimisers.append(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        return optimisers[0]

    def keep(inner: nn.Module, step: int) -> None:
        first = next(inner.parameters())
        buffers.append(optimisers[0].state[first]["momentum_buffer"].clone())

    fit(
        net(), problem(), steps=6, batch=16, precision="float16", progress=False, objective=overflowing(3), after_step=keep, optimiser=build
    )
    assert torch.equal(buffers[2], buffers[3]) and not torch.equal(buffers[3], buffers[4])


def test_fused_momentum_survives_a_first_step_that_is_skipped() -> None:
    """Torch's fused SGD leaves its momentum unfilled there; memory is soiled beforehand so that it would show."""
    soiled = [torch.full((64,), 1e30) for _ in range(200)]
    del soiled
    results = []
    for fused in (False, True):
        model, _, _ = trained(
            overflowing(0), optimiser=lambda p, fused=fused: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=fused), steps=4
        )
        results.append(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_the_scale_grows_after_enough_good_steps() -> None:
    _, history, _ = trained(scaling=Scaling(initial=8.0, growth=4.0, interval=5))
    assert history.scale == [8.0] * 5 + [32.0] * 5 + [128.0] * 2


def test_a_fixed_scale_stays_and_still_skips() -> None:
    _, history, weights = trained(overflowing(3, 7), scaling=Scaling(initial=1024.0, dynamic=False))
    assert history.scale == [1024.0] * 12 and history.skipped == [step in (3, 7) for step in range(12)]
    assert same(weights[2], weights[3]) and same(weights[6], weights[7]) and not same(weights[7], weights[8])


@pytest.mark.parametrize(("dynamic", "says"), [(True, "whatever the scale"), (False, "fixed scale")])
def test_a_scale_that_backs_off_for_ever_raises(dynamic: bool, says: str) -> None:
    with pytest.raises(TrainError, match=says) as caught:
        trained(overflowing(*range(10**4)), steps=200, scaling=Scaling(dynamic=dynamic))
    assert "20 steps up to step 19" in str(caught.value)


def test_a_scale_that_starts_too_high_finds_its_way() -> None:
    _, history, _ = trained(steps=60, scaling=Scaling(initial=2.0**60))
    assert 20 < history.skipped_steps < 50 and not history.skipped[-1] and history.scale[-1] < 2.0**40


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_loss_that_is_not_a_number_stops_the_run_before_the_weights_are_lost(precision: str) -> None:
    model, seen = net(), []

    def objective(inner: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(inner(inputs), targets)
        return loss * float("nan") if len(seen) == 5 else loss

    with pytest.raises(TrainError, match="loss is nan at step 5") as caught:
        fit(
            model,
            problem(),
            steps=9,
            batch=16,
            precision=precision,
            objective=objective,
            progress=False,
            after_step=lambda m, s: seen.append(s),
        )
    assert seen == [0, 1, 2, 3, 4] and "learning_rate" in caught.value.do
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_clipping_sees_gradients_without_their_scale() -> None:
    """‖Δw‖ of one plain SGD step is rate · clip, whatever the scale."""
    model = net()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    fit(model, problem(), steps=1, batch=ROWS, precision="float16", clip=0.01, momentum=0.0, weight_decay=0.0, learning_rate=0.5,
        schedule="constant", progress=False)  # fmt: skip
    moved = torch.cat([(after.detach() - was).reshape(-1) for after, was in zip(model.parameters(), before, strict=True)]).norm()
    assert float(moved) == pytest.approx(0.5 * 0.01, rel=1e-3)


def test_bfloat16_equals_autocast_by_hand() -> None:
    inputs, targets = problem()
    ours, theirs = net(), net()
    fit(
        ours,
        (inputs, targets),
        steps=1,
        batch=ROWS,
        precision="bfloat16",
        momentum=0.0,
        weight_decay=0.0,
        schedule="constant",
        progress=False,
    )
    order = torch.randperm(ROWS)  # one batch holds all rows: any order gives the same sums to rounding
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(theirs(inputs[order]).float(), targets[order])
    loss.backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert b.grad is not None
        torch.testing.assert_close(a.detach(), b.detach() - 0.1 * b.grad, rtol=0, atol=2e-4)


def test_float16_weights_are_refused() -> None:
    with pytest.raises(OptionError, match="weights are float16"):
        fit(net().half(), problem(), steps=1, precision="float16", progress=False)
