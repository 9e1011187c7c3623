"""load_model: from a name or a path to a decoder on its device.

    name_or_path ──kind──> Source(config, tensors, tokenizer) ──from_huggingface──> Decoder ──weights="int8"──> Loaded
      folder/            Hugging Face: folder.py            builtin              the small model that comes with the package
      model.gguf         gguf_file.py                       smollm2-135m, …      published files found under RIDGELINE_DATA
      model.bin          llama2.c: llama2c.py               llama-3-8b:random    a named shape, weights drawn on the device

Weights go to the device one tensor at a time. dtype "auto" is bfloat16 on a GPU and float32 on the CPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...core.errors import ModelFileError, OptionError
from .loaded import Loaded
from .source import Source
from .tokens import byte_tokenizer

if TYPE_CHECKING:
    from ..model.config import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
RANDOM = ":random"
BUILTIN = Path(__file__).parent.parent / "builtin"
PUBLISHED = {
    "smollm2-135m": ("SmolLM2-135M-Instruct.Q4_1.gguf", "download SmolLM2-135M-Instruct as GGUF Q4_1"),
    "stories260k": ("stories260K/stories260K.bin", "download stories260K.bin and tok512.bin of tinyllamas"),
}
"""Name → a file under RIDGELINE_DATA, and how to come by it."""


def load_model(
    name_or_path: str | Path, *, dtype: str = "auto", device: str = "auto", weights: str | None = None, context: int | None = None
) -> Loaded:
    """A model ready to generate. weights: "int8" or "int4" quantises them; context: fewer positions than the model was made for."""
    place = device_of(device)
    kind = dtype_of(dtype, place)
    if weights not in (None, "int8", "int4"):
        raise OptionError(f"weights {weights!r}", why="they stay as they are, or become int8 or int4", do="give int8, int4 or nothing")
    name = str(name_or_path)
    loaded = _random(name.removesuffix(RANDOM), place, kind) if name.endswith(RANDOM) else _read(open_source(name), place, kind)
    loaded.config = _shorter(loaded.config, context)
    if weights is not None:
        from ..model.linear import quantise_decoder_

        quantise_decoder_(loaded.model, weights)
    loaded.model.eval().requires_grad_(False)
    return loaded


def _random(shape: str, device: torch.device, dtype: torch.dtype) -> Loaded:
    """For speed, not for text: prompts are bytes, ids from 256 on stand for nothing, and no token ends an answer."""
    from ..model.config import config_named
    from ..model.weights import random_decoder

    config = config_named(shape)
    return Loaded(random_decoder(config, dtype=dtype, device=device), byte_tokenizer(), config, f"{shape}{RANDOM}", None, (), None)


def _read(source: Source, device: torch.device, dtype: torch.dtype) -> Loaded:
    from ..model.weights import from_huggingface

    check(source)
    model = from_huggingface(source.config, source.tensors, dtype=dtype, device=device, origin=source.tensors.origin)
    return Loaded(model, source.tokenizer, source.config, source.name, source.chat_template, source.eos, source.tokenizer.bos)


def open_source(name: str) -> Source:
    """The kind of model that `name` is, opened and checked; no weight is read yet."""
    from .folder import open_folder
    from .gguf_file import open_gguf_model
    from .llama2c import open_llama2c

    if name == "builtin":
        return replace(open_folder(BUILTIN), name="builtin")
    path = Path(name).expanduser()
    if name.lower() in PUBLISHED and not path.exists():
        path = _published(name.lower())
    if path.is_dir():
        return open_folder(path)
    if path.is_file():
        return open_llama2c(path) if path.suffix == ".bin" else open_gguf_model(path)
    known = ", ".join(("builtin", *PUBLISHED))
    raise ModelFileError(
        f"no model {name}", why=f"no file or folder of that name, and no name of {known}", do="check the path, or give SHAPE:random"
    )


def _published(name: str) -> Path:
    from ...workload.data.find import find_file

    file, get = PUBLISHED[name]
    return find_file(file, Path(file).name, get=get)


def check(source: Source) -> None:
    """What would cost time or memory to find out later: vocabulary, last layer and tables must be there."""
    config, origin = source.config, source.tensors.origin
    if source.tokenizer.size > config.vocab:
        why = f"the model has rows for {config.vocab:,}"
        raise ModelFileError(f"a vocabulary of {source.tokenizer.size:,} in {origin}", why=why, do="give the model's own tokenizer")
    deepest = f".{config.layers - 1}."
    if not any(deepest in name for name in source.tensors):
        raise ModelFileError(f"no weights of layer {config.layers - 1} in {origin}", why="its config has as many", do="download it again")
    wanted = {"embed_tokens.weight": (config.vocab, config.hidden), "wte.weight": (config.vocab, config.hidden)}
    for name, shape in source.tensors.shapes.items():
        expected = wanted.get(".".join(name.split(".")[-2:]))
        if expected is not None and shape != expected:
            raise ModelFileError(
                f"tensor {name} in {origin} is {list(shape)}", why=f"the config says {list(expected)}", do="download it again"
            )


def device_of(device: str) -> torch.device:
    """ "auto": the GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"device {device!r}", why="torch has no such device", do="give cpu, cuda, cuda:1 or auto") from error
    if found.type not in ("cpu", "cuda") or (found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count()):
        raise OptionError(f"device {device!r}", why="it is not there, or the decoder does not run on it", do="give cpu, cuda or auto")
    return found


def dtype_of(dtype: str, device: torch.device) -> torch.dtype:
    """ "auto": bfloat16 on a GPU, float32 on the CPU."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise OptionError(f"dtype {dtype!r}", why="no model is computed in it", do=f"give auto or one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _shorter(config: ModelConfig, context: int | None) -> ModelConfig:
    if context is None:
        return config
    if not 1 <= context <= config.context:
        raise OptionError(f"context {context:,}", why=f"the model was made for 1 to {config.context:,} positions", do="give fewer")
    return replace(config, context=context)
