"""What a study is about: a trained network with the data it is scored on, and the same network on a chip.

"digits-cnn" | "resnet20" | saved folder | file.py:factory | nn.Module, data ──load_subject──> Subject(name, module, data)
Subject, chip ──on_chip──> converted copy, ADC ranges calibrated on training images where the chip asks for it
Subject, chip ──cost_of──> energy, time and arrays of one image, from the chip's event prices
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import OptionError
from ...core.spec import Constant
from ...estimate.crossbar import area_mm2, estimate_on_crossbar, layer_on_crossbar
from ...target.crossbar import CrossbarSpec
from ...train.evaluate import as_model, device_of
from ...train.fit import fit
from ...transform.saved import load_model
from ...workload.capture import capture, resolve
from ...workload.case import CaseOptions
from ...workload.data import Data, load_data
from ...workload.graph import Workload
from ...workload.pretrained import PUBLISHED, load_pretrained

Report = Callable[[str], None]
DATA = {"digits-cnn": "digits", "resnet20": "cifar10", "resnet56": "cifar10"}
TRAINED_HERE = "digits-cnn"
CALIBRATION_IMAGES = 256


def quiet(message: str) -> None:
    """For callers that want to hear nothing."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A network in eval mode, and its data."""

    name: str
    module: nn.Module
    data: Data

    def inputs(self, count: int, *, train: bool = False, start: int = 0) -> Tensor:
        """The first images of a part, as the network takes them."""
        split = self.data.train if train else self.data.test
        return as_model(self.module, self.data.prepare(split.inputs[start : start + count].to(device_of(self.module))))


def load_subject(
    model: nn.Module | str, data: Data | str | None = None, *, weights: Path | None = None, device: str | None = None, seed: int = 0,
    report: Report = quiet,
) -> Subject:  # fmt: skip
    """A network by name with its weights (digits-cnn is trained on the spot), a saved folder, file.py:factory, or a module.

    Without a `device` a module stays where it is; what is loaded here is on the CPU.
    """
    name = model if isinstance(model, str) else type(model).__name__
    source = data if data is not None else DATA.get(name)
    if source is None:
        raise OptionError(
            f"no data for {name}", why="accuracy is what a chip may lose", do=f"name it: {', '.join(sorted(set(DATA.values())))}"
        )
    loaded = load_data(source) if isinstance(source, str) else source
    module = model if isinstance(model, nn.Module) else _named(model, loaded, weights, seed, report)
    return Subject(name, (module if device is None else module.to(device)).eval(), loaded)


def _named(name: str, data: Data, weights: Path | None, seed: int, report: Report) -> nn.Module:
    if weights is not None or name in PUBLISHED:
        return load_pretrained(name, weights)
    if name == TRAINED_HERE:
        report(f"training {name} on {data.name}")
        module = load_model(name).requires_grad_(True)
        fit(module, data, epochs=12, batch=64, optimiser="adamw", learning_rate=3e-3, weight_decay=1e-2, seed=seed, progress=False)
        return module
    if (Path(name) / "model.json").is_file():
        return load_model(name)
    if ".py:" in name:
        return resolve(name, CaseOptions(device="cpu")).module
    known = ", ".join([TRAINED_HERE, *PUBLISHED])
    why = "an untrained network has no accuracy to lose"
    raise OptionError(f"no trained weights of {name}", why=why, do=f"give weights, a saved folder, file.py:factory, or one of {known}")


def on_chip(
    subject: Subject, chip: CrossbarSpec, *, engine: str = "auto", seed: int = 0, calibrate: int = CALIBRATION_IMAGES, batch: int = 64,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> nn.Module:  # fmt: skip
    """The network as the chip runs it, ready to score."""
    from ..layer.calibrate import calibrate_
    from ..layer.convert import to_crossbar
    from ..layer.layers import products

    analog = to_crossbar(subject.module, chip, engine=engine, overrides=dict(overrides or {}), seed=seed, example=subject.inputs(1))
    if any(one.chip.adc.range == "calibrated" for one in products(analog).values()):  # overrides may ask for it as well
        if calibrate < 1:
            why = f"the ADCs of {chip.name} take their range from data"
            raise OptionError(f"{calibrate} images to calibrate with", why=why, do='give at least 1, or a chip with adc.range = "full"')
        count = min(calibrate, len(subject.data.train))
        calibrate_(analog, [subject.inputs(min(batch, count - at), train=True, start=at) for at in range(0, count, batch)])
    return analog.eval()


def build_perfectly_(analog: nn.Module) -> nn.Module:
    """Every layer's own chip, overrides included, without_noise."""
    from ..layer.layers import products

    perfect: dict[CrossbarSpec, CrossbarSpec] = {}
    for product in products(analog).values():
        if product.chip not in perfect:
            perfect[product.chip] = without_noise(product.chip)
        product.chip = perfect[product.chip]
    return analog


def without_noise(chip: CrossbarSpec) -> CrossbarSpec:
    """The same chip built perfectly: slices, sizes and converters as they are, nothing random, stuck, drifting or resistive."""
    none = {name: Constant(value=0.0, unit=unit, source="left out", status="assumed") for name, unit in _FAULTS.items()}
    cell = chip.cell.model_copy(
        update={**{name: none[name] for name in _FAULTS if name in type(chip.cell).model_fields}, "retention_s": None}
    )
    dac = chip.dac.model_copy(update={"noise_sigma": none["noise_sigma"]})
    adc = chip.adc.model_copy(update={"noise_lsb": none["noise_lsb"], "offset_lsb": none["offset_lsb"]})
    return chip.model_copy(update={"cell": cell, "dac": dac, "adc": adc})


_FAULTS = {
    "write_sigma": "ratio", "read_sigma": "ratio", "stuck_high": "ratio", "stuck_low": "ratio", "drift_nu": "ratio",
    "drift_nu_sigma": "ratio", "line_resistance_ohm": "ohm", "noise_sigma": "ratio", "noise_lsb": "LSB", "offset_lsb": "LSB",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChipCost:
    """Of one image on the chip."""

    energy_j: float
    latency_s: float
    arrays: int
    area_mm2: float
    adc_conversions: int
    layers: Mapping[str, float]
    """Name of a layer → joules."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def work_of(subject: Subject) -> Workload:
    """What one image takes, whatever the chip."""
    with torch.no_grad():
        return capture(subject.module, subject.inputs(1), name=subject.name)


def cost_of(subject: Subject, chip: CrossbarSpec, workload: Workload | None = None) -> ChipCost | None:
    """None where the chip's file states no prices; `workload`: of the subject, where it is known already."""
    if not (chip.cost.array_read_s.value or chip.cost.adc_conversion_s.value):
        return None
    workload = workload or work_of(subject)
    profile = estimate_on_crossbar(workload, chip)
    events = [layer.events for op in workload.ops if (layer := layer_on_crossbar(op, chip))]
    arrays, layers = sum(event.arrays for event in events), dict[str, float]()
    for row in profile.rows:
        layers[row.layer] = layers.get(row.layer, 0.0) + (row.energy_j or 0.0)
    total = profile.total
    return ChipCost(
        total.energy_j or 0.0, total.time_s, arrays, area_mm2(arrays, chip), sum(event.adc_conversions for event in events), layers
    )
