"""What the estimate says of prefill and decode of a loaded model, beside what the engine measured.

    ModelConfig ──the same decoder on the meta device──capture──> Workload(prefill | decode) ──estimate(target)──> seconds
      decode at the mean context, weights in the dtype they are stored in, as a captured graph on a GPU

Nothing is allocated. Qwen3's norms of heads are left out of it, and a window reads as the whole context. GPT-2, and heads whose widths
do not add up to the hidden one, are not predicted: the answer says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..estimate.processor import estimate
from ..workload.capture import capture_case
from ..workload.case import ModelCase
from ..workload.models import Example
from ..workload.models.decoder import CausalLM, DecoderConfig, language_inputs
from .model.linear import Int4Linear, Int8Linear

if TYPE_CHECKING:
    from ..target.load import Target
    from ..workload.graph import Workload
    from .load.loaded import Loaded
    from .model.config import ModelConfig
    from .model.decoder import Decoder


def predict(loaded: Loaded, target: Target, *, prompt: int, new: int, batch: int, measured: dict[str, Any] | None = None) -> dict[str, Any]:
    """Expected and least milliseconds of prefill and of one decode step; with a row of bench_decode also the ratio to it."""
    if note := unpredictable(loaded.config):
        return {"target": target.name, "note": note}
    dtype, stored = _name(loaded.model.dtype), stored_dtype(loaded.model)
    found: dict[str, Any] = {"target": target.name}
    for phase, context in (("prefill", prompt), ("decode", prompt + new // 2)):
        work = decoder_workload(loaded.config, loaded.name, phase, batch, context, dtype)
        if stored != dtype:
            work = work.with_dtype(stored, ("weights",))
        total = estimate(work, target, graph=loaded.model.device.type == "cuda" and phase == "decode").total
        found[phase] = {"context": context, "ms": 1e3 * total.time_s, "limit_ms": 1e3 * total.limit_s, "bottleneck": total.bottleneck}
    if measured is not None:
        for phase, value in (("prefill", measured["prefill_ms"]), ("decode", measured["ms_per_token"])):
            found[phase]["measured_ms"] = value
            found[phase]["measured_over_predicted"] = value / found[phase]["ms"]
    return found


def unpredictable(config: ModelConfig) -> str | None:
    """Why the workload room cannot build these sizes; None where it can."""
    if config.activation != "silu" or config.norm != "rms":
        return f"no prediction: {config.family} is not a decoder of the llama kind"
    if config.heads * config.head_dim != config.hidden:
        return f"no prediction: {config.heads} heads of {config.head_dim} are not {config.hidden} wide"
    return None


def decoder_workload(config: ModelConfig, name: str, phase: str, batch: int, context: int, dtype: str) -> Workload:
    """The ops of one pass of a decoder of these sizes."""
    sizes = DecoderConfig(
        config.layers, config.hidden, config.intermediate, config.heads, config.kv_heads, config.vocab, config.rope_theta,
        config.norm_eps, config.qkv_bias, config.tied,
    )  # fmt: skip
    with torch.device("meta"):
        args, kwargs = language_inputs(Example(batch, context, phase), config.vocab, config.layers, config.kv_heads, config.head_dim)
        module = CausalLM(sizes).eval().to(getattr(torch, dtype))
    cast = {key: [tuple(t.to(getattr(torch, dtype)) for t in pair) for pair in value] for key, value in kwargs.items()}
    return capture_case(ModelCase(name, module, args, batch, dtype, cast, phase, context))


def stored_dtype(model: Decoder) -> str:
    """What its products are stored in: a floating dtype, int8 or int4."""
    kinds = {Int8Linear: "int8", Int4Linear: "int4"}
    return next((kinds[type(module)] for module in model.modules() if type(module) in kinds), _name(model.dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
