"""Training on a real CUDA device: overflows with fused optimisers, no waiting for the device between steps, compiled graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.train import history as history_module
from ridgeline.train.augment import Augmentation
from ridgeline.train.fit import fit
from ridgeline.train.history import History
from ridgeline.train.loss import cross_entropy
from ridgeline.workload.data import Data, Split

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def problem(rows: int = 512) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return inputs, (inputs.mean((1, 2, 3)) > 0).long()


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(576, 2))


def trained(**options: Any) -> tuple[nn.Module, History]:
    model = net()
    return model, fit(model, problem(), **{"steps": 12, "batch": 64, "device": "cuda", "learning_rate": 0.02, "progress": False, **options})


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
@pytest.mark.parametrize("bad", [0, 3])
def test_an_overflow_costs_one_step(optimiser: str, bad: int) -> None:
    calls = iter(range(100))
    weights: list[Tensor] = []

    def objective(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(model(inputs), targets)
        return loss * 1e38 * 1e38 if next(calls) == bad else loss

    model, history = trained(
        objective=objective,
        precision="float16",
        optimiser=optimiser,
        after_step=lambda m, s: weights.append(next(m.parameters()).detach().clone()),
    )
    assert history.skipped == [step == bad for step in range(12)]
    assert history.scale == [65536.0] * (bad + 1) + [32768.0] * (11 - bad)
    assert bad == 0 or torch.equal(weights[bad], weights[bad - 1])
    assert all(value.isfinite().all() for value in model.state_dict().values()) and history.loss[-1] < 1.0


@pytest.mark.parametrize("feed", ["resident", "prefetch"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_nothing_waits_for_the_device_between_steps(precision: str, feed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "INTERVAL_S", 1e9)

    def strict(model: nn.Module, step: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if 1 <= step < 7 else "default")  # within one epoch of 8 steps

    try:
        _, history = trained(steps=16, precision=precision, feed=feed, clip=1.0, accumulate=2, after_step=strict)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(history) == 16 and all(seconds > 0 for seconds in (*history.forward_s, *history.backward_s, *history.optimiser_s))
    assert all(value and value > 0 for value in history.memory_bytes)


def test_resumes(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(model: nn.Module, step: int) -> None:
        if step == 7:
            raise Stop

    options: dict[str, Any] = {"precision": "float16", "checkpoint_every": 3}
    wanted, whole = trained(checkpoint=tmp_path / "whole", **options)
    with pytest.raises(Stop):
        trained(checkpoint=tmp_path / "cut", after_step=stop, **options)
    resumed, history = trained(checkpoint=tmp_path / "cut", **options)
    assert history.loss == pytest.approx(whole.loss, rel=1e-3, abs=1e-4) and "resumed from step 6" in history.notes[0]
    for a, b in zip(wanted.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4)  # atomic sums of cuDNN's backward differ in their last bits


def test_tf32_is_as_asked_for_inside_and_as_before_afterwards() -> None:
    inside: list[bool] = []
    before = torch.get_float32_matmul_precision()
    for wanted in (True, False):
        fit(net(), problem(), steps=1, batch=64, device="cuda", progress=False, tf32=wanted,
            after_step=lambda model, step: inside.append(torch.backends.cuda.matmul.allow_tf32))  # fmt: skip
    assert inside == [True, False] and torch.get_float32_matmul_precision() == before


def test_compiled_graphs_train_the_same() -> None:
    def without_dropout(**options: Any) -> tuple[nn.Module, History]:
        model = net()
        model[4] = nn.Identity()  # type: ignore[index]
        return model, fit(model, problem(), steps=10, batch=64, device="cuda", learning_rate=0.02, progress=False, tf32=False, **options)

    plain, a = without_dropout()
    graphed, b = without_dropout(compile="reduce-overhead", accumulate=1)
    assert a.loss == pytest.approx(b.loss, rel=1e-3, abs=1e-4)
    cut, c = without_dropout(compile="reduce-overhead", accumulate=2)
    assert c.loss[-1] < c.loss[0] and all(value.isfinite().all() for value in cut.state_dict().values())
    for x, y in zip(plain.parameters(), graphed.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-4)


def test_mixed_labels_go_through_a_graph() -> None:
    """Boxes and labels are drawn on the CPU: with and without a graph the same batches, so nearly the same losses."""
    inputs, targets = problem()
    split, mixing = Split((inputs * 40 + 128).clamp(0, 255).to(torch.uint8), targets), Augmentation(1, cutmix=0.5, classes=2)
    data = Data("given", "image", 2, split, split, prepare=lambda images: images.float() / 128 - 1, augment=mixing)
    losses = []
    for graph in (False, True):
        model = net()
        model[4] = nn.Identity()  # type: ignore[operator]
        losses.append(fit(model, data, steps=12, batch=64, device="cuda", learning_rate=0.02, progress=False, graph=graph).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_trivial_changes_are_the_same_images_on_every_device() -> None:
    from ridgeline.train.trivial import changed, draw

    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (2048, 3, 32, 32), dtype=torch.uint8, generator=generator)
    drawn = draw(2048, generator)
    assert torch.equal(changed(images.cuda(), drawn.cuda(), (1, 2, 3)).cpu(), changed(images, drawn, (1, 2, 3)))
