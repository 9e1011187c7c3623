"""OpenAI's objects, built from events: whole answers, and the chunks of a stream.

    Style (completion | chat): names, ids, how a choice and its logprobs look
      whole(outcomes, usage) ──> dict         first(), piece(event), last(usage) ──> dicts of chunks

Logprobs are the model's own (natural logarithm, before temperature and penalties); -9999 stands for minus infinity.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..load import StreamDecoder, TextTokenizer

if TYPE_CHECKING:
    from ..engine.options import Event
    from ..sampling import TokenLogprob

LEAST_LOGPROB = -9999.0


@dataclass(slots=True)
class Outcome:
    """One choice as it grows."""

    text: str
    tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, event: Event) -> None:
        self.text += event.text
        self.tokens += len(event.token_ids)
        self.logprobs += event.logprobs or []
        self.finish_reason = event.finish_reason


@dataclass(slots=True)
class Place:
    """How many characters of a choice's text came before its next token; tokens that share a character begin where it does."""

    decoder: StreamDecoder
    characters: int = 0

    def passed(self, token: int) -> int:
        """Where this token begins."""
        begin = self.characters
        self.characters += len(self.decoder.push(token))
        return begin


def usage_of(prompt_tokens: int, outcomes: Sequence[Outcome]) -> dict[str, int]:
    made = sum(outcome.tokens for outcome in outcomes)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": made, "total_tokens": prompt_tokens + made}


class Style:
    """How one answer is written; made anew for each request."""

    prefix = whole_kind = chunk_kind = ""

    def __init__(self, model: str, tokenizer: TextTokenizer, logprobs: bool) -> None:
        self._tokenizer, self._logprobs = tokenizer, logprobs
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, outcomes: Sequence[Outcome], usage: dict[str, int]) -> dict[str, Any]:
        choices = [self._choice(index, outcome) for index, outcome in enumerate(outcomes)]
        return {**self._head, "object": self.whole_kind, "choices": choices, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None, with_usage: bool = False) -> dict[str, Any]:
        """With include_usage every chunk has the field, null in all but the last."""
        return {**self._head, "object": self.chunk_kind, "choices": choices} | ({"usage": usage} if with_usage else {})

    def opening(self, echoes: Sequence[str]) -> list[dict[str, Any]]:
        """The choices of chunks that come before any token."""
        raise NotImplementedError

    def piece(self, index: int, event: Event) -> dict[str, Any]:
        """The choice of one chunk."""
        raise NotImplementedError

    def _choice(self, index: int, outcome: Outcome) -> dict[str, Any]:
        raise NotImplementedError

    def _token(self, id: int) -> bytes:
        return self._tokenizer.decode_bytes([id])

    def _text(self, id: int) -> str:
        return self._token(id).decode("utf-8", "replace")


class CompletionStyle(Style):
    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def opening(self, echoes: Sequence[str]) -> list[dict[str, Any]]:
        return [_completion_choice(index, echo, None, None) for index, echo in enumerate(echoes) if echo]

    def __init__(self, model: str, tokenizer: TextTokenizer, logprobs: bool) -> None:
        super().__init__(model, tokenizer, logprobs)
        self._places: dict[int, Place] = {}  # of the choices of a stream

    def piece(self, index: int, event: Event) -> dict[str, Any]:
        place = self._places.setdefault(index, Place(StreamDecoder(self._tokenizer)))
        return _completion_choice(index, event.text, self._table(event.logprobs or [], place), event.finish_reason)

    def _choice(self, index: int, outcome: Outcome) -> dict[str, Any]:
        table = self._table(outcome.logprobs, Place(StreamDecoder(self._tokenizer)))
        return _completion_choice(index, outcome.text, table, outcome.finish_reason)

    def _table(self, entries: Sequence[TokenLogprob], place: Place) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        offsets = [place.passed(entry.token) for entry in entries]
        return {
            "tokens": [self._text(entry.token) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            # worst first: of tokens that are spelled alike the likeliest stays
            "top_logprobs": [{self._text(token): _finite(value) for token, value in reversed(entry.top)} for entry in entries],
            "text_offset": offsets,
        }


class ChatStyle(Style):
    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, echoes: Sequence[str]) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for index in range(len(echoes))]

    def piece(self, index: int, event: Event) -> dict[str, Any]:
        delta = {"content": event.text} if event.text else {}
        return {"index": index, "delta": delta, "logprobs": self._table(event.logprobs or []), "finish_reason": event.finish_reason}

    def _choice(self, index: int, outcome: Outcome) -> dict[str, Any]:
        message = {"role": "assistant", "content": outcome.text}
        return {"index": index, "message": message, "logprobs": self._table(outcome.logprobs), "finish_reason": outcome.finish_reason}

    def _table(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [self._entry(e.token, e.logprob) | {"top_logprobs": [self._entry(*pair) for pair in e.top]} for e in entries]
        return {"content": content}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._text(token), "logprob": _finite(logprob), "bytes": list(self._token(token))}


def _completion_choice(index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
