"""Keyword options of a public call, checked into its settings; a wrong one is an OptionError, as everywhere in Python.

low_rank(model, energy=1.5) ──checked──> OptionError: energy = 1.5 in low_rank(...)     TOML takes the same settings by recipe.py
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError

from ..core.errors import OptionError, nearest
from ..core.spec import Spec

Settings = TypeVar("Settings", bound=Spec)


def checked(kind: type[Settings], given: dict[str, Any], who: str) -> Settings:
    """The settings, or an error that names the first wrong option, its value and the nearest known one."""
    try:
        return kind(**given)
    except ValidationError as error:
        first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        where = ".".join(str(part) for part in first["loc"]) or "options"
        shown = f" = {first['input']!r}" if first["loc"] and first["type"] != "missing" else ""
        why, do = first["msg"].removeprefix("Value error, "), "see docs/compress.md for what each option takes"
        if first["type"] == "extra_forbidden":
            close = nearest(str(first["loc"][-1]), kind.model_fields)
            why = "no such option"
            do = f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(kind.model_fields)}"
        raise OptionError(f"{where}{shown} in {who}", why=why, do=do) from error
