"""The server's application, and the process that runs it."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from importlib.resources import files
from socket import socket
from threading import Thread

import uvicorn
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.concurrency import run_in_threadpool

from tierstore.serve.auth import Gate, Hosts, Tenants
from tierstore.serve.documents import Library, Readings
from tierstore.serve.engine import Engine
from tierstore.serve.errors import answer_faults
from tierstore.serve.model import Reader
from tierstore.serve.routes import completion_routes, document_routes
from tierstore.store import TierStore

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
"""Host names that a browser on this machine may use. A web page's own name that points here is refused."""
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_GRACE_S = 5
"""Seconds that clients have to read the end of their answers when the server ends."""


def make_app(
    reader: Reader,
    engine: Engine,
    store: TierStore,
    library: Library,
    tenants: Tenants,
    *,
    hosts: tuple[str, ...] = ("*",),
) -> FastAPI:
    """Build the application over an engine that runs.

    Args:
        hosts: Host names that requests may address; ``*`` for any.

    Closes nothing but what it started itself.
    """
    readings = Readings(library, reader, engine, store)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        thread = Thread(target=readings.recall, name="tierstore-recall", daemon=True)
        thread.start()
        yield
        readings.close()
        await run_in_threadpool(thread.join)

    app = FastAPI(title="TierStore", lifespan=life, docs_url=None, redoc_url=None)
    app.add_middleware(Hosts, hosts=hosts)
    app.add_middleware(Gate, tenants=tenants)  # the middleware added last sees a request first
    answer_faults(app)
    app.include_router(completion_routes(reader, engine))
    app.include_router(document_routes(reader, engine, library, readings))
    _add_own_routes(app, engine, store)
    return app


def _add_own_routes(app: FastAPI, engine: Engine, store: TierStore) -> None:
    page = files("tierstore.serve").joinpath("page.html").read_text(encoding="utf-8")
    policy = {"Content-Security-Policy": _policy(page), "X-Content-Type-Options": "nosniff"}

    @app.get("/", include_in_schema=False)
    async def index() -> HTMLResponse:
        return HTMLResponse(page, headers=policy | {"Referrer-Policy": "no-referrer"})

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        return JSONResponse({"ready": engine.ready}, 200 if engine.ready else 503)

    @app.get("/metrics")
    def metrics() -> PlainTextResponse:
        store.stats()  # also updates what is measured on demand
        return PlainTextResponse(store.metrics.text() + engine.figures.text(), media_type=_PROMETHEUS)


def _policy(page: str) -> str:
    """Allow only the page's own script and style, by digest, and requests to this server."""

    def digest(tag: str) -> str:
        inside = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert inside is not None
        return f"'sha256-{b64encode(sha256(inside[1].encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {digest('script')}; style-src {digest('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class Server(uvicorn.Server):
    """The server of one process.

    When told to end, it closes the engine first, so that running answers end with an error.
    """

    def __init__(self, app: FastAPI, engine: Engine, listening: Callable[[], None]) -> None:
        """``listening`` is called once, when the server accepts requests."""
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._engine, self._listening = engine, listening

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Start uvicorn and call ``listening``."""
        await super().startup(sockets)
        if self.started:
            self._listening()

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Close the engine, then uvicorn. A second request to end waits for no client, but ends as cleanly."""
        await run_in_threadpool(self._engine.close)
        await super().shutdown(sockets)
        if self.force_exit:  # otherwise uvicorn would tear the application down with a traceback
            await self.lifespan.shutdown()
