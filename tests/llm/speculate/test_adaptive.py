"""The adaptive rule on machines made of numbers: a draft that keeps a known share, passes that take known times."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from ridgeline.llm.speculate.adaptive import PAUSE_STEPS, Adaptive, expected_tokens


@dataclass
class Machine:
    """Seconds of a plain step, of checking each further token, and of drafting one; and the chance that a draft is kept."""

    kept: float
    check_s: float = 0.0
    draft_s: float = 0.0
    plain_s: float = 1.0
    noise: float = 0.0

    def run(self, rule: Adaptive, steps: int, batch: int = 1, only: str | None = None) -> tuple[int, float, list[int]]:
        """(tokens, seconds, lookaheads) of `steps` steps."""
        tokens, seconds, chosen = 0, 0.0, []
        names = [only or f"r{index}" for index in range(batch)]
        for _ in range(steps):
            counts = rule.choose(names)
            emitted = []
            for count in counts:
                kept = 0
                while kept < count and random.random() < self.kept:
                    kept += 1
                emitted.append(kept + 1)
            rule.learn(names, counts, emitted)
            draft_s = max(counts) * self.draft_s
            verify_s = (self.plain_s + max(counts) * self.check_s) * (1 + self.noise * random.random())
            rule.time(batch, counts, emitted, draft_s, verify_s)
            tokens, seconds = tokens + sum(emitted), seconds + draft_s + verify_s
            chosen += counts
        return tokens, seconds, chosen


def test_expected_tokens_is_the_geometric_sum() -> None:
    for acceptance in (0.0, 0.3, 0.9):
        for count in (0, 1, 4, 8):
            assert expected_tokens(acceptance, count) == pytest.approx((1 - acceptance ** (count + 1)) / (1 - acceptance))
    assert expected_tokens(1.0, 4) == 5


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("batch", [1, 6])
def test_a_good_draft_runs_and_gains(batch: int, noise: float) -> None:
    rule = Adaptive(4, relative_cost=0.1)
    machine = Machine(kept=0.8, check_s=0.02, draft_s=0.1, noise=noise)
    tokens, seconds, chosen = machine.run(rule, 400, batch)
    plain = batch / (1 + noise / 2)
    assert rule.on and rule.reason.startswith("on: measured")
    assert tokens / seconds > 1.5 * plain
    assert rule.measured_gain == pytest.approx(tokens / seconds / plain, rel=0.3)
    best = max(range(9), key=lambda k: expected_tokens(0.8, k) / (1 + k * 0.12))
    late = [count for count in chosen[200 * batch :] if count]
    assert abs(sum(late) / len(late) - best) < 1.5


@pytest.mark.parametrize(
    "machine",
    [
        Machine(kept=0.1, check_s=0.05, draft_s=0.1),
        Machine(kept=0.9, check_s=1.0, draft_s=0.1),
        Machine(kept=0.7, check_s=0.02, draft_s=0.9),
    ],
    ids=["nothing is kept", "checking is dear", "drafting is dear"],
)
def test_a_bad_draft_is_switched_off(machine: Machine) -> None:
    """After 2,000 steps it cost at most 5 %, it says why, and it was tried again, ever more rarely."""
    rule = Adaptive(4, relative_cost=0.1)
    tokens, seconds, chosen = machine.run(rule, 2000)
    assert tokens / seconds > 0.95
    assert not rule.on and rule.reason.startswith("off: ") and "acceptance" in rule.reason
    tries = [step for step, count in enumerate(chosen) if count]
    assert tries[0] < 5 and tries[-1] > 2 * PAUSE_STEPS
    assert len(tries) < 60


def test_predicted_loss_is_never_tried_first() -> None:
    """A draft that reads as many bytes as the target cannot win, and no step is spent on finding out."""
    rule = Adaptive(4, relative_cost=1.0)
    assert rule.choose(["r"]) == [0]
    _, _, chosen = Machine(kept=0.7, draft_s=1.0).run(rule, PAUSE_STEPS - 2)
    assert not any(chosen) and "predicted" in rule.reason


def test_it_comes_back_when_the_draft_becomes_good() -> None:
    rule = Adaptive(4, relative_cost=0.1)
    Machine(kept=0.05, check_s=0.05, draft_s=0.1).run(rule, 300)
    assert not rule.on
    Machine(kept=0.9, check_s=0.02, draft_s=0.1).run(rule, 1500)
    assert rule.on and rule.measured_gain is not None and rule.measured_gain > 1.5


def test_requests_are_judged_one_by_one() -> None:
    """In one batch, the request whose drafts are kept looks ahead further than the one whose are not."""
    rule, far, near = Adaptive(4, relative_cost=0.05), 0, 0
    for step in range(200):
        counts = rule.choose(["good", "bad"])
        emitted = [counts[0] + 1, 1]
        rule.learn(["good", "bad"], counts, emitted)
        rule.time(2, counts, emitted, 0.05 * max(counts), 1 + 0.02 * max(counts))
        if step >= 50:
            far, near = far + counts[0], near + counts[1]
    assert far > 3 * near and rule.on
    rule.forget("bad")
    assert "bad" not in rule._requests


def test_a_measured_loss_switches_off_whatever_is_predicted() -> None:
    """Every second draft is kept whole, the others not at all: the formula, which takes keeps as independent, is too hopeful."""
    rule = Adaptive(4, relative_cost=0.0)
    reasons = set()
    for step in range(400):
        counts = rule.choose(["r"])
        emitted = [counts[0] + 1 if step % 4 == 0 else 1]
        rule.learn(["r"], counts, emitted)
        rule.time(1, counts, emitted, 0.0, 1.0 + (0.9 if counts[0] else 0.0) * (step % 4 != 0))
        reasons.add(" ".join(rule.reason.split(" ")[:2]))
    assert "off: measured" in reasons
