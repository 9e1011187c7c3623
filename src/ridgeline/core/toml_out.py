"""Plain data to TOML text: the half that tomllib leaves out.

    {"a": 1, "t": {"b": [1, 2]}, "list": [{"x": 1}]} ──dump_toml──> a = 1 / [t] b = [1, 2] / [[list]] x = 1

Writes what a spec can hold: str, bool, int, float, lists of those, tables, lists of tables. None is left out.
"""

from __future__ import annotations

import json
from typing import Any


def dump_toml(data: dict[str, Any]) -> str:
    """TOML text that tomllib reads back to the same data."""
    return "\n".join(_table(data, ())).lstrip("\n") + "\n"


def _table(data: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = [f"{_key(k)} = {_value(v)}" for k, v in data.items() if v is not None and not _is_table(v) and not _is_tables(v)]
    for key, value in data.items():
        name = (*path, key)
        if _is_table(value):
            lines += ["", f"[{'.'.join(map(_key, name))}]", *_table(value, name)]
        elif _is_tables(value):
            for item in value:
                lines += ["", f"[[{'.'.join(map(_key, name))}]]", *_table(item, name)]
    return lines


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and set(value) != {"value", "unit", "source", "status"}


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, dict) for item in value)


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, dict):  # a constant stays on one line
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    raise TypeError(f"TOML cannot hold {type(value).__name__}")
