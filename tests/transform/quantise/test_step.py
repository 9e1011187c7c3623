"""The step and its settings on digits: every method, saved and loaded, with what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ridgeline.core.errors import NoGainError, OptionError, TransformError
from ridgeline.train.evaluate import evaluate
from ridgeline.train.fit import fit
from ridgeline.transform.quantise.step import QuantizeSettings, calibration_batches, quantize, storage_only
from ridgeline.transform.saved import load_model, save_model, stored_bytes
from ridgeline.transform.step import Context, find_step
from ridgeline.workload.data import Data, Split, load_data
from ridgeline.workload.models.digits_cnn import DigitsCNN


@pytest.fixture(scope="module")
def data() -> Data:
    pytest.importorskip("sklearn")
    return load_data("digits")


@pytest.fixture(scope="module")
def trained(data: Data) -> nn.Module:
    torch.manual_seed(0)
    model = DigitsCNN()
    fit(model, data, epochs=3, batch=64, learning_rate=0.05, progress=False)
    return model.eval()


METHODS: list[tuple[dict[str, Any], float, float]] = [  # settings, least compression, most accuracy lost
    ({"method": "static"}, 3.4, 0.01),
    ({"method": "static", "bits": 4, "calibration": "entropy"}, 5.8, 0.03),
    ({"method": "dynamic"}, 1.2, 0.01),
    ({"method": "weight-only"}, 3.3, 0.01),
    ({"method": "weight-only", "bits": 4, "symmetric": False, "granularity": "group", "group": 32, "algorithm": "gptq"}, 4.0, 0.03),
    ({"method": "qat", "bits": 3, "epochs": 1, "batch": 64}, 6.5, 0.03),
    ({"method": "mixed", "budget_bits": 4, "choices": (3, 4, 8), "calibration_samples": 64}, 5.0, 0.03),
]


@pytest.mark.parametrize(("settings", "ratio", "lost"), METHODS, ids=lambda value: value.get("method") if isinstance(value, dict) else "")
def test_every_method_saves_loads_and_states_its_cost(
    trained: nn.Module, data: Data, tmp_path: Path, settings: dict[str, Any], ratio: float, lost: float
) -> None:
    before = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    scores = lambda model: {"accuracy": evaluate(model, data, limit=200).accuracy}  # noqa: E731
    model, change = quantize(trained, data=data, quality=scores, name="digits-cnn", latency=False, **settings)
    assert change.compression_ratio > ratio and change.after.bytes_on_disk == stored_bytes(model)
    assert change.after.parameters >= 18_000  # weights counted, not bytes
    assert change.after.quality["accuracy"] >= change.before.quality["accuracy"] - lost
    assert all(row["sqnr_db"] > 8 for row in change.details["layers"])
    save_model(model, tmp_path / "saved", base="digits-cnn", change=change)
    x = data.prepare(data.test.inputs[:32])
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path / "saved")(x), model(x))
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained.state_dict().items())  # the user's own is untouched


def test_inputs_serve_where_there_is_no_data(trained: nn.Module) -> None:
    x = torch.randn(32, 1, 8, 8)
    model, change = quantize(trained, inputs=(x,), latency=False)
    assert change.name == "quantize static int8, mse ranges" and model(x).shape == (32, 10)


def test_calibration_is_a_seeded_sample_of_the_training_split(trained: nn.Module, data: Data) -> None:
    settings = QuantizeSettings(calibration_samples=100)
    one, same, other = (calibration_batches(trained, settings, Context(data=data, seed=seed)) for seed in (0, 0, 1))
    assert [len(batch[0]) for batch in one] == [64, 36]
    assert torch.equal(one[0][0], same[0][0]) and not torch.equal(one[0][0], other[0][0])


@pytest.mark.parametrize("method", ["static", "mixed", "qat"])
def test_what_needs_data_says_so(trained: nn.Module, method: str) -> None:
    more = {"budget_bits": 4} if method == "mixed" else {}
    with pytest.raises(TransformError, match="without data"):
        quantize(trained, method=method, latency=False, **more)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"method": "statik"}, "method"),
        ({"bits": 9}, "bits"),
        ({"bits": 1}, "bits"),
        ({"bit": 4}, "did you mean bits"),
        ({"group": 32}, "group is an option of method weight-only"),
        ({"epochs": 2}, "epochs is an option of method qat"),
        ({"budget_bits": 4}, "budget_bits is an option of method mixed"),
        ({"method": "mixed"}, "takes one of"),
        ({"method": "mixed", "budget_bits": 4, "budget_bytes": 10}, "takes one of"),
        ({"method": "mixed", "budget_bits": 4, "choices": (4, 16)}, "not 16"),
        ({"layer_bits": {"fc*": 12}}, "not 12"),
        ({"percentile": 30}, "percentile"),
    ],
)
def test_wrong_options_name_themselves(trained: nn.Module, settings: dict[str, Any], word: str) -> None:
    with pytest.raises(OptionError, match=word):
        quantize(trained, inputs=(torch.randn(1, 1, 8, 8),), **settings)


def test_a_layer_that_cannot_shrink_is_no_gain() -> None:
    tiny = nn.Sequential(nn.Linear(1, 1, bias=False)).eval()
    with pytest.raises(NoGainError):
        quantize(tiny, inputs=(torch.ones(4, 1),), latency=False)


def test_the_step_is_found_by_name_and_says_what_no_kernel_runs(trained: nn.Module) -> None:
    assert find_step("quantize")[0] is QuantizeSettings
    model, change = quantize(trained, method="weight-only", bits=4, latency=False)
    assert change.storage_only == storage_only(model) and any("PackedConv2d" in line for line in change.storage_only)


def test_ranges_are_found_on_the_training_split() -> None:
    """What is scored on must not have been looked at."""
    train, test = Split(torch.zeros(40, 4), torch.zeros(40).long()), Split(torch.ones(40, 4), torch.zeros(40).long())
    source = Data("told apart", "image", 2, train, test)
    batches = calibration_batches(nn.Linear(4, 2), QuantizeSettings(calibration_samples=30), Context(data=source))
    assert sum(len(batch[0]) for batch in batches) == 30 and not any(batch[0].any() for batch in batches)
