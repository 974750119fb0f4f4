"""The index of prefixes of each store: where a prompt leaves a stored one inside a page."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from weakref import WeakKeyDictionary

from tierstore.radix import RadixIndex, RadixMatch
from tierstore.store import TierStore
from tierstore.types import PageKey


class Prefixes:
    """A ``RadixIndex`` that several threads may use. It forgets with the process: after a restart it fills anew."""

    def __init__(self, page_size: int) -> None:
        self._index = RadixIndex(page_size)
        self._lock = Lock()

    def insert(self, root: bytes, token_ids: Sequence[int], keys: Sequence[PageKey]) -> None:
        """These pages were sealed."""
        with self._lock:
            self._index.insert(root, token_ids, keys)

    def longest(self, root: bytes, token_ids: Sequence[int]) -> RadixMatch:
        """The pages that were sealed with these tokens, and the one that begins like the rest."""
        with self._lock:
            return self._index.longest(root, token_ids)

    def discard(self, key: PageKey) -> None:
        """The store does not hold this page any more."""
        with self._lock:
            self._index.discard(key)


# Requests of one store share what they know, whoever opened them; it goes with the store.
_of_store: WeakKeyDictionary[TierStore, Prefixes] = WeakKeyDictionary()
_lock = Lock()


def prefixes_of(store: TierStore, page_size: int) -> Prefixes:
    """The index of this store. Any thread."""
    with _lock:
        if store not in _of_store:
            _of_store[store] = Prefixes(page_size)
        return _of_store[store]
