"""How far to look ahead, from what was measured: the lookahead with the most tokens a second, or none.

a = chance that a draft is kept (a request's own, leaning on that of all)      plain, verify(k), draft = seconds measured, by batch size
   tokens a step  E(k) = (1 - a^(k+1)) / (1 - a)          [Leviathan 2023, eq. 1]
   tokens a second      E(k) / (k · draft + verify(k))     against 1 / plain for k = 0

Not measured yet: draft = relative_cost · plain (bytes read), verify(k) = plain. Off (k = 0) when the best k predicts less than 2 %, or
when the last steps with drafts gave fewer tokens a second than plain ones did; tried again after `pause` steps, twice as long each time
it fails. A plain step now and then keeps `plain` fresh while the text grows. The rule's reason is always in `reason`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

GAIN = 1.02  # a predicted speed-up below this is noise
MEMORY = 0.9  # how much of the old a new step keeps in an average
FIRST_GUESS, GUESS_WEIGHT = 0.7, 4.0
WARM_STEPS = 3  # plain steps of a batch size before its first draft; the first is not counted (allocations, compilation)
WINDOW_STEPS = 12  # steps with drafts before their measured speed is believed
REFRESH_STEPS = 128
PROBE_STEPS = 4
PAUSE_STEPS, LONGEST_PAUSE = 64, 4096


@dataclass(slots=True)
class Rate:
    """Acceptance with a fading memory: kept / tested."""

    kept: float = 0.0
    tested: float = 0.0

    def add(self, drafted: int, accepted: int) -> None:
        """Drafts after the first refused one were never tested."""
        self.kept = MEMORY * self.kept + accepted
        self.tested = MEMORY * self.tested + accepted + (accepted < drafted)

    def fade(self) -> None:
        """A step without a draft: what was seen counts less, so a request that was given up is tried again one day."""
        self.kept *= 0.99
        self.tested *= 0.99

    def value(self, guess: float) -> float:
        return (self.kept + GUESS_WEIGHT * guess) / (self.tested + GUESS_WEIGHT)


@dataclass(slots=True)
class Cost:
    """Measured seconds of steps of one batch size."""

    plain_seen: int = 0
    plain_s: float | None = None
    verify_s: dict[int, float] = field(default_factory=dict)
    draft_s: float | None = None  # a drafted token (of all requests at once)

    def verify(self, lookahead: int) -> float:
        """Seconds of a target pass over lookahead + 1 tokens; a line through the plain step where it was not measured."""
        assert self.plain_s is not None
        if lookahead in self.verify_s:
            return self.verify_s[lookahead]
        slopes = [(seconds - self.plain_s) / count for count, seconds in self.verify_s.items()]
        return self.plain_s + lookahead * max(0.0, sum(slopes) / len(slopes)) if slopes else self.plain_s


@dataclass(slots=True)
class _Window:
    """Tokens and seconds of the latest steps with drafts, since they were last switched on."""

    steps: int = 0
    tokens_a_request: float = 0.0
    seconds: float = 0.0


def expected_tokens(acceptance: float, lookahead: int) -> float:
    """(1 - a^(k+1)) / (1 - a), as the sum it is: exact at a = 1 too."""
    return sum(acceptance**count for count in range(lookahead + 1))


class Adaptive:
    """Chooses every request's lookahead before a step, and learns from the step after it."""

    def __init__(self, lookahead: int = 4, relative_cost: float = 0.0) -> None:
        self.first, self.most = lookahead, 2 * lookahead
        self.relative_cost = relative_cost
        self.overall = Rate()
        self.reason = "on: not measured yet"
        self.on = True
        self.predicted_gain = 1.0
        self.measured_gain: float | None = None
        self._requests: dict[str, Rate] = {}
        self._costs: dict[int, Cost] = {}
        self._window = _Window()
        self._pause, self._wait, self._probe, self._since_plain = PAUSE_STEPS, 0, 0, 0

    def choose(self, names: Sequence[str]) -> list[int]:
        """The lookahead of each request of this step."""
        cost = self._cost(len(names))
        if not names or cost.plain_seen < WARM_STEPS:
            return [0] * len(names)
        if self._wait > 0:
            self._wait -= 1
            self._probe = PROBE_STEPS if self._wait == 0 else 0
            return [0] * len(names)
        if self._probe:
            return [self.first] * len(names)
        if self._since_plain >= REFRESH_STEPS:
            return [0] * len(names)
        guess = self.overall.value(FIRST_GUESS)
        best = [self._best(self._requests.setdefault(name, Rate()).value(guess), cost) for name in names]
        self.predicted_gain = max(gain for _, gain in best)
        if not any(count for count, _ in best):
            self._switch_off(f"predicted {self.predicted_gain:.2f}x of plain decoding at best", cost)
            return [0] * len(names)
        return [count for count, _ in best]

    def learn(self, names: Sequence[str], drafted: Sequence[int], emitted: Sequence[int]) -> None:
        """What was kept in this step; emitted counts the target's own token too."""
        for name, count, out in zip(names, drafted, emitted, strict=True):
            rate = self._requests.setdefault(name, Rate())
            if count:
                rate.add(count, out - 1)
                self.overall.add(count, out - 1)
            else:
                rate.fade()

    def time(self, batch: int, drafted: Sequence[int], emitted: Sequence[int], draft_s: float, verify_s: float) -> None:
        """How long a step took: drafting, and everything else."""
        cost = self._cost(batch)
        most = max(drafted, default=0)
        if most == 0:
            # A draft that found nothing to propose (n-grams) still took its time, but the target's step was a plain one.
            cost.plain_seen += 1
            self._since_plain = 0
            if cost.plain_seen > 1:
                cost.plain_s = _average(cost.plain_s, verify_s)
            return
        self._since_plain += 1
        cost.draft_s = _average(cost.draft_s, draft_s / most)
        cost.verify_s[most] = _average(cost.verify_s.get(most), verify_s)
        self._probe = max(0, self._probe - 1)
        self._judge(cost, sum(emitted) / len(emitted), draft_s + verify_s)

    def forget(self, name: str) -> None:
        self._requests.pop(name, None)

    def _judge(self, cost: Cost, tokens_a_request: float, seconds: float) -> None:
        """Measured tokens a second with drafts against those of plain steps."""
        window = self._window
        window.steps += 1
        window.tokens_a_request += tokens_a_request
        window.seconds += seconds
        if window.steps < WINDOW_STEPS or cost.plain_s is None:
            return
        self.measured_gain = window.tokens_a_request / window.seconds * cost.plain_s
        self._window = _Window()
        if self.measured_gain < 1.0:
            self._switch_off(f"measured {self.measured_gain:.2f}x of plain decoding", cost)
        else:
            self.on, self._pause = True, PAUSE_STEPS
            self.reason = f"on: measured {self.measured_gain:.2f}x of plain decoding, {self._details(cost)}"

    def _switch_off(self, why: str, cost: Cost) -> None:
        self.on = False
        self._wait, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        self._window = _Window()
        self.reason = f"off: {why}, {self._details(cost)}; tried again in {self._wait} steps"

    def _details(self, cost: Cost) -> str:
        assert cost.plain_s is not None
        draft = self._draft_s(cost) / cost.plain_s
        verify = cost.verify(self.first) / cost.plain_s
        return (
            f"acceptance {self.overall.value(FIRST_GUESS):.2f}, a drafted token costs {draft:.2f} of a plain step, "
            f"checking {self.first} costs {verify:.2f}"
        )

    def _best(self, acceptance: float, cost: Cost) -> tuple[int, float]:
        """(lookahead, its gain over plain decoding); 0 where no lookahead gains enough."""
        assert cost.plain_s is not None
        draft = self._draft_s(cost)
        gains = [expected_tokens(acceptance, k) / (k * draft + cost.verify(k)) * cost.plain_s for k in range(1, self.most + 1)]
        gain = max(gains)
        return (gains.index(gain) + 1 if gain >= GAIN else 0), gain

    def _draft_s(self, cost: Cost) -> float:
        assert cost.plain_s is not None
        return cost.draft_s if cost.draft_s is not None else self.relative_cost * cost.plain_s

    def _cost(self, batch: int) -> Cost:
        """Batches of about the same size (up to the next power of two) cost about the same."""
        return self._costs.setdefault(max(0, batch - 1).bit_length(), Cost())


def _average(old: float | None, new: float) -> float:
    """Follows slow changes; one step that took long (another process, a collection) counts at most three times."""
    return new if old is None else MEMORY * old + (1 - MEMORY) * min(new, 3 * old)
