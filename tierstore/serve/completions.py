"""OpenAI's endpoints: models, completions, chat completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from tierstore.serve.engine import Engine
from tierstore.serve.errors import FaultError
from tierstore.serve.model import Reader
from tierstore.serve.request import Ask
from tierstore.serve.schemas import ChatRequest, Completing, CompletionRequest
from tierstore.serve.stream import Chat, Completion, respond, room

COMPLETION_TOKENS = 16
"""Of a completion that asks for no number, as OpenAI has it; fewer where the model or HBM has no room for them."""
CHAT_TOKENS = 1024
"""Of a chat's answer, likewise."""


def completion_routes(reader: Reader, engine: Engine) -> APIRouter:
    """Under ``/v1``. Requests carry their tenant in ``request.state.tenant``."""
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
            f"there is no model {name[:100]}; allowed: {reader.name}",
            param="model",
            code="model_not_found",
        )


def _model(reader: Reader) -> dict[str, Any]:
    return {"id": reader.name, "object": "model", "created": 0, "owned_by": "tierstore"}
