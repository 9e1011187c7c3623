"""A Hugging Face tokenizer.json, where every id stands for known bytes.

    byte-level (GPT-2, Llama 3, Qwen)                    workload's Tokenizer ──┐
    ▁ for spaces with byte fallback (Llama 2, Mistral)   tokenizers library ────┴──> PieceTokenizer

Others (WordPiece, lower-casing, vocabularies without all bytes) do not decode exactly and are refused. Cutting is the library's own;
bytes are read off the vocabulary, so that a stream can be decoded token by token. Newer Llama 2 style files (Metaspace) put no space
before a text that begins with one, so that its first space does not come back: that is how their models were trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.errors import ModelFileError
from ...workload.huggingface_config import first_line
from ...workload.tokenizer import MOST_JSON_BYTES, Tokenizer, build_encoder, encode_with, load_tokenizer
from .sentencepiece import BYTE_NAME
from .tokens import PieceTokenizer, split_cut

MOST_SHOWN = 200


def read_tokenizer(path: Path, begins: str | None, ends: str | None, bos: int | None, add_bos: Any) -> PieceTokenizer:
    """From the file; the tokenizer's settings spell the begin and end tokens, the model's config numbers the begin token."""
    if not path.is_file():
        raise ModelFileError(f"no {path}", why="the vocabulary is read from it", do="save the tokenizer as tokenizer.json (a fast one)")
    try:
        if path.stat().st_size > MOST_JSON_BYTES:
            raise ValueError(f"it is {path.stat().st_size:,} bytes, at most {MOST_JSON_BYTES:,} are read")
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
        spaced = "ByteFallback" in json.dumps(data["decoder"])
        _check(path, data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelFileError(f"cannot read {path}", why=first_line(error), do="download tokenizer.json again") from error
    if spaced:
        encoder = build_encoder(text, str(path))
        made = _spaced(path, text, data, encoder)
    else:
        coder = load_tokenizer(path)
        encoder, made = coder.encoder, wrap(coder)
    start = made.specials.get(begins or "", bos)
    start = start if start is not None and start < made.size else None
    wanted = add_bos if isinstance(add_bos, bool) else start is not None and start in encode_with(encoder, "", special=True).ids[:1]
    return PieceTokenizer(made.cut, made.pieces, made.specials, start, made.specials.get(ends or ""), wanted, made.space_first)


def _check(path: Path, data: dict[str, Any]) -> None:
    """Refuse what would change a text or make it grow: normalisers other than NFC and ▁ for spaces, marks at the ends of words."""
    normalizer = data.get("normalizer") or {}
    for step in normalizer.get("normalizers", [normalizer]) if normalizer else []:
        kind, pattern = step["type"], step.get("pattern")
        known = kind == "NFC" or (kind == "Prepend" and step["prepend"] == "▁")
        if not known and not (kind == "Replace" and pattern == {"String": " "} and step["content"] == "▁"):
            shown = json.dumps(step)[:MOST_SHOWN]
            raise ModelFileError(f"normalizer {shown} in {path}", why="what it does to a text is lost in decoding", do="give another")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if data["model"].get(key):
            raise ModelFileError(f"{key} in {path}", why="such vocabularies do not decode exactly", do="give a byte-level tokenizer")


def wrap(coder: Tokenizer, *, add_bos: bool = False, always: Mapping[str, int] | None = None) -> PieceTokenizer:
    """A byte-level tokenizer of the workload room; control tokens decode to nothing, `always` are tokens in any text."""
    control = set(coder.specials.values())
    pieces = tuple(b"" if index in control else piece for index, piece in enumerate(coder.pieces))
    cut = split_cut(coder.encode, always or {}, coder.specials)
    return PieceTokenizer(cut, pieces, coder.specials, coder.bos, coder.eos, add_bos)


def _spaced(path: Path, text: str, data: dict[str, Any], special: Any) -> PieceTokenizer:
    """▁ for spaces, and a token for each byte."""
    plain = build_encoder(text, str(path))
    plain.encode_special_tokens = True
    names = [plain.id_to_token(index) for index in range(plain.get_vocab_size(with_added_tokens=True))]
    if None in names:
        raise ModelFileError(f"token {names.index(None)} of {path}", why="the ids have a gap", do="download tokenizer.json again")
    missing = 256 - len({name.upper() for name in names if BYTE_NAME.fullmatch(name)})
    if missing:
        raise ModelFileError(f"{path} lacks {missing} bytes", why="text without a token for it would be lost", do="give another tokenizer")
    added = {entry["content"]: bool(entry.get("special")) for entry in data.get("added_tokens") or []}
    controls = {name: index for index, name in enumerate(names) if added.get(name)}
    pieces = tuple(_piece(name, added) for name in names)
    first = encode_with(plain, "a").tokens[:1]

    def cut(words: str, with_special: bool) -> list[int]:
        return list(encode_with(special if with_special else plain, words).ids)

    return PieceTokenizer(cut, pieces, controls, space_first=bool(first) and first[0].startswith("▁"))


def _piece(name: str, added: dict[str, bool]) -> bytes:
    if name in added:
        return b"" if added[name] else name.encode("utf-8")
    named = BYTE_NAME.fullmatch(name)
    return bytes([int(named[1], 16)]) if named else name.replace("▁", " ").encode("utf-8")
