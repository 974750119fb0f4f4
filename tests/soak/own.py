"""Clients whose store owns HBM: several threads make random calls of all kinds, on tiers that are far too small."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.soak.account import PATIENCE_S, Account, Overdue, WrongBytes
from tests.soak.faults import Trouble
from tests.soak.waiting import losing, wait_final
from tests.support import pages
from tests.support.bench import Bench, open_bench
from tests.support.events import ManualEvent
from tests.support.pages import SPEC, chain, fill, page_tensor, require_nothing_held, same, tiers
from tierstore.errors import CapacityError, StoreClosed
from tierstore.lease import Lease
from tierstore.types import Hint, LeaseState, PageKey, Tier

DOCUMENTS = [chain(length, f"doc{length}") for length in range(1, 13)]
SECRETS = [chain(length, f"secret{length}") for length in (1, 3, 5)]
"""Sequences that are always put with memory_only. The store must not offer their pages to a later process."""


@dataclass
class Hand:
    """State of one thread: its random number generator, and the leases that it keeps between two actions."""

    chance: random.Random
    held: list[Lease] = field(default_factory=list)


class OwnClient:
    """A client that makes random calls.

    With ``forks``, it also forks children, whose calls must be refused and must do no harm. ``codec`` is the codec of
    host memory; the disk uses it together with zstd. The pages of a client with a codec are chosen so that the codec
    does not change them, and they belong to a different model from the pages of other clients.
    """

    def __init__(
        self,
        home: Path,
        seed: int,
        account: Account,
        *,
        threads: int = 4,
        forks: bool = False,
        codec: str | None = None,
    ) -> None:
        host: dict[str, object] = {}
        disk: dict[str, object] = {"payload": "extents"}  # only reads of extent files can be made to fail
        spec = SPEC
        if codec is not None:
            pages.STEADY, spec = codec, replace(SPEC, model=codec)
            host, disk = {"codec": codec}, {**disk, "codec": f"{codec}+zstd"}
        config = tiers(6, 10, home, nvme_pages=40, host_more=host, nvme_more=disk)
        self.bench: Bench = open_bench(config, spec, pump=True, spill=True)
        self.trouble: Trouble | None = None
        self.threads = threads
        self._store = self.bench.store
        self._account = account
        self._children: list[tuple[int, float]] = []
        self._revision = 0
        self._actions: list[tuple[int, str, Callable[[Hand], None]]] = [
            (25, "write", self._write),
            (4, "write with a gap", self._write_apart),
            (4, "write late", self._write_late),
            (5, "write memory-only", self._write_secret),
            (30, "read", self._read),
            (4, "read memory-only", self._read_secret),
            (8, "hold", self._hold),
            (6, "let go", self._let_go),
            (7, "demote", self._demote),
            (6, "evict", self._evict),
            (3, "hint", self._hint),
            (3, "allocate and free", self._allocate),
            (1, "flush", self._flush),
            (2, "look", self._look),
            (3 if forks else 0, "fork", self._fork),
        ]

    # -- life ---------------------------------------------------------------------------------------------------

    def read_back(self) -> int:
        """Read all pages that earlier processes left on disk. Returns the number of pages served."""
        for keys in SECRETS:
            if any(self._store.match([key]).num_pages for key in keys):
                raise WrongBytes("a memory-only page is offered after a restart")
        return sum(self._served(keys) for keys in DOCUMENTS)

    def plant(self) -> None:
        """Put a page with a wrong byte and read it, which must raise WrongBytes. For tests of the soak test itself."""
        slots = self._store.allocate(1)
        fill(self._store, DOCUMENTS[0], slots)
        page_tensor(self._store)[slots[0]].view(-1)[5] = 1234.0
        self._store.evict(DOCUMENTS[0])
        self._store.put(DOCUMENTS[0], slots)
        self._served(DOCUMENTS[0])
        raise AssertionError("a planted wrong byte was not noticed")

    def _served(self, keys: Sequence[PageKey]) -> int:
        with self._store.acquire(keys) as lease:
            self._require_right(lease)
            return lease.num_pages

    def hand(self, seed: str) -> Hand:
        """Return the state with which a new thread starts: random numbers from this seed, and no leases."""
        return Hand(random.Random(seed))

    def act(self, hand: Hand) -> None:
        """Do one random action."""
        weights = [weight for weight, _, _ in self._actions]
        _, name, action = hand.chance.choices(self._actions, weights)[0]
        self._account.count("actions", name)
        try:
            action(hand)
        except CapacityError:
            self._account.count("no room", name)
            for lease in hand.held:  # a thread must not hold pages while it waits for others
                self._end(lease)
            hand.held.clear()
            time.sleep(0.001)

    def rest(self, hand: Hand) -> None:
        """Release all leases that a thread still holds when it ends."""
        for lease in hand.held:
            self._end(lease)
        hand.held.clear()

    def finish(self) -> None:
        """Check that nothing has leaked, unless acks were lost. Call this after all threads have ended."""
        for child, deadline in self._children:
            self._reap(child, deadline)
        self._store.check()
        if not losing(self.trouble):
            require_nothing_held(self._store, PATIENCE_S)

    # -- what callers do ----------------------------------------------------------------------------------------

    def _prefix(self, hand: Hand) -> list[PageKey]:
        keys: list[PageKey] = hand.chance.choice(DOCUMENTS)
        return keys[: hand.chance.randint(1, 12)]

    def _write(self, hand: Hand) -> None:
        self._write_in_steps(hand, self._prefix(hand), memory_only=False)

    def _write_secret(self, hand: Hand) -> None:
        self._write_in_steps(hand, hand.chance.choice(SECRETS), memory_only=True)

    def _write_in_steps(self, hand: Hand, keys: Sequence[PageKey], memory_only: bool) -> None:
        """Write a sequence page by page. Each write leases the previous page."""
        for i, key in enumerate(keys):
            with self._store.acquire(keys[max(0, i - 1) : i]) as lease:
                wait_final(lease, self.trouble)
                slots = self._store.allocate(1, hand.chance.choice([0.0, 0.05, 0.2]))
                fill(self._store, [key], slots)
                self._store.put([key], slots, lease=lease, memory_only=memory_only)

    def _write_apart(self, hand: Hand) -> None:
        """Write pages from the middle of a document, although the pages before them may be missing."""
        keys = hand.chance.choice(DOCUMENTS)
        start = hand.chance.randrange(len(keys))
        keys = keys[start : start + hand.chance.randint(1, 3)]
        slots = self._store.allocate(len(keys), timeout_s=0.05)
        fill(self._store, keys, slots)
        self._store.put(keys, slots)

    def _write_late(self, hand: Hand) -> None:
        """Put pages with an event, then fill them. The store must not read or copy them until the event completes."""
        keys = self._prefix(hand)[:2]
        slots = self._store.allocate(len(keys), timeout_s=0.05)
        event = ManualEvent()
        try:
            self._store.put(keys, slots, after=event)
            time.sleep(hand.chance.choice([0.0, 0.002]))
            fill(self._store, keys, slots)
        finally:
            event.happen()

    def _read(self, hand: Hand) -> None:
        keys = self._prefix(hand)
        with self._store.acquire(
            keys,
            deadline_s=hand.chance.choice([None, None, 0.01]),
            wait_for_room_s=hand.chance.choice([0.0, 0.0, 0.05]),
        ) as lease:
            if hand.chance.random() < 0.7:
                self._require_right(lease)

    def _read_secret(self, hand: Hand) -> None:
        self._served(hand.chance.choice(SECRETS))

    def _hold(self, hand: Hand) -> None:
        """Keep a lease on one or two pages while other threads evict and write."""
        if not hand.held:
            hand.held.append(self._store.acquire(self._prefix(hand)[: hand.chance.randint(1, 2)]))

    def _let_go(self, hand: Hand) -> None:
        if hand.held:
            self._end(hand.held.pop())

    def _end(self, lease: Lease) -> None:
        self._require_right(lease)
        lease.release()

    def _demote(self, hand: Hand) -> None:
        self._store.demote(self._prefix(hand), hand.chance.choice([Tier.HOST, Tier.NVME]))

    def _evict(self, hand: Hand) -> None:
        keys = self._prefix(hand)[hand.chance.choice([0, 1, 3]) :]
        self._store.evict(keys, hand.chance.choice([None, Tier.HBM, Tier.HOST, Tier.NVME]))

    def _hint(self, hand: Hand) -> None:
        self._revision += 1
        need = hand.chance.choice(["wont_need", "retain"])
        keys = tuple(self._prefix(hand))
        self._store.hint(Hint("soak", self._revision, keys, need, ttl_s=0.5))  # type: ignore[arg-type]

    def _allocate(self, hand: Hand) -> None:
        slots = self._store.allocate(hand.chance.randint(1, 3), hand.chance.choice([0.0, 0.05]))
        self._store.free(slots)

    def _flush(self, hand: Hand) -> None:
        if not losing(self.trouble):
            self._store.flush()

    def _look(self, hand: Hand) -> None:
        self._store.check()
        self._store.explain(self._prefix(hand))
        self._store.metrics.text()

    # -- children -----------------------------------------------------------------------------------------------

    def _fork(self, hand: Hand) -> None:
        """Fork a child whose calls must all be refused. It ends at once, kills itself, or ends after a second."""
        self._reap_some()
        how = hand.chance.choice(["ends", "ends", "is killed", "lives on"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is intended
            child = os.fork()
        if child == 0:
            self._be_a_child(how)
        self._children.append((child, time.monotonic() + PATIENCE_S))

    def _be_a_child(self, how: str) -> None:
        refused = 0
        for call in (
            lambda: self._store.match(DOCUMENTS[0]),
            lambda: self._store.acquire(DOCUMENTS[0]),
            lambda: self._store.allocate(1),
            lambda: self._store.evict(DOCUMENTS[0]),
            self._store.flush,
        ):
            try:
                call()
            except StoreClosed:
                refused += 1
        self._store.close()
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "lives on":
            time.sleep(1.0)
        os._exit(0 if refused == 5 else 1)

    def _reap_some(self) -> None:
        children, self._children = self._children, []
        for child, deadline in children:
            if not self._ended(child):
                if time.monotonic() > deadline:
                    raise Overdue("a forked child has not exited in time")
                self._children.append((child, deadline))

    def _reap(self, child: int, deadline: float) -> None:
        while not self._ended(child):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                raise Overdue("a forked child has not exited in time")
            time.sleep(0.01)

    def _ended(self, child: int) -> bool:
        done, status = os.waitpid(child, os.WNOHANG)
        if done and os.waitstatus_to_exitcode(status) not in (0, -signal.SIGKILL):
            raise AssertionError("a call in a forked child was not refused")
        return done != 0

    # -- checks -------------------------------------------------------------------------------------------------

    def _require_right(self, lease: Lease) -> None:
        if wait_final(lease, self.trouble) is not LeaseState.READY:
            return
        if lease.ready(0) is not None:
            raise WrongBytes("a lease is READY while a page of it is still being written")
        pages = page_tensor(self._store)
        for key, slot in zip(lease.keys, lease.slots, strict=False):
            if not same(pages[slot], key):
                raise WrongBytes(f"wrong bytes in page {key.hex()}")
        self._account.count("pages", "checked", lease.num_pages)
