"""Tokenizers: every text comes back, streams cut between any two bytes give the same text, joins follow the scores."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import DataError, ModelFileError
from ridgeline.llm.load.gguf_file import gguf_tokenizer
from ridgeline.llm.load.open import open_source
from ridgeline.llm.load.sentencepiece import read_llama2c_tokenizer, sentencepiece
from ridgeline.llm.load.tokenizer_json import read_tokenizer
from ridgeline.llm.load.tokens import PieceTokenizer, StreamDecoder, byte_tokenizer
from ridgeline.workload.gguf import open_gguf
from tests.llm.load.model_files import (
    HUGGINGFACE,
    VOCAB,
    byte_level_json,
    gguf_metadata,
    sentencepiece_vocabulary,
    spaced_json,
    write_llama2c_vocabulary,
)
from tests.support import full_or_tenth
from tests.workload.gguf_files import write_gguf

tokenizers = pytest.importorskip("tokenizers")
# ▁ is how the library writes a space: in a text it comes back as one.
TEXTS = st.text(alphabet=st.one_of(st.characters(codec="utf-8", exclude_characters="▁"), st.sampled_from("helo wrdt é日本")), max_size=60)
KINDS = ("byte-level json", "spaced json", "gguf spaced", "gguf byte-level", "llama2c", "bytes")


def made(kind: str, folder: Path) -> PieceTokenizer:
    if kind.endswith("json"):
        path = folder / "tokenizer.json"
        data = byte_level_json() if "byte-level" in kind else spaced_json()
        if "metaspace" in kind:  # how newer files of the same models say it
            data |= {
                "normalizer": None,
                "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
            }
        path.write_text(json.dumps(data), encoding="utf-8")
        return read_tokenizer(path, "<s>", "</s>", None, None)
    if kind.startswith("gguf"):
        return gguf_tokenizer(open_gguf(write_gguf(folder / "v.gguf", gguf_metadata(HUGGINGFACE, spaced="spaced" in kind), {})))
    return read_llama2c_tokenizer(write_llama2c_vocabulary(folder / "tok.bin"), VOCAB) if kind == "llama2c" else byte_tokenizer()


@pytest.fixture(scope="module", params=KINDS)
def coder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PieceTokenizer:
    return made(request.param, tmp_path_factory.mktemp("vocabulary"))


@settings(max_examples=full_or_tenth(500), deadline=None)
@given(text=TEXTS)
def test_any_text_comes_back(coder: PieceTokenizer, text: str) -> None:
    ids = coder.encode(text)
    assert coder.decode(ids) == text and coder.decode_bytes(ids) == text.encode()


@settings(max_examples=full_or_tenth(500), deadline=None)
@given(ids=st.lists(st.integers(0, VOCAB + 5), max_size=40))
def test_a_stream_of_any_ids_is_the_text_of_them_all(coder: PieceTokenizer, ids: list[int]) -> None:
    stream = StreamDecoder(coder)
    parts = [stream.push(index) for index in ids]
    whole = b"".join(coder.decode_bytes([index]) for index in ids).decode("utf-8", errors="replace")
    assert "".join(parts) + stream.flush() == whole
    assert stream.push(300) == "" and stream.flush() == ""  # as new afterwards


def test_a_stream_holds_back_half_characters() -> None:
    stream = StreamDecoder(byte_tokenizer())
    assert [stream.push(value) for value in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert [stream.push(value) for value in b"\xf0\x9fa"] == ["", "", "�a"]
    assert stream.push(0xE2) == "" and stream.flush() == "�" and stream.flush() == ""


def slow_join(text: str, ranks: dict[str, float]) -> list[str]:
    """llama2.c's loop: the best pair of all, leftmost first, until none is left."""
    pieces = list(text)
    while True:
        best = max(((ranks[a + b], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in ranks), default=None)
        if best is None:
            return pieces
        pieces[-best[1] : 2 - best[1]] = [pieces[-best[1]] + pieces[1 - best[1]]]


@settings(max_examples=full_or_tenth(2000), deadline=None)
@given(text=st.text(alphabet="helo wrdt", max_size=30), scores=st.lists(st.sampled_from([-1.0, -2.0, -3.0]), min_size=18, max_size=18))
def test_joins_are_those_of_the_plain_loop(text: str, scores: list[float]) -> None:
    pieces, given_scores, kinds = sentencepiece_vocabulary()
    given_scores[259 : 259 + 18] = scores
    coder = sentencepiece(pieces, given_scores, kinds, bos=1, eos=2, space_first=False, origin="test")
    ranks = {piece: score for piece, score, kind in zip(pieces, given_scores, kinds, strict=True) if kind == 1}
    expected = slow_join(text, ranks)
    assert [coder.pieces[index].decode() for index in coder.encode(text, add_bos=False)] == expected


@settings(max_examples=full_or_tenth(500), deadline=None)
@given(text=st.text(alphabet="helo wrdté日本x", min_size=1, max_size=40))
def test_files_of_one_vocabulary_agree(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp()
    for kind in ("spaced json", "metaspace json", "gguf spaced", "llama2c"):
        if kind not in MADE:
            MADE[kind] = made(kind, folder)
    # Metaspace puts no second space before a text that begins with one.
    found = [coder.encode(text) for kind, coder in MADE.items() if kind != "metaspace json" or not text.startswith(" ")]
    assert found[1:] == found[:-1]


MADE: dict[str, PieceTokenizer] = {}


def test_a_thousand_words_take_no_time(tmp_path: Path) -> None:
    coder = made("llama2c", tmp_path)
    ids = coder.encode("hello world the " * 5000)
    assert coder.decode(ids) == "hello world the " * 5000


def test_spaces_and_begin_tokens(tmp_path: Path) -> None:
    for kind in ("spaced json", "gguf spaced", "llama2c"):
        coder = made(kind, tmp_path)
        ids = coder.encode("hello world")
        assert ids[0] == coder.bos == 1 and coder.eos == 2
        assert coder.decode(ids) == "hello world"  # the space that was put before it is taken away …
        assert coder.decode(ids[1:]) == " hello world"  # … and not from what a model adds to a prompt
        assert coder.encode("</s>hello", add_bos=False, special=True)[0] == 2
        assert 2 not in coder.encode("</s>hello")
        assert coder.decode([1, 2, 0]) == "" and coder.decode([VOCAB, 10**9, -1]) == ""
    coder = made("byte-level json", tmp_path)
    assert coder.encode("hello", add_bos=True) == [1, *coder.encode("hello")] and coder.bos == 1 and not coder.add_bos
    assert coder.encode("<|im_end|>", special=True) == [4] and coder.decode([4]) == "" and 4 not in coder.encode("<|im_end|>")


def test_what_cannot_be_encoded(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="surrogate"):
        made("llama2c", tmp_path).encode("a\ud800")
    pieces, scores, kinds = ["<s>", "a", "b", "<user>"], [0.0, -1.0, -2.0, 0.0], [3, 1, 1, 4]
    coder = sentencepiece(pieces, scores, kinds, bos=0, eos=None, space_first=False, origin="test")
    assert coder.encode("ab<user>a") == [0, 1, 2, 3, 1]
    with pytest.raises(DataError, match="'c' in the text"):
        coder.encode("abc")
    with pytest.raises(ModelFileError, match="finite score"):
        sentencepiece(pieces, [float("nan")] * 4, kinds, bos=0, eos=None, origin="test")


def test_a_vocabulary_that_loses_text_is_refused(tmp_path: Path) -> None:
    for change, word in (
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "byte-level"),
        ({"decoder": None}, "byte-level"),
    ):
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(byte_level_json() | change))
        with pytest.raises(ModelFileError, match=word):
            read_tokenizer(path, None, None, None, None)
    data = spaced_json()
    del data["model"]["vocab"]["<0x41>"]
    data["model"]["vocab"]["@"] = 3 + 0x41
    path.write_text(json.dumps(data))
    with pytest.raises(ModelFileError, match="lacks 1 bytes"):
        read_tokenizer(path, None, None, None, None)
    with pytest.raises(ModelFileError, match=r"no .*none.json"):
        read_tokenizer(tmp_path / "none.json", None, None, None, None)


def written(tmp_path: Path, data: dict[str, Any]) -> PieceTokenizer:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(data))
    return read_tokenizer(path, None, None, None, None)


def test_nothing_in_the_file_cuts_fills_or_shuffles_a_text(tmp_path: Path) -> None:
    padding = {
        "strategy": {"Fixed": 10**9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    }
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    for data in (byte_level_json(), spaced_json()):
        expected = written(tmp_path, data).encode("hello world hello")
        data |= {"padding": padding, "truncation": truncation, "model": {**data["model"], "dropout": 0.9}}
        assert written(tmp_path, data).encode("hello world hello") == expected and len(expected) > 3


@pytest.mark.parametrize(
    "step",
    [{"type": "Lowercase"}, {"type": "Replace", "pattern": {"String": "a"}, "content": "x" * 10**6}, {"type": "Prepend", "prepend": "x"}],
)
def test_normalisers_that_lose_or_grow_a_text_are_refused(step: dict[str, Any], tmp_path: Path) -> None:
    for normalizer in (step, {"type": "Sequence", "normalizers": [step]}):
        with pytest.raises(ModelFileError, match="normalizer"):
            written(tmp_path, byte_level_json() | {"normalizer": normalizer})
    assert written(tmp_path, byte_level_json() | {"normalizer": {"type": "NFC"}}).encode("hello")


def test_a_pattern_that_tries_for_ever_is_an_error(tmp_path: Path) -> None:
    data = byte_level_json()
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, data["pre_tokenizer"]]}
    with pytest.raises(DataError, match="cannot be encoded"):
        written(tmp_path, data).encode("a" * 60 + "b")


def test_added_tokens_of_gguf_are_tokens_in_any_text(tmp_path: Path) -> None:
    metadata = gguf_metadata(HUGGINGFACE, spaced=False)
    kinds = metadata["tokenizer.ggml.token_type"][1]
    changed = metadata | {"tokenizer.ggml.token_type": ("[i32", [*kinds[:3], 4, *kinds[4:]])}
    coder = gguf_tokenizer(open_gguf(write_gguf(tmp_path / "v.gguf", changed, {})))
    assert coder.encode("a<|im_start|>b") == [coder.encode("a")[0], 3, coder.encode("b")[0]] and coder.decode([3]) == "<|im_start|>"


def test_the_real_small_vocabulary() -> None:
    try:
        coder = open_source("stories260k").tokenizer
    except DataError:
        pytest.skip("needs stories260K under RIDGELINE_DATA")
    text = "Once upon a time, there was a “little” girl named Lily.\n日本"
    ids = coder.encode(text)
    assert ids[:6] == [1, 403, 407, 261, 378, 432]
    assert coder.decode(ids) == text
