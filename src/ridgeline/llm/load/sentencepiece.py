"""SentencePiece-style vocabularies: pieces with scores, and bytes for what has no piece.

    text ──a space before it──> characters ──join the neighbours whose joint piece scores best, leftmost first──> pieces ──> ids
      a character without a piece ──> its UTF-8 bytes, a token each (<0xNN>)

    sentencepiece(pieces, scores, kinds, …) ──> PieceTokenizer
    gguf_sentencepiece(file)   tokenizer.ggml.model = "llama"        read_llama2c_tokenizer(path, count)   tok512.bin of llama2.c

Pieces are held with plain spaces (files write ▁ for them), so a ▁ in a text is itself and comes back. Joining takes
O(n log n) for n characters. Ref: Kudo 2018 (SentencePiece), Karpathy 2023 (llama2.c).
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from pathlib import Path

from ...core.errors import DataError, ModelFileError
from ...workload.gguf import Gguf
from .tokens import PieceTokenizer, split_cut

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # token types, as GGUF numbers them
BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MOST_PIECE_BYTES = 2**12
MOST_FILE_BYTES = 2**26


class Merger:
    """Plain text to ids with one vocabulary."""

    def __init__(self, ranks: Mapping[str, tuple[float, int]], byte_ids: Mapping[int, int], unknown: int | None) -> None:
        self.ranks, self.byte_ids, self.unknown = ranks, byte_ids, unknown

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._join(text):
            if piece in self.ranks:
                ids.append(self.ranks[piece][1])
            else:
                ids += self._fallback(piece)
        return ids

    def _fallback(self, character: str) -> list[int]:
        raw = character.encode("utf-8")
        if all(value in self.byte_ids for value in raw):
            return [self.byte_ids[value] for value in raw]
        if self.unknown is None:
            raise DataError(f"{character!r} in the text", why="this vocabulary has no token for it", do="take it out of the text")
        return [self.unknown]

    def _join(self, text: str) -> list[str]:
        """The pieces of a text: a list of neighbours, and a heap of the joins that are possible."""
        pieces: list[str] = list(text)
        after = [*range(1, len(pieces)), -1]
        before = list(range(-1, len(pieces) - 1))
        # (-score, left place, joined piece): an entry whose places have been joined otherwise since no longer spells the same.
        heap = [
            (-self.ranks[joined][0], left, joined) for left in range(len(pieces) - 1) if (joined := text[left : left + 2]) in self.ranks
        ]
        heapify(heap)
        while heap:
            _, left, joined = heappop(heap)
            right = after[left]
            if right < 0 or not pieces[left] or pieces[left] + pieces[right] != joined:
                continue
            pieces[left], pieces[right] = joined, ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
            for first in (before[left], left):
                if first >= 0 and after[first] >= 0 and (longer := pieces[first] + pieces[after[first]]) in self.ranks:
                    heappush(heap, (-self.ranks[longer][0], first, longer))
        return [piece for piece in pieces if piece]


def sentencepiece(
    pieces: Sequence[str],
    scores: Sequence[float],
    kinds: Sequence[int],
    *,
    bos: int | None,
    eos: int | None,
    add_bos: bool = True,
    space_first: bool = True,
    origin: str,
) -> PieceTokenizer:
    """A tokenizer of pieces with plain spaces; the first of equal pieces counts, as in the files' own readers."""
    if not len(pieces) == len(scores) == len(kinds) or not all(map(math.isfinite, scores)):
        raise ModelFileError(f"vocabulary of {origin}", why="a piece has no type or no finite score", do="download the file again")
    ranks: dict[str, tuple[float, int]] = {}
    controls: dict[str, int] = {}
    always: dict[str, int] = {}
    byte_ids: dict[int, int] = {}
    raw: list[bytes] = []
    for index, (piece, kind) in enumerate(zip(pieces, kinds, strict=True)):
        named = BYTE_NAME.fullmatch(piece)
        raw.append(b"" if kind in (CONTROL, UNKNOWN) else bytes([int(named[1], 16)]) if named and kind == BYTE else piece.encode("utf-8"))
        if kind == BYTE and named:
            byte_ids.setdefault(int(named[1], 16), index)
        elif kind == CONTROL and piece:
            controls.setdefault(piece, index)
        elif kind == USER_DEFINED and piece:
            always.setdefault(piece, index)
        elif kind == NORMAL and piece:
            ranks.setdefault(piece, (scores[index], index))
    unknown = next((index for index, kind in enumerate(kinds) if kind == UNKNOWN), None)
    merger = Merger(ranks, byte_ids, unknown)
    plain = (lambda text: merger(f" {text}")) if space_first else merger
    return PieceTokenizer(split_cut(plain, always, controls), tuple(raw), controls, bos, eos, add_bos, space_first)


def gguf_sentencepiece(file: Gguf) -> PieceTokenizer:
    """The vocabulary in a GGUF file whose tokenizer.ggml.model is "llama"."""
    tokens, scores, kinds = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "scores", "token_type"))
    if not (isinstance(tokens, list) and isinstance(scores, list) and isinstance(kinds, list)):
        raise ModelFileError(f"tokenizer in {file.path}", why="tokens, scores and token_type are lists", do="download the file again")
    if not all(isinstance(token, str) and len(token) <= MOST_PIECE_BYTES for token in tokens) or not all(
        isinstance(score, float) for score in scores
    ):
        raise ModelFileError(f"tokenizer in {file.path}", why="tokens are short strings with a score", do="download the file again")

    def place(name: str) -> int | None:
        found = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return found if type(found) is int and 0 <= found < len(tokens) else None

    return sentencepiece(
        [token.replace("▁", " ") for token in tokens],
        scores,
        kinds,
        bos=place("bos"),
        eos=place("eos"),
        add_bos=file.metadata.get("tokenizer.ggml.add_bos_token", True) is True,
        space_first=file.metadata.get("tokenizer.ggml.add_space_prefix", True) is True,
        origin=str(file.path),
    )


def read_llama2c_tokenizer(path: Path, count: int) -> PieceTokenizer:
    """A tok*.bin of llama2.c: longest piece, then score, length and bytes of each; the file must hold `count` pieces exactly."""
    try:
        data = path.read_bytes() if path.stat().st_size <= MOST_FILE_BYTES else b""
    except OSError as error:
        raise ModelFileError(f"cannot read {path}", why=str(error), do="put the model's tok*.bin beside it") from error
    pieces, scores, place = [], [], 4
    for index in range(count):
        if place + 8 > len(data):
            raise _broken(path, index, place, f"{count} pieces are wanted, and the file ends")
        score, length = struct.unpack_from("<fi", data, place)
        if not 0 <= length <= min(MOST_PIECE_BYTES, len(data) - place - 8):
            raise _broken(path, index, place, f"{length} bytes do not fit in the {len(data) - place - 8} that are left")
        try:
            pieces.append(data[place + 8 : place + 8 + length].decode("utf-8"))
        except UnicodeDecodeError as error:
            raise _broken(path, index, place, "it is not UTF-8") from error
        scores.append(score)
        place += 8 + length
    if place != len(data):
        raise _broken(path, count, place, f"{len(data) - place} bytes follow the last piece")
    kinds = [BYTE if BYTE_NAME.fullmatch(piece) else NORMAL for piece in pieces]
    kinds[: min(3, count)] = [UNKNOWN, CONTROL, CONTROL][:count]  # llama2.c's first three are always these
    pieces[: min(3, count)] = ["<unk>", "<s>", "</s>"][:count]
    known = count >= 3
    return sentencepiece(pieces, scores, kinds, bos=1 if known else None, eos=2 if known else None, origin=str(path))


def _broken(path: Path, index: int, place: int, why: str) -> ModelFileError:
    return ModelFileError(f"piece {index} in {path} at byte {place}", why=why, do="give the tok*.bin that belongs to the model")
