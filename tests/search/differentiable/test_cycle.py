"""aso-se on tiny data: phases in order, growth to its limits with the function preserved, resumed at every phase with the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.core.errors import OptionError, TrainError
from ridgeline.search.differentiable.cycle import PHASES, CycleSettings, Grown, _chosen, _without_doubles, run_cycles
from ridgeline.search.differentiable.grow_net import branch
from ridgeline.search.differentiable.grown import EDGES, GrownNet, Plan, close_stages, open_stages, plan_from_json
from ridgeline.search.differentiable.growth import Limits, choose, missing, progress
from ridgeline.search.spaces.space import load_space
from tests.search.differentiable.toy import toy_data
from tests.support import FULL

NB201 = load_space("nb201")
DATA = toy_data(48, size=4)
SETTINGS = CycleSettings(round_steps=2, warm_rounds=1, search_rounds=2, optimise_rounds=1, held_out=0.4)
OPTIONS: dict[str, Any] = {
    "cycles": 2, "batch": 8, "channels": 8, "depth": 3, "max_channels": 16, "max_depth": 4, "max_branches": 1, "settings": SETTINGS,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Killed(Exception):
    pass


def run(folder: Path | None = None, phases: int | None = None, **options: Any) -> Grown:
    """The small run; killed after `phases` more phases."""
    left = [phases]

    def report(line: str) -> None:
        if left[0] is not None and line.startswith("cycle"):
            left[0] -= 1
            if left[0] < 0:
                raise Killed

    return run_cycles(NB201, DATA, folder=folder, report=report, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def whole() -> Grown:
    return run()


def test_phases_growth_and_the_network_it_ends_with(whole: Grown) -> None:
    assert [entry["phase"] for entry in whole.phases] == [*PHASES, *PHASES]
    grown = [entry for entry in whole.phases if entry["phase"] == "grow"]
    assert all(entry["function_change"] < 1e-5 for entry in grown) and sum(len(entry["growth"]) for entry in grown) == 3
    assert {kind for entry in grown for kind in entry["kinds"]} == {"wider", "deeper", "branch"}
    assert grown[-1]["channels"] == 16 and sum(grown[-1]["cells"]) == 4  # both limits are reached
    settings = whole.genotype["settings"]
    assert settings["channels"] == 16 and settings["classes"] == 4
    again = GrownNet(plan_from_json(whole.genotype)).eval()
    again.load_state_dict(whole.model.state_dict())
    x = DATA.test.inputs
    assert torch.equal(again(x), whole.model.eval()(x))
    losses = [entry["train_loss"] for entry in whole.phases if "train_loss" in entry]
    assert losses[-1] < losses[0]
    if FULL:
        exported = torch.export.export(whole.model, (x[:2],))
        assert torch.allclose(exported.module()(x[:2]), whole.model(x[:2]), atol=1e-5)


def test_killed_in_every_phase_it_ends_with_the_same_bits(whole: Grown, tmp_path: Path) -> None:
    for phases in (1,) * (2 * len(PHASES) - 1) if FULL else (1, 4):  # finished and stored; the next is killed before it is stored
        with pytest.raises(Killed):
            run(tmp_path, phases=phases)
    found = run(tmp_path)
    assert found.phases == whole.phases and found.genotype == whole.genotype
    assert all(torch.equal(value, whole.model.state_dict()[name]) for name, value in found.model.state_dict().items())
    with pytest.raises(TrainError, match="seed"):
        run(tmp_path, seed=5)


def test_out_of_time_it_grows_to_its_limits_in_one_last_cycle() -> None:
    found = run(cycles=9, seconds=0.0)
    assert len(found.phases) == len(PHASES) and found.phases[2]["channels"] == 16 and sum(found.phases[2]["cells"]) == 4
    assert len(found.phases[2]["growth"]) == 3
    patient = replace(SETTINGS, warm_rounds=3, search_rounds=3, optimise_rounds=3, warm_settled=-1e9, optimise_settled=-1e9)
    assert [phase.get("rounds") for phase in run(cycles=9, seconds=0.0, settings=patient).phases] == [1, 1, None, 1]


def test_an_edge_never_has_an_op_twice() -> None:
    net = GrownNet(Plan(8, (1, 1, 1), ((("skip",),) * len(EDGES),) * 3, classes=2))
    ops = ("skip", "conv3x3", "conv1x1")
    branch(net, 1, 4, "conv1x1")
    open_stages(net, (1,), ops, head_start=0.5, seed=0)
    with torch.no_grad():
        net.mixture[0, 4, 2] = 9.0
    close_stages(net, ops, _chosen(_without_doubles(net, ops), ops, 2))
    assert all(len(set(names)) == len(names) for names in net.plan.edges[1]) and "conv1x1" in net.plan.edges[1][4]


def test_choices_keep_the_budget_of_ops_without_weights() -> None:
    ops = ("skip", "conv3x3", "avgpool")
    logits = torch.tensor([[3.0, 0.0, 0.0], [2.0, 1.5, 0.0], [2.0, 0.0, 1.0], [0.0, 0.1, 5.0], [0.0, 1.0, 0.0], [4.0, 0.0, 0.0]])
    assert _chosen(logits[None], ops, 6) == [[0, 0, 0, 2, 1, 0]]
    assert _chosen(logits[None], ops, 2) == [[1, 1, 1, 2, 1, 0]]  # the two that would lose most stay
    assert _chosen(logits[None], ops, 0) == [[1] * 6]
    logits[0, 1] = float("-inf")  # taken: this edge has no other op with weights
    assert _chosen(logits[None], ops, 0) == [[0, 1, 1, 1, 1, 1]]


def test_growth_takes_the_kind_that_is_furthest_behind() -> None:
    net = GrownNet(Plan(8, (1, 1, 2), ((("conv1x1",),) * len(EDGES),) * 3, classes=2))
    limits = Limits(8, 3, 32, 5, 2)
    assert progress(net, limits) == {"wider": 0.0, "deeper": 0.5, "branch": 0.0}
    assert choose(net, limits, {}) == "wider"
    assert choose(net, limits, {"branch": 0.5, "wider": 0.1}) == "branch"
    assert choose(net, limits, {"wider": -0.1, "branch": -0.1}) == "deeper"  # what last did harm waits
    assert missing(net, limits) == 3 + 1 + 2  # 8, 16, 24, 32
    assert choose(net, Limits(8, 4, 8, 4, 0), {}) is None


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(OptionError, match="stages"):
        run(depth=2)
    with pytest.raises(OptionError, match="no edges"):
        run_cycles(load_space("transformer"), DATA, **OPTIONS)
    with pytest.raises(OptionError, match="rounds"):
        CycleSettings(round_steps=0)
