"""The whole search on tiny data: it learns, is reproducible, goes on after a kill, and stops at a collapse."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.nn import functional

from ridgeline.core.errors import DataError, OptionError, TrainError
from ridgeline.search.differentiable.derive import Limit, derive, skip_count, summed_cost
from ridgeline.search.differentiable.guard import Guard
from ridgeline.search.differentiable.search import search_differentiable
from ridgeline.search.differentiable.skip_dropout import drop_skips_
from ridgeline.search.differentiable.steps import Rates, Steps
from ridgeline.search.spaces.space import load_space
from ridgeline.search.supernet.network import make_supernet
from ridgeline.train.feed import Batch
from tests.search.differentiable.toy import toy_data
from tests.support import FULL, ROOT

SPACE = load_space("nb201", channels=4, cells=1, classes=4, image=8)
DATA = toy_data(64)
OFF = Guard(skips=None, stop_skips=None, rise=None)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def search(**options: Any) -> Any:
    return search_differentiable(SPACE, DATA, **{"epochs": 3, "batch": 16, "guard": OFF, **options})


def told(found: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in entry.items() if name != "seconds"} for entry in found.history]


def test_it_learns_and_the_same_seed_gives_the_same_bits() -> None:
    first, again = (search(seed=0, guard=Guard(window=2, iterations=3)) for _ in range(2))
    other = search(seed=1, epochs=1)
    assert first.history[-1]["train_loss"] < 0.9 * first.history[0]["train_loss"]
    assert told(first) == told(again) and (first.scores == again.scores).all() and first.point == again.point
    assert (other.scores != first.scores).any()
    assert first.history[0]["eigenvalue"] is None and first.history[-1]["eigenvalue"] is not None  # epoch 1 trains weights alone


POLICIES = [(policy, order) for policy in ("all", "top_k", "sample", "partial") for order in (1, 2)]


@pytest.mark.parametrize(("policy", "order"), POLICIES if FULL else [("top_k", 1), ("sample", 2), ("partial", 1)])
def test_every_policy_moves_the_architecture(policy: str, order: int) -> None:
    space = load_space("nb201", channels=8, cells=1, classes=4, image=8)
    found = search_differentiable(space, DATA, epochs=2, batch=32, guard=OFF, policy=policy, order=order, warmup=0.0)
    assert np.abs(found.scores - found.scores.mean(axis=1, keepdims=True)).max() > 0.05
    assert found.stopped == "" and len(found.history) == 2


def test_second_order_is_exact_on_a_supernet() -> None:
    """Against a backward pass through the whole weight step, in float64; the first order is far from it."""
    net = make_supernet(SPACE, seed=0).double()
    steps = Steps(net, Rates(0.2, 0.0, momentum=0.0, weight_decay=0.0), order=2)
    train, valid = (Batch(DATA.train.inputs[i : i + 16].double(), DATA.train.targets[i : i + 16], 0.0, 0, 0) for i in (0, 16))
    names = {parameter: name for name, parameter in net.named_parameters()}
    taken = torch.autograd.grad(steps.loss(train), steps.weights, create_graph=True)
    after = {names[p]: p - 0.2 * g for p, g in zip(steps.weights, taken, strict=True)}
    logits = functional_call(net, after, (valid.inputs,))
    wanted = torch.autograd.grad(functional.cross_entropy(logits, valid.targets), steps.architecture)[0]
    first = torch.autograd.grad(steps.loss(valid), steps.architecture)[0]
    found = []
    steps.of_architecture.step = lambda: found.append(net.architecture.weights.grad.clone())  # type: ignore[method-assign,assignment]
    steps(train, valid, search=True)
    assert (found[0] - wanted).norm() <= 1e-12 * wanted.norm() and (first - wanted).norm() > 0.5 * wanted.norm()


def test_the_device_term_makes_the_derived_net_cheap() -> None:
    costs = np.tile([0.0, 0.0, 9.0, 1.0, 0.1], (6, 1)) + 0.01
    options = {"epochs": 1, "warmup": 0.0}
    plain, cheap = search(**options), search(**options, costs=costs, cost_weight=20.0)
    assert summed_cost(SPACE, cheap.point, costs) < summed_cost(SPACE, plain.point, costs) or 2 not in plain.point
    assert (cheap.scores[:, 2] < cheap.scores.mean(axis=1)).all()
    limit = Limit(costs, 0.7 * summed_cost(SPACE, plain.point, costs))
    kept = search(**options, limit=limit)
    assert summed_cost(SPACE, kept.point, costs) <= limit.most


def test_a_planted_collapse_is_stopped_and_answered_from_before() -> None:
    costs = np.full((6, 5), 1.0)
    costs[:, 0] = 0.01  # skips pull, more than the data can resist
    guard = Guard(skips=2, stop_skips=3, rise=None)
    lines: list[str] = []
    options = {"epochs": 5, "batch": 32, "warmup": 0.0, "architecture_rate": 0.1, "costs": costs, "cost_weight": 300.0}
    found = search(**options, guard=guard, report=lines.append)
    assert found.stopped.startswith("skips") and len(found.history) < 5 and found.history[-1]["skips"] > 3
    assert skip_count(SPACE, found.point) <= 2 and any(line.startswith("stopped: skips") for line in lines)
    without = search(**options)
    assert skip_count(SPACE, without.point) > 3 and without.stopped == ""


def test_a_risen_eigenvalue_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([1.0, 1.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr("ridgeline.search.differentiable.search.dominant_eigenvalue", lambda *_, **__: next(values))
    found = search(epochs=5, batch=32, warmup=0.0, method="exact", guard=Guard(skips=None, stop_skips=None, window=2))
    assert found.stopped.startswith("eigenvalue") and len(found.history) == 4
    longer = search(epochs=5, batch=32, warmup=0.0, method="exact")
    assert len(longer.history) == 5
    assert tuple(found.point) == tuple(longer.history[1]["point"])  # of the epoch before the two that rose


def test_skip_dropout_drops_whole_skips_and_keeps_the_mean() -> None:
    net = make_supernet(SPACE, seed=0)
    wanted = net.architecture.shares().detach()
    dropped = drop_skips_(net, 0.5, seed=3)
    seen = []
    for step in range(200):
        dropped.draw(step)
        seen.append(net.architecture.shares().detach())
    mean = torch.stack(seen).mean(0)
    assert torch.equal(seen[0][:, 1:], wanted[:, 1:]) and set((seen[0][:, 0] / wanted[:, 0]).round().tolist()) <= {0.0, 2.0}
    assert (mean[:, 0] / wanted[:, 0] - 1).abs().max() < 0.3
    found, plain = (search(epochs=1, warmup=0.0, guard=Guard(None, None, None, skip_dropout=share)) for share in (0.5, 0.0))
    assert (found.scores != plain.scores).any()


def test_two_batches_never_share_a_result() -> None:
    net = make_supernet(SPACE, seed=0)
    steps = Steps(net, Rates(0.0, 0.0, weight_decay=0.0, architecture_decay=0.0))
    parts = [Batch(DATA.train.inputs[i : i + 8], DATA.train.targets[i : i + 8], 0.0, 0, 0) for i in (0, 8)]
    losses = [float(steps(part, other, search=True)[0]) for part, other in (parts, parts[::-1])]
    assert losses[0] != losses[1]
    assert losses == [pytest.approx(float(steps.loss(part).detach()), rel=1e-6) for part in parts]


SCRIPT = """
    import sys, torch
    torch.set_num_threads(1)
    from pathlib import Path
    from ridgeline.search.differentiable.guard import Guard
    from ridgeline.search.differentiable.search import search_differentiable
    from ridgeline.search.spaces.space import load_space
    from tests.search.differentiable.toy import toy_data
    space = load_space("nb201", channels=4, cells=1, classes=4, image=8)
    search_differentiable(space, toy_data(64), epochs=40, batch=16, guard=Guard(None, None, None), folder=Path(sys.argv[1]),
                          report=lambda line: print(line, flush=True))
"""


@pytest.mark.skipif(not FULL, reason="a process of its own; the test below stops at the same place without")
def test_a_killed_search_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("epoch 5/"):
                break
        process.send_signal(signal.SIGKILL)
    lines: list[str] = []
    resumed = search(epochs=40, folder=tmp_path / "run", report=lines.append)
    assert lines[0].startswith("resumed after epoch")
    whole = search(epochs=40)
    assert told(resumed) == told(whole) and (resumed.scores == whole.scores).all() and resumed.point == whole.point
    with pytest.raises(TrainError, match="seed was 0, is 7"):
        search(epochs=40, folder=tmp_path / "run", seed=7)
    done = search(epochs=40, folder=tmp_path / "run")
    assert (done.scores == whole.scores).all()


@pytest.mark.parametrize("policy", ["all", "sample", "top_k"] if FULL else ["sample"])
def test_a_search_with_state_of_its_own_goes_on_the_same(policy: str, tmp_path: Path) -> None:
    def stopping(line: str) -> None:
        if line.startswith("epoch 2/"):
            raise KeyboardInterrupt

    guard = Guard(skips=None, stop_skips=None, window=2, iterations=2) if policy == "sample" else OFF
    options = {"policy": policy, "epochs": 3, "batch": 32, "guard": guard}
    with pytest.raises(KeyboardInterrupt):
        search(**options, folder=tmp_path, report=stopping)
    assert (search(**options, folder=tmp_path).scores == search(**options).scores).all()


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(OptionError, match="order = 3"):
        search(order=3)
    with pytest.raises(DataError, match="classes"):
        search_differentiable(load_space("nb201", classes=7, image=8), DATA)
    with pytest.raises(OptionError, match="no edges"):
        search_differentiable(load_space("macro"), DATA)
    assert derive(SPACE, np.zeros((6, 5))) is not None
