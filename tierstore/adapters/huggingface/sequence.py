"""One open sequence on a store: its block table, who owns which of its pages, and when they are sealed.

    pages [0, n)      sealed, or reused from earlier requests: the store's, pinned by this sequence's lease, read only
    pages [n, end)    owned by this sequence: writable, not matchable, given back on close

It knows tokens, keys and slots; nothing of transformers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from tierstore.errors import CapacityError, StoreClosed
from tierstore.keys import Extra
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier


class PagedSequence:
    """A block table that starts with the longest stored prefix of a prompt and grows page by page.

    At least one token of the prompt is left to compute: of a fully stored prompt the last page is copied into a page
    of our own, and its last token fed again. Not thread-safe; one sequence belongs to one thread at a time.
    """

    def __init__(
        self,
        store: TierStore,
        prompt: Sequence[int],
        *,
        salt: bytes = b"",
        extra: Iterable[Extra] = (),
        deadline_s: float | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        """Match, acquire and wait for the stored prefix. Changes the store: pages come up and stay pinned.

        A prefix that does not arrive within ``timeout_s`` is computed instead. Raises ValueError for an empty prompt.
        """
        if not prompt:
            raise ValueError("the prompt is empty")
        self.pages = _one_group(store)
        self.slots: list[int] = []
        self.num_tokens = 0
        self.reused_by_tier: Counter[Tier] = Counter()
        self._store, self._salt, self._extra, self._timeout_s = store, salt, tuple(extra), timeout_s
        self._owned: set[int] = set()
        self._rolled_back = False
        self._expected = list(prompt)
        self._lease: Lease | None = None
        self._fed: list[int] = []
        try:
            self._open_prefix(deadline_s)
        except BaseException:
            self.close()
            raise

    @property
    def page_size(self) -> int:
        """Tokens a page holds."""
        return self.pages.shape[3]

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that need no computation."""
        return sum(self.reused_by_tier.values())

    def expect(self, token_ids: Sequence[int]) -> None:
        """Raise ValueError if these tokens, fed next, contradict the prompt the sequence was opened for."""
        known = self._expected[self.num_tokens : self.num_tokens + len(token_ids)]
        if known != list(token_ids[: len(known)]):
            raise ValueError(
                f"the tokens fed at position {self.num_tokens} are not those of the prompt this cache was made for"
            )

    def extend(self, count: int) -> torch.Tensor:
        """Make room for ``count`` more tokens and return the block table, int64 ``[ceil(tokens / page_size)]``.

        A page that is not ours and would be written is replaced by a copy. Raises CapacityError, nothing changed,
        if HBM has no room for them.
        """
        table = len(self.slots)
        first = self.num_tokens // self.page_size
        copied = first < table and self.slots[first] not in self._owned
        new = max(0, -(-(self.num_tokens + count) // self.page_size) - table) + copied
        slots = self._store.allocate(new, timeout_s=self._timeout_s) if new else []
        self._owned.update(slots)
        if copied:
            target = slots.pop()
            self.pages[target].copy_(self.pages[self.slots[first]])
            self.slots[first] = target
        self.slots += slots
        if self._rolled_back:
            self._shorten_lease()
        return self._table()

    def places(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slot and offset, int64 ``[count]`` each, of the next ``count`` tokens. ``extend`` made room for them."""
        where = torch.arange(self.num_tokens, self.num_tokens + count, device=self.pages.device)
        return self._table()[where // self.page_size], where % self.page_size

    def advance(self, count: int, token_ids: Sequence[int] | None) -> None:
        """Declare the next ``count`` tokens written in all layers, and seal the pages they filled.

        ``token_ids``: what was fed, None if not known; pages with unknown tokens are never sealed.
        """
        if token_ids is not None and len(self._fed) == self.num_tokens:
            self._fed += token_ids
        self.num_tokens += count
        self._seal()

    def truncate(self, num_tokens: int) -> None:
        """Forget all but the first ``num_tokens`` tokens; pages of our own beyond them return to the store."""
        keep = -(-num_tokens // self.page_size)
        touched = self.slots[num_tokens // self.page_size :]
        self._rolled_back |= any(slot not in self._owned for slot in touched)
        self._give_back([slot for slot in self.slots[keep:] if slot in self._owned])
        del self.slots[keep:]
        del self._fed[num_tokens:], self._expected[num_tokens:]
        self.num_tokens = num_tokens

    def close(self) -> None:
        """Give back the pages that are not sealed and release the lease. The second call does nothing."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        self.slots = []
        try:
            self._give_back(sorted(self._owned))
            lease.release()
        except StoreClosed:
            self._owned.clear()

    def _open_prefix(self, deadline_s: float | None) -> None:
        keys = self._keys(self._expected)
        lease = self._acquire(keys, deadline_s)
        if len(lease.slots) * self.page_size == len(self._expected) and not self._copy_last():
            # No room for the copy of the last page: leave that page out, and compute all of it.
            lease.release()
            lease = self._acquire(keys[:-1], deadline_s)
        self.num_tokens = min(len(lease.slots) * self.page_size, len(self._expected) - 1)
        self._fed = self._expected[: self.num_tokens]
        for index, tier in enumerate(lease.tiers):
            self.reused_by_tier[tier] += min(self.page_size, self.num_tokens - index * self.page_size)

    def _acquire(self, keys: list[PageKey], deadline_s: float | None) -> Lease:
        """A lease on what arrived of ``keys``; on nothing if the time ran out."""
        lease = self._store.acquire(keys, deadline_s=deadline_s)
        if lease.wait(self._timeout_s) is LeaseState.PENDING:
            lease.release()
            lease = self._store.acquire([])
        self.slots = lease.slots
        self._lease = lease
        return lease

    def _copy_last(self) -> bool:
        """Replace the last page of the prefix by a copy of our own; False if HBM has no room for it."""
        try:
            (slot,) = self._store.allocate(1, timeout_s=self._timeout_s)
        except CapacityError:
            return False
        self._owned.add(slot)
        self.pages[slot].copy_(self.pages[self.slots[-1]])
        self.slots[-1] = slot
        return True

    def _shorten_lease(self) -> None:
        """After a rollback below sealed pages: hold only those that are left. The store takes the last page of a
        lease for the parent of the next one sealed under it."""
        lease = self._store.acquire(self._keys(self._fed))
        old, self._rolled_back = self._lease, False
        if old is not None and lease.slots == self.slots[: len(lease.keys)]:
            self._lease, lease = lease, old
        lease.release()

    def _seal(self) -> None:
        """Give every full page of ours whose tokens are known to the store, and take the slots it answers with."""
        full = min(self.num_tokens, len(self._fed)) // self.page_size
        first = next((i for i in range(full) if self.slots[i] in self._owned), full)
        if first == full:
            return
        keys = self._keys(self._fed[: full * self.page_size])
        mine = self.slots[first:full]
        self.slots[first:full] = self._store.put(keys[first:], mine, lease=self._lease)
        self._owned.difference_update(mine)

    def _give_back(self, slots: list[int]) -> None:
        if slots:
            self._store.free(slots)
            self._owned.difference_update(slots)

    def _keys(self, token_ids: Sequence[int]) -> list[PageKey]:
        return self._store.keys(token_ids, salt=self._salt, extra=self._extra)

    def _table(self) -> torch.Tensor:
        return torch.tensor(self.slots, dtype=torch.long, device=self.pages.device)


def _one_group(store: TierStore) -> torch.Tensor:
    """The pages of a store with one group of K and V: ``[num_slots, num_layers, 2, page_size, heads, head_dim]``."""
    pages = store.pages
    if not isinstance(pages, torch.Tensor) or pages.ndim != 6 or pages.shape[2] != 2:
        raise ValueError(
            "the store must hold one KV group with K and V per head (one PageSpec of kind 'mha')"
        )
    return pages
