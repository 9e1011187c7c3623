"""The terminal chat of `ridgeline generate --chat`: questions in, answers as they come, the history in between.

you> text ──history──chat template──> engine ──> answer, which joins the history
     /help  /reset  /quit             Ctrl-C stops the answer only, Ctrl-D leaves

When the history no longer fits the model's context, its oldest question and answer go, and a line says so.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from .answer import answer, figures, line
from .common import say

if TYPE_CHECKING:
    from ..llm.engine.engine import Engine
    from ..llm.sampling import Sampling

HELP = "/reset forgets what was said, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer"
PROMPT = "you> "


class Chat:
    """A conversation with one model."""

    def __init__(self, engine: Engine, sampling: Sampling, system: str | None = None) -> None:
        self.engine, self.sampling = engine, sampling
        self.first = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.first)

    def run(self) -> None:
        """Until /quit or the end of the input."""
        with suppress(ImportError):
            import readline  # noqa: F401  (line editing and history of input())
        say(f"{self.engine.loaded.name}: {HELP}")
        while (text := self._read()) is not None:
            if text == "/quit":
                return
            if text.startswith("/"):
                self._command(text)
            elif text:
                self.ask(text)

    def ask(self, text: str) -> None:
        """One question and its answer."""
        self.messages.append({"role": "user", "content": text})
        prompt = self._fitting()
        with interrupts() as stopped:
            made = answer(self.engine, prompt, self.sampling, _write, stopped)
        sys.stdout.write("\n")
        if made.error:
            say(f"error: {made.error}")
        self.messages.append({"role": "assistant", "content": made.text.strip()})
        say(("stopped · " if made.finish_reason == "cancelled" else "") + line(figures(self.engine, made)))

    def _fitting(self) -> list[int]:
        """The tokens of the conversation, without its oldest turns where they leave no room for an answer."""
        from ..core.errors import OptionError
        from ..llm.load import chat_ids

        most = self.engine.context
        room = min(self.sampling.max_tokens, most // 2)
        dropped = False
        while True:
            ids = chat_ids(self.engine.loaded, self.messages)
            if len(ids) + room <= most:
                break
            if len(self.messages) <= len(self.first) + 1:
                self.messages.pop()
                raise OptionError(f"a question of {len(ids)} tokens", why=f"the model holds {most}", do="ask something shorter")
            del self.messages[len(self.first) : len(self.first) + 2]
            dropped = True
        if dropped:
            say("the conversation is longer than the model's context: its beginning is forgotten")
        return ids

    def _command(self, text: str) -> None:
        if text == "/reset":
            self.messages = list(self.first)
            say("forgotten")
        else:
            say(HELP if text == "/help" else f"no command {text}: {HELP}")

    def _read(self) -> str | None:
        """A line of input; None at its end."""
        try:
            return input(PROMPT).strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            say("\n" + HELP)
            return ""


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C only sets what the function given tells: a step of the engine is never cut in two."""
    seen: list[int] = []
    try:
        before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    except ValueError:  # not the main thread: nothing is interrupted there
        yield lambda: False
        return
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
