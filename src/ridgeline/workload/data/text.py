"""Text as windows of tokens, every token predicted from those before it in its window.

    text ──tokenizer──> ids ──windows of `context`──> inputs [N,T], targets [N,T]
      bos=False   inputs ids[kT : kT+T], targets one later; the tail that fills no window is left out
      bos=True    inputs begin-of-text then ids[kT : kT+T-1], targets ids[kT : kT+T]

Windows do not overlap, so perplexity over them is that of predicting with between 1 and T tokens seen. text_bytes counts the bytes
behind the targets, exactly. Tokens are bytes unless a tokenizer is named. Ref: Merity 2016 (WikiText-2).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.errors import DataError, OptionError
from . import Data, Split
from .find import find_file

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

MOST_BYTES = 2**30
MOST_CONTEXT = 2**20
TRAIN_FILES = ("wikitext2_raw_train.txt", "wikitext2_raw_valid.txt", "wikitext2_train.txt", "wikitext2_valid.txt")
TEST_FILES = ("wikitext2_raw_test.txt", "wikitext2_test.txt")
GET = "download wikitext-2-raw-v1 and save its parts as wikitext2_raw_train.txt and wikitext2_raw_test.txt"


def load_wikitext2(*, tokenizer: str | Path = "bytes", context: int = 512, bos: bool = False) -> Data:
    """WikiText-2; trained on the first of TRAIN_FILES that is found (the smaller validation text will do), tested on the raw test text."""
    train, test = (find_file(*_places(files), get=GET) for files in (TRAIN_FILES, TEST_FILES))
    return text_data("wikitext2", train, test, tokenizer=tokenizer, context=context, bos=bos)


def _places(files: tuple[str, ...]) -> list[str]:
    return [place for file in files for place in (file, f"text/{file}")]


def text_data(name: str, train: Path, test: Path, *, tokenizer: str | Path = "bytes", context: int = 512, bos: bool = False) -> Data:
    """Two text files as windows of tokens; `tokenizer` is "bytes", a GGUF file or a tokenizer.json."""
    if not 1 <= context <= MOST_CONTEXT:
        raise OptionError(f"context {context} for {name}", why=f"windows hold 1 to {MOST_CONTEXT} tokens", do="give e.g. 512")
    if str(tokenizer) == "bytes":
        if bos:
            raise OptionError(f"bos=True for {name} in bytes", why="bytes have no begin-of-text token", do="give a tokenizer")
        parts = [windows(_bytes(path), context, path, None) for path in (train, test)]
        return Data(name, "tokens", 256, parts[0], parts[1])
    from ..tokenizer import load_tokenizer

    coder = load_tokenizer(tokenizer)
    parts = [windows(_ids(path, coder), context, path, coder, bos) for path in (train, test)]
    return Data(name, "tokens", coder.size, parts[0], parts[1])


def _bytes(path: Path) -> Tensor:
    return torch.frombuffer(bytearray(read_text(path).encode("utf-8")), dtype=torch.uint8).to(torch.int64)


def _ids(path: Path, coder: Tokenizer) -> Tensor:
    return torch.tensor(coder.encode(read_text(path)), dtype=torch.int64)


def read_text(path: Path) -> str:
    """A whole UTF-8 file."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise DataError(f"{path} holds {path.stat().st_size:,} bytes", why=f"at most {MOST_BYTES:,} are read", do="give a part of it")
        with path.open(encoding="utf-8", newline="") as stream:  # newline="": the text's own line ends, byte for byte
            text = stream.read()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}", why=str(error), do="give a text file in UTF-8") from error
    if not text:
        raise DataError(f"{path} is empty", why="there is nothing to predict", do="give a text")
    return text


def windows(ids: Tensor, context: int, origin: Path, coder: Tokenizer | None, bos: bool = False) -> Split:
    """[tokens] to a Split of [N,context] windows."""
    count = (len(ids) - (0 if bos else 1)) // context
    if count < 1:
        raise DataError(
            f"{origin} holds {len(ids)} tokens", why=f"one window needs {context + (0 if bos else 1)}", do="give a smaller context"
        )
    if bos:
        if coder is None or coder.bos is None:
            raise OptionError("bos=True", why="this tokenizer has no begin-of-text token", do="leave bos out")
        targets = ids[: count * context].reshape(count, context)
        inputs = torch.cat((torch.full((count, 1), coder.bos), targets[:, :-1]), dim=1)
    else:
        inputs = ids[: count * context].reshape(count, context)
        targets = ids[1 : count * context + 1].reshape(count, context)
    size = targets.numel() if coder is None else coder.text_bytes(targets.flatten().tolist())
    return Split(inputs, targets.contiguous(), size)
