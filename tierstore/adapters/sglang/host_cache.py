"""Pages that stay in rows of host memory, found by key. Only metadata: the memory belongs to the caller.

The cache and its caller exchange rows instead of copying pages. The caller gives up a row that contains a page, and
gets another row for it: one that was unused, or that of the least recently used page. A row never changes hands while
it is pinned, that is while a caller copies from it or a write to disk reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierstore.adapters.chunks import nvme_section
from tierstore.config import load_config
from tierstore.errors import ConfigError
from tierstore.policy import VictimQueue, make_policy
from tierstore.types import PageKey

if TYPE_CHECKING:
    from tierstore.config import HostConfig, NvmeConfig


@dataclass(slots=True, eq=False)
class _Page:
    key: PageKey
    row: int
    rank: int
    pins: int = 0
    is_held: bool = True
    """False after the page was removed while it was pinned."""
    call: int = 0
    """The last call that used the page, as given to ``used`` or ``keep``."""


class HostCache:
    """Pages in host memory, least recently used first out. Not thread-safe: callers must serialize calls.

    Among pages that were used together, the later ones are evicted first, because a page is useless without the pages
    before it.
    """

    def __init__(self, rows: Iterable[int]) -> None:
        """Create an empty cache that owns these rows."""
        self.evicted = 0
        """Number of pages that were evicted so far."""
        self._unused = [*rows]
        self._pages: dict[bytes, _Page] = {}
        self._by_row: dict[int, _Page] = {}
        self._order = make_policy("lru")
        self._victims = VictimQueue()

    def __len__(self) -> int:
        """Return the number of pages that can be found."""
        return len(self._pages)

    def __contains__(self, key: bytes) -> bool:
        """Return whether the page is in the cache. Does not count as a use."""
        return key in self._pages

    def owns(self, row: int) -> bool:
        """Return whether the row contains a page of the cache, or one that was removed while it was pinned."""
        return row in self._by_row

    def keep(self, key: bytes, row: int, call: int = 0, *, pinned: bool = False) -> int:
        """Take over a row that contains the page ``key``, and return a row that the caller may use instead.

        Returns ``row`` itself if the page is in the cache already, if all pages are pinned, or if the page would evict
        one that the same call has used. The cache has then taken over nothing. Otherwise, the page counts as just used.

        Args:
            key: The key of the page.
            row: The row, owned by the caller, with the content of the page.
            call: A number, not 0, for all pages of one request. 0: the page may evict every page.
            pinned: Whether the row is pinned until a call of ``unpin``.
        """
        if key in self._pages:
            return row
        if self._unused:
            other = self._unused.pop()
        else:
            victim = self._victims.first()
            if victim is None or self._pages[victim].call == call != 0:
                return row
            other = self._remove(self._pages[victim])
            self.evicted += 1
        page = _Page(PageKey(key), row, self._order.enter(PageKey(key)), int(pinned), call=call)
        self._pages[key] = self._by_row[row] = page
        if not pinned:
            self._victims.offer(page.rank, page.key)
        return other

    def pin(self, keys: Sequence[bytes], call: int = 0) -> dict[int, int]:
        """Pin the pages that are in the cache, and mark them as just used. Return their rows, by index in ``keys``.

        Each row must be unpinned once for each time that it is in the result. For ``call``, see ``used``.
        """
        found = {}
        for index in range(len(keys) - 1, -1, -1):
            page = self._pages.get(keys[index])
            if page is not None:
                page.call = call
                page.pins += 1
                self._victims.withdraw(page.rank)
                page.rank = self._order.touch(page.key, page.rank)
                found[index] = page.row
        return found

    def unpin(self, row: int) -> None:
        """Undo one pin of a row. Afterwards, its page may be evicted unless there are further pins."""
        page = self._by_row[row]
        page.pins -= 1
        if page.pins:
            return
        if page.is_held:
            self._victims.offer(page.rank, page.key)
        else:
            del self._by_row[row]
            self._unused.append(row)

    def used(self, keys: Sequence[bytes], call: int = 0) -> None:
        """Mark pages as just used. Pass the pages of one request, in the order of its tokens.

        With ``call``, these pages are not evicted for other pages of this call (see ``keep``).
        """
        for key in reversed(keys):
            page = self._pages.get(key)
            if page is not None:
                page.call = call
                self._victims.withdraw(page.rank)
                page.rank = self._order.touch(page.key, page.rank)
                self._victims.shift(page.rank, page.key, offered=page.pins == 0)

    def clear(self) -> None:
        """Remove all pages. Rows that are pinned are reused only after they were unpinned."""
        for page in [*self._pages.values()]:
            if page.pins:
                del self._pages[page.key]
                page.is_held = False
            else:
                self._unused.append(self._remove(page))

    def rows(self) -> list[int]:
        """Return all rows that the cache owns."""
        return [*self._unused, *self._by_row]

    def check(self) -> list[str]:
        """Return a description of each broken invariant."""
        faults = []
        if len(set(self.rows())) < len(self.rows()):
            faults.append(f"rows {sorted(self.rows())} of the host cache are used twice")
        evictable = {page.key for page in self._pages.values() if page.pins == 0}
        if {*self._victims} != evictable:
            faults.append(f"{len(self._victims)} pages can be evicted, but {len(evictable)} are not pinned")
        if lost := [page.row for page in self._by_row.values() if not page.is_held and page.pins < 1]:
            faults.append(f"rows {lost} contain pages that nobody can find or use")
        return faults

    def _remove(self, page: _Page) -> int:
        """Remove a page that is not pinned, and return its row, which now belongs to nobody."""
        del self._pages[page.key], self._by_row[page.row]
        self._victims.withdraw(page.rank)
        self._order.left(page.key, page.rank)
        return page.row


def host_and_nvme(
    config: str | Mapping[str, object], below: str
) -> tuple[HostConfig | None, NvmeConfig | None]:
    """Return the sections ``host`` and ``nvme`` of a configuration for tiers below a host tier of an engine.

    At least one of them is not None. ``below`` names the engine's host tier in error messages.

    Raises:
        ConfigError: Both are missing, or one has a setting that has no meaning below another host tier.
    """
    found = load_config(config)
    host, is_alone = found.host, found.host is not None and found.nvme is None
    nvme = None if is_alone else nvme_section(config, below, codecs=("none",))
    if host is None:
        return None, nvme
    for name, allowed in {"policy": ("lru",), "codec": ("none",), "pin": ("auto", "never")}.items():
        value = getattr(host, name)
        if value not in allowed:
            raise ConfigError(
                f"host.{name} must be {' or '.join(allowed)} for a host tier below {below}, got {value}"
            )
    return host, nvme
