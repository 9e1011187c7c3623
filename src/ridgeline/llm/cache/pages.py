"""Who holds which page of the key-value cache, and which pages already hold a prompt's beginning.

    prompt ──match──> pages of the longest known prefix, held once more ─┐
    more tokens ──allocate──> unused pages, then the least recently used cached ones ─┴─> a request's pages
      full pages ──share──> known under (what came before, their tokens); ──release──> cached until their room is needed

Every page is in exactly one place: unused, held (a count of holders) or cached (published, nobody holds it, least recently used first).
A published page is found by a hash of (serial number of the page before it, its tokens), and both are compared: a collision costs a
cached page, never a wrong one. Serial numbers are never used again, so a page whose predecessor is gone cannot be found under another.

Only full pages are shared and a full page is never written again, so nothing is copied on write. Pure Python, O(1) a page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...core.errors import OptionError

ROOT = 0  # the serial number of "nothing came before"


@dataclass(frozen=True, slots=True)
class _Known:
    """What a published page holds: its tokens, and through `parent` all tokens before them."""

    key: int
    serial: int
    parent: int
    tokens: tuple[int, ...]


def chain_hash(parent: int, tokens: tuple[int, ...]) -> int:
    """The hash of a page's tokens after the page with serial number `parent`."""
    return hash((parent, tokens))


class PagePool:
    """`pages` pages of `page_size` tokens; `hit_pages` and `evictions` count what sharing saved and what it lost."""

    def __init__(
        self, pages: int, page_size: int, sharing: bool = True, hash_of: Callable[[int, tuple[int, ...]], int] = chain_hash
    ) -> None:
        for name, value in (("pages", pages), ("page_size", page_size)):
            if value < 1:
                raise OptionError(f"{name} = {value}", why="a cache has at least one page of one token", do=f"give {name} >= 1")
        self.pages, self.page_size, self.sharing = pages, page_size, sharing
        self.hit_pages = self.evictions = 0
        self._hash = hash_of
        self._holders = [0] * pages
        self._known: list[_Known | None] = [None] * pages
        self._found: dict[int, int] = {}  # key → page
        self._unused = list(range(pages - 1, -1, -1))  # a stack: page 0 goes out first
        self._cached: dict[int, None] = {}  # in the order of release: the first is the least recently used
        self._serial = ROOT

    @property
    def free(self) -> int:
        """Pages that can be given out: unused ones and cached ones nobody holds."""
        return len(self._unused) + len(self._cached)

    @property
    def cached(self) -> int:
        """Pages nobody holds that still answer `match`."""
        return len(self._cached)

    def pages_of(self, tokens: int) -> int:
        """Pages that `tokens` tokens take."""
        return -(-tokens // self.page_size)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The longest chain of full pages known for a beginning of `tokens`, each now held once more."""
        pages: list[int] = []
        parent = ROOT
        if not self.sharing:
            return pages
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            page = self._find(parent, tuple(tokens[start : start + self.page_size]))
            if page is None:
                break
            self._hold(page)
            pages.append(page)
            parent = self._serial_of(page)
        self.hit_pages += len(pages)
        return pages

    def unmatch(self, page_ids: Sequence[int]) -> None:
        """Take a match back: its pages are not used after all, and saved nothing."""
        self.release(page_ids)
        self.hit_pages -= len(page_ids)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages for the caller alone; None, and nothing changed, when there are not as many."""
        if count > self.free:
            return None
        return [self._take() for _ in range(count)]

    def publish(self, tokens: Sequence[int], page_ids: Sequence[int], after: int | None = None) -> None:
        """Make full pages findable by the `tokens` in them, which follow those of the page `after`.

        The chain ends, pages staying private, at a page that is not full, at one whose tokens are known in another page already, at a
        hash collision, or where `after` itself is private.
        """
        self._publish(tokens, list(page_ids), after, swap=False)

    def share(self, tokens: Sequence[int], page_ids: Sequence[int], after: int | None = None) -> list[int]:
        """As publish; but tokens known already are held in the known page from now on and the given one is released: the pages to hold."""
        held = list(page_ids)
        self._publish(tokens, held, after, swap=True)
        return held

    def release(self, page_ids: Sequence[int]) -> None:
        """Hold each page once less; the last of a chain is the first to be evicted, as it is of no use without those before it."""
        for page in reversed(page_ids):
            assert self._holders[page] > 0, f"page {page} released more often than held"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if self._known[page] is None:
                    self._unused.append(page)
                else:
                    self._cached[page] = None

    def forget(self) -> None:
        """No page answers `match` any more; those that are held stay held."""
        self._unused += self._cached
        self._cached.clear()
        self._found.clear()
        self._known = [None] * self.pages

    def check(self) -> None:
        """Every page is in one place and every index agrees; for tests, O(pages)."""
        held = {page for page, holders in enumerate(self._holders) if holders}
        unused = set(self._unused)
        assert len(unused) == len(self._unused), "a page is unused twice"
        assert not (held & unused or held & self._cached.keys() or unused & self._cached.keys()), "a page in two hands"
        assert len(held) + self.free == self.pages, "a page is lost"
        assert all(holders >= 0 for holders in self._holders), "a page with fewer than no holders"
        known = {page: entry for page, entry in enumerate(self._known) if entry is not None}
        assert not unused & known.keys(), "an unused page can be found"
        assert self._cached.keys() <= known.keys(), "a cached page cannot be found"
        assert self._found == {entry.key: page for page, entry in known.items()}, "the index and the pages differ"
        assert len({entry.serial for entry in known.values()}) == len(known), "a serial number used twice"

    def _find(self, parent: int, tokens: tuple[int, ...]) -> int | None:
        page = self._found.get(self._hash(parent, tokens))
        if page is None:
            return None
        entry = self._known[page]
        return page if entry is not None and entry.parent == parent and entry.tokens == tokens else None

    def _publish(self, tokens: Sequence[int], held: list[int], after: int | None, swap: bool) -> None:
        """Publish along the chain as far as it goes; with `swap`, `held` gets twins in place of its own pages."""
        if not self.sharing or (after is not None and self._known[after] is None):
            return
        parent = ROOT if after is None else self._serial_of(after)
        for index in range(min(len(held), len(tokens) // self.page_size)):
            page, part = held[index], tuple(tokens[index * self.page_size : (index + 1) * self.page_size])
            assert self._holders[page] > 0, f"page {page} published by nobody who holds it"
            twin = self._find(parent, part)
            if twin is None and not self._enter(page, parent, part):
                return
            if twin is not None and twin != page:
                if not swap:
                    return
                self._hold(twin)
                self.release([page])
                held[index] = twin
            parent = self._serial_of(held[index])

    def _enter(self, page: int, parent: int, tokens: tuple[int, ...]) -> bool:
        """Whether the page is now known for these tokens: not where the hash, or the page itself, stands for others."""
        key = self._hash(parent, tokens)
        if key in self._found or self._known[page] is not None:
            return False
        self._serial += 1
        self._known[page] = _Known(key, self._serial, parent, tokens)
        self._found[key] = page
        return True

    def _serial_of(self, page: int) -> int:
        entry = self._known[page]
        assert entry is not None
        return entry.serial

    def _hold(self, page: int) -> None:
        if self._holders[page] == 0:
            del self._cached[page]
        self._holders[page] += 1

    def _take(self) -> int:
        if self._unused:
            page = self._unused.pop()
        else:
            page = next(iter(self._cached))
            del self._cached[page]
            entry = self._known[page]
            assert entry is not None
            del self._found[entry.key]
            self._known[page] = None
            self.evictions += 1
        self._holders[page] = 1
        return page
