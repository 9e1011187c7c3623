"""A target by name or file: the catalog, `cpu` and `cuda` (this machine, calibrated), or your own TOML.

"h200", "eyeriss" ──catalog/*.toml──┐                      kind = "processor" ──> ProcessorSpec
"./mychip.toml" ────────────────────┼──read_toml──parse_spec──┤
"cpu", "cuda" ──cache, else calibrate once──┘              kind = "array" ──────> SpatialArraySpec
                                                           kind = "crossbar" ───> CrossbarSpec

`load_target` gives any kind; `load_processor`, `load_array` and `load_crossbar` are for callers that can use only one, and say so.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from ..core.checks import expect
from ..core.errors import OptionError, TargetSpecError, unknown_name
from ..core.spec import SpecType, parse_spec, read_toml
from .array import SpatialArraySpec
from .crossbar import CrossbarSpec
from .spec import ProcessorSpec

Target = ProcessorSpec | SpatialArraySpec | CrossbarSpec
TargetKind = Literal["processor", "array", "crossbar"]
Progress = Callable[[str], None]

LOCAL_TARGETS = ("cpu", "cuda")
EXAMPLES: dict[TargetKind, str] = {"processor": "h200", "array": "eyeriss", "crossbar": "rram-64"}
"""A catalog target of each kind, shown to whoever got a file wrong."""


def catalog_names(kind: TargetKind | None = None) -> list[str]:
    """Names of the built-in targets, of one kind or all; `cpu` and `cuda` are this machine."""
    folder = resources.files("ridgeline.target") / "catalog"
    names = sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))
    return [name for name in names if kind is None or _catalog_data(name).get("kind") == kind]


def target_names() -> list[str]:
    """Every name `load_target` takes."""
    return [*catalog_names(), *LOCAL_TARGETS]


def load_target(name: str, progress: Progress | None = None) -> Target:
    """The spec behind a name or a TOML path; `cpu` and `cuda` are calibrated on first use."""
    expect("target", name, str, do="give a name from `ridgeline targets list`, or the path of a .toml file as text")
    if name in LOCAL_TARGETS:
        from .calibrate import calibrated

        return calibrated(name, progress)
    if name.endswith(".toml") or "/" in name:
        return load_file(Path(name))
    if name not in catalog_names():
        raise unknown_name("target", name, target_names(), "`ridgeline targets list`, or give a path to a .toml file")
    return _from_data(_catalog_data(name), f"{name}.toml")


def load_processor(name: str, progress: Progress | None = None) -> ProcessorSpec:
    """The same for callers that estimate with roofs; an array is an OptionError."""
    return as_processor(load_target(name, progress))


def load_array(name: str) -> SpatialArraySpec:
    """The same for callers that map layers; a processor is an OptionError, raised without calibrating this machine."""
    if name in LOCAL_TARGETS:
        raise _not_an_array(name, "processor")
    target = load_target(name)
    if not isinstance(target, SpatialArraySpec):
        raise _not_an_array(target.name, target.kind)
    return target


def load_crossbar(name: str) -> CrossbarSpec:
    """The same for callers that simulate analog arrays; any other kind is an OptionError, raised without calibrating this machine."""
    target = None if name in LOCAL_TARGETS else load_target(name)
    if not isinstance(target, CrossbarSpec):
        raise OptionError(
            f"{name} is {_a(target.kind) if target else _a('processor')}",
            why="only a crossbar has cells that multiply by their conductance",
            do=f"use `ridgeline analyze --on {name}`, or a crossbar: {', '.join(catalog_names('crossbar'))}",
        )
    return target


def as_processor(target: Target) -> ProcessorSpec:
    """The target itself if it is a processor."""
    if isinstance(target, SpatialArraySpec):
        raise OptionError(
            f"{target.name} is a spatial array",
            why="this needs a processor, which has roofs; what an array costs depends on how each layer is mapped to it",
            do=f"use `ridgeline map --on {target.name}`",
        )
    if isinstance(target, CrossbarSpec):
        raise OptionError(
            f"{target.name} is a crossbar",
            why="this needs a processor, which has roofs; what a crossbar costs follows from its reads and conversions",
            do=f"use `ridgeline analyze --on {target.name}`",
        )
    return target


def _a(kind: str) -> str:
    return {"array": "a spatial array"}.get(kind, f"a {kind}")


def _not_an_array(name: str, kind: str) -> OptionError:
    return OptionError(
        f"{name} is {_a(kind)}",
        why="only a spatial array has processing elements to map layers to",
        do=f"use `ridgeline analyze --on {name}`, or an array: {', '.join(catalog_names('array'))}",
    )


def check_processor(name: str) -> None:
    """Raise what `load_processor` would for a name or file that is wrong, without calibrating this machine."""
    if name not in LOCAL_TARGETS:
        load_processor(name)


def load_file(path: Path) -> Target:
    """Parse one target file."""
    return _from_data(read_toml(path), path.name)


def _catalog_data(name: str) -> dict[str, Any]:
    with resources.as_file(resources.files("ridgeline.target") / "catalog" / f"{name}.toml") as path:
        return read_toml(path)


def _from_data(data: dict[str, Any], origin: str) -> Target:
    kind = data.get("kind")
    if kind == "processor":
        return _parse(ProcessorSpec, data, origin, "processor")
    if kind == "array":
        return _parse(SpatialArraySpec, data, origin, "array")
    if kind == "crossbar":
        return _parse(CrossbarSpec, data, origin, "crossbar")
    raise TargetSpecError(
        f"kind = {kind!r} in {origin}",
        why=f"the kinds of target are: {', '.join(EXAMPLES)}",
        do=" or ".join(f'write kind = "{known}"' for known in EXAMPLES),
    )


def _parse(model: type[SpecType], data: dict[str, Any], origin: str, kind: TargetKind) -> SpecType:
    try:
        return parse_spec(model, data, origin)
    except TargetSpecError as error:
        do = f"correct the field; `ridgeline targets show {EXAMPLES[kind]}` prints a full example"
        raise TargetSpecError(error.what, why=error.why, do=do) from error.__cause__
