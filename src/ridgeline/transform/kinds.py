"""The kinds of layer a saved model may hold: an allow-list, so that loading a file never runs code that came with it.

    @layer_kind("linear-packed")                       a class of ours: config() -> dict, from_config(dict) -> module
    class PackedLinear(nn.Module): ...

    describe(module) ──> {"kind": "linear-packed", "bits": 4, ...}     JSON
    build(description) ──> the same module with empty tensors, to be filled from the state dict

Plain torch layers whose shape a transform may change (Linear, Conv2d, BatchNorm, Sequential, …) are described here too. A kind of
ours lives in the file named beside it in HOMES and is imported when a file asks for it. Loading first builds under the meta device,
to check sizes before anything is allocated: `from_config` only makes tensors, it does not read them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch import nn

from ..core.errors import ModelFileError, nearest

Description = dict[str, Any]
MOST_DEPTH = 32  # of layers inside layers


class Described(Protocol):
    """What a class of ours must have to be saved: its constructor arguments out, an empty module back.

    A class with `keeps_children = True` has its children described and built for it, under "parts".
    """

    def config(self) -> Description: ...


HOMES: dict[str, str] = {
    "linear-packed": ".quantise.packed",
    "conv2d-packed": ".quantise.packed",
    "embedding-packed": ".quantise.packed",
    "conv2d-int8": ".quantise.int8_layers",
    "linear-int8": ".quantise.int8_layers",
    "linear-int8-dynamic": ".quantise.dynamic",
    "linear-n:m": ".prune.sparse24",
}
"""Kind → module that defines it, relative to this package; filled in as kinds are added, so that loading can import them."""

_CLASSES: dict[str, Any] = {}
_KINDS: dict[type, str] = {}
Class = TypeVar("Class", bound=type)


def layer_kind(name: str) -> Callable[[Class], Class]:
    """Register a class with `config()` and `from_config(config)` under `name`."""

    def register(cls: Class) -> Class:
        if name in PLAIN or _CLASSES.get(name, cls) is not cls:
            raise ValueError(f"layer kind {name!r} is registered twice")
        _CLASSES[name], _KINDS[cls] = cls, name
        return cls

    return register


def kind_of(module: nn.Module) -> str | None:
    """The kind of this very layer, whatever it holds; None where it has none."""
    return _KINDS.get(type(module)) or _PLAIN_KINDS.get(type(module))


def is_ours(module: nn.Module) -> bool:
    """Whether the layer's class was registered with @layer_kind."""
    return type(module) in _KINDS


def keeps_children(module: nn.Module) -> bool:
    """Whether a layer of a known kind is described together with its children."""
    return type(module) in CONTAINERS or bool(getattr(type(module), "keeps_children", False))


def own_config(module: nn.Module) -> Description:
    """Kind and constructor arguments of a layer of a known kind, without its children."""
    if name := _KINDS.get(type(module)):
        described: Any = module
        return {"kind": name, **described.config()}
    name = _PLAIN_KINDS[type(module)]
    return {"kind": name, **PLAIN[name][1](module)}


def describe(module: nn.Module) -> Description | None:
    """The JSON that builds an empty twin of this layer, or None where it, or a layer inside it, is not of a known kind."""
    if kind_of(module) is None:
        return None
    if not keeps_children(module):
        return own_config(module)
    parts = {name: describe(child) for name, child in module._modules.items() if child is not None}
    return None if None in parts.values() else {**own_config(module), "parts": parts}


def build(description: Description, *, depth: int = 0) -> nn.Module:
    """The layer a description speaks of, its tensors uninitialised or at their defaults."""
    if not isinstance(description, dict) or depth > MOST_DEPTH:
        why = f"it is nested more than {MOST_DEPTH} deep" if depth > MOST_DEPTH else f"it is a {type(description).__name__}, not an object"
        raise ModelFileError("a layer cannot be built", why=why, do="save the model again")
    config = dict(description)
    name, parts = config.pop("kind", None), config.pop("parts", None)
    if not isinstance(name, str) or (name not in PLAIN and name not in HOMES and name not in _CLASSES):
        known = sorted({*PLAIN, *HOMES, *_CLASSES})
        close = nearest(str(name), known)
        raise ModelFileError(
            f"a layer of kind {name!r}",
            why="only known kinds are built from a file" + (f"; did you mean {close[0]}?" if close else ""),
            do=f"known: {', '.join(known)}",
        )
    try:
        module = _build_one(name, config)
        if parts is not None:
            if not keeps_children(module) or not isinstance(parts, dict):
                raise TypeError("parts in a layer that has none" if isinstance(parts, dict) else f"parts is a {type(parts).__name__}")
            for part, inner in parts.items():
                module.add_module(part, inner if isinstance(inner, nn.Module) else build(inner, depth=depth + 1))
    except ModelFileError:
        raise
    except Exception as error:  # a constructor given nonsense raises what it likes; none of it is ours to crash on
        raise ModelFileError(
            f"a layer of kind {name!r} cannot be built", why=f"{type(error).__name__}: {error}"[:300], do="save it again"
        ) from error
    return module


def _build_one(name: str, config: Description) -> nn.Module:
    if name in PLAIN:
        return PLAIN[name][2](**{key: tuple(value) if isinstance(value, list) else value for key, value in config.items()})
    if name not in _CLASSES:
        importlib.import_module(HOMES[name], __package__)
    module: nn.Module = _CLASSES[name].from_config(config)
    return module


def _take(*names: str, flags: tuple[str, ...] = ()) -> Callable[[Any], Description]:
    """Constructor arguments that are attributes of the layer; of `flags` only whether they are there."""

    def take(module: Any) -> Description:
        found = {name: getattr(module, name) for name in names}
        config = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
        return config | {flag: getattr(module, flag) is not None for flag in flags}

    return take


_CONV = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
_TRANSPOSED = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "output_padding", "groups", "dilation", "padding_mode")
_NORM = ("num_features", "eps", "momentum", "affine", "track_running_stats")
_POOL = ("kernel_size", "stride", "padding")

PLAIN: dict[str, tuple[type[nn.Module], Callable[[Any], Description], Callable[..., nn.Module]]] = {
    name: (cls, take, cls)
    for name, cls, take in (
        ("linear", nn.Linear, _take("in_features", "out_features", flags=("bias",))),
        ("conv1d", nn.Conv1d, _take(*_CONV, flags=("bias",))),
        ("conv2d", nn.Conv2d, _take(*_CONV, flags=("bias",))),
        ("conv3d", nn.Conv3d, _take(*_CONV, flags=("bias",))),
        ("conv_transpose2d", nn.ConvTranspose2d, _take(*_TRANSPOSED, flags=("bias",))),
        ("embedding", nn.Embedding, _take("num_embeddings", "embedding_dim", "padding_idx")),
        ("batch_norm1d", nn.BatchNorm1d, _take(*_NORM)),
        ("batch_norm2d", nn.BatchNorm2d, _take(*_NORM)),
        ("layer_norm", nn.LayerNorm, _take("normalized_shape", "eps", "elementwise_affine")),
        ("rms_norm", nn.RMSNorm, _take("normalized_shape", "eps", "elementwise_affine")),
        ("group_norm", nn.GroupNorm, _take("num_groups", "num_channels", "eps", "affine")),
        ("identity", nn.Identity, _take()),
        ("relu", nn.ReLU, _take("inplace")),
        ("relu6", nn.ReLU6, _take("inplace")),
        ("leaky_relu", nn.LeakyReLU, _take("negative_slope", "inplace")),
        ("gelu", nn.GELU, _take("approximate")),
        ("silu", nn.SiLU, _take("inplace")),
        ("hardswish", nn.Hardswish, _take("inplace")),
        ("sigmoid", nn.Sigmoid, _take()),
        ("tanh", nn.Tanh, _take()),
        ("softmax", nn.Softmax, _take("dim")),
        ("dropout", nn.Dropout, _take("p", "inplace")),
        ("flatten", nn.Flatten, _take("start_dim", "end_dim")),
        ("max_pool2d", nn.MaxPool2d, _take(*_POOL, "dilation", "return_indices", "ceil_mode")),
        ("avg_pool2d", nn.AvgPool2d, _take(*_POOL, "ceil_mode", "count_include_pad", "divisor_override")),
        ("adaptive_avg_pool2d", nn.AdaptiveAvgPool2d, _take("output_size")),
        ("sequential", nn.Sequential, _take()),
        ("module_list", nn.ModuleList, _take()),
    )
}
CONTAINERS = {nn.Sequential, nn.ModuleList}
_PLAIN_KINDS: dict[type, str] = {plain[0]: name for name, plain in PLAIN.items()}
