"""Layers with sums and activations become one call, with the model's answers; near misses stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.transform.graph import onednn
from ridgeline.transform.graph.capture import Captured, capture_graph
from ridgeline.transform.graph.chains import Chain, grow
from ridgeline.transform.graph.check import PassError
from ridgeline.transform.graph.edit import is_op
from ridgeline.transform.graph.manager import PassContext, PassReport, run_passes
from ridgeline.transform.graph.onednn_time import Timing
from ridgeline.transform.graph.passes import epilogue
from ridgeline.transform.graph.passes.epilogue import Epilogue

pytestmark = pytest.mark.skipif(not onednn.available(), reason="torch was built without oneDNN")
IMAGE, ROWS = (2, 4, 8, 8), (2, 5, 8)
Forward = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Two convolutions and two linears of the same width, put together by a function."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1, bias=False)
        self.linear, self.linear2 = nn.Linear(8, 8), nn.Linear(8, 8)
        self.how = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def fused(forward: Forward, shape: tuple[int, ...] = IMAGE) -> tuple[Captured, PassReport]:
    """The graph after the pass, checked by the manager at two batch sizes, and its report."""
    graph = capture_graph(Net(forward).eval(), (torch.randn(shape, generator=torch.Generator().manual_seed(1)),))
    return graph, run_passes(graph, [Epilogue(measure=False)], PassContext())[0]


def ops(graph: Captured) -> list[str]:
    return [str(node.target) for node in graph.module.graph.nodes if node.op == "call_function"]


def sum_in_place(net: Net, x: Tensor) -> Tensor:
    out = net.conv(x)
    out += x
    return F.relu_(out)


ONE_CALL: list[tuple[Forward, tuple[int, ...], int]] = [
    (lambda net, x: F.relu(net.conv(x)), IMAGE, 1),
    (lambda net, x: F.relu6(net.conv(x), inplace=True), IMAGE, 1),
    (lambda net, x: torch.clamp(net.conv(x), -1, 2), IMAGE, 1),
    (lambda net, x: F.leaky_relu(net.conv(x), 0.2), IMAGE, 1),
    (lambda net, x: F.hardswish(net.conv(x)), IMAGE, 1),
    (lambda net, x: F.silu(net.conv(x)), IMAGE, 1),
    (lambda net, x: torch.relu(x + net.conv(x)), IMAGE, 1),
    (lambda net, x: net.conv(x) + x, IMAGE, 1),
    (sum_in_place, IMAGE, 1),
    (lambda net, x: torch.relu(net.conv(x) + torch.relu(net.conv2(x))), IMAGE, 2),
    (lambda net, x: F.gelu(net.linear(x)), ROWS, 1),
    (lambda net, x: F.gelu(net.linear(x), approximate="tanh"), ROWS, 1),
    (lambda net, x: torch.tanh(net.linear(torch.sigmoid(net.linear2(x)))), ROWS, 2),
    (lambda net, x: x + net.linear(x), ROWS, 1),
]


@pytest.mark.parametrize(("forward", "shape", "calls"), ONE_CALL)
def test_becomes_one_call(forward: Forward, shape: tuple[int, ...], calls: int) -> None:
    graph, report = fused(forward, shape)
    assert len(report.changed) == calls
    assert len(ops(graph)) == calls and all("onednn" in name for name in ops(graph))
    assert all(site.saved_bytes > 0 for site in report.changed)


def two_readers(net: Net, x: Tensor) -> Tensor:
    out = net.conv(x)
    return F.relu(out) * out


def written_between(net: Net, x: Tensor) -> Tensor:
    x = x * 1
    out = net.conv(x)
    x.add_(1)
    return F.relu(out) + x


def into_the_other(net: Net, x: Tensor) -> Tensor:
    other = x * 2
    seen = other.view(-1, 4, 64)
    other += net.conv(x)
    return other + seen.view_as(other)


STAYS: list[tuple[Forward, str]] = [
    (two_readers, "2 consumers"),
    (written_between, "in between"),
    (into_the_other, ""),
    (lambda net, x: net.conv(x) + x[:, :1], ""),
    (lambda net, x: torch.add(net.conv(x), x, alpha=2), ""),
    (lambda net, x: net.conv(x) + 1, ""),
    (lambda net, x: F.elu(net.conv(x)), ""),
    (lambda net, x: torch.relu(torch.conv2d(x, net.conv.weight * 2)), "computed"),
    (lambda net, x: torch.relu(net.conv(x.double().float().bfloat16().float()[0])), "no batch"),
]


@pytest.mark.parametrize(("forward", "reason"), STAYS)
def test_near_misses_stay(forward: Forward, reason: str) -> None:
    graph, report = fused(forward)
    assert not report.changed and not any("onednn" in name for name in ops(graph))
    assert not reason or reason in report.refused[0].what


def test_activation_after_a_sum_that_onednn_lacks_is_left() -> None:
    graph, report = fused(lambda net, x: F.silu(net.conv(x) + x))
    assert len(report.changed) == 1 and ops(graph) == ["ridgeline.onednn_conv.default", "aten.silu.default"]


def test_float64_is_refused() -> None:
    graph = capture_graph(Net(lambda net, x: F.relu(net.conv(x))).double().eval(), (torch.randn(IMAGE).double(),))
    report = run_passes(graph, [Epilogue(measure=False)], PassContext())[0]
    assert not report.changed and "float64" in report.refused[0].what


def test_same_padding_and_dilation() -> None:
    for kernel, changed in ((3, 1), (2, 0)):
        model = nn.Sequential(nn.Conv2d(4, 4, kernel, padding="same", dilation=(2, 1)), nn.ReLU()).eval()
        report = run_passes(capture_graph(model, (torch.randn(IMAGE),)), [Epilogue(measure=False)], PassContext())[0]
        assert len(report.changed) == changed and len(report.refused) == 1 - changed


def test_a_dropped_sum_is_caught_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = epilogue.to_onednn

    def wrong(graph: Captured, chain: Chain) -> object:
        chain.other = None
        return right(graph, chain)

    monkeypatch.setattr(epilogue, "to_onednn", wrong)
    with pytest.raises(PassError, match="epilogue"):
        fused(lambda net, x: F.relu(net.conv(x) + x))


def test_a_slower_call_is_refused_with_both_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epilogue, "timing", lambda layer: Timing(1e-5, 1e-4))
    graph = capture_graph(Net(lambda net, x: F.relu(net.conv(x))).eval(), (torch.randn(IMAGE),))
    report = run_passes(graph, ["epilogue"], PassContext())[0]
    assert not report.changed and "oneDNN 100 µs, torch 10 µs" in report.refused[0].what


def test_the_gpu_form_computes_the_same() -> None:
    """Activation first, then the sum, by ridgeline.matmul: here through its plain formula."""
    model = Net(lambda net, x: x + F.gelu(net.linear(x))).eval()
    x = torch.randn(ROWS)
    graph = capture_graph(model, (x,))
    layer = next(node for node in graph.module.graph.nodes if is_op(node, torch.ops.aten.linear))
    chain = grow(layer, activation_first=True)
    assert len(chain.nodes) == 3
    epilogue._replace(graph, chain, epilogue._to_kernel(graph, chain))
    graph.module.recompile()
    assert ops(graph) == ["aten.t.default", "ridgeline.matmul.default"]
    assert torch.allclose(graph.module(x), model(x), atol=1e-5)
