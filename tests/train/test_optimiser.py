"""Schedules against torch's own, parameter groups, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ridgeline.core.errors import OptionError, UnknownNameError
from ridgeline.train.optimiser import build_optimiser, factor, set_rate
from ridgeline.train.options import TrainSettings, check_settings

SCHEDULES = ("constant", "linear", "cosine", "step", "onecycle")


def settings(**given: Any) -> TrainSettings:
    return check_settings(**{"steps": 10, **given})


def torch_rates(scheduler: Any, total: int, **options: Any) -> list[float]:
    optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    made = scheduler(optimiser, **options)
    rates = []
    for _ in range(total):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        made.step()
    return rates


@pytest.mark.parametrize("total", [10, 37])
def test_schedules_equal_those_of_torch(total: int) -> None:
    lr = torch.optim.lr_scheduler
    wanted = {
        "cosine": torch_rates(lr.CosineAnnealingLR, total, T_max=total, eta_min=0.1),
        "linear": torch_rates(lr.LinearLR, total, start_factor=1.0, end_factor=0.1, total_iters=total),
        "step": torch_rates(lr.MultiStepLR, total, milestones=[math.ceil(total / 2), math.ceil(total * 0.75)], gamma=0.1),
        "onecycle": torch_rates(lr.OneCycleLR, total, max_lr=1.0, total_steps=total, cycle_momentum=False),
    }
    for name, rates in wanted.items():
        chosen = settings(schedule=name, final=0.1)
        assert [factor(chosen, step, total) for step in range(total)] == pytest.approx(rates, rel=1e-9), name


@given(schedule=st.sampled_from(SCHEDULES), total=st.integers(1, 300), warmup=st.integers(0, 320), step=st.integers(0, 299))
def test_factors_lie_between_nought_and_one(schedule: str, total: int, warmup: int, step: int) -> None:
    chosen = settings(schedule=schedule, warmup=0 if schedule == "onecycle" else warmup)
    value = factor(chosen, min(step, total - 1), total)
    assert 0 <= value <= 1 + 1e-12


def test_warmup_rises_evenly_and_then_the_schedule_starts_at_its_top() -> None:
    chosen = settings(schedule="cosine", warmup=4)
    assert [factor(chosen, step, 20) for step in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_norms_and_biases_can_go_without_decay() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    made = build_optimiser(model.named_parameters(), settings(decay="matrices", weight_decay=0.1), None)
    assert [(group["weight_decay"], [p.ndim for p in group["params"]]) for group in made.param_groups] == [(0.1, [4]), (0.0, [1, 1, 1])]


def test_each_group_keeps_its_own_base_rate() -> None:
    layer = nn.Linear(2, 2)

    def build(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": [p], "lr": rate} for p, rate in zip(parameters, (0.4, 0.1), strict=True)])

    made = build_optimiser(layer.named_parameters(), settings(optimiser="custom"), build)
    assert set_rate(made, 0.5) == 0.2 and [group["lr"] for group in made.param_groups] == [0.2, 0.05]


def test_wrong_optimisers_are_refused() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(UnknownNameError, match="adamw"):
        build_optimiser(layer.named_parameters(), settings(optimiser="adamv"), None)
    with pytest.raises(OptionError, match="gives list"):
        build_optimiser(layer.named_parameters(), settings(optimiser="custom"), lambda parameters: list(parameters))  # type: ignore[arg-type,return-value]
    with pytest.raises(OptionError, match="no parameter to train"):
        build_optimiser(layer.requires_grad_(False).named_parameters(), settings(), None)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"epochs": 1}, "one of the two"),
        ({"steps": None}, "one of the two"),
        ({"steps": 0}, "steps = 0"),
        ({"batch": 0}, "batch = 0"),
        ({"learning_rate": -1.0}, "learning_rate = -1.0"),
        ({"learning_rate": math.nan}, "learning_rate = nan"),
        ({"momentum": 1.0}, "momentum = 1.0"),
        ({"schedule": "cosin"}, "schedule = 'cosin'"),
        ({"schedule": "onecycle", "warmup": 3}, "rise of its own"),
        ({"precision": "fp16"}, "precision = 'fp16'"),
        ({"clip": 0.0}, "clip = 0.0"),
        ({"batch": 4, "accumulate": 8}, "cannot be cut"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov"),
        ({"scaling": {"backoff": 1.5}}, "scaling.backoff = 1.5"),
        ({"attention": "fast"}, "attention = 'fast'"),
        ({"milestones": (0.5, 2.0)}, "milestones"),
        ({"lerning_rate": 0.1}, "did you mean learning_rate"),
    ],
)
def test_wrong_options_are_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError) as caught:
        settings(**given)
    assert says in str(caught.value)
