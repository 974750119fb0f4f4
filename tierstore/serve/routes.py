"""The endpoints under ``/v1``.

Three of them are those of OpenAI's API: models, completions and chat completions. The others manage documents and
answer questions about documents.
"""

from __future__ import annotations

from functools import partial
from time import monotonic
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from tierstore.serve.documents import Document, Library, NotErasedError, Reading, Readings
from tierstore.serve.engine import Engine
from tierstore.serve.errors import FaultError
from tierstore.serve.model import Reader
from tierstore.serve.request import Ask
from tierstore.serve.schemas import (
    ChatRequest,
    Completing,
    CompletionRequest,
    DocumentRequest,
    QuestionRequest,
)
from tierstore.serve.stream import About, Chat, Completion, respond, room

COMPLETION_TOKENS = 16
"""Default ``max_tokens`` for completions, as in OpenAI's API. Reduced if the answer would not fit."""
CHAT_TOKENS = 1024
"""Default ``max_tokens`` for chat completions. Reduced if the answer would not fit."""


def completion_routes(reader: Reader, engine: Engine) -> APIRouter:
    """Create the routes of OpenAI's API under ``/v1``.

    The handlers expect the tenant's name in ``request.state.tenant``, where ``Gate`` stores it.
    """
    routes = APIRouter(prefix="/v1")

    @routes.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(reader)]}

    @routes.get("/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        _require_model(reader, model)
        return _model(reader)

    @routes.post("/completions")
    async def complete(asked: CompletionRequest, request: Request) -> Response:
        _require_model(reader, asked.model)
        prompt = asked.one
        tokens = await run_in_threadpool(reader.tokens, prompt) if isinstance(prompt, str) else prompt
        shape = Completion(reader.name, asked.with_usage)
        wanted = asked.max_tokens or room(engine, len(tokens), COMPLETION_TOKENS)
        ask = _ask(asked, tokens, wanted, request)
        return await respond(engine, ask, shape, request.receive, stream=bool(asked.stream))

    @routes.post("/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Response:
        _require_model(reader, asked.model)
        tokens = await run_in_threadpool(reader.chat, [message.plain() for message in asked.messages])
        wanted = asked.max_completion_tokens or asked.max_tokens
        ask = _ask(asked, tokens, wanted or room(engine, len(tokens), CHAT_TOKENS), request)
        shape = Chat(reader.name, asked.with_usage)
        return await respond(engine, ask, shape, request.receive, stream=bool(asked.stream))

    return routes


def _ask(asked: Completing, tokens: list[int], max_tokens: int, request: Request) -> Ask:
    return Ask(
        prompt=tuple(tokens),
        max_tokens=max_tokens,
        sampling=asked.sampling(),
        stop=asked.stops,
        salt=request.state.tenant.encode(),
    )


def _require_model(reader: Reader, name: str) -> None:
    if name != reader.name:
        raise FaultError(
            404,
            f"model must be {reader.name}, got {name[:100]}",
            param="model",
            code="model_not_found",
        )


def _model(reader: Reader) -> dict[str, Any]:
    return {"id": reader.name, "object": "model", "created": 0, "owned_by": "tierstore"}


ANSWER_TOKENS = 256
"""Default ``max_tokens`` for questions about documents. Reduced if the answer would not fit."""


def document_routes(reader: Reader, engine: Engine, library: Library, readings: Readings) -> APIRouter:
    """Create the routes under ``/v1/documents``.

    The handlers expect the tenant's name in ``request.state.tenant``, where ``Gate`` stores it. Handlers that
    wait for the tokenizer or the disk are ordinary functions, which FastAPI runs in threads.
    """
    routes = APIRouter(prefix="/v1/documents")

    def found(request: Request, id: str) -> Document:  # noqa: A002 - the API's name for it
        document = library.get(request.state.tenant, id)
        if document is None:
            raise FaultError(404, f"document {id} does not exist", param="id", code="document_not_found")
        return document

    @routes.post("", status_code=202)
    def add(asked: DocumentRequest, request: Request) -> dict[str, Any]:
        return _shown(*readings.add(request.state.tenant, asked.name, asked.text))

    @routes.get("")
    def listed(request: Request) -> dict[str, Any]:
        found = [(each, readings.known(each)) for each in library.all(request.state.tenant)]
        for _, reading in found:
            if reading is not None and reading.state != "ready":
                readings.look(reading)
        return {"object": "list", "data": [_shown(*each) for each in found]}

    @routes.get("/{id}")
    def one(id: str, request: Request) -> dict[str, Any]:  # noqa: A002
        document = found(request, id)
        reading = readings.of(document)
        stored = readings.look(reading)
        return _shown(document, reading) | {"pages": len(reading.keys), "pages_stored": stored}

    @routes.delete("/{id}")
    def remove(id: str, request: Request) -> dict[str, Any]:  # noqa: A002
        try:
            readings.remove(found(request, id))
        except NotErasedError as error:
            raise FaultError(503, f"the document was not deleted: {error}", code="not_erased") from error
        return {"id": id, "object": "document", "deleted": True}

    @routes.post("/{id}/ask")
    async def ask(id: str, asked: QuestionRequest, request: Request) -> Response:  # noqa: A002
        began = monotonic()
        document = found(request, id)
        reading = await run_in_threadpool(readings.of, document)
        question = await run_in_threadpool(reader.question, asked.question)
        await reading.ended()  # if the document is still being read, answering now would compute it twice
        found(request, id)  # raises an error if the document was deleted in the meantime
        tokens = (*reading.tokens, *question)
        prompt = Ask(
            prompt=tokens,
            max_tokens=asked.max_tokens or room(engine, len(tokens), ANSWER_TOKENS),
            sampling=asked.sampling(temperature=0.0),
            stop=asked.stops,
            salt=request.state.tenant.encode(),
        )
        shape = About(monotonic() - began)
        taken = partial(readings.asked, document, reading)
        return await respond(engine, prompt, shape, request.receive, stream=bool(asked.stream), taken=taken)

    return routes


def _shown(document: Document, reading: Reading | None) -> dict[str, Any]:
    """Return the JSON object that describes a document.

    ``tokens`` is null if the text has not been tokenized yet, which takes a moment after a restart.
    """
    shown: dict[str, Any] = {"id": document.id, "object": "document", "name": document.name}
    if reading is None:
        return shown | {"state": "waiting", "tokens": None, "tokens_read": 0, "error": None}
    return shown | {
        "state": reading.state,
        "tokens": len(reading.tokens),
        "tokens_read": reading.read,
        "error": reading.why,
    }
