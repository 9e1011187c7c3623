"""A target by name or file: the catalog, `cpu` and `cuda` (this machine, calibrated), or your own TOML.

"h200" ──catalog/h200.toml──┐
"./mychip.toml" ────────────┼──read_toml──parse_spec──> ProcessorSpec
"cpu", "cuda" ──cache, else calibrate once──┘
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path

from ..core.errors import TargetSpecError, unknown_name
from ..core.spec import parse_spec, read_toml
from .spec import ProcessorSpec

LOCAL_TARGETS = ("cpu", "cuda")


def catalog_names() -> list[str]:
    """Names of the built-in targets; `cpu` and `cuda` are this machine."""
    folder = resources.files("ridgeline.target") / "catalog"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def target_names() -> list[str]:
    """Every name `load_target` takes."""
    return [*catalog_names(), *LOCAL_TARGETS]


def load_target(name: str, progress: Callable[[str], None] | None = None) -> ProcessorSpec:
    """The spec behind a name or a TOML path; `cpu` and `cuda` are calibrated on first use."""
    if name in LOCAL_TARGETS:
        from .calibrate import calibrated

        return calibrated(name, progress)
    if name.endswith(".toml") or "/" in name:
        return load_file(Path(name))
    if name not in catalog_names():
        raise unknown_name("target", name, target_names(), "`ridgeline targets list`, or give a path to a .toml file")
    with resources.as_file(resources.files("ridgeline.target") / "catalog" / f"{name}.toml") as path:
        return load_file(path)


def check_target(name: str) -> None:
    """Raise what `load_target` would for a name or file that is wrong, without calibrating this machine."""
    if name not in LOCAL_TARGETS:
        load_target(name)


def load_file(path: Path) -> ProcessorSpec:
    """Parse one target file."""
    data = read_toml(path)
    kind = data.get("kind")
    if kind != "processor":
        raise TargetSpecError(f"kind = {kind!r} in {path.name}", why="the kinds of target are: processor", do='write kind = "processor"')
    return parse_spec(ProcessorSpec, data, path.name)
