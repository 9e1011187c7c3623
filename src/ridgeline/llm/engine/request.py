"""One request from arrival to its last token.

waiting ──admitted──> running (prompt in chunks, then a token a step) ──> finished (stop, length, cancelled, error)
   ^───preempted, its pages given back, its output kept────┘

tokens of the request = prompt + output;  the first `computed` of them have keys and values in `pages`
span(computed, count) = the tokens a step computes;  remaining == 1 and some output: it decodes
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ..sampling import Sampling

State = Literal["waiting", "running", "finished"]
FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(slots=True, eq=False)
class Request:
    """What a client asked for and how far it has come; times are seconds of time.monotonic()."""

    id: str
    prompt: list[int]
    sampling: Sampling
    client: str = ""
    arrived: float = field(default_factory=time.monotonic)
    output: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    """One entry an output token where logprobs were asked for; the Engine writes it."""
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose keys and values are in the cache."""
    state: State = "waiting"
    finish_reason: FinishReason | None = None
    error: str | None = None
    """What went wrong, where finish_reason is "error"."""
    admitted_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    token_times: list[float] = field(default_factory=list)
    """When each output token was committed."""
    cached_tokens: int = 0
    """Prompt tokens found in the cache when it was first admitted."""
    preemptions: int = 0
    order: int = -1
    """Place in the order of arrival; the Scheduler gives it."""
    published: int = 0
    """Leading pages already offered for sharing."""

    @property
    def length(self) -> int:
        """Tokens it has: prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def remaining(self) -> int:
        """Tokens it has that are not in the cache yet; 1 while it decodes."""
        return len(self.prompt) + len(self.output) - self.computed

    @property
    def decoding(self) -> bool:
        """Whether only its latest output token is to be computed."""
        return bool(self.output) and self.remaining == 1

    def span(self, start: int, count: int) -> list[int]:
        """Tokens start to start + count of prompt + output, without joining the two."""
        prompt = len(self.prompt)
        if start >= prompt:
            return self.output[start - prompt : start - prompt + count]
        part = self.prompt[start : start + count]
        return part if len(part) == count else part + self.output[: count - len(part)]
