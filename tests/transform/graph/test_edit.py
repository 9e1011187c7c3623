"""What the helpers say of ops: which result is a view, what is written, what is random, how large a value is."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.transform.graph.capture import Captured, capture_graph
from ridgeline.transform.graph.edit import (
    aliases,
    argument,
    constant,
    insert,
    is_op,
    is_random,
    mutates,
    only_user,
    put_constant,
    refresh_values,
    returned,
    same_sizes,
    storages,
    tidy,
    written,
)

aten = torch.ops.aten


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.linear(x)
        hidden.reshape(x.shape[0], 2, 2)[:, 0].add_(1.0)
        left, right = hidden.split(2, dim=1)
        return torch.relu(left) + F.dropout(right, training=False), torch.softmax(x, -1)


def captured() -> Captured:
    return capture_graph(Net(), (torch.randn(2, 4),))


def find(graph: Captured, packet: object) -> torch.fx.Node:
    return next(node for node in graph.module.graph.nodes if is_op(node, packet))


def test_views_writes_and_storages() -> None:
    graph = captured()
    linear = find(graph, aten.linear)
    assert (
        not aliases(linear)
        and aliases(find(graph, aten.split))
        and aliases(find(graph, aten.dropout))
        and not aliases(find(graph, aten.relu))
    )
    assert mutates(find(graph, aten.add_)) and not mutates(find(graph, aten.add)) and not is_random(find(graph, aten.dropout))
    assert written(graph) == {linear}
    where = storages(graph)
    assert where[find(graph, aten.add_)] == {linear} and where[find(graph, aten.dropout)] == {linear}
    assert returned(graph) == {find(graph, aten.add), find(graph, aten.softmax)}


def test_every_view_torch_makes_is_seen_as_one() -> None:
    """Against the truth: an op whose result shares storage with its argument must be said to alias."""
    x = torch.randn(2, 4, 6)
    graph = torch.fx.Graph()
    source = graph.placeholder("x")
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        *((aten.view.default, ([2, 24],)), (aten.reshape.default, ([2, 24],)), (aten.flatten.using_ints, (1,))),
        *((aten.permute.default, ([2, 1, 0],)), (aten.transpose.int, (1, 2)), (aten.expand.default, ([2, 4, 6],))),
        *((aten.slice.Tensor, (1, 0, 2)), (aten.select.int, (1, 0)), (aten.squeeze.default, ()), (aten.unsqueeze.default, (0,))),
        *((aten.chunk.default, (2,)), (aten.split.Tensor, (1,)), (aten.unbind.int, (0,)), (aten.to.dtype, (torch.float32,))),
        *((aten.contiguous.default, ()), (aten.dropout.default, (0.5, False)), (aten.relu_.default, ()), (aten.narrow.default, (0, 0, 1))),
        *((aten.movedim.int, (0, 1)), (aten.diagonal.default, ()), (aten.unflatten.int, (2, [2, 3])), (aten.type_as.default, (x,))),
        *((aten.expand_as.default, (x,)), (aten.tile.default, ([1],)), (aten.softmax.int, (-1,)), (aten.layer_norm.default, ([6],))),
        *((aten.silu.default, ()), (aten.pad.default, ([0, 0],)), (aten.mean.dim, ([1],)), (aten.clone.default, ())),
        *((aten.relu6.default, ()), (aten.rms_norm.default, ([6],)), (aten.repeat.default, ([1, 1, 1],)), (aten.hardtanh.default, ())),
    ]
    for target, rest in calls:
        result = target(x, *rest)
        results = result if isinstance(result, list | tuple) else [result]
        shares = any(one.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for one in results)
        node = graph.call_function(target, (source, *rest))
        assert aliases(node) or not shares, f"{target} returns a view and is not seen to"


def test_constants_and_inserted_calls() -> None:
    graph = captured()
    linear = find(graph, aten.linear)
    weight = constant(graph, linear.args[1])
    assert weight is not None and not weight.requires_grad and constant(graph, linear) is None
    node = put_constant(graph, "linear.weight twice", weight * 2)
    assert str(node.target) == "linear_weight_twice" and node.meta["val"].shape == (4, 4)
    assert put_constant(graph, "linear.weight twice", weight).target == "linear_weight_twice_1"
    made = insert(graph, linear, aten.linear.default, (linear.args[0], node), like=linear)
    assert same_sizes(made.meta["val"], linear.meta["val"]) and made.meta["nn_module_stack"] == linear.meta["nn_module_stack"]
    tidy(graph)
    assert argument(linear, "bias") is linear.args[2] and argument(find(graph, aten.dropout), "train") is False
    assert only_user(made) is None and only_user(find(graph, aten.relu)) is find(graph, aten.add)


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x).transpose(1, 2).contiguous().view(x.shape[0], 6)


def test_values_after_a_new_node_are_computed_again() -> None:
    graph = capture_graph(Turned(), (torch.randn(2, 2, 3),))
    relu, copy = find(graph, aten.relu), find(graph, aten.contiguous)
    turned = insert(graph, relu, aten.transpose.int, (relu.args[0], 1, 2), like=relu)
    dense = insert(graph, relu, aten.clone.default, (turned,), {"memory_format": torch.contiguous_format}, like=relu)
    back = insert(graph, relu, aten.transpose.int, (dense, 1, 2), like=relu)
    relu.update_arg(0, back)
    transposed = copy.args[0]
    assert isinstance(transposed, torch.fx.Node) and not transposed.meta["val"].is_contiguous()
    refresh_values(graph, {back.name})
    assert transposed.meta["val"].is_contiguous()
    tidy(graph)
    given = torch.randn(4, 2, 3)
    assert torch.equal(graph.module(given), Turned()(given))
