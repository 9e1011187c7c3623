"""Tensors of a file into a Decoder, under Hugging Face's names, merged on the way.

    (name, tensor) one by one ──place──> checked: known, of the right shape, finite, not twice ──> device and dtype
      q, k, v ──> attention.qkv      gate, up ──> perceptron.up      GPT-2: Conv1D weights [K, N] ──turned──> [N, K]
    a parameter is made when its last piece is there: beside the model, memory holds the pieces of one product

Nothing is allocated by what a config says alone: sizes must be met by tensors first. At the end nothing may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...core.errors import ModelFileError
from .config import ModelConfig
from .decoder import Decoder

Tensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
IGNORED = re.compile(r".*\.rotary_emb\.inv_freq|(transformer\.)?h\.\d+\.attn\.(masked_)?bias")
"""Tables some old files hold that are computed, not learned."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of a file goes: piece `piece` of `pieces` of a parameter."""

    parameter: str
    shape: tuple[int, ...]  # in the file
    turned: bool = False  # stored [K, N]
    piece: int = 0
    pieces: int = 1


def from_huggingface(
    config: ModelConfig, tensors: Tensors, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu", origin: str = "the file"
) -> Decoder:
    """A decoder filled with the tensors of a Hugging Face folder, in eval mode; `dtype` None: that of the embedding table."""
    decoder = _on_meta(config)
    places = huggingface_places(config)
    waiting: dict[str, dict[int, Tensor]] = {}
    done: set[str] = set()
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        name = name.removeprefix("transformer.") if config.family == "gpt2" else name
        if IGNORED.fullmatch(name) or (config.tied and name == "lm_head.weight"):
            continue
        place = _checked(name, tensor, places, done, origin, dtype or tensor.dtype)
        done.add(name)
        moved = tensor.to(device=device, dtype=dtype or tensor.dtype)
        pieces = waiting.setdefault(place.parameter, {})
        pieces[place.piece] = moved.t() if place.turned else moved
        if len(pieces) == place.pieces:
            _set(decoder, place.parameter, torch.cat([pieces[i] for i in range(place.pieces)]) if place.pieces > 1 else pieces[0])
            del waiting[place.parameter]
    missing = sorted(places.keys() - done)
    if missing:
        raise ModelFileError(
            f"tensor {missing[0]} is missing from {origin}", why=f"{len(missing)} of {len(places)} are", do="download it again"
        )
    return _finished(decoder, dtype or decoder.embed.weight.dtype, device)


def random_decoder(
    config: ModelConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> Decoder:
    """A decoder with random weights, drawn on the device: each product keeps the size of what it reads; norms are 1, biases small."""
    decoder = _on_meta(config)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in list(decoder.named_parameters()):
        empty = torch.empty(parameter.shape, dtype=dtype, device=device)
        if parameter.dim() == 1:
            scaled = "norm" in name and name.endswith("weight")
            filled = empty.fill_(1.0) if scaled else empty.normal_(0.0, 0.02, generator=generator)
        else:
            filled = empty.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        _set(decoder, name, filled)
    return _finished(decoder, dtype, device)


def huggingface_places(config: ModelConfig) -> dict[str, Place]:
    """Every name a file of this model must hold."""
    return _gpt2_places(config) if config.family == "gpt2" else _rotary_places(config)


def _rotary_places(config: ModelConfig) -> dict[str, Place]:
    hidden, inner = config.hidden, config.intermediate
    width, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
    places = {
        "model.embed_tokens.weight": Place("embed.weight", (config.vocab, hidden)),
        "model.norm.weight": Place("norm.weight", (hidden,)),
    }
    if not config.tied:
        places["lm_head.weight"] = Place("lm_head.weight", (config.vocab, hidden))
    for index in range(config.layers):
        theirs, ours = f"model.layers.{index}.", f"layers.{index}."
        for name, norm in (("input_layernorm", "attention_norm"), ("post_attention_layernorm", "perceptron_norm")):
            places[f"{theirs}{name}.weight"] = Place(f"{ours}{norm}.weight", (hidden,))
        if config.qk_norm:
            places[f"{theirs}self_attn.q_norm.weight"] = Place(f"{ours}attention.query_norm.weight", (config.head_dim,))
            places[f"{theirs}self_attn.k_norm.weight"] = Place(f"{ours}attention.key_norm.weight", (config.head_dim,))
        for name, product, rows, columns, bias, piece, pieces in (
            ("self_attn.q_proj", "attention.qkv", width, hidden, config.qkv_bias, 0, 3),
            ("self_attn.k_proj", "attention.qkv", narrow, hidden, config.qkv_bias, 1, 3),
            ("self_attn.v_proj", "attention.qkv", narrow, hidden, config.qkv_bias, 2, 3),
            ("self_attn.o_proj", "attention.out", hidden, width, config.out_bias, 0, 1),
            ("mlp.gate_proj", "perceptron.up", inner, hidden, config.mlp_bias, 0, 2),
            ("mlp.up_proj", "perceptron.up", inner, hidden, config.mlp_bias, 1, 2),
            ("mlp.down_proj", "perceptron.down", hidden, inner, config.mlp_bias, 0, 1),
        ):
            places[f"{theirs}{name}.weight"] = Place(f"{ours}{product}.weight", (rows, columns), piece=piece, pieces=pieces)
            if bias:
                places[f"{theirs}{name}.bias"] = Place(f"{ours}{product}.bias", (rows,), piece=piece, pieces=pieces)
    return places


def _gpt2_places(config: ModelConfig) -> dict[str, Place]:
    hidden, inner = config.hidden, config.intermediate
    places = {
        "wte.weight": Place("embed.weight", (config.vocab, hidden)),
        "wpe.weight": Place("position.weight", (config.context, hidden)),
        "ln_f.weight": Place("norm.weight", (hidden,)),
        "ln_f.bias": Place("norm.bias", (hidden,)),
    }
    if not config.tied:
        places["lm_head.weight"] = Place("lm_head.weight", (config.vocab, hidden))
    for index in range(config.layers):
        theirs, ours = f"h.{index}.", f"layers.{index}."
        for name, norm in (("ln_1", "attention_norm"), ("ln_2", "perceptron_norm")):
            places[f"{theirs}{name}.weight"] = Place(f"{ours}{norm}.weight", (hidden,))
            places[f"{theirs}{name}.bias"] = Place(f"{ours}{norm}.bias", (hidden,))
        for name, product, columns, rows in (
            ("attn.c_attn", "attention.qkv", hidden, 3 * hidden),
            ("attn.c_proj", "attention.out", hidden, hidden),
            ("mlp.c_fc", "perceptron.up", hidden, inner),
            ("mlp.c_proj", "perceptron.down", inner, hidden),
        ):
            places[f"{theirs}{name}.weight"] = Place(f"{ours}{product}.weight", (columns, rows), turned=True)
            places[f"{theirs}{name}.bias"] = Place(f"{ours}{product}.bias", (rows,))
    return places


def _checked(name: str, tensor: Tensor, places: Mapping[str, Place], done: set[str], origin: str, dtype: torch.dtype) -> Place:
    """The place of a tensor that may go there."""
    if name not in places or name in done:
        why = "the model has no place for it" if name not in places else "it is there twice"
        raise ModelFileError(f"tensor {name} in {origin}", why=why, do="give the weights of this very model")
    place = places[name]
    if tuple(tensor.shape) != place.shape or not tensor.is_floating_point():
        raise ModelFileError(
            f"tensor {name} in {origin} is {tensor.dtype} {list(tensor.shape)}",
            why=f"the model has floats {list(place.shape)} there", do="give the weights of this very model",
        )  # fmt: skip
    ends = torch.stack(torch.aminmax(tensor))
    if not bool(torch.isfinite(ends).all()):
        raise ModelFileError(f"tensor {name} in {origin} is not finite", why="it holds NaN or infinity", do="download it again")
    if not bool(torch.isfinite(ends.to(dtype)).all()):
        raise ModelFileError(
            f"tensor {name} in {origin} in {dtype}",
            why=f"it holds {float(ends.abs().max()):g}, which is infinity there",
            do="give dtype bfloat16",
        )
    return place


def _on_meta(config: ModelConfig) -> Decoder:
    with torch.device("meta"):
        return Decoder(config)


def _set(decoder: Decoder, name: str, tensor: Tensor) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(decoder.get_submodule(parent), attribute, nn.Parameter(tensor.contiguous(), requires_grad=False))


def _finished(decoder: Decoder, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    if decoder.config.tied:
        decoder.lm_head.weight = decoder.embed.weight  # type: ignore[assignment]
    decoder = decoder.to(device=device, dtype=dtype).eval()
    if decoder.device.type == "cuda":
        torch.cuda.synchronize(decoder.device)  # decoder.forward reads weights ahead of what is queued
    return decoder
