"""Twelve models that passes and memory plans are held against: named ones, and two that break careless rewriting.

    suite_case("bert", small=True, dtype=torch.float64) ──> Case(name, module in eval mode, inputs)
      small: few layers or pixels, for tests     otherwise: the named model at its own size, batch 1, for benchmarks

Norms have random statistics, gains and shifts, so that folding them wrongly shows. Weights come from a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import unknown_name
from ...workload.case import CaseOptions
from ...workload.models import build_named

PIXELS = {"resnet18": 64, "resnet50": 64, "mobilenet-v2": 64, "vgg16": 32, "alexnet": 67, "digits-cnn": 8}
FEATURES = {"vgg16": 512, "alexnet": 256}  # that reach the first linear at those pixels
NAMED = {"bert": "bert-base", "gpt2": "gpt2", "llama": "smollm2-135m"}
TOKENS = 128


@dataclass(frozen=True, slots=True)
class Case:
    """A model and its inputs."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]


class SharedConvs(nn.Module):
    """One convolution used three times, once before a norm: folding that norm must not touch the other two."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.shared = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(self.norm(self.shared(x)))
        x = torch.relu(self.shared(x)) + x
        scores: Tensor = self.head(self.shared(x).mean((2, 3)))
        return scores


class TwoConsumers(nn.Module):
    """A convolution whose output feeds a norm and a sum, one that is written to in place, and a norm that can be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(c, 16, 3, padding=1, bias=False) for c in (3, 16, 16))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(3))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        raw = self.first(x)
        x = torch.relu(self.norms[0](raw)) + raw
        middle = self.second(x)
        normed = self.norms[1](middle)
        middle = middle.mul_(0.5)
        x = torch.relu_(self.norms[2](self.third(normed + middle)))
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores


MADE: dict[str, Callable[[], nn.Module]] = {"shared-convs": SharedConvs, "two-consumers": TwoConsumers}
SUITE = (*PIXELS, "vit-b16", *NAMED, *MADE)
"""The names, twelve."""


def suite_case(name: str, *, small: bool = True, dtype: torch.dtype = torch.float32, batch: int = 2, seed: int = 0) -> Case:
    """One of SUITE on the CPU; `batch` is for small ones, the others take one sample."""
    if name not in SUITE:
        raise unknown_name("model of the suite", name, SUITE, see="transform/graph/suite.py")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module, inputs = _small(name, batch) if small else _large(name)
        module.eval().requires_grad_(False)
        _random_norms(module)
        module = module.to(dtype)
        inputs = tuple(one.to(dtype) if one.is_floating_point() else one for one in inputs)
    return Case(name, module, inputs)


def _large(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    if name in MADE:
        return MADE[name](), (torch.randn(1, 3, 224, 224),)
    known = NAMED.get(name, name)
    case = build_named(known, CaseOptions(batch=1, device="cpu", dtype="float32", context=TOKENS if name in NAMED else None))
    return case.module, tuple(case.args)


def _small(name: str, batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    if name in MADE:
        return MADE[name](), (torch.randn(batch, 3, 12, 12),)
    if name in FEATURES:
        return _short_classifier(name), (torch.randn(batch, 3, PIXELS[name], PIXELS[name]),)
    if name in PIXELS:
        case = build_named(name, CaseOptions(batch=1, device="cpu"))
        channels = case.args[0].shape[1]
        return case.module, (torch.randn(batch, channels, PIXELS[name], PIXELS[name]),)
    return _small_transformer(name, batch)


def _small_transformer(name: str, batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    from ...workload.models import bert, decoder, gpt2, vit

    ids, positions = torch.randint(100, (batch, 9)), torch.arange(9)
    if name == "vit-b16":
        config: Any = vit.ViTConfig(image=32, patch=16, layers=2, hidden=48, heads=4, intermediate=96, classes=10)
        return vit.VisionTransformer(config), (torch.randn(batch, 3, 32, 32),)
    if name == "bert":
        config = bert.BertConfig(layers=2, hidden=48, heads=4, intermediate=96, vocab=100, positions=16)
        return bert.Bert(config), (ids, torch.zeros_like(ids))
    if name == "gpt2":
        return gpt2.GPT2(gpt2.GPT2Config(layers=2, hidden=48, heads=4, vocab=100, positions=16)), (ids, positions)
    config = decoder.DecoderConfig(
        layers=2, hidden=48, intermediate=96, heads=4, kv_heads=2, vocab=100, rope_theta=10_000.0, qkv_bias=True, tied=True
    )
    return decoder.CausalLM(config), (ids, positions)


def _short_classifier(name: str) -> nn.Module:
    """The network on small images: its linears, most of its weights, are shortened; made without ever holding the large ones."""
    from ...workload.models import alexnet, vgg

    with torch.device("meta"):
        module: Any = vgg.VGG() if name == "vgg16" else alexnet.AlexNet()
        module.classifier = nn.Sequential(nn.Linear(FEATURES[name], 64), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(64, 10))
    made: nn.Module = module.to_empty(device="cpu")
    for parameter in made.parameters():
        fan = max(1, parameter[0].numel())
        nn.init.normal_(parameter, std=(2 / fan) ** 0.5 if parameter.dim() > 1 else 0.1)
    return made


def _random_norms(module: nn.Module) -> None:
    """As after training: means and variances that are not 0 and 1, gains that are not 1."""
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            nn.init.normal_(part.running_mean, std=0.2)  # type: ignore[arg-type]
            nn.init.uniform_(part.running_var, 0.5, 1.5)  # type: ignore[arg-type]
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.LayerNorm | nn.RMSNorm) and part.weight is not None:
            nn.init.uniform_(part.weight, 0.7, 1.1)
            if getattr(part, "bias", None) is not None:
                nn.init.normal_(part.bias, std=0.1)  # type: ignore[arg-type]
