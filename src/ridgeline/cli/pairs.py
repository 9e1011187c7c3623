"""Settings on the command line, written the same way everywhere: NAME=VALUE, repeatable.

["channels=16", "drop_path=0.1", "ops=skip,none", "widths=[[16,32],[32,64]]"] ──read_pairs──> {"channels": 16, "ops": ["skip", "none"], …}
  a value is JSON; what is none is a word, and commas part a list of either
"""

from __future__ import annotations

import json
from typing import Any

from ..core.errors import OptionError


def read_pairs(option: str, given: list[str] | None) -> dict[str, Any]:
    """Each name once; `option` is what an error calls it."""
    found: dict[str, Any] = {}
    for entry in given or []:
        name, equals, text = entry.partition("=")
        if not equals or not name.isidentifier() or name in found:
            why = "it is given twice" if equals and name in found else "a name and a value are wanted, name=value"
            raise OptionError(f"{option} {entry[:80]}", why=why, do=f"e.g. {option} channels=16")
        try:
            found[name] = _value(text)
        except (ValueError, RecursionError) as error:
            why = f"not a JSON list: {str(error)[:160]}"
            raise OptionError(f"{option} {entry[:80]}", why=why, do=f"e.g. {option} 'widths=[[16,32],[32,64]]'") from error
    return found


def _value(text: str) -> Any:
    if text.startswith("["):
        return json.loads(text)
    try:
        return json.loads(text)
    except ValueError:
        return [_value(part) for part in text.split(",")] if "," in text else text
