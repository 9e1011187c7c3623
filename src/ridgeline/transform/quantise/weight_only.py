"""Weights of a model's layers quantised and packed, activations as they are.

    model, WeightSettings ──names──> layers ──rtn | gptq | awq──> PackedLinear, PackedConv2d, PackedEmbedding in their places
                                       └── calibration inputs, stage by stage (calibrate.py)
    ──> a LayerRow for each: bits, bytes, SQNR, error of its outputs, whether a kernel runs it packed

rtn   round to nearest: no data
gptq  errors pushed onto later columns (gptq.py); uniform formats only
awq   columns scaled by what they meet, then rounded to nearest (awq.py)

A weight that two layers share (input and output table) is left alone unless `tables` asks for it: then both become 8-bit, one copy.
Layers gptq or awq cannot treat (grouped convolutions, layers no calibration input reaches) are rounded to nearest and say so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from typing import Any, Literal

from torch import Tensor, nn

from ...core.errors import OptionError, TransformError
from .awq import fold_, search
from .calibrate import Inputs, Stage, stages
from .codebook import FORMATS, quantise_as
from .fold import put
from .gptq import gptq, output_error
from .grid import Granularity, Grid, Quantised, dequantise, quantise, sqnr_db
from .packed import PackedConv2d, PackedEmbedding, PackedLinear, PackedWeight

ALGORITHMS = ("rtn", "gptq", "awq")
SHARES = "shares the table's tensors"


@dataclass(frozen=True, slots=True)
class WeightSettings:
    """What to do to which layers. Names are matched whole or by pattern (`*.mlp.*`)."""

    bits: int = 8
    symmetric: bool = True
    granularity: Granularity = "channel"
    group: int = 64
    scale_type: str = "float32"
    minimum: bool = False  # asymmetric: a float minimum in the place of a whole zero point
    format: str = "uniform"
    algorithm: Literal["rtn", "gptq", "awq"] = "rtn"
    only: tuple[str, ...] = ("*",)
    skip: tuple[str, ...] = ()
    tables: bool = False  # also embeddings and what shares their weight, 8-bit a row
    damping: float = 0.05
    act_order: bool = True  # columns with the largest inputs first: they leave the most to make good
    clip: bool = False  # gptq: a group's range may shrink where that loses less

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise OptionError(f"algorithm = {self.algorithm!r}", why=f"algorithms are {', '.join(ALGORITHMS)}", do="use rtn")
        if self.format not in FORMATS:
            raise OptionError(f"format = {self.format!r}", why=f"formats are {', '.join(FORMATS)}", do="use uniform")
        if self.algorithm == "gptq" and self.format != "uniform":
            raise OptionError(f"gptq with format {self.format}", why="it rounds to uniform grids", do="use rtn or awq, or format = uniform")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def grid(self) -> Grid:
        form: Literal["zero", "minimum"] = "minimum" if self.minimum and not self.symmetric else "zero"
        return Grid(self.bits, self.symmetric, self.granularity, self.group, form, self.scale_type)


@dataclass(frozen=True, slots=True)
class LayerRow:
    """What became of one layer. `error`: relative squared error of its outputs on the calibration inputs, where there were any."""

    name: str
    kind: str
    bits: int
    weights: int
    bytes: int
    float_bytes: int
    sqnr_db: float
    error: float | None
    runs_packed: bool
    reason: str
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def quantise_weights_(model: nn.Module, settings: WeightSettings, calibration: Inputs | None = None) -> list[LayerRow]:
    """Replace the chosen layers in place; rows in the order they were treated."""
    names = chosen_layers(model, settings)
    if not names and not settings.tables:
        raise TransformError(
            "no layer to quantise", why=f"no Linear or Conv2d matches only={list(settings.only)}, skip={list(settings.skip)}",
            do="widen the patterns",
        )  # fmt: skip
    rows: list[LayerRow] = []
    if settings.algorithm != "rtn":
        if calibration is None:
            raise TransformError(
                f"{settings.algorithm} without calibration inputs", why="it measures what each layer reads", do="give calibration="
            )
        able = [name for name in names if _can_calibrate(model.get_submodule(name))]
        with _evaluating(model):
            for stage in stages(model, able, calibration):
                rows += (_gptq_stage if settings.algorithm == "gptq" else _awq_stage)(model, stage, settings)
    treated = {row.name for row in rows}
    note = "" if settings.algorithm == "rtn" else f"rounded to nearest: {settings.algorithm} cannot treat it, or no input reached it"
    for name in names:
        if name not in treated:
            layer: Any = model.get_submodule(name)
            quantised = quantise_as(layer.weight, settings.format, settings.grid(), name)
            rows.append(_replace(model, name, quantised, layer.weight, note=note))
    return rows + (_tables(model, settings) if settings.tables else [])


def chosen_layers(model: nn.Module, settings: WeightSettings) -> list[str]:
    """Names of the Linear and Conv2d layers that match and own their weight alone, in the model's order."""
    shared = _shared_weights(model)
    names = []
    for name, module in model.named_modules():
        if type(module) in (nn.Linear, nn.Conv2d) and _matches(name, settings):
            weight: Any = module.weight
            if id(weight) not in shared:
                names.append(name)
    return names


def _matches(name: str, settings: WeightSettings) -> bool:
    return any(fnmatch(name, one) for one in settings.only) and not any(fnmatch(name, one) for one in settings.skip)


def _shared_weights(model: nn.Module) -> set[int]:
    """Identities of weights that more than one layer holds."""
    seen: dict[int, int] = {}
    for module in model.modules():
        for tensor in module._parameters.values():
            if tensor is not None:
                seen[id(tensor)] = seen.get(id(tensor), 0) + 1
    return {key for key, count in seen.items() if count > 1}


class _evaluating:
    """The model in eval mode while calibration inputs run: no dropout, no running statistics moved."""

    def __init__(self, model: nn.Module) -> None:
        self.training = [name for name, module in model.named_modules() if module.training]  # by name: layers get replaced
        self.model = model

    def __enter__(self) -> None:
        self.model.eval()

    def __exit__(self, *error: object) -> None:
        for name in self.training:
            self.model.get_submodule(name).training = True


def _can_calibrate(layer: nn.Module) -> bool:
    return not isinstance(layer, nn.Conv2d) or layer.groups == 1


def _gptq_stage(model: nn.Module, stage: Stage, settings: WeightSettings) -> list[LayerRow]:
    rows = []
    for name in stage.names:
        layer: Any = model.get_submodule(name)
        gram = stage.statistics.gram
        options = {"act_order": settings.act_order, "clip": settings.clip}
        done = gptq(layer.weight, gram, settings.grid(), damping=settings.damping, name=name, **options)
        rows.append(_replace(model, name, done, layer.weight, gram=gram))
    return rows


def _awq_stage(model: nn.Module, stage: Stage, settings: WeightSettings) -> list[LayerRow]:
    layers: list[Any] = [model.get_submodule(name) for name in stage.names]
    sums, grid = stage.statistics, settings.grid()
    weights = [layer.weight for layer in layers]
    found = search(weights, sums.gram, sums.magnitude, grid, settings.format, name=stage.names[0])
    originals = [weight.detach().clone() for weight in weights]
    linear = all(isinstance(layer, nn.Linear) for layer in layers)
    folded = False
    if linear and found.alpha > 0 and stage.check is not None:
        folded = fold_(None if stage.source is None else model.get_submodule(stage.source), layers, found.scale, stage.check)
    how = "folded into what makes its input" if folded else "input multiplied at run time"
    rows = []
    for name, layer, original in zip(stage.names, layers, originals, strict=True):
        if not linear or found.alpha == 0:
            note = "α 0: plain rounding is best" if linear else "rounded to nearest: awq treats linear layers"
            rows.append(_replace(model, name, quantise_as(layer.weight, settings.format, grid, name), original, gram=sums.gram, note=note))
            continue
        scaled = layer.weight if folded else layer.weight.detach() * found.scale.to(layer.weight.dtype)
        done = quantise_as(scaled, settings.format, grid, name)
        by = 1 / found.scale.float()
        rows.append(
            _replace(model, name, done, original, gram=sums.gram, by=by, input_scale=None if folded else by,
                     note=f"α {found.alpha:.2f}, {how}")
        )  # fmt: skip
    return rows


def _replace(
    model: nn.Module, name: str, quantised: Quantised, weight: Tensor, *, gram: Tensor | None = None, by: Tensor | None = None,
    input_scale: Tensor | None = None, note: str = "",
) -> LayerRow:  # fmt: skip
    """Put the packed layer in its place. `by` undoes a column scale before errors are taken."""
    layer: Any = model.get_submodule(name)
    packed: PackedWeight
    if isinstance(layer, nn.Conv2d):
        packed = PackedConv2d.from_quantised(quantised, layer, layer.bias)
    else:
        packed = PackedLinear.from_quantised(quantised, layer.bias, input_scale)
    back = dequantise(quantised) if by is None else dequantise(quantised) * by
    error = None if gram is None else output_error(weight.detach(), back, gram)
    row = _row(name, packed, weight, back, error, note)
    put(model, name, packed)
    return row


def _row(name: str, packed: Any, weight: Tensor, back: Tensor, error: float | None, note: str) -> LayerRow:
    runs, reason = packed.runs_packed()
    return LayerRow(
        name, type(packed).__name__, packed.grid.bits, weight.numel(), packed.packed_bytes(), weight.nbytes,
        sqnr_db(weight.detach(), back), error, runs, reason, note,
    )  # fmt: skip


def _tables(model: nn.Module, settings: WeightSettings) -> list[LayerRow]:
    """Embeddings, and linear layers that share their weight, as 8-bit rows; one set of tensors for those that share."""
    rows: list[LayerRow] = []
    made: dict[int, tuple[PackedEmbedding, Tensor]] = {}
    for name, module in list(model.named_modules()):
        if type(module) is nn.Embedding and module.max_norm is None and _matches(name, settings):
            table = PackedEmbedding.from_quantised(quantise(module.weight, Grid(8, True, "channel"), name), module.weight.dtype)
            first, _ = made.setdefault(id(module.weight), (table, module.weight))  # the weight is held, so that its id stays its own
            table.packed, table.scale = first.packed, first.scale
            rows.append(_row(name, table, module.weight, table.dequantised(), None, "" if table is first else SHARES))
            put(model, name, table)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and id(module.weight) in made:
            table = made[id(module.weight)][0]
            head = PackedLinear.from_quantised(table.quantised(), module.bias)
            head.packed, head.scale = table.packed, table.scale
            rows.append(_row(name, head, module.weight, table.dequantised(), None, SHARES))
            put(model, name, head)
    return rows


def storage_only(rows: Iterable[LayerRow]) -> tuple[str, ...]:
    """Names of layers no kernel runs packed, for a Change."""
    return tuple(row.name for row in rows if not row.runs_packed)


def total_bytes(rows: Iterable[LayerRow]) -> tuple[int, int]:
    """(packed, float) bytes of the weights treated."""
    listed = list(rows)
    return sum(row.bytes for row in listed), sum(row.float_bytes for row in listed)


__all__ = ["ALGORITHMS", "LayerRow", "WeightSettings", "chosen_layers", "quantise_weights_", "storage_only", "total_bytes"]
