"""Tokens to text as they come: whole characters only, and nothing that may still become a stop string.

token ──StreamDecoder──> characters ──> held ──┬── a stop string begins in it: all before it goes out, the request ends
                                               └── else the longest tail that a stop string begins with stays held
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class CharacterStream(Protocol):
    """FILES' StreamDecoder."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class TextOutput:
    """The text of one request while it grows."""

    def __init__(self, decoder: CharacterStream, stops: Sequence[str]) -> None:
        self.decoder, self.stops = decoder, tuple(stops)
        self.held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that can go out now; `stopped` says that a stop string was met."""
        return self._take(self.decoder.push(token))

    def finish(self) -> str:
        """What is left when no token follows: held text can't become a stop string any more."""
        if self.stopped:
            return ""
        out = self._take(self.decoder.flush())
        rest, self.held = self.held, ""
        return out + rest

    def _take(self, text: str) -> str:
        if not self.stops:
            return text
        self.held += text
        starts = [at for at in (self.held.find(stop) for stop in self.stops) if at >= 0]
        if starts:
            out, self.held, self.stopped = self.held[: min(starts)], "", True
            return out
        keep = max((_overlap(self.held, stop) for stop in self.stops), default=0)
        out, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return out


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with (not all of `stop`)."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
