"""The stored prefix of a request on its way up from disk, while the engine computes others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from tierstore.errors import StoreClosed
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier


class Coming:
    """A lease on what is on disk; none where nothing is: host memory comes layer by layer while the model computes.

    One thread at a time. ``close`` gives the pages back.
    """

    def __init__(self, store: TierStore, keys: Sequence[PageKey]) -> None:
        """Has the pages brought up; waits for nothing."""
        on_disk = Tier.NVME in store.match(keys).tiers
        self._lease: Lease | None = store.acquire(keys) if on_disk else None

    @property
    def here(self) -> bool:
        """Whether all has come that will. What failed to come is not there, and will be computed."""
        return self._lease is None or self._lease.wait(0.0, written=False) is not LeaseState.PENDING

    def origins(self, page_size: int) -> Counter[Tier]:
        """Tokens in the pages that came, by the tier they were found in. HBM has them now, and does not say."""
        found = Counter(self._lease.tiers) if self._lease is not None else Counter[Tier]()
        return Counter({tier: count * page_size for tier, count in found.items()})

    def close(self) -> None:
        """Idempotent."""
        lease, self._lease = self._lease, None
        if lease is not None:
            with suppress(StoreClosed):
                lease.release()
