"""What may be asked, in OpenAI's words; everything else is refused by name.

    POST /v1/completions       CompletionRequest   prompt: text, texts, token numbers, or lists of them
    POST /v1/chat/completions  ChatRequest         messages: roles and texts
    both                       Asked               length, randomness, stops, streaming; ours beside OpenAI's: top_k, min_p,
                                                   repetition_penalty, ignore_eos

`user` is accepted and not used. An unknown field is an error: a setting that is silently dropped is a wrong answer.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .limits import MOST_CHOICES, MOST_STOP_CHARACTERS, MOST_STOPS

StopText = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
MOST_MESSAGES = 1024


class Strict(BaseModel):
    """No unknown fields, no text where a number belongs, no NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = False
    """A last chunk with the usage of the whole request."""


class Asked(Strict):
    """What completions and chat share."""

    model: Annotated[str, Field(max_length=256)] | None = None
    """The served model's id; may be left out."""
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """1 by default, as OpenAI's; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Choice i of n uses seed + i."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    ignore_eos: bool = False

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Asked:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self


class CompletionRequest(Asked):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES)]
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[list[Annotated[list[Token], Field(min_length=1)]], Field(min_length=1, max_length=MOST_CHOICES)]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @model_validator(mode="after")
    def _echo_has_no_logprobs(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported: logprobs are of the output only")
        return self


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MOST_MESSAGES)]
    name: Annotated[str, Field(max_length=256)] | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Asked):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self
