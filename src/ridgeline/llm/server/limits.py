"""Every bound the server holds its clients to.

headers (bytes, seconds) ──> body (bytes, seconds, depth) ──> prompt and output (tokens, choices) ──> line (waiting) ──> seconds in all
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...core.errors import OptionError

MOST_STOPS = 16
MOST_STOP_CHARACTERS = 256
MOST_CHOICES = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client, and all of them together, may ask for."""

    connections: int = 900
    """Open sockets; one more is closed at once."""
    header_bytes: int = 16384
    header_seconds: float = 10.0
    """From the first byte to the end of the headers, and for a new connection to say anything."""
    body_bytes: int = 1 << 20
    body_seconds: float = 20.0
    json_depth: int = 16
    json_brackets: int = 20_000
    """Opening brackets in a body; keeps the count of its depth cheap."""
    prompt_tokens: int | None = None
    """None: what the model's context leaves."""
    max_tokens: int = 4096
    """Output tokens a choice."""
    choices: int = MOST_CHOICES
    """n times the number of prompts."""
    waiting: int = 64
    """Choices in line behind those that run; more are answered 429."""
    request_seconds: float = 300.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            low = 0 if field.name in ("waiting", "drain_seconds") else 1e-3
            if value is not None and not low <= value < 2**40:
                raise OptionError(f"{field.name} = {value}", why=f"must be at least {low:g}", do="give a larger number")
