"""The store's state machine with callers whose pages must never be written to disk."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.store.machine import StoreMachine, prefixes, sequences
from tierstore.errors import CapacityError
from tierstore.types import LeaseState, PageKey

mostly = st.sampled_from([True, True, False])
rarely = st.sampled_from([False, False, True])


class SecretMachine(StoreMachine):
    """Puts some pages with ``memory_only`` and the others without."""

    @rule(keys=prefixes)
    def write_secret(self, keys: list[PageKey]) -> None:
        self.write(keys, secret=True)

    @rule(keys=prefixes, under=st.booleans(), late=st.booleans())
    def put_secret(self, keys: list[PageKey], under: bool, late: bool) -> None:
        self.put(keys, under, late, secret=True)

    @rule(keys=sequences, held=st.integers(1, 2), begun=mostly, secret=rarely, flush=mostly)
    def write_the_next_page(
        self, keys: list[PageKey], held: int, begun: bool, secret: bool, flush: bool
    ) -> None:
        """Acquire the first pages of a sequence, and put the next page under the lease."""
        if held >= len(keys):
            return
        if begun:
            self.write(keys[:held], secret=True)
        following = keys[held : held + 1]
        with self.running.store.acquire(keys[:held]) as lease, suppress(CapacityError):
            if lease.wait(0.0) is not LeaseState.READY or lease.missing:
                return
            slots = self.take(1)
            self.fill(following, slots)
            self.running.store.put(following, slots, lease=lease, memory_only=secret)
            self.was_put(following, keys[: held + 1], secret)
        if flush and self.roomy:
            self.flush()
