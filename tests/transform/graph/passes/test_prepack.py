"""Packed layers: the model's answers and output layout, copies, torch.compile and torch.export after it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.transform.graph import onednn
from ridgeline.transform.graph.capture import Captured, capture_graph
from ridgeline.transform.graph.manager import PassContext, PassReport, run_passes
from ridgeline.transform.graph.passes.epilogue import Epilogue
from ridgeline.transform.graph.passes.prepack import Prepack

pytestmark = pytest.mark.skipif(not onednn.available(), reason="torch was built without oneDNN")
IMAGE = (2, 4, 8, 8)
ALL = ["fold_norm", Epilogue(measure=False), Prepack(measure=False)]


class Residual(nn.Module):
    """Convolutions, a sum, a view of their result, a linear: what packing must follow."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
        self.last, self.head = nn.Conv2d(8, 8, 1), nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(self.second(x) + x)
        out = self.last(x)
        small = F.max_pool2d(out, 2)
        return self.head(small.view(small.shape[0], -1)), out


def packed(model: nn.Module, shape: tuple[int, ...] = IMAGE) -> tuple[Captured, list[PassReport]]:
    graph = capture_graph(model.eval(), (torch.randn(shape, generator=torch.Generator().manual_seed(1)),))
    return graph, run_passes(graph, ALL, PassContext())


@pytest.fixture
def optimised() -> tuple[Residual, Captured]:
    model = Residual()
    return model, packed(model)[0]


def targets(graph: Captured) -> list[str]:
    return [str(node.target) for node in graph.module.graph.nodes if node.op == "call_function"]


def close(found: object, expected: object) -> bool:
    return all(torch.allclose(ours, theirs, atol=1e-5) for ours, theirs in zip(found, expected, strict=True))


def test_every_layer_is_packed_and_views_and_outputs_are_mended(optimised: tuple[Residual, Captured]) -> None:
    model, graph = optimised
    names = targets(graph)
    assert names.count("ridgeline.onednn_conv.default") == 3 and names.count("ridgeline.onednn_linear.default") == 1
    assert "aten.reshape.default" in names and "aten.view.default" not in names
    x = torch.randn(3, *IMAGE[1:])
    found, expected = graph.module(x), model(x)
    assert close(found, expected)
    assert [one.stride() for one in found] == [one.stride() for one in expected]
    for node in graph.module.graph.nodes:
        if node.op == "call_function":
            assert isinstance(node.meta["val"], Tensor | torch.SymInt) and "before" not in node.meta


def test_fake_layouts_are_the_real_ones(optimised: tuple[Residual, Captured]) -> None:
    _, graph = optimised
    values: dict[str, Tensor] = {}

    class Keep(torch.fx.Interpreter):
        def run_node(self, node: torch.fx.Node) -> object:
            values[node.name] = super().run_node(node)
            return values[node.name]

    Keep(graph.module).run(*graph.inputs, enable_io_processing=False)
    for node in graph.module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, Tensor):
            assert tuple(int(step) for step in value.stride()) == values[node.name].stride(), node.name


def test_it_copies_and_saves_like_any_module(optimised: tuple[Residual, Captured]) -> None:
    model, graph = optimised
    x = torch.randn(IMAGE)
    twin = copy.deepcopy(graph.module)
    assert close(twin(x), model(x))
    assert all(value.layout is torch.strided for value in graph.module.state_dict().values())
    with torch.no_grad():
        for value in twin.state_dict().values():
            value.zero_()
    assert not twin(x)[1].any() and close(graph.module(x), model(x))


def test_it_compiles_whole(optimised: tuple[Residual, Captured]) -> None:
    model, graph = optimised
    x = torch.randn(IMAGE)
    with torch.no_grad():
        found = torch.compile(graph.module, fullgraph=True, backend="aot_eager")(x)
    assert close(found, model(x))


def test_it_exports_again(optimised: tuple[Residual, Captured]) -> None:
    model, graph = optimised
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(graph.module, (torch.randn(IMAGE),), dynamic_shapes=({0: batch},))
    x = torch.randn(5, *IMAGE[1:])
    assert close(program.module()(x), model(x))


@pytest.mark.skipif(not onednn.supported(torch.bfloat16), reason="no bfloat16 in this processor")
def test_bfloat16_with_a_sum_and_relu() -> None:
    graph = capture_graph(Residual().bfloat16().eval(), (torch.randn(IMAGE).bfloat16(),))
    reports = run_passes(graph, ALL, PassContext(dtype=torch.bfloat16))
    assert [len(report.changed) for report in reports[:2]] == [1, 2] and len(reports[-1].changed) == 4


def test_running_it_again_changes_nothing(optimised: tuple[Residual, Captured]) -> None:
    _, graph = optimised
    assert not Prepack(measure=False).run(graph, PassContext()).changed


def test_copies_for_convolutions_only_go_away() -> None:
    class Alternating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x.contiguous(memory_format=torch.channels_last)).contiguous(memory_format=torch.channels_last)
            return self.two(x.clone(memory_format=torch.contiguous_format))

    graph, _ = packed(Alternating())
    assert set(targets(graph)) <= {"ridgeline.onednn_conv.default", "aten.contiguous.default"}
    assert len(targets(graph)) <= 4


class ThroughAView(nn.Module):
    """The convolution's result is written through a view of it: a copy in its place would lose the write."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(x)
        out.view(-1, 4, 64).mul_(2)
        return self.head(out)


class UnderAView(nn.Module):
    """The result is written after a view of it was taken, and the view is read."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(x)
        seen = out.flatten(1)
        out.mul_(2)
        return seen


class AfterACopy(nn.Module):
    """The copy must be taken before its source is written, so it may not go away."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        kept = x.clone()
        x.add_(1)
        return self.conv(kept) + x


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).as_strided((2, 8), (256, 1))


@pytest.mark.parametrize(
    ("model", "reason", "changed"), [(ThroughAView, "reshaped", 1), (UnderAView, "reshaped", 0), (Strided, "as_strided", 0)]
)
def test_graphs_that_look_at_memory_keep_their_convolutions(model: type[nn.Module], reason: str, changed: int) -> None:
    _, reports = packed(model())
    assert reason in reports[-1].refused[0].what and len(reports[-1].changed) == changed


def test_a_copy_of_what_is_written_later_stays() -> None:
    graph, reports = packed(AfterACopy())
    assert len(reports[-1].changed) == 1 and "aten.clone.default" in targets(graph)


def test_a_write_through_a_slice_or_before_a_view_is_no_obstacle() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.other = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            out = self.conv(x)
            out[:, 1:].mul_(2)
            out.tanh_()
            return self.other(out).flatten(1)

    _, reports = packed(Written())
    assert len(reports[-1].changed) == 2


def test_packed_weights_stay_within_their_limit() -> None:
    graph = capture_graph(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval(), (torch.randn(2, 8),))
    result = Prepack(measure=False, most_bytes=300).run(graph, PassContext())
    assert len(result.changed) == 1 and "beside the plain ones" in result.refused[0].what


def test_a_weight_that_is_computed_is_refused() -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight * x.mean())

    _, reports = packed(Computed())
    assert not reports[-1].changed and "computed" in reports[-1].refused[0].what
