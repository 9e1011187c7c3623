"""NAME=VALUE: what is read, and what is refused."""

from __future__ import annotations

import pytest

from ridgeline.cli.pairs import read_pairs
from ridgeline.core.errors import OptionError


def test_values_are_json_words_or_lists_of_them() -> None:
    given = ["a=16", "b=0.1", "c=skip,none", "d=[[16,32],[32,64]]", "e=null", "f=a word", "g=16,x,0.5", "h=true", 'i="a,b"', "j="]
    assert read_pairs("--set", given) == {
        "a": 16, "b": 0.1, "c": ["skip", "none"], "d": [[16, 32], [32, 64]], "e": None, "f": "a word", "g": [16, "x", 0.5], "h": True,
        "i": "a,b", "j": "",
    }  # fmt: skip
    assert read_pairs("--set", None) == {}


@pytest.mark.parametrize(
    ("entry", "told"),
    [("a", "name and a value"), ("=3", "name and a value"), ("a-b=3", "name and a value"), ("a=1", "given twice"), ("b=[[16", "JSON list"),
     ("b=" + "[" * 100_000, "JSON list"), ("b=1,[2", "JSON list")],
)  # fmt: skip
def test_what_is_no_pair_is_told_so(entry: str, told: str) -> None:
    with pytest.raises(OptionError, match=told) as caught:
        read_pairs("--set", ["a=1", entry])
    assert len(str(caught.value)) < 500
