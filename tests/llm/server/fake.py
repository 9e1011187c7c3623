"""An engine without a model: it batches, waits, fills and frees pages and ends as the real one does, and says letters.

submit ──> waiting ──slots free──> running: a token a step, `delay_s` a step ──> finished; pages = ceil(tokens / PAGE)

Token number t stands for byte t. The reply to a prompt is the alphabet, shifted by the prompt's length and the seed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ridgeline.core.errors import OptionError
from ridgeline.llm.engine.options import Event
from ridgeline.llm.load import byte_tokenizer
from ridgeline.llm.sampling import Sampling, TokenLogprob

PAGE = 16
CONTEXT = 512


@dataclass
class Sequence:
    prompt: list[int]
    sampling: Sampling
    client: str
    text: str = ""
    tokens: int = 0

    @property
    def pages(self) -> int:
        return -(-(len(self.prompt) + self.tokens) // PAGE)


@dataclass
class FakeEngine:
    slots: int = 4
    delay_s: float = 0.0
    total_pages: int = 4096
    fail_steps: int = 0
    waiting: dict[str, Sequence] = field(default_factory=dict)
    running: dict[str, Sequence] = field(default_factory=dict)
    loaded: Any = None
    context: int = CONTEXT
    hold_s: float = 0.0
    steps: int = 0
    clients: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        config = SimpleNamespace(context=CONTEXT, vocab=256)
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
        self.loaded = SimpleNamespace(
            tokenizer=byte_tokenizer(), config=config, name="/models/fake", chat_template=template, eos=(), bos=None, model=None
        )

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def submit(self, prompt: list[int], sampling: Sampling, *, client: str = "", id: str | None = None) -> str:
        assert id is not None
        if prompt[:1] == [0]:
            raise OptionError("prompt begins with 0", why="this engine does not take it", do="begin with another")
        self.clients.add(client)
        self.waiting[id] = Sequence(prompt, sampling, client)
        return id

    def cancel(self, id: str) -> bool:
        return self.running.pop(id, None) is not None or self.waiting.pop(id, None) is not None

    def step(self) -> list[Event]:
        time.sleep(self.delay_s)
        self.steps += 1
        if self.fail_steps:
            self.fail_steps -= 1
            raise RuntimeError("planted failure in /srv/secret/engine.py at 0x7f00deadbeef")
        while self.waiting and len(self.running) < self.slots:
            id = next(iter(self.waiting))
            self.running[id] = self.waiting.pop(id)
        return [self._advance(id, sequence) for id, sequence in list(self.running.items())]

    def _advance(self, id: str, sequence: Sequence) -> Event:
        sampling = sequence.sampling
        token = ord("a") + (len(sequence.prompt) + sequence.tokens + (sampling.seed or 0)) % 26
        sequence.tokens += 1
        text, reason = chr(token), "length" if sequence.tokens >= sampling.max_tokens else None
        if any((sequence.text + text).endswith(stop) for stop in sampling.stop):
            text, reason = "", "stop"
        sequence.text += text
        logprobs = None
        if sampling.logprobs is not None:
            top = tuple((ord("a") + place, -1.0 - place) for place in range(sampling.logprobs))
            logprobs = [TokenLogprob(token, -0.5, top)]
        if reason:
            del self.running[id]
        return Event(id, [token], text, logprobs, reason)

    def stats(self) -> dict[str, Any]:
        used = sum(sequence.pages for sequence in self.running.values())
        return {"running": len(self.running), "waiting": len(self.waiting), "free_pages": self.total_pages - used,
                "total_pages": self.total_pages, "drafted": 0, "accepted": 0, "rejected": 0, "steps": self.steps}  # fmt: skip


def main() -> None:
    """Serve a fake engine until a signal: python -m tests.llm.server.fake SLOTS WAITING DELAY_S."""
    import logging
    import sys

    from ridgeline.llm.server.app import ServerOptions
    from ridgeline.llm.server.limits import Limits
    from ridgeline.llm.server.run import serve

    logging.basicConfig(format="%(message)s")
    slots, waiting, delay_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    serve(FakeEngine(slots=slots, delay_s=delay_s), ServerOptions(slots=slots, limits=Limits(waiting=waiting)), port=0)


if __name__ == "__main__":
    main()
