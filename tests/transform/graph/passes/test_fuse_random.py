"""fold_norm, epilogue and prepack on random models in float64, as if oneDNN knew that dtype: its operators then run their formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ridgeline.transform.graph import onednn
from ridgeline.transform.graph.manager import Pass, PassContext, run_passes
from ridgeline.transform.graph.passes.epilogue import Epilogue
from ridgeline.transform.graph.passes.prepack import Prepack
from tests.support import full_or_tenth
from tests.transform.graph.random_graphs import again, assert_same, random_capture, random_model

PASSES: list[str | Pass] = ["fold_norm", Epilogue(measure=False), Prepack(measure=False)]


@pytest.fixture(autouse=True)
def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "supported", lambda dtype: True)
    monkeypatch.setattr(onednn, "_usable", lambda x, weight: False)


def changes(seed: int) -> list[int]:
    """Places each pass changed; answers are compared after each alone and after all."""
    model, _ = random_model(seed)
    captured = random_capture(seed)
    for one in PASSES[1:]:
        alone = again(captured)
        run_passes(alone, [one], PassContext(dtype=torch.float64), check=False)
        assert_same(alone, model)
    reports = run_passes(captured, PASSES, PassContext(dtype=torch.float64), check=False)
    assert_same(captured, model)
    return [sum(len(report.changed) for report in reports if report.name == name) for name in ("fold_norm", "epilogue", "prepack")]


def test_answers_stay() -> None:
    found = torch.tensor([changes(seed) for seed in range(full_or_tenth(150))])
    assert bool((found.sum(0) > 0).all())  # the models have something for each


def test_a_planted_error_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = onednn.ACTIVATIONS["none"]

    def wrong(x: Tensor, scalars: object) -> Tensor:
        return right(x, ()) * (1 + 1e-6)

    monkeypatch.setitem(onednn.ACTIVATIONS, "none", wrong)
    with pytest.raises(AssertionError, match="off by"):
        for seed in range(10):
            changes(seed)
