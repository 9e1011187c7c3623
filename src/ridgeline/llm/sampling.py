"""From logits to tokens: every row by its own settings, its own random numbers, and nothing of its neighbours.

    logits [R, V] ──penalties──> ──/ temperature──> ──top-k──> ──top-p──> ──min-p──> softmax ──> probabilities [R, V]
                                                                                                 │ inverse of the cumulative sum
                                              uniform(seed, position in the request) in (0, 1) ──┴──> token [R]
    temperature 0 ──> argmax after the penalties (the first of equal logits); its probabilities are one-hot

Order and meaning. Penalties: repetition (Keskar 2019) divides a positive and multiplies a negative logit of every token of
prompt and output; presence and frequency are subtracted from tokens of the output only. top-k keeps k tokens, of equal
logits those with the lower number. top-p keeps the fewest of these, most likely first, that reach p of what top-k left; at
least one. min-p drops what is less likely than min_p times the most likely.

Random numbers are a counter function of seed and position, so equal logits give equal tokens whatever else is in the batch.
Logprobs are those of the model itself: log-softmax in float32 before penalties and temperature.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..core.errors import OptionError

BAD_ROW = -1
"""The token of a row without a distribution: NaN, +inf, or nothing but -inf."""

SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
MOST_LOGPROBS = 100
MOST_STOPS = 64


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request's tokens are chosen, and when it ends."""

    max_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all; more than the vocabulary too."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    """The text ends before the first of these; they are never part of it."""
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None
    """None: the engine draws one and reports it."""
    logprobs: int | None = None
    """How many of the likeliest tokens to list beside the chosen one."""
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise _wrong(name, value, f"must be a number from {low:g} to {high:g}")
        for name in ("max_tokens", "top_k"):
            if not isinstance(getattr(self, name), int):
                raise _wrong(name, getattr(self, name), "must be a whole number")
        if self.top_p == 0 or self.repetition_penalty == 0:
            raise _wrong("top_p" if self.top_p == 0 else "repetition_penalty", 0, "must be above 0")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**64):
            raise _wrong("seed", self.seed, "must be a whole number of at most 64 bits")
        if self.logprobs is not None and (
            isinstance(self.logprobs, bool) or not isinstance(self.logprobs, int) or not 0 <= self.logprobs <= MOST_LOGPROBS
        ):
            raise _wrong("logprobs", self.logprobs, f"must be a whole number from 0 to {MOST_LOGPROBS}")
        self._check_stops()

    def _check_stops(self) -> None:
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop) or len(self.stop) > MOST_STOPS:
            raise _wrong("stop", self.stop, f"must be a tuple of at most {MOST_STOPS} non-empty strings")
        if not all(isinstance(token, int) and token >= 0 for token in self.stop_ids) or len(self.stop_ids) > MOST_STOPS:
            raise _wrong("stop_ids", self.stop_ids, f"must be a tuple of at most {MOST_STOPS} token numbers")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


_BOUNDS: dict[str, tuple[float, float]] = {
    "max_tokens": (1, 2**31 - 1),
    "temperature": (0.0, 100.0),
    "top_k": (0, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
}


def _wrong(name: str, value: object, why: str) -> OptionError:
    known = ", ".join(field.name for field in fields(Sampling))
    return OptionError(f"Sampling.{name} = {str(value)[:80]}", why=f"{name} {why}", do=f"give another {name} (settings: {known})")


class History(NamedTuple):
    """The tokens before the one to be chosen; penalties look at them."""

    prompt: Sequence[int]
    output: Sequence[int]


class TokenLogprob(NamedTuple):
    """Natural logarithms of probabilities."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens, best first."""


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in (0, 1) that depends on its three arguments only."""
    return float(uniforms([seed], [position], stream)[0])


def uniforms(seeds: Sequence[int], positions: Sequence[int], stream: int = 0) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """`uniform` of many rows, float64 [R]: SplitMix64's finaliser (Steele 2014) over seed, position and stream; 52 of the bits."""
    state = np.zeros(len(seeds), dtype=np.uint64)
    # mixed after each: seed 1 at position 2 must have nothing in common with seed 2 at position 1
    for counter in (np.array([seed % 2**64 for seed in seeds], np.uint64), np.array(positions, np.uint64), np.uint64(stream % 2**64)):
        state = _mix((state ^ counter) + np.uint64(0x9E3779B97F4A7C15))
    # half a step off zero: never 0, and 1 - 2^-53 at most, which float64 still tells from 1
    return ((state >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _mix(state: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def to_device(values: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small tensor on the device without waiting for it: a copy from memory that is not pinned would drain the stream."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Rules:
    """The settings of a batch as tensors on its device: made once, used for every step in which the batch stays the same."""

    def __init__(self, samplings: Sequence[Sampling], vocab: int, device: torch.device) -> None:
        self.samplings = list(samplings)
        self.penalised = any(sampling.penalised for sampling in samplings)
        drawing = [row for row, sampling in enumerate(samplings) if not sampling.greedy]
        chosen = [samplings[row] for row in drawing]
        narrow = [place for place, s in enumerate(chosen) if 0 < s.top_k < vocab or s.top_p < 1.0]
        self.drawing = to_device(drawing, torch.int64, device) if drawing else None
        # at least float32's smallest normal number: 0 / 0 would leave the row without a distribution
        self.temperature = to_device([[max(s.temperature, SMALLEST)] for s in chosen], torch.float32, device)  # [D, 1]
        self.floor = to_device([[math.log(s.min_p) if s.min_p else -math.inf] for s in chosen], torch.float32, device)
        self.narrow = to_device(narrow, torch.int64, device) if narrow else None
        self.top_k = to_device([[chosen[place].top_k or vocab] for place in narrow], torch.int64, device)  # [N, 1]
        # above 1: the cumulative sum may pass 1 by rounding, and top_p = 1 drops nothing
        self.top_p = to_device([[p if (p := chosen[place].top_p) < 1.0 else 2.0] for place in narrow], torch.float64, device)

    def draw(self, logits: Tensor, random: Tensor | None, histories: Sequence[History | None] | None = None) -> Tensor:
        """int64 [R] on the device of the logits [R, V], without waiting for it."""
        logits = logits.float()
        if self.penalised and histories is not None:
            logits = penalise(logits, self.samplings, histories)
        tokens = greedy(logits)
        if self.drawing is None or random is None:
            return tokens
        probs = self.filtered(logits.index_select(0, self.drawing))
        return tokens.index_copy(0, self.drawing, pick(probs, random.index_select(0, self.drawing)))

    def filtered(self, logits: Tensor) -> Tensor:
        """float32 [D, V]: probabilities of the rows that draw, after temperature, top-k, top-p and min-p."""
        # the largest logit is taken off first, so that a tiny temperature can't overflow; a row without a finite one becomes NaN
        logits = (logits - logits.max(dim=-1, keepdim=True).values) / self.temperature
        if self.narrow is not None:
            logits = logits.index_copy(0, self.narrow, self._narrowed(logits.index_select(0, self.narrow)))
        # min-p: p >= min_p * p_most is x >= x_most + ln(min_p), and x_most is 0 here
        return logits.masked_fill(logits < self.floor, -math.inf).softmax(dim=-1)

    def _narrowed(self, logits: Tensor) -> Tensor:
        """`logits` [N, V] with -inf where top-k or top-p drop a token; one sort."""
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        drop = torch.arange(logits.shape[1], device=logits.device) >= self.top_k
        weights = ordered.masked_fill(drop, -math.inf).softmax(dim=-1, dtype=torch.float64)
        drop |= weights.cumsum(dim=-1) - weights >= self.top_p
        drop[:, 0] = False
        return logits.masked_fill(torch.zeros_like(drop).scatter_(1, order, drop), -math.inf)


def penalise(logits: Tensor, samplings: Sequence[Sampling], histories: Sequence[History | None]) -> Tensor:
    """float32 [R, V] with the penalties of each row; the same tensor when no row has one."""
    rows: list[int] = []
    tokens: list[int] = []
    scales: list[float] = []
    drops: list[float] = []
    for row, (sampling, history) in enumerate(zip(samplings, histories, strict=True)):
        if not sampling.penalised or history is None:
            continue
        counts = Counter(history.output)
        for token in sorted(counts.keys() | set(history.prompt)):
            count = counts.get(token, 0)
            rows.append(row)
            tokens.append(token)
            scales.append(max(sampling.repetition_penalty, SMALLEST))
            drops.append(sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0))
    if not rows:
        return logits
    row, token = to_device([rows, tokens], torch.int64, logits.device)
    scale, drop = to_device([scales, drops], torch.float32, logits.device)
    old = logits[row, token]
    new = (torch.where(old > 0, old / scale, old * scale) - drop).clamp(-LARGEST, LARGEST)
    return logits.index_put((row, token), torch.where(old.isfinite(), new, old))  # a penalty neither makes nor hides an infinity


def probabilities(logits: Tensor, samplings: Sequence[Sampling], histories: Sequence[History | None] | None = None) -> Tensor:
    """float32 [R, V]: what each row's token is drawn from. Greedy rows are one-hot; a row without a distribution is NaN."""
    rules = Rules(samplings, logits.shape[1], logits.device)
    logits = penalise(logits.float(), samplings, histories or [None] * len(samplings))
    best, token = logits.max(dim=-1, keepdim=True)
    result = torch.where(best.isfinite(), torch.zeros_like(logits).scatter_(1, token, 1.0), math.nan)
    if rules.drawing is not None:
        result.index_copy_(0, rules.drawing, rules.filtered(logits.index_select(0, rules.drawing)))
    return result


def greedy(logits: Tensor) -> Tensor:
    """int64 [R]: the first of the largest; BAD_ROW for a row without a distribution."""
    best, tokens = logits.max(dim=-1)
    return torch.where(best.isfinite(), tokens, BAD_ROW)


def pick(probs: Tensor, random: Tensor) -> Tensor:
    """int64 [R]: the token where the cumulative sum of `probs` [R, V] passes `random` [R]; BAD_ROW for a row of NaN."""
    cumulative = probs.double().cumsum(dim=-1)
    total = cumulative[:, -1:]
    # strictly below the total: a token of probability 0 at the end of the vocabulary can't be reached by rounding
    goal = torch.minimum(random.double()[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(cumulative, goal, right=True)[:, 0]
    return torch.where(total[:, 0].isfinite(), token.clamp(max=probs.shape[1] - 1), BAD_ROW)


def draw(
    logits: Tensor, rules: Rules | Sequence[Sampling], random: Tensor | None, histories: Sequence[History | None] | None = None
) -> Tensor:
    """int64 [R]: a token of each row's probabilities, by its number `random` [R] in (0, 1); greedy rows ignore it."""
    rules = rules if isinstance(rules, Rules) else Rules(rules, logits.shape[1], logits.device)
    return rules.draw(logits, random, histories)


class Sampled(NamedTuple):
    """One row a request; a token of BAD_ROW has no distribution behind it."""

    tokens: list[int]
    logprobs: list[TokenLogprob | None]


class Drawer(Protocol):
    """What the sampler needs of a request."""

    prompt: list[int]
    output: list[int]
    sampling: Sampling


class Sampler:
    """Draws the next token of each request; keeps the last batch's rules, for most steps repeat the batch."""

    def __init__(self) -> None:
        self.rules: Rules | None = None

    def rules_of(self, requests: Sequence[Drawer], vocab: int, device: torch.device) -> Rules:
        samplings = [request.sampling for request in requests]
        if self.rules is None or self.rules.samplings != samplings:
            self.rules = Rules(samplings, vocab, device)
        return self.rules

    def randoms(self, requests: Sequence[Drawer], steps: int, device: torch.device) -> Tensor | None:
        """float64 [steps, R] for the next `steps` tokens of each request; None when all are greedy."""
        if all(request.sampling.greedy for request in requests):
            return None
        seeds = [request.sampling.seed or 0 for request in requests] * steps
        positions = [len(request.output) + step for step in range(steps) for request in requests]
        return to_device(uniforms(seeds, positions).reshape(steps, -1), torch.float64, device)

    def sample(self, logits: Tensor, requests: Sequence[Drawer]) -> Sampled:
        """The next token of each request. Waits for the device once, and once more when logprobs are asked for."""
        rules = self.rules_of(requests, logits.shape[1], logits.device)
        histories = [History(request.prompt, request.output) for request in requests] if rules.penalised else None
        random = self.randoms(requests, 1, logits.device)
        tokens: list[int] = rules.draw(logits, None if random is None else random[0], histories).tolist()
        return Sampled(tokens, logprobs_of(logits, tokens, [request.sampling.logprobs for request in requests]))


def logprobs_of(logits: Tensor, tokens: Sequence[int], counts: Sequence[int | None]) -> list[TokenLogprob | None]:
    """What each row that asks (`counts` not None) reports of its token. One transfer for all."""
    asking = [row for row, count in enumerate(counts) if count is not None and tokens[row] != BAD_ROW]
    result: list[TokenLogprob | None] = [None] * len(counts)
    if not asking:
        return result
    rows = to_device(asking, torch.int64, logits.device)
    chosen = to_device([tokens[row] for row in asking], torch.int64, logits.device)
    scores = logits.index_select(0, rows).float().log_softmax(dim=-1)
    most = min(max(counts[row] or 0 for row in asking), logits.shape[1])
    top = scores.topk(most, dim=-1)
    own = scores.gather(1, chosen[:, None])
    # token numbers are exact in float64, so one matrix carries all three
    table = torch.cat([own.double(), top.values.double(), top.indices.double()], dim=1).tolist()
    for row, line in zip(asking, table, strict=True):
        count = min(counts[row] or 0, most)
        best = tuple((int(line[1 + most + place]), line[1 + place]) for place in range(count))
        result[row] = TokenLogprob(tokens[row], line[0], best)
    return result
