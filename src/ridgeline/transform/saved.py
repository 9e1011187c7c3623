"""A compressed model on disk: tensors as safetensors, structure as JSON; loading runs no code that came with it.

    save_model(model, folder, base="resnet56", change=change)
        folder/model.safetensors   packed codes, scales, weights; zeros left out where that is smaller     (tensor_file.py)
        folder/model.json          base, layers that differ from it, tensors, digest, the Change            (structure.py)
    load_model(folder) ──JSON checked──> base built without memory ──layers replaced──> shapes checked ──> tensors read ──> nn.Module

The JSON is written last and names the tensor file it belongs to, so a save that is cut short leaves the old model or none.
Base is a name of `ridgeline models`, or a module or function given to both calls. Dtypes of the file's floats win over the base's.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.change import Change, finite
from ..core.errors import ModelFileError, OptionError
from ..core.files import write_text
from ..workload.case import CaseOptions
from ..workload.models import MODELS, build_named
from ..workload.models.decoder import CONFIGS, RotaryEmbedding
from ..workload.pretrained import LanguageModel
from .kinds import is_ours
from .structure import Differences, described_whole, differences, rebuild
from .tensor_file import Entry, file_bytes, plan, read_entries, read_tensors, write_tensors

SCHEMA = 1
MOST_JSON_BYTES = 64 << 20
FIELDS = {"schema", "base", "layers", "attributes", "tensors", "file", "bytes", "sha256", "memory_format", "change"}
Base = str | nn.Module | Callable[[], nn.Module]


def stored_bytes(model: nn.Module) -> int:
    """The exact size of the tensor file that save_model would write."""
    return file_bytes(plan(_plain(model).state_dict()))


def save_model(model: nn.Module, path: str | Path, *, base: Base | None = None, change: Change | None = None) -> Path:
    """Write the model into a folder, or as NAME.safetensors beside NAME.json; returns the path of the JSON."""
    module = _plain(model)
    changes = described_whole(module) if base is None else differences(module, _base_module(base, "meta"))
    state = module.state_dict()
    entries = plan(state)
    _require_rebuilds(module, base, changes, entries)
    description, tensors = _places(Path(path), following=False)
    write_tensors(tensors, state, entries)
    document = {
        "schema": SCHEMA,
        "base": base if isinstance(base, str) else None,
        "layers": changes.layers,
        "attributes": changes.attributes,
        "tensors": {entry.name: entry.to_json() for entry in entries},
        "file": tensors.name,
        "bytes": tensors.stat().st_size,
        "sha256": _digest(tensors),
        "memory_format": "channels_last" if _is_channels_last(module) else None,
        "change": change.to_json() if change is not None else None,
    }
    before = _named_file(description)
    write_text(description, json.dumps(finite(document), indent=1, allow_nan=False) + "\n")
    if before is not None and before != tensors.name:
        (description.parent / before).unlink(missing_ok=True)
    return description


def load_model(path: str | Path, base: Base | None = None, *, device: str | torch.device | None = None) -> nn.Module:
    """A saved model, or a freshly built one for a name of `ridgeline models`; in eval mode."""
    if isinstance(path, str) and path in MODELS and not Path(path).exists():
        return _named(path, str(device or "cpu")).eval()
    description, _ = _places(Path(path), following=True)
    document = read_document(description)
    changes = Differences(document["layers"], document["attributes"])
    entries = read_entries(document["tensors"])
    source = _source(document["base"], base, changes)
    tensors = description.parent / document["file"]
    skeleton = _skeleton(source, changes, "meta")
    _require_fit(skeleton, entries, tensors)
    _require_whole(tensors, document)
    state = read_tensors(tensors, entries)
    model = _filled(source, changes, state, entries)
    if document["memory_format"] == "channels_last":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return model.to(device).eval() if device is not None else model.eval()


def read_document(path: Path) -> dict[str, Any]:
    """The JSON of a saved model, its fields present and of the right types; the parts are checked where they are used."""
    try:
        if path.stat().st_size > MOST_JSON_BYTES:
            raise ModelFileError(f"{path} is too large", why=f"at most {MOST_JSON_BYTES:,} bytes are read", do="save the model again")
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFileError(f"cannot open {path}", why="no such file", do="give the folder that save_model wrote") from error
    except OSError as error:
        raise ModelFileError(f"cannot open {path}", why=str(error), do="check the path and its permissions") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not valid JSON", why=str(error)[:200] or "nested too deeply", do="save the model again") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise ModelFileError(f"{path}: schema {found!r:.40}", why=f"this version reads schema {SCHEMA}", do="save the model again")
    if odd := sorted(FIELDS ^ document.keys()):
        raise ModelFileError(f"{path}: field {odd[0]!r:.40}", why="it is missing, or not known", do="save the model again")
    kinds = {"layers": dict, "attributes": dict, "tensors": dict, "file": str, "bytes": int, "sha256": str, "base": str | None,
             "memory_format": str | None, "change": dict | None}  # fmt: skip
    for name, kind in kinds.items():
        if not isinstance(document[name], kind):
            raise ModelFileError(f"{path}: {name} = {document[name]!r:.60}", why="it is of the wrong type", do="save the model again")
    if not re.fullmatch(r"[\w][\w.+ -]{0,200}\.safetensors", document["file"]):
        raise ModelFileError(f"{path}: file = {document['file']!r:.80}", why="tensors lie beside the JSON", do="save the model again")
    return document


def _places(path: Path, *, following: bool) -> tuple[Path, Path]:
    """(JSON, tensors) of a path the user gave; a save never writes over the tensors that a JSON there still names."""
    if path.suffix in (".safetensors", ".json"):
        description = path.with_suffix(".json")
    else:
        if path.is_file():
            raise ModelFileError(f"{path} is a file", why="a saved model is a folder, or NAME.safetensors with NAME.json", do="give those")
        description = path / "model.json"
    stem = description.stem
    taken = None if following else _named_file(description)
    return description, description.parent / (f"{stem}-2.safetensors" if taken == f"{stem}.safetensors" else f"{stem}.safetensors")


def _named_file(description: Path) -> str | None:
    try:
        return str(read_document(description)["file"])
    except ModelFileError:
        return None  # nothing there that anyone could load


def _plain(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def _base_module(base: Base, device: str) -> nn.Module:
    """A fresh base on the CPU or, to be looked at only, on the meta device."""
    if isinstance(base, str):
        return _named(base, device)
    if isinstance(base, nn.Module):
        return _without_memory(base) if device == "meta" else copy.deepcopy(base).to(device)
    made = base()
    if not isinstance(made, nn.Module):
        raise OptionError(f"base= gave a {type(made).__name__}", why="a base is a name, a module, or a function of none", do="give one")
    return made.to(device)


def _named(name: str, device: str) -> nn.Module:
    """A built-in model; decoders as load_pretrained makes them, which take token ids alone."""
    if name not in CONFIGS:
        return build_named(name, CaseOptions(device=device)).module
    with torch.random.fork_rng(devices=[]), torch.device(device):
        model = LanguageModel(CONFIGS[name])
    with torch.device("cpu" if device == "meta" else device):
        model.model.rotary_emb = RotaryEmbedding(CONFIGS[name])  # computed, in no file: so that a base without memory is enough
    return model


def _without_memory(module: nn.Module) -> nn.Module:
    """A copy on the meta device, made without copying a weight on the way."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(module, memo)


def _source(named: str | None, given: Base | None, changes: Differences) -> Base | None:
    if given is not None:
        return given
    if named is not None:
        if named not in MODELS:
            raise ModelFileError(
                f"base model {named!r:.80} is not known", why="a file may only name built-in models", do="give base=, a module or function"
            )
        return named
    if "" not in changes.layers:
        raise ModelFileError(
            "a saved model without a base",
            why="it was saved from a module of its own class, whose code is not in the file",
            do="give base=, a module of that class or a function that makes one",
        )
    return None


def _skeleton(source: Base | None, changes: Differences, device: str) -> nn.Module:
    with torch.device(device):
        return rebuild(None if source is None else _base_module(source, device), changes)


def _filled(source: Base | None, changes: Differences, state: Mapping[str, Tensor], entries: list[Entry]) -> nn.Module:
    """The model with its tensors; a named base comes without memory unless it holds tensors that no file has."""
    for device in ("meta", "cpu") if isinstance(source, str) else ("cpu",):
        with torch.device("cpu"):
            model = rebuild(None if source is None else _base_module(source, device), changes)
        try:
            model.load_state_dict(state, strict=True, assign=True)
            _tie(model, entries)
        except (RuntimeError, TypeError, KeyError, AttributeError) as error:  # a layer's own check, or a parameter tied to a buffer
            raise ModelFileError("the tensors do not fit the model", why=str(error)[:300], do="save the model again") from error
        if not _left_empty(model):
            break
    return model


def _left_empty(model: nn.Module) -> bool:
    held = [value for module in model.modules() for value in vars(module).values()]
    leaves = [*model.parameters(), *model.buffers(), *torch.utils._pytree.tree_leaves(held)]
    return any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves)


def _tie(model: nn.Module, entries: list[Entry]) -> None:
    for entry in entries:
        if entry.same_as is not None:
            home, _, name = entry.name.rpartition(".")
            other, _, other_name = entry.same_as.rpartition(".")
            module, source = model.get_submodule(home), model.get_submodule(other)
            if (name in module._parameters) != (other_name in source._parameters):
                raise TypeError(f"{entry.name} shares {entry.same_as}: one is a parameter and one a buffer")
            setattr(module, name, getattr(source, other_name))


def _require_fit(skeleton: nn.Module, entries: list[Entry], where: Path) -> None:
    """Names, shapes and kinds of dtype as the structure has them, before anything is read."""
    expected, given = skeleton.state_dict(), {entry.name: entry for entry in entries}
    ours = {path for path, module in skeleton.named_modules() if is_ours(module)}
    packed = {name for name in expected if name.rpartition(".")[0] in ours}  # their kernels take the types their config says
    for name, tensor in expected.items():
        entry = given.pop(name, None)
        if entry is None:
            raise ModelFileError(f"{where} lacks tensor {name}", why="the model has it", do="save it again, or give the right base=")
        same_kind = tensor.dtype == entry.dtype or (tensor.is_floating_point() and entry.dtype.is_floating_point and name not in packed)
        if tuple(tensor.shape) != entry.shape or not same_kind:
            raise ModelFileError(
                f"{where}: tensor {name} is {entry.dtype} {list(entry.shape)}",
                why=f"the model has {tensor.dtype} {list(tensor.shape)} there",
                do="save it again, or give the right base=",
            )
    for name in given:
        raise ModelFileError(f"{where}: tensor {name!r:.80}", why="the model has none of that name", do="give the base= it was saved with")


def _require_rebuilds(module: nn.Module, base: Base | None, changes: Differences, entries: list[Entry]) -> None:
    """What is about to be written can be loaded: better told now than when the model is gone."""
    if base is None and "" not in changes.layers:
        return  # only whoever has the class can build it
    _require_fit(_skeleton(base, changes, "meta"), entries, Path("the model"))


def _require_whole(path: Path, document: Mapping[str, Any]) -> None:
    try:
        size = path.stat().st_size
        if size != document["bytes"] or _digest(path) != document["sha256"]:
            why = f"its size or SHA-256 is not what {path.parent.name}'s JSON says ({document['bytes']:,} bytes)"
            raise ModelFileError(f"{path} was changed or cut short", why=why, do="save or copy it again")
    except OSError as error:
        raise ModelFileError(f"cannot open {path}", why=str(error), do="check the path and its permissions") from error


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _is_channels_last(module: nn.Module) -> bool:
    images = [p for p in module.parameters() if p.dim() == 4 and min(p.shape[1:]) > 1]
    return bool(images) and all(p.is_contiguous(memory_format=torch.channels_last) and not p.is_contiguous() for p in images)
