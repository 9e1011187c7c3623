"""Where a network loses on a chip: every layer's converters, its error against the digital layer, and what it costs in accuracy.

    converted network, images ──observe──> layer by layer, sums only
      snr_db       10 log10(sum of y^2 / sum of (analog - y)^2), y = the digital product on the same input, without bias
      codes_used   share of the ADC's codes that occur        range_used   the largest code over the last one
      clipped      share of conversions above the range, whether or not the chip clips them
    ranking: the network with this layer alone on the chip (accuracy, KL to the digital network), and with it alone digital

Codes are those of a sample of rows (patches) of each batch, as many as a budget holds; where rows share a scale it is the sample's; of
a grouped convolution, of its first group. Layers are ranked by KL, which resolves what accuracy on few images cannot: two passes a layer.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...core.change import finite
from ...core.errors import OptionError
from ...target.crossbar import CrossbarSpec
from ...target.load import load_crossbar
from ...train.evaluate import device_of, evaluate, scoring
from ...workload.data import Data
from ..cells import program
from ..engine.choose import FALLBACK, load
from ..layer.layers import products
from ..layer.observe import Seen, digital, observed
from ..layer.product import CrossbarProduct
from ..plan import Plan
from .subject import CALIBRATION_IMAGES, Report, Subject, cost_of, load_subject, on_chip, quiet


@dataclass(frozen=True, slots=True)
class LayerDiagnosis:
    """One layer on the chip; None: not measured."""

    name: str
    k: int
    n: int
    groups: int
    arrays: int
    engine: str
    why: str
    snr_db: float | None
    codes_used: float
    range_used: float
    clipped: float
    energy_j: float | None = None
    """Of one image."""
    accuracy_alone: float | None = None
    """Of the network with this layer alone on the chip."""
    kl_alone: float | None = None
    """[nats]"""
    accuracy_without: float | None = None
    """Of the network with this layer alone digital."""
    kl_without: float | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All layers, in the order of the network."""

    model: str
    chip: str
    images: int
    digital: float
    analog: float
    analog_kl: float
    layers: tuple[LayerDiagnosis, ...]
    notes: tuple[str, ...] = ()

    @property
    def ranking(self) -> list[LayerDiagnosis]:
        """Those that lose most first: by KL with the layer alone on the chip, else by SNR."""
        return sorted(self.layers, key=lambda layer: (-(layer.kl_alone or 0.0), math.inf if layer.snr_db is None else layer.snr_db))

    def to_json(self) -> dict[str, Any]:
        names = ("model", "chip", "images", "digital", "analog", "analog_kl")
        own = {name: getattr(self, name) for name in names}
        rows = [asdict(layer) for layer in self.layers]
        whole = {"schema": 1, **own, "layers": rows, "ranking": [layer.name for layer in self.ranking], "notes": list(self.notes)}
        found: dict[str, Any] = finite(whole)
        return found


@dataclass(slots=True)
class _Sums:
    """What the hooks of one layer add up."""

    plan: Plan
    signal: float = 0.0
    error: float = 0.0
    occurred: list[Tensor] = field(default_factory=list)
    """Of each slice of w: which codes occurred."""
    highest: float = 0.0
    beyond: int = 0
    conversions: int = 0

    def __post_init__(self) -> None:
        self.occurred = [torch.zeros(levels, dtype=torch.bool) for levels in self.plan.chip.adc_levels]


def diagnose(
    model: nn.Module | str | Subject,
    chip: CrossbarSpec | str,
    data: Data | str | None = None,
    *,
    images: int = 128,
    batch: int = 32,
    seed: int = 0,
    engine: str = "auto",
    calibrate: int = CALIBRATION_IMAGES,
    rank: bool = True,
    analog: nn.Module | None = None,
    report: Report = quiet,
) -> Diagnosis:
    """Layer by layer on the first `images` test images; `analog`: the network already converted, instead of converting it here."""
    if images < 1 or batch < 1:
        raise OptionError(f"{images} images in batches of {batch}", why="a layer is diagnosed on data", do="give at least 1 of each")
    spec = load_crossbar(chip) if isinstance(chip, str) else chip
    subject = model if isinstance(model, Subject) else load_subject(model, data, seed=seed, report=report)
    count = min(images, len(subject.data.test))
    converted = analog if analog is not None else on_chip(subject, spec, engine=engine, seed=seed, calibrate=calibrate)
    every = products(converted)
    if not every:
        raise OptionError(
            f"{subject.name} has no layer on {spec.name}", why="nothing was converted", do="give a network with linears or convolutions"
        )
    report(f"{len(every)} layers")
    sums = _observe(converted, subject, count, batch)
    plain = evaluate(subject.module, subject.data, batch=batch, limit=count).accuracy
    whole = evaluate(converted, subject.data, batch=batch, limit=count, reference=subject.module)
    cost = cost_of(subject, spec)
    rows = [_row(name, every[name], own, cost.layers.get(name) if cost else None) for name, own in sums.items()]
    if rank:
        rows = [_ranked(row, converted, subject, count, batch, report) for row in rows]
    notes = () if rank else ("not ranked by what each layer costs in accuracy: that takes two passes a layer",)
    rows = [replace(row, name=row.name.replace(".arrays.", ".")) for row in rows]  # a recurrent layer's matrices, as people name them
    return Diagnosis(subject.name, spec.name, count, plain, whole.accuracy, whole.kl or 0.0, tuple(rows), notes)


def _observe(model: nn.Module, subject: Subject, count: int, batch: int) -> dict[str, _Sums]:
    """Of every product that ran."""
    sums: dict[str, _Sums] = {}

    def look(seen: Seen) -> None:
        own = sums.setdefault(seen.name, _Sums(seen.plan))
        wanted = seen.digital.double()
        own.signal += float(wanted.square().sum())
        own.error += float((seen.out.double() - wanted).square().sum())
        _add_codes(own, seen)

    with scoring([model], device_of(model)), observed(model, look):
        for start in range(0, count, batch):
            model(subject.inputs(min(batch, count - start), start=start))
    return sums


def _add_codes(sums: _Sums, seen: Seen) -> None:
    engine, missing = load(FALLBACK)
    assert engine is not None, missing
    plan, draw = unclipped(seen.plan), seen.product.draw
    prepared = engine.prepare(plan, program(seen.first_group, plan, draw))
    codes = engine.codes(seen.sampled_rows(), plan, prepared, draw)  # type: ignore[attr-defined]
    for j, occurred in enumerate(sums.occurred):
        low, high = plan.code_bounds(j)
        found, counts = codes[:, :, :, j].flatten().cpu().unique(return_counts=True)
        within = (found >= low) & (found <= high)
        occurred[(found[within] - low).long()] = True
        sums.highest = max(sums.highest, float(found.abs().max()) / max(high, 1))
        sums.beyond += int(counts[found.abs() > high].sum())  # noise about a sum of 0 may give -1: that is no lack of range
        sums.conversions += int(counts.sum())


def unclipped(plan: Plan) -> Plan:
    """The first group of a product, on a chip whose codes may leave their range."""
    return replace(plan, groups=1, chip=plan.chip.model_copy(update={"adc": plan.chip.adc.model_copy(update={"clip": False})}))


def _row(name: str, product: CrossbarProduct, sums: _Sums, energy_j: float | None) -> LayerDiagnosis:
    plan, said = sums.plan, product.report()
    snr = 10 * math.log10(sums.signal / sums.error) if sums.error and sums.signal else None
    used = sum(float(occurred.double().mean()) for occurred in sums.occurred) / len(sums.occurred)
    return LayerDiagnosis(
        name, plan.k, plan.n, plan.groups, int(said.get("arrays", 0)), str(said["engine"]), str(said["why"]), snr, used,
        sums.highest, sums.beyond / max(sums.conversions, 1), energy_j,
    )  # fmt: skip


def _ranked(row: LayerDiagnosis, model: nn.Module, subject: Subject, count: int, batch: int, report: Report) -> LayerDiagnosis:
    report(f"{row.name}: alone on the chip, and alone digital")
    every = products(model)
    with digital(product for name, product in every.items() if name != row.name):
        alone = evaluate(model, subject.data, batch=batch, limit=count, reference=subject.module)
    with digital([every[row.name]]):
        without = evaluate(model, subject.data, batch=batch, limit=count, reference=subject.module)
    return replace(row, accuracy_alone=alone.accuracy, kl_alone=alone.kl, accuracy_without=without.accuracy, kl_without=without.kl)
