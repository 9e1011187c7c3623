"""Both passes in one CUDA graph: the same losses and weights as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ridgeline.core.errors import OptionError
from ridgeline.train.fit import fit
from ridgeline.train.options import check_settings

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def net(dropout: float) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(dropout), nn.Flatten(), nn.Linear(16 * 64, 5)]
    return nn.Sequential(*parts)


@cuda
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_graph_changes_nothing(precision: str) -> None:
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(96, 3, 8, 8, generator=generator), torch.randint(5, (96,), generator=generator))
    options: dict[str, Any] = {"steps": 20, "batch": 32, "learning_rate": 0.02, "device": "cuda", "precision": precision, "average": 0.9}
    plain, graphed = net(0.0), net(0.0)
    first = fit(plain, data, progress=False, tf32=False, clip=1.0, **options)
    second = fit(graphed, data, progress=False, tf32=False, clip=1.0, graph=True, **options)
    limit = 1e-4 if precision == "float32" else 2e-2
    assert second.loss == pytest.approx(first.loss, rel=limit, abs=limit)
    for one, other in zip(plain.state_dict().values(), graphed.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=limit, atol=limit)
    assert second.loss[-1] < second.loss[0] and len(set(second.loss)) == 20  # every step read its own batch and its own loss


@cuda
def test_dropout_differs_from_step_to_step() -> None:
    data = (torch.randn(32, 3, 8, 8), torch.zeros(32, dtype=torch.int64))
    history = fit(net(0.5), data, steps=12, batch=32, learning_rate=1e-9, device="cuda", graph=True, progress=False)
    assert len({round(loss, 6) for loss in history.loss}) > 8


def test_what_a_graph_cannot_hold_is_refused() -> None:
    with pytest.raises(OptionError, match="one GPU"):
        fit(net(0.0), (torch.randn(8, 3, 8, 8), torch.zeros(8, dtype=torch.int64)), steps=1, batch=4, device="cpu", graph=True)
    with pytest.raises(OptionError, match="no compile"):
        check_settings(steps=1, graph=True, compile=True)
