"""One product on a chip as a module: it holds no weights of its own, but everything else a product needs from call to call.

    x, weight ──multiply──> out
      plan      from shapes, chip and ADC ranges          engine    chosen for the plan and the device
      cells     programmed from the weight once, and again by themselves when the weight, chip, ranges, engine or device changed
      draw      (seed, chip, layer, call): in training a new chip and call at every pass; in eval the chip stays, and the call moves on
                with every pass if reads are noisy, until set_call holds it

State dict: `ranges` (integers, levels) once calibrated, `passes` once trained with noise; a digital layer's has neither and loads.
A weight must be changed in place or replaced; a change through `.data` is seen by nobody.
Under torch.compile a product is a graph break: what it computes is no graph of torch's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ...core.errors import OptionError
from ...target.crossbar import CrossbarSpec
from ..cells import program
from ..engine.choose import check_wanted, choose
from ..finite import WeightCheck
from ..plan import Draw, Engine, Plan, Window
from .straight_through import StraightThrough, weight_as_matrices

TRAINING_CHIPS = 1 << 30  # chips drawn in training are numbered from here, so that none of them is one that is evaluated
Function = TypeVar("Function", bound=Callable[..., Any])
Watch = Callable[["CrossbarProduct", Tensor, Tensor, Plan, Window | None], Tensor]


def outside_graphs(function: Function) -> Function:
    """torch.compile ends its graph before and begins another after it."""
    return cast(Function, torch.compiler.disable(function))


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was made from a weight, and from which one."""

    owner: weakref.ref[Tensor]
    """The weight, or the parameter it is a part of: a tensor that is gone may leave its address to another."""
    key: tuple[Any, ...]
    plan: Plan
    engine: Engine
    why: str
    state: Any
    values: Tensor | None
    """Dequantised weights (groups, K, N); None where no gradient was wanted."""


def _with_bias(out: Tensor, bias: Tensor | None, window: Window | None) -> Tensor:
    if bias is None:
        return out
    shaped = bias.to(out.dtype).view(-1, *[1] * (0 if window is None else len(window.kernel)))
    return out + shaped if torch.is_grad_enabled() else out.add_(shaped)  # in place where no gradient needs what was there


class CrossbarProduct(nn.Module):
    """x times a weight that someone else holds."""

    def __init__(self, chip: CrossbarSpec, *, engine: str = "auto", seed: int = 0, layer: int = 0) -> None:
        super().__init__()
        self.chip, self.engine, self.seed, self.layer = chip, check_wanted(engine), seed, layer
        self.chip_number, self.call, self.call_held, self.passes = 0, 0, False, 0
        self.ranges: tuple[int, ...] = ()
        self.watch: Watch | None = None
        self._prepared: Prepared | None = None
        self._check = WeightCheck()
        self._chosen: tuple[tuple[Any, ...], Plan, Engine, str] | None = None

    @property
    def draw(self) -> Draw:
        """Of the next pass."""
        if self.training:
            return Draw(self.seed, TRAINING_CHIPS + self.passes, self.layer, self.passes)
        return Draw(self.seed, self.chip_number, self.layer, self.call)

    @property
    def noisy_reads(self) -> bool:
        chip = self.chip
        return bool(any(chip.cell.read_sigmas) or chip.dac.noise_sigma.value or chip.adc.noise_lsb.value)

    @property
    def plan(self) -> Plan:
        """Of the last product; layers that hold their weight know it before the first."""
        if self._prepared is None:
            raise OptionError("the plan of a product", why="its shapes are known after its first call", do="call the model once")
        return self._prepared.plan

    def plan_of(self, weight: Tensor, groups: int = 1) -> Plan:
        """Of this weight (groups * N, …); the ranges must have been calibrated where the chip asks for it."""
        if self.chip.adc.range == "calibrated" and not self.ranges and self.watch is None:
            raise OptionError(
                'adc.range = "calibrated" and no ranges',
                why="the ADC's range comes from data",
                do="calibrate_crossbar(model, batches) first",
            )
        return Plan(self.chip, weight[0].numel(), weight.shape[0] // groups, groups, self.ranges)

    @outside_graphs
    def multiply(
        self, x: Tensor, weight: Tensor, window: Window | None = None, groups: int = 1, *, bias: Tensor | None = None, later: int = 0,
        owner: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x (B, M, K), or (B, groups * C, *size) with a window; weight (groups * N, …) as torch's layers hold it, or a part of `owner`.

        The bias is added digitally, by the engine itself where it can.

        `later` counts calls within one pass (steps of a sequence): each draws its own noise, and only `advance` moves to the next pass.
        Computes in float32, or in float64 where x is, whatever autocast says.
        """
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        with off_autocast(x):
            wide_x = x.to(wide)
            if self.watch is not None:
                seen = self.watch(self, wide_x, weight, Plan(self.chip, weight[0].numel(), weight.shape[0] // groups, groups), window)
                return _with_bias(seen, bias, window)
            draw = self.draw
            wants_gradient = torch.is_grad_enabled() and any(one.requires_grad for one in (x, weight, bias) if one is not None)
            made = self._prepare(weight, weight if owner is None else owner, groups, draw, wants_gradient)
            call = Draw(draw.seed, draw.chip, draw.layer, draw.call + later)
            inside = bias is not None and not wants_gradient and wide_x.numel() > 0 and getattr(made.engine, "adds_bias", False)
            more = {"bias": bias.to(torch.float32)} if bias is not None and inside else {}

            def run() -> Tensor:
                if not wide_x.numel():
                    size = wide_x.shape[1:2] if window is None else window.output_size(tuple(wide_x.shape[2:]))
                    columns = (*size, weight.shape[0]) if window is None else (weight.shape[0], *size)
                    return wide_x.new_zeros(wide_x.shape[0], *columns)
                if window is None:
                    return made.engine.product(wide_x.detach(), made.plan, made.state, call, **more)
                return made.engine.convolution(wide_x.detach(), window, made.plan, made.state, call, **more)

            if wants_gradient:
                of_engine = getattr(made.engine, "inputs", None)

                def inputs(part: Tensor) -> Tensor | None:
                    return of_engine(part, window, made.plan, made.state) if of_engine and part.dtype == torch.float32 else None

                through = StraightThrough.apply(wide_x, weight, made.values, made.plan, window, run, inputs)  # type: ignore[no-untyped-call]
                return _with_bias(cast(Tensor, through), bias, window)
            with torch.no_grad():
                return run() if inside else _with_bias(run(), bias, window)

    @outside_graphs
    def advance(self, calls: int = 1) -> None:
        """The pass is over: the next one draws other numbers."""
        if self.watch is not None or self.chip.ideal:
            return
        if self.training:
            self.passes += calls
        elif self.noisy_reads and not self.call_held:
            self.call += calls

    def _prepare(self, weight: Tensor, owner: Tensor, groups: int, draw: Draw, wants_gradient: bool) -> Prepared:
        key = self._key(weight, owner, groups, draw)
        old = self._prepared
        same = old is not None and old.owner() is owner and old.key == key and old.plan.chip is self.chip
        if old is not None and same and (old.values is not None or not wants_gradient):
            return old
        self._prepared = old = None  # the old cells go before the new ones come
        plan, engine, why = self._choice(weight, groups)
        with torch.no_grad():
            cells = program(weight_as_matrices(weight, groups), plan, draw, self._check if self.training else None)
            values = cells.values if wants_gradient else None
            made = Prepared(weakref.ref(owner), key, plan, engine, why, engine.prepare(plan, cells), values)
        self._prepared = made
        return made

    def _choice(self, weight: Tensor, groups: int) -> tuple[Plan, Engine, str]:
        """The plan and its engine: the same objects as long as nothing about them changed, since all that is found of a plan is kept."""
        wanted = (weight.shape, weight.device, groups, self.ranges, self.engine, self.watch is None)
        old = self._chosen
        if old is None or old[0] != wanted or old[1].chip is not self.chip:
            plan = self.plan_of(weight, groups)
            old = self._chosen = (wanted, plan, *choose(plan, str(weight.device), self.engine))
        return old[1:]

    def _key(self, weight: Tensor, owner: Tensor, groups: int, draw: Draw) -> tuple[Any, ...]:
        version: Any = (
            object() if owner.is_inference() else owner._version
        )  # nobody counts the changes of an inference tensor: never the same
        programmed = (draw.seed, draw.layer, 0 if self.chip.ideal else draw.chip)
        return (version, weight.data_ptr(), weight.shape, weight.device, groups, programmed, self.ranges, self.engine)

    def report(self) -> dict[str, Any]:
        """Which engine computes it and why, how many arrays it takes, and which shortcuts are exact for it."""
        made = self._prepared
        if made is None:
            return {"kind": type(self).__name__, "engine": None, "why": "not called yet", "shortcuts": []}
        found: dict[str, Any] = {"kind": type(self).__name__, "engine": made.engine.name, "why": made.why, **size_of(made.plan)}
        told = getattr(made.engine, "shortcuts", None)
        found["shortcuts"] = list(told(made.plan, made.state)) if callable(told) else shortcuts_of(made.plan)
        return found

    def __getstate__(self) -> dict[str, Any]:
        fresh = {"_prepared": None, "_chosen": None, "_check": WeightCheck(), "watch": None}
        return {**self.__dict__, **fresh}  # copies and files program their own cells

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.ranges:
            destination[prefix + "ranges"] = torch.tensor(self.ranges, dtype=torch.int64)
        if self.passes:
            destination[prefix + "passes"] = torch.tensor(self.passes, dtype=torch.int64)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        ranges, passes = state_dict.get(prefix + "ranges"), state_dict.get(prefix + "passes")
        super()._load_from_state_dict(state_dict, prefix, *others)
        unexpected = others[3]  # local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        unexpected[:] = [key for key in unexpected if key not in (prefix + "ranges", prefix + "passes")]
        if ranges is not None and self.chip.adc.range == "calibrated":  # those of a chip with the full range are what its file says
            self.ranges = checked_ranges(tuple(int(one) for one in ranges.tolist()), self.chip, prefix)
        if passes is not None:
            self.passes = int(passes)


def checked_ranges(ranges: tuple[int, ...], chip: CrossbarSpec, name: str) -> tuple[int, ...]:
    """One whole number of levels, at least 1, for each slice of w."""
    count = len(chip.operands.w_slices)
    if len(ranges) != count or min(ranges) < 1:
        why = f"there must be one, at least 1, for each of the {count} slices of w"
        raise OptionError(f"ADC ranges {list(ranges)} of {name}", why=why, do="calibrate_ the model on this chip")
    return ranges


def size_of(plan: Plan) -> dict[str, int]:
    """How much of the chip a product takes."""
    across = -(-plan.n // plan.chip.array.columns)
    planes = 2 if plan.signed else 1
    slices = len(plan.w.widths)
    return {"k": plan.k, "n": plan.n, "groups": plan.groups, "arrays": plan.arrays * across * plan.groups * slices * planes}


def loses_nothing(plan: Plan) -> bool:
    """Whether every code is a whole multiple of its column sum, so that all slices are one integer product."""
    chip = plan.chip
    whole = all(plan.scale(j).denominator == 1 for j in range(len(plan.w.widths)))
    reach = (plan.full * plan.scale(j) <= Fraction(plan.code_bounds(j)[1]) for j in range(len(plan.w.widths)))
    return chip.ideal and whole and (not chip.adc.clip or all(reach))


def shortcuts_of(plan: Plan) -> list[str]:
    found = ["slices collapsed: the ADC loses nothing"] if loses_nothing(plan) else []
    return [*found, "no noise drawn: every sigma is 0"] if plan.chip.ideal else found


def off_autocast(x: Tensor) -> AbstractContextManager[Any]:
    on = torch.is_autocast_enabled(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if on else nullcontext()


def result_dtype(x: Tensor) -> torch.dtype:
    """What torch's own layer would return for x here."""
    if x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
