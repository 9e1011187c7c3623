"""The layout pass: the same answers and strides, conversions only where they pay, and real gains on this CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ridgeline.measure.ab import ab
from ridgeline.transform.graph.capture import Captured, capture_graph
from ridgeline.transform.graph.layout.cost import Call, Costs, EstimatedCosts, MeasuredCosts, Probe, costs_for
from ridgeline.transform.graph.layout.order import see
from ridgeline.transform.graph.manager import PassContext, PassResult, find_pass, run_passes
from ridgeline.transform.graph.passes.layout import Layout
from tests.support import FULL
from tests.transform.graph.layout.nets import NETS, Alternating, ByKernel, FixedCosts, conv, net
from tests.transform.graph.random_graphs import random_model

aten = torch.ops.aten
COSTS: dict[str, Costs] = {"last wins": FixedCosts(0.3), "plain wins": FixedCosts(3.0), "bytes": EstimatedCosts(1e8)}


@cache
def captured(name: str, dtype: torch.dtype = torch.float64, channels_last: bool = False) -> tuple[nn.Module, Tensor, Captured]:
    """A net of nets.py, its input and its graph; take a copy to change."""
    model, x = net(name, dtype=dtype, channels_last=channels_last)
    return model, x, capture_graph(model, (x,))


def laid_out(of: Captured, costs: Costs, least_gain: float = 0.0, *, calm: bool = True) -> tuple[Captured, PassResult]:
    graph = of.copy()
    most = 0.1 if calm else 1.0
    return graph, Layout(costs, least_gain=least_gain, least_gain_s=0.0, most_conversions=most).run(graph, PassContext())


def copies(graph: Captured) -> int:
    return sum(node.target is aten.clone.default for node in graph.module.graph.nodes)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("costs", COSTS if FULL else sorted(COSTS)[1:])
@pytest.mark.parametrize("name", NETS)
def test_values_and_strides_stay(name: str, costs: str, channels_last: bool) -> None:
    model, x, unchanged = captured(name, channels_last=channels_last)
    expected = tree_leaves(model(x))
    graph, _ = laid_out(unchanged, COSTS[costs])
    for batch in (2, 5):
        more = torch.cat([x, x, x])[:batch]
        if channels_last:
            more = more.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
        for found, wanted in zip(tree_leaves(graph.module(more)), tree_leaves(model(more)), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    for found, wanted in zip(tree_leaves(graph.module(x)), expected, strict=True):
        assert found.stride() == wanted.stride()


@pytest.mark.parametrize("name", sorted(NETS))
def test_fake_strides_are_the_real_ones(name: str) -> None:
    """Later passes and the memory plan read strides from meta["val"]."""
    graph, _ = laid_out(captured(name)[2], FixedCosts(0.3))
    real = see(graph)
    for node in graph.module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and node.op == "call_function":
            sizes = [int(size) for size in value.shape[1:]]
            assert sizes == list(real[node].shape[1:])
            apart = [a != b for a, b, size in zip(value.stride(), real[node].strides, real[node].shape, strict=True) if size > 1]
            assert not any(apart), node


def test_one_conversion_for_a_whole_net() -> None:
    """Everything is faster channels-last: one copy at the input, one before flatten, weights converted for good."""
    graph, result = laid_out(captured("residual")[2], FixedCosts(0.3))
    assert copies(graph) == 2
    assert "2 conversions" in result.changed[0].what
    stem = next(node for node in graph.module.graph.nodes if node.target is aten.conv2d.default)
    weight = graph.module.get_buffer(stem.args[1].target)
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert "stem.weight" not in dict(graph.module.named_parameters()), "the plain weight is not held a second time"


def test_the_model_keeps_its_own_weights() -> None:
    model, _, unchanged = captured("residual")
    before = {name: (tensor, tensor.stride()) for name, tensor in model.state_dict(keep_vars=True).items()}
    laid_out(unchanged, FixedCosts(0.3))
    assert all(
        model.state_dict(keep_vars=True)[name] is tensor and tensor.stride() == strides for name, (tensor, strides) in before.items()
    )


@pytest.mark.parametrize("costs", [FixedCosts(0.3), FixedCosts(3.0)])
def test_layouts_by_hand_are_removed(costs: FixedCosts) -> None:
    """Five conversions by hand become one at most, fewer than a tenth of the nodes."""
    unchanged = captured("alternating")[2]
    before = _by_hand(unchanged)
    graph, result = laid_out(unchanged, costs)
    assert before >= 5 and _by_hand(graph) == 0
    assert copies(graph) <= 1
    assert copies(graph) < len(graph.module.graph.nodes) / 10
    assert sum("by hand removed" in site.what for site in result.changed[1:]) == before
    assert sum(site.saved_bytes for site in result.changed) > 0


def _by_hand(graph: Captured) -> int:
    return sum(node.target in (aten.contiguous.default, aten.to.dtype_layout) for node in graph.module.graph.nodes)


def test_conversions_that_do_not_pay_are_not_made() -> None:
    unchanged = captured("residual")[2]
    graph, result = laid_out(unchanged, FixedCosts(0.9, convert_s=1.0))
    assert not result.changed
    assert "already has its faster layout" in result.refused[0].what
    assert copies(graph) == 0


def test_a_gain_below_the_least_is_refused() -> None:
    unchanged = captured("residual")[2]
    before = str(unchanged.module.graph)
    graph, result = laid_out(unchanged, FixedCosts(0.95, convert_s=1e-6), least_gain=0.5)
    assert not result.changed and "would save" in result.refused[0].what
    assert str(graph.module.graph) == before


def test_nothing_to_do_without_images() -> None:
    _, result = laid_out(capture_graph(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), (torch.randn(2, 4),)), FixedCosts(0.3))
    assert not result.changed and "no convolution" in result.refused[0].what


def test_as_strided_is_left_alone() -> None:
    class ByPosition(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = conv(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_strided(self.layer(x), (4, 4), (4, 1))

    graph = capture_graph(ByPosition().eval(), (torch.randn(2, 3, 8, 8),), dynamic_batch=False)
    result = Layout(FixedCosts(0.3)).run(graph, PassContext())
    assert not result.changed and "as_strided" in result.refused[0].what


def test_written_memory_is_converted_for_each_reader() -> None:
    """Between the two reads of one tensor stands a write, another is written through a view: old values must not be read."""
    model, x, unchanged = captured("written")
    for read_again in (False, True):
        graph = unchanged.copy()
        if read_again:  # both reads through the tensor's first name, as other passes may leave them
            write = next(node for node in graph.module.graph.nodes if node.target is aten.add_.Tensor)
            write.replace_all_uses_with(write.args[0])
            graph.module.recompile()
        graph, _ = laid_out(graph, ByKernel(convert_s=1e-6), calm=False)
        torch.testing.assert_close(graph.module(x), model(x), rtol=1e-11, atol=1e-11)
        assert copies(graph) >= 2


def test_permutes_carry_the_layout() -> None:
    """The norm and the linears of a ConvNeXt block read channels-last memory as it is: no copy inside the block."""
    graph, _ = laid_out(captured("convnext")[2], FixedCosts(0.3))
    inside = [node for node in graph.module.graph.nodes if node.target is aten.permute.default]
    assert inside and not any(user.target is aten.clone.default for node in inside for user in node.users)
    assert copies(graph) <= 2


def test_a_plan_that_does_not_hold_is_taken_back() -> None:
    """Costs that promise a wrong result order: the rewrite is undone, the op pinned, and the answers stay."""
    asked: list[str] = []

    class Wrong(FixedCosts):
        def probe(self, call: Call) -> Probe:
            asked.append(str(call.target))
            found = super().probe(call)
            return Probe(found.seconds, (0, 1)) if "linear" in str(call.target) else found

    model, x, unchanged = captured("convnext")
    graph, _ = laid_out(unchanged, Wrong(3.0, convert_s=1e-6))
    assert asked.count("aten.conv2d.default") > 2, "planned more than once"
    torch.testing.assert_close(graph.module(x), model(x), rtol=1e-11, atol=1e-11)


def test_runs_compiled_and_exports_again() -> None:
    model, x, unchanged = captured("residual", torch.float32)
    graph, _ = laid_out(unchanged, FixedCosts(0.3))
    again = torch.export.export(graph.module, (x,)).module()(x)
    torch.testing.assert_close(again, model(x), rtol=1e-4, atol=1e-5)
    compiled = torch.compile(graph.module, backend="eager")(x)
    torch.testing.assert_close(compiled, model(x), rtol=1e-4, atol=1e-5)


def test_checked_by_the_manager() -> None:
    assert find_pass("layout").name == "layout" and getattr(find_pass("layout"), "last", False)
    unchanged = captured("unet")[2]
    graph = unchanged.copy()
    report = run_passes(graph, [Layout(FixedCosts(0.3), least_gain_s=0.0)], PassContext())[-1]
    assert report.changed and report.check_error < 1e-9


def test_timings_are_kept_and_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.transform.graph.passes.layout.time_both", lambda *_: (2.0, 1.0))
    unchanged = captured("residual", torch.float32)[2]
    store = tmp_path / "costs.json"
    graph, _ = laid_out(unchanged, MeasuredCosts(torch.device("cpu"), store))
    assert store.exists()
    monkeypatch.setattr("ridgeline.transform.graph.layout.measure.time_in_graph", lambda *_: pytest.fail("timed again"))
    monkeypatch.setattr("ridgeline.transform.graph.layout.cost.fastest", lambda *_: pytest.fail("timed again"))
    second, _ = laid_out(unchanged, MeasuredCosts(torch.device("cpu"), store))
    assert str(second.module.graph) == str(graph.module.graph)
    store.write_text("{broken", encoding="utf-8")
    assert MeasuredCosts(torch.device("cpu"), store).known == {}


def test_a_gain_that_does_not_show_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timings of the ops promised a gain, the whole graph shows none: nothing changes, and the timings are not kept."""
    monkeypatch.setattr("ridgeline.transform.graph.passes.layout.time_both", lambda *_: (1.0, 2.0))
    unchanged = captured("alternating", torch.float32)[2]
    costs = MeasuredCosts(torch.device("cpu"), tmp_path / "costs.json")
    graph, result = laid_out(unchanged, costs)
    assert not result.changed and "measured 1000.000 -> 2000.000 ms" in result.refused[0].what
    assert str(graph.module.graph) == str(unchanged.module.graph)
    assert set(dict(graph.module.named_buffers())) == set(dict(unchanged.module.named_buffers()))
    kept = MeasuredCosts(torch.device("cpu"), tmp_path / "costs.json").known
    assert kept and all(key.startswith("convert") for key in kept)


class WrongLayout(nn.Sequential):
    """Depthwise convolutions and overlapping pools on NCHW, which CPUs do several times faster channels-last."""

    def __init__(self) -> None:
        blocks = [layer for _ in range(3) for layer in (conv(16, 16, groups=16), nn.ReLU(), conv(16, 16, 1), nn.MaxPool2d(3, 1, 1))]
        super().__init__(conv(3, 16), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.skipif(not FULL, reason="times graphs, which a busy machine disturbs: RIDGELINE_FULL=1; the record is graph-passes-cpu.json")
@pytest.mark.parametrize(("model", "size", "most"), [(WrongLayout(), 56, 0.8), (Alternating(32, depth=9, kernel=1), 64, 1.0)])
def test_becomes_faster_here(model: nn.Module, size: int, most: float, tmp_path: Path) -> None:
    """Timed in alternation on this CPU, a net in the wrong layout and one that changes layouts by hand, with room for noise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = torch.randn(1, 3, size, size)
        before = capture_graph(model.eval(), (x,))
        after = before.copy()
        result = Layout(MeasuredCosts(torch.device("cpu"), tmp_path / "costs.json"), most_conversions=0.1).run(after, PassContext())
        assert result.changed, result.refused
        assert copies(after) < len(after.module.graph.nodes) / 10
        with torch.no_grad():
            found = ab(lambda: before.module(x), lambda: after.module(x), rounds=15)
        assert found.ratio < most, found
    finally:
        torch.set_num_threads(threads)


def test_costs_fit_the_target() -> None:
    here = torch.device("cpu")
    assert isinstance(costs_for("cpu", here), MeasuredCosts)
    assert isinstance(costs_for("h200", here), EstimatedCosts)
    assert isinstance(costs_for("cuda", here), EstimatedCosts)
    graph = captured("residual")[2].copy()
    result = Layout().run(graph, PassContext(target="eyeriss"))
    assert not result.changed and "eyeriss" in result.refused[0].what
    estimated = Layout().run(graph, PassContext(target="h200"))
    assert not estimated.changed, "on such a machine this net is too small for any copy to pay"


@pytest.mark.parametrize("seed", range(300 if FULL else 15))
def test_random_graphs_keep_their_answers(seed: int) -> None:
    """Branches, views, in-place ops and shared weights, with costs that make many regions change."""
    model, inputs = random_model(seed)
    graph = capture_graph(model, inputs)
    Layout((FixedCosts(0.3, 1e-5), FixedCosts(3.0, 1e-5), ByKernel(convert_s=1e-6))[seed % 3], -1.0, -1.0, most_conversions=1.0).run(
        graph, PassContext()
    )
    for batch in (2, 4):
        more = [torch.randn(batch, *one.shape[1:], dtype=one.dtype) for one in inputs]
        ours, theirs = ([*tree_leaves(run(*given)), *given] for run, given in ((graph.module, _clones(more)), (model, _clones(more))))
        for found, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    for found, wanted in zip(*(tree_leaves(run(*_clones(inputs))) for run in (graph.module, model)), strict=True):
        assert found.stride() == wanted.stride() or (found.is_contiguous() and not wanted.is_contiguous()), "a slice may become whole"


def _clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]
