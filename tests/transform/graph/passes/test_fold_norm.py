"""Batch norms folded before and after every kind of layer, in float64 against the model itself; what must be refused, is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ridgeline.transform.graph.capture import Captured, capture_graph
from ridgeline.transform.graph.check import PassError
from ridgeline.transform.graph.edit import is_op
from ridgeline.transform.graph.manager import PassContext, PassReport, run_passes
from ridgeline.transform.graph.passes import fold_norm
from ridgeline.transform.graph.passes.fold_norm import FoldNorm

IMAGE, SERIES, VOLUME, ROWS = (2, 4, 9, 9), (2, 4, 11), (2, 4, 5, 6, 5), (3, 4)


def norm(kind: type[nn.Module], features: int, **options: object) -> nn.Module:
    """A batch norm whose statistics and weights are far from doing nothing."""
    made = kind(features, **options)
    torch.manual_seed(features)
    for name, tensor in [*made.named_buffers(), *made.named_parameters()]:
        if tensor.is_floating_point():
            tensor.data.uniform_(0.3, 2.0) if "var" in name else tensor.data.normal_()
    return made


def folded(model: nn.Module, shape: tuple[int, ...]) -> tuple[Captured, PassReport]:
    """The graph after the pass, which the manager checked against the model in float64, and what the pass says."""
    torch.manual_seed(1)
    graph = capture_graph(model.double().eval(), (torch.randn(shape, dtype=torch.float64),))
    return graph, run_passes(graph, ["fold_norm"], PassContext())[0]


def norms_left(graph: Captured) -> int:
    return sum(is_op(node, torch.ops.aten.batch_norm) for node in graph.module.graph.nodes)


AFTER: list[tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = [
    (lambda: [nn.Conv1d(4, 6, 3, padding=1), norm(nn.BatchNorm1d, 6)], SERIES),
    (lambda: [nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False), norm(nn.BatchNorm2d, 6, eps=0.2)], IMAGE),
    (lambda: [nn.Conv2d(4, 8, 3, padding="same", groups=4), norm(nn.BatchNorm2d, 8)], IMAGE),
    (lambda: [nn.Conv3d(4, 6, 3), norm(nn.BatchNorm3d, 6, affine=False)], VOLUME),
    (lambda: [nn.ConvTranspose1d(4, 6, 3, stride=2), norm(nn.BatchNorm1d, 6)], SERIES),
    (lambda: [nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2), norm(nn.BatchNorm2d, 6)], IMAGE),
    (lambda: [nn.ConvTranspose3d(4, 2, 2, bias=False), norm(nn.BatchNorm3d, 2)], VOLUME),
    (lambda: [nn.Linear(4, 6), norm(nn.BatchNorm1d, 6)], ROWS),
]
BEFORE: list[tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = [
    (lambda: [norm(nn.BatchNorm2d, 4), nn.Conv2d(4, 6, 3)], IMAGE),
    (lambda: [norm(nn.BatchNorm2d, 4), nn.Conv2d(4, 8, 3, groups=2, bias=False)], IMAGE),
    (lambda: [norm(nn.BatchNorm1d, 4), nn.Conv1d(4, 6, 3, dilation=2)], SERIES),
    (lambda: [norm(nn.BatchNorm1d, 4), nn.Linear(4, 6)], ROWS),
]


@pytest.mark.parametrize(("layers", "shape"), [*AFTER, *BEFORE])
def test_folds_with_the_same_answers(layers: Callable[[], list[nn.Module]], shape: tuple[int, ...]) -> None:
    graph, report = folded(nn.Sequential(*layers()), shape)
    assert len(report.changed) == 1 and norms_left(graph) == 0
    assert 0 < report.check_error < 1e-12  # weights are new, so not bitwise the same
    assert report.nodes_after < report.nodes_before and report.changed[0].saved_bytes > 0


class TwoConsumers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), norm(nn.BatchNorm2d, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(x)
        return self.norm(out) + out


class SharedConv(nn.Module):
    """One convolution used twice, with another norm each time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), norm(nn.BatchNorm2d, 4), norm(nn.BatchNorm2d, 4, eps=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.conv(torch.relu(self.first(self.conv(x))))) + self.conv(x)


class ComputedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), norm(nn.BatchNorm2d, 4)
        self.register_buffer("scale", torch.ones(4, 4, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.conv2d(x, self.conv.weight * self.scale))


class WrittenInput(nn.Module):
    """The input of the norm changes between the norm and the layer it would be folded into."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = norm(nn.BatchNorm2d, 4), nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        out = self.norm(x)
        x.add_(1)
        return self.conv(out) + x[:, :, 1:-1, 1:-1]


class WrittenStatistics(nn.Module):
    """Every pass moves the mean that the next one takes off: what is folded once is wrong from the second pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), norm(nn.BatchNorm2d, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        assert self.norm.running_mean is not None
        self.norm.running_mean.add_(1.0)
        return out


def test_a_shared_convolution_keeps_its_weight_for_others() -> None:
    model = SharedConv()
    weight = model.conv.weight.detach().double().clone()
    graph, report = folded(model, IMAGE)
    assert len(report.changed) == 2 and norms_left(graph) == 0
    assert torch.equal(model.conv.weight, weight)


@pytest.mark.parametrize(
    ("model", "shape", "reason"),
    [
        (TwoConsumers, IMAGE, "2 consumers"),
        (ComputedWeight, IMAGE, "computed"),
        (WrittenInput, IMAGE, "in-place"),
        (WrittenStatistics, IMAGE, "in-place"),
        (lambda: nn.Sequential(norm(nn.BatchNorm2d, 4), nn.Conv2d(4, 4, 3, padding=1)), IMAGE, "pads with zeros"),
        (lambda: nn.Sequential(norm(nn.BatchNorm2d, 4), nn.ConvTranspose2d(4, 4, 3)), IMAGE, "fewer taps"),
        (lambda: nn.Sequential(nn.Linear(4, 6), norm(nn.BatchNorm1d, 5)), (3, 5, 4), "another dimension"),
        (lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)), IMAGE, "statistics of the batch"),
        (lambda: nn.Sequential(nn.ReLU(), norm(nn.BatchNorm2d, 4)), IMAGE, "not the output"),
    ],
)
def test_refuses_and_says_why(model: Callable[[], nn.Module], shape: tuple[int, ...], reason: str) -> None:
    graph, report = folded(model(), shape)
    assert not report.changed and norms_left(graph) == 1
    assert reason in report.refused[0].what


def test_a_norm_without_shift_folds_before_a_padded_convolution() -> None:
    first = norm(nn.BatchNorm2d, 4)
    first.running_mean.zero_()
    first.bias.data.zero_()
    _, report = folded(nn.Sequential(first, nn.Conv2d(4, 4, 3, padding=1)), IMAGE)
    assert len(report.changed) == 1


def test_a_wrong_eps_is_caught_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fold_norm.argument
    monkeypatch.setattr(fold_norm, "argument", lambda node, name, *rest: 1e-3 if name == "eps" else right(node, name, *rest))
    with pytest.raises(PassError, match="fold_norm"):
        folded(nn.Sequential(nn.Conv2d(4, 6, 3), norm(nn.BatchNorm2d, 6)), IMAGE)


def test_float32_weights_are_rounded_once() -> None:
    conv, after = nn.Conv2d(4, 6, 3), norm(nn.BatchNorm2d, 6)
    graph = capture_graph(nn.Sequential(conv, after).eval(), (torch.randn(IMAGE),))
    assert FoldNorm().run(graph, PassContext()).changed
    scale = after.weight.double() / (after.running_var.double() + after.eps).sqrt()
    expected = (conv.weight.double() * scale.view(-1, 1, 1, 1)).float()
    found = next(value for name, value in graph.module.named_buffers() if name.endswith("folded"))
    assert torch.allclose(found, expected, rtol=2e-7, atol=0)
