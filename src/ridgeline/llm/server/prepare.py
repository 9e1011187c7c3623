"""From what was asked to what the engine takes: token numbers and a Sampling for every choice.

    prompt or messages ──tokenizer, on a thread of its own──> ids ──lengths against context and limits──> [(ids, Sampling)] x n

A long prompt is cut into tokens off the event loop, so that /health and running streams do not wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from ...core.errors import OptionError, RidgelineError
from ..load import Loaded, chat_ids
from ..sampling import Sampling
from .errors import ApiError, refused
from .limits import Limits
from .schemas import Asked, ChatRequest, CompletionRequest

COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for completions; chat's is what the context leaves."""


class Prepared(NamedTuple):
    """The choices of one request, prompt by prompt, n of each."""

    choices: list[tuple[list[int], Sampling]]
    echoes: list[str]
    """What each choice's text begins with."""
    prompt_tokens: int


class Preparer:
    """Checks lengths and builds samplings for one model."""

    def __init__(self, loaded: Loaded, limits: Limits, context: int) -> None:
        self._loaded, self._limits, self._context = loaded, limits, context
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ridgeline-tokens")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def completion(self, asked: CompletionRequest) -> Prepared:
        given = asked.prompt
        prompts = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        self._check_choices(len(prompts) * (asked.n or 1))
        encoded = [await self._encode(prompt) for prompt in prompts]
        decode = self._loaded.tokenizer.decode
        pairs = zip(prompts, encoded, strict=True)
        echoes = [(prompt if isinstance(prompt, str) else decode(ids)) if asked.echo else "" for prompt, ids in pairs]
        return self._prepared(asked, encoded, echoes, asked.max_tokens, COMPLETION_TOKENS, asked.logprobs)

    async def chat(self, asked: ChatRequest) -> Prepared:
        self._check_choices(asked.n or 1)
        messages = [{"role": "system" if m.role == "developer" else m.role, "content": m.text} for m in asked.messages]
        ids = await self._off_loop(lambda: chat_ids(self._loaded, messages), "messages")
        wanted = asked.max_completion_tokens or asked.max_tokens
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        return self._prepared(asked, [ids], [""], wanted, self._limits.max_tokens, logprobs)

    def _check_choices(self, count: int) -> None:
        if count > self._limits.choices:
            wrong = f"n times the number of prompts is {count}, more than {self._limits.choices}"
            raise ApiError(400, wrong, code="too_many_choices", param="n")

    async def _encode(self, prompt: str | list[int] | int) -> list[int]:
        assert not isinstance(prompt, int)
        if isinstance(prompt, str):
            ids = await self._off_loop(lambda: self._loaded.tokenizer.encode(prompt), "prompt")
            return ids if ids or self._loaded.bos is None else [self._loaded.bos]
        if max(prompt) >= self._loaded.config.vocab:
            raise ApiError(400, f"token numbers must be below {self._loaded.config.vocab}", code="invalid_value", param="prompt")
        return prompt

    async def _off_loop(self, make: Callable[[], list[int]], param: str) -> list[int]:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, make)
        except RidgelineError as error:
            raise refused(error, f"{param} cannot be turned into tokens", param) from error

    def _prepared(
        self, asked: Asked, prompts: list[list[int]], echoes: list[str], wanted: int | None, default: int, logprobs: int | None
    ) -> Prepared:
        n = asked.n or 1
        lengths = [self._max_tokens(ids, wanted, default) for ids in prompts]
        try:
            pairs = list(zip(prompts, lengths, strict=True))
            choices = [(ids, _sampling(asked, length, choice, logprobs)) for ids, length in pairs for choice in range(n)]
        except OptionError as error:
            raise ApiError(400, error.why, code="invalid_value") from error
        return Prepared(choices, [echo for echo in echoes for _ in range(n)], sum(len(ids) for ids in prompts))

    def _max_tokens(self, prompt: list[int], wanted: int | None, default: int) -> int:
        """How many tokens may follow this prompt; 400 when what was asked for does not fit."""
        if not prompt:
            raise ApiError(400, "the prompt has no tokens", code="invalid_value", param="prompt")
        longest = self._limits.prompt_tokens
        if longest is not None and len(prompt) > longest:
            raise ApiError(400, f"the prompt has {len(prompt)} tokens, more than {longest}", code="context_length_exceeded", param="prompt")
        if wanted is not None and wanted > self._limits.max_tokens:
            raise ApiError(400, f"max_tokens is at most {self._limits.max_tokens} here", code="invalid_value", param="max_tokens")
        room = self._context - len(prompt)
        if room < (wanted or 1):
            raise ApiError(
                400,
                f"the prompt's {len(prompt)} tokens and {wanted or 1} to generate are more than the context of {self._context}",
                code="context_length_exceeded",
                param="prompt",
            )
        return wanted if wanted is not None else min(default, room, self._limits.max_tokens)


def _sampling(asked: Asked, max_tokens: int, choice: int, logprobs: int | None) -> Sampling:
    def given(value: float | None, otherwise: float) -> float:
        return otherwise if value is None else value

    stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    return Sampling(
        max_tokens=max_tokens,
        temperature=given(asked.temperature, 1.0),
        top_k=asked.top_k or 0,
        top_p=given(asked.top_p, 1.0),
        min_p=given(asked.min_p, 0.0),
        repetition_penalty=given(asked.repetition_penalty, 1.0),
        presence_penalty=given(asked.presence_penalty, 0.0),
        frequency_penalty=given(asked.frequency_penalty, 0.0),
        stop=stop,
        # choices of one prompt must differ, and the same request must give the same choices again
        seed=None if asked.seed is None else (asked.seed + choice) % 2**63,
        logprobs=logprobs,
        ignore_eos=asked.ignore_eos,
    )
