"""Every stage does its real work, the slow one is found, and nothing is left on disk."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from ridgeline.core.errors import MeasureError, OptionError
from ridgeline.measure.pipeline import STAGES, measure_pipeline, normalise_images, tokenise
from tests.measure.nets import Convolutional, Tokens


class Slow(nn.Module):
    """A model that takes 20 ms and returns its input's first columns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x.flatten(1)[:, :7]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("module", "inputs", "kind"),
    [
        (Convolutional(), torch.randn(4, 3, 32, 32), "images"),
        (Tokens(), torch.zeros(4, 12, dtype=torch.long), "text"),
        (nn.Linear(20, 5), torch.randn(4, 20), "features"),
    ],
)
def test_each_kind_goes_from_file_to_answer(folder: Path, module: nn.Module, inputs: torch.Tensor, kind: str) -> None:
    found = measure_pipeline(module, inputs, repeats=5)
    assert (found.kind, found.batch, [stage.name for stage in found.stages]) == (kind, 4, list(STAGES))
    assert sum(stage.share for stage in found.stages) == pytest.approx(1)
    assert all(stage.timing.median_s > 0 for stage in found.stages if stage.name != "host copy")
    assert found.samples_per_s == pytest.approx(4 / found.total.median_s)
    assert list(folder.iterdir()) == []
    json.dumps(found.to_dict())
    assert all(name in found.table() for name in STAGES)


def test_on_the_cpu_there_is_no_copy() -> None:
    found = measure_pipeline(nn.Linear(20, 5), torch.randn(4, 20), repeats=2)
    copy = next(stage for stage in found.stages if stage.name == "host copy")
    assert copy.timing.median_s == 0 and copy.detail.startswith("none")


def test_planted_slow_model_binds_and_overlap_gives_its_time() -> None:
    found = measure_pipeline(Slow(), torch.randn(2, 3, 8, 8), repeats=5)
    assert found.binding == "model"
    assert 0.019 < found.overlapped_s < found.total.median_s
    assert found.overlap_speedup == pytest.approx(found.total.median_s / found.overlapped_s)


def test_a_quick_model_is_bound_by_its_data() -> None:
    class Mean(nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return image[:, :, 0, 0]

    assert measure_pipeline(Mean(), torch.randn(8, 3, 224, 224), repeats=5).binding in ("load", "preprocess")


def test_models_see_the_inputs_they_expect() -> None:
    seen: list[Any] = []

    class Watched(Convolutional):
        def forward(self, image: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append(
                (image.shape, image.dtype, float(image.float().std()), image.is_contiguous(memory_format=torch.channels_last), extra)
            )
            return super().forward(image)

    extra = torch.ones(3)
    measure_pipeline(Watched(), (torch.randn(2, 3, 16, 16), extra), dtype="bfloat16", channels_last=True, repeats=2)
    for shape, dtype, deviation, last, other in seen:
        assert (tuple(shape), dtype, last) == ((2, 3, 16, 16), torch.bfloat16, True)
        assert 0.5 < deviation < 3 and torch.equal(other, extra.bfloat16())


def test_images_are_normalised_as_the_formula_says() -> None:
    pixels = numpy.random.default_rng(0).integers(0, 256, (2, 4, 5, 3), dtype=numpy.uint8)
    found = normalise_images(pixels, torch.float32).numpy()
    expected = (pixels.astype("float64") / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    assert found.shape == (2, 3, 4, 5) and numpy.allclose(found, expected.transpose(0, 3, 1, 2), atol=1e-5)
    assert normalise_images(pixels[..., :1], torch.float32).numpy() == pytest.approx(
        pixels[..., :1].transpose(0, 3, 1, 2) / 127.5 - 1, abs=1e-5
    )


def test_text_becomes_byte_tokens() -> None:
    raw = numpy.frombuffer("aé".encode(), dtype=numpy.uint8)
    assert tokenise([raw], 7, None).tolist() == [[1, 97 + 3, 0xC3 + 3, 0xA9 + 3, 2, 0, 0]]
    assert tokenise([raw], 2, 50).tolist() == [[1, 100 % 50]]


@pytest.mark.parametrize("inputs", [torch.tensor(1.0), torch.zeros(2, 3, dtype=torch.bool), {"flag": 1}])
def test_inputs_without_a_pipeline_are_refused(inputs: Any) -> None:
    with pytest.raises(MeasureError, match="no pipeline"):
        measure_pipeline(nn.Identity(), inputs)


def test_no_repeats_are_refused() -> None:
    with pytest.raises(OptionError, match="at least one repeat"):
        measure_pipeline(nn.Identity(), torch.ones(1, 2), repeats=0)
