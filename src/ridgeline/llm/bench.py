"""How fast an engine is, beside the limit: some sequences at once, and many requests as a server meets them.

    bench_decode   B prompts of P random tokens, N new tokens each ──> time to first token, prefill and decode tokens/s,
                   bytes a token, least ms at the measured bandwidth, per cent reached, what the estimate predicted
    bench_serving  R requests of mixed lengths, all at once or at a rate ──> output tokens/s, time to first token and gaps p50/p99,
                   and the same requests (or some of them) one after another: how many times faster together

Prompts are random and no two begin alike, so no page is shared; the end-of-text token is ignored, so every request gets all its
tokens. Times are taken here, after each step of the engine, when its tokens are on the host. A step may deliver several tokens of a
request: `gap` is the time between two deliveries, `inter_token` that time divided among the tokens that came.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from ..core.errors import OptionError
from .limits import decode_limit, read_bandwidth
from .predict import predict
from .sampling import Sampling

if TYPE_CHECKING:
    from ..target.load import Target
    from .engine.engine import Engine

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a load."""

    prompt: tuple[int, ...]
    new: int
    after_s: float = 0.0  # since the load began


@dataclass(slots=True)
class Served:
    """When a request's tokens came, in seconds since the load began."""

    job: Job
    arrived_s: float
    deliveries: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens)
    finish_reason: str | None = None

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.deliveries)

    @property
    def first_s(self) -> float:
        return self.deliveries[0][0] - self.arrived_s

    def gaps(self) -> list[tuple[float, int]]:
        """(seconds since the delivery before, tokens) of each delivery but the first."""
        pairs = zip(self.deliveries, self.deliveries[1:], strict=False)
        return [(after[0] - before[0], after[1]) for before, after in pairs]


def jobs(
    count: int, prompt: tuple[int, int], new: int, vocab: int, rate: float | None = None, seed: int = 0, texts: int = 0
) -> list[Job]:  # fmt: skip
    """Requests with lengths drawn evenly from `prompt`; `rate` a second on average (Poisson), None: all at once.

    The seed decides lengths and times. Another number for `texts` gives other tokens of the same lengths, which share no page.
    """
    draw, tokens = random.Random(seed), random.Random(f"{seed} {texts}")
    made, at = [], 0.0
    for _ in range(count):
        length = draw.randint(*prompt)
        made.append(Job(tuple(tokens.choices(range(vocab), k=length)), new, at))
        at += draw.expovariate(rate) if rate else 0.0
    return made


def serve(engine: Engine, load: Sequence[Job], sampling: Sampling | None = None) -> tuple[list[Served], float]:
    """Run a load to its end; (one record a request, seconds in all)."""
    begun = time.perf_counter()
    waiting = sorted(load, key=lambda job: job.after_s)
    records: dict[str, Served] = {}
    while waiting or not engine.idle:
        now = time.perf_counter() - begun
        while waiting and waiting[0].after_s <= now:
            job = waiting.pop(0)
            chosen = sampling or Sampling(max_tokens=job.new, ignore_eos=True)
            records[engine.submit(list(job.prompt), chosen)] = Served(job, max(job.after_s, 0.0))
        if engine.idle:
            time.sleep(min(max(waiting[0].after_s - now, 0.0), 0.01))
            continue
        for event in engine.step():
            record = records[event.request_id]
            if event.token_ids:
                record.deliveries.append((time.perf_counter() - begun, len(event.token_ids)))
            record.finish_reason = event.finish_reason or record.finish_reason
    return list(records.values()), time.perf_counter() - begun


def percentile(values: Sequence[float], share: float) -> float:
    """The least of them that a `share` of them, or more, do not exceed."""
    rank = math.ceil(share * len(values) - 1e-9)  # 0.07 · 100 is more than 7
    return sorted(values)[max(rank, 1) - 1]


def bench_decode(
    engine: Engine, *, prompt: int = 128, new: int = 128, batch: int = 1, repeats: int = 3, warm_up: bool = True,
    target: Target | None = None, say: Say = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Prefill and decode of `batch` sequences at once: the median of `repeats` runs, after one that warms up."""
    _check(engine, prompt, new, batch)
    vocab, runs = engine.loaded.config.vocab, []
    before = engine.stats()
    for repeat in range(-1 if warm_up else 0, repeats):
        say(f"run {repeat + 1} of {repeats}" if repeat >= 0 else "warm-up")
        records, _ = serve(engine, jobs(batch, (prompt, prompt), new, vocab, texts=time.perf_counter_ns()))  # never seen before
        first = max(record.deliveries[0][0] for record in records)
        last = max(record.deliveries[-1][0] for record in records)
        # what came while others were still in prefill is not counted as decode
        counted = sum(count for record in records for at, count in record.deliveries if at > first)
        runs.append((min(record.first_s for record in records), first, counted / (last - first) if last > first else 0.0, records))
    timed = runs[-repeats:]
    tokens_per_s = median(run[2] for run in timed)
    limit = decode_limit(
        engine.loaded.model, engine.loaded.config, engine.cache, [prompt + new / 2] * batch, read_bandwidth(str(engine.device))
    )
    gaps = [gap for run in timed for record in run[3] for gap in record.gaps()]
    first_s = median(run[1] for run in timed)
    row: dict[str, Any] = {
        "case": "decode", "model": engine.loaded.name, "prompt": prompt, "new": new, "batch": batch, "repeats": repeats,
        "first_token_ms": 1e3 * median(run[0] for run in timed), "prefill_ms": 1e3 * first_s,
        "prefill_tokens_per_s": batch * prompt / first_s,
        "runs_tokens_per_s": [run[2] for run in timed], "ms_per_token": 1e3 / tokens_per_s * batch, **limit.to_json(tokens_per_s),
        **_gap_figures(gaps), **speculation(before, engine.stats()),
    }  # fmt: skip
    if target is not None:
        say("prediction")
        row["predicted"] = predict(engine.loaded, target, prompt=prompt, new=new, batch=batch, measured=row)
    return row


def bench_serving(
    engine: Engine, *, requests: int = 256, prompt: tuple[int, int] = (128, 1024), new: int = 128, rate: float | None = None,
    alone: int | None = None, seed: int = 0, say: Say = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """A load of `requests`; then `alone` of them (None: all, 0: none) one after another, for the ratio."""
    _check(engine, prompt[1], new, 1)
    vocab = engine.loaded.config.vocab
    say("warm-up")
    serve(engine, jobs(min(requests, 8), prompt, min(new, 16), vocab, seed=seed, texts=1))
    say(f"{requests} requests")
    before = engine.stats()
    records, seconds = serve(engine, jobs(requests, prompt, new, vocab, rate, seed))
    after = engine.stats()
    tokens = sum(record.tokens for record in records)
    first = [record.first_s for record in records if record.deliveries]
    row: dict[str, Any] = {
        "case": "serving", "model": engine.loaded.name, "requests": requests, "prompt": list(prompt), "new": new, "rate": rate,
        "seconds": seconds, "output_tokens": tokens, "prompt_tokens": sum(len(record.job.prompt) for record in records),
        "output_tokens_per_s": tokens / seconds, "unfinished": sum(record.tokens != record.job.new for record in records),
        "first_token_ms": {"p50": 1e3 * percentile(first, 0.5), "p99": 1e3 * percentile(first, 0.99)},
        **_gap_figures([gap for record in records for gap in record.gaps()]), **speculation(before, after),
    }  # fmt: skip
    if alone != 0:
        row["alone"] = _alone(engine, jobs(requests, prompt, new, vocab, seed=seed, texts=2)[: alone or requests], say)
        row["times_faster"] = row["output_tokens_per_s"] / row["alone"]["output_tokens_per_s"]
    return row


def _alone(engine: Engine, load: Sequence[Job], say: Say) -> dict[str, float]:
    """Requests of the same lengths, each when the one before is done."""
    seconds = tokens = 0.0
    for index, job in enumerate(load):
        say(f"alone: {index + 1} of {len(load)}")
        records, spent = serve(engine, [Job(job.prompt, job.new)])
        seconds, tokens = seconds + spent, tokens + records[0].tokens
    return {"requests": len(load), "seconds": seconds, "output_tokens_per_s": tokens / seconds}


def _gap_figures(gaps: Sequence[tuple[float, int]]) -> dict[str, Any]:
    if not gaps:
        return {}
    each = [gap / count for gap, count in gaps for _ in range(count)]
    between = [gap for gap, _ in gaps]
    return {
        "inter_token_ms": {"p50": 1e3 * percentile(each, 0.5), "p99": 1e3 * percentile(each, 0.99)},
        "gap_ms": {"p50": 1e3 * percentile(between, 0.5), "p99": 1e3 * percentile(between, 0.99)},
    }


def speculation(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What a draft did between two readings of an engine's stats; nothing where there is no draft."""
    if "speculation" not in after:
        return {}
    now, old = after["speculation"], before["speculation"]
    drafted, accepted, steps = (now[name] - old[name] for name in ("drafted", "accepted", "verified_steps"))
    return {
        "draft": now["draft"],
        "drafted": drafted,
        "accepted": accepted,
        "rejected": drafted - accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "tokens_per_checked_step": (accepted + steps) / steps if steps else None,
        "speculating": now["speculating"],
        "reason": now["reason"],
    }


def _check(engine: Engine, prompt: int, new: int, batch: int) -> None:
    if min(prompt, batch) < 1 or new < 2:
        raise OptionError(
            f"prompt {prompt}, new {new}, batch {batch}",
            why="a rate needs two new tokens",
            do="give --prompt, --batch from 1 and --new from 2",
        )
    most = engine.context
    if prompt + new > most:
        raise OptionError(f"{prompt} + {new} tokens", why=f"{engine.loaded.name} holds {most}", do="give a smaller --prompt or --new")
