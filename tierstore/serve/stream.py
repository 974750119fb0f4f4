"""Sends answers to clients, as one JSON object or as a stream of server-sent events.

There are three formats: OpenAI's completions, OpenAI's chat completions, and answers about a document. The
engine's thread passes the events of a request to the asyncio event loop, which sends them to the client.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Protocol

from fastapi.responses import JSONResponse, Response
from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from tierstore.serve.engine import CLOSING, Engine
from tierstore.serve.errors import ClosingError, DeletedError, FailedError, GoneError, error_body
from tierstore.serve.request import Ask, Done, Event, Failed, FinishReason, Piece, Read, Usage

if TYPE_CHECKING:
    from tierstore.serve.engine import Ticket

DELETED = "the document was deleted"


def failure(event: Failed) -> FailedError:
    """Return the exception for a failed request whose client has not received anything yet."""
    if event.why == DELETED:
        return DeletedError(event.why)
    return ClosingError(event.why) if event.why == CLOSING else FailedError(event.why)


class Listener:
    """Receives the events of one request until its client disconnects.

    Only one task may use a listener, except for ``withdraw``, which is thread-safe. Call ``end`` when done.
    """

    def __init__(self, events: asyncio.Queue[Event | None], ticket: Ticket, receive: Receive) -> None:
        self._events, self._ticket, self._loop = events, ticket, asyncio.get_running_loop()
        self._first: Piece | Done | None = None
        self._watch = asyncio.create_task(self._wait_for_the_end(receive))

    @classmethod
    async def begin(cls, engine: Engine, ask: Ask, receive: Receive) -> Listener:
        """Submit a request to the engine and return its listener.

        The body of the HTTP request must already have been read from ``receive``.

        Raises:
            RefusedError, BusyError, StoreClosed: See ``Engine.submit``.
        """
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event | None]()

        def tell(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        return cls(events, await run_in_threadpool(engine.submit, ask, tell), receive)

    def end(self) -> None:
        """Stop listening, and cancel the request if it is still running. Idempotent."""
        self._watch.cancel()
        self._ticket.cancel()

    def withdraw(self) -> None:
        """Cancel the request, and tell its client in an error that the document was deleted. Thread-safe."""
        self._ticket.cancel()
        with suppress(RuntimeError):  # the event loop is closed, so nobody receives the answer
            self._loop.call_soon_threadsafe(self._events.put_nowait, Failed(DELETED))

    def wait(self) -> None:
        """Wait up to 30 s until the request has finished and the engine stores no more pages for it.

        This blocks the calling thread. Do not call it in the event loop.
        """
        self._ticket.wait()

    async def first(self) -> None:
        """Wait for the first event: a piece of the answer, or the end of the request. Iteration still yields it.

        Raises:
            FailedError: The request failed before the first piece.
            GoneError: The client disconnected.
        """
        event = await self._next()
        if isinstance(event, Failed):
            raise failure(event)
        self._first = event

    async def __aiter__(self) -> AsyncIterator[Piece | Done | Failed]:
        """Yield each ``Piece`` and then the final ``Done`` or ``Failed``.

        Raises:
            GoneError: The client disconnected.
        """
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


class Shape(Protocol):
    """The format of a response: converts the events of a request to a JSON object or to the frames of a stream."""

    def whole(self, text: str, done: Done) -> dict[str, Any]:
        """Return the JSON object for a complete answer."""

    def opening(self) -> Iterator[bytes]:
        """Yield the frames that come before the first piece, if there are any."""

    def piece(self, text: str) -> bytes:
        """Return the frame that contains one piece of the answer."""

    def closing(self, done: Done) -> Iterator[bytes]:
        """Yield the frames that come after the last piece."""

    def failure(self, why: str) -> bytes:
        """Return the frame that ends a stream whose request failed. ``why`` is the error message."""


def room(engine: Engine, prompt: int, most: int) -> int:
    """Return the default ``max_tokens``: ``most``, or less if the prompt leaves fewer tokens for the answer.

    The result is at least 1 even if the prompt is too long. The engine then rejects the request.

    Args:
        engine: The engine that will answer.
        prompt: Length of the prompt in tokens.
        most: Maximum length of the answer in tokens.
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
    """Submit a request to the engine and return the response with its answer.

    Waits for the first piece or, if ``stream`` is false, for the whole answer. Raises an exception if the request
    fails during this wait. If a stream fails later, it ends with an error frame. The request is cancelled if the
    client disconnects.

    Args:
        engine: The engine.
        ask: The request to the engine.
        shape: The format of the answer.
        receive: The ASGI receive function of the HTTP request.
        stream: Whether to stream the answer.
        taken: Called once with the listener, in another thread, after the engine has accepted the request.
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
    raise AssertionError("the engine sent no more events before the request was complete")


class _Stream(EventSourceResponse):
    """A streaming response that always calls ``Listener.end``, even if the stream is never started."""

    def __init__(self, listener: Listener, shape: Shape) -> None:
        super().__init__(_frames(listener, shape), headers={"Cache-Control": "no-cache"})
        self._listener = listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._listener.end()


async def _frames(listener: Listener, shape: Shape) -> AsyncIterator[bytes]:
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


_DONE = format_sse_event(data_str="[DONE]")


@dataclass(frozen=True)
class Completion:
    """The format of a response to ``POST /v1/completions``.

    ``model`` is the name of the model. If ``with_usage`` is true, a stream has a usage chunk before its end
    marker.
    """

    model: str
    with_usage: bool = False
    id: str = field(default_factory=lambda: f"cmpl-{token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, done: Done) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        return self._object("text_completion", [_text(text, done.reason)]) | {"usage": _usage(done.usage)}

    def opening(self) -> Iterator[bytes]:
        """Yield nothing."""
        yield from ()

    def piece(self, text: str) -> bytes:
        """Return the chunk that contains this piece of the text."""
        return self._chunk([_text(text, None)])

    def closing(self, done: Done) -> Iterator[bytes]:
        """Yield the finish reason, the usage if requested, and OpenAI's end marker."""
        yield self._chunk([_text("", done.reason)])
        yield from self._end(done)

    def failure(self, why: str) -> bytes:
        """Return a frame with the error. The end marker is not sent after it."""
        return _frame(error_body(500, why))

    _streamed = "text_completion"

    def _end(self, done: Done) -> Iterator[bytes]:
        if self.with_usage:
            yield _frame(self._object(self._streamed, []) | {"usage": _usage(done.usage)})
        yield _DONE

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        usage = {"usage": None} if self.with_usage else {}
        return _frame(self._object(self._streamed, choices) | usage)

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


@dataclass(frozen=True)
class Chat(Completion):
    """The format of a response to ``POST /v1/chat/completions``."""

    id: str = field(default_factory=lambda: f"chatcmpl-{token_hex(12)}")

    _streamed = "chat.completion.chunk"

    def whole(self, text: str, done: Done) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": done.reason}
        return self._object("chat.completion", [choice]) | {"usage": _usage(done.usage)}

    def opening(self) -> Iterator[bytes]:
        """Yield a chunk with the role of the message."""
        yield self._chunk([_delta({"role": "assistant", "content": "", "refusal": None}, None)])

    def piece(self, text: str) -> bytes:
        """Return the chunk for a piece of the answer."""
        return self._chunk([_delta({"content": text}, None)])

    def closing(self, done: Done) -> Iterator[bytes]:
        """Yield the finish reason, the usage if requested, and OpenAI's end marker."""
        yield self._chunk([_delta({}, done.reason)])
        yield from self._end(done)


@dataclass(frozen=True)
class About:
    """The format of an answer about a document.

    ``waited_s`` is the time in seconds from the arrival of the question to its submission to the engine. Most of it
    is spent waiting for the document to be read. All times in the answer include ``waited_s``.
    """

    waited_s: float = 0.0

    def whole(self, text: str, done: Done) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        return {"answer": text} | self._end(done)

    def opening(self) -> Iterator[bytes]:
        """Yield nothing."""
        yield from ()

    def piece(self, text: str) -> bytes:
        """Return a ``piece`` event that contains this piece of the text."""
        return _frame({"text": text}, "piece")

    def closing(self, done: Done) -> Iterator[bytes]:
        """Yield a ``done`` event with the finish reason and the usage."""
        yield _frame(self._end(done), "done")

    def failure(self, why: str) -> bytes:
        """Return an ``error`` event with the message."""
        return _frame(error_body(500, why), "error")

    def _end(self, done: Done) -> dict[str, Any]:
        usage, wait = done.usage, self.waited_s
        usage = replace(
            usage, waited_s=usage.waited_s + wait, ttft_s=usage.ttft_s + wait, total_s=usage.total_s + wait
        )
        return {"finish_reason": done.reason, "usage": asdict(usage)}


def _text(text: str, reason: FinishReason | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}


def _delta(delta: dict[str, Any], reason: FinishReason | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.reused_tokens},
    }


def _frame(value: dict[str, Any], event: str | None = None) -> bytes:
    """Encode one server-sent event.

    The JSON contains only ASCII characters, because some clients treat U+2028 as a line break.
    """
    return format_sse_event(event=event, data_str=json.dumps(value))
