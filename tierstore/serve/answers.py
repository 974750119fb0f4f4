"""Answers over HTTP: whole, or as a stream of server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol

from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from tierstore.serve.engine import Engine
from tierstore.serve.errors import GoneError
from tierstore.serve.listening import Listener, failure
from tierstore.serve.request import Ask, Done, Failed, Piece


class Shape(Protocol):
    """How one answer looks: whole as JSON, or as frames of a stream."""

    def whole(self, text: str, done: Done) -> dict[str, Any]:
        """All of it."""

    def opening(self) -> Iterator[str]:
        """Frames before the first piece."""

    def piece(self, text: str) -> str:
        """The frame of a piece."""

    def closing(self, done: Done) -> Iterator[str]:
        """Frames after the last piece."""

    def failure(self, why: str) -> str:
        """The last frame of a stream that fails."""


def room(engine: Engine, prompt: int, most: int) -> int:
    """Tokens of an answer whose length nobody gave: ``most``, or what there is room for after ``prompt`` tokens.

    Without room for even one it is one: the engine says what is too long.
    """
    return max(1, min(most, engine.max_tokens - prompt))


async def respond(
    engine: Engine,
    ask: Ask,
    shape: Shape,
    receive: Receive,
    *,
    stream: bool,
    taken: Callable[[Listener], None] | None = None,
) -> Response:
    """Ask, and answer; whose client goes away is cancelled.

    The status is settled with the first piece: what ends a request before it is raised here. ``taken`` is told, in a
    thread, whose events these are.
    """
    listener = await Listener.begin(engine, ask, receive)
    try:
        if taken is not None:
            await run_in_threadpool(taken, listener)
        await listener.first()
        if not stream:
            return JSONResponse(await _whole(listener, shape))
    except BaseException:
        listener.end()
        raise
    return _Stream(listener, shape)


async def _whole(listener: Listener, shape: Shape) -> dict[str, Any]:
    text = ""
    async for event in listener:
        match event:
            case Piece(piece):
                text += piece
            case Failed():
                raise failure(event)
            case Done():
                listener.end()
                return shape.whole(text, event)
    raise AssertionError("the engine tells how a request ends")


class _Stream(StreamingResponse):
    """Ends its listener however it ends itself: a generator that nobody began could not."""

    def __init__(self, listener: Listener, shape: Shape) -> None:
        super().__init__(
            _frames(listener, shape), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._listener = listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._listener.end()


async def _frames(listener: Listener, shape: Shape) -> AsyncIterator[str]:
    for frame in shape.opening():
        yield frame
    try:
        async for event in listener:
            match event:
                case Piece(text):
                    yield shape.piece(text)
                case Done():
                    for frame in shape.closing(event):
                        yield frame
                case Failed(why):
                    yield shape.failure(why)
    except GoneError:
        return
