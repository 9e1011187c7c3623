"""Models of llama2.c: one .bin of float32 weights, its vocabulary in a tok*.bin beside it.

    7 int32: hidden, intermediate, layers, heads, kv_heads, ±vocab (negative: an output matrix of its own), context
    weights, each kind for all layers: embedding, attention norms, q, k, v, o, perceptron norms, w1, w2, w3, last norm,
    two tables of rotary angles that are computed here and skipped, output matrix where it is its own

The file must be exactly as long as its header says. Rows of q and k are pairs (2i, 2i+1) of one rotation, and are put in our order.
Both <s> and </s> end a story: llama2.c stops at the first. Ref: Karpathy 2023 (llama2.c, legacy export).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from torch import Tensor

from ...core.errors import ModelFileError
from ...workload.pretrained import half_split
from ..model.config import ModelConfig, config_of
from .sentencepiece import read_llama2c_tokenizer
from .source import Source
from .tensors import Tensors

HEADER = struct.Struct("<7i")
MAGIC = 0x616B3432  # the newer formats begin with it
LAYER = "model.layers.{}."


def open_llama2c(path: Path) -> Source:
    """The model and the tok*.bin beside it."""
    config = _config(path)
    places, floats = _layout(config)
    wanted = HEADER.size + 4 * floats
    if path.stat().st_size != wanted:
        raise ModelFileError(
            f"{path} is {path.stat().st_size:,} bytes", why=f"a model of these sizes takes {wanted:,}", do="download it again"
        )
    data = numpy.memmap(path, dtype="<f4", mode="r", offset=HEADER.size)
    readers: dict[str, Callable[[], Tensor]] = {}
    for name, (start, shape) in places.items():
        readers[name] = _reader(data, start, shape, config.head_dim if ".q_proj" in name or ".k_proj" in name else None)
    tokenizer = read_llama2c_tokenizer(_vocabulary_file(path, config.vocab), config.vocab)
    eos = tuple(index for index in (tokenizer.eos, tokenizer.bos) if index is not None)
    return Source(path.stem, config, Tensors(readers, {name: shape for name, (_, shape) in places.items()}, str(path)), tokenizer, eos=eos)


def _config(path: Path) -> ModelConfig:
    with path.open("rb") as stream:
        head = stream.read(HEADER.size)
    if len(head) < HEADER.size:
        raise ModelFileError(f"{path} is {len(head)} bytes", why=f"the header alone takes {HEADER.size}", do="download it again")
    hidden, intermediate, layers, heads, kv_heads, vocab, context = HEADER.unpack(head)
    if hidden == MAGIC:
        raise ModelFileError(f"{path} is of a newer llama2.c format", why="the first (legacy) one is read", do="export with --version 0")
    data = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": abs(vocab), "max_position_embeddings": context,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": vocab > 0,
    }  # fmt: skip
    return config_of(data, str(path))


def _layout(config: ModelConfig) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int]:
    """Name → (first float, shape), and floats in all."""
    hidden, narrow = config.hidden, config.kv_heads * config.head_dim
    parts: list[tuple[str | None, tuple[int, ...]]] = [("model.embed_tokens.weight", (config.vocab, hidden))]
    kinds: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("input_layernorm", (hidden,)),
        ("self_attn.q_proj", (hidden, hidden)),
        ("self_attn.k_proj", (narrow, hidden)),
        ("self_attn.v_proj", (narrow, hidden)),
        ("self_attn.o_proj", (hidden, hidden)),
        ("post_attention_layernorm", (hidden,)),
        ("mlp.gate_proj", (config.intermediate, hidden)),
        ("mlp.down_proj", (hidden, config.intermediate)),
        ("mlp.up_proj", (config.intermediate, hidden)),
    )
    for name, shape in kinds:
        parts += [(f"{LAYER.format(layer)}{name}.weight", shape) for layer in range(config.layers)]
    parts += [("model.norm.weight", (hidden,)), (None, (config.context, config.head_dim))]  # None: cosines and sines
    parts += [] if config.tied else [("lm_head.weight", (config.vocab, hidden))]
    places: dict[str, tuple[int, tuple[int, ...]]] = {}
    start = 0
    for part, shape in parts:
        if part is not None:
            places[part] = (start, shape)
        start += math.prod(shape)
    return places, start


def _reader(
    data: numpy.memmap[tuple[int], numpy.dtype[numpy.float32]], start: int, shape: tuple[int, ...], head_dim: int | None
) -> Callable[[], Tensor]:
    def read() -> Tensor:
        tensor = torch.from_numpy(numpy.array(data[start : start + math.prod(shape)])).reshape(shape)
        return tensor if head_dim is None else half_split(tensor, head_dim)

    return read


def _vocabulary_file(path: Path, vocab: int) -> Path:
    names = [path.with_name(name) for name in (f"tok{vocab}.bin", "tokenizer.bin")]
    for candidate in names:
        if candidate.is_file():
            return candidate
    raise ModelFileError(f"no vocabulary for {path}", why=f"neither {names[0].name} nor {names[1].name} is beside it", do="put it there")
