"""One client process: it opens a store, reads back the pages that it finds, acts under faults, and closes the store."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any, Protocol

import torch

from tests.soak.account import PATIENCE_S, Account, Overdue, WrongBytes, rss_nbytes, say
from tests.soak.engine_owned import EngineClient
from tests.soak.faults import Trouble
from tests.soak.own import OwnClient
from tests.support.bench import Bench
from tierstore.store import TierStore

_TELL_S = 0.5
STALL_S = 8.0
WRONG, HANGS = 3, 4
"""Exit statuses of a client that noticed wrong bytes or a hang. If a client fails otherwise, its exit status is 1."""


class Client(Protocol):
    """A client of one open store. ``hand`` returns the state of a thread, which the thread passes to ``act``."""

    bench: Bench
    trouble: Trouble | None
    threads: int

    def read_back(self) -> int: ...
    def plant(self) -> None: ...
    def hand(self, seed: str) -> Any: ...
    def act(self, hand: Any) -> None: ...
    def rest(self, hand: Any) -> None: ...
    def finish(self) -> None: ...


def _llama(home: Path, seed: int, account: Account) -> Client:
    from tests.soak.llama import LlamaClient  # transformers takes seconds to import

    return LlamaClient(home, seed, account)


KINDS: dict[str, Callable[[Path, int, Account], Client]] = {
    "own": OwnClient,
    "forks": lambda home, seed, account: OwnClient(home, seed, account, forks=True),
    "encoded": lambda home, seed, account: OwnClient(home, seed, account, codec="int8"),
    "engine": EngineClient,
    "llama": _llama,
    "alone": lambda home, seed, account: OwnClient(home, seed, account, threads=1),
}
"""Kinds of clients. ``alone`` is the client that runs as long as the soak, on a separate store."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """The parameters of a client. Clients with equal roles make the same random choices, apart from thread timing."""

    kind: str
    profile: str
    seed: int
    seconds: float
    plant: bool = False


def run(role: Role, home: Path, until: Set[str] = frozenset()) -> int:
    """Run a client, which reports in lines of JSON. Returns its exit status.

    ``until`` contains names of faults and actions. When its time is up, the client continues until each of them has
    occurred.
    """
    try:
        _run(role, home, until)
    except WrongBytes as error:
        say(failed=str(error))
        return WRONG
    except Overdue as error:
        say(failed=str(error))
        return HANGS
    return 0


def _run(role: Role, home: Path, until: Set[str]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads are a hundred times slower on a busy machine
    try:
        _live(role, home, until)
    finally:
        torch.set_num_threads(threads)


def _live(role: Role, home: Path, until: Set[str]) -> None:
    account = Account()
    client = KINDS[role.kind](home, role.seed, account)
    store = client.bench.store
    account.count("pages", "read back", client.read_back())
    _tell(account, store, ready=True)
    if role.plant:
        client.plant()
    trouble = Trouble(client.bench, home, role.profile, role.seed, role.seconds, account)
    client.trouble = trouble
    with trouble:
        start = _act(client, role, account, until)
    client.finish()
    _tell(account, store)
    store.close(timeout_s=2.0 if trouble.losing else 30.0)
    say(closed=True, rss={"start": start, "end": rss_nbytes()})


def _act(client: Client, role: Role, account: Account, until: Set[str]) -> int:
    """Let each of the client's threads act, at least once.

    Returns the resident memory of this process, in bytes, after a quarter of the time.
    """
    end = monotonic() + role.seconds
    errors: list[BaseException] = []

    def over() -> bool:
        late = monotonic() - end
        counts = account.snapshot()
        if late < 0 or until <= counts.get("faults", {}).keys() | counts.get("actions", {}).keys():
            return late >= 0
        if late >= PATIENCE_S:
            raise Overdue(
                f"not all of these faults and actions occurred within {PATIENCE_S:g} s: {sorted(until)}"
            )
        return False

    def work(index: int) -> None:
        hand = client.hand(f"{role.seed} {index}")
        try:
            client.act(hand)
            while not errors and not over():
                client.act(hand)
            client.rest(hand)
        except BaseException as error:  # noqa: BLE001  raised again in the client's main thread
            errors.append(error)

    threads = [Thread(target=work, args=(i,), name=f"soak-{i}") for i in range(client.threads)]
    for thread in threads:
        thread.start()
    warm, stall = rss_nbytes(), Stall(account)
    while any(thread.is_alive() for thread in threads):
        threads[0].join(_TELL_S) if threads[0].is_alive() else threads[-1].join(_TELL_S)
        stall.watch()
        _tell(account, client.bench.store)
        if monotonic() < end - 0.75 * role.seconds:
            warm = rss_nbytes()
    if errors:
        raise errors[0]
    return warm


class Stall:
    """Prints the stacks of all threads if no thread has begun an action for a while. This does not count as a hang."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._last: object = None
        self._since = monotonic()

    def watch(self) -> None:
        """Check whether a thread has begun an action since the last call. Call this regularly."""
        now = self._account.snapshot().get("actions")
        if now != self._last:
            self._last, self._since = now, monotonic()
        elif monotonic() - self._since > STALL_S:
            self._since = monotonic()
            self._account.count("stalls", f"{STALL_S:g} s without a new action")
            faulthandler.dump_traceback(2)


def _tell(account: Account, store: TierStore, **more: object) -> None:
    counters: Any = store.stats()["counters"]
    say(counts=account.snapshot() | {"misses": counters["misses_pages"]}, **more)
