"""A copy of a model whose products run on a chip.

    model, chip ──copy──> batch norms folded ──walk──> each layer replaced by its analog one ──> model with .crossbar_report()
      Linear, Conv1d-3d      layers.py          LSTM, GRU, RNN   recurrent.py         MultiheadAttention   attention.py
      everything else stays digital; what of it holds a weight matrix is listed in the report
    overrides {pattern: {field: value}}: patterns match layer names as in a shell, later ones win. Fields are the chip's
      (rows, x_slices, adc_levels, cell_write_sigma, …), or digital = True, or engine

Parameters keep their names and are the digital layers' own kind, so state dicts go both ways (of a folded model, with the folded one).
A subclass or a parametrised layer may compute something else and is left digital.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from ...core.errors import OptionError, TransformError, nearest
from ...core.spec import parse_spec
from ...target.crossbar import CrossbarSpec
from ...target.load import load_crossbar
from ...transform.quantise.fold import fold_norms_
from ..engine.choose import check_wanted
from .attention import AttentionProducts, CrossbarAttention, on_arrays
from .folding import pairs_by_running
from .layers import make, products, set_call, set_chip, set_engine
from .recurrent import RECURRENT, CrossbarRecurrent

__all__ = ["crossbar_report", "digital_state_dict", "set_call", "set_chip", "set_engine", "to_crossbar"]

SECTIONS = ("array", "operands", "dac", "cell", "adc")
OWN_FIELDS = ("digital", "engine")
PRODUCTS_A_LAYER = 64  # numbers of random streams set aside for one layer: a two-way LSTM of ten layers has 40 products
Overrides = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Choice:
    """What one layer becomes."""

    chip: CrossbarSpec
    engine: str
    digital: bool


@dataclass(slots=True)
class Conversion:
    """One walk over a model."""

    chip: CrossbarSpec
    engine: str
    seed: int
    attention: bool
    overrides: Overrides
    used: set[str] = field(default_factory=set)
    count: int = 0
    done: dict[int, nn.Module] = field(default_factory=dict)

    def options(self, choice: Choice) -> dict[str, Any]:
        self.count += 1
        return {"engine": choice.engine, "seed": self.seed, "layer": (self.count - 1) * PRODUCTS_A_LAYER}

    def replaced(self, module: nn.Module, name: str) -> nn.Module:
        """The analog layer, or the module itself with its children replaced."""
        if id(module) in self.done:  # one layer in two places stays one
            return self.done[id(module)]
        analog = self._analog(module, name)
        self.done[id(module)] = analog if analog is not None else module
        if analog is not None:
            return analog
        for key, child in module._modules.items():  # not named_children: it leaves out what stands there twice
            if child is not None:
                module._modules[key] = self.replaced(child, f"{name}.{key}" if name else key)
        if isinstance(module, nn.TransformerEncoderLayer) and products(module):
            module.activation_relu_or_gelu = 0  # the fused kernel torch would take reads the weights and passes the arrays by
        return module

    def _analog(self, module: nn.Module, name: str) -> nn.Module | None:
        choice = self._choice(name)
        if choice.digital or not candidate(module):
            return None
        options = self.options(choice)
        if isinstance(module, nn.MultiheadAttention):
            return CrossbarAttention(module, choice.chip, products=self.attention, **options)
        if isinstance(module, RECURRENT):
            return CrossbarRecurrent(module, choice.chip, **options)
        return make(module, choice.chip, **options)

    def _choice(self, name: str) -> Choice:
        chip, engine, digital = self.chip, self.engine, False
        for pattern, fields in self.overrides.items():
            if fnmatchcase(name, pattern):
                self.used.add(pattern)
                chip = changed_chip(chip, {key: value for key, value in fields.items() if key not in OWN_FIELDS}, pattern)
                engine, digital = fields.get("engine", engine), fields.get("digital", digital)
        return Choice(chip, engine, digital)


def candidate(module: nn.Module) -> bool:
    """Whether there is an analog layer for it."""
    if type(module) is nn.MultiheadAttention:
        return CrossbarAttention.able(module)
    return type(module) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *RECURRENT)


def to_crossbar(
    model: nn.Module, chip: CrossbarSpec | str, *, engine: str = "auto", overrides: Overrides | None = None, seed: int = 0,
    fold: bool = True, example: Any = None, attention: bool = False,
) -> nn.Module:  # fmt: skip
    """A copy of the model as the chip would compute it.

    example: inputs of the model (a tensor or a tuple), to find batch norms by running it where its forward cannot be traced.
    attention: products of activations run on arrays too. Chips with adc.range = "calibrated" need calibrate_ next.
    """
    spec = load_crossbar(chip) if isinstance(chip, str) else chip
    check_overrides(overrides or {}, spec)
    analog = copy.deepcopy(model)
    folded = fold_batch_norms_(analog, example) if fold else []
    work = Conversion(spec, check_wanted(engine), seed, attention, overrides or {})
    analog = work.replaced(analog, "")
    if unused := [pattern for pattern in work.overrides if pattern not in work.used]:
        names = [name for name, _ in model.named_modules() if name]
        near = nearest(unused[0], names) or names[:8]
        raise OptionError(f"overrides[{unused[0]!r}]", why="no layer has such a name", do=f"there are {', '.join(near)}, …")
    if attention:
        on_arrays(analog, AttentionProducts(spec, **work.options(Choice(spec, engine, False))))
    if not products(analog):
        raise TransformError(f"nothing of {type(model).__name__} runs on arrays", why=_why_nothing(model), do="see the report's list")
    analog.crossbar_folded = folded  # type: ignore[assignment]
    analog.crossbar_report = types.MethodType(crossbar_report, analog)  # type: ignore[assignment]
    return analog


def _why_nothing(model: nn.Module) -> str:
    return f"it has no Linear, Conv, LSTM, GRU, RNN or MultiheadAttention of torch's own that is not set digital: {_kinds(model)}"


def _kinds(model: nn.Module) -> str:
    return ", ".join(sorted({type(module).__name__ for module in model.modules()})[:8])


def fold_batch_norms_(model: nn.Module, example: Any) -> list[str]:
    """Names of the norms that are now in the convolutions before them."""
    folded = fold_norms_(model)
    if not folded and example is not None:
        inputs = (example,) if isinstance(example, Tensor) else tuple(example)
        folded = fold_norms_(model, pairs_by_running(model, inputs))
    return [norm for _, norm in folded]


def fields_of(chip: type[CrossbarSpec] = CrossbarSpec) -> dict[str, tuple[str, str]]:
    """What an override may name → (section, field): adc_levels always, levels' kind alone where only one section has it."""
    sections = {section: list(chip.model_fields[section].annotation.model_fields) for section in SECTIONS}  # type: ignore[union-attr]
    every = [name for names in sections.values() for name in names]
    known = {f"{section}_{name}": (section, name) for section, names in sections.items() for name in names}
    short = {name: (section, name) for section, names in sections.items() for name in names if every.count(name) == 1}
    return known | short


def check_overrides(overrides: Overrides, chip: CrossbarSpec) -> None:
    known = (*OWN_FIELDS, *fields_of())
    for pattern, fields in overrides.items():
        for name in fields:
            if name not in known:
                near = nearest(name, known) or sorted(known)
                why = f"no such field; did you mean {', '.join(near)}?"
                raise OptionError(f"overrides[{pattern!r}][{name!r}]", why=why, do=f"known: {', '.join(sorted(known))}")
        if not isinstance(fields.get("digital", False), bool):
            raise OptionError(f"overrides[{pattern!r}]['digital'] = {fields['digital']!r}", why="it is True or False", do="give one")
        check_wanted(str(fields.get("engine", "auto")))
        changed_chip(chip, {key: value for key, value in fields.items() if key not in OWN_FIELDS}, pattern)


def all_ideal(chip: CrossbarSpec, overrides: Overrides) -> bool:
    """Whether nothing is random on this chip, whichever overrides meet in a layer."""
    changes = [{key: value for key, value in fields.items() if key not in OWN_FIELDS} for fields in overrides.values()]
    return chip.ideal and all(changed_chip(chip, fields, pattern).ideal for pattern, fields in zip(overrides, changes, strict=True))


def changed_chip(chip: CrossbarSpec, fields: Mapping[str, Any], pattern: str) -> CrossbarSpec:
    """The chip with fields replaced, checked as a chip's file is."""
    if not fields:
        return chip
    data, known = chip.model_dump(mode="json"), fields_of()
    for name, value in fields.items():
        section, inner = known[name]
        data[section][inner] = value
        if inner.endswith("_slices"):
            data[section][f"{inner[0]}_bits"] = None  # it was there to check the old slices
    return parse_spec(CrossbarSpec, data, f"overrides of {pattern!r}")


def crossbar_report(model: nn.Module) -> dict[str, Any]:
    """What runs where: one row a product, what stayed digital and why, and the batch norms folded or left."""
    rows = [{"name": name.replace(".arrays.", "."), **product.report()} for name, product in products(model).items()]
    digital = [
        {"name": name, "kind": type(module).__name__, "why": why} for name, module in model.named_modules() if (why := _why_digital(module))
    ]
    left = [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    return {"layers": rows, "digital": digital, "norms_folded": list(getattr(model, "crossbar_folded", [])), "norms_left": left}


def _why_digital(module: nn.Module) -> str | None:
    """For a module that holds a weight matrix of its own and is not on arrays."""
    analog = type(module).__module__.startswith(__package__ or "ridgeline.crossbar")
    if analog or not any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
        return None
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "a table that is looked up, not multiplied"
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return "transposed convolutions have no analog layer"
    if candidate(module):
        return "set digital"
    return "no analog layer for this kind"


def digital_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without what only analog layers have: what the (folded) digital model loads."""
    own = {f"{name}.{key}" if name else key for name in products(model) for key in ("ranges", "passes")}
    return {key: value for key, value in model.state_dict().items() if key not in own}
