"""The static runner: bit for bit the eager graph, in a poisoned arena, allocating no more than it says."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ridgeline.core.errors import TransformError
from ridgeline.transform.graph.capture import Captured, capture_graph
from ridgeline.transform.graph.memory import static
from ridgeline.transform.graph.memory.facts import observe, tensors_in
from ridgeline.transform.graph.memory.lifetimes import Interval, lifetimes
from ridgeline.transform.graph.memory.outs import same_bits
from ridgeline.transform.graph.memory.plan import Plan, plan
from ridgeline.transform.graph.memory.reuse import reuse
from ridgeline.transform.graph.memory.static import StaticModule
from ridgeline.transform.graph.memory.workspace import allocations
from tests.support import FULL

from .nets import MODELS, Branches, Tricky, counting, other_inputs


def captured_model(name: str) -> tuple[Captured, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return capture_graph(model.eval(), inputs), inputs


def assert_same(module: nn.Module, captured: Captured, inputs: tuple[Tensor, ...]) -> None:
    with torch.no_grad():
        expected = tensors_in(captured.module(*(tensor.clone() for tensor in inputs)))
    found = tensors_in(module(*(tensor.clone() for tensor in inputs)))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert same_bits(ours, theirs)
        assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("name", MODELS if FULL else [name for name in MODELS if name != "mobilenet-v2"])
def test_models_are_bitwise_equal_poisoned_and_within_what_is_stated(name: str) -> None:
    captured, inputs = captured_model(name)
    runner = StaticModule(captured, poison=True)
    others = other_inputs(inputs)
    for given in (others, others, inputs):
        assert_same(runner, captured, given)
    assert runner.plan.over_bound <= 0.03
    eager = plan(lifetimes(captured))
    assert eager.over_bound <= 0.03
    assert runner.arena_bytes <= eager.arena_bytes, "taking over dying inputs can only help"
    runner.poison = False
    kept = []
    _, seen = allocations(lambda: kept.append(runner(*others)), torch.device("cpu"))
    assert 0 < seen.peak <= runner.workspace_bytes
    assert_same(runner, captured, others)
    assert all(same_bits(ours, theirs) for ours, theirs in zip(tensors_in(kept[0]), tensors_in(runner(*others)), strict=True))


@pytest.mark.parametrize("over", [True, False])
@pytest.mark.parametrize("order", [True, False])
def test_views_in_place_ops_and_odd_strides(over: bool, order: bool) -> None:
    torch.manual_seed(0)
    captured = capture_graph(Tricky().eval(), (torch.randn(4, 8),))
    runner = StaticModule(captured, poison=True, reuse=over, order=order)
    for _ in range(3):
        assert_same(runner, captured, (torch.randn(4, 8),))


def test_outputs_outlive_the_next_call() -> None:
    captured = capture_graph(Branches().eval(), (torch.randn(4, 16),))
    runner = StaticModule(captured, poison=True)
    first = runner(torch.ones(4, 16))
    kept = first.clone()
    runner(torch.zeros(4, 16))
    assert torch.equal(first, kept)


def test_reuse_makes_the_arena_smaller() -> None:
    captured = capture_graph(Branches().eval(), (torch.randn(4, 16),))
    assert StaticModule(captured).arena_bytes < StaticModule(captured, reuse=False).arena_bytes


class Overlapping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.exp(x), torch.sin(x)
        c = a @ b
        return (a + b + c).sum(0)


def test_a_wrong_plan_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def everything_at_zero(*args: object, **settings: object) -> object:
        right = plan(*args, **settings)  # type: ignore[arg-type]
        return replace(right, offsets=(0,) * len(right.offsets))

    captured = capture_graph(Overlapping(), (torch.randn(6, 6),))
    StaticModule(captured)
    monkeypatch.setattr(static, "plan", everything_at_zero)
    with pytest.raises(TransformError, match="differs from the graph's"):
        StaticModule(captured)


def test_poison_shows_a_lifetime_that_ends_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(captured: Captured, facts: object) -> object:
        found = lifetimes(captured, facts)  # type: ignore[arg-type]
        return [replace(one, last=one.first) for one in found]

    captured = capture_graph(Overlapping(), (torch.randn(6, 6),))

    def apart(found: list[Interval], **settings: object) -> Plan:
        return replace(plan(found), arena_bytes=256 * len(found), offsets=tuple(range(0, 256 * len(found), 256)))

    monkeypatch.setattr(static, "lifetimes", short)
    monkeypatch.setattr(static, "plan", apart)  # every place its own: without poison nothing would show
    assert_same(StaticModule(captured, reuse=False), captured, captured.inputs)
    monkeypatch.setattr(static.StaticModule, "_verify", lambda self, inputs: None)
    runner = StaticModule(captured, reuse=False, poison=True)
    assert runner(torch.randn(6, 6)).isnan().any()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.randn(3, 16), r"float32 \[3, 16\]"),
        (torch.randn(4, 16).double(), r"float64 \[4, 16\]"),
        (torch.randn(16, 4).t(), r"strides \[1, 4\]"),
    ],
)
def test_other_inputs_are_a_clear_error(given: Tensor, said: str) -> None:
    runner = StaticModule(capture_graph(Branches().eval(), (torch.randn(4, 16),)))
    with pytest.raises(TransformError, match=said):
        runner(given)
    with pytest.raises(TransformError, match="2 inputs"):
        runner(given, given)


def test_inputs_by_name_and_a_copy_of_its_own() -> None:
    captured, inputs = captured_model("bert")
    runner = StaticModule(captured)
    names = [str(node.target) for node in captured.module.graph.nodes if node.op == "placeholder"]
    expected = tensors_in(runner(*inputs))
    assert all(same_bits(a, b) for a, b in zip(tensors_in(runner(inputs[0], **{names[1]: inputs[1]})), expected, strict=True))
    with pytest.raises(TransformError, match="and other"):
        runner(inputs[0], other=inputs[1])
    twin = copy.deepcopy(runner)
    assert twin._arena.data_ptr() != runner._arena.data_ptr()
    assert_same(twin, captured, inputs)


def test_moving_is_refused_and_what_changes_nothing_is_not() -> None:
    runner = StaticModule(capture_graph(Branches().eval(), (torch.randn(4, 16),)))
    assert runner.to("cpu") is runner
    with pytest.raises(TransformError, match="moved or cast"):
        runner.double()


def test_a_buffer_the_graph_writes_counts_calls_and_not_the_planning() -> None:
    captured = counting()
    runner = StaticModule(captured, poison=True)
    assert torch.equal(captured.module.state_dict()["count"], torch.zeros(1))
    assert torch.equal(runner(torch.zeros(3))[0], torch.ones(3))
    assert torch.equal(runner(torch.ones(3))[0], torch.full((3,), 4.0))


def test_json_holds_what_the_report_draws() -> None:
    runner = StaticModule(captured_model("bert")[0])
    data = json.loads(json.dumps(runner.to_json()))
    assert data["peak_bytes"] == data["arena_bytes"] + data["workspace_bytes"]
    assert max(row["last"] for row in data["intervals"]) < len(data["steps"])
    assert {"layer_norm"} <= {row["op"] for row in data["workspace"] if row["copied"]}


class TwoViews(nn.Module):
    """A sum over two views of one storage, which dies there: written over the first, it would read what it wrote."""

    def forward(self, x: Tensor) -> Tensor:
        made = torch.exp(x)
        square = made[:4].t() @ made[:4]
        return (square + square.t()).sin().sum(0)


def test_a_second_view_of_a_dying_storage_is_not_written_over() -> None:
    captured = capture_graph(TwoViews(), (torch.randn(4, 4),), dynamic_batch=False)
    runner = StaticModule(captured, poison=True)
    assert_same(runner, captured, (torch.randn(4, 4),))
    facts = observe(captured)
    merged = reuse(captured.module.graph, facts, {"add": (0, 1), "sin": (0,)})
    assert set(merged.reused) == {"sin"}, "sin may take the sum's place; the sum none"
