"""Byte-level tokenizers: what is encoded comes back exactly, whatever the text; the library and the file agree; broken ones are refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import DataError, MissingExtraError, ModelFileError, OptionError
from ridgeline.workload.tokenizer import Tokenizer, byte_of_letter, load_tokenizer
from tests.workload.gguf_files import write_gguf

tokenizers = pytest.importorskip("tokenizers")

LETTERS = {byte: letter for letter, byte in byte_of_letter().items()}
SPECIALS = ["<|endoftext|>", "<|im_start|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "1 2", "Ã ©", "Ġ Ġ", "' s"]


def vocabulary(lacking: tuple[int, ...] = ()) -> list[str]:
    return [*SPECIALS, *(letter for byte, letter in sorted(LETTERS.items()) if byte not in lacking), *(m.replace(" ", "") for m in MERGES)]


def write_vocabulary(path: Path, split: str = "smollm", lacking: tuple[int, ...] = (), **changed: tuple[str, Any] | None) -> Path:
    tokens = vocabulary(lacking)
    metadata: dict[str, tuple[str, Any] | None] = {
        "model": ("str", "gpt2"), "pre": ("str", split), "tokens": ("[str", tokens), "merges": ("[str", MERGES),
        "token_type": ("[i32", [3, 3] + [1] * (len(tokens) - 2)), "bos_token_id": ("u32", 1), "eos_token_id": ("u32", 0),
    }  # fmt: skip
    metadata |= changed
    return write_gguf(path, {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}, {})


@pytest.fixture(scope="module", params=["smollm", "gpt-2", "llama-bpe", "qwen2"])
def coder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "v.gguf", request.param))


def test_the_alphabet_is_the_librarys() -> None:
    assert sorted(byte_of_letter().values()) == list(range(256))
    assert set(byte_of_letter()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    for byte in range(256):  # the library's decoder maps each letter to the byte we think it is
        text = tokenizers.decoders.ByteLevel().decode([LETTERS[byte]])
        assert text == bytes([byte]).decode("utf-8", errors="replace")


@given(text=st.text(alphabet=st.characters(codec="utf-8")))
def test_any_text_comes_back(coder: Tokenizer, text: str) -> None:
    ids = coder.encode(text)
    assert coder.decode(ids) == text and coder.text_bytes(ids) == len(text.encode())
    ids = coder.encode(text, special=True)
    assert coder.decode(ids) == text


@given(text=st.text(alphabet="helo wr12é'sd\n<|im_start>"))
def test_text_of_merges_comes_back(coder: Tokenizer, text: str) -> None:
    ids = coder.encode(text)
    assert coder.decode(ids) == text == coder.decode(coder.encode(text, special=True)) and not set(ids) & {0, 1}


def pieces(coder: Tokenizer, text: str) -> list[str]:
    return [coder.decode([index]) for index in coder.encode(text)]


def test_merges_are_made_and_digits_kept_apart(tmp_path: Path) -> None:
    smollm = load_tokenizer(write_vocabulary(tmp_path / "a.gguf", "smollm"))
    gpt2 = load_tokenizer(write_vocabulary(tmp_path / "b.gguf", "gpt-2"))
    qwen2 = load_tokenizer(write_vocabulary(tmp_path / "c.gguf", "qwen2"))
    llama = load_tokenizer(write_vocabulary(tmp_path / "d.gguf", "llama-bpe"))
    assert pieces(smollm, "hello wor12 é's") == ["hello", " wor", "1", "2", " ", "é", "'s"]
    assert pieces(gpt2, "hello wor12") == pieces(llama, "hello wor12") == ["hello", " wor", "12"]
    assert pieces(qwen2, "hello wor12") == ["hello", " wor", "1", "2"]
    assert (smollm.bos, smollm.eos, smollm.size) == (1, 0, len(vocabulary()))


def test_control_tokens_are_text_unless_asked_for(coder: Tokenizer) -> None:
    text = "hello<|im_start|>wor<|endoftext|>"
    assert not {0, 1} & set(coder.encode(text))
    ids = coder.encode(text, special=True)
    assert [index for index in ids if index < 2] == [1, 0] and coder.decode(ids) == text
    assert coder.text_bytes(ids) == len("hellowor")


def test_bytes_a_vocabulary_lacks_are_named_not_dropped(tmp_path: Path) -> None:
    coder = load_tokenizer(write_vocabulary(tmp_path / "v.gguf", lacking=(4, 0xF1)))
    assert coder.decode(coder.encode("fine")) == "fine"
    with pytest.raises(DataError, match="byte 4 "):
        coder.encode("a\x04b")
    with pytest.raises(DataError, match="byte 241 "):
        coder.encode("\U00050000")
    with pytest.raises(DataError, match="surrogate"):
        coder.encode("a\ud800")


def test_ids_outside_the_vocabulary_are_refused(coder: Tokenizer) -> None:
    for index in (-1, coder.size):
        with pytest.raises(OptionError, match=str(index)):
            coder.decode([index])
    assert coder.decode([index for index, piece in enumerate(coder.pieces) if piece == b"\xc3"]) == "\ufffd"


def test_a_tokenizer_json_gives_the_same_ids(coder: Tokenizer, tmp_path: Path) -> None:
    coder.encoder.save(str(tmp_path / "tokenizer.json"))
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    data["decoder"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    data["added_tokens"] = [
        {"id": index, "content": name, "special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
        for index, name in enumerate(SPECIALS)
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    again = load_tokenizer(tmp_path)
    assert again.pieces == coder.pieces and again.specials == coder.specials
    for text in ("hello wor 12 é's <|im_start|> 日本語\n\n  x", ""):
        assert again.encode(text) == coder.encode(text) and again.encode(text, special=True) == coder.encode(text, special=True)
        assert again.decode(again.encode(text)) == text
    del data["decoder"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ModelFileError, match="byte-level"):
        load_tokenizer(tmp_path)
    for broken in ("", "{", "[]", '{"model": {"type": "BPE"}}', "\ud800"):
        (tmp_path / "tokenizer.json").write_text(broken, errors="surrogatepass")
        with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"model": ("str", "llama")}, "tokenizer llama"),
        ({"pre": ("str", "gemma")}, "gemma"),
        ({"pre": ("[u8", [1])}, r"gpt2 \[1\]"),
        ({"pre": None}, "None"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens"),
        ({"tokens": ("[u8", [1, 2])}, r"tokenizer\.ggml\.tokens"),
        ({"merges": ("u8", 1)}, r"tokenizer\.ggml\.merges"),
        ({"merges": ("[str", ["h e", "hello"])}, "'hello'"),
        ({"merges": ("[str", ["a b c"])}, "'a b c'"),
        ({"merges": ("[str", ["z nowhere"])}, "cannot build"),
        ({"token_type": ("[i32", [1])}, "type"),
        ({"tokens": ("[str", ["a", "a"]), "token_type": None, "merges": ("[str", ["a a"])}, "twice"),
        ({"tokens": ("[str", ["a", "日"]), "token_type": None, "merges": ("[str", ["a a"])}, "."),
    ],
)
def test_broken_vocabularies_are_refused(changed: dict[str, tuple[str, Any] | None], word: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=word):
        load_tokenizer(write_vocabulary(tmp_path / "v.gguf", **changed))


def test_missing_file_and_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelFileError, match=r"nowhere\.json"):
        load_tokenizer("nowhere.json")
    path = write_vocabulary(tmp_path / "v.gguf")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"ridgeline\[hf\]"):
        load_tokenizer(path)


def test_the_real_vocabulary_on_real_text() -> None:
    folders = [Path(part) for part in os.environ.get("RIDGELINE_DATA", "").split(os.pathsep) if part]
    model = next((f / "SmolLM2-135M-Instruct.Q4_1.gguf" for f in folders if (f / "SmolLM2-135M-Instruct.Q4_1.gguf").is_file()), None)
    file = next((f / "text/wikitext2_raw_test.txt" for f in folders if (f / "text/wikitext2_raw_test.txt").is_file()), None)
    if model is None or file is None:
        pytest.skip("needs SmolLM2 and WikiText-2 under RIDGELINE_DATA")
    with file.open(encoding="utf-8", newline="") as stream:
        text = stream.read()
    coder = load_tokenizer(model)
    ids = coder.encode(text)
    assert coder.decode(ids) == text and coder.text_bytes(ids) == file.stat().st_size == 1_290_547 and len(ids) == 304_830
    assert coder.encode("Hello, world! 123") == [19556, 28, 905, 17, 216, 33, 34, 35]
