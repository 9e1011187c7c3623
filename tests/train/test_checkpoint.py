"""Checkpoints: killed at any point and resumed bit by bit; broken, foreign and old ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from ridgeline.core.errors import TrainError
from ridgeline.train import checkpoint as store
from ridgeline.train.checkpoint import Snapshot
from ridgeline.train.fit import fit
from ridgeline.train.history import History
from tests.support import ROOT, full_or_tenth
from tests.train.killed_run import STEPS

SCRIPT = Path(__file__).parent / "killed_run.py"


def test_killed_at_random_points_ends_with_the_same_weights(tmp_path: Path) -> None:
    """SIGKILL while stepping or writing, again and again, each time resumed; see killed_run.py."""
    kills = full_or_tenth(20)
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(SCRIPT), str(tmp_path), str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    killed, rounds = map(int, done.stdout.split())
    assert killed == kills and rounds >= 1
    wanted = load_file(tmp_path / "wanted")
    for number in range(rounds):
        found = load_file(tmp_path / f"final-{number}")
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted), number
        facts = json.loads((max((tmp_path / f"run-{number}").glob("step-*")) / store.FACTS).read_text())["history"]
        assert len(facts["columns"]["loss"]) == STEPS and any(facts["columns"]["skipped"])
        assert sum("resumed from step" in note for note in facts["notes"]) >= 1


class Stop(Exception):
    """Raised in a step, as a crash would be."""


def stop_at(step: int) -> Any:
    def after(model: nn.Module, done: int) -> None:
        if done == step:
            raise Stop

    return after


def problem() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    return inputs, (inputs[:, 0] > 0).long()


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))


def run(folder: Path | None, model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, History]:
    made = model or net()
    given: dict[str, Any] = {"steps": 11, "batch": 16, "progress": False, **options}
    if folder:
        given = {"checkpoint": folder, "checkpoint_every": 3, **given}
    return made, fit(made, problem(), **given)


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


RUNS = {
    "sgd": {},
    "adamw": {"optimiser": "adamw", "learning_rate": 0.01, "decay": "matrices"},
    "bfloat16 onecycle": {"precision": "bfloat16", "schedule": "onecycle", "accumulate": 2},
    "float16": {"precision": "float16", "clip": 1.0},
    "own optimiser": {"optimiser": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5)},
}


@pytest.mark.parametrize("name", RUNS)
def test_resumes_bit_by_bit(name: str, tmp_path: Path) -> None:
    wanted, history = run(None, **RUNS[name])
    with pytest.raises(Stop):
        run(tmp_path, after_step=stop_at(7), **RUNS[name])
    resumed, again = run(tmp_path, **RUNS[name])
    assert equal(wanted, resumed) and again.loss == history.loss and again.scale == history.scale
    assert again.notes == [f"resumed from step 6 of {tmp_path}"]


def test_a_finished_run_is_taken_up_without_a_step(tmp_path: Path) -> None:
    first, history = run(tmp_path)
    again, same = run(tmp_path, after_step=stop_at(0))
    assert equal(first, again) and same.loss == history.loss
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-000000009", "step-000000011"]


def test_resume_may_be_declined(tmp_path: Path) -> None:
    run(tmp_path, seed=1)
    fresh, _ = run(tmp_path, resume=False)
    assert equal(fresh, run(None)[0])


def test_speed_options_may_change_between_runs(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        run(tmp_path, after_step=stop_at(7))
    _, history = run(tmp_path, tf32=False, feed="blocking", attention="math")
    assert len(history) == 11


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"learning_rate": 0.2}, "settings.learning_rate was 0.1, is 0.2"),
        ({"seed": 3}, "settings.seed was 0, is 3"),
        ({"steps": 12}, "settings.steps was 11, is 12"),
        ({"optimiser": "adam"}, "settings.optimiser was 'sgd', is 'adam'"),
        ({"model": nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 2))}, "model.0.weight was 'float32 [8, 6]', is 'float32 [9, 6]'"),
        ({"loss": nn.functional.cross_entropy}, "loss was None, is 'cross_entropy'"),
        ({"freeze": "0"}, "settings.freeze was [], is ['0']"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_field(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        run(tmp_path, after_step=stop_at(4))
    with pytest.raises(TrainError) as caught:
        run(tmp_path, **options)
    assert says in str(caught.value) and "resume=False" in caught.value.do


def test_other_data_is_refused(tmp_path: Path) -> None:
    run(tmp_path)
    inputs, targets = problem()
    with pytest.raises(TrainError, match=r"data\.crc32"):
        fit(net(), (inputs, 1 - targets), steps=11, batch=16, progress=False, checkpoint=tmp_path)


def test_a_truncated_checkpoint_falls_back_and_says_so(tmp_path: Path) -> None:
    wanted, _ = run(None)
    for damage in ("truncated", "flipped", "no facts", "bad facts"):
        folder = tmp_path / damage
        with pytest.raises(Stop):
            run(folder, after_step=stop_at(7))
        tensors, facts = (folder / "step-000000006" / name for name in (store.TENSORS, store.FACTS))
        whole = tensors.read_bytes()
        if damage == "truncated":
            tensors.write_bytes(whole[:-10])
        elif damage == "flipped":
            tensors.write_bytes(whole[:-10] + bytes([whole[-10] ^ 1]) + whole[-9:])
        elif damage == "no facts":
            facts.unlink()
        else:
            facts.write_text(facts.read_text()[:200])
        said: list[str] = []
        resumed, history = run(folder, report=said.append)
        assert equal(wanted, resumed), damage
        assert "step-000000006 is broken" in history.notes[0] and "resumed from step 3" in history.notes[1] and history.notes[0] in said


def test_only_broken_checkpoints_are_an_error(tmp_path: Path) -> None:
    run(tmp_path)
    for path in tmp_path.glob("*/" + store.TENSORS):
        path.write_bytes(b"")
    with pytest.raises(TrainError, match="every checkpoint"):
        run(tmp_path)


def test_leftovers_of_a_killed_write_do_no_harm(tmp_path: Path) -> None:
    wanted, _ = run(None)
    with pytest.raises(Stop):
        run(tmp_path, after_step=stop_at(7))
    for leftover in (tmp_path / ".step-000000009-tmp", tmp_path / "step-notes"):
        leftover.mkdir()
        (leftover / store.TENSORS).write_bytes(b"half")
    assert equal(wanted, run(tmp_path)[0])
    assert not (tmp_path / ".step-000000009-tmp").exists()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.register_buffer("slice", self.first.weight.detach()[:3])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs).tanh())[:, :2]


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, _ = run(tmp_path, Tied(), steps=3)
    stored = load_file(tmp_path / "step-000000003" / store.TENSORS)
    assert "model.first.weight" in stored and "model.second.weight" not in stored and stored["model.slice"].shape == (3, 6)
    again, _ = run(tmp_path, Tied(), steps=3)
    assert isinstance(again, Tied) and equal(model, again) and again.second.weight is again.first.weight


class Objective(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.adapter = nn.Linear(2, 2)

    def forward(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.adapter(model(inputs)), targets)


def test_an_objective_is_resumed_too(tmp_path: Path) -> None:
    wanted, whole = run(None, objective=(first := Objective()))
    with pytest.raises(Stop):
        run(tmp_path, objective=Objective(), after_step=stop_at(7))
    resumed, history = run(tmp_path, objective=(second := Objective()))
    assert equal(wanted, resumed) and equal(first, second) and history.loss == whole.loss


def test_an_optimiser_with_more_than_numbers_is_refused(tmp_path: Path) -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            self.state[self.param_groups[0]["params"][0]]["odd"] = [1, 2]

    with pytest.raises(TrainError, match="keeps a list as 'odd'"):
        run(tmp_path, optimiser=lambda parameters: Odd(parameters, lr=0.1))


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match="cannot write"):
        run(tmp_path / "file" / "inside")


DTYPES = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool])


@given(
    kinds=st.lists(st.tuples(DTYPES, st.lists(st.integers(0, 4), max_size=3)), max_size=5),
    step=st.integers(0, 999_999_999),
    facts=st.dictionaries(st.text(st.characters(codec="ascii", categories=["L"]), min_size=9), st.floats(allow_nan=False) | st.text()),
)
def test_what_is_written_is_read(
    kinds: list[tuple[torch.dtype, list[int]]], step: int, facts: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("round")
    tensors = {f"model.{index}": torch.randint(0, 2, shape).to(dtype) for index, (dtype, shape) in enumerate(kinds)}
    tensors |= {f"{name}.turned": value.mT for name, value in tensors.items() if value.ndim > 1}
    store.save(folder, Snapshot(step, tensors, facts))
    found = store.newest(folder, pytest.fail)
    assert found is not None and found.step == step and {name: found.facts[name] for name in facts} == facts
    assert found.tensors.keys() == tensors.keys()
    assert all(torch.equal(found.tensors[name], value) and found.tensors[name].dtype == value.dtype for name, value in tensors.items())


class Counting(torch.optim.SGD):
    """Keeps state in its group, as schedule-free optimisers do: every step is smaller than the one before."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        group["taken"] = group.get("taken", 0) + 1
        for parameter in group["params"]:
            parameter.grad.div_(group["taken"])
        super().step(closure)


def test_numbers_in_an_optimisers_groups_are_resumed(tmp_path: Path) -> None:
    def build(parameters: Any) -> torch.optim.Optimizer:
        return Counting(parameters, lr=0.1)

    wanted, _ = run(None, optimiser=build)
    with pytest.raises(Stop):
        run(tmp_path, optimiser=build, after_step=stop_at(7))
    assert equal(wanted, run(tmp_path, optimiser=build)[0])


def test_a_checkpoint_of_an_older_version_is_taken_up(tmp_path: Path) -> None:
    """It says less of its run; what it says is compared."""
    wanted, _ = run(None)
    with pytest.raises(Stop):
        run(tmp_path, after_step=stop_at(7))
    for path in tmp_path.glob("*/" + store.FACTS):
        facts = json.loads(path.read_text())
        for name in ("data_rest", "trained", "optimiser_groups", "functions"):
            del facts[name]
        del facts["optimiser"]["groups"]
        path.write_text(json.dumps(facts))
    assert equal(wanted, run(tmp_path)[0])
