"""Where a network loses: planted faults must be found in the layer they are in."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from ridgeline.core.errors import OptionError
from ridgeline.crossbar.layer.calibrate import calibrate_
from ridgeline.crossbar.layer.convert import to_crossbar
from ridgeline.crossbar.layer.layers import products
from ridgeline.crossbar.layer.observe import Seen, digital, observed
from ridgeline.crossbar.study.diagnose import diagnose
from ridgeline.crossbar.study.subject import Subject, load_subject
from tests.crossbar.study import small_data, small_network
from tests.crossbar.support import chip


@pytest.fixture(scope="module")
def subject() -> Any:
    data = small_data()
    return load_subject(small_network(data), data)


def on(subject: Subject, spec: Any, **overrides: Any) -> nn.Module:
    return to_crossbar(subject.module, spec, overrides=overrides).eval()


def test_the_layer_with_a_coarse_adc_is_the_one_that_loses(subject: Any) -> None:
    analog = on(subject, chip(), **{"4": {"adc_levels": 8}})
    found = diagnose(subject, chip(), images=32, analog=analog)
    first, last = found.layers
    assert [first.name, last.name] == ["0", "4"] and found.ranking[0].name == "4"
    assert first.snr_db > 20 > last.snr_db and last.kl_alone > 10 * first.kl_alone
    assert last.accuracy_alone < first.accuracy_alone == found.digital
    assert last.accuracy_without > found.analog and first.accuracy_without == pytest.approx(last.accuracy_alone)
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["ranking"] == ["4", "0"]


def test_with_two_layers_the_one_alone_is_the_network_without_the_other(subject: Any) -> None:
    found = diagnose(subject, chip(adc_levels=64), images=32)
    first, last = found.layers
    assert first.kl_alone == pytest.approx(last.kl_without) and last.kl_alone == pytest.approx(first.kl_without)


def test_snr_is_that_of_the_outputs(subject: Any) -> None:
    spec, x = chip(adc_levels=64), subject.data.test.inputs[:16]
    analog = on(subject, spec)
    with torch.no_grad():
        wanted = nn.functional.conv2d(x, subject.module[0].weight, padding=1)
        error = analog[0](x) - subject.module[0](x)
    expected = 10 * math.log10(float(wanted.double().square().sum() / error.double().square().sum()))
    assert diagnose(subject, spec, images=16, rank=False, analog=analog).layers[0].snr_db == pytest.approx(expected, abs=1e-3)


def test_codes_are_counted_as_the_reference_gives_them(subject: Any) -> None:
    from ridgeline.crossbar.engine.reference import matmul

    spec = chip(adc_levels=[16, 32, 64, 128])
    analog, x = on(subject, spec), subject.data.test.inputs[:4]
    last = diagnose(subject, spec, images=4, rank=False, analog=analog).layers[1]
    with torch.no_grad():
        rows = analog[:4](x).double()
    codes = matmul(rows, subject.module[4].weight.detach().double().T, spec).codes
    used = [len(codes[:, :, j].unique()) / levels for j, levels in enumerate(spec.adc_levels)]
    assert last.codes_used == pytest.approx(sum(used) / 4)
    assert last.range_used == pytest.approx(max(float(codes[:, :, j].max()) / (n - 1) for j, n in enumerate(spec.adc_levels)))
    assert last.clipped == 0.0


def test_clipping_is_seen_behind_a_chip_that_clips(subject: Any) -> None:
    spec = chip(adc_levels=64, adc_clip=True, adc_range="calibrated")
    analog = on(subject, spec)
    for product in products(analog).values():
        product.ranges = (6, 6, 6, 6)
    narrow = diagnose(subject, spec, images=8, rank=False, analog=analog).layers[0]
    assert narrow.clipped > 0.01 and narrow.range_used > 1
    for product in products(analog).values():
        product.ranges = (288, 288, 288, 288)
    wide = diagnose(subject, spec, images=8, rank=False, analog=analog).layers[0]
    assert wide.clipped == 0 and wide.range_used < 1 and wide.snr_db > narrow.snr_db


def test_the_last_code_itself_is_not_clipping(subject: Any) -> None:
    analog, images = on(subject, chip(adc_levels=5, adc_clip=True, adc_range="calibrated")), subject.data.test.inputs[:4]
    calibrate_(analog, [images])  # up to the largest sum, which is more than the four steps
    first = diagnose(subject, chip(adc_levels=5), images=4, rank=False, analog=analog).layers[0]
    assert first.range_used == 1.0 and first.clipped == 0.0


def test_noise_about_zero_is_not_clipping(subject: Any) -> None:
    spec = chip(adc_levels=256, adc_clip=True, adc_noise_lsb=0.6)
    assert all(layer.clipped == 0 and layer.range_used < 1 for layer in diagnose(subject, spec, images=8, rank=False).layers)


def test_watching_leaves_the_network_as_it_was(subject: Any) -> None:
    analog, x = on(subject, chip(adc_levels=64)), subject.data.test.inputs[:4]
    with torch.no_grad():
        before = analog(x)
        with pytest.raises(ZeroDivisionError), observed(analog, lambda seen: 1 // 0):
            analog(x)
        with digital(products(analog).values()):
            assert torch.allclose(analog(x), subject.module(x), atol=1e-5)
        assert torch.equal(analog(x), before)
    assert all(product.watch is None for product in products(analog).values())


def test_groups_and_strides_are_seen_whole() -> None:
    torch.manual_seed(0)
    data = small_data()
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.Conv2d(4, 8, 3, padding=2, dilation=2, groups=4), nn.Flatten(), nn.Linear(72, 4)
    )
    found = diagnose(network.eval(), chip(), data, images=8, rank=False)
    assert [layer.groups for layer in found.layers] == [1, 4, 1] and all(layer.snr_db > 15 for layer in found.layers)


def test_every_matrix_of_a_recurrent_layer_is_a_row() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps, self.last = nn.GRU(6, 5, batch_first=True), nn.Linear(5, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.last(self.steps(x.flatten(1, 2))[0][:, -1])
            return scores

    torch.manual_seed(0)
    found = diagnose(Network().eval(), chip(), small_data(), images=4)
    assert [layer.name for layer in found.layers] == ["steps.weight_ih_l0", "steps.weight_hh_l0", "last"]
    assert all(layer.snr_db > 10 and layer.kl_alone is not None for layer in found.layers)


def test_a_sample_stays_within_its_budget(subject: Any) -> None:
    seen: list[Seen] = []
    analog = on(subject, chip())
    with torch.no_grad(), observed(analog, seen.append):
        analog(subject.data.test.inputs[:8])
    rows = seen[0].sampled_rows(budget_bytes=100_000)
    plan = seen[0].plan
    assert rows.shape[0] == 4 and rows.shape[2] == 9 and rows.numel() // 9 * plan.arrays * 16 * plan.n * 8 <= 100_000
    assert seen[0].sampled_rows().shape == (4, 36, 9), "all patches where there is room"


def test_nothing_to_diagnose_is_an_error(subject: Any) -> None:
    with pytest.raises(OptionError, match="at least 1"):
        diagnose(subject, chip(), images=0)


def test_a_network_in_training_is_looked_at_as_in_evaluation(subject: Any) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(64, 4))
    own = load_subject(model, subject.data)
    spec = chip(cell_write_sigma=0.1)
    analog: Any = to_crossbar(model, spec, fold=False).eval()
    wanted = diagnose(own, spec, images=16, analog=analog, rank=False)
    analog.train()
    mean = analog[1].running_mean.clone()
    assert diagnose(own, spec, images=16, analog=analog, rank=False) == wanted
    assert torch.equal(analog[1].running_mean, mean) and analog.training and analog[3].training


def test_all_images_are_looked_at_not_the_first_batch_again(subject: Any) -> None:
    spec = chip(adc_levels=64)
    whole, in_parts, first = (diagnose(subject, spec, images=n, batch=batch, rank=False).layers for n, batch in ((16, 16), (16, 4), (4, 4)))
    assert [one.snr_db for one in in_parts] == pytest.approx([one.snr_db for one in whole], rel=1e-5)
    assert [one.snr_db for one in in_parts] != pytest.approx([one.snr_db for one in first], rel=1e-5)


def test_sampled_rows_are_patches_of_the_first_group() -> None:
    analog, x = to_crossbar(nn.Conv2d(4, 6, 3, groups=2), chip()), torch.randn(2, 4, 5, 5)
    found: list[torch.Tensor] = []
    with torch.no_grad(), observed(analog, lambda seen: found.append(seen.sampled_rows())):
        analog(x)
    assert torch.equal(found[0], nn.functional.unfold(x[:, :2], 3).transpose(1, 2))
