"""One streamed answer of an engine, and its figures beside the limit: what `generate` and its chat share.

engine + token ids ──answer──> text as it comes (write), Answer: tokens, reason, when each delivery came
Answer ──figures──> tokens/s, time to first token, bytes a token, least ms at the measured bandwidth, per cent reached, drafts
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..llm.engine.engine import Engine
    from ..llm.sampling import Sampling


@dataclass(slots=True)
class Answer:
    """What came, and when [s since it was asked for]."""

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    deliveries: list[tuple[float, int]] = field(default_factory=list)
    counted: dict[str, Any] = field(default_factory=dict)  # what speculation did

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Of everything after the first delivery, which waited for the prompt."""
        if len(self.deliveries) < 2:
            return None
        return sum(count for _, count in self.deliveries[1:]) / (self.deliveries[-1][0] - self.deliveries[0][0])


def answer(
    engine: Engine, prompt: Sequence[int], sampling: Sampling, write: Callable[[str], None], stopped: Callable[[], bool] = lambda: False
) -> Answer:
    """Ask, and hand on the text as it comes; `stopped` is asked after every step, so that no step is left half done."""
    from ..llm.bench import speculation

    before, begun = engine.stats(), time.perf_counter()
    made = Answer(len(prompt))
    name = engine.submit(list(prompt), sampling)
    while not engine.idle:
        for event in engine.step():
            if event.token_ids:
                made.deliveries.append((time.perf_counter() - begun, len(event.token_ids)))
            made.tokens += event.token_ids
            made.text += event.text
            made.logprobs += event.logprobs or []
            made.finish_reason, made.error = event.finish_reason or made.finish_reason, event.error or made.error
            write(event.text)
        if stopped() and made.finish_reason is None:
            engine.cancel(name)
            made.finish_reason = "cancelled"
    made.counted = speculation(before, engine.stats())
    return made


def figures(engine: Engine, made: Answer) -> dict[str, Any]:
    """The numbers of an answer; rates are None where there were too few tokens to have one."""
    from ..llm.limits import decode_limit, read_bandwidth

    mean_length = made.prompt_tokens + len(made.tokens) / 2
    loaded = engine.loaded
    limit = decode_limit(loaded.model, loaded.config, engine.cache, [mean_length], read_bandwidth(str(engine.device)))
    rate = made.decode_tokens_per_s
    beside = limit.to_json(rate or 0.0)
    if rate is None:
        beside["tokens_per_s"] = beside["percent_of_limit"] = None  # type: ignore[assignment]
    return {
        "prompt_tokens": made.prompt_tokens,
        "new_tokens": len(made.tokens),
        "first_token_ms": 1e3 * made.deliveries[0][0] if made.deliveries else None,
        **beside,
        **made.counted,
    }


def line(found: dict[str, Any]) -> str:
    """The figures for a reader."""
    from ..report.format import scaled, seconds, significant, size

    parts = [f"{found['new_tokens']} tokens"]
    if found["first_token_ms"] is not None:
        parts.append(f"first after {seconds(found['first_token_ms'] / 1e3)}")
    if found["tokens_per_s"] is not None:
        parts.append(f"{significant(found['tokens_per_s'])} tokens/s")
    least = (
        f"{size(found['bytes_per_token'])} a token, {seconds(found['limit_ms_per_token'] / 1e3)} at {scaled(found['bandwidth_bps'], 'B/s')}"
    )
    parts.append(least + (f": {found['percent_of_limit']:.0f} % of the limit" if found["percent_of_limit"] is not None else ""))
    if "draft" in found:
        parts.append(draft_line(found))
    return " · ".join(parts)


def draft_line(found: dict[str, Any]) -> str:
    """What speculation did, and why it is off where it is."""
    if not found["drafted"]:
        return f"draft {found['draft']}: nothing drafted ({found['reason']})"
    rates = f"{found['accepted']} of {found['drafted']} accepted ({found['acceptance_rate']:.0%})"
    off = "" if found["speculating"] else f"; {found['reason']}"
    return f"draft {found['draft']}: {rates}, {found['tokens_per_checked_step']:.2f} tokens a checked step{off}"
