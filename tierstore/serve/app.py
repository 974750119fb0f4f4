"""The server's application, and the process's way to run it."""

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
"""Hosts that a browser on this machine may name: a page from elsewhere cannot have its own name mean this server."""
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_GRACE_S = 5
"""Seconds that a client has to take the end of its answer, when the server ends."""


def make_app(
    reader: Reader,
    engine: Engine,
    store: TierStore,
    library: Library,
    tenants: Tenants,
    *,
    hosts: tuple[str, ...] = ("*",),
) -> FastAPI:
    """Over an engine that runs. ``hosts``: names that requests may be for. Closes nothing but what it started."""
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
    app.add_middleware(Gate, tenants=tenants)  # the last one is the first that a request passes
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
        store.stats()  # what is measured when it is asked for
        return PlainTextResponse(store.metrics.text() + engine.figures.text(), media_type=_PROMETHEUS)


def _policy(page: str) -> str:
    """The page's own script and style, by digest, and requests to this server: nothing else runs or loads."""

    def digest(tag: str) -> str:
        inside = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert inside is not None
        return f"'sha256-{b64encode(sha256(inside[1].encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {digest('script')}; style-src {digest('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class Server(uvicorn.Server):
    """One process's server. Told to end, it ends the engine first: answers under way end with an error, and soon."""

    def __init__(self, app: FastAPI, engine: Engine, listening: Callable[[], None]) -> None:
        """``listening`` is called once, when requests are taken."""
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
        """uvicorn's, and the word that it is done."""
        await super().startup(sockets)
        if self.started:
            self._listening()

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """The engine's end, then uvicorn's. Told a second time it waits for no client, but ends as cleanly."""
        await run_in_threadpool(self._engine.close)
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn would leave the application to be torn down, with a traceback
            await self.lifespan.shutdown()
