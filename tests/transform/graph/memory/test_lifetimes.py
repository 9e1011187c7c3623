"""Lifetimes: storages rather than tensors, checked against what a run with every value watched shows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ridgeline.core.errors import TransformError
from ridgeline.transform.graph.capture import capture_graph
from ridgeline.transform.graph.memory.facts import ARENA, observe
from ridgeline.transform.graph.memory.lifetimes import homes_of, lifetimes, live_bytes, peak_bytes
from ridgeline.transform.graph.memory.static import StaticModule

from .nets import Branches, Tricky, counting


class Views(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        made = x * 2
        seen = made.t()[1:]
        made.add_(1)
        return torch.exp(seen) + 1


def test_views_and_in_place_ops_share_one_storage() -> None:
    captured = capture_graph(Views(), (torch.randn(4, 6),), dynamic_batch=False)
    by_node = {interval.node: interval for interval in lifetimes(captured)}
    names = [node.name for node in captured.module.graph.nodes]
    assert set(by_node) == {"mul", "exp"}, "the sum leaves the graph, the views are the product's"
    assert by_node["mul"].last == names.index("exp"), "read through a view of a view"
    assert {name.split("_")[0] for name in by_node["mul"].aliases} >= {"add"}
    assert by_node["mul"].bytes == 4 * 6 * 4
    assert by_node["exp"].bytes == 5 * 4 * 4


def test_inputs_weights_and_outputs_are_outside() -> None:
    captured = capture_graph(Tricky().eval(), (torch.randn(4, 8),))
    facts = observe(captured)
    homes = homes_of(captured.module.graph, facts)
    inside = {interval.storage for interval in lifetimes(captured, facts)}
    assert {"input", "weight", "output", ARENA} == set(homes)
    for node in captured.module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            assert not inside & {tensor.storage for tensor in facts.tensors[node.name]}
    returned = next(node for node in captured.module.graph.nodes if node.op == "output")
    for node in returned.all_input_nodes:
        assert not inside & {tensor.storage for tensor in facts.tensors[node.name]}


def test_sizes_are_those_of_the_example_though_the_batch_is_open() -> None:
    small = peak_bytes(lifetimes(capture_graph(Branches().eval(), (torch.randn(2, 16),))))
    large = peak_bytes(lifetimes(capture_graph(Branches().eval(), (torch.randn(6, 16),))))
    assert large == 3 * small


def test_live_bytes_is_the_sum_at_each_step() -> None:
    intervals = lifetimes(capture_graph(Tricky().eval(), (torch.randn(4, 8),)))
    live = live_bytes(intervals)
    for step, size in enumerate(live):
        assert size == sum(one.bytes for one in intervals if one.first <= step <= one.last)


def test_observing_leaves_the_inputs_and_the_model_as_they_were() -> None:
    captured = counting()
    facts = observe(captured)
    assert torch.equal(captured.module.state_dict()["count"], torch.zeros(1))
    assert len(facts.written) == 1

    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2) + 1

    x = torch.ones(3)
    written = capture_graph(Doubling(), (x.clone(),))
    written.inputs = (x,)
    observe(written)
    assert torch.equal(x, torch.ones(3))


def test_sizes_that_depend_on_the_data_are_refused() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.nonzero.default, (x,)))
    captured = capture_graph(Views(), (torch.ones(3, 3),))
    captured.module = torch.fx.GraphModule(nn.Module(), graph)
    with pytest.raises(TransformError, match="depends on the data"):
        observe(captured)


def test_a_model_without_memory_is_planned_too() -> None:
    real = capture_graph(Branches().eval(), (torch.randn(4, 16),), dynamic_batch=False)
    empty = capture_graph(Branches().eval().to("meta"), (torch.randn(4, 16, device="meta"),), dynamic_batch=False)
    assert [interval.bytes for interval in lifetimes(empty)] == [interval.bytes for interval in lifetimes(real)]
    with pytest.raises(TransformError, match="meta"):
        StaticModule(empty)
