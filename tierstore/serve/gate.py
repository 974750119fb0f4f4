"""What every request passes: who asks, how much it sends, and a line in the log. Nothing of what it says."""

from __future__ import annotations

import logging
from time import perf_counter

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tierstore.serve.errors import fault
from tierstore.serve.tenants import Tenants

log = logging.getLogger("tierstore.serve")

MAX_BODY = 16 << 20
"""Bytes. Four million tokens or so: more than models read."""


class Gate:
    """In front of an application: ``/v1`` is for tenants alone, and is told whose a request is (``state.tenant``).

    A key is looked at before a body is read.
    """

    def __init__(self, app: ASGIApp, tenants: Tenants, max_body: int = MAX_BODY) -> None:
        self._app, self._tenants, self._max_body = app, tenants, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = perf_counter(), 500

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._admit(scope, receive, sent)
        finally:
            # A path's line breaks would be lines of the log: it is shown as it was sent.
            path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")
            log.info("%s %s %d %.3f s", scope["method"], path, status, perf_counter() - began)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if scope["path"].startswith("/v1"):
            tenant = self._tenants.of(headers.get("authorization"))
            if tenant is None:
                refused = fault(
                    401,
                    "the key is missing or wrong; allowed: Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await refused(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body:
            await fault(413, self._too_large)(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    @property
    def _too_large(self) -> str:
        return f"the body is too large; allowed: {self._max_body} bytes"

    def _counted(self, receive: Receive) -> Receive:
        """A body that does not say how long it is may be no longer either."""
        got = 0

        async def counted() -> Message:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            if got > self._max_body:
                raise HTTPException(413, self._too_large)
            return message

        return counted


class Hosts:
    """In front of an application: only requests for these names pass; ``*`` is every name.

    starlette judges the name. What it answers to others is no JSON and does not say what is allowed: this does.
    """

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...]) -> None:
        self._app, self._hosts = app, tuple(dict.fromkeys(hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if await self._passes(scope, receive):
            await self._app(scope, receive, send)
            return
        host = Headers(scope=scope).get("host", "")
        why = f"Host: {host!r:.80} is not this server's; allowed: {', '.join(self._hosts)}"
        await fault(400, why, code="unknown_host")(scope, receive, send)

    async def _passes(self, scope: Scope, receive: Receive) -> bool:
        passed = False

        async def passes(*_: object) -> None:
            nonlocal passed
            passed = True

        async def nowhere(_: Message) -> None: ...

        await TrustedHostMiddleware(passes, list(self._hosts), www_redirect=False)(scope, receive, nowhere)
        return passed
