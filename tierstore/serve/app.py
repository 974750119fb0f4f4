"""The ASGI application of the HTTP server, and the uvicorn server that runs it."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from importlib.resources import files
from socket import socket

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
from tierstore.threads import Worker

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
"""Host names under which a browser on this machine reaches the server.

Requests with any other Host header are rejected. Otherwise, a website could make its domain name resolve to this
machine, so that its scripts could use the server (DNS rebinding).
"""
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_GRACE_S = 5
"""Time in seconds for which clients can still receive the end of their answers at shutdown."""


def make_app(
    reader: Reader,
    engine: Engine,
    store: TierStore,
    library: Library,
    tenants: Tenants,
    *,
    hosts: tuple[str, ...] = ("*",),
) -> FastAPI:
    """Create the application for a running engine.

    At startup, the application starts a thread that looks up which documents are in the store. At shutdown, it
    stops this thread; the caller closes the engine and the store.

    Args:
        reader: The model and its tokenizer.
        engine: The engine, already running.
        store: The store that the engine uses.
        library: The documents of all tenants.
        tenants: The tenants that may use the server, with the digests of their keys.
        hosts: Accepted values of the Host header, without the port. ``*`` accepts any value.
    """
    readings = Readings(library, reader, engine, store)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        thread = Worker(readings.recall, name="tierstore-recall")
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
        store.stats()  # updates the metrics that are measured only on demand
        return PlainTextResponse(store.metrics.text() + engine.figures.text(), media_type=_PROMETHEUS)


def _policy(page: str) -> str:
    """Return the value of the Content-Security-Policy header for the page.

    The policy allows the page's own script and style, by digest, and requests to this server only.
    """

    def digest(tag: str) -> str:
        inside = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert inside is not None
        return f"'sha256-{b64encode(sha256(inside[1].encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {digest('script')}; style-src {digest('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class Server(uvicorn.Server):
    """The uvicorn server.

    At shutdown, it closes the engine first, so that answers in progress end with an error message.
    """

    def __init__(self, app: FastAPI, engine: Engine, listening: Callable[[], None]) -> None:
        """Configure the server.

        Args:
            app: The application.
            engine: The engine, which the server closes at shutdown.
            listening: Called once, as soon as the server accepts connections.
        """
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
        """Start uvicorn, and call ``listening`` if that succeeded."""
        await super().startup(sockets)
        if self.started:
            self._listening()

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Close the engine, then shut down uvicorn.

        After a second Ctrl+C, uvicorn does not wait for clients. The application is still shut down cleanly.
        """
        await run_in_threadpool(self._engine.close)
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn then skips this step, and the application would end with a traceback
            await self.lifespan.shutdown()
