"""Which of two is faster, and how sure: interleaved, so that what drifts hits both.

    each round: A B B A or B A A B, drawn at random ──> mean of A's two, mean of B's two [s]
    rounds ──paired bootstrap──> median of B/A with a 95 % interval ──> verdict

    'resnet18@channels_last' ──parse_variant──> Variant ──build──> a callable on its device
    variant = MODEL[@key[=value],…]   keys: batch, dtype, phase, context, device, threads, channels_last, compile

A verdict needs the whole interval beyond MARGIN on one side: a 1 % difference, however sure, is not worth a choice. Two
variants of different batch are compared per sample. Threads are set before each call, outside the timed part.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.errors import OptionError, nearest
from ..core.profile import Timing
from ..core.timing import garbage_collector_off, median_ratio_interval, sampler, summarise

MARGIN = 0.01
FLAGS = ("channels_last", "compile")
NUMBERS = ("batch", "context", "threads")
WORDS = ("dtype", "phase", "device")
KEYS = (*NUMBERS, *WORDS, *FLAGS)
TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class AbResult:
    """`ratio` is b's time over a's (per sample when the batches differ), between `low` and `high` with 95 % confidence."""

    a: Timing
    b: Timing
    ratio: float
    low: float
    high: float
    verdict: str  # 'a faster', 'b faster' or 'no significant difference'
    rounds: int
    per_sample: bool = False
    names: tuple[str, str] = ("a", "b")

    def to_dict(self) -> dict[str, Any]:
        return {
            "a": {"name": self.names[0], **self.a.to_dict()}, "b": {"name": self.names[1], **self.b.to_dict()}, "ratio": self.ratio,
            "low": self.low, "high": self.high, "verdict": self.verdict, "rounds": self.rounds, "per_sample": self.per_sample,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Variant:
    """One side of the comparison, as the user wrote it."""

    model: str
    batch: int | None = None
    dtype: str | None = None
    phase: str | None = None
    context: int | None = None
    device: str | None = None
    threads: int | None = None
    channels_last: bool = False
    compile: bool = False


@dataclass(frozen=True, slots=True)
class _Side:
    sample: Callable[[], float]
    prepare: Callable[[], None] = lambda: None
    batch: int = 1


def ab(
    a: Callable[[], object], b: Callable[[], object], *, rounds: int = 30, warmup: int = 3, device: str = "cpu", seed: int = 0
) -> AbResult:
    """Time two callables against each other."""
    return _compare(_Side(sampler(a, device)), _Side(sampler(b, device)), rounds, warmup, seed)


def ab_models(spec_a: str, spec_b: str, *, rounds: int = 30, warmup: int = 3, device: str | None = None, seed: int = 0) -> AbResult:
    """Time two variants of models against each other; `device` is the default for variants that name none."""
    import torch

    variants = [parse_variant(spec) for spec in (spec_a, spec_b)]
    threads = torch.get_num_threads()
    try:
        first, second = (_build(variant, device, resize=any(v.threads for v in variants)) for variant in variants)
        return _compare(first, second, rounds, warmup, seed, (spec_a, spec_b))
    finally:
        torch.set_num_threads(threads)


def _compare(a: _Side, b: _Side, rounds: int, warmup: int, seed: int, names: tuple[str, str] = ("a", "b")) -> AbResult:
    if rounds < 5 or warmup < 0:
        raise OptionError(
            f"rounds={rounds}, warmup={warmup}", why="an interval needs at least 5 rounds", do="give rounds >= 5 and warmup >= 0"
        )
    times_a, times_b = _interleave(a, b, rounds, warmup, random.Random(seed))
    per_sample = a.batch != b.batch
    if per_sample:
        times_a, times_b = [time / a.batch for time in times_a], [time / b.batch for time in times_b]
    ratio, low, high = median_ratio_interval(times_b, times_a, seed=seed, paired=True)
    return AbResult(summarise(times_a), summarise(times_b), ratio, low, high, verdict(low, high), rounds, per_sample, names)


def verdict(low: float, high: float) -> str:
    """What an interval of b's time over a's allows one to say."""
    if low > 1 + MARGIN:
        return "a faster"
    return "b faster" if high < 1 / (1 + MARGIN) else "no significant difference"


def _interleave(a: _Side, b: _Side, rounds: int, warmup: int, order: random.Random) -> tuple[list[float], list[float]]:
    times: dict[int, list[float]] = {0: [], 1: []}
    with garbage_collector_off():
        for _ in range(warmup):
            for side in (a, b):
                _one(side)
        for _ in range(rounds):
            first = order.randrange(2)
            spent = {0: 0.0, 1: 0.0}
            for index in (first, 1 - first, 1 - first, first):
                spent[index] += _one((a, b)[index]) / 2
            for index, seconds in spent.items():
                times[index].append(seconds)
    return times[0], times[1]


def _one(side: _Side) -> float:
    side.prepare()
    return side.sample()


def parse_variant(spec: str) -> Variant:
    """`resnet18@dtype=bfloat16,batch=8` → Variant; unknown keys and bad values are OptionErrors."""
    model, mark, settings = spec.rpartition("@")
    if not mark or "/" in settings:
        model, settings = spec, ""
    if not model or (mark and model != spec and not settings):
        raise OptionError(f"variant {spec!r}", why="it must be MODEL or MODEL@key=value,…", do="write e.g. resnet18@channels_last")
    values: dict[str, Any] = {}
    for item in filter(None, settings.split(",")):
        key, _, value = (part.strip() for part in item.partition("="))
        key = key.replace("-", "_")
        if key in values:
            raise OptionError(f"{key} given twice in {spec!r}", why="only one can hold", do="keep one of them")
        values[key] = _value(key, value, spec)
    return Variant(model, **values)


def _value(key: str, value: str, spec: str) -> Any:
    if key in FLAGS and value.lower() in ("", *TRUTH):
        return TRUTH[value.lower()] if value else True
    if key in NUMBERS and value.isascii() and value.isdigit() and 0 < int(value) < 2**31:
        return int(value)
    if key in WORDS and value:
        return value
    if key not in KEYS:
        close = nearest(key, KEYS, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise OptionError(f"unknown key {key!r} in {spec!r}", why=f"variants have {', '.join(KEYS)}{hint}", do="correct the key")
    kind = "a whole number above 0" if key in NUMBERS else "true or false" if key in FLAGS else "a word"
    raise OptionError(
        f"{key}={value!r} in {spec!r}", why=f"{key} takes {kind}", do=f"write {key}=…, e.g. {spec.rpartition('@')[0]}@{_example(key)}"
    )


def _example(key: str) -> str:
    return {"dtype": "dtype=bfloat16", "phase": "phase=decode", "device": "device=cpu"}.get(key, key if key in FLAGS else f"{key}=8")


def _build(variant: Variant, device: str | None, resize: bool) -> _Side:
    import torch

    from ..workload.case import CaseOptions
    from .subject import build_subject, choose_device

    place = choose_device(variant.device or device, variant.model)
    options = CaseOptions(variant.batch, variant.dtype, variant.phase, variant.context, str(place))
    case = build_subject(variant.model, None, options, None, variant.channels_last)
    module: Callable[..., Any] = torch.compile(case.module) if variant.compile else case.module
    threads = variant.threads or torch.get_num_threads()

    def call() -> None:
        with torch.inference_mode():
            module(*case.args, **case.kwargs)

    def prepare() -> None:
        if resize and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
            call()  # the first call after a change makes the new threads

    return _Side(sampler(call, str(place)), prepare, case.batch)
