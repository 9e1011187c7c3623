"""Counters and histograms in Prometheus' text form (version 0.0.4).

    gate ──observe(route, code)──┐
    worker ──tokens, times───────┼──> Metrics ──render(engine stats)──> text of GET /metrics
    app ──prompt tokens──────────┘

Labels are routes of ours and status codes only, so that their number is bounded whatever clients send.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BETWEEN_TOKENS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
GAUGES = {
    "running": ("requests_running", "Requests that are being generated."),
    "waiting": ("requests_waiting", "Requests in line."),
    "free_pages": ("kv_pages_free", "Pages of the key-value cache that can be given out."),
    "total_pages": ("kv_pages", "Pages of the key-value cache."),
}
TOTALS = {
    "steps": ("engine_steps_total", "Steps of the engine."),
    "prefix_hits": ("prefix_hits_total", "Pages found in the cache instead of computed."),
    "drafted": ("drafted_tokens_total", "Tokens proposed by the draft."),
    "accepted": ("accepted_tokens_total", "Drafted tokens the model accepted."),
    "rejected": ("rejected_tokens_total", "Drafted tokens the model rejected."),
    "preemptions": ("preemptions_total", "Requests put back in line for want of pages."),
}


class Histogram:
    """Cumulative buckets, a sum and a count."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def lines(self, name: str) -> list[str]:
        total, lines = 0, []
        for bound, count in zip([*(f"{bound:g}" for bound in self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self.sum!r}", f"{name}_count {total}"]


class Metrics:
    """What happened since the server started; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._counts: Counter[str] = Counter()
        self._first_token_s = Histogram(FIRST_TOKEN_S)
        self._between_tokens_s = Histogram(BETWEEN_TOKENS_S)

    def observe(self, route: str, code: int) -> None:
        with self._lock:
            self._requests[route, code] += 1

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def first_token(self, seconds: float) -> None:
        with self._lock:
            self._first_token_s.observe(seconds)

    def between_tokens(self, seconds: float, times: int) -> None:
        with self._lock:
            self._between_tokens_s.observe(seconds, times)

    def render(self, stats: Mapping[str, Any]) -> str:
        """The whole page; `stats` is the engine's own account."""
        with self._lock:
            lines = _head("requests_total", "counter", "Answers by route and status code.")
            lines += [f'ridgeline_requests_total{{route="{r}",code="{c}"}} {n}' for (r, c), n in sorted(self._requests.items())]
            for name, about in COUNTED.items():
                lines += [*_head(name, "counter", about), f"ridgeline_{name} {self._counts[name]}"]
            for histogram, name, about in (
                (self._first_token_s, "time_to_first_token_seconds", "From the request's arrival to its first token."),
                (self._between_tokens_s, "inter_token_seconds", "Between one token of a request and the next."),
            ):
                lines += [*_head(name, "histogram", about), *histogram.lines(f"ridgeline_{name}")]
        for kind, table in (("gauge", GAUGES), ("counter", TOTALS)):
            for key, (name, about) in table.items():
                if isinstance(value := stats.get(key), int | float):
                    lines += [*_head(name, kind, about), f"ridgeline_{name} {value}"]
        return "\n".join(lines) + "\n"


COUNTED = {
    "prompt_tokens_total": "Tokens of prompts taken in.",
    "generated_tokens_total": "Tokens given out.",
    "cancelled_total": "Choices ended early: hang-ups, deadlines, drains.",
    "step_failures_total": "Steps of the engine that failed.",
}


def _head(name: str, kind: str, about: str) -> list[str]:
    return [f"# HELP ridgeline_{name} {about}", f"# TYPE ridgeline_{name} {kind}"]
