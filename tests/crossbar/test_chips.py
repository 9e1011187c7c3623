"""Monte Carlo over chips: figures, resuming, and the journal."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.core.errors import OptionError, RidgelineError
from ridgeline.core.journal import open_results
from ridgeline.crossbar.layer.calibrate import calibrate_
from ridgeline.crossbar.layer.convert import to_crossbar
from ridgeline.crossbar.layer.layers import products
from ridgeline.crossbar.study import chips as chips_module
from ridgeline.crossbar.study.chips import ChipsResult, evaluate_chips
from ridgeline.crossbar.study.digests import simulator_digest
from ridgeline.crossbar.study.subject import Subject, cost_of, load_subject, on_chip, without_noise
from ridgeline.target.load import load_crossbar
from ridgeline.train.evaluate import evaluate
from ridgeline.workload.digest import data_digest, model_digest
from tests.crossbar.study import small_data, small_network
from tests.crossbar.support import chip


@pytest.fixture(scope="module")
def subject() -> Any:
    data = small_data()
    return load_subject(small_network(data), data)


NOISY = {"cell_write_sigma": 0.4, "cell_stuck_low": 0.05, "adc_levels": 256}


def test_chips_differ_and_their_figures_add_up(subject: Any) -> None:
    found = evaluate_chips(subject, chip(**NOISY), chips=4, progress=False)
    assert found.digital == evaluate(subject.module, subject.data).accuracy == 1.0
    assert found.ideal > 0.95 and len(found.accuracies) == 4 and len(set(found.accuracies)) > 1
    assert found.mean == pytest.approx(sum(found.accuracies) / 4) and found.worst == min(found.accuracies)
    assert found.std == pytest.approx(statistics.stdev(found.accuracies)) and found.std > 0
    assert found.images == 64 and found.images_per_s > 0
    assert json.loads(json.dumps(found.to_json()))["accuracies"] == list(found.accuracies)


def test_the_same_seed_gives_the_same_chips_and_another_others(subject: Any) -> None:
    first, again, other = (evaluate_chips(subject, chip(**NOISY), chips=3, seed=seed, progress=False).accuracies for seed in (0, 0, 1))
    assert first == again != other


def test_read_noise_of_a_chip_does_not_depend_on_the_chips_before_it(subject: Any, tmp_path: Path) -> None:
    spec = chip(cell_write_sigma=0.2, cell_read_sigma=0.3, adc_levels=64)
    whole = evaluate_chips(subject, spec, chips=3, progress=False, run=tmp_path / "a")
    evaluate_chips(subject, spec, chips=1, progress=False, run=tmp_path / "b")
    resumed = evaluate_chips(subject, spec, chips=3, progress=False, run=tmp_path / "b")
    assert resumed.accuracies == whole.accuracies


def test_a_chip_without_anything_random_is_scored_once(subject: Any) -> None:
    found = evaluate_chips(subject, chip(), chips=8, progress=False)
    assert len(found.accuracies) == 1 and found.std == 0.0 and "one chip stands for all" in found.notes[0]


def test_a_killed_run_goes_on_where_it_was(subject: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, scored = chip(**NOISY), []
    score = chips_module._score

    def dies_at_the_fourth(*given: Any) -> dict[str, Any]:
        scored.append(1)
        if len(scored) == 4:
            raise KeyboardInterrupt
        return score(*given)

    monkeypatch.setattr(chips_module, "_score", dies_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        evaluate_chips(subject, spec, chips=4, run=tmp_path, progress=False)
    with (tmp_path / "lines.jsonl").open("ab") as stream:
        stream.write(b'{"key": "chip 1", "resu')  # what a kill in the middle of a line leaves
    found = evaluate_chips(subject, spec, chips=4, run=tmp_path, progress=False)
    assert len(scored) == 4 + 3, "digital, perfect and chip 0 were known"
    monkeypatch.undo()
    assert found.accuracies == evaluate_chips(subject, spec, chips=4, progress=False).accuracies


def test_a_folder_of_another_run_is_refused(subject: Any, tmp_path: Path) -> None:
    evaluate_chips(subject, chip(), chips=1, run=tmp_path, progress=False)
    with pytest.raises(OptionError, match="these differ: chip, images"):
        evaluate_chips(subject, chip(adc_levels=64), chips=1, images=8, run=tmp_path, progress=False)


def test_a_folder_begun_with_other_images_is_refused(subject: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"chips": 1, "images": 8, "run": tmp_path, "progress": False}
    first = evaluate_chips(subject, chip(), **options)
    changed = small_data()
    assert evaluate_chips(replace(subject, data=changed), chip(), **options).seconds == first.seconds, "the same images, resumed"
    changed.test.inputs[0, 0, 0, 0] += 1.0
    with pytest.raises(OptionError, match="these differ: data"):
        evaluate_chips(Subject(subject.name, subject.module, changed), chip(), **options)


def test_digest_sees_images_labels_and_preparation_of_both_parts() -> None:
    before = data_digest(small_data())
    assert before == data_digest(small_data()) != data_digest(replace(small_data(), prepare=lambda images: images * 2))
    for part in ("train", "test"):
        for name in ("inputs", "targets"):
            data = small_data()
            getattr(getattr(data, part), name).view(-1)[-1] += 1
            assert data_digest(data) != before


def test_noise_by_overrides_is_noise_and_not_perfect(subject: Any) -> None:
    plain, noisy = chip(adc_levels=256), {"4": {"cell_write_sigma": 0.6}}
    perfect = evaluate_chips(subject, plain, chips=1, progress=False).ideal
    for spec in (plain, chip(adc_levels=256, cell_write_sigma=0.01)):
        found = evaluate_chips(subject, spec, chips=3, overrides=noisy, progress=False)
        assert found.ideal == perfect > found.mean and len(set(found.accuracies)) > 1 and not found.notes


def test_a_cost_without_its_overrides_says_so(subject: Any) -> None:
    options: dict[str, Any] = {"chips": 1, "images": 8, "progress": False}
    plain = evaluate_chips(subject, "rram-64", **options)
    changed = evaluate_chips(subject, "rram-64", overrides={"4": {"rows": 32}}, **options)
    assert changed.cost == plain.cost and not plain.notes and "without overrides" in changed.notes[0]


def test_ranges_are_those_of_the_first_training_images(subject: Any) -> None:
    spec = chip(adc_levels=5, adc_range="calibrated")
    found = {name: one.ranges for name, one in products(on_chip(subject, spec, calibrate=90, batch=8)).items()}

    def of(images: torch.Tensor) -> dict[str, tuple[int, ...]]:
        return calibrate_(to_crossbar(subject.module, spec), list(images.split(8)))

    assert found == of(subject.data.train.inputs[:90])
    assert found not in (of(subject.data.train.inputs[:8]), of(subject.data.test.inputs))


def test_a_range_that_an_override_has_calibrated_is_calibrated(subject: Any) -> None:
    found = evaluate_chips(subject, chip(adc_levels=256), chips=1, overrides={"4": {"adc_range": "calibrated"}}, progress=False)
    assert found.ideal > 0.9


def test_a_broken_line_in_the_middle_is_not_passed_over(tmp_path: Path) -> None:
    with open_results(tmp_path, {"a": 1}) as journal:
        journal.put("one", {"x": 1})
    (tmp_path / "lines.jsonl").write_bytes(b'nonsense\n{"key": "two", "result": {}}\n')
    with pytest.raises(OptionError, match="line 1"), open_results(tmp_path, {"a": 1}):
        pass


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with open_results(tmp_path, {}), pytest.raises(OptionError, match="in use"), open_results(tmp_path, {}):
        pass


def test_digest_sees_every_line_of_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    read, before = Path.read_bytes, simulator_digest()
    for name in ("engine/fused_kernels.py", "layer/product.py", "study/chips.py", "adc.py", "estimate/crossbar.py", "target/crossbar.py"):
        monkeypatch.setattr(Path, "read_bytes", lambda path, name=name: read(path) + b"#" * path.as_posix().endswith(name))
        assert simulator_digest() != before
    monkeypatch.undo()
    assert simulator_digest() == before


def test_digest_sees_every_weight(subject: Any) -> None:
    network = small_network(subject.data)
    before = model_digest(network)
    assert before == model_digest(small_network(subject.data))
    with torch.no_grad():
        network[0].weight.view(-1)[3] += 1e-6
    assert model_digest(network) != before


def test_digest_sees_what_a_state_dict_does_not(subject: Any) -> None:
    network = small_network(subject.data)
    before = model_digest(network)
    network[0].register_buffer("mask", torch.ones(2), persistent=False)
    masked = model_digest(network)
    network[0].mask[1] = 0.0
    assert len({before, masked, model_digest(network)}) == 3
    pooled = small_network(subject.data)
    pooled[2] = torch.nn.AvgPool2d(2)
    assert pooled.state_dict().keys() == small_network(subject.data).state_dict().keys() and model_digest(pooled) != before


@pytest.mark.parametrize("name", ["rram-64", "rram-128", "pcm-128"])
def test_a_chip_built_perfectly_is_ideal_and_else_the_same(name: str) -> None:
    spec = load_crossbar(name)
    perfect = without_noise(spec)
    assert not spec.ideal and perfect.ideal
    assert perfect.operands == spec.operands and perfect.adc.levels == spec.adc.levels and perfect.cost == spec.cost


def test_a_chip_built_perfectly_keeps_its_state() -> None:
    relaxing = chip(cell_retention_s=100.0, cell_drift_time_s=50.0)
    assert not relaxing.ideal and without_noise(relaxing).ideal


def test_cost_is_that_of_one_image(subject: Any) -> None:
    cost = cost_of(subject, load_crossbar("rram-64"))
    assert cost is not None and cost.energy_j == pytest.approx(sum(cost.layers.values()))
    assert cost.arrays == 8 + 8 and cost.layers["4"] > 0, "both layers fit one tile, of four slices in pairs"
    assert cost_of(subject, chip()) is None, "a chip that states no prices has no cost"


@pytest.mark.parametrize("options", [{"chips": 0}, {"images": 0}, {"batch": 0}])
def test_nothing_to_do_is_an_error(subject: Any, options: dict[str, int]) -> None:
    with pytest.raises(RidgelineError, match="at least one"):
        evaluate_chips(subject, chip(), progress=False, **options)


def test_an_untrained_network_is_refused() -> None:
    with pytest.raises(OptionError, match="no trained weights of resnet18"):
        load_subject("resnet18", small_data())
    with pytest.raises(OptionError, match="no data"):
        load_subject("resnet18")


def test_a_module_stays_on_its_device() -> None:
    where = torch.device("meta")  # a device every machine has besides the CPU
    found = load_subject(torch.nn.Linear(36, 4, device=where), small_data())
    assert found.module.weight.device == where


def test_a_factory_brings_its_own_weights(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import torch\n\ndef make():\n    return torch.nn.Linear(36, 4), (torch.ones(1, 36),)\n")
    found = load_subject(f"{tmp_path / 'net.py'}:make", small_data())
    assert isinstance(found.module, torch.nn.Linear) and not found.module.training


def test_progress_can_be_heard_or_not(subject: Any, capsys: pytest.CaptureFixture[str]) -> None:
    heard: list[str] = []
    evaluate_chips(subject, chip(), chips=1, images=4, report=heard.append)
    assert heard and capsys.readouterr().err == ""
    evaluate_chips(subject, chip(), chips=1, images=4, progress=True)
    assert "digital" in capsys.readouterr().err


def test_table_and_page() -> None:
    result = ChipsResult("net", "chip", "shapes", 10, 0, "blocked 2", 1.0, 0.9, (0.8, 0.7), (1.0, 2.0), 0.1, None)
    assert "75.00 ± 7.07 %" in result.table() and "-30.00 points" in result.table()
    assert "<svg" in result.to_html()
