"""A Hugging Face folder to a ModelCase: config.json alone is enough.

    folder/config.json ──read_config──> transformers config ──> model class ──> module on options.device, in dtype
        │ kind of model
        ▼
    language model  input_ids [B,T] (prefill), or input_ids [B,1] + kv_cache of T tokens (decode)
    encoder         input_ids [B,T]              encoder-decoder  input_ids, decoder_input_ids [B,T] each
    vision          pixel_values [B,C,H,W]

On the meta device nothing is allocated and no weight is read. On a real one weights come from safetensors where the folder has
them, else they are random (seed 0), with a warning; pickled .bin weights are never read. Code that comes with a model
(`auto_map`) is refused. Not built: audio, and models of text and images together.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.dtypes import canonical
from ..core.errors import CaptureError, MissingExtraError, OptionError, RidgelineError
from .capture import RUNNABLE
from .case import CaseOptions, ModelCase
from .huggingface_config import first_line, has_safetensors, load_config, model_class_of, read_config
from .models import PHASES

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be built, decided before anything is."""

    name: str
    folder: Path
    config: Any
    model_class: type[Any]
    kind: str  # causal, encoder, seq2seq or vision
    batch: int
    dtype: str
    phase: str | None
    context: int | None


def is_folder(model: str) -> bool:
    """Whether a model's name is a folder that exists."""
    return Path(model).is_dir()


def build_folder(path: str, options: CaseOptions) -> ModelCase:
    """The model a folder's config.json describes, in eval mode with example inputs, on `options.device`."""
    data = read_config(Path(path))
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError(f"cannot build {path}", why="transformers is not installed", do="pip install 'ridgeline[hf]'") from error
    plan = _plan(Path(path), data, options, transformers)
    try:
        return _build(plan, options.device)
    except RidgelineError:
        raise
    except Exception as error:  # a config's numbers can contradict each other in any way
        what = f"{plan.model_class.__name__} cannot be built from {path}/config.json"
        raise CaptureError(what, why=first_line(error), do="check the sizes in config.json against each other") from error


def _plan(folder: Path, data: dict[str, Any], options: CaseOptions, transformers: Any) -> Plan:
    name = folder.resolve().name
    config = load_config(folder, data, transformers)
    model_class = model_class_of(folder, config, transformers)
    kind = _kind(name, config, model_class)
    batch = 1 if options.batch is None else options.batch
    if batch < 1:
        raise OptionError(f"batch {batch} for {name}", why="a batch holds at least one example", do="give a batch of 1 or more")
    phase, context = _phase(name, kind, options.phase), _context(name, kind, config, options.context)
    return Plan(name, folder, config, model_class, kind, batch, _dtype(name, config, options.dtype), phase, context)


def _kind(name: str, config: Any, model_class: type[Any]) -> str:
    main = model_class.main_input_name
    if {"vision_config", "audio_config", "speech_config"} & set(config.sub_configs) or main not in ("input_ids", "pixel_values"):
        raise CaptureError(
            f"{name} takes more than text, or other than text and images ({model_class.__name__})",
            why="config.json does not say how large its audio or mixed inputs are",
            do="give file.py:factory that returns the model with example inputs",
        )
    if main == "pixel_values":
        return "vision"
    if config.is_encoder_decoder:
        return "seq2seq"
    return "causal" if model_class.can_generate() else "encoder"


def _phase(name: str, kind: str, asked: str | None) -> str | None:
    if kind != "causal":
        if asked is not None:
            do = "leave the phase out; for a decoder, architectures in config.json must name its ...ForCausalLM class"
            raise OptionError(f"phase {asked!r} for {name}", why="only decoder language models have phases", do=do)
        return None
    if asked is not None and asked not in PHASES:
        raise OptionError(f"phase {asked!r} for {name}", why="no such phase", do=f"use {' or '.join(PHASES)}")
    return asked or PHASES[0]


def _context(name: str, kind: str, config: Any, asked: int | None) -> int | None:
    if kind == "vision":
        if asked is not None:
            raise OptionError(f"context {asked} for {name}", why="it takes images, not tokens", do="leave the context out")
        return None
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    most = most if isinstance(most, int) and most > 0 else None
    if asked is None:
        usual = 1024 if kind == "causal" else 128
        return min(usual, most) if most else usual
    if asked < 1 or (most is not None and asked > most):
        why = f"its positions run from 1 to {most}" if most else "a context holds at least one token"
        raise OptionError(f"context {asked} for {name}", why=why, do=f"give a context between 1 and {most}" if most else "give 1 or more")
    return asked


def _dtype(name: str, config: Any, asked: str | None) -> str:
    stored = getattr(config, "dtype", None)
    dtype = canonical(asked or str(stored or "float32"))
    if dtype not in RUNNABLE:
        raise OptionError(f"dtype {dtype} for {name}", why="torch modules do not compute in it", do=f"give one of {', '.join(RUNNABLE)}")
    return dtype


def _build(plan: Plan, device: str) -> ModelCase:
    import torch

    from .huggingface_step import DecodeStep, plan_layers

    chosen = plan.model_class
    if plan.phase == "decode":
        chosen = type(chosen.__name__, (DecodeStep, chosen), {"__module__": chosen.__module__})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = _make(plan, chosen, device).eval().requires_grad_(False)
        if plan.phase == "decode":
            model.context = plan.context
            model.plans = plan_layers(model, plan.model_class, plan.batch, device, plan.name)
        with torch.device(device):
            kwargs = _inputs(plan, model)
    return ModelCase(plan.name, model, (), plan.batch, plan.dtype, kwargs, plan.phase, plan.context)


def _make(plan: Plan, chosen: type[Any], device: str) -> Any:
    """The module, with its weights where they can be read and are wanted."""
    import torch

    from .huggingface_step import register_attention

    own = getattr(chosen, "_supports_attention_backend", False)
    attention = register_attention() if own else "sdpa" if getattr(chosen, "_supports_sdpa", False) else "eager"
    how = {"dtype": getattr(torch, plan.dtype), "attn_implementation": attention}
    if device != "meta" and has_safetensors(plan.folder):
        return chosen.from_pretrained(plan.folder, config=plan.config, use_safetensors=True, local_files_only=True, **how).to(device)
    if device != "meta":
        warnings.warn(f"{plan.folder} holds no safetensors: its weights are random", stacklevel=4)
    with torch.device(device):
        return chosen._from_config(plan.config, **how)


def _inputs(plan: Plan, model: Any) -> dict[str, Any]:
    import torch

    if plan.kind == "vision":
        return {"pixel_values": torch.randn(plan.batch, *_image(plan.config), dtype=getattr(torch, plan.dtype))}
    vocabulary = plan.config.get_text_config().vocab_size

    def tokens(length: int | None) -> Tensor:
        return torch.randint(vocabulary, (plan.batch, length or 1))

    if plan.phase == "decode":
        dtype = getattr(torch, plan.dtype)
        # Not zeros: untouched zero pages share one physical page, and reading them would measure the cache, not memory.
        pairs = [tuple(torch.randn(shape, dtype=dtype) for shape in (p.key_shape, p.value_shape)) for p in model.plans if p.length]
        return {"input_ids": tokens(1), "kv_cache": pairs}
    second = {"decoder_input_ids": tokens(plan.context)} if plan.kind == "seq2seq" else {}
    return {"input_ids": tokens(plan.context), **second}


def _image(config: Any) -> tuple[int, int, int]:
    size = getattr(config, "image_size", None) or 224
    height, width = size[-2:] if isinstance(size, list | tuple) else (size, size)
    return int(getattr(config, "num_channels", 3)), int(height), int(width)
