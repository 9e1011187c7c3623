"""Checkpoints that are whole or absent, and hold no code.

    folder/step-000000400/state.safetensors   model.*, objective.*, optimiser.<parameter>.<name>
                          state.json          step, settings, layout of the tensors, scaler, history; CRC-32 and size of the other file
      written as .step-…-tmp, both files and the folder flushed to disk, then renamed; the last KEEP stay

    newest(folder) ──> Snapshot of the newest whole one; a broken one is passed over, and said so
    check_same(stored, now) ──> TrainError naming the first field in which the checkpoint is of another run

Tensors that share memory (tied weights) are stored once. Nothing of torch's generators is stored: see seeds.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..core.errors import TrainError
from ..core.files import write_json

KEEP = 2
SCHEMA = 1
TENSORS, FACTS = "state.safetensors", "state.json"
NAME = re.compile(r"step-(\d{9})")
CHUNK_BYTES = 1 << 20
SPEED_ONLY = ("fused", "foreach", "capturable", "differentiable")  # options of torch's optimisers


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a run needs to go on after `step` steps."""

    step: int
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any] = field(default_factory=dict)  # JSON-ready


def save(folder: Path, snapshot: Snapshot, keep: int = KEEP) -> Path:
    """Write one checkpoint and drop the oldest beyond `keep`."""
    final = folder / f"step-{snapshot.step:09d}"
    temporary = folder / f".{final.name}-tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        stored, aliases = _once(snapshot.tensors)
        save_file(stored, temporary / TENSORS)
        _flush(temporary / TENSORS)
        check = {"crc32": _crc(temporary / TENSORS), "bytes": (temporary / TENSORS).stat().st_size}
        write_json(temporary / FACTS, {"schema": SCHEMA, "step": snapshot.step, "check": check, "aliases": aliases, **snapshot.facts})
        _flush(temporary)
        shutil.rmtree(final, ignore_errors=True)  # only a broken one can stand there: its step has just been done again
        os.replace(temporary, final)
        _flush(folder)
    except OSError as error:
        raise TrainError(
            f"cannot write {final}", why=str(error), do="give checkpoint= a folder you may write to, with room left"
        ) from error
    for old in _found(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def newest(folder: Path, say: Callable[[str], None], at: int | None = None) -> Snapshot | None:
    """The newest whole checkpoint (or that of step `at`); None where there is none; an error where all of them are broken."""
    found = [path for path in _found(folder) if at is None or _step_of(path) == at]
    for path in reversed(found):
        try:
            return _read(path)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            say(f"checkpoint {path} is broken ({error}): trying the one before it")
    if found:
        raise TrainError(
            f"every checkpoint in {folder} is broken",
            why=f"{len(found)} found, none could be read",
            do="give resume=False to start again, or another folder",
        )
    return None


def clear(folder: Path) -> None:
    """Remove every checkpoint, for a run that starts anew where another was."""
    for path in _found(folder):
        shutil.rmtree(path)


def check_same(stored: Mapping[str, Any], now: Mapping[str, Any], where: Path, prefix: str = "") -> None:
    """Both describe the same run, or an error with the first field that differs."""
    for name in [*stored, *(name for name in now if name not in stored)]:
        before, after = stored.get(name, "absent"), now.get(name, "absent")
        if isinstance(before, dict) and isinstance(after, dict):
            check_same(before, after, where, f"{prefix}{name}.")
        elif before != after:
            was, now_is = _short(before, after), _short(after, before)
            raise TrainError(
                f"the checkpoint in {where} is of another run: {prefix}{name} was {was}, is {now_is}",
                why="going on would mix two runs",
                do="use the same settings, another checkpoint folder, or resume=False to start again here",
            )


def _short(value: Any, other: Any) -> str:
    """At most 80 characters, about where the two begin to differ."""
    text = repr(value)
    same = next((place for place, (a, b) in enumerate(zip(text, repr(other), strict=False)) if a != b), 0)
    start = 0 if same < 60 else same - 30
    part = text[start : start + 77]
    return ("..." if start else "") + part + ("..." if start + len(part) < len(text) else "")


def _once(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, contiguous and on the CPU; name → name of the one it is the same as."""
    seen: dict[tuple[Any, ...], str] = {}
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in seen:
            aliases[name] = seen[key]
            continue
        seen[key] = name
        plain = tensor.detach().to("cpu").contiguous()
        # a view of a larger tensor (or of another stored one) would be refused, or written whole
        stored[name] = plain.clone() if plain.untyped_storage().nbytes() != plain.nbytes or plain.data_ptr() == tensor.data_ptr() else plain
    return stored, aliases


def _read(path: Path) -> Snapshot:
    facts = json.loads((path / FACTS).read_text(encoding="utf-8"))
    if facts["schema"] != SCHEMA:
        raise ValueError(f"schema {facts['schema']}, this version reads {SCHEMA}")
    check = facts.pop("check")
    if (path / TENSORS).stat().st_size != check["bytes"]:
        raise ValueError(f"{TENSORS} has {(path / TENSORS).stat().st_size} bytes of {check['bytes']}")
    if _crc(path / TENSORS) != check["crc32"]:
        raise ValueError(f"{TENSORS} does not match its checksum")
    tensors = load_file(path / TENSORS)
    tensors.update({name: tensors[same] for name, same in facts.pop("aliases").items()})
    return Snapshot(int(facts["step"]), tensors, facts)


def _found(folder: Path) -> list[Path]:
    """Checkpoints by step, oldest first."""
    return sorted(path for path in folder.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()) if folder.is_dir() else []


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _flush(path: Path) -> None:
    """A file's bytes or a folder's entries onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _crc(path: Path) -> int:
    value = 0
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value


def pack_optimiser(optimiser: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State of every parameter as tensors by name, and the rest (numbers, and which tensors stay on the CPU) JSON-ready."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    on_cpu: list[str] = []
    for parameter, state in optimiser.state.items():
        for key, value in state.items():
            name = f"optimiser.{names[cast(nn.Parameter, parameter)]}.{key}"
            if isinstance(value, Tensor):
                tensors[name] = value
                if value.device.type == "cpu" and parameter.device.type != "cpu":
                    on_cpu.append(name)
            elif value is None or isinstance(value, bool | int | float | str):
                numbers[name] = value
            else:
                raise TrainError(
                    f"{type(optimiser).__name__} keeps a {type(value).__name__} as {key!r}",
                    why="a checkpoint holds tensors and plain numbers only",
                    do="train without checkpoint=, or use another optimiser",
                )
    return tensors, {"numbers": numbers, "on_cpu": on_cpu, "groups": group_numbers(optimiser)}


def group_numbers(optimiser: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The plain numbers of every parameter group: some optimisers keep state there. Not the rate, which follows from the step."""
    return [
        {name: value for name, value in group.items() if isinstance(value, bool | int | float) and name not in ("lr", *SPEED_ONLY)}
        for group in optimiser.param_groups
    ]


def unpack_optimiser(
    optimiser: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Put stored state back bit by bit; load_state_dict would cast it to the weights' dtype."""
    by_name = {name: parameter for parameter, name in names.items()}
    for group, stored in zip(optimiser.param_groups, facts.get("groups", []), strict=False):
        group.update(stored)
    for name, value in (*tensors.items(), *facts["numbers"].items()):
        if not name.startswith("optimiser."):
            continue
        owner, _, key = name.removeprefix("optimiser.").rpartition(".")
        parameter = by_name[owner]
        if isinstance(value, Tensor):
            place = torch.device("cpu") if name in facts["on_cpu"] else parameter.device
            like = parameter if value.shape == parameter.shape else value  # keeps channels-last strides
            value = torch.empty_like(like, dtype=value.dtype, device=place).copy_(value)
        optimiser.state[parameter][key] = value
