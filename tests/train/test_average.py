"""The moving average, label smoothing and the triangle, each against its formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.core.errors import OptionError
from ridgeline.train.fit import fit
from ridgeline.train.loss import cross_entropy
from ridgeline.train.optimiser import factor
from ridgeline.train.options import check_settings


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 6, generator=generator), torch.randint(4, (64,), generator=generator)


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def floats(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items() if value.is_floating_point()}


def test_a_run_ends_with_the_moving_average() -> None:
    model = net()
    wanted, seen = floats(model), []

    def follow(trained: nn.Module, step: int) -> None:
        kept = min(0.9, (1 + step) / (10 + step))
        seen.append(kept)
        for name, value in floats(trained).items():
            wanted[name] = kept * wanted[name] + (1 - kept) * value

    options: dict[str, Any] = {"steps": 100, "batch": 16, "progress": False}
    fit(model, data(), average=0.9, after_step=follow, **options)
    for name, value in floats(model).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)
    assert seen[0] == 0.1 and seen[-1] == 0.9  # both sides of the ramp were met
    plain = net()
    fit(plain, data(), **options)
    assert not torch.allclose(plain[0].weight, model[0].weight)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("optimiser", ["sgd", "muon"])
def test_a_resumed_run_has_the_same_average(tmp_path: Path, optimiser: str) -> None:
    options: dict[str, Any] = {"steps": 30, "batch": 16, "average": 0.9, "progress": False, "optimiser": optimiser, "schedule": "triangle"}
    whole, cut = net(), net()
    fit(whole, data(), **options)

    def stop(_: nn.Module, step: int) -> None:
        if step == 17:
            raise Stopped

    with pytest.raises(Stopped):
        fit(cut, data(), checkpoint=tmp_path, checkpoint_every=7, after_step=stop, **options)
    again = net()
    history = fit(again, data(), checkpoint=tmp_path, checkpoint_every=7, **options)
    assert any("resumed from step 14" in note for note in history.notes)
    assert all(map(torch.equal, again.state_dict().values(), whole.state_dict().values()))


def test_smoothing_is_its_formula() -> None:
    generator = torch.Generator().manual_seed(2)
    outputs = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    targets = torch.tensor([0, 1, 2, 3, 4, -100, 1, 1, -100])
    logs = outputs.log_softmax(-1)
    wanted = torch.stack([-(0.8 * logs[n, t] + 0.2 * logs[n].mean()) for n, t in enumerate(targets.tolist()) if t >= 0]).mean()
    torch.testing.assert_close(cross_entropy(outputs, targets, 0.2), wanted)
    shares = torch.eye(5, dtype=torch.float64)[targets.clamp(0)]
    wanted = -(0.8 * shares + 0.2 / 5).mul(logs).sum(-1).mean()
    torch.testing.assert_close(cross_entropy(outputs, shares, 0.2), wanted)


def test_smoothing_reaches_the_run_and_is_of_the_built_in_loss() -> None:
    first = {s: fit(net(), data(), steps=1, batch=64, smoothing=s, progress=False).loss[0] for s in (0.0, 0.3)}
    logs = net()(data()[0]).detach().log_softmax(-1)
    wanted = -(0.7 * logs[torch.arange(64), data()[1]] + 0.3 * logs.mean(-1)).mean()
    assert first[0.3] == pytest.approx(float(wanted), rel=1e-5) and abs(first[0.3] - first[0.0]) > 1e-4
    with pytest.raises(OptionError, match="a loss of your own"):
        fit(net(), data(), nn.functional.cross_entropy, steps=1, smoothing=0.1)


@pytest.mark.parametrize(("total", "rise", "final"), [(50, 0.2, 0.0), (37, 0.5, 0.1), (3, 0.3, 0.0)])
def test_the_triangle_is_two_straight_lines(total: int, rise: float, final: float) -> None:
    chosen = check_settings(steps=total, schedule="triangle", rise=rise, final=final)
    top = rise * total
    for step in range(total):
        up, down = (step + 1) / top, 1 - (1 - final) * (step - top) / (total - top)
        assert factor(chosen, step, total) == pytest.approx(min(up, down, 1.0))
    late = check_settings(steps=40, schedule="onecycle", rise=0.5)
    assert max(range(40), key=lambda step: factor(late, step, 40)) == 19
    with pytest.raises(OptionError, match="rise of its own"):
        check_settings(steps=9, schedule="triangle", warmup=2)
