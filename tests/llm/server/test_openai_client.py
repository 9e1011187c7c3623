"""The official client against a live server: both routes, streams, logprobs, choices, stops, and its classes of errors."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from ridgeline.llm.server.auth import ApiKeys
from tests.llm.server.fake import FakeEngine
from tests.llm.server.live import Live, live

KEY = "a-key-of-the-test-0001"
ALPHABET = "abcdefghijklmnopqrstuvwxyz" * 20


def reply(prompt_tokens: int, count: int, seed: int = 0) -> str:
    start = (prompt_tokens + seed) % 26
    return ALPHABET[start : start + count]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeEngine(slots=8), slots=8, keys=ApiKeys([KEY])) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key=KEY, max_retries=0) as made:
        yield made


MESSAGES: list = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}]


def test_completion_whole(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="hello", max_tokens=6)
    assert answer.object == "text_completion" and answer.model == "fake" and answer.id.startswith("cmpl-")
    assert answer.choices[0].text == reply(5, 6) and answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 6, 11)
    assert len(client.completions.create(model="fake", prompt="x").choices[0].text) == 16


def test_completion_stream_is_the_whole_in_pieces(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="fake", prompt="hello", max_tokens=6, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == reply(5, 6)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 5 + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1 and all(chunk.usage is None for chunk in chunks)


def test_chat_whole_and_stream(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, max_completion_tokens=5)
    assert answer.object == "chat.completion" and answer.choices[0].message.role == "assistant" and answer.usage is not None
    assert answer.choices[0].message.content == reply(answer.usage.prompt_tokens, 5)
    stream = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant" and all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == [] and last.usage == answer.usage
    # an answer can be sent back as it came
    again = client.chat.completions.create(model="fake", messages=[*MESSAGES, answer.choices[0].message, MESSAGES[1]], max_tokens=2)
    assert again.usage is not None and again.usage.prompt_tokens > answer.usage.prompt_tokens


def test_choices_prompts_seeds_and_stops(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["one", "three"], n=2, seed=7, max_tokens=4)
    assert [choice.text for choice in answer.choices] == [reply(3, 4, 7), reply(3, 4, 8), reply(5, 4, 7), reply(5, 4, 8)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3] and answer.usage is not None and answer.usage.prompt_tokens == 8
    stream = client.completions.create(model="fake", prompt=[[65, 66], [65]], n=2, seed=1, max_tokens=3, stream=True)
    texts = [""] * 4
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [reply(2, 3, 1), reply(2, 3, 2), reply(1, 3, 1), reply(1, 3, 2)]
    for stop in ("j", ["zz", "j"]):
        ended = client.completions.create(model="fake", prompt="hello", stop=stop, max_tokens=20).choices[0]
        assert (ended.text, ended.finish_reason) == ("fghi", "stop")


def test_echo(client: openai.OpenAI) -> None:
    assert client.completions.create(model="fake", prompt="hello", echo=True, max_tokens=2).choices[0].text == "hellofg"
    stream = client.completions.create(model="fake", prompt=[104, 105], echo=True, max_tokens=2, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "hi" + reply(2, 2)


def test_logprobs_in_both_forms(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="fake", prompt="hello", max_tokens=3, logprobs=2).choices[0].logprobs
    assert whole is not None and whole.tokens == list("fgh") and whole.token_logprobs == [-0.5] * 3 and whole.text_offset == [0, 1, 2]
    assert whole.top_logprobs == [{"a": -1.0, "b": -2.0}] * 3
    stream = client.completions.create(model="fake", prompt="hello", max_tokens=3, logprobs=0, stream=True)
    assert [chunk.choices[0].logprobs.text_offset for chunk in stream if chunk.choices[0].logprobs] == [[0], [1], [2]]
    table = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=2, logprobs=True, top_logprobs=1).choices[0].logprobs
    assert table is not None and table.content is not None and len(table.content) == 2
    assert bytes(table.content[0].bytes or []).decode() == table.content[0].token and table.content[0].top_logprobs[0].token == "a"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "ridgeline"


def test_errors_have_the_clients_classes(client: openai.OpenAI, server: Live) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-5", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="fake", prompt="x", temperature=3)
    assert wrong.value.param == "temperature" and wrong.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(model="fake", messages=MESSAGES, tools=[])
    with pytest.raises(openai.BadRequestError, match="echo with logprobs"):
        client.completions.create(model="fake", prompt="x", echo=True, logprobs=1)
    with pytest.raises(openai.BadRequestError, match="does not take it"):
        client.completions.create(model="fake", prompt="\0")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="fake", prompt="x" * 600)
    assert long.value.code == "context_length_exceeded"
    stranger = openai.OpenAI(base_url=f"{server.base}/v1", api_key="not-" + KEY, max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.completions.create(model="fake", prompt="x")
    with pytest.raises(openai.BadRequestError, match="at most 4096"):
        client.completions.create(model="fake", prompt="x", max_tokens=5000)


def test_extensions_reach_the_engine(client: openai.OpenAI, server: Live) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True}
    seen = []
    engine = server.worker._engine
    submit = engine.submit
    engine.submit = lambda prompt, sampling, **rest: (seen.append(sampling), submit(prompt, sampling, **rest))[1]
    try:
        client.completions.create(model="fake", prompt="x", extra_body=extra, top_p=0.5, presence_penalty=1, max_tokens=1)
        client.completions.create(model="fake", prompt="x", max_tokens=1)
    finally:
        engine.submit = submit
    given, default = seen
    assert (given.top_k, given.min_p, given.repetition_penalty, given.ignore_eos) == (5, 0.1, 1.2, True)
    assert (given.top_p, given.presence_penalty) == (0.5, 1.0) and default.temperature == 1.0 and default.top_k == 0
