"""The op-by-op run computes what the model computes, frees what it no longer needs, and names what it times."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ridgeline.measure.clocks import HostClock, OpTime
from ridgeline.measure.memory import StorageTracker
from ridgeline.measure.passes import keys_of, last_uses, line_up, run_graph
from ridgeline.workload.capture import module_case
from ridgeline.workload.exported import export_case
from tests.measure.nets import Blocks, Convolutional


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_run_gives_the_models_own_answer(channels_last: bool) -> None:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    module, image = Convolutional().eval(), torch.randn(2, 3, 16, 16).to(memory_format=layout)
    case = module_case(module, image, "net")
    program = export_case(case)
    with torch.inference_mode():
        (found,) = run_graph(program.graph_module, program._graph_module_flat_inputs(case.args, case.kwargs), HostClock(), {})
        assert torch.equal(found, module(image))


def test_nested_blocks_run_as_they_were_written() -> None:
    module = Blocks().eval()
    case = module_case(module, {"x": torch.randn(4, 8), "times": 3, "scale": torch.tensor(2.0)}, "blocks")
    program = export_case(case)
    with torch.inference_mode():
        found = run_graph(program.graph_module, program._graph_module_flat_inputs(case.args, case.kwargs), HostClock(), {})
        expected = module(**case.kwargs)
    assert torch.equal(found[0], expected["first"]) and torch.equal(found[1], expected["second"])
    assert module.count.item() == 2


def test_values_die_at_their_last_use() -> None:
    program = export_case(module_case(nn.Sequential(nn.ReLU(), nn.Tanh()), torch.randn(4), "chain"))
    nodes = {node.name: node for node in program.graph.nodes}
    dying = last_uses(program.graph)
    assert nodes["relu"] in dying[nodes["tanh"]]
    assert all(nodes["tanh"] not in values for values in dying.values())


def test_a_long_chain_holds_two_tensors_at_a_time() -> None:
    case = module_case(nn.Sequential(*(nn.Tanh() for _ in range(10))), torch.randn(1000), "chain")
    program, tracker = export_case(case), StorageTracker()
    with torch.no_grad(), tracker:
        run_graph(program.graph_module, program._graph_module_flat_inputs(case.args, case.kwargs), HostClock(), {})
    assert tracker.peak_bytes == 2 * 1000 * 4


def test_names_that_repeat_are_told_apart() -> None:
    assert keys_of(["add", "mul", "add"]) == [("add", 0), ("mul", 0), ("add", 1)]
    one, two = [OpTime("add", 1.0, 0.0), OpTime("add", 2.0, 0.0)], [OpTime("add", 3.0, 0.0), OpTime("add", 4.0, 0.0)]
    assert [time.seconds for time in line_up([one, two])["add", 1]] == [2.0, 4.0]
