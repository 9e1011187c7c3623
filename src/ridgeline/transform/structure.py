"""How a model differs from the one it was made from, as JSON, and the model built again from that.

    model, base ──differences──> {"layers": {path: description}, "attributes": {path: {name: number}}}
    base + that ──rebuild──> a model of the same structure, to be filled from the state dict

A layer is described where its kind or its constructor arguments are not the base's; a layer without a kind (a residual block, say)
is kept from the base, `{"kind": "base", "path": ...}`, and its inside compared in turn. Numbers a transform changed on such a layer
(a count of heads) are stored as attributes: only those the base has, of the same type. What cannot be said this way is an error.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..core.errors import ModelFileError
from .kinds import MOST_DEPTH, Description, build, describe, keeps_children, kind_of, own_config

BASE = "base"
NUMBERS = (bool, int, float)
SIMPLE = (str, tuple, list, torch.Size, torch.dtype, type(None))


@dataclass(frozen=True, slots=True)
class Differences:
    """Layers and numbers that are not the base's, by path."""

    layers: dict[str, Description] = field(default_factory=dict)
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)


def differences(model: nn.Module, base: nn.Module) -> Differences:
    """What has to be said of `model` to build it from `base`."""
    refuse_hidden(model)
    found = Differences()
    if type(model) is not type(base) and issubclass(type(base), type(model)) and _same_children(model, base):
        _compare_inside("", model, "", base, found)  # the base's class does what the model's does, and more
    else:
        _compare("", model, "", base, found)
    return found


def described_whole(model: nn.Module) -> Differences:
    """Without a base: the whole model where all of it is of known kinds, else each of its layers that is."""
    refuse_hidden(model)
    if (whole := describe(model)) is not None:
        return Differences({"": whole})
    found = Differences()
    for name, child in _children(model).items():
        inner = described_whole(child)
        found.layers.update({_join(name, path): one for path, one in inner.layers.items()})
    return found


def _compare(path: str, module: nn.Module, twin_path: str, twin: nn.Module, found: Differences) -> None:
    if type(module) is type(twin):
        if kind_of(module) is not None and own_config(module) != own_config(twin):
            found.layers[path] = _described(path, module, twin_path, twin, found)
            return
        if _same_children(module, twin):
            _compare_inside(path, module, twin_path, twin, found)
            return
    found.layers[path] = _described(path, module, twin_path, twin, found)


def _compare_inside(path: str, module: nn.Module, twin_path: str, twin: nn.Module, found: Differences) -> None:
    if kind_of(module) is None:
        if own := _own_shapes(module) ^ _own_shapes(twin):
            raise _unsayable(path, module, f"its own tensor {min(own)[0]} differs from the base's")
        numbers, before = _numbers(module), _numbers(twin)
        others, others_before = _attributes(module, SIMPLE), _attributes(twin, SIMPLE)
        changed_others = {name for name in others.keys() | others_before.keys() if others.get(name, ...) != others_before.get(name, ...)}
        if odd := sorted((numbers.keys() ^ before.keys()) | changed_others):
            raise _unsayable(path, module, f"its attribute {odd[0]} is not the base's")
        if changed := {name: value for name, value in numbers.items() if value != before[name]}:
            found.attributes[path] = changed
    twins = _children(twin)
    for name, child in _children(module).items():
        _compare(_join(path, name), child, _join(twin_path, name), twins[name], found)


def _described(path: str, module: nn.Module, twin_path: str, twin: nn.Module | None, found: Differences) -> Description:
    if kind_of(module) is None:
        raise _unsayable(path, module, "it is not of a kind that can be saved")
    if not keeps_children(module):
        return own_config(module)
    parts = {}
    for name, child in _children(module).items():
        parts[name] = _part(_join(path, name), name, child, twin_path, twin, found)
    return {**own_config(module), "parts": parts}


def _part(path: str, name: str, child: nn.Module, twin_path: str, twin: nn.Module | None, found: Differences) -> Description:
    """A child of a container: described where it has a kind, else kept from the layer of the base it is most like."""
    if kind_of(child) is not None:
        inner = _children(twin).get(name) if twin is not None else None
        return _described(path, child, _join(twin_path, name), inner, found)
    likely = {} if twin is None else {_join(twin_path, at): one for at, one in _children(twin).items()}
    first = _join(twin_path, name)
    if twin is not None:
        likely[twin_path] = twin  # a wrapper around what was there
    alike = [at for at, one in likely.items() if type(one) is type(child) and _same_children(child, one)]
    if alike:
        at = min(alike, key=lambda one: (_numbers(likely[one]) != _numbers(child), one != first))
        _compare_inside(path, child, at, likely[at], found)
        return {"kind": BASE, "path": at}
    raise _unsayable(path, child, "it is not of a kind that can be saved, and the base has no layer like it here")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _same_children(module: nn.Module, twin: nn.Module) -> bool:
    return list(_children(module)) == list(_children(twin))


def _own_shapes(module: nn.Module) -> set[tuple[str, tuple[int, ...]]]:
    named = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {(name, tuple(tensor.shape)) for name, tensor in named}


def _numbers(module: nn.Module) -> dict[str, Any]:
    return _attributes(module, NUMBERS)


def _attributes(module: nn.Module, types: tuple[type, ...]) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if type(value) in types and name != "training" and name[:1] != "_"}


def _children(module: nn.Module) -> dict[str, nn.Module]:
    """By name, one that is there under two names twice."""
    return {name: child for name, child in module._modules.items() if child is not None}


def refuse_hidden(model: nn.Module) -> None:
    """What changes a layer's answers and is in no state dict is an error."""
    for path, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise _unsayable(path, module, "it has forward hooks, which a file cannot hold")
        if "forward" in vars(module):
            raise _unsayable(path, module, "its forward() was replaced, which a file cannot hold")


def _unsayable(path: str, module: nn.Module, why: str) -> ModelFileError:
    what = f"layer {path or '(the model itself)'}, a {type(module).__name__}, cannot be saved"
    return ModelFileError(what, why=why, do="register its class with @layer_kind, or save with the base= it was made from")


def rebuild(base: nn.Module | None, changes: Differences) -> nn.Module:
    """The base with its layers replaced; `base` itself is changed or left, so give a copy. Layers stand on torch's default device."""
    original = copy.deepcopy(base) if base is not None and _refers(changes.layers) else base
    model = base
    for path in sorted(changes.layers, key=lambda one: (one.count(".") + bool(one), one)):  # what is outside before what is inside
        layer = build(_with_base(changes.layers[path], original))
        if path == "":
            model = layer
        elif model is None:
            raise ModelFileError(f"layer {path}", why="there is no base model to put it into", do="give base=")
        else:
            _put(model, path, layer)
    if model is None:
        raise ModelFileError("an empty model", why="the file names no base and describes no layer", do="give base=")
    for path, numbers in changes.attributes.items():
        _set_numbers(_find(model, path), path, numbers)
    return model


def _refers(description: Any) -> bool:
    if isinstance(description, dict):
        return description.get("kind") == BASE or any(map(_refers, description.values()))
    return False


def _with_base(description: Any, original: nn.Module | None, depth: int = 0) -> Any:
    """The description with the layers it keeps from the base in the place of their names."""
    if not isinstance(description, dict) or depth > MOST_DEPTH:
        return description
    if description.get("kind") == BASE:
        if original is None or not isinstance(description.get("path"), str):
            raise ModelFileError("a layer kept from a base", why="there is no base or no path", do="give base=")
        return copy.deepcopy(_find(original, description["path"]))
    parts = description.get("parts")
    if not isinstance(parts, dict):
        return description
    return {**description, "parts": {name: _with_base(part, original, depth + 1) for name, part in parts.items()}}


def _find(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise ModelFileError(f"no layer {path!r:.80}", why=str(error)[:200], do="give the base= the model was saved with") from error


def _put(model: nn.Module, path: str, layer: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    home = _find(model, parent)
    if name not in home._modules:
        raise ModelFileError(f"no layer {path!r:.80}", why=f"{parent or 'the model'} has no part of that name", do="give the right base=")
    home._modules[name] = layer


def _set_numbers(module: nn.Module, path: str, numbers: Any) -> None:
    before = _numbers(module)
    for name, value in numbers.items() if isinstance(numbers, dict) else [("", None)]:
        if name not in before or type(value) is not type(before[name]):
            raise ModelFileError(
                f"attribute {name!r:.40} of layer {path!r:.80}", why="the base has no number of that name and type", do="save it again"
            )
        setattr(module, name, value)
