"""Tenants, and the checks that every request passes: key, size, host name, and one line in the log.

A file of tenants is YAML, ``tenants: {name: [SHA-256 of a key in hex, ...]}``; only digests of keys are kept. A
tenant's name is part of every key of its pages, so tenants share nothing. The log never contains the content of a
request.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from time import perf_counter
from typing import Any

import yaml
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tierstore.errors import ConfigError
from tierstore.serve.errors import fault

ALONE = ""
"""The only tenant of a server without keys."""

_ALLOWED = "tenants: {name: [the SHA-256 of a key, 64 hex digits, ...], ...}"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Tenants:
    """Tenants by their keys. Without keys, all clients are one tenant. Immutable and thread-safe."""

    def __init__(self, tenants: Mapping[str, list[str]] | None = None) -> None:
        """``tenants`` has the digests of keys by name; with None, no key is needed. Raises ConfigError."""
        self._names = {} if tenants is None else _names(tenants)
        self.open = tenants is None

    @classmethod
    def load(cls, file: Path) -> Tenants:
        """Load a file of tenants. ConfigError names what is wrong and never shows a digest."""
        try:
            tree = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
        except OSError as error:
            raise ConfigError(f"--keys {file}: cannot read the YAML file: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"--keys {file}: is not YAML, or repeats a key; expected {_ALLOWED}") from error
        found = tree.get("tenants") if isinstance(tree, dict) and len(tree) == 1 else None
        if not isinstance(found, dict) or not found:
            raise ConfigError(f"--keys {file}: no tenants; expected {_ALLOWED}")
        try:
            return cls(found)
        except ConfigError as error:
            raise ConfigError(f"--keys {file}: {error}") from error

    def of(self, authorization: str | None) -> str | None:
        """Return the tenant whose key an ``Authorization`` header carries, or None."""
        if self.open:
            return ALONE
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        given, found = sha256(key.strip().encode()).hexdigest(), None
        for digest, name in self._names.items():  # compares with every key, so that timing reveals nothing
            if compare_digest(digest, given):
                found = name
        return found


class _Loader(yaml.BaseLoader):
    """Keep every scalar as text, also a digest of digits only; refuse repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(names) > len(set(names)):
            raise yaml.MarkedYAMLError(problem="a key is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep=deep)


def _names(tenants: Mapping[str, list[str]]) -> dict[str, str]:
    """Return the tenants by the digest of a key."""
    names: dict[str, str] = {}
    for name, digests in tenants.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"the name of a tenant must be 1 to 64 of A-Z a-z 0-9 . _ -, got {name!r:.80}")
        if not isinstance(digests, list) or not digests:
            raise ConfigError(f"tenant {name} has no list of keys; expected {_ALLOWED}")
        for digest in digests:
            if not isinstance(digest, str) or not _DIGEST.fullmatch(digest.lower()):
                raise ConfigError(
                    f"tenant {name} has a key that is not a SHA-256 in hex; expected {_ALLOWED}"
                )
            if digest.lower() in names:
                raise ConfigError(f"tenant {name} has a key that {names[digest.lower()]} has as well")
            names[digest.lower()] = name
    return names


log = logging.getLogger("tierstore.serve")

MAX_BODY = 16 << 20
"""Most bytes of a request: about four million tokens, more than models can read."""


class Gate:
    """Middleware that lets only tenants use ``/v1`` and stores the tenant in ``request.state.tenant``.

    It checks the key before it reads the body.
    """

    def __init__(self, app: ASGIApp, tenants: Tenants, max_body: int = MAX_BODY) -> None:
        self._app, self._tenants, self._max_body = app, tenants, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
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
            # The raw path: decoded line breaks would forge lines of the log.
            path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")
            log.info("%s %s %d %.3f s", scope["method"], path, status, perf_counter() - began)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if scope["path"].startswith("/v1"):
            tenant = self._tenants.of(headers.get("authorization"))
            if tenant is None:
                refused = fault(
                    401,
                    "the key is missing or wrong: send Authorization: Bearer KEY",
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
        return f"the body must be at most {self._max_body} bytes"

    def _counted(self, receive: Receive) -> Receive:
        """Return a ``receive`` that limits a body without an announced length."""
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
    """Middleware that accepts only requests for these host names; ``*`` accepts any.

    Starlette's own middleware answers other requests without JSON and without the list of names.
    """

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...]) -> None:
        self._app, self._hosts = app, tuple(dict.fromkeys(hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if await self._passes(scope, receive):
            await self._app(scope, receive, send)
            return
        host = Headers(scope=scope).get("host", "")
        why = f"Host must be one of {', '.join(self._hosts)}, got {host!r:.80}"
        await fault(400, why, code="unknown_host")(scope, receive, send)

    async def _passes(self, scope: Scope, receive: Receive) -> bool:
        passed = False

        async def passes(*_: object) -> None:
            nonlocal passed
            passed = True

        async def nowhere(_: Message) -> None: ...

        await TrustedHostMiddleware(passes, list(self._hosts), www_redirect=False)(scope, receive, nowhere)
        return passed
