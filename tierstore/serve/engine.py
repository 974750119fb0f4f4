"""The engine: a queue of requests, and the thread that runs the model for them.

Requests start in arrival order. Running requests take turns: in each turn, the engine computes one chunk of a
prompt or one token of an answer. The engine sends hints about waiting requests, so that the prefetcher reads their
pages from disk before they start.
"""

# transformers leaves some functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from threading import Condition
from threading import Event as Flag
from time import monotonic
from typing import Any

import numpy as np
import torch

from tierstore.adapters.huggingface import TierStoreCache, cache_argument
from tierstore.adapters.huggingface.request import PageGroups
from tierstore.errors import StoreClosed, TierStoreError
from tierstore.lease import Lease
from tierstore.prefetch import Waiting
from tierstore.serve.metrics import Figures
from tierstore.serve.model import Reader
from tierstore.serve.request import (
    Ask,
    BusyError,
    Done,
    Event,
    Failed,
    FinishReason,
    Piece,
    Read,
    RefusedError,
    Usage,
)
from tierstore.serve.sampling import Sampler, Spelling
from tierstore.store import TierStore
from tierstore.threads import Worker
from tierstore.types import LeaseState, PageKey, Tier

_numbers = count()


@dataclass(slots=True, eq=False)
class Asked:
    """A waiting or running request.

    ``pages`` is the maximum number of HBM slots that the request may need at once. ``ended`` is set when the
    request has finished and the engine has released its pages.
    """

    ask: Ask
    tell: Callable[[Event], None]
    keys: Sequence[PageKey]
    pages: int
    asked_at: float
    """Time of submission in seconds, as returned by ``time.monotonic``."""
    cancelled: Flag = field(default_factory=Flag)
    ended: Flag = field(default_factory=Flag)
    name: str = field(default_factory=lambda: f"{next(_numbers)}")


class Line:
    """The queue of waiting requests. Sends hints about them to an attached prefetcher. Not thread-safe."""

    def __init__(self, store: TierStore) -> None:
        self._line: deque[Asked] = deque()
        self._hints = Waiting(store, name="serve")

    def __len__(self) -> int:
        return len(self._line)

    def add(self, asked: Asked) -> None:
        """Append a request, and send the hint about it."""
        self._line.append(asked)
        self._hints.add(asked.name, asked.keys)

    def take(self, room: int) -> Asked | None:
        """Pop the oldest waiting request if it fits into ``room`` HBM pages, else return None.

        A later request never overtakes an earlier one.
        """
        if not self._line or self._line[0].pages > room:
            return None
        asked = self._line.popleft()
        self._hints.started(asked.name)
        return asked

    def drop_cancelled(self) -> list[Asked]:
        """Remove and return the cancelled requests, withdraw their hints, and set their ``ended`` flags."""
        found = [asked for asked in self._line if asked.cancelled.is_set()]
        for asked in found:
            self._line.remove(asked)
            self._hints.withdraw(asked.name)
            asked.ended.set()
        return found

    def drop_all(self) -> list[Asked]:
        """Remove and return all requests, and withdraw their hints.

        This must be the last call, made when the engine stops.
        """
        found = list(self._line)
        self._line.clear()
        self._hints.close()
        return found


class Coming:
    """A lease on the cached pages of a request, taken only if at least one of them is on disk.

    If all cached pages are in host memory or HBM, no lease is taken; the request's cache loads these pages later,
    layer by layer. Call ``close`` to release the lease. Not thread-safe.
    """

    def __init__(self, store: TierStore, keys: Sequence[PageKey]) -> None:
        """Start loading the cached prefix of ``keys`` if a part of it is on disk. Does not wait."""
        on_disk = any(not store.tiers[tier].in_memory for tier in set(store.match(keys).tiers))
        self._lease: Lease | None = store.acquire(keys) if on_disk else None

    @property
    def here(self) -> bool:
        """Return whether loading has ended. Pages that could not be loaded are recomputed."""
        return self._lease is None or self._lease.wait(0.0, written=False) is not LeaseState.PENDING

    def origins(self, page_size: int) -> Counter[Tier]:
        """Return how many tokens of the leased pages were found in each tier."""
        found = Counter(self._lease.tiers) if self._lease is not None else Counter[Tier]()
        return Counter({tier: count * page_size for tier, count in found.items()})

    def close(self) -> None:
        """Release the lease, if any. Idempotent."""
        lease, self._lease = self._lease, None
        if lease is not None:
            with suppress(StoreClosed):
                lease.release()


_ROOM_S = 0.1
"""Maximum time in seconds that a request waits for HBM pages to be saved, so that their slots become free.

This time is short because the engine's thread waits, so all other requests wait as well.
"""


class Running:
    """A request that has started. Only the engine's thread may use it. Call ``close`` to release its pages."""

    def __init__(
        self,
        reader: Reader,
        store: TierStore,
        ask: Ask,
        keys: Sequence[PageKey],
        tell: Callable[[Event], None],
        *,
        asked_at: float,
        chunk: int,
    ) -> None:
        """Start loading the cached pages of the prompt from disk, if any. Does not wait.

        Args:
            reader: The model and its tokenizer.
            store: The store.
            ask: The request.
            keys: The page keys of the prompt.
            tell: Called with each event.
            asked_at: Time of submission in seconds, as returned by ``time.monotonic``.
            chunk: Maximum number of prompt tokens computed per step.
        """
        self._reader, self._store, self._ask, self._tell, self._chunk = reader, store, ask, tell, chunk
        self._asked_at, self._began_at = asked_at, monotonic()
        self._first_at: float | None = None
        self._ends = reader.ends
        self._tokens: list[int] = []
        self._device = reader.model.device
        self._sampler = Sampler(ask.sampling, self._device)
        self._spelling = Spelling(reader.tokenizer, ask.prompt, ask.stop)
        self._reused: dict[str, int] = {}
        self._given: dict[str, TierStoreCache] = {}
        self._coming = Coming(store, keys)
        self._cache: TierStoreCache | None = None

    @property
    def waits(self) -> bool:
        """Return whether the request is still waiting for pages that are being read from disk."""
        return self._cache is None and not self._coming.here

    def step(self) -> Usage | None:
        """Compute one chunk of the prompt or one token of the answer, and report the progress as events.

        Does nothing while ``waits`` is true.

        Returns:
            The usage if the request is complete, else None.
        """
        if self.waits:
            return None
        there = (self._cache or self._open()).get_seq_length()
        with torch.inference_mode():
            if there < len(self._ask.prompt):
                return self._read(there)
            return self._go_on(self._tokens[-1:])

    def close(self) -> None:
        """Release the request's pages. Full pages stay in the store as cached pages. Idempotent."""
        self._coming.close()
        if self._cache is not None:
            self._cache.close()

    def _open(self) -> TierStoreCache:
        """Create the request's cache with the stored pages of the prompt, and release the lease that loaded them.

        Tokens that the lease has loaded are counted for the tier in which the lease found them, not for HBM.
        """
        model = self._reader.model
        # Convert with NumPy, because torch.tensor would take 40 ms for a tuple of 131,072 integers.
        prompt = torch.from_numpy(np.array(self._ask.prompt, dtype=np.int64))
        self._cache = cache = TierStoreCache(
            self._store, prompt, model=model, salt=self._ask.salt, wait_for_room_s=_ROOM_S, streaming=False
        )
        self._given[cache_argument(model)] = cache
        reused, came = cache.reused_by_tier, self._coming.origins(PageGroups(self._store).page_size)
        for tier in (tier for tier in self._store.tiers if tier != Tier.HBM):
            moved = min(came[tier], reused[Tier.HBM])
            reused[Tier.HBM] -= moved
            reused[tier] += moved
        self._reused = {tier.name: count for tier, count in reused.items() if count}
        self._coming.close()
        self._tell(Read(cache.get_seq_length()))
        return cache

    def _read(self, first: int) -> Usage | None:
        part = self._ask.prompt[first : first + self._chunk]
        if first + len(part) == len(self._ask.prompt) and self._ask.max_tokens:
            return self._go_on(list(part))
        self._forward(list(part))
        self._tell(Read(first + len(part)))
        if first + len(part) < len(self._ask.prompt):
            return None
        self._first_at = monotonic()
        return self._done("length")

    def _go_on(self, part: list[int]) -> Usage | None:
        """Run the model on these tokens, choose the next token of the answer, and report its text."""
        token = self._sampler.choose(self._forward(part))
        if self._first_at is None:
            self._first_at = monotonic()
            self._tell(Read(len(self._ask.prompt)))
        self._tokens.append(token)
        if token in self._ends:
            return self._done("stop")
        text = self._spelling.add(token)
        if text:
            self._tell(Piece(text))
        if self._spelling.stopped:
            return self._done("stop")
        return self._done("length") if len(self._tokens) == self._ask.max_tokens else None

    def _forward(self, part: list[int]) -> torch.Tensor:
        """Run the model on these tokens and return the logits after the last one, ``[1, vocabulary]``."""
        given: Any = torch.tensor([part], device=self._device)
        found: torch.Tensor = self._reader.model(given, logits_to_keep=1, **self._given).logits[:, -1]
        return found

    def _done(self, reason: FinishReason) -> Usage:
        rest = self._spelling.end()
        if rest:
            self._tell(Piece(rest))
        assert self._first_at is not None
        usage = Usage(
            prompt_tokens=len(self._ask.prompt),
            completion_tokens=len(self._tokens),
            reused=self._reused,
            waited_s=self._began_at - self._asked_at,
            ttft_s=self._first_at - self._asked_at,
            total_s=monotonic() - self._asked_at,
        )
        self._tell(Done(reason, usage))
        return usage


_LOOK_S = 0.002
"""Interval in seconds between checks for loaded pages while all running requests wait for the disk."""
_LAST_STEP_S = 30.0
"""Maximum time in seconds to wait for the engine to finish its current step."""
_SPARE = 1
"""Number of extra HBM pages per request, for a copy of its partially filled page."""
_CPU_CHUNK, _CARD_CHUNK = 256, 4096
CLOSING = "the server is closing"

log = logging.getLogger("tierstore.serve.engine")


class Ticket:
    """A handle for a request that the engine has accepted. It does not keep the prompt in memory. Thread-safe."""

    def __init__(self, asked: Asked, wake: Callable[[], None]) -> None:
        self._cancelled, self._ended, self._wake = asked.cancelled, asked.ended, wake

    def cancel(self) -> None:
        """Cancel the request: its current step is the last one, and no more events are reported.

        Idempotent. Does not wait. Does nothing if the request has finished.
        """
        self._cancelled.set()
        self._wake()

    def wait(self, timeout_s: float = _LAST_STEP_S) -> bool:
        """Wait until the request has finished and the engine stores no more of its pages.

        Return False if that takes longer than ``timeout_s`` seconds.
        """
        return self._ended.wait(timeout_s)


class Engine:
    """Answers requests with one model and one store.

    Requests start in arrival order, and at most ``max_active`` run at a time. A request starts only when HBM has
    slots for all pages that this request and the running requests may need, so a running request never runs out of
    slots. Running requests take turns: in each turn, the engine computes one chunk of a prompt or one token of an
    answer. A long prompt therefore does not block other answers. An attached prefetcher gets hints about waiting
    requests.
    """

    def __init__(
        self,
        reader: Reader,
        store: TierStore,
        *,
        max_active: int = 4,
        max_waiting: int = 64,
        chunk: int | None = None,
    ) -> None:
        """Start the engine's thread.

        Args:
            reader: The model and its tokenizer.
            store: The store.
            max_active: Maximum number of running requests.
            max_waiting: Maximum number of waiting requests.
            chunk: Maximum number of prompt tokens computed per step. While a step runs, all other requests wait.
                None means 4,096 on a GPU and 256 on the CPU, which is just enough to keep the device busy.
        """
        self._reader, self._store = reader, store
        self._chunk = chunk or (_CPU_CHUNK if reader.model.device.type == "cpu" else _CARD_CHUNK)
        self._max_active, self._max_waiting = max_active, max_waiting
        pages = PageGroups(store)
        self._page_size, self._slots = pages.page_size, int(pages.groups[0].shape[0])
        self._changed = Condition()
        # Guarded by the condition: requests not yet in the queue, and whether the engine is closing.
        self._arrived: list[Asked] = []
        self._closing = False
        # Used only by the engine's thread; other threads only read the lengths.
        self._line = Line(store)
        self._active: list[tuple[Asked, Running]] = []
        self.figures = Figures(lambda: len(self._active), lambda: len(self._line) + len(self._arrived))
        self._thread = Worker(self._run, name="tierstore-engine")
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Return whether the engine accepts requests. False after ``close`` or if the engine's thread has failed."""
        return not self._closing

    @property
    def max_tokens(self) -> int:
        """Return the maximum number of tokens in a prompt and its answer together.

        This is the lower of two limits: the model's context length, and the number of tokens that fit into HBM.
        """
        return min(self._reader.max_tokens, (self._slots - _SPARE) * self._page_size)

    def submit(self, ask: Ask, tell: Callable[[Event], None]) -> Ticket:
        """Queue a request. Thread-safe. Computing the page keys of a long prompt takes a few milliseconds.

        Args:
            ask: The request.
            tell: Called once for each event, in the engine's thread. It must not block.

        Raises:
            RefusedError: The request can never be served.
            BusyError: Too many requests are waiting.
            StoreClosed: The engine or the store is closed.
        """
        asked_at = monotonic()
        try:
            asked = Asked(ask, tell, self._keys(ask), self._pages(ask), asked_at)
        except RefusedError:
            self.figures.ended("refused")
            raise
        with self._changed:
            if self._closing:
                raise StoreClosed(CLOSING)
            waiting = len(self._arrived) + len(self._line)
            if waiting >= self._max_waiting:
                self.figures.ended("busy")
                raise BusyError(
                    f"{waiting} requests are already waiting; the limit is {self._max_waiting}: try again later"
                )
            self._arrived.append(asked)
            self._changed.notify_all()
        return Ticket(asked, self._wake)

    def close(self, timeout_s: float = _LAST_STEP_S) -> None:
        """Stop the engine after its current step. All running and waiting requests receive ``Failed``.

        Waits up to ``timeout_s`` seconds for the engine's thread to end. Call this before closing the store.
        Idempotent.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    # -- called by other threads ----------------------------------------------------------------------------------

    def _keys(self, ask: Ask) -> list[PageKey]:
        for token in (min(ask.prompt, default=0), max(ask.prompt, default=0)):
            if not 0 <= token < self._reader.vocabulary:
                raise RefusedError(f"a token must be 0 to {self._reader.vocabulary - 1}, got {token}")
        return self._store.keys(ask.prompt, salt=ask.salt)

    def _pages(self, ask: Ask) -> int:
        tokens = len(ask.prompt) + ask.max_tokens
        if not ask.prompt:
            raise RefusedError("the prompt is empty: it must have at least one token")
        if tokens > self.max_tokens:
            answer = f" and an answer of up to {ask.max_tokens}" if ask.max_tokens else ""
            raise RefusedError(
                f"the request is too long, with a prompt of {len(ask.prompt)} tokens{answer}: at most "
                f"{self.max_tokens} tokens fit (the model reads up to {self._reader.max_tokens} tokens, "
                f"HBM holds {self._slots} pages of {self._page_size} tokens)"
            )
        return -(-tokens // self._page_size) + _SPARE

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # -- the engine's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._await_work():
                for _ in self._line.drop_cancelled():
                    self.figures.ended("cancelled")
                self._start_next()
                for each in list(self._active):
                    self._step(*each)
        except StoreClosed:
            log.warning("the engine stopped because the store was closed first")
        except Exception:  # the outermost function of the thread: no caller would log errors
            log.exception("the engine stopped after an unexpected error")
        finally:
            with self._changed:
                self._closing = True
            self._end_all()

    def _await_work(self) -> bool:
        """Move new requests to the queue. If the engine has no other work, wait for a request.

        If all running requests wait for pages from disk, wait 2 ms. Return False when the engine is closing.
        """
        with self._changed:
            while not (self._closing or self._arrived or self._active or len(self._line)):
                self._changed.wait()
            if self._active and all(running.waits for _, running in self._active):
                self._changed.wait(_LOOK_S)
            for asked in self._arrived:
                self._line.add(asked)
            self._arrived.clear()
            return not self._closing

    def _start_next(self) -> None:
        while len(self._active) < self._max_active:
            room = self._slots - sum(asked.pages for asked, _ in self._active)
            asked = self._line.take(room)
            if asked is None:
                return
            self._guarded(asked, partial(self._start, asked))

    def _start(self, asked: Asked) -> None:
        running = Running(
            self._reader,
            self._store,
            asked.ask,
            asked.keys,
            self._teller(asked),
            asked_at=asked.asked_at,
            chunk=self._chunk,
        )
        self._active.append((asked, running))

    def _step(self, asked: Asked, running: Running) -> None:
        if asked.cancelled.is_set():
            self._finish(asked)
            self.figures.ended("cancelled")
            return

        def step() -> None:
            usage = running.step()
            if usage is not None:
                self.figures.answered(usage)
                self._finish(asked)

        self._guarded(asked, step)

    def _guarded(self, asked: Asked, work: Callable[[], None]) -> None:
        """Call ``work`` for one request. If it raises an exception, only this request fails."""
        try:
            work()
        except TierStoreError as error:
            self._fail(asked, str(error))
        except Exception as error:  # a model may raise anything, and the engine's thread must survive it
            log.exception("a request of %d tokens failed", len(asked.ask.prompt))
            self._fail(asked, f"{type(error).__name__}: {error}")

    def _fail(self, asked: Asked, why: str) -> None:
        self._finish(asked)
        self.figures.ended("failed")
        self._teller(asked)(Failed(why))

    def _finish(self, asked: Asked) -> None:
        for each in [pair for pair in self._active if pair[0] is asked]:
            self._active.remove(each)
            try:
                each[1].close()
            except TierStoreError as error:
                log.warning("could not release the pages of a finished request: %s", error)
        asked.ended.set()

    def _teller(self, asked: Asked) -> Callable[[Event], None]:
        def tell(event: Event) -> None:
            if asked.cancelled.is_set():
                return
            try:
                asked.tell(event)
            except RuntimeError:  # the client's event loop is closed, so nobody receives the answer
                asked.cancelled.set()

        return tell

    def _end_all(self) -> None:
        for asked, _ in list(self._active):
            self._fail(asked, CLOSING)
        for asked in (*self._line.drop_all(), *self._arrived):
            self._fail(asked, CLOSING)
        self._arrived.clear()
