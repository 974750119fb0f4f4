"""Calls that block, in threads of the event loop's executor: nothing of them goes on behind a caller who is gone."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from contextlib import suppress
from typing import TypeVar

_AHEAD_NBYTES = 32 << 20
_MOST_AHEAD = 64

_T = TypeVar("_T")


async def whole(call: Callable[[], _T]) -> _T:
    """Run ``call`` in a thread. Who cancels this waits for its end."""
    running = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(running)
    finally:
        await _ended([running])


async def ahead(calls: Iterable[Callable[[], _T]], most: int) -> AsyncGenerator[_T]:
    """What the calls return, in their order. Up to ``most`` of them are begun before their result is asked for.

    To be closed (``contextlib.aclosing``): whoever leaves early, cancelled or with an error of a call, waits for the
    end of all that were begun. A call is taken from ``calls`` as it begins.
    """
    begun: deque[asyncio.Future[_T]] = deque()
    try:
        for call in calls:
            begun.append(asyncio.get_running_loop().run_in_executor(None, call))
            if len(begun) == most:
                yield await asyncio.shield(begun[0])
                begun.popleft()
        while begun:
            yield await asyncio.shield(begun[0])
            begun.popleft()
    finally:
        await _ended(begun)


def most_ahead(page_nbytes: int) -> int:
    """How many pages of this length may be on their way at once: 32 MiB of them, but 2 at least and 64 at most."""
    return max(2, min(_MOST_AHEAD, _AHEAD_NBYTES // page_nbytes))


async def _ended(running: Collection[asyncio.Future[_T]]) -> None:
    """All of them have ended, however often this is cancelled meanwhile."""
    while pending := [each for each in running if not each.done()]:
        with suppress(asyncio.CancelledError):
            await asyncio.wait(pending)
    for each in running:
        if not each.cancelled():
            each.exception()  # looked at, so that nobody says that it was not
