"""What speculation gains, and where it loses: tokens a second with and without each draft, one sequence, greedy.

    prompt kind × draft × rule (lookahead 4, or adaptive) ──rounds, all variants in turn──> median ratio to plain of the same round
    python benchmarks/llm_speculation.py --model smollm2-135m [--drafts ngram,layers:15,weights:int8] [--device cpu] [--tokens 128]

Drafts: as `make_draft` names them, and weights:int8 or weights:int4, the same model with smaller weights. Prompts: "copy" asks to repeat a
text, which n-grams are made for; "free" does not. Every row says whether the text was the plain one: it must be in float32; in bfloat16 a
tie may fall the other way, as a pass over five tokens adds up in another order than a pass over one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import write_results

from ridgeline.llm.engine.engine import Engine
from ridgeline.llm.engine.options import Completion, EngineOptions
from ridgeline.llm.load import Loaded, chat_ids, load_model
from ridgeline.llm.sampling import Sampling
from ridgeline.llm.speculate import Draft, ModelDraft, make_draft
from ridgeline.measure.environment import machine_name

PASSAGE = (
    "The river runs from the high lake through nine locks to the harbour. Each lock has a keeper, each keeper has a bell, and each bell "
    "has a name. When a boat comes down the river the keeper of the first lock rings, the keeper of the second lock answers, and so on "
    "down to the harbour, where a clerk writes the name of the boat, the hour, and the number of the lock in a green book."
)
PROMPTS = {
    "copy": f"Repeat this text word for word, twice:\n\n{PASSAGE}",
    "free": "Tell me about a day in the life of a lighthouse keeper.",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafts", default="ngram,layers:10,layers:0:30:2,weights:int8")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's choice")
    parser.add_argument("--label", default=None, help="of the results file; default: the device")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    loaded = load_model(options.model, dtype=options.dtype, device=options.device)
    engines = {("none", "plain"): engine_of(loaded, None, options)}
    for name in options.drafts.split(","):
        for rule in ("fixed", "adaptive"):
            engines[(name, rule)] = engine_of(loaded, draft_of(name, loaded, options), options, rule == "adaptive")
    rows = [row for kind in PROMPTS for row in compare(kind, engines, loaded, options)]
    machine = {"name": machine_name(options.device), "threads": torch.get_num_threads()}
    print(write_results("llm", "speculation", options.label or options.device, machine, rows, options.out))


def draft_of(name: str, loaded: Loaded, options: argparse.Namespace) -> Draft:
    kind, _, weights = name.partition(":")
    if kind != "weights":
        return make_draft(name, loaded)
    return ModelDraft(load_model(options.model, dtype=options.dtype, device=options.device, weights=weights).model)


def engine_of(loaded: Loaded, draft: Draft | None, options: argparse.Namespace, adaptive: bool = False) -> Engine:
    context = min(loaded.config.context, 2048)
    settings = {"draft": draft, "lookahead": options.lookahead, "adaptive": adaptive, "context": context, "pages": -(-context // 16)}
    return Engine(loaded, EngineOptions(max_batch=4, sharing=False, **settings))


def compare(kind: str, engines: dict[tuple[str, str], Engine], loaded: Loaded, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a variant. Rates are of decoding alone: from the first token to the last."""
    text = PROMPTS[kind]
    prompt = chat_ids(loaded, [{"role": "user", "content": text}]) if loaded.chat_template else loaded.tokenizer.encode(text)
    rates: dict[tuple[str, str], list[float]] = {variant: [] for variant in engines}
    last: dict[tuple[str, str], Completion] = {}
    counted: dict[tuple[str, str], dict[str, Any]] = {}
    for round_number in range(options.rounds + 1):
        for variant, engine in engines.items():
            before = counters(engine)
            last[variant], rate = run(engine, prompt, options.tokens)
            if round_number:  # the first warms up; the adaptive rule keeps what it learned, as in a server
                rates[variant].append(rate)
            counted[variant] = {name: value - before[name] for name, value in counters(engine).items()}
    plain = ("none", "plain")
    rows = []
    for variant, engine in engines.items():
        ratios = [ours / theirs for ours, theirs in zip(rates[variant], rates[plain], strict=True)]
        rows.append(row_of(kind, variant, engine, counted[variant], rates[variant], ratios, last[variant].tokens == last[plain].tokens))
        rows[-1] |= {"model": options.model, "dtype": options.dtype, "prompt_tokens": len(prompt), "tokens": len(last[variant].tokens)}
        print({name: round(value, 3) if isinstance(value, float) else value for name, value in rows[-1].items()}, flush=True)
    return rows


def counters(engine: Engine) -> dict[str, int]:
    if engine.speculator is None:
        return {}
    found = engine.speculator.counters
    return {name: getattr(found, name) for name in ("drafted", "accepted", "emitted", "verified_steps", "plain_steps")}


def run(engine: Engine, prompt: list[int], tokens: int) -> tuple[Completion, float]:
    began = time.perf_counter()
    done = engine.generate([prompt], Sampling(max_tokens=tokens, ignore_eos=True))[0]
    decode_s = time.perf_counter() - began - (done.timings.first_token_s or 0.0)
    return done, (len(done.tokens) - 1) / decode_s


def row_of(
    kind: str, variant: tuple[str, str], engine: Engine, counted: dict[str, Any], rates: list[float], ratios: list[float], same: bool
) -> dict[str, Any]:
    """Counters are of the last round, reasons as they stand after it."""
    row: dict[str, Any] = {
        "prompt": kind,
        "draft": variant[0],
        "rule": variant[1],
        "tokens_per_s": statistics.median(rates),
        "ratio_to_plain": statistics.median(ratios),
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
        "same_text": same,
    }
    if engine.speculator is not None:
        drafted = counted["drafted"]
        steps = counted["verified_steps"] + counted["plain_steps"]
        row |= {
            "drafted": drafted,
            "accepted": counted["accepted"],
            "acceptance_rate": counted["accepted"] / drafted if drafted else None,
            "tokens_per_step": (counted["emitted"] + counted["plain_steps"]) / max(1, steps),
            "relative_cost_predicted": engine.speculator.draft.relative_cost,
            "reason": engine.speculator.stats()["reason"],
        }
    return row


if __name__ == "__main__":
    main()
