"""N-gram drafts against a search of the whole text."""

from __future__ import annotations

import random

import pytest

from ridgeline.core.errors import OptionError
from ridgeline.llm.engine.request import Request
from ridgeline.llm.sampling import Sampling
from ridgeline.llm.speculate import NgramDraft
from tests.support import full_or_tenth


def searched(tokens: list[int], most: int, least: int, count: int) -> list[int]:
    """The latest earlier place of the longest suffix, looked for from the end."""
    for size in range(most, least - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if size < len(tokens) and tokens[end - size : end] == tokens[-size:]:
                text = list(tokens)
                for _ in range(count):
                    text.append(text[end])
                    end += 1
                return text[len(tokens) :]
    return []


def test_equals_a_search_while_the_text_grows() -> None:
    found = 0
    for case in range(full_or_tenth(300)):
        random.seed(case)
        vocab, least = random.choice([2, 4, 9]), random.choice([1, 2, 3])
        draft = NgramDraft(random.randint(least, 5), least)
        request = Request("r", [random.randrange(vocab) for _ in range(random.randint(1, 20))], Sampling())
        for _ in range(12):
            count = random.randint(1, 6)
            wanted = searched([*request.prompt, *request.output], draft.most, least, count)
            assert draft.lookup(request, count) == wanted
            found += bool(wanted)
            request.output += [random.randrange(vocab) for _ in range(random.randint(1, 4))]
        draft.forget(request)
        assert not draft._indexes
    assert found > 100


def test_copies_a_repeated_passage() -> None:
    request = Request("r", [1, 2, 3, 4, 5, 6, 9, 9, 1, 2, 3], Sampling())
    assert NgramDraft().lookup(request, 4) == [4, 5, 6, 9]
    loop = Request("l", [1, 2, 1, 2, 1, 2], Sampling())
    assert NgramDraft().lookup(loop, 5) == [1, 2, 1, 2, 1]


@pytest.mark.parametrize(("most", "least"), [(0, 0), (2, 3), (99, 1)])
def test_sizes_are_checked(most: int, least: int) -> None:
    with pytest.raises(OptionError):
        NgramDraft(most, least)
