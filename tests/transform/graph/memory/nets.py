"""Small nets for the memory tests: what is hard about storages, and one of each named family at a tenth of its size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ridgeline.transform.graph.capture import Captured
from ridgeline.transform.graph.memory.lifetimes import Interval
from ridgeline.workload.models.bert import Bert, BertConfig
from ridgeline.workload.models.decoder import CausalLM, DecoderConfig
from ridgeline.workload.models.gpt2 import GPT2, GPT2Config
from ridgeline.workload.models.mobilenet import MobileNetV2
from ridgeline.workload.models.resnet import ResNet
from ridgeline.workload.models.vit import VisionTransformer, ViTConfig


def interval(number: int, size: int, first: int, last: int) -> Interval:
    return Interval(f"n{number}", number, size, first, last)


class Tricky(nn.Module):
    """Views, in-place ops on views, several results, expanded, strided and empty tensors, a result that is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 12)
        self.register_buffer("scale", torch.linspace(0.5, 2, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = self.linear(x)
        left, middle, right = wide.split(4, -1)
        left = left * self.scale
        left.add_(1).relu_()
        kept = torch.exp(middle)
        kept[:, 1:3].mul_(2)
        values, places = right.contiguous().topk(2, -1)
        turned = kept.t().contiguous().as_strided((4, x.shape[0]), (1, 4))
        empty = x[:, :0] * 2
        spread = torch.sigmoid(left.mean(-1, keepdim=True)).expand(-1, 4)
        total = spread + kept + left.clone() * F.pad(values, (1, 1), value=0.5)
        final = torch.cat([total, empty, torch.softmax(turned.t(), -1)], -1)
        return final.view(2, -1), places, x, total.sum(0)


class Branches(nn.Module):
    """All wide branches first, all narrow ends after: in this order every wide tensor is alive at once."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(16, 256) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(256, 16) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        wide = [torch.relu(up(x)) for up in self.up]
        total = torch.zeros_like(x)
        for down, part in zip(self.down, wide, strict=True):
            total = total + down(part)
        return total


class Tables(nn.Module):
    """Cheap values made first and used last, with wide tensors between."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        angle = x * 0.5
        tables = [torch.sin(angle * number).view(-1, 32) for number in range(4)]
        y = self.narrow(torch.tanh(self.wide(x)))
        for table in tables:
            y = y * table
        return y.clone()


def image(batch: int = 1, side: int = 32) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(0)),)


def tokens(batch: int = 2) -> tuple[Tensor, ...]:
    return (torch.randint(0, 60, (batch, 12), generator=torch.Generator().manual_seed(0)),)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "resnet18": lambda: (ResNet(False, (2, 2, 2, 2)), image()),
    "mobilenet-v2": lambda: (MobileNetV2(), image()),
    "bert": lambda: (Bert(BertConfig(2, 32, 4, 64, vocab=64, positions=16)), (*tokens(), torch.zeros(2, 12, dtype=torch.int64))),
    "gpt2": lambda: (GPT2(GPT2Config(layers=2, hidden=32, heads=4, vocab=64, positions=16)), (*tokens(), torch.arange(12))),
    "llama": lambda: (CausalLM(DecoderConfig(2, 32, 64, 4, 2, 64, 10000.0)), (*tokens(), torch.arange(12))),
    "vit": lambda: (VisionTransformer(ViTConfig(32, 8, 2, 32, 4, 64, 10)), image(2)),
}


def other_inputs(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Other values of the same shapes; integers stay within their range."""
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(x.shape, generator=generator).to(x.dtype) if x.is_floating_point() else x.flip(-1) for x in inputs)


def counting() -> Captured:
    """x * 2 + (count += 1), with `count` a buffer of the module."""
    module, graph = nn.Module(), fx.Graph()
    module.register_buffer("count", torch.zeros(1))
    aten = torch.ops.aten
    doubled = graph.call_function(aten.mul.Tensor, (graph.placeholder("x"), 2))
    counted = graph.call_function(aten.add_.Tensor, (graph.get_attr("count"), 1))
    graph.output((graph.call_function(aten.add.Tensor, (doubled, counted)),))
    return Captured(fx.GraphModule(module, graph), (torch.zeros(3),), False)
