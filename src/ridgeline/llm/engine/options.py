"""What an engine is told, and what it says: options in, events and completions out.

EngineOptions ──> Engine ──step──> Event: the tokens one request got in one step, and how it ended if it did
                         ──generate──> Completion: everything about one request, with its times [s]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...core.errors import OptionError
from ..sampling import TokenLogprob

if TYPE_CHECKING:
    from ..speculate.draft import Draft


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How much an engine holds and how it batches; None: chosen for the device."""

    max_batch: int = 64
    """Most requests computed in one step."""
    max_step_tokens: int | None = None
    """Most tokens computed in one step: prompts go in by chunks of what decoding requests leave of it; None: 2048 on a GPU, else 512."""
    max_waiting: int = 1024
    """Most requests in line; more are refused as Busy."""
    max_wait_s: float = 0.0
    """How long a step may wait for more requests to fill its batch."""
    fair: bool = True
    """Clients take turns; False: first come, first served."""
    page_size: int = 16
    pages: int | None = None
    kv_memory_bytes: int | None = None
    """None: on a GPU 90 % of what the weights leave, else a quarter of the free memory and at most 2 GiB."""
    kv_int8: bool = False
    sharing: bool = True
    """Prompts that begin alike share the pages of what is alike."""
    context: int | None = None
    """Most tokens of prompt and output together; None: what the model was made for."""
    graphs: str = "auto"
    """Decode steps as CUDA graphs: "auto" (on a GPU), "on", "off"."""
    burst: int | None = None
    """Most decode steps between two visits to the host; None: on a GPU as many as fit 25 ms, at most 16, else 1. The text is the same."""
    draft: Draft | None = None
    lookahead: int = 4
    adaptive: bool = True
    """Let the measured acceptance shorten the lookahead or switch the draft off."""
    seed: int | None = None
    """Where the seeds of requests without one come from; None: the operating system."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_step_tokens", "max_waiting", "page_size", "pages", "kv_memory_bytes", "context", "burst"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise OptionError(f"{name} = {value!r}", why=f"{name} must be a whole number of at least 1", do=f"give another {name}")
        if self.graphs not in ("auto", "on", "off"):
            raise OptionError(f"graphs = {self.graphs!r}", why="not a known setting", do='give "auto", "on" or "off"')
        if self.lookahead < 1:
            raise OptionError(f"lookahead = {self.lookahead}", why="a draft proposes at least one token", do="give 1 or more, or no draft")


@dataclass(slots=True)
class Event:
    """What one step gave one request. `text` is whole characters only, and never part of a stop string."""

    request_id: str
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    """None: it goes on; else "stop", "length", "cancelled" or "error"."""
    error: str | None = None


@dataclass(slots=True)
class Timings:
    """Seconds since the request was submitted, and between its tokens: those that came together share the time since the last before."""

    queued_s: float = 0.0
    first_token_s: float | None = None
    total_s: float = 0.0
    token_gaps_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Completion:
    """One finished request."""

    text: str
    tokens: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob] | None
    timings: Timings
    seed: int
    """With the same settings this seed gives the same text again, also beside other requests."""
    prompt_tokens: int
    error: str | None = None
    request_id: str = ""
