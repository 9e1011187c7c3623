"""What a decoder is made of, from a Hugging Face config.json or a name; checked before anything is built from it.

    config.json (dict) ──config_of──> ModelConfig, or ModelFileError naming the key
    "llama-3-8b"       ──config_named──> ModelConfig

Families: llama, mistral, qwen2, qwen3, gpt2. What the decoder does not compute (other activations, experts, partial rotations, rope
types longrope and the like) is refused by its key, never ignored; so are keys of rope scalings that are not known here.
rope type "dynamic" does nothing within max_position_embeddings, which is as far as contexts go here: it is taken as no scaling.
A window of w: a token sees itself and the w - 1 tokens before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...core.errors import ModelFileError, unknown_name
from ...workload.models.decoder import CONFIGS, DecoderConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
MOST = {
    "layers": 1000, "hidden": 2**16, "intermediate": 2**18, "heads": 2**10, "kv_heads": 2**10, "head_dim": 2**10, "vocab": 2**20,
    "context": 2**24,
}  # fmt: skip
"""Largest sizes taken from a file."""
CONTEXTS = {
    "llama-3-8b": 8192, "llama-3.2-1b": 131_072, "tinyllama-1.1b": 2048, "qwen2.5-0.5b": 32_768, "qwen2.5-1.5b": 32_768,
    "smollm2-135m": 8192,
}  # fmt: skip
"""Positions the named models were made for; their sizes are workload's."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary positions are stretched beyond `original_context`. Formulas: rope.py."""

    kind: str  # "linear" | "llama3" | "yarn"
    factor: float
    original_context: int = 8192  # llama3 and yarn
    low_turns: float = 1.0  # llama3: waves that turn less often in the original context are stretched fully
    high_turns: float = 4.0  # llama3: waves that turn more often are left
    beta_fast: float = 32.0  # yarn: as high_turns
    beta_slow: float = 1.0  # yarn: as low_turns
    truncate: bool = True  # yarn: the ramp begins and ends at whole features
    attention_factor: float = 1.0  # yarn: what cos and sin are multiplied by


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes and kinds of a decoder's parts."""

    family: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context: int  # most positions it was made for
    norm: str = "rms"  # "rms" | "layer"
    norm_eps: float = 1e-5
    activation: str = "silu"  # "silu": gated perceptron | "gelu_tanh": the plain one of GPT-2
    positions: str = "rope"  # "rope" | "learned"
    rope_theta: float = 1e4
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # an RMS norm of each head of query and key
    windows: tuple[int | None, ...] | None = None  # a layer's sliding window; None: all of the past
    tied: bool = False  # the embedding table is also the output matrix

    def kv_bytes_per_token(self, item_bytes: float) -> int:
        """Bytes of keys and values a token takes in all layers."""
        return round(2 * self.layers * self.kv_heads * self.head_dim * item_bytes)

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer; None: it sees all of the past."""
        return None if self.windows is None else self.windows[layer]

    @property
    def weights(self) -> int:
        """Numbers that are read for one token: all but the input table, of which one row is."""
        width, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        projections = 3 if self.activation == "silu" else 2
        layer = self.hidden * (2 * width + 2 * narrow) + projections * self.hidden * self.intermediate
        return self.layers * layer + self.vocab * self.hidden


def config_named(name: str) -> ModelConfig:
    """The shape of a named decoder (`ridgeline models`)."""
    if name not in CONFIGS:
        raise unknown_name("decoder", name, CONFIGS, "`ridgeline models`")
    return from_workload(CONFIGS[name], CONTEXTS[name])


def from_workload(sizes: DecoderConfig, context: int) -> ModelConfig:
    """The same decoder as the workload room describes it."""
    stretched = RopeScaling("llama3", sizes.rope_factor) if sizes.rope_factor != 1.0 else None
    return ModelConfig(
        "qwen2" if sizes.qkv_bias else "llama", sizes.vocab, sizes.hidden, sizes.layers, sizes.heads, sizes.kv_heads, sizes.head_dim,
        sizes.intermediate, context, norm_eps=sizes.norm_eps, rope_theta=sizes.rope_theta, rope_scaling=stretched,
        qkv_bias=sizes.qkv_bias, tied=sizes.tied,
    )  # fmt: skip


def config_of(data: dict[str, Any], origin: str) -> ModelConfig:
    """The decoder of a config.json; keys that are absent have the family's defaults."""
    family = data.get("model_type")
    if family not in FAMILIES:
        raise refused("model_type", family, origin, f"decoders of {', '.join(FAMILIES)} are computed")
    if data.get("quantization_config"):
        raise refused("quantization_config", data["quantization_config"], origin, "weights are read as floats, then quantised by weights=")
    return _gpt2(data, origin) if family == "gpt2" else _rotary(str(family), data, origin)


def refused(name: str, value: Any, origin: str, why: str) -> ModelFileError:
    """The error for a key of a model file that cannot be followed."""
    shown = repr(value) if len(repr(value)) <= 200 else f"{repr(value)[:200]}…"
    return ModelFileError(f"{name} = {shown} in {origin}", why=why, do=f"give a decoder of {', '.join(FAMILIES)}, or correct the file")


def checked(config: ModelConfig, origin: str) -> ModelConfig:
    """The same config, if its sizes are whole numbers within bounds that fit each other."""
    for name, most in MOST.items():
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise refused(name, value, origin, f"a whole number from 1 to {most}")
    if config.heads % config.kv_heads:
        raise refused("kv_heads", config.kv_heads, origin, f"{config.heads} heads must be shared out evenly")
    if config.positions == "rope" and config.head_dim % 2:
        raise refused("head_dim", config.head_dim, origin, "rotary positions turn features in pairs")
    if config.windows is not None:
        if len(config.windows) != config.layers:
            raise refused("windows", len(config.windows), origin, f"one a layer, of {config.layers}")
        for window in config.windows:
            if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
                raise refused("sliding_window", window, origin, "a whole number above 0")
    return config


def _rotary(family: str, data: dict[str, Any], origin: str) -> ModelConfig:
    """Llama, Mistral, Qwen2 and Qwen3."""
    if data.get("hidden_act", "silu") != "silu":
        raise refused("hidden_act", data["hidden_act"], origin, "the decoder computes silu")
    heads, hidden, layers = (_size(data, key, origin) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    head_dim = data.get("head_dim") or (128 if family == "qwen3" else None)
    if head_dim is None and hidden % heads:
        raise refused("num_attention_heads", heads, origin, f"no head_dim, and {hidden} features do not split evenly")
    usual_kv = 8 if family == "mistral" else heads
    context = data.get("max_position_embeddings", {"llama": 2048, "mistral": 131_072}.get(family, 32_768))
    bias = _flag(data, "attention_bias", False, origin) if family in ("llama", "qwen3") else False
    theta, scaling = rope_of(data, context, origin)
    config = ModelConfig(
        family, _size(data, "vocab_size", origin), hidden, layers, heads, data.get("num_key_value_heads") or usual_kv,
        head_dim or hidden // heads, _size(data, "intermediate_size", origin), context,
        norm_eps=number("rms_norm_eps", data.get("rms_norm_eps", 1e-6), origin), rope_theta=theta, rope_scaling=scaling,
        qkv_bias=family == "qwen2" or bias, out_bias=bias, qk_norm=family == "qwen3",
        mlp_bias=_flag(data, "mlp_bias", False, origin) if family == "llama" else False,
        windows=_windows(family, data, layers, origin), tied=_flag(data, "tie_word_embeddings", False, origin),
    )  # fmt: skip
    return checked(config, origin)


def _gpt2(data: dict[str, Any], origin: str) -> ModelConfig:
    for key, usual in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False), ("add_cross_attention", False)):
        if _flag(data, key, usual, origin) is not usual:
            raise refused(key, data[key], origin, "the decoder does not compute it")
    activation = data.get("activation_function", "gelu_new")
    if activation not in ("gelu_new", "gelu_pytorch_tanh"):
        raise refused("activation_function", activation, origin, "the decoder computes gelu_new")
    hidden, heads = _size(data, "n_embd", origin), _size(data, "n_head", origin)
    if hidden % heads:
        raise refused("n_head", heads, origin, f"{hidden} features do not split evenly")
    config = ModelConfig(
        "gpt2", _size(data, "vocab_size", origin), hidden, _size(data, "n_layer", origin), heads, heads, hidden // heads,
        data.get("n_inner") or 4 * hidden, data.get("n_positions", 1024), norm="layer",
        norm_eps=number("layer_norm_epsilon", data.get("layer_norm_epsilon", 1e-5), origin), activation="gelu_tanh", positions="learned",
        qkv_bias=True, out_bias=True, mlp_bias=True, tied=_flag(data, "tie_word_embeddings", True, origin),
    )  # fmt: skip
    return checked(config, origin)


def _windows(family: str, data: dict[str, Any], layers: int, origin: str) -> tuple[int | None, ...] | None:
    """Each layer's window: Mistral's is that of all layers; Qwen's of those layer_types names, or from max_window_layers on."""
    if family == "llama":
        if data.get("sliding_window"):
            raise refused("sliding_window", data["sliding_window"], origin, "Llama decoders have none")
        return None
    window = data.get("sliding_window", 4096)
    if family == "mistral":
        return None if window is None else (window,) * layers
    if not _flag(data, "use_sliding_window", False, origin) or window is None:
        return None
    kinds = data.get("layer_types")
    if kinds is None:
        first = data.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise refused("max_window_layers", first, origin, "a whole number")
        return tuple(window if layer >= first else None for layer in range(layers))
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != layers or any(not isinstance(kind, str) or kind not in known for kind in kinds):
        raise refused("layer_types", kinds, origin, f"{layers} of {', '.join(known)}")
    return tuple(known[kind] for kind in kinds)


def rope_of(data: dict[str, Any], context: Any, origin: str) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) of `rope_parameters`, or of the older `rope_scaling` and `rope_theta`."""
    found = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise refused("rope_scaling", found, origin, "it is an object")
    theta = number("rope_theta", found.get("rope_theta", data.get("rope_theta", 1e4)), origin)
    if number("partial_rotary_factor", found.get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0)), origin) != 1.0:
        raise refused("partial_rotary_factor", found.get("partial_rotary_factor"), origin, "all features are turned")
    kind = found.get("rope_type", found.get("type", "default"))
    if kind in ("default", "dynamic"):
        return theta, None
    if kind not in _ROPE_KEYS:
        raise refused("rope_type", kind, origin, "computed are default, linear, llama3, yarn, and dynamic within the context")
    unknown = found.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "finetuned"} - _ROPE_KEYS[kind]
    if unknown:
        raise refused(f"rope_scaling.{sorted(unknown)[0]}", found[sorted(unknown)[0]], origin, f"unknown to rope type {kind}")
    factor = number("rope_scaling.factor", found.get("factor"), origin)
    original = found.get("original_max_position_embeddings", data.get("original_max_position_embeddings", context))
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    if not isinstance(original, int) or not 1 <= original <= MOST["context"]:
        raise refused("rope_scaling.original_max_position_embeddings", original, origin, "a whole number above 0")
    numbers = {key: number(f"rope_scaling.{key}", found[key], origin) for key in _ROPE_KEYS[kind] & _NUMBERS if found.get(key) is not None}
    if kind == "llama3":
        low, high = numbers.get("low_freq_factor", 1.0), numbers.get("high_freq_factor", 4.0)
        if not low < high:
            raise refused("rope_scaling.high_freq_factor", high, origin, f"it must be above low_freq_factor, {low}")
        return theta, RopeScaling("llama3", factor, original, low, high)
    truncate = found.get("truncate", True)
    if theta == 1.0 or not isinstance(truncate, bool):
        raise refused("rope_scaling", found, origin, "yarn needs rope_theta other than 1, and truncate true or false")
    fast, slow = numbers.get("beta_fast", 32.0), numbers.get("beta_slow", 1.0)
    return theta, RopeScaling(
        "yarn", factor, original, beta_fast=fast, beta_slow=slow, truncate=truncate, attention_factor=_attention_factor(factor, numbers)
    )


_NUMBERS = {"low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"}
_ROPE_KEYS: dict[str, set[str]] = {
    "linear": {"original_max_position_embeddings"},
    "llama3": {"original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {"original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"},
}


def _attention_factor(factor: float, numbers: dict[str, float]) -> float:
    """What yarn multiplies cos and sin by: given, or 0.1 ln(factor) + 1 (Peng 2023)."""
    if "attention_factor" in numbers:
        return numbers["attention_factor"]

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if "mscale" in numbers and "mscale_all_dim" in numbers:
        return grown(numbers["mscale"]) / grown(numbers["mscale_all_dim"])
    return grown(1.0)


def number(name: str, value: Any, origin: str) -> float:
    """A number above 0, as a float."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e12:
        raise refused(name, value, origin, "a number above 0")
    return float(value)


def _size(data: dict[str, Any], key: str, origin: str) -> int:
    value = data.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**24:
        raise refused(key, value, origin, "a whole number above 0")
    return value


def _flag(data: dict[str, Any], key: str, usual: bool, origin: str) -> bool:
    value = data.get(key, usual)
    if not isinstance(value, bool):
        raise refused(key, value, origin, "true or false")
    return value
