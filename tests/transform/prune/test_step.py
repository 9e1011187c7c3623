"""prune(): a module in, a module and a Change out, for every method; saved and loaded again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ridgeline.core.errors import NoGainError, OptionError, TransformError
from ridgeline.train.evaluate import evaluate
from ridgeline.train.fit import fit
from ridgeline.transform.prune import step as prune_step
from ridgeline.transform.prune.sparse24 import NMLinear
from ridgeline.transform.prune.step import PruneSettings, prune, taught_by
from ridgeline.transform.recipe import parse_recipe, run_recipe
from ridgeline.transform.saved import load_model, save_model
from ridgeline.transform.step import Context
from ridgeline.workload.data import Data
from ridgeline.workload.models.decoder import CausalLM, DecoderConfig
from tests.transform.prune.nets import Residual, blobs, images, perceptron, warm


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, Data]:
    """A perceptron that knows its blobs."""
    model, data = perceptron(), blobs()
    fit(model, data, epochs=8, batch=32, learning_rate=0.05, progress=False)
    assert evaluate(model, data).accuracy > 0.95
    return model, data


def accuracy(data: Data) -> Any:
    return lambda model: {"accuracy": evaluate(model, data).accuracy}


@pytest.mark.parametrize("method", ["magnitude", "gradient", "taylor"])
def test_weights(trained: tuple[nn.Module, Data], method: str, tmp_path: Path) -> None:
    """The original is untouched; zeros are stored sparse, so the file shrinks; the file gives the same model back."""
    model, data = trained
    before = copy.deepcopy(model.state_dict())
    pruned, change = prune(model, method=method, sparsity=0.6, data=data, quality=accuracy(data), latency=False)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert change.target_sparsity == 0.6 and change.after.nonzero == change.before.parameters - round(0.6 * 1664)
    assert change.compression_ratio > 1.2 and sum(row["pruned"] for row in change.details["layers"]) == round(0.6 * 1664)
    assert set(change.after.quality) == {"accuracy"}
    loaded = load_model(save_model(pruned, tmp_path / "m", base=perceptron()), base=perceptron())
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in pruned.state_dict().items())


def test_gradient_beats_its_own_mirror(trained: tuple[nn.Module, Data]) -> None:
    """Keeping the largest gradients loses less than keeping the smallest: the bug would swap the two."""
    model, data = trained
    kept, change = prune(model, method="gradient", sparsity=0.5, data=data, quality=accuracy(data), latency=False)
    mirror = copy.deepcopy(model)
    for (name, weight), other in zip(mirror.named_parameters(), kept.parameters(), strict=True):
        if name.endswith("weight"):
            weight.data[other != 0] = 0
    assert change.after.quality["accuracy"] > evaluate(mirror, data).accuracy + 0.2


def test_gradual_recovers(trained: tuple[nn.Module, Data]) -> None:
    model, data = trained
    _, once = prune(model, sparsity=0.95, data=data, quality=accuracy(data), latency=False)
    _, change = prune(model, sparsity=0.95, data=data, quality=accuracy(data), latency=False, epochs=6, batch=32, learning_rate=0.05)
    assert change.after.quality["accuracy"] > max(0.9, once.after.quality["accuracy"])
    assert change.after.sparsity == once.after.sparsity and change.details["schedule"][-1][1] == pytest.approx(0.95, abs=1e-3)


def test_pattern_packs_linears(trained: tuple[nn.Module, Data], tmp_path: Path) -> None:
    """2:4 with the mask held in training; packed bytes count, on the CPU labelled as storage only."""
    model, data = trained
    options: dict[str, Any] = {"data": data, "quality": accuracy(data), "latency": False}
    pruned, change = prune(model, method="n:m", epochs=2, batch=32, learning_rate=0.02, **options)
    assert all(isinstance(pruned[i], NMLinear) for i in (0, 2, 4))  # type: ignore[index]
    assert change.after.quality["accuracy"] > 0.9 and change.storage_only and "3 linear layers" in change.storage_only[0]
    assert change.target_sparsity == 0.5 and change.after.bytes_on_disk < change.before.bytes_on_disk
    loaded = load_model(save_model(pruned, tmp_path / "m", base=perceptron()), base=perceptron())
    assert torch.equal(loaded(data.test.inputs), pruned(data.test.inputs))
    _, odd = prune(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8)), method="n:m", latency=False)
    assert "0.weight is left dense" in odd.notes[0]


def test_tied_weights_are_not_packed_apart() -> None:
    config = DecoderConfig(layers=1, hidden=32, intermediate=32, heads=4, kv_heads=2, vocab=40, rope_theta=1e4, tied=True)
    pruned, _ = prune(CausalLM(config), method="n:m", latency=False)
    assert isinstance(pruned, CausalLM) and pruned.lm_head.weight is pruned.model.embed_tokens.weight
    assert isinstance(pruned.model.layers[0].mlp.up_proj, NMLinear)


def test_channels_fine_tuned_and_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = warm(Residual()), images()
    pruned, change = prune(model, method="channels", flops=0.6, data=data, latency=False, epochs=1, batch=32, distil=True)
    flops = change.details["flops"]
    assert flops[1] <= 0.6 * flops[0] and change.after.parameters == change.details["parameters"][1] < change.before.parameters
    assert any("output" in note for note in change.notes)
    loaded = load_model(save_model(pruned, tmp_path / "m", base=Residual()), base=Residual())
    inputs = data.test.inputs
    assert torch.equal(loaded.eval()(inputs), pruned.eval()(inputs))


def test_heads_of_a_decoder() -> None:
    config = DecoderConfig(layers=2, hidden=32, intermediate=32, heads=4, kv_heads=2, vocab=40, rope_theta=1e4)
    inputs = (torch.zeros(1, 5, dtype=torch.int64), torch.arange(5))
    pruned, change = prune(CausalLM(config), method="heads", sparsity=0.5, inputs=inputs, latency=False)
    assert change.details["layers"][0]["query_heads"] in ([0, 1], [2, 3]) and pruned(*inputs).shape == (1, 5, 40)
    assert change.before.parameters - change.after.parameters == 2 * (16 * 32 * 2 + 8 * 2 * 32)


def test_the_teacher_does_not_learn(trained: tuple[nn.Module, Data]) -> None:
    """The objective is α·T²·KL + (1 − α)·CE, its gradient reaching the student only."""
    teacher, data = copy.deepcopy(trained[0]), trained[1]
    student, (x, y) = perceptron(seed=1), (data.train.inputs[:9], data.train.targets[:9])
    loss = taught_by(teacher, PruneSettings(epochs=1, distil=True, temperature=2.0, alpha=0.25))(student, x, y)
    soft = nn.functional.kl_div((student(x) / 2).log_softmax(-1), (teacher(x) / 2).softmax(-1), reduction="batchmean")
    assert torch.allclose(loss, 0.25 * 4 * soft + 0.75 * nn.functional.cross_entropy(student(x), y), rtol=1e-5)
    loss.backward()
    assert all(p.grad is None for p in teacher.parameters()) and all(p.grad is not None for p in student.parameters())


def test_the_teacher_is_the_model_before_pruning(trained: tuple[nn.Module, Data], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the mask is set before training starts: a teacher with the student's zeros would teach them."""
    model, data = trained
    seen: list[nn.Module] = []
    monkeypatch.setattr(prune_step, "taught_by", lambda teacher, settings: seen.append(teacher) or taught_by(teacher, settings))
    for method in ("n:m", "magnitude", "channels"):
        prune(model, method=method, data=data, latency=False, epochs=0.2, batch=32, distil=True, require_gain=False)
    for teacher in seen:
        assert all(torch.equal(a, b) for a, b in zip(teacher.parameters(), model.parameters(), strict=True))
    assert len(seen) == 3


def test_no_gain_is_an_error() -> None:
    """One weight in a thousand zero: the bitmap costs more than it saves."""
    with pytest.raises(NoGainError):
        prune(perceptron(), sparsity=0.001, latency=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "magnitud"}, "method"),
        ({"sparsity": 1.0}, "sparsity"),
        ({"sparsity": 0.0}, "sparsity"),
        ({"flops": 0.5}, "flops"),
        ({"method": "channels", "flops": 0.5, "parameters": 0.5}, "flops or parameters"),
        ({"distil": True}, "epochs"),
        ({"sparsities": 0.5}, "did you mean"),
        ({"method": "n:m", "pattern": "4:2"}, "pattern"),
        ({"method": "channels", "include": ("0",)}, "include"),
        ({"skip": ("nowhere",)}, "nowhere"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        prune(perceptron(), latency=False, **options)


def test_what_is_missing_is_named() -> None:
    for options in ({"method": "gradient"}, {"epochs": 1}, {"method": "channels"}):
        with pytest.raises(TransformError, match=r"data|inputs"):
            prune(perceptron(), latency=False, **options)  # type: ignore[arg-type]
    with pytest.raises(TransformError, match="no layer for 3:7"):
        prune(perceptron(), method="n:m", pattern="3:7", latency=False)


@pytest.mark.parametrize("method", ["magnitude", "n:m"])
def test_a_recipe_leaves_the_users_model_as_it_was(method: str) -> None:
    """It is the teacher of a distilling step where no other is given."""
    model, data = perceptron().train(), blobs()
    plan = parse_recipe(
        {"recipe": {"name": "r", "version": 1}, "step": [{"kind": "prune", "method": method, "epochs": 1, "distil": True, "batch": 64}]}
    )
    run_recipe(model, plan, Context(data=data, latency=False), require_gain=False)
    assert all(parameter.requires_grad for parameter in model.parameters()) and all(module.training for module in model.modules())


def test_a_model_without_gradients_is_trained_all_the_same() -> None:
    """As named models come; afterwards its weights take none again."""
    model, data = perceptron().requires_grad_(False), blobs()
    pruned, _ = prune(model, sparsity=0.5, epochs=1, data=data, latency=False)
    kept = pruned[0].weight != 0
    assert not torch.equal(pruned[0].weight[kept], model[0].weight[kept]) and not any(p.requires_grad for p in pruned.parameters())


def test_scores_of_a_model_in_another_dtype() -> None:
    pruned, _ = prune(perceptron().double(), method="taylor", sparsity=0.5, data=blobs(), latency=False)
    assert float((pruned[0].weight == 0).double().mean()) > 0.2
