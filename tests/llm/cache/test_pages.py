"""PagePool against a model of it: who holds what, and which token chain each known page stands for."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ridgeline.core.errors import OptionError
from ridgeline.llm.cache.pages import PagePool, chain_hash
from tests.support import full_or_tenth

HASHES = {
    "python": chain_hash,
    "always equal": lambda parent, tokens: 7,
    "tokens only": lambda parent, tokens: hash(tokens),
    "two bits": lambda parent, tokens: hash((parent, tokens)) & 3,
}


class Holders:
    """Random holders of pages, and beside the pool what each page was filled with by whom."""

    def __init__(self, seed: int, sharing: bool, hash_name: str) -> None:
        self.random = random.Random(seed)
        self.pool = PagePool(self.random.randint(1, 24), self.random.randint(1, 4), sharing, HASHES[hash_name])
        self.chains: list[tuple[list[int], list[int]]] = []  # tokens, pages; the last page may not be full
        self.written: dict[int, tuple[int, ...]] = {}  # page → every token up to its end, as its keys and values depend on all of them

    def arrive(self) -> None:
        """A new prompt over a tiny alphabet, so that prefixes meet: match, allocate the rest, fill, share or publish, keep."""
        size = self.pool.page_size
        tokens = [self.random.randint(0, 1) for _ in range(self.random.randint(1, 6 * size))]
        free = self.pool.free
        found = self.pool.match(tokens)
        assert len(found) <= len(tokens) // size
        for index, page in enumerate(found):
            assert self.written[page] == tuple(tokens[: (index + 1) * size]), "a page of another prompt was matched"
        rest = self.pool.pages_of(len(tokens)) - len(found)
        before = self.pool.free
        fresh = self.pool.allocate(rest)
        assert (fresh is None) == (rest > before)
        if fresh is None:
            assert self.pool.free == before
            self.pool.release(found)
            assert self.pool.free == free
            return
        self.fill(tokens, found, fresh)

    def fill(self, tokens: list[int], found: list[int], fresh: list[int]) -> None:
        size, held = self.pool.page_size, [page for _, pages in self.chains for page in pages]
        assert not set(fresh) & set(held) and len(set(fresh)) == len(fresh), "a page in two hands"
        pages = found + fresh
        for index in range(len(found), len(tokens) // size):
            self.written[pages[index]] = tuple(tokens[: (index + 1) * size])
        full = len(tokens) // size
        after = found[-1] if found else None
        part = tokens[len(found) * size : full * size]
        if self.random.random() < 0.5:
            pages[len(found) : full] = self.pool.share(part, pages[len(found) : full], after)
        else:
            self.pool.publish(tokens, pages)  # whole chain again, the last page not full
        for index in range(full):
            assert self.written[pages[index]] == tuple(tokens[: (index + 1) * size]), "share gave a page of another prompt"
        self.chains.append((tokens, pages))

    def leave(self) -> None:
        if self.chains:
            self.pool.release(self.chains.pop(self.random.randrange(len(self.chains)))[1])

    def check(self) -> None:
        self.pool.check()
        holders = Counter(page for _, pages in self.chains for page in pages)
        assert self.pool._holders == [holders[page] for page in range(self.pool.pages)]
        assert self.pool.free == self.pool.pages - len(holders)


@pytest.mark.parametrize("hash_name", HASHES)
@pytest.mark.parametrize("sharing", [True, False])
def test_any_sequence_of_operations_keeps_every_page_in_one_place(sharing: bool, hash_name: str) -> None:
    hits = 0
    for seed in range(full_or_tenth(400)):
        world = Holders(seed, sharing, hash_name)
        for _ in range(150):
            world.arrive() if world.random.random() < 0.55 else world.leave()
            world.check()
        while world.chains:
            world.leave()
            world.check()
        assert world.pool.free == world.pool.pages
        hits += world.pool.hit_pages
    assert (hits > 0) == sharing


def test_match_holds_the_longest_chain_of_full_pages() -> None:
    pool = PagePool(8, 2)
    pages = pool.allocate(3) or []
    pool.publish([1, 2, 3, 4, 5], pages)
    assert pool.match([1, 2, 3, 4, 5, 6]) == pages[:2]
    assert pool.match([1, 2, 9, 4]) == pages[:1]
    assert pool.match([3, 4]) == [] and pool.match([1]) == []
    assert pool.hit_pages == 3


def test_the_same_tokens_after_another_prefix_are_another_page() -> None:
    pool = PagePool(8, 1)
    first, second = pool.allocate(2) or [], pool.allocate(2) or []
    pool.publish([1, 5], first)
    pool.publish([2, 5], second)
    assert pool.match([1, 5]) == first and pool.match([2, 5]) == second


def test_share_gives_the_known_page_and_frees_its_twin_while_publish_leaves_it_private() -> None:
    pool = PagePool(8, 2)
    pool.publish([1, 2], first := pool.allocate(1) or [])
    second = pool.allocate(2) or []
    assert pool.share([1, 2, 3, 4], second) == [first[0], second[1]]
    assert pool.free == 6
    third = pool.allocate(2) or []
    pool.publish([1, 2, 7, 8], third)
    pool.check()
    assert pool.match([1, 2, 7, 8]) == first  # the chain ended at the twin
    assert pool.match([1, 2, 3, 4]) == [first[0], second[1]]


def test_the_least_recently_used_chain_is_evicted_from_its_end() -> None:
    pool = PagePool(4, 1)
    old, new = pool.allocate(2) or [], pool.allocate(2) or []
    pool.publish([1, 2], old)
    pool.publish([3, 4], new)
    pool.release(old)
    pool.release(new)
    assert pool.free == pool.cached == 4
    assert pool.allocate(1) == [old[1]]
    pool.release(pool.match([1]))  # used again: now the newest
    assert pool.allocate(1) == [new[1]]
    assert pool.allocate(1) == [new[0]]
    assert pool.match([1, 2]) == old[:1] and pool.evictions == 3


def test_a_page_whose_predecessor_is_gone_is_not_found_under_its_successor() -> None:
    pool = PagePool(3, 1, hash_of=lambda parent, tokens: hash(tokens))
    pages = pool.allocate(2) or []
    pool.publish([1, 2], pages)
    pool.release(pages[:1])  # out of order: the end of the chain is still held
    pool.allocate(2)  # evicts the first page
    pool.publish([9], [pages[0]])  # and it now stands for another prompt
    assert pool.match([9, 2]) == [pages[0]]


@pytest.mark.parametrize("arguments", [(0, 16), (4, 0), (-1, 16)])
def test_a_pool_without_room_is_refused(arguments: tuple[int, int]) -> None:
    with pytest.raises(OptionError, match="at least one page"):
        PagePool(*arguments)


def test_releasing_twice_and_publishing_what_is_not_held_are_caught() -> None:
    pool = PagePool(2, 1)
    page = pool.allocate(1) or []
    pool.release(page)
    with pytest.raises(AssertionError, match="more often than held"):
        pool.release(page)
    with pytest.raises(AssertionError, match="nobody who holds it"):
        pool.publish([1], page)
