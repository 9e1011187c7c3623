"""`ridgeline generate` and its chat as a user meets them: text, figures, JSON, one argument or two, Ctrl-C, clear errors."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.answer import answer
from ridgeline.cli.chat import Chat, interrupts
from ridgeline.cli.generate import which
from ridgeline.llm import limits
from ridgeline.llm.engine.engine import Engine
from ridgeline.llm.engine.options import EngineOptions
from ridgeline.llm.load import load_model
from ridgeline.llm.sampling import Sampling


@pytest.fixture(autouse=True)
def known_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring it is tests/llm/test_limits.py's; here it would cost a second a test."""
    monkeypatch.setattr(limits, "read_bandwidth", lambda device: 1e10)


@pytest.fixture
def engine() -> Engine:
    return Engine(load_model("builtin"), EngineOptions(max_batch=2, seed=0))


def test_without_anything_it_demonstrates(run: Any) -> None:
    code, out, err = run("generate", "-n", 20, "--seed", 1)
    assert code == 0 and out.startswith("ROMEO:\n") and len(out) > 20
    assert "20 tokens" in err and "tokens/s" in err and "% of the limit" in err and "at 10 GB/s" in err


def test_json_has_text_and_figures_beside_the_limit(run: Any) -> None:
    code, out, _ = run("generate", "builtin", "KING:\nMy", "-n", 12, "-t", 0, "--ignore-eos", "--logprobs", 2, "--json")
    data = json.loads(out)
    assert code == 0 and data["model"] == "builtin" and data["prompt"] == "KING:\nMy" and data["finish_reason"] == "length"
    assert len(data["tokens"]) == data["new_tokens"] == 12 == len(data["logprobs"]) and data["text"]
    assert data["percent_of_limit"] == pytest.approx(100 * data["tokens_per_s"] * data["bytes_per_token"] / 1e10, rel=1e-3)
    assert data["first_token_ms"] > 0 and data["limit_ms_per_token"] == pytest.approx(data["bytes_per_token"] / 1e7, rel=1e-3)
    again = json.loads(run("generate", "builtin", "KING:\nMy", "-n", 12, "-t", 0, "--ignore-eos", "--json").out)
    assert again["tokens"] == data["tokens"] and "logprobs" not in again


def test_speculation_gives_the_same_text_and_is_counted(run: Any) -> None:
    arguments = ("generate", "builtin", "and and and and", "-n", 16, "-t", 0, "--ignore-eos", "--json")
    plain, drafted = (json.loads(run(*arguments, *more).out) for more in ((), ("--draft", "ngram")))
    assert drafted["tokens"] == plain["tokens"] and drafted["draft"] and "draft" not in plain
    assert drafted["accepted"] + drafted["rejected"] == drafted["drafted"]


def test_a_published_name_is_a_model() -> None:
    assert which("smollm2-135m", None) == ("smollm2-135m", None) and which("Stories260K", None) == ("Stories260K", None)


def test_one_argument_is_a_model_or_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert which(None, None) == ("builtin", None) and which("builtin", None) == ("builtin", None)
    assert which("To be, or not to be", None) == ("builtin", "To be, or not to be")
    assert which("x" * 5000, None) == ("builtin", "x" * 5000)
    for model in (str(tmp_path), "no/such/folder", "model.gguf", "llama-3-8b:random"):
        assert which(model, None) == (model, None)
    assert which("model.gguf", "Hello") == ("model.gguf", "Hello")
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert which("builtin", "-") == ("builtin", "from a pipe")


@pytest.mark.parametrize(
    "arguments",
    [
        ("no/such/model",), ("builtin", "x", "-t", "-1"), ("builtin", "x", "--top-p", "0"), ("builtin", "x", "--weights", "int3"),
        ("builtin", "x", "--draft", "layers:x"), ("builtin", "x", "--json", "--chat"), ("builtin", "x" * 5000),
    ],
)  # fmt: skip
def test_clear_errors(run: Any, arguments: tuple[str, ...]) -> None:
    code, _, err = run("generate", *arguments)
    assert code == 2 and "why:" in err and "do:" in err and "Traceback" not in err


def test_a_conversation(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Good morrow\n\n/what\n/help\n/reset\nWho art thou?\n/quit\nnever asked\n"))
    code, out, err = run("generate", "--chat", "-n", 12, "--seed", 2)
    assert code == 0 and err.count("% of the limit") == 2 and "no command /what" in err and "forgotten" in err
    assert "never asked" not in out


def test_what_was_said_is_in_the_next_question_until_reset(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(engine, Sampling(max_tokens=8, temperature=0.8, seed=1))
    chat.ask("Good morrow")
    chat.ask("And then?")
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    assert engine.tokenizer.decode(chat._fitting()).startswith("ROMEO:\nGood morrow")
    chat._command("/reset")
    assert chat.messages == []


def test_a_long_conversation_loses_its_beginning(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(engine, Sampling(max_tokens=8))
    words = "my lord " * (engine.context // 4)
    chat.messages = [{"role": "user", "content": words}, {"role": "assistant", "content": "Ay. " * 40}] * 3
    chat.messages.append({"role": "user", "content": "the last question"})
    ids = chat._fitting()
    assert len(ids) + 8 <= engine.context and "the last question" in engine.tokenizer.decode(ids)
    assert len(chat.messages) < 7 and "forgotten" in capsys.readouterr().err


def test_control_c_stops_the_answer_and_frees_its_pages(engine: Engine) -> None:
    before = signal.getsignal(signal.SIGINT)
    timer = threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with interrupts() as stopped:
        made = answer(engine, [1, 2, 3], Sampling(max_tokens=100_000, ignore_eos=True, temperature=1.0), lambda text: None, stopped)
        if made.finish_reason == "length":  # the context was full before the signal came
            timer.join()
    timer.join()
    assert made.finish_reason in ("cancelled", "length") and engine.idle and signal.getsignal(signal.SIGINT) is before
    assert engine.stats()["free_pages"] == engine.stats()["total_pages"]


def test_stopped_is_asked_after_every_step(engine: Engine) -> None:
    asked: list[int] = []

    def stopped() -> bool:
        asked.append(1)
        return len(asked) >= 4

    made = answer(engine, [1, 2, 3], Sampling(max_tokens=50, ignore_eos=True), lambda text: None, stopped)
    assert made.finish_reason == "cancelled" and len(made.tokens) == 4 and engine.idle
