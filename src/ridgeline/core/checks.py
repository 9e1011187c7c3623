"""Checks at the public doors: a value of the wrong type is told by its name, with what to give instead.

    expect("batch", "8", int, do=…) ──> OptionError: batch = '8'; why: it is a str, not an int
    whole("batch", 10**20, do=…)    ──> OptionError: batch = 100000000000000000000; why: at most 16,777,216

A bool counts as a number only where bool is asked for.
"""

from __future__ import annotations

from .errors import OptionError

MOST = 2**24
"""The most samples or tokens anyone can mean; far beyond it the sizes of tensors overflow torch's 64 bits."""


def expect(name: str, value: object, *kinds: type, do: str) -> None:
    """OptionError unless `value` is an instance of one of `kinds`."""
    if isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds):
        return
    wanted = " or ".join(_a(kind.__name__) for kind in kinds)
    is_now = f"it is the class {value.__name__}" if isinstance(value, type) else f"it is {_a(type(value).__name__)}"
    plain = value is None or isinstance(value, str | int | float)
    what = f"{name} = {repr(value)[:80]}" if plain else f"{name} of type {type(value).__name__}"
    raise OptionError(what, why=f"{'it is None' if value is None else is_now}, not {wanted}", do=do)


def whole(name: str, value: object, *, do: str) -> None:
    """OptionError unless `value` is an int of at most MOST; what is too small is for those to say who know the least."""
    expect(name, value, int, do=do)
    if isinstance(value, int) and value > MOST:
        raise OptionError(f"{name} = {value}", why=f"at most {MOST:,}", do=do)


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiouAEIOU" else f"a {noun}"
