"""Distillation end to end: students that learn, teachers that stay as they were, nothing left behind."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.core.errors import NoGainError, OptionError, TransformError
from ridgeline.train.evaluate import evaluate
from ridgeline.train.fit import fit
from ridgeline.transform.distil import DistilSettings, Pupil, distill, teach
from ridgeline.transform.features import Bridge, Taps, attention_loss
from ridgeline.transform.step import Context, find_step, run_step
from ridgeline.workload.data import Data, Split
from ridgeline.workload.models.decoder import CausalLM, DecoderConfig


class Convolutional(nn.Module):
    """Two convolutions and a linear layer."""

    def __init__(self, width: int, classes: int = 4) -> None:
        super().__init__()
        self.first, self.relu = nn.Conv2d(1, width, 3, padding=1), nn.ReLU(inplace=True)
        self.second, self.norm = nn.Conv2d(width, width, 3, padding=1, stride=2), nn.BatchNorm2d(width)
        self.linear = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.second(self.relu(self.first(x)))).relu()
        return self.linear(x.amax((2, 3)))


def images(rows: int = 512, seed: int = 0) -> Data:
    """Four classes: where in a noisy image the bright spot lies."""
    random = torch.Generator().manual_seed(seed)
    targets = torch.randint(4, (rows,), generator=random)
    inputs = torch.randn(rows, 1, 8, 8, generator=random)
    inputs[torch.arange(rows), 0, 2 + 3 * (targets // 2), 2 + 3 * (targets % 2)] += 1.0 + 2.0 * (targets + 1)
    half = rows // 2
    return Data("spots", "image", 4, Split(inputs[:half], targets[:half]), Split(inputs[half:], targets[half:]))


def teacher_of(data: Data, width: int = 16, epochs: int = 8) -> nn.Module:
    torch.manual_seed(1)
    model = Convolutional(width)
    fit(model, data, epochs=epochs, batch=32, learning_rate=0.05, progress=False)
    return model.eval()


def student(width: int = 4) -> nn.Module:
    torch.manual_seed(2)
    return Convolutional(width)


def sizes(module: nn.Module) -> list[int]:
    return [len(child._forward_hooks) + len(child._forward_pre_hooks) for child in module.modules()]


@pytest.fixture(scope="module")
def data() -> Data:
    return images()


@pytest.fixture(scope="module")
def teacher(data: Data) -> nn.Module:
    return teacher_of(data)


@pytest.mark.parametrize("features", ["none", "hidden", "attention"])
def test_a_student_comes_closer_to_its_teacher_and_nothing_is_left_behind(features: str, data: Data, teacher: nn.Module) -> None:
    layers = {} if features == "none" else {"first": "first", "norm": "norm"}
    first, before = student(), copy.deepcopy(teacher.state_dict())
    trained, change = distill(
        first, teacher, data=data, epochs=12, batch=32, features=features, layers=layers, alpha=0.9, beta=1.0, latency=False
    )
    far, near = (evaluate(model, data, reference=teacher).kl for model in (first, trained))
    assert near is not None and far is not None and near < 0.5 * far
    assert trained.state_dict().keys() == first.state_dict().keys(), "adapters are not part of the student"
    assert not any(sizes(trained)) and not any(sizes(teacher)) and not teacher.training
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items()), "batch norm statistics included"
    assert change.after.bytes_on_disk < change.before.bytes_on_disk, "the Change is from teacher to student"
    assert change.after.quality["accuracy"] > change.details["student_before"]["accuracy"]


def test_the_feature_term_brings_attention_closer(data: Data, teacher: nn.Module) -> None:
    distances = []
    for settings in ({}, {"features": "attention", "layers": {"norm": "norm"}, "beta": 20.0}):
        model = student()
        teach(model, teacher, data, DistilSettings(epochs=6, batch=32, **settings), progress=False)
        maps = []
        for one in (model.eval(), teacher):
            with Taps(one, ("norm",), "it") as tap, torch.no_grad():
                one(data.test.inputs)
                maps.append(tap.take()["norm"])
        distances.append(attention_loss(*maps).item())
    assert distances[1] < 0.9 * distances[0]


def test_adapters_are_made_once_and_trained_in_the_optimiser(data: Data, teacher: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Tensor]] = []
    made: list[Pupil] = []
    forward, build = Pupil.forward, Pupil.__init__

    def watched(self: Pupil, inputs: Tensor, targets: Tensor) -> Tensor:
        assert self.bridge is not None
        seen.append([p.detach().clone() for p in self.bridge.parameters()])
        return forward(self, inputs, targets)

    def counted(self: Pupil, *args: Any) -> None:
        made.append(self)
        build(self, *args)

    monkeypatch.setattr(Pupil, "forward", watched)
    monkeypatch.setattr(Pupil, "__init__", counted)
    settings = DistilSettings(steps=5, batch=32, features="hidden", layers={"norm": "norm"}, beta=1.0)
    teach(student(), teacher, data, settings, progress=False)
    assert len(made) == 1 and len(seen) == 5 and len(seen[0]) == 2
    assert all(not torch.equal(a, b) for early, late in pairwise(seen) for a, b in zip(early, late, strict=True))


def test_one_step_is_the_gradient_of_the_formula(data: Data, teacher: nn.Module) -> None:
    """Plain SGD of one step on the whole set, against the loss written here in float64."""
    model = student().double()
    wise = copy.deepcopy(teacher).double()
    exact = Data("exact", "image", 4, Split(data.train.inputs.double(), data.train.targets), data.test)
    mirror = copy.deepcopy(model).train()
    x, y = exact.train.inputs, exact.train.targets
    s, t = mirror(x), wise(x).detach()
    p, q = (t / 3).softmax(1), (s / 3).softmax(1)
    loss = 0.7 * 9 * (p * (p.log() - q.log())).sum(1).mean() - 0.3 * s.log_softmax(1)[torch.arange(len(y)), y].mean()
    loss.backward()
    settings = DistilSettings(steps=1, batch=len(y), learning_rate=0.1, momentum=0.0, weight_decay=0.0, schedule="constant")
    history = teach(model, wise, exact, settings, progress=False)
    assert history.loss[0] == pytest.approx(loss.item(), rel=1e-9)
    for own, other in zip(model.parameters(), mirror.parameters(), strict=True):
        assert other.grad is not None
        assert torch.allclose(own, other - 0.1 * other.grad, rtol=1e-6, atol=1e-9)


def language(rows: int = 64, length: int = 12, vocab: int = 17) -> Data:
    """Sequences that count upwards by a step of their own; the last targets do not count."""
    random = torch.Generator().manual_seed(0)
    start, stride = torch.randint(vocab, (rows, 1), generator=random), torch.randint(1, 4, (rows, 1), generator=random)
    tokens = (start + stride * torch.arange(length + 1)) % vocab
    targets = tokens[:, 1:].clone()
    targets[:, -2:] = -100
    split = Split(tokens[:, :-1], targets)
    return Data("counting", "tokens", vocab, split, split)


@pytest.mark.parametrize("features", ["none", "hidden", "attention"])
def test_sequence_models_are_distilled(features: str) -> None:
    data = language()
    torch.manual_seed(0)
    teacher = CausalLM(DecoderConfig(2, 32, 64, 4, 2, 17, 1e4))
    fit(teacher, data, epochs=20, batch=16, optimiser="adamw", learning_rate=5e-3, progress=False)
    small = CausalLM(DecoderConfig(1, 16, 32, 2, 1, 17, 1e4))
    layers = {} if features == "none" else {"model.layers.0.self_attn": "model.layers.1.self_attn"}
    settings = {"epochs": 10, "batch": 16, "optimiser": "adamw", "learning_rate": 5e-3, "features": features, "layers": layers}
    inputs = (data.test.inputs[:1], torch.arange(12))
    trained, change = distill(small, teacher, data=data, inputs=inputs, latency=False, **settings)
    far, near = (evaluate(model, data, reference=teacher).kl for model in (small, trained))
    assert near is not None and far is not None and near < 0.6 * far
    assert change.after.quality["perplexity"] < change.details["student_before"]["perplexity"]


def test_pruned_weights_stay_pruned_and_frozen_ones_stay(data: Data, teacher: nn.Module) -> None:
    model = student()
    with torch.no_grad():
        model.second.weight[:2] = 0.0
        model.linear.weight.zero_()  # all of it: a fresh head, which must learn
    kept = model.first.weight.clone()
    teach(model, teacher, data, DistilSettings(epochs=1, batch=32, freeze=("first",)), progress=False)
    assert not model.second.weight[:2].any() and model.second.weight[2:].all()
    assert model.linear.weight.any() and torch.equal(model.first.weight, kept)


def test_a_model_without_gradients_is_trained_and_given_back_without(data: Data, teacher: nn.Module) -> None:
    model = student().requires_grad_(False)
    before = model.linear.weight.clone()
    teach(model, teacher, data, DistilSettings(steps=2, batch=32), progress=False)
    assert not torch.equal(model.linear.weight, before)
    assert not any(p.requires_grad for p in model.parameters())


def test_same_seed_same_student_and_the_callers_random_numbers_stay(data: Data, teacher: nn.Module) -> None:
    settings = DistilSettings(steps=3, batch=32, features="hidden", layers={"norm": "norm"})
    models = [student() for _ in range(2)]
    for model in models:
        torch.manual_seed(5)
        teach(model, teacher, data, settings, seed=3, progress=False)
        assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(5)))
    assert all(torch.equal(a, b) for a, b in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True))


def test_bfloat16_passes_and_a_compiled_pupil_agree_with_the_plain_one(data: Data, teacher: nn.Module) -> None:
    settings = {"steps": 3, "batch": 32, "features": "attention", "layers": {"second": "second"}}
    plain, half = (
        teach(student(), teacher, data, DistilSettings(**settings, precision=p), progress=False) for p in ("float32", "bfloat16")
    )
    assert half.loss == pytest.approx(plain.loss, rel=0.05) and half.loss != plain.loss
    model = student()
    taps = Taps(model, ("second",), "a"), Taps(teacher, ("second",), "b")
    seen = [tap.try_out(m, data.train.inputs[:2]) for tap, m in zip(taps, (model, teacher), strict=True)]
    pupil = Pupil(model, teacher, Bridge({"second": "second"}, "attention", *seen), taps, DistilSettings(**settings)).eval()
    with taps[0], taps[1]:
        x, y = data.train.inputs[:8], data.train.targets[:8]
        whole = torch.compile(pupil, backend="eager", fullgraph=True)  # one graph: teacher, student, hooks and loss
        assert whole(x, y).item() == pytest.approx(pupil(x, y).item(), rel=1e-6)


def test_the_step_is_registered_and_asks_for_what_it_needs(data: Data, teacher: nn.Module) -> None:
    kind, _ = find_step("distill")
    settings = kind(steps=1, batch=32)
    with pytest.raises(TransformError, match="without teacher"):
        run_step(student(), settings, Context(data=data))
    with pytest.raises(TransformError, match="without data"):
        run_step(student(), settings, Context(teacher=teacher))
    assert run_step(student(), settings, Context(data=data, teacher=teacher)).name == "distill 1 steps"


def test_wrong_options_are_named(data: Data, teacher: nn.Module) -> None:
    for wrong, match in (
        ({"alpha": 1.5}, "alpha = 1.5"),
        ({"temperature": 0}, "temperature = 0"),
        ({"temperatur": 3}, "temperatur(.|\n)*did you mean temperature"),
        ({"features": "hidden"}, "features and layers go together"),
        ({"epochs": 1, "steps": 1}, "one of the two"),
    ):
        with pytest.raises(OptionError, match=match):
            distill(student(), teacher, data=data, **wrong)
    with pytest.raises(TransformError, match="the teacher has no layer 'nrm'"):
        distill(student(), teacher, data=data, features="hidden", layers={"norm": "nrm"})
    with pytest.raises(TransformError, match="shares parameters"):
        model = student()
        teach(model, model, data, DistilSettings(steps=1))
    with pytest.raises(TransformError, match=r"student logits \[128, 4\] and teacher logits \[128, 5\]"):
        distill(student(), Convolutional(4, classes=5), data=data, epochs=1)


def test_a_student_as_large_as_its_teacher_gains_nothing(data: Data, teacher: nn.Module) -> None:
    with pytest.raises(NoGainError):
        distill(student(16), teacher, data=data, steps=1, batch=32, latency=False)
    _, change = distill(student(16), teacher, data=data, steps=1, batch=32, latency=False, require_gain=False)
    assert change.compression_ratio == pytest.approx(1.0, rel=0.01)
