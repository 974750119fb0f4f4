"""What the engine tells of one request, from its thread to the event loop that the client hangs on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool

from tierstore.serve.engine import CLOSING
from tierstore.serve.errors import ClosingError, DeletedError, FailedError, GoneError
from tierstore.serve.request import Ask, Done, Event, Failed, Piece, Read

if TYPE_CHECKING:
    from starlette.types import Receive

    from tierstore.serve.engine import Engine, Ticket

DELETED = "the document was deleted"


def failure(event: Failed) -> FailedError:
    """The error that a request ends with which has not been answered yet."""
    if event.why == DELETED:
        return DeletedError(event.why)
    return ClosingError(event.why) if event.why == CLOSING else FailedError(event.why)


class Listener:
    """The events of one request, once each, until the client goes away. For one task of one event loop.

    ``end`` must be called: it cancels what has not ended.
    """

    def __init__(self, events: asyncio.Queue[Event | None], ticket: Ticket, receive: Receive) -> None:
        self._events, self._ticket, self._loop = events, ticket, asyncio.get_running_loop()
        self._first: Piece | Done | None = None
        self._watch = asyncio.create_task(self._wait_for_the_end(receive))

    @classmethod
    async def begin(cls, engine: Engine, ask: Ask, receive: Receive) -> Listener:
        """Ask the engine. ``receive`` tells of the client, which has sent all it had. Raises what ``submit`` raises."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event | None]()

        def tell(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        return cls(events, await run_in_threadpool(engine.submit, ask, tell), receive)

    def end(self) -> None:
        """Nothing is computed any more for this request. Idempotent."""
        self._watch.cancel()
        self._ticket.cancel()

    def withdraw(self) -> None:
        """Its document is deleted: it ends with an error, soon. Any thread."""
        self._ticket.cancel()
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._events.put_nowait, Failed(DELETED))

    def wait(self) -> None:
        """Until no page of it is on its way into the store. Any thread but the loop's."""
        self._ticket.wait()

    async def first(self) -> None:
        """Waits for the first piece, or the end without one. FailedError, or GoneError without a client."""
        event = await self._next()
        if isinstance(event, Failed):
            raise failure(event)
        self._first = event

    async def __aiter__(self) -> AsyncIterator[Piece | Done | Failed]:
        """Pieces, and the end; after ``first``, from there. GoneError once there is no client."""
        event: Piece | Done | Failed = await self._next() if self._first is None else self._first
        while isinstance(event, Piece):
            yield event
            event = await self._next()
        yield event

    async def _next(self) -> Piece | Done | Failed:
        while isinstance(event := await self._events.get(), Read):
            pass
        if event is None:
            raise GoneError
        return event

    async def _wait_for_the_end(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._events.put_nowait(None)
