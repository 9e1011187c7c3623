"""Recipes as files, and trainings by them: accuracy, the same bits again, time given instead of epochs."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.core.errors import OptionError, TrainError, UnknownNameError
from ridgeline.search import recipe as training
from ridgeline.search.recipe import Mirrored, load_recipe, parse_recipe, recipe_names, train_network, widest_within
from ridgeline.workload.data import Data, Split, load_data
from ridgeline.workload.models.digits_cnn import DigitsCNN
from ridgeline.workload.models.wide_resnet import hand_made
from tests.support import FULL


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def digits(rows: int | None = None) -> Data:
    pytest.importorskip("sklearn")
    data = load_data("digits")
    return data if rows is None else replace(data, train=Split(data.train.inputs[:rows], data.train.targets[:rows]))


def net(seed: int = 0) -> DigitsCNN:
    torch.manual_seed(seed)
    return DigitsCNN()


def same(first: nn.Module, second: nn.Module) -> bool:
    return all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))


def test_recipes_that_come_along_are_whole() -> None:
    assert {"cifar10", "cifar10-quick", "cifar10-muon", "digits"} <= set(recipe_names())
    for name in recipe_names():
        recipe = load_recipe(name)
        assert recipe.name == name and recipe.description and len(recipe.hash) == 12
    assert len({load_recipe(name).hash for name in recipe_names()}) == len(recipe_names())


def test_the_hash_is_of_what_decides() -> None:
    recipe = load_recipe("cifar10")
    assert recipe.changed(name="other", description="…").hash == recipe.hash
    assert recipe.changed(augment__cutout=8).hash != recipe.hash != recipe.changed(learning_rate=0.3).hash
    assert recipe.changed(augment__cutout=8).augment.cutout == 8 and recipe.augment.cutout == 16
    mixing, other = recipe.changed(augment__cutmix=0.5), recipe.changed(augment__trivial=True)
    assert len({recipe.hash, mixing.hash, other.hash}) == 3 and other.changed(augment__trivial=False).hash == recipe.hash
    assert recipe.hash == "af82e1bb095b" != mixing.hash and mixing.changed(augment__cutmix=0.0).hash == recipe.hash  # as in results/
    written = parse_recipe(json.loads(json.dumps(recipe.model_dump(mode="json"))))
    assert written == recipe


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"learning_rat": 0.1}, "did you mean learning_rate"),
        ({"batch": 0}, "batch = 0"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"schedule": "triangel"}, "schedule"),
        ({"augment": {"flip": "sideways"}}, "augment.flip"),
        ({"graph": True, "compile": True}, "exclude each other"),
        ({"version": 2}, "version"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], message: str) -> None:
    whole = {"version": 1, "name": "x", "epochs": 1, "batch": 8, "learning_rate": 0.1}
    with pytest.raises(OptionError, match=message):
        parse_recipe({**whole, **fields})


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="cifar10"):
        load_recipe("cifar01")
    with pytest.raises(OptionError, match="no such file"):
        load_recipe(tmp_path / "none.toml")
    (tmp_path / "twice.toml").write_text("version = 1\nversion = 1\n", encoding="utf-8")
    with pytest.raises(OptionError, match="not valid TOML"):
        load_recipe(tmp_path / "twice.toml")


def test_digits_are_learnt() -> None:
    trained = train_network(net(), digits(), "digits", epochs=4, seed=0)
    assert trained.accuracy >= 0.97 and trained.accuracy_mirrored is None
    assert (trained.epochs, trained.steps, trained.test_rows) == (4, 4 * (1438 // 64), 359)
    assert json.loads(json.dumps(trained.to_json()))["recipe_hash"] == load_recipe("digits").hash


def test_mixed_images_teach_too() -> None:
    recipe = load_recipe("digits").changed(augment__cutmix=0.5)
    trained, plain = (train_network(net(), digits(), one, epochs=4, seed=0) for one in (recipe, "digits"))
    assert trained.accuracy >= 0.95
    assert trained.history.loss[-1] > plain.history.loss[-1] + 0.1  # of mixed labels nobody can be sure


def test_the_test_split_is_only_scored() -> None:
    data, first, second = digits(192), net(), net()
    train_network(first, data, "digits", epochs=1)
    train_network(second, replace(data, test=Split(torch.zeros_like(data.test.inputs), data.test.targets)), "digits", epochs=1)
    assert same(first, second)


class Stopped(Exception):
    pass


def stop_after(line: str) -> Any:
    def report(message: str) -> None:
        if message.startswith(line):
            raise Stopped

    return report


@pytest.mark.parametrize("optimiser", [{}, {"optimiser": "muon", "learning_rate": 0.05, "rest_rate": 0.2, "channels_last": True}])
def test_a_run_taken_up_ends_with_the_same_bits(tmp_path: Path, optimiser: dict[str, Any]) -> None:
    data, recipe = digits(192), load_recipe("digits").changed(**optimiser)
    whole, again = net(), net(seed=5)
    train_network(whole, data, recipe, epochs=4, seed=1)
    with pytest.raises(Stopped):
        train_network(net(), data, recipe, epochs=4, seed=1, folder=tmp_path, report=stop_after("epoch 3"))
    trained = train_network(again, data, recipe, epochs=4, seed=1, folder=tmp_path)  # from other weights: the checkpoint's count
    assert any("resumed" in note for note in trained.history.notes)
    assert same(whole, again)
    with pytest.raises(TrainError, match="seed 1, not"):
        train_network(net(), data, recipe, epochs=4, seed=2, folder=tmp_path)
    with pytest.raises(TrainError, match="a run of 4 epochs, not 5"):
        train_network(net(), data, recipe, epochs=5, seed=1, folder=tmp_path)


def test_seconds_choose_the_epochs_and_leave_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = digits(192)
    really, measured = training._epoch_s, []

    def so_slow(*given: Any) -> float:
        """The clock is the machine's: here it says an epoch takes 2,000 seconds."""
        measured.append(really(*given))
        return 2000.0

    monkeypatch.setattr(training, "_epoch_s", so_slow)
    lines: list[str] = []
    timed, plain, again = net(), net(), net(seed=7)
    trained = train_network(timed, data, "digits", seconds=7000, seed=3, folder=tmp_path, report=lines.append)
    assert trained.epochs == 3 and "2000.00 s an epoch: 3 epochs" in lines[0]
    train_network(plain, data, "digits", epochs=3, seed=3)
    assert same(timed, plain) and not (tmp_path / "timing").exists()  # timing left no trace
    train_network(again, data, "digits", seconds=1e6, seed=3, folder=tmp_path)
    assert len(measured) == 1 and same(again, timed)  # the plan is kept, not measured anew
    for wrong, message in (
        ({"seconds": 7, "epochs": 3}, "give one of them"),
        ({"epochs": 0}, "epochs = 0"),
        ({"seconds": 0}, "seconds = 0"),
    ):
        with pytest.raises(OptionError, match=message):
            train_network(net(), data, "digits", **wrong)


class Slow(nn.Module):
    """Takes `width` milliseconds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.linear = width, nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.width / 1e3)
        out: Tensor = self.linear(x.flatten(1))
        return out


def test_epochs_fit_into_the_time() -> None:
    lines: list[str] = []
    assert training._epochs_within(2.0, 100.0, 10.0, lines.append) == 43  # 97 s with what is kept back, 10 s are gone
    assert training._epochs_within(50.0, 20.0, 0.0, lines.append) == 1
    assert "more than the 20 s given" in lines[1] and "more" not in lines[0]
    recipe = load_recipe("digits")
    measured_s = training._epoch_s(Slow(20), digits(128), recipe, torch.device("cpu"), 0)
    assert 0.04 <= measured_s < 0.8  # two steps of 20 ms, on a machine that may be busy


class Tiring(Slow):
    """Takes ten times as long from its 40th pass on, as a GPU that has become hot; passes of an evaluation count too."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.passes, self.fresh = 0, width

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.width = 10 * self.fresh if self.passes >= 40 else self.fresh
        return super().forward(x)


def test_epochs_are_planned_by_the_speed_that_lasts() -> None:
    recipe, data = load_recipe("digits"), digits(128)
    short = training._epoch_s(Tiring(1), data, recipe, torch.device("cpu"), 0)
    long = training._epoch_s(Tiring(1), data, recipe, torch.device("cpu"), 0, settle_s=0.2)
    assert long >= 2 * 0.010 and long > 1.5 * short  # two steps


def test_the_widest_that_fits_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    data = digits(128)  # 2 steps an epoch
    asked: list[int] = []
    if not FULL:  # by the clock that the test above holds to a real one
        monkeypatch.setattr(training, "_epoch_s", lambda model, *_: 2 * model.width / 1e3)

    def build(width: int) -> nn.Module:
        asked.append(width)
        return Slow(width)

    # 50 epochs are 100 steps: of 1 ms and 4 ms they fit into 6 seconds, of 100 ms and more never
    assert widest_within(build, [100, 1, 200, 4], data, "digits", seconds=6.0, epochs=50) == 4
    assert asked == [100, 4]
    assert widest_within(build, [3], data, "digits", seconds=1e-3) == 3
    with pytest.raises(OptionError, match="widths is empty"):
        widest_within(build, [], data, "digits", seconds=1)


def test_mirrored_is_the_mean_of_both() -> None:
    model, images = net().eval(), torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(Mirrored(model)(images), (model(images) + model(images.flip(-1))) / 2)


# wide ones as published; ResNet-18 by adding up its layers: 27w of the stem, 18cw and norms of every block, shortcuts, head
@pytest.mark.parametrize(
    ("name", "parameters"), [("wrn-28-10", 36_479_194), ("wrn-40-2", 2_243_546), ("resnet18", 11_172_170), ("resnet18-w16", 701_018)]
)
def test_hand_made_networks_have_their_sizes(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = hand_made(name)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 10)


@pytest.mark.parametrize("name", ["wrn-27-10", "wrn-28", "resnet18-w0", "vgg"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(OptionError, match=name):
        hand_made(name)
