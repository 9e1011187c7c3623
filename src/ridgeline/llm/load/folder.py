"""Models in a Hugging Face folder, read without running anything of theirs.

    config.json ──> ModelConfig          model.safetensors, or the files its index names ──> Tensors, as stored
    tokenizer.json, tokenizer_config.json ──> tokenizer          chat_template.jinja, or the one in tokenizer_config.json
    generation_config.json, config.json ──> tokens that end an answer

Pickled weights and code that comes with a model are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ...core.errors import ModelFileError
from ...workload.huggingface_config import first_line, has_safetensors, read_config
from ..model.config import config_of
from .source import Source
from .tensors import Tensors
from .tokenizer_json import read_tokenizer

MOST_JSON_BYTES = 2**24
MOST_TEMPLATE_BYTES = 2**20
MOST_NAME = 255  # what a file system takes
INDEX = "model.safetensors.index.json"


def open_folder(folder: Path) -> Source:
    """The model of a folder; nothing of its weights is read yet."""
    data = read_config(folder)
    config = config_of(data, str(folder))
    settings = read_object(folder / "tokenizer_config.json")
    ids = [read_object(folder / "generation_config.json").get("eos_token_id"), data.get("eos_token_id")]
    begins, ends = (_spelling(settings.get(key)) for key in ("bos_token", "eos_token"))
    tokenizer = read_tokenizer(folder / "tokenizer.json", begins, ends, _whole(data.get("bos_token_id")), settings.get("add_bos_token"))
    eos = {*_ids(ids[0]), *_ids(ids[1]), *_ids(tokenizer.eos)}
    return Source(
        folder.resolve().name,
        config,
        folder_tensors(folder),
        tokenizer,
        _template(folder, settings),
        tuple(sorted(index for index in eos if index < config.vocab)),
    )


def folder_tensors(folder: Path) -> Tensors:
    """Every tensor of the folder's safetensors; rotary tables that some old files hold are left out."""
    from safetensors import SafetensorError, safe_open

    readers: dict[str, Callable[[], Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _weight_files(folder):
        try:
            file: Any = safe_open(path, framework="pt")  # the library checks its header against the file's size
            names = list(file.keys())
            found = {name: tuple(file.get_slice(name).get_shape()) for name in names}
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise ModelFileError(f"cannot read {path}", why=first_line(error), do="download it again") from error
        if twice := next((name for name in names if name in readers), None):
            raise ModelFileError(f"tensor {twice} in {path}", why="another file of the folder holds it too", do="download the folder again")
        for name in names:
            if not name.endswith(("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")):  # tables, computed here
                readers[name], shapes[name] = _reader(file, name), found[name]
    return Tensors(readers, shapes, str(folder))


def _reader(file: Any, name: str) -> Callable[[], Tensor]:
    from safetensors import SafetensorError

    def read() -> Tensor:
        try:
            tensor: Tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(first_line(error)) from error
        return tensor

    return read


def _weight_files(folder: Path) -> list[Path]:
    listed = read_object(folder / INDEX).get("weight_map", {})
    if not isinstance(listed, dict) or not all(isinstance(name, str) and len(name) <= MOST_NAME for name in listed.values()):
        raise ModelFileError(f"weight_map in {folder / INDEX}", why="it gives each tensor the name of a file", do="download it again")
    if not has_safetensors(folder):
        raise ModelFileError(f"{folder} holds no safetensors", why="pickled weights are never read", do="save the model as safetensors")
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    return [folder / name for name in sorted(set(listed.values()))]


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > MOST_JSON_BYTES:
            raise ValueError(f"it is {path.stat().st_size:,} bytes, at most {MOST_JSON_BYTES:,} are read")
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"it is a {type(data).__name__}, not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"cannot read {path}", why=first_line(error), do=f"download {path.name} again") from error
    return data


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    """A file of its own, the one in the settings, or the one named "default" among several."""
    file = folder / "chat_template.jinja"
    try:
        if file.is_file():
            if file.stat().st_size > MOST_TEMPLATE_BYTES:
                raise ModelFileError(f"{file} is {file.stat().st_size:,} bytes", why=f"at most {MOST_TEMPLATE_BYTES:,}", do="shorten it")
            return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(f"cannot read {file}", why=first_line(error), do="download it again") from error
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = next((one.get("template") for one in found if isinstance(one, dict) and one.get("name") == "default"), None)
    return found if isinstance(found, str) and len(found) <= MOST_TEMPLATE_BYTES else None


def _spelling(value: Any) -> str | None:
    """A token in the settings: a string, or an object with its content."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _ids(value: Any) -> list[int]:
    """One id or a list of them; whatever else is left out."""
    return [index for index in (value if isinstance(value, list) else [value]) if type(index) is int and index >= 0]
