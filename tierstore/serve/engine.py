"""The thread that owns the model: several requests in turn, a chunk of a prompt or a token of an answer at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from threading import Condition, Thread
from time import monotonic

from tierstore.adapters.huggingface.request import PageGroups
from tierstore.errors import StoreClosed, TierStoreError
from tierstore.serve.metrics import Figures
from tierstore.serve.model import Reader
from tierstore.serve.queue import Asked, Line
from tierstore.serve.request import Ask, BusyError, Event, Failed, RefusedError
from tierstore.serve.running import Running
from tierstore.store import TierStore
from tierstore.types import PageKey

_LOOK_S = 0.002
"""How often pages from disk are looked for while nothing is computed."""
_LAST_STEP_S = 30.0
"""How long a step may take before nobody waits for its end."""
_SPARE = 1
"""A page more than the tokens fill: the copy of one that a prompt leaves half way."""
_CPU_CHUNK, _CARD_CHUNK = 256, 4096
CLOSING = "the server is closing"

log = logging.getLogger(__name__)


class Ticket:
    """A request that was taken. Any thread. Keeps nothing of it: who keeps a ticket keeps no prompt."""

    def __init__(self, asked: Asked, wake: Callable[[], None]) -> None:
        self._cancelled, self._ended, self._wake = asked.cancelled, asked.ended, wake

    def cancel(self) -> None:
        """From the next step on nothing is computed for it, and nothing told. Idempotent; too late it does nothing."""
        self._cancelled.set()
        self._wake()

    def wait(self, timeout_s: float = _LAST_STEP_S) -> bool:
        """Until the engine is through with it and puts no page of it any more; False if the time ran out."""
        return self._ended.wait(timeout_s)


class Engine:
    """Answers requests over one store with one model.

    Requests start in the order they came, ``max_active`` at a time, once HBM has room for all that they may need: none
    is ever stuck half way. A step is a chunk of one prompt or a token of one answer, in turn: a long prompt does not
    stop the others' answers. Those that wait are told to an attached prefetcher.
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
        """Starts its thread. ``chunk``: tokens of a prompt computed at a time, for which the other answers wait.

        By itself as many as keep the device busy: 4,096 on a card, 256 on the CPU.
        """
        self._reader, self._store = reader, store
        self._chunk = chunk or (_CPU_CHUNK if reader.model.device.type == "cpu" else _CARD_CHUNK)
        self._max_active, self._max_waiting = max_active, max_waiting
        pages = PageGroups(store)
        self._page_size, self._slots = pages.page_size, int(pages.groups[0].shape[0])
        self._changed = Condition()
        # Under the condition: what came, and whether more may.
        self._arrived: list[Asked] = []
        self._closing = False
        # The thread's own; others read their lengths.
        self._line = Line(store)
        self._active: list[tuple[Asked, Running]] = []
        self.figures = Figures(lambda: len(self._active), lambda: len(self._line) + len(self._arrived))
        self._thread = Thread(target=self._run, name="tierstore-engine", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether it takes requests: not once it is closed, or its thread has ended."""
        return not self._closing

    @property
    def max_tokens(self) -> int:
        """The most that a prompt and its answer may have together: the model's limit, or what HBM holds."""
        return min(self._reader.max_tokens, (self._slots - _SPARE) * self._page_size)

    def submit(self, ask: Ask, tell: Callable[[Event], None]) -> Ticket:
        """Take a request; ``tell`` is called in the engine's thread with all that becomes of it, and must not wait.

        Any thread. Takes some milliseconds for a long prompt, whose keys are made here. RefusedError if it can never be
        served, BusyError if too many wait, StoreClosed once the engine or the store is closed.
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
                raise BusyError(f"{waiting} requests wait already; allowed: {self._max_waiting}")
            self._arrived.append(asked)
            self._changed.notify_all()
        return Ticket(asked, self._wake)

    def close(self, timeout_s: float = _LAST_STEP_S) -> None:
        """What is under way or waits is told ``Failed``. Before the store is closed. Idempotent, any thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    # -- asked by other threads -----------------------------------------------------------------------------------

    def _keys(self, ask: Ask) -> list[PageKey]:
        for token in (min(ask.prompt, default=0), max(ask.prompt, default=0)):
            if not 0 <= token < self._reader.vocabulary:
                raise RefusedError(f"token {token}; allowed: 0 to {self._reader.vocabulary - 1}")
        return self._store.keys(ask.prompt, salt=ask.salt)

    def _pages(self, ask: Ask) -> int:
        tokens = len(ask.prompt) + ask.max_tokens
        if not ask.prompt:
            raise RefusedError("the prompt has no tokens; allowed: one or more")
        if tokens > self.max_tokens:
            answer = f" and an answer of up to {ask.max_tokens}" if ask.max_tokens else ""
            raise RefusedError(
                f"a prompt of {len(ask.prompt)} tokens{answer}; allowed: "
                f"{self.max_tokens} together (the model reads {self._reader.max_tokens}, "
                f"HBM holds {self._slots} pages of {self._page_size})"
            )
        return -(-tokens // self._page_size) + _SPARE

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._await_work():
                for _ in self._line.drop_cancelled():
                    self.figures.ended("cancelled")
                self._start_next()
                for each in list(self._active):
                    self._step(*each)
        except StoreClosed:
            log.warning("the store was closed before the engine")
        except Exception:  # a thread's top
            log.exception("the engine ends")
        finally:
            with self._changed:
                self._closing = True
            self._end_all()

    def _await_work(self) -> bool:
        """Takes in what came. False: it is over."""
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
        """What goes wrong with one request ends it, and no other."""
        try:
            work()
        except TierStoreError as error:
            self._fail(asked, str(error))
        except Exception as error:  # a thread's top: what a model raises is of any kind
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
                log.warning("a request's pages could not be given back: %s", error)
        asked.ended.set()

    def _teller(self, asked: Asked) -> Callable[[Event], None]:
        def tell(event: Event) -> None:
            if asked.cancelled.is_set():
                return
            try:
                asked.tell(event)
            except RuntimeError:  # its event loop is closed: nobody listens any more
                asked.cancelled.set()

        return tell

    def _end_all(self) -> None:
        for asked, _ in list(self._active):
            self._fail(asked, CLOSING)
        for asked in (*self._line.drop_all(), *self._arrived):
            self._fail(asked, CLOSING)
        self._arrived.clear()
