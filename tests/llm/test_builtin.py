"""The model that ships with the package: whole, small, as good as its training says, and the script that made it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.llm.engine.engine import Engine
from ridgeline.llm.engine.options import EngineOptions
from ridgeline.llm.load import chat_ids, load_model
from ridgeline.llm.sampling import Sampling
from tests.support import ROOT

FOLDER = ROOT / "src" / "ridgeline" / "llm" / "builtin"
SPEECH = "ROMEO:\nWhat say you to my suit?\n\nJULIET:\nI'll tell thee all.\n\n"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/llm_builtin.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("llm_builtin", ROOT / "benchmarks" / "llm_builtin.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("common", None)


def test_it_ships_and_is_small() -> None:
    files = {file.name: file.stat().st_size for file in FOLDER.iterdir() if file.is_file()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "training.json"} <= files.keys()
    assert sum(files.values()) <= 4_000_000
    assert '"llm/builtin/*"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    training = json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))
    assert 1_000_000 <= training["parameters"] <= 2_000_000
    # held-out text: better than letters alone (about 4.8 bits a byte), and not better than anything this small can be
    assert 1.2 < training["test"]["bits_per_byte"] < 2.6 and training["curve"][0]["step"] < training["best_step"]


def test_it_has_learned_shakespeare() -> None:
    """Mean loss of a few lines that are in the style, against the same letters shuffled, by the shipped weights."""
    engine = Engine(load_model("builtin", dtype="float32"), EngineOptions(max_batch=2))

    def bits(text: str) -> float:
        ids = engine.tokenizer.encode(text)
        total = 0.0
        for place in range(1, len(ids)):
            done = engine.generate([ids[:place]], Sampling(max_tokens=1, logprobs=100, ignore_eos=True))[0]
            assert done.logprobs is not None
            own = {**dict(done.logprobs[0].top)}
            total -= own.get(ids[place], -10.0) / math.log(2)
        return total / len(text.encode())

    line = "I pray you, tell me what you will.\n"
    assert bits("ROMEO:\n" + line) < 2.6 < bits("ROMEO:\n" + line[::-1])


def test_text_comes_back_and_a_blank_line_ends_an_answer() -> None:
    loaded = load_model("builtin")
    ids = loaded.tokenizer.encode(SPEECH + "caf\u00e9 \U0001f600\n")
    assert loaded.tokenizer.decode(ids) == SPEECH + "caf\u00e9 \U0001f600\n" and len(ids) < len(SPEECH)
    assert loaded.eos == (loaded.tokenizer.encode("\n\n")[0],) and ids.count(loaded.eos[0]) == 2
    asked = chat_ids(loaded, [{"role": "user", "content": "Who art thou?"}])
    assert loaded.tokenizer.decode(asked) == "ROMEO:\nWho art thou?\n\nJULIET:\n"
    done = Engine(loaded, EngineOptions(max_batch=1)).generate([asked], Sampling(max_tokens=200, temperature=0.8, seed=1))[0]
    assert done.finish_reason == "stop" and "\n\n" not in done.text.rstrip("\n")


def test_the_script_trains_saves_and_its_folder_loads(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "SHAPE", {"layers": 1, "hidden": 32, "intermediate": 48, "heads": 2, "kv_heads": 1})
    text = "".join(f"ROMEO:\nline {index} of speech {index % 7}\n\n" for index in range(600))
    options = argparse.Namespace(
        vocab=300, context=32, steps=60, batch=16, rate=1e-2, dropout=0.1, score_every=20, seed=0, device="cpu", out=tmp_path
    )
    torch.set_num_threads(1)
    result = script.train(options, text)
    assert [row["step"] for row in result["curve"]] == [20, 40, 60]
    assert result["curve"][-1]["valid_loss"] < 0.7 * math.log(300) and "train_loss" in result["curve"][0]
    assert result["valid"]["nats_per_token"] == pytest.approx(min(row["valid_loss"] for row in result["curve"]), rel=0.02)
    loaded = load_model(tmp_path)
    assert (loaded.config.layers, loaded.config.vocab, loaded.config.context, loaded.config.tied) == (1, 300, 32, True)
    assert json.loads((tmp_path / "training.json").read_text())["settings"]["seed"] == 0


def test_the_parts_do_not_overlap(script: Any) -> None:
    text = "".join(f"A:\nspeech {index}\n\n" for index in range(100))
    parts = script.cut(text)
    assert "".join(parts.values()) == text and all(part.endswith("\n\n") for part in parts.values())
    assert len(parts["train"]) > 0.85 * len(text) and len(parts["valid"]) > 0.03 * len(text) < 2 * len(parts["test"])
