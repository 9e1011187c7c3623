"""Passes run in order, in rounds to a fixpoint, those marked last once; reports say what happened."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from ridgeline.core.errors import UnknownNameError
from ridgeline.transform.graph.capture import Captured, capture_graph
from ridgeline.transform.graph.edit import is_op, replace_all, tidy
from ridgeline.transform.graph.manager import PASSES, PassContext, PassResult, Site, find_pass, register, run_passes, site

aten = torch.ops.aten


class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.relu(torch.relu(x))) + 1.0


@dataclass
class OneRelu:
    """Takes out one relu of a relu at a time: needs rounds."""

    name: str = "one_relu"
    seen: list[str] = field(default_factory=list)

    def run(self, graph: Captured, context: PassContext) -> PassResult:
        self.seen.append(self.name)
        for node in graph.module.graph.nodes:
            if is_op(node, aten.relu) and is_op(node.args[0], aten.relu):
                result = PassResult([site([node.args[0], node], "relu + relu -> relu", 8)])
                replace_all(node, node.args[0])
                graph.module.graph.erase_node(node)
                tidy(graph)
                return result
        return PassResult([], [Site((), "", "nothing left")])


@dataclass
class AtLast(OneRelu):
    name: str = "at_last"
    last: bool = True


@dataclass
class Never(OneRelu):
    """Says it changed something, always."""

    name: str = "never"

    def run(self, graph: Captured, context: PassContext) -> PassResult:
        self.seen.append(self.name)
        return PassResult([Site((), "", "again")])


@pytest.fixture
def graph() -> Captured:
    return capture_graph(Net(), (torch.randn(2, 3),), dynamic_batch=False)


def test_rounds_go_on_until_nothing_changes(graph: Captured) -> None:
    seen: list[str] = []
    reports = run_passes(graph, [AtLast(seen=seen), OneRelu(seen=seen)], PassContext())
    assert seen == ["one_relu"] * 3 + ["at_last"]
    assert [(report.name, report.round, len(report.changed)) for report in reports] == [
        ("one_relu", 1, 1),
        ("one_relu", 2, 1),
        ("at_last", 3, 0),
    ]
    assert (reports[0].nodes_before, reports[0].nodes_after) == (6, 5)
    assert reports[-1].refused[0].what == "nothing left"


def test_ten_rounds_are_the_most(graph: Captured) -> None:
    one = Never()
    assert run_passes(graph, [one], PassContext())[-1].round == 10 and len(one.seen) == 10


def test_a_picture_of_the_region_before_and_after(graph: Captured) -> None:
    place = run_passes(graph, [OneRelu()], PassContext(), rounds=1)[0].changed[0]
    assert place.nodes == ("relu", "relu_1") and place.saved_bytes == 8 and place.picture is not None
    before, after = place.picture["before"], place.picture["after"]
    assert [node["name"] for node in before["nodes"] if node["marked"]] == ["relu", "relu_1"]
    assert ["relu", "relu_1"] in before["edges"] and ["relu", "relu_2"] in after["edges"]
    assert not any(node["name"] == "relu_1" for node in after["nodes"])


def test_names(graph: Captured) -> None:
    assert list(PASSES)[:5] == ["dead", "fold_constants", "common", "identities", "casts"] and list(PASSES)[-2:] == ["layout", "prepack"]
    assert find_pass("dead").name == "dead"
    with pytest.raises(UnknownNameError, match="did you mean identities"):
        run_passes(graph, ["identity"], PassContext())
    with pytest.raises(ValueError, match="twice"):
        register("dead")(OneRelu)


def test_progress_is_told(graph: Captured) -> None:
    said: list[str] = []
    run_passes(graph, ["dead"], PassContext(report=said.append))
    assert said == ["dead, round 1"]


class Counting(nn.Module):
    """Buffers of zeros and ones that every pass moves: what is true of them now is not in the next pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.register_buffer("offset", torch.zeros(8, 1, 1))
        self.register_buffer("gain", torch.ones(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu((self.conv(x) + self.offset) * self.gain)
        self.offset.add_(1.0)
        self.gain.mul_(2.0)
        return out


@pytest.mark.parametrize("name", [*PASSES, "all"])
def test_state_is_neither_taken_for_a_constant_nor_moved(name: str) -> None:
    """Passes run the graph to time it, and the check sees one pass only; three in a row tell."""
    model, x = Counting().eval(), torch.randn(2, 3, 8, 8)
    graph = capture_graph(copy.deepcopy(model), (x,))
    run_passes(graph, None if name == "all" else [name], PassContext())
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(graph.module(x), model(x), rtol=1e-4, atol=1e-5)
