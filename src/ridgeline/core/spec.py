"""Strict TOML at the border: constants that carry unit, source and status, and errors that name the field.

    file.toml ──read_toml──> dict ──parse_spec(Model)──> frozen pydantic model
      bandwidth_bps = 1e12                                           a bare number: base unit, status "assumed"
      bandwidth_bps = {value = 4.8, unit = "TB/s", source = "datasheet", status = "read"}

Values are held in base units (FLOP/s, B/s, B, s, W, J, …); a prefixed unit is converted on the way in.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from .errors import TargetSpecError, nearest

MAX_SPEC_BYTES = 4 << 20
PREFIXES = {"": 1.0, "f": 1e-15, "p": 1e-12, "n": 1e-9, "u": 1e-6, "µ": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
            "Ki": 1024.0, "Mi": 1024.0**2, "Gi": 1024.0**3}  # fmt: skip


class Spec(BaseModel):
    """Base of every spec: unknown fields are errors, nothing can change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Constant(Spec):
    """A number with its unit, where it comes from and how sure we are."""

    value: float
    """In the base unit named by `unit`."""
    unit: str
    """Base unit, e.g. B/s."""
    source: str = "given without a source"
    """Document, measurement or reasoning behind the value."""
    status: Literal["measured", "read", "assumed"] = "assumed"
    """measured on the machine, read in a document, or assumed."""


def quantity(unit: str, *, above: float | None = 0.0, least: float | None = None, most: float | None = None) -> BeforeValidator:
    """For Annotated[Constant, quantity(…)]: the number must be finite and within bounds, in `unit` or a prefixed form of it."""

    def convert(given: Any) -> Any:
        if isinstance(given, Constant):
            given = given.model_dump()
        fields = {"value": given} if isinstance(given, int | float) and not isinstance(given, bool) else given
        if not isinstance(fields, dict):
            raise ValueError(f"give a number in {unit} or a table with value, unit, source, status")
        number = fields.get("value")
        if isinstance(number, bool) or not isinstance(number, int | float) or not _finite(number):
            raise ValueError(f"value must be a finite number, got {number!r}")
        scaled = number * _scale(str(fields.get("unit", unit)), unit)
        _check_bounds(scaled, unit, above, least, most)
        return {**fields, "value": scaled, "unit": unit}

    return BeforeValidator(convert)


def _finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number too large for a float
        return False


def _scale(given: str, base: str) -> float:
    same = given.replace("op/s", "FLOP/s").replace("FLFLOP", "FLOP") if base == "FLOP/s" else given
    if not same.endswith(base) or same.removesuffix(base) not in PREFIXES:
        raise ValueError(f"unit {given!r} is not {base} or a prefixed form of it")
    return PREFIXES[same.removesuffix(base)]


def _check_bounds(value: float, unit: str, above: float | None, least: float | None, most: float | None) -> None:
    if above is not None and least is None and value <= above:
        raise ValueError(f"must be > {above:g} {unit}, got {value:g}")
    if least is not None and value < least:
        raise ValueError(f"must be >= {least:g} {unit}, got {value:g}")
    if most is not None and value > most:
        raise ValueError(f"must be <= {most:g} {unit}, got {value:g}")


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file; missing, oversized, binary or broken files (duplicate keys among them) are clear errors."""
    try:
        if path.is_dir():
            raise TargetSpecError(f"{path} is a folder", why="a target is one TOML file", do="give the file's path")
        if path.stat().st_size > MAX_SPEC_BYTES:
            raise TargetSpecError(
                f"{path} is too large", why=f"a target file holds at most {MAX_SPEC_BYTES} bytes", do="check that it is a target file"
            )
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise TargetSpecError(f"cannot open {path}", why="no such file", do="see `ridgeline targets list` for the built-in ones") from error
    except OSError as error:
        raise TargetSpecError(f"cannot open {path}", why=str(error), do="check the path and its permissions") from error
    except (ValueError, RecursionError) as error:  # bad TOML or UTF-8, or a number of thousands of digits
        raise TargetSpecError(
            f"{path} is not valid TOML", why=str(error) or "nested too deeply", do="mend the line it names; a key may appear once only"
        ) from error


SpecType = TypeVar("SpecType", bound=BaseModel)


def parse_spec(model: type[SpecType], data: dict[str, Any], origin: str) -> SpecType:
    """Validate; the error names the first wrong field, its value and the nearest known spelling."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        # a misspelt field is also a missing one: speak of the misspelling first
        first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        why, do = first["msg"].removeprefix("Value error, "), "correct the field; `ridgeline targets show h200` prints a full example"
        if first["type"] == "extra_forbidden":
            close = nearest(str(first["loc"][-1]), _fields_near(model, first["loc"]))
            why = "no such field" + (f"; did you mean {', '.join(close)}?" if close else "")
        value = first.get("input")
        shown = "" if first["type"] == "missing" or isinstance(value, dict | list) else f" = {value!r}"
        more = f" ({error.error_count() - 1} more after it)" if error.error_count() > 1 else ""
        raise TargetSpecError(f"{where}{shown} in {origin}", why=why + more, do=do) from error


def _fields_near(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """Field names of the model that the last part of `location` was meant for."""
    names = list(model.model_fields)
    for field in model.model_fields.values():
        for kind in _models_in(field.annotation):
            if len(location) > 1:
                names += list(kind.model_fields)
    return names


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation, *(m for f in annotation.model_fields.values() for m in _models_in(f.annotation))]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]
