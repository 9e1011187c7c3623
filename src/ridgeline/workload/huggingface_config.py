"""What a Hugging Face folder says about its model, checked before anything is built.

    folder/config.json ──read_config──> dict ──load_config──> transformers config ──model_class_of──> class
    folder/model.safetensors, or an index of several ──has_safetensors──> whether there are weights to read

Code that comes with a model (`auto_map`) is refused, and so are configs too large to be one. Kernels a config asks for are
not fetched, quantisation it asks for is not applied (with a warning). No weight is read here.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..core.errors import ModelFileError, nearest

MOST_BYTES = 2**20
MOST_LAYERS = 10_000
SIZES = frozenset({"hidden_size", "num_attention_heads", "num_key_value_heads", "d_model", "n_embd", "n_head", "n_heads", "num_heads"})
# What a config may say about how it is run: names of kernels to fetch among them, so it is not asked.
RUN_KEYS = frozenset({
    "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
    "experts_implementation", "_experts_implementation", "_experts_implementation_internal",
})  # fmt: skip


def read_config(folder: Path) -> dict[str, Any]:
    """The config as JSON, checked for size, kind and code."""
    file = folder / "config.json"
    if not file.is_file():
        raise ModelFileError(f"{folder} holds no config.json", why="a Hugging Face folder has one", do="give a folder with a config.json")
    if file.stat().st_size > MOST_BYTES:
        raise ModelFileError(f"{file} is {file.stat().st_size} bytes", why="a config is at most 1 MiB", do="give a model's own config.json")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"cannot read {file}", why=f"not JSON ({first_line(error)})", do="download config.json again") from error
    if not isinstance(data, dict):
        raise ModelFileError(f"{file} is a {type(data).__name__}", why="a config is a JSON object", do="give a model's own config.json")
    if not isinstance(data.get("model_type"), str):
        raise ModelFileError(f"{file} has no model_type", why="it says which architecture to build", do='add e.g. "model_type": "llama"')
    _check_items(file, data)
    return {key: value for key, value in data.items() if key not in RUN_KEYS}


def _check_items(file: Path, data: dict[str, Any]) -> None:
    for key, value in _items(data):
        if key == "auto_map":
            raise ModelFileError(
                f"{file} is refused",
                why="it names Python code of its own (auto_map), which would be run",
                do="read that code, and if you trust it give file.py:factory that builds the model",
            )
        if key in SIZES and isinstance(value, int) and value < 1:
            raise ModelFileError(f"{key} = {value} in {file}", why="a whole number above 0", do="correct config.json")
        if re.search("layer|depth|block", key) and isinstance(value, int) and value > MOST_LAYERS:
            raise ModelFileError(f"{key} = {value} in {file}", why=f"at most {MOST_LAYERS} layers are built", do="correct config.json")


def _items(data: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every key and number of nested objects and lists; the numbers of a list go by the list's key."""
    if isinstance(data, dict):
        for inner, value in data.items():
            yield inner, value
            yield from _items(value, inner)
    elif isinstance(data, list):
        for value in data:
            yield key, value
            yield from _items(value, key)


def load_config(folder: Path, data: dict[str, Any], transformers: Any) -> Any:
    """The config as transformers has it, for inference without a cache of its own."""
    known = transformers.CONFIG_MAPPING
    model_type = data["model_type"]
    if model_type not in known:
        close = nearest(model_type, known.keys())
        why = f"transformers {transformers.__version__} does not know it" + (f"; nearest: {', '.join(close)}" if close else "")
        raise ModelFileError(f"model_type {model_type!r} in {folder}/config.json", why=why, do="install a transformers that knows it")
    try:
        config = known[model_type].from_dict(data)
        config.use_cache = False
    except Exception as error:  # each architecture checks its own fields with its own errors
        raise ModelFileError(
            f"cannot use {folder}/config.json", why=first_line(error), do="correct or download config.json again"
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
        warnings.warn(f"{folder}/config.json asks for quantised weights: built unquantised", stacklevel=4)
    return config


def model_class_of(folder: Path, config: Any, transformers: Any) -> type[Any]:
    """The class `architectures` names, else the plain model of that type."""
    names = config.architectures or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelFileError(
            f"architectures = {names!r} in {folder}/config.json", why="it is a list of class names", do="correct config.json"
        )
    found = getattr(transformers, names[0], None) if names else None
    if found is None:
        found = transformers.MODEL_MAPPING.get(type(config), None)
        found = found[0] if isinstance(found, list | tuple) else found
        if names:
            built = getattr(found, "__name__", "nothing")
            warnings.warn(f"transformers has no {names[0]}, named in {folder}/config.json: {built} is built", stacklevel=4)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise ModelFileError(
            f"no model for {folder}/config.json",
            why=f"{', '.join(names) or config.model_type} is no model class of transformers",
            do="correct architectures",
        )
    wanted = getattr(found, "config_class", None)
    if wanted is not None and not isinstance(config, wanted):
        why = f"{found.__name__} is not a {config.model_type} model"
        raise ModelFileError(f"{folder}/config.json contradicts itself", why=why, do="make architectures and model_type agree")
    return found


def has_safetensors(folder: Path) -> bool:
    """Whether the folder has weights that can be read without running code; an index may name only files beside it."""
    if (folder / "model.safetensors").is_file():
        return True
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return False
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        outside = [file for file in files if Path(file).name != file or not file.endswith(".safetensors")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(f"cannot read {index}", why=first_line(error), do="download the folder again") from error
    if outside:
        raise ModelFileError(
            f"{index} names {outside[0]!r}", why="weights must be safetensors beside the index", do="download the folder again"
        )
    return True


def first_line(error: BaseException) -> str:
    """An exception in one line."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
