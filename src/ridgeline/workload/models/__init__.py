"""The named models: plain torch, built on any device, with example inputs.

    build_named("llama-3-8b", CaseOptions(phase="decode", context=192, device="meta"))
        │ MODELS[name] ──checks options──> ModelInfo.build, an import string
        ▼
    family module .build(name, Example) ──> (module, args, kwargs) ──> ModelCase

Importing this module does not import torch. On the meta device nothing is allocated; on a real one the weights are
torch's default initialisation from seed 0: the shapes, layer names and arithmetic are the published model's, the trained
values are not. Dtypes are those torch modules run in; narrower ones are the caller's to analyse on the captured workload.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...core.dtypes import canonical
from ...core.errors import OptionError, unknown_name
from ..case import CaseOptions, ModelCase

if TYPE_CHECKING:
    import torch

RUNNABLE_DTYPES = ("float64", "float32", "float16", "bfloat16")
PHASES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of a named model without building it."""

    name: str
    family: str  # cnn, encoder or decoder
    description: str
    parameters: int  # shared weights counted once
    build: str  # ".module:function" in this package, imported when the model is built
    default_dtype: str = "float32"
    default_batch: int = 1
    default_context: int | None = None  # tokens; None where the input is an image
    max_context: int | None = None
    phases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Example:
    """The sizes of the inputs a family module must make."""

    batch: int
    context: int | None = None
    phase: str | None = None

    @property
    def tokens(self) -> int:
        """The sequence length, for a family that has one."""
        if self.context is None:
            raise ValueError("a language model is built with a context")
        return self.context


def _cnn(name: str, parameters: int, description: str, build: str) -> ModelInfo:
    return ModelInfo(name, "cnn", description, parameters, build)


def _bert(name: str, parameters: int, description: str) -> ModelInfo:
    return ModelInfo(name, "encoder", description, parameters, ".bert:build", default_context=128, max_context=512)


def _decoder(name: str, parameters: int, max_context: int, description: str, build: str = ".decoder:build") -> ModelInfo:
    dtype = "float32" if build == ".gpt2:build" else "bfloat16"  # as published
    return ModelInfo(name, "decoder", description, parameters, build, dtype, 1, min(1024, max_context), max_context, PHASES)


MODELS: dict[str, ModelInfo] = {
    info.name: info
    for info in (
        _cnn("resnet18", 11_689_512, "residual network, 18 layers, 224x224 images", ".resnet:build"),
        _cnn("resnet34", 21_797_672, "residual network, 34 layers, 224x224 images", ".resnet:build"),
        _cnn("resnet50", 25_557_032, "residual network of bottlenecks (stride in the 3x3), 50 layers, 224x224 images", ".resnet:build"),
        _cnn("resnet101", 44_549_160, "residual network of bottlenecks (stride in the 3x3), 101 layers, 224x224 images", ".resnet:build"),
        _cnn("alexnet", 60_965_224, "the two-tower (grouped) network of 2012 with local response norm, 227x227 images", ".alexnet:build"),
        _cnn("vgg16", 138_357_544, "16 layers of 3x3 convolutions and large linears, 224x224 images", ".vgg:build"),
        _cnn("mobilenet-v2", 3_504_872, "inverted residuals with depthwise convolutions, 224x224 images", ".mobilenet:build"),
        _cnn("resnet20", 269_722, "residual network, 20 layers, 32x32 images, shortcuts without parameters", ".cifar_resnet:build"),
        _cnn("resnet56", 853_018, "residual network, 56 layers, 32x32 images, shortcuts without parameters", ".cifar_resnet:build"),
        _cnn("digits-cnn", 20_810, "three convolutions and two linears, 8x8 digits, trained in seconds", ".digits_cnn:build"),
        ModelInfo("vit-b16", "encoder", "vision transformer, base, 16x16 patches of 224x224 images", 86_567_656, ".vit:build"),
        _bert("bert-base", 109_482_240, "text encoder with pooler, 12 layers of 768"),
        _bert("bert-large", 335_141_888, "text encoder with pooler, 24 layers of 1024"),
        _decoder("gpt2", 124_439_808, 1024, "decoder with learned positions, 12 layers of 768", ".gpt2:build"),
        _decoder("gpt2-medium", 354_823_168, 1024, "decoder with learned positions, 24 layers of 1024", ".gpt2:build"),
        _decoder("llama-3-8b", 8_030_261_248, 8192, "decoder, 32 layers of 4096, 8 key-value heads of 32"),
        _decoder("llama-3.2-1b", 1_235_814_400, 131_072, "decoder, 16 layers of 2048, tied embedding, scaled rotary positions"),
        _decoder("tinyllama-1.1b", 1_100_048_384, 2048, "decoder, 22 layers of 2048, 4 key-value heads of 32"),
        _decoder("qwen2.5-0.5b", 494_032_768, 32_768, "decoder, 24 layers of 896, query-key-value bias, tied embedding"),
        _decoder("qwen2.5-1.5b", 1_543_714_304, 32_768, "decoder, 28 layers of 1536, query-key-value bias, tied embedding"),
        _decoder("smollm2-135m", 134_515_008, 8192, "decoder, 30 layers of 576, tied embedding"),
    )
}


def model_names() -> list[str]:
    """Every named model, in the order they are shown: images, encoders, decoders."""
    return list(MODELS)


def build_named(name: str, options: CaseOptions) -> ModelCase:
    """The named model in eval mode with example inputs, on `options.device`; options left None take the model's defaults."""
    if name not in MODELS:
        raise unknown_name("model", name, MODELS, see="`ridgeline models`")
    info = MODELS[name]
    example, dtype = _example(info, options), _dtype(info, options.dtype)
    module_name, _, function = info.build.partition(":")
    build = getattr(importlib.import_module(module_name, __package__), function)
    with _construction(dtype, options.device):
        module, args, kwargs = build(name, example)
    module.eval().requires_grad_(False)
    return ModelCase(name, module, args, example.batch, dtype, kwargs, example.phase, example.context)


def _dtype(info: ModelInfo, asked: str | None) -> str:
    dtype = canonical(asked) if asked is not None else info.default_dtype
    if dtype not in RUNNABLE_DTYPES:
        raise OptionError(
            f"dtype {asked!r} for {info.name}",
            why="torch modules do not compute in it",
            do=f"build in one of {', '.join(RUNNABLE_DTYPES)}",
        )
    return dtype


def _example(info: ModelInfo, options: CaseOptions) -> Example:
    batch = info.default_batch if options.batch is None else options.batch
    if batch < 1:
        raise OptionError(f"batch {batch} for {info.name}", why="a batch holds at least one example", do="give a batch of 1 or more")
    return Example(batch, _context(info, options.context), _phase(info, options.phase))


def _context(info: ModelInfo, asked: int | None) -> int | None:
    if asked is None:
        return info.default_context
    if info.max_context is None:
        raise OptionError(f"context {asked} for {info.name}", why="it takes images, not tokens", do="leave the context out")
    if not 1 <= asked <= info.max_context:
        raise OptionError(
            f"context {asked} for {info.name}",
            why=f"its positions run from 1 to {info.max_context}",
            do=f"give a context between 1 and {info.max_context}",
        )
    return asked


def _phase(info: ModelInfo, asked: str | None) -> str | None:
    if asked is None:
        return info.phases[0] if info.phases else None
    if not info.phases:
        raise OptionError(f"phase {asked!r} for {info.name}", why="only decoder language models have phases", do="leave the phase out")
    if asked not in info.phases:
        raise OptionError(f"phase {asked!r} for {info.name}", why="no such phase", do=f"use {' or '.join(info.phases)}")
    return asked


@contextmanager
def _construction(dtype: str, device: str) -> Iterator[None]:
    """Tensors made inside are of `dtype`, on `device`, from seed 0; the caller's default dtype and random state come back unchanged."""
    import torch

    place = torch.device(device)
    gpus = list(range(torch.cuda.device_count())) if place.type == "cuda" else []
    before: torch.dtype = torch.get_default_dtype()
    with torch.random.fork_rng(devices=gpus), place:
        # torch.manual_seed would also reseed GPUs that are not ours to touch.
        torch.default_generator.manual_seed(0)
        if gpus:
            torch.cuda.manual_seed_all(0)
        torch.set_default_dtype(getattr(torch, dtype))
        try:
            yield
        finally:
            torch.set_default_dtype(before)
