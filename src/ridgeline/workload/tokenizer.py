"""Byte-level tokenizers from a GGUF file or a tokenizer.json, through the `tokenizers` library.

    load_tokenizer("model.gguf" | "tokenizer.json" | folder) ──> Tokenizer
      text ──split (digits, words)──> UTF-8 bytes as letters ──merges──> ids          encode
      ids ──pieces──> bytes ──> text                                                  decode: exactly what was encoded

Each of the 256 bytes is one letter of the vocabulary's alphabet, so nothing is lost; a vocabulary that lacks a letter the text
needs is an error that names it, where the library would drop it silently. Control tokens in a text are text unless special=True.
Only byte-level vocabularies (GPT-2, SmolLM, Llama 3, Qwen2). Ref: Sennrich 2016 (merges), Radford 2019 (bytes as letters).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..core.errors import DataError, MissingExtraError, ModelFileError, OptionError
from .gguf import Gguf, open_gguf
from .huggingface_config import first_line

MOST_JSON_BYTES = 2**26
CONTROL, USER_DEFINED = 3, 4  # token types of GGUF
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How a text is cut before merging, by the name a GGUF file gives it: the pattern, and whether whole words skip the merges.
SPLITS: dict[str, tuple[str | None, bool]] = {
    "gpt-2": (None, False),
    "gpt2": (None, False),
    "smollm": (None, False),
    "llama-bpe": (WORDS.replace("DIGITS", "{1,3}"), True),
    "llama3": (WORDS.replace("DIGITS", "{1,3}"), True),
    "qwen2": (WORDS.replace("DIGITS", ""), False),
}
SINGLE_DIGITS = ("smollm",)


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Text to ids and back; `pieces[id]` are the bytes an id stands for."""

    encoder: Any  # tokenizers.Tokenizer, which takes control tokens as text
    pieces: tuple[bytes, ...]
    specials: dict[str, int]  # control tokens by their spelling
    bos: int | None = None
    eos: int | None = None
    alphabet: frozenset[int] = frozenset()  # bytes that have a token of their own

    @property
    def size(self) -> int:
        """How many ids there are."""
        return len(self.pieces)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of a text; with special=True spellings of control tokens become those tokens."""
        self._check(text)
        if not special or not self.specials:
            return list(encode_with(self.encoder, text).ids)
        names = "|".join(re.escape(name) for name in sorted(self.specials, key=len, reverse=True))
        ids: list[int] = []
        for index, part in enumerate(re.split(f"({names})", text)):
            ids += [self.specials[part]] if index % 2 else self.encode(part)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; bytes that are no UTF-8 (a character cut in two) become the replacement character."""
        parts = []
        for index in ids:
            if not 0 <= index < self.size:
                raise OptionError(f"token {index}", why=f"the vocabulary runs from 0 to {self.size - 1}", do="give ids of this tokenizer")
            parts.append(self.pieces[index])
        return b"".join(parts).decode("utf-8", errors="replace")

    def text_bytes(self, ids: Iterable[int]) -> int:
        """Bytes of text behind ids; control tokens stand for none."""
        control = set(self.specials.values())
        return sum(len(self.pieces[index]) for index in ids if index not in control)

    def _check(self, text: str) -> None:
        try:
            needed = set(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise DataError(
                f"the text holds {text[error.start]!r}", why="half a surrogate pair is no character", do="read it as UTF-8"
            ) from error
        lacking = sorted(needed - self.alphabet)
        if lacking:
            raise DataError(f"byte {lacking[0]} in the text", why="this vocabulary has no token for it", do="take it out of the text")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """From a GGUF file, a tokenizer.json or a folder that holds one."""
    path = Path(path)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise ModelFileError(f"no tokenizer {path}", why="the file does not exist", do="give a GGUF file or a tokenizer.json")
    return from_json(path) if path.suffix == ".json" else from_gguf(open_gguf(path))


def from_gguf(file: Gguf) -> Tokenizer:
    """From the vocabulary and merges in a GGUF file's metadata."""
    library = _library(str(file.path))
    tokens, merges = _strings(file, "tokens"), _strings(file, "merges")
    model, split = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if model != "gpt2" or not isinstance(split, str) or split not in SPLITS:
        why = f"byte-level ones are read: model gpt2 with pre {', '.join(SPLITS)}"
        raise ModelFileError(f"tokenizer {model} {split} in {file.path}", why=why, do="give the model's tokenizer.json")
    pattern, ignore_merges = SPLITS[split]
    kinds = file.metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ModelFileError(f"tokenizer in {file.path}", why="a token stands twice, or has no type", do="download the file again")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if wrong := next((merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2), None):
        raise ModelFileError(f"merge {wrong!r} in {file.path}", why="a merge is two tokens", do="download the file again")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        encoder = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=ignore_merges))
    except Exception as error:  # the library's own, e.g. a merge of tokens that are not in the vocabulary
        raise ModelFileError(f"cannot build the tokenizer of {file.path}", why=first_line(error), do="download it again") from error
    encoder.pre_tokenizer = _splitter(library, pattern, split in SINGLE_DIGITS)
    specials = {token: index for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == CONTROL}
    spelled = {*specials, *(token for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED)}
    pieces = tuple(_piece(token, token in spelled, str(file.path)) for token in tokens)
    return Tokenizer(encoder, pieces, specials, _id(file, "bos", len(tokens)), _id(file, "eos", len(tokens)), _alphabet(pieces))


def _splitter(library: Any, pattern: str | None, digits: bool) -> Any:
    steps = library.pre_tokenizers
    byte_level = steps.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    first = [steps.Digits(individual_digits=True)] if digits else []
    if pattern is not None:
        first.append(steps.Split(library.Regex(pattern), behavior="isolated"))
    return steps.Sequence([*first, byte_level])


def from_json(path: Path) -> Tokenizer:
    """From a Hugging Face tokenizer.json; a normaliser in it (Qwen's NFC) may change a text before it is encoded."""
    if path.stat().st_size > MOST_JSON_BYTES:
        raise ModelFileError(
            f"{path} is {path.stat().st_size:,} bytes", why=f"at most {MOST_JSON_BYTES:,} are read", do="give a tokenizer.json"
        )
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"cannot read {path}", why=first_line(error), do="download tokenizer.json again") from error
    encoder = build_encoder(text, str(path))
    if "ByteLevel" not in json.dumps(data.get("decoder")):
        raise ModelFileError(
            f"{path} is not byte-level", why="only vocabularies of bytes decode exactly", do="give a GPT-2 style tokenizer"
        )
    encoder.encode_special_tokens = True
    added = {entry["content"]: entry["id"] for entry in data.get("added_tokens", [])}
    control = {entry["content"]: entry["id"] for entry in data.get("added_tokens", []) if entry.get("special")}
    size = encoder.get_vocab_size(with_added_tokens=True)
    names = [encoder.id_to_token(index) for index in range(size)]
    if None in names:
        raise ModelFileError(f"token {names.index(None)} of {path}", why="the ids have a gap", do="download tokenizer.json again")
    pieces = tuple(_piece(name, name in added, str(path)) for name in names)
    return Tokenizer(encoder, pieces, control, alphabet=_alphabet(pieces))


def build_encoder(text: str, origin: str) -> Any:
    """The library's tokenizer of a tokenizer.json's text, without what would cut, fill or shuffle a text: that is the caller's to do."""
    library = _library(origin)
    try:
        encoder = library.Tokenizer.from_str(text)
        encoder.no_padding()
        encoder.no_truncation()
        if getattr(encoder.model, "dropout", None):
            encoder.model.dropout = None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # anything the library finds wrong; its panics are no Exception
        raise ModelFileError(f"cannot read {origin}", why=first_line(error), do="download tokenizer.json again") from error
    return encoder


def encode_with(encoder: Any, text: str, *, special: bool = False) -> Any:
    """The library's encoding of a text; special: with the tokens the file's template puts around it."""
    try:
        return encoder.encode(text, add_special_tokens=special)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # e.g. a panic where a pattern of the file tries too many ways through a text
        raise DataError(
            f"a text of {len(text):,} characters cannot be encoded", why=first_line(error), do="change it, or the tokenizer"
        ) from error


def _alphabet(pieces: tuple[bytes, ...]) -> frozenset[int]:
    return frozenset(piece[0] for piece in pieces if len(piece) == 1)


def _piece(token: str, spelled: bool, origin: str) -> bytes:
    """The bytes of one token: its letters through the alphabet, or its spelling for a control token."""
    if spelled:
        return token.encode("utf-8")
    try:
        return bytes(map(byte_of_letter().__getitem__, token))
    except KeyError as error:
        raise ModelFileError(
            f"token {token!r} in {origin}", why=f"{error.args[0]!r} stands for no byte", do="give a byte-level tokenizer"
        ) from error


@lru_cache(maxsize=1)
def byte_of_letter() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes are themselves, the other 68 take the letters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _strings(file: Gguf, key: str) -> list[str]:
    found = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(found, list) or not found or not all(isinstance(item, str) for item in found):
        raise ModelFileError(f"tokenizer.ggml.{key} in {file.path}", why="a list of strings is wanted", do="give a file with its tokenizer")
    return found


def _id(file: Gguf, name: str, size: int) -> int | None:
    found = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return found if isinstance(found, int) and 0 <= found < size else None


def _library(origin: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError(
            f"no tokenizer for {origin}", why="tokenizers is not installed", do="pip install 'ridgeline[hf]'"
        ) from error
    return tokenizers
