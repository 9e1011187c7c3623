"""Recipes: parsed strictly, measured step by step, taken up where they were cut, refused where nothing was gained."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ridgeline.core.errors import NoGainError, RidgelineError, TransformError, UnknownNameError
from ridgeline.core.spec import Spec
from ridgeline.transform import step as steps
from ridgeline.transform.compare import count_parameters
from ridgeline.transform.recipe import load_recipe, parse_recipe, recipe_names, run_recipe
from ridgeline.transform.saved import load_model, save_model
from ridgeline.transform.step import Context, Done
from ridgeline.workload.data import Split
from tests.support import ROOT
from tests.transform import toy


class NarrowSettings(Spec):
    """Keep some of the hidden features."""

    width: int = 8
    """How many."""


CALLS: list[str] = []


@pytest.fixture(autouse=True)
def own_step() -> Iterator[None]:
    """A step "narrow" that really removes features, for the time of a test."""

    def narrow(model: Any, settings: NarrowSettings, context: Context) -> Done:
        CALLS.append(f"narrow {settings.width}")
        first, second = model[3], model[5]
        model[3], model[5] = nn.Linear(128, settings.width), nn.Linear(settings.width, 2)
        with torch.no_grad():
            model[3].weight.copy_(first.weight[: settings.width])
            model[3].bias.copy_(first.bias[: settings.width])
            model[5].weight.copy_(second.weight[:, : settings.width])
            model[5].bias.copy_(second.bias)
        return Done(model, f"narrow to {settings.width}")

    CALLS.clear()
    steps._STEPS["narrow"] = (NarrowSettings, narrow)
    yield
    steps._STEPS.pop("narrow", None)


def recipe(*tables: dict[str, Any]) -> Any:
    return parse_recipe({"recipe": {"name": "r", "version": 1}, "step": list(tables)})


def test_built_in_recipes_are_whole() -> None:
    assert {"int8", "small"} <= set(recipe_names())
    for name in recipe_names():
        found = load_recipe(name)
        assert found.name == name and found.description and found.steps
    assert [one.kind for one in load_recipe("small").steps] == ["prune", "distill", "quantize"]


def test_recipes_ship_with_the_package() -> None:
    import tomllib

    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["ridgeline"]
    assert "transform/recipes/*.toml" in patterns


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[recipe]\nname = "x"\nversion = 1\n', "step in"),
        ('[recipe]\nname = "x"\nversion = 2\n[[step]]\nkind = "narrow"\n', "recipe.version = 2"),
        ('[recipe]\nname = "x"\nversion = 1\n[[step]]\nkind = "narow"\n', "did you mean narrow"),
        ('[recipe]\nname = "x"\nversion = 1\n[[step]]\nwidth = 3\n', "step 1 of r.toml has no kind"),
        ('[recipe]\nname = "x"\nversion = 1\n[[step]]\nkind = "narrow"\nwdth = 3\n', "wdth = 3 in step 1 of r.toml .narrow."),
        ('[recipe]\nname = "x"\nversion = 1\n[[step]]\nkind = "narrow"\n[[step]]\nkind = "narrow"\nwidth = "x"\n', "step 2 of r.toml"),
        ('[recipe]\nname = "x"\nversion = 1\nversion = 1\n', "not valid TOML"),
        ("\0", "not valid TOML"),
    ],
)
def test_errors_name_the_step_and_the_field(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises((TransformError, UnknownNameError), match=said) as caught:
        load_recipe(tmp_path / "r.toml")
    assert "target" not in str(caught.value)


def test_missing_recipes() -> None:
    with pytest.raises(UnknownNameError, match="did you mean small"):
        load_recipe("smal")
    with pytest.raises(TransformError, match="no such file"):
        load_recipe("nowhere/r.toml")


def test_steps_add_up(tmp_path: Path) -> None:
    model, source = toy.net(), toy.data()
    made, change = run_recipe(
        model, recipe({"kind": "narrow", "width": 16}, {"kind": "narrow", "width": 4}), Context(data=source, name="toy")
    )
    assert CALLS == ["narrow 16", "narrow 4"]
    assert [one.name for one in change.steps] == ["narrow to 16", "narrow to 4"]
    assert change.before.parameters == count_parameters(model)[0] == count_parameters(toy.net())[0]  # the user's model is as it was
    assert change.after.parameters == count_parameters(made)[0]
    assert change.steps[0].after.bytes_on_disk == change.steps[1].before.bytes_on_disk
    assert change.compression_ratio == pytest.approx(change.steps[0].compression_ratio * change.steps[1].compression_ratio)
    assert change.before.latency is not None and change.after.quality["accuracy"] > 0
    assert change.settings["steps"][1] == {"kind": "narrow", "width": 4}


def test_quality_of_what_did_not_change_is_measured_once() -> None:
    scored: list[int] = []

    def quality(model: nn.Module) -> dict[str, float]:
        scored.append(count_parameters(model)[0])
        return {"own": 1.0}

    run_recipe(toy.net(), recipe({"kind": "narrow", "width": 16}, {"kind": "narrow"}), Context(quality=quality, latency=False))
    assert len(scored) == len(set(scored)) == 3


def test_a_recipe_that_gains_nothing_raises() -> None:
    with pytest.raises(NoGainError, match="r gained nothing"):
        run_recipe(toy.net(), recipe({"kind": "narrow", "width": 32}), Context(latency=False))
    _, change = run_recipe(toy.net(), recipe({"kind": "narrow", "width": 32}), Context(latency=False), require_gain=False)
    assert change.compression_ratio == 1.0
    # a step may gain nothing where the recipe does
    run_recipe(toy.net(), recipe({"kind": "narrow", "width": 32}, {"kind": "narrow", "width": 2}), Context(latency=False))


def test_a_run_takes_up_after_the_last_whole_step(tmp_path: Path) -> None:
    context = Context(data=toy.data(), latency=False)
    plan = recipe({"kind": "narrow", "width": 16}, {"kind": "narrow", "width": 8})
    made, change = run_recipe(toy.net(), plan, context, work=tmp_path)
    CALLS.clear()
    again, same = run_recipe(toy.net(), plan, context, work=tmp_path)
    assert CALLS == [] and same.to_json() == change.to_json()
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), again.parameters(), strict=True))
    longer = recipe({"kind": "narrow", "width": 16}, {"kind": "narrow", "width": 4})
    run_recipe(toy.net(), longer, context, work=tmp_path)
    assert CALLS == ["narrow 4"]  # the first step's settings are the same, the second's are not
    CALLS.clear()
    other = toy.net()
    with torch.no_grad():
        other[3].weight[0, 0] += 1
    run_recipe(other, longer, context, work=tmp_path)
    assert CALLS == ["narrow 16", "narrow 4"]  # another model: nothing is taken up


def changed(what: str) -> Context:
    source = toy.data()
    train = Split(source.train.inputs.flip(0), source.train.targets)
    test = Split(source.test.inputs, 1 - source.test.targets)
    others = {
        "train": {"data": replace(source, train=train)},
        "test": {"data": replace(source, test=test)},
        "prepare": {"data": replace(source, prepare=lambda images: images * 2)},
        "teacher": {"teacher": toy.net(8)},
        "inputs": {"inputs": (torch.ones(1, 1, 4, 4),)},
        "quality": {"quality": lambda model: {"own": 1.0}},
        "seed": {"seed": 1},
    }
    return Context(**{"data": source, "latency": False, **others.get(what, {})})  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["train", "test", "prepare", "teacher", "inputs", "quality", "seed"])
def test_nothing_is_taken_up_where_the_surroundings_differ(what: str, tmp_path: Path) -> None:
    plan = recipe({"kind": "narrow", "width": 16})
    for context, calls in ((changed(""), ["narrow 16"]), (changed(""), []), (changed(what), ["narrow 16"])):
        CALLS.clear()
        run_recipe(toy.net(), plan, context, work=tmp_path)
        assert calls == CALLS


def test_a_step_cut_short_is_not_taken_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped between the model and its key: the old key must not stand beside the new model."""
    old, new = recipe({"kind": "narrow", "width": 16}), recipe({"kind": "narrow", "width": 8})
    run_recipe(toy.net(), old, Context(latency=False), work=tmp_path)

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("ridgeline.transform.recipe.write_json", stopped)
        run_recipe(toy.net(), new, Context(latency=False), work=tmp_path)
    made, _ = run_recipe(toy.net(), old, Context(latency=False), work=tmp_path)
    assert made[3].out_features == 16


@pytest.mark.parametrize("frozen", [("0.weight", "0.bias"), ()])
def test_what_was_frozen_is_frozen_after_taking_up(frozen: tuple[str, ...], tmp_path: Path) -> None:
    def model() -> nn.Module:
        made = toy.net()
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(name not in frozen)
        return made

    prune, train = {"kind": "prune", "method": "magnitude", "sparsity": 0.5}, {"kind": "finetune", "epochs": 1, "batch": 32}
    context = Context(data=toy.data(), latency=False)
    run_recipe(model(), recipe(prune), context, work=tmp_path, require_gain=False)  # stopped here
    resumed, _ = run_recipe(model(), recipe(prune, train), context, work=tmp_path, require_gain=False)
    whole, _ = run_recipe(model(), recipe(prune, train), context, require_gain=False)
    assert all(torch.equal(a, b) for a, b in zip(resumed.state_dict().values(), whole.state_dict().values(), strict=True))


@pytest.mark.parametrize("broken", ["model.safetensors", "model.json", "step.json"])
def test_broken_steps_are_done_again(broken: str, tmp_path: Path) -> None:
    context = Context(latency=False)
    plan = recipe({"kind": "narrow", "width": 16})
    run_recipe(toy.net(), plan, context, work=tmp_path)
    path = tmp_path / "1-narrow" / broken
    path.write_bytes(path.read_bytes()[:-3] + b"?")
    CALLS.clear()
    run_recipe(toy.net(), plan, context, work=tmp_path)
    assert CALLS == ["narrow 16"]


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
import torch
from torch import nn
from ridgeline.core.spec import Spec
from ridgeline.transform import step as steps
from ridgeline.transform.recipe import parse_recipe, run_recipe
from ridgeline.transform.step import Context, Done

class S(Spec):
    width: int
    die: bool = False

def run(model, settings, context):
    open(sys.argv[1] + "/log", "a").write(f"{{settings.width}}\\n")
    if settings.width == 4 and not os.path.exists(sys.argv[1] + "/go"):
        os.kill(os.getpid(), signal.SIGKILL)
    return Done(nn.Sequential(nn.Linear(8, settings.width)), "s")

steps._STEPS["s"] = (S, run)
torch.manual_seed(0)
recipe = parse_recipe({{"recipe": {{"name": "r", "version": 1}}, "step": [{{"kind": "s", "width": 6}}, {{"kind": "s", "width": 4}}]}})
run_recipe(nn.Sequential(nn.Linear(8, 8)), recipe, Context(latency=False), work=sys.argv[1] + "/steps")
"""


def test_kill_and_resume(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(root=str(ROOT / "src")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.run([sys.executable, str(script), str(tmp_path)], env=environment, timeout=120, capture_output=True)
    assert first.returncode == -signal.SIGKILL
    (tmp_path / "go").touch()
    second = subprocess.run([sys.executable, str(script), str(tmp_path)], env=environment, timeout=120, capture_output=True)
    assert second.returncode == 0, second.stderr.decode()
    assert (tmp_path / "log").read_text().split() == ["6", "4", "4"]  # the first step ran once


def test_prune_distil_quantise_then_reload(tmp_path: Path) -> None:
    """The whole of it on a net of known kinds: the file gives the same answers, at the quality the Change states."""
    from ridgeline.train.evaluate import evaluate
    from ridgeline.train.fit import fit

    source = toy.data(512)
    model = toy.net()
    fit(model, source, epochs=8, batch=32, learning_rate=0.05, progress=False)
    plan = recipe(
        {"kind": "prune", "method": "magnitude", "sparsity": 0.5},
        {"kind": "finetune", "epochs": 2, "batch": 32},
        {"kind": "quantize", "method": "static", "bits": 4},
    )
    made, change = run_recipe(model.eval(), plan, Context(data=source, latency=False), work=tmp_path / "work")
    assert change.steps[0].after.sparsity == pytest.approx(0.5, abs=0.02)
    assert change.steps[1].after.sparsity == pytest.approx(change.steps[0].after.sparsity)  # finetune kept the zeros
    assert change.compression_ratio > 4
    save_model(made, tmp_path / "out", change=change)
    loaded = load_model(tmp_path / "out")
    assert torch.equal(loaded(source.test.inputs), made(source.test.inputs))
    assert evaluate(loaded, source).accuracy == pytest.approx(change.after.quality["accuracy"])
    assert json.loads((tmp_path / "out" / "model.json").read_text())["change"]["steps"][2]["name"].startswith("quantize")


def test_finetune_needs_data() -> None:
    with pytest.raises(RidgelineError, match="finetune without data"):
        run_recipe(toy.net(), recipe({"kind": "finetune"}), Context())
