"""Chunks put together are the answer as a whole: texts, reasons, logprobs, usage; of a model that says bytes, many of them no UTF-8."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.llm.engine.support import engine
from tests.llm.server.live import Live, live
from tests.support import full_or_tenth


def body(dice: random.Random) -> dict[str, Any]:
    """What holds text back: stop strings, halves of characters."""
    asked: dict[str, Any] = {
        "prompt": dice.choice(["héllo", "日本", ["a", "é"]]), "max_tokens": dice.choice([1, 2, 20, 60]), "n": dice.choice([1, 2, 3]),
        "temperature": dice.choice([0, 0.5, 1, 2]), "top_p": dice.choice([0.1, 0.9, 1]), "seed": dice.randrange(1000),
    }  # fmt: skip
    asked |= dice.choice([{"logprobs": 2}, {"echo": True}, {}])
    return asked | dice.choice([{}, {"stop": [*(chr(dice.randrange(32, 127)) * 2 for _ in range(8)), "\ufffd" * 3]}])


def joined(server: Live, asked: dict[str, Any]) -> tuple[dict[int, dict[str, Any]], Any]:
    """The choices of a stream, and its usage."""
    text = server.http.post("/v1/completions", json={**asked, "stream": True, "stream_options": {"include_usage": True}}).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            so_far = found.setdefault(choice["index"], {"text": "", "tokens": [], "text_offset": [], "finish_reason": None})
            so_far["text"] += choice["text"]
            so_far["finish_reason"] = choice["finish_reason"] or so_far["finish_reason"]
            for name in ("tokens", "text_offset"):
                so_far[name] += (choice["logprobs"] or {}).get(name, [])
    return found, chunks[-1]["usage"]


def test_a_stream_says_what_the_whole_answer_says() -> None:
    dice = random.Random(0)
    with live(engine(max_batch=4)) as server:
        for _ in range(full_or_tenth(300)):
            asked = body(dice)
            whole = server.http.post("/v1/completions", json=asked).json()
            found, usage = joined(server, asked)
            assert usage == whole["usage"] and len(found) == len(whole["choices"]), asked
            for choice in whole["choices"]:
                table = choice["logprobs"] or {"tokens": [], "text_offset": []}
                expected = {
                    "text": choice["text"],
                    "finish_reason": choice["finish_reason"],
                    **{k: table[k] for k in ("tokens", "text_offset")},
                }
                assert found[choice["index"]] == expected, asked
