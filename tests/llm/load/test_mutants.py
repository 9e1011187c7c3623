"""Broken and hostile model files: each mutant loads, or is refused with a RidgelineError; memory and time stay bounded.

    a small file of each kind ──flip, cut, splice huge counts, swap, repeat; JSON: change a value──> mutant ──load_model, encode, decode──>

RIDGELINE_FULL=1 runs 10,800 mutants, otherwise a tenth of them, always the same.
"""

from __future__ import annotations

import json
import random
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.core.errors import RidgelineError
from ridgeline.llm.load import load_model
from ridgeline.llm.model.config import config_of
from tests.llm.load.model_files import HUGGINGFACE, spaced_json, weights, write_folder, write_gguf_model, write_llama2c
from tests.support import full_or_tenth

MOST_S = 5.0
MOST_GROWTH_BYTES = 2**28
SMALL = HUGGINGFACE | {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8}
HUGE = [struct.pack("<Q", value) for value in (2**64 - 1, 2**63, 2**40, 2**32, 2**31, 2**20, 0)] + [struct.pack("<i", -1), b"\x7f" * 4]
NASTY: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**200, 0.5, -1e308, 1e308, float("nan"), float("inf"), "", "x" * 5000, "\x00", "▁", "<0x41>",
    [], [[]], [1] * 100, {}, {"type": "ByteLevel"}, {"type": "Sequence", "decoders": []}, {"content": 7}, "llama", "gpt2", "qwen2",
]  # fmt: skip


def mutated(raw: bytes, dice: random.Random, header: int) -> bytes:
    """One to three changes, most of them where the counts and names are."""
    out = bytearray(raw)
    for _ in range(dice.randint(1, 3)):
        end = min(header, len(out)) if dice.random() < 0.8 else len(out)
        place = dice.randrange(max(1, end))
        kind = dice.randrange(7)
        if kind == 0 and out:
            out[min(place, len(out) - 1)] ^= 1 << dice.randrange(8)
        elif kind == 1:
            del out[place:]
        elif kind == 2:
            huge = dice.choice(HUGE)
            out[place : place + len(huge)] = huge
        elif kind == 3:
            del out[place : place + dice.randint(1, 40)]
        elif kind == 4:
            other, size = dice.randrange(max(1, end)), dice.choice([1, 4, 8, 16])
            first, second = bytes(out[place : place + size]), bytes(out[other : other + size])
            out[place : place + size], out[other : other + size] = second, first
        elif kind == 5:
            out[place:place] = out[place : place + dice.randint(1, 200)]
        else:
            out[place : place + 1] = bytes([dice.randrange(256)])
    return bytes(out)


def changed(data: Any, dice: random.Random) -> Any:
    """The same JSON with one value, somewhere, replaced, removed or doubled."""
    if isinstance(data, dict) and data and dice.random() < 0.8:
        key = dice.choice(list(data))
        if dice.random() < 0.1:
            return {k: v for k, v in data.items() if k != key}
        if dice.random() < 0.05:
            return {**data, dice.choice(["x", "model_type", "", "rope_scaling"]): dice.choice(NASTY)}
        return {**data, key: changed(data[key], dice)}
    if isinstance(data, list) and data and dice.random() < 0.8:
        place = dice.randrange(len(data))
        return [*data[:place], changed(data[place], dice), *data[place + dice.randint(0, 1) :]]
    return dice.choice(NASTY)


def byte_mutant(header: int) -> Callable[[bytes, random.Random], bytes]:
    return lambda raw, dice: mutated(raw, dice, header)


def json_mutant(raw: bytes, dice: random.Random) -> bytes:
    return json.dumps(changed(json.loads(raw), dice)).encode() if dice.random() < 0.8 else mutated(raw, dice, len(raw))


def folder(path: Path, **options: Any) -> Path:
    return write_folder(path / "model", weights(SMALL), SMALL, **options)


def llama2c(path: Path) -> Path:
    return write_llama2c(path / "m.bin", weights(SMALL), config_of(SMALL, "test"))


CASES: dict[str, tuple[Callable[[Path], Path], str, Callable[[bytes, random.Random], bytes], int]] = {
    # what is written, the file of it that is changed, how, how many
    "gguf, spaced": (lambda p: write_gguf_model(p / "m.gguf", weights(SMALL), SMALL), "m.gguf", byte_mutant(10_000), 2000),
    "gguf, byte-level": (
        lambda p: write_gguf_model(p / "m.gguf", weights(SMALL), SMALL, spaced=False), "m.gguf", byte_mutant(6_000), 1500,
    ),
    "gguf, first bytes": (lambda p: write_gguf_model(p / "m.gguf", weights(SMALL), SMALL), "m.gguf", byte_mutant(900), 1000),
    "safetensors": (folder, "model/model.safetensors", byte_mutant(1_400), 1500),
    "safetensors index": (lambda p: folder(p, shards=2), "model/model.safetensors.index.json", json_mutant, 300),
    "config.json": (folder, "model/config.json", json_mutant, 1000),
    "tokenizer.json, byte-level": (folder, "model/tokenizer.json", json_mutant, 1000),
    "tokenizer.json, spaced": (lambda p: folder(p, tokenizer=spaced_json()), "model/tokenizer.json", json_mutant, 1000),
    "tokenizer_config.json": (folder, "model/tokenizer_config.json", json_mutant, 200),
    "generation_config.json": (folder, "model/generation_config.json", json_mutant, 100),
    "llama2.c": (llama2c, "m.bin", byte_mutant(32), 600),
    "llama2.c vocabulary": (llama2c, "tok300.bin", byte_mutant(6_000), 600),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_mutants_load_or_are_refused(case: str, tmp_path: Path) -> None:
    write, changed_file, mutant, count = CASES[case]
    model = write(tmp_path)
    load_model(model, device="cpu")  # the whole file does load, and what loading imports is paid for
    target = tmp_path / changed_file
    raw = target.read_bytes()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loaded, slowest_s, dice = 0, 0.0, random.Random(7)
    for number in range(full_or_tenth(count)):
        target.write_bytes(mutant(raw, dice))
        started_s = time.perf_counter()
        try:
            found = load_model(model, device="cpu")
            loaded += 1
            found.tokenizer.decode(found.tokenizer.encode("hello wörld <s>"))
            found.tokenizer.decode(found.tokenizer.encode("hello wörld <s>", special=True))
            assert all(torch.isfinite(parameter).all() for parameter in found.model.parameters())
        except RidgelineError as error:
            assert error.why and error.do and len(str(error)) < 4000
        except BaseException as error:
            pytest.fail(f"mutant {number} of {case}: {type(error).__name__}: {error}")
        slowest_s = max(slowest_s, time.perf_counter() - started_s)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert slowest_s < MOST_S and growth < MOST_GROWTH_BYTES, (slowest_s, growth)
    print(f"{case}: {loaded} of {full_or_tenth(count)} loaded, slowest {slowest_s * 1e3:.0f} ms, memory +{growth / 2**20:.0f} MiB")


def test_there_are_ten_thousand() -> None:
    assert sum(count for *_, count in CASES.values()) >= 10_000
