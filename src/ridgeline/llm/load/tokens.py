"""Text to ids and back, whatever file the vocabulary came from.

    text ──cut(text, special)──> ids          encode: with the begin-of-text token first, where the model wants it
    ids ──pieces[id]──> bytes ──> text        decode: control tokens stand for nothing
    id, id, … ──StreamDecoder──> whole characters as soon as their last byte is there

Every kind of vocabulary (byte-level, SentencePiece, tokenizer.json, plain bytes) gives two things: a function that cuts a text
into ids, and the bytes each id stands for. SentencePiece puts a space before a text; decode takes that one away after the
begin-of-text token, where encode had put it, and nowhere else: what a model adds to a prompt keeps its spaces.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ...core.errors import DataError


class TextTokenizer(Protocol):
    """What the engine and the server ask of a tokenizer."""

    @property
    def size(self) -> int:
        """How many ids there are; a model may have more rows than that, which stand for no text."""

    @property
    def bos(self) -> int | None:
        """Begin of text."""

    @property
    def eos(self) -> int | None:
        """End of text."""

    @property
    def specials(self) -> Mapping[str, int]:
        """Control tokens by their spelling."""

    def encode(self, text: str, add_bos: bool | None = None, *, special: bool = False) -> list[int]:
        """The ids; add_bos None: as the model was trained. special: spellings of control tokens become those tokens."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text, with a replacement character for bytes that are no UTF-8."""

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes behind ids, exactly."""


Cut = Callable[[str, bool], list[int]]
"""(text, whether control tokens are recognised) → ids."""


@dataclass(frozen=True, slots=True)
class PieceTokenizer:
    """A TextTokenizer of a cutting function and the bytes of each id."""

    cut: Cut
    pieces: tuple[bytes, ...]  # b"" for control tokens
    specials: dict[str, int] = field(default_factory=dict)
    bos: int | None = None
    eos: int | None = None
    add_bos: bool = False
    space_first: bool = False  # the cutting function puts a space before the text

    @property
    def size(self) -> int:
        return len(self.pieces)

    def encode(self, text: str, add_bos: bool | None = None, *, special: bool = False) -> list[int]:
        check_text(text)
        wanted = self.add_bos if add_bos is None else add_bos
        ids = self.cut(text, special)
        return [self.bos, *ids] if wanted and self.bos is not None else ids

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        listed = list(ids)
        found = b"".join(self.pieces[index] for index in listed if 0 <= index < len(self.pieces))
        begins = self.space_first and bool(listed) and listed[0] == self.bos
        return found.removeprefix(b" ") if begins else found


class StreamDecoder:
    """Ids one at a time to text; a character is given out when its last byte has come."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """What this token completes; bytes that can never be a character become the replacement character at once."""
        return self.characters.decode(self.tokenizer.decode_bytes((token_id,)))

    def flush(self) -> str:
        """What is left at the end: a replacement character where one was cut short. The decoder is as new afterwards."""
        return self.characters.decode(b"", final=True)


def check_text(text: str) -> None:
    """Refuse half surrogate pairs, which no UTF-8 file can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text holds {text[error.start]!r}", why="half a surrogate pair is no character", do="read it as UTF-8"
        ) from error


def split_cut(plain: Callable[[str], list[int]], always: Mapping[str, int], specials: Mapping[str, int]) -> Cut:
    """`plain` on the text between added tokens: `always` are recognised in any text, `specials` only when asked for."""
    wholes = {False: dict(always), True: {**always, **specials}}
    patterns = {
        special: re.compile("|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))) if names else None
        for special, names in wholes.items()
    }

    def cut(text: str, special: bool) -> list[int]:
        pattern, ids, place = patterns[special], [], 0
        for match in pattern.finditer(text) if pattern else ():
            ids += plain(text[place : match.start()]) if match.start() > place else []
            ids.append(wholes[special][match.group()])
            place = match.end()
        return ids + plain(text[place:]) if place < len(text) else ids

    return cut


def byte_tokenizer() -> PieceTokenizer:
    """Ids 0 to 255 are bytes: for models without a vocabulary of their own."""
    return PieceTokenizer(lambda text, special: list(text.encode("utf-8")), tuple(bytes([value]) for value in range(256)))
