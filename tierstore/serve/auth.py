"""Which tenants may ask, and the gate that every request passes: key, size, host name and a line in the log.

A file of tenants is YAML, ``tenants: {name: [SHA-256 of a key in hex, ...]}``; of the keys only digests are kept. A
tenant's name is part of every key of its pages, so tenants share nothing. The log never holds what a request says.
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
"""The one tenant of a server without keys."""

_ALLOWED = "tenants: {name: [the SHA-256 of a key, 64 hex digits, ...], ...}"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Tenants:
    """Immutable; any thread. Without tenants, everybody is one."""

    def __init__(self, tenants: Mapping[str, list[str]] | None = None) -> None:
        """``tenants``: digests of keys by name; None: no keys are asked for. ConfigError for what is not such."""
        self._names = {} if tenants is None else _names(tenants)
        self.open = tenants is None

    @classmethod
    def load(cls, file: Path) -> Tenants:
        """Those of a file. ConfigError names what is wrong, and never shows a digest."""
        try:
            tree = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
        except OSError as error:
            raise ConfigError(f"--keys {file}: {error.strerror}; allowed: a readable YAML file") from error
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(
                f"--keys {file}: is not YAML with each key once; allowed: {_ALLOWED}"
            ) from error
        found = tree.get("tenants") if isinstance(tree, dict) and len(tree) == 1 else None
        if not isinstance(found, dict) or not found:
            raise ConfigError(f"--keys {file}: names no tenants; allowed: {_ALLOWED}")
        try:
            return cls(found)
        except ConfigError as error:
            raise ConfigError(f"--keys {file}: {error}") from error

    def of(self, authorization: str | None) -> str | None:
        """The tenant whose key an ``Authorization`` header bears; None: nobody's."""
        if self.open:
            return ALONE
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        given, found = sha256(key.strip().encode()).hexdigest(), None
        for digest, name in self._names.items():  # all of them: time tells nothing of which it was
            if compare_digest(digest, given):
                found = name
        return found


class _Loader(yaml.BaseLoader):
    """Every scalar stays text, a digest of nothing but digits too; no key comes twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(names) > len(set(names)):
            raise yaml.MarkedYAMLError(problem="a key is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep=deep)


def _names(tenants: Mapping[str, list[str]]) -> dict[str, str]:
    """Tenants by the digest of a key."""
    names: dict[str, str] = {}
    for name, digests in tenants.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r:.80} is no tenant's name; allowed: 1 to 64 of A-Z a-z 0-9 . _ -")
        if not isinstance(digests, list) or not digests:
            raise ConfigError(f"tenant {name} has no list of keys; allowed: {_ALLOWED}")
        for digest in digests:
            if not isinstance(digest, str) or not _DIGEST.fullmatch(digest.lower()):
                raise ConfigError(f"tenant {name} has what is no SHA-256 in hex; allowed: {_ALLOWED}")
            if digest.lower() in names:
                raise ConfigError(
                    f"tenant {name} has a key that {names[digest.lower()]} has; allowed: each once"
                )
            names[digest.lower()] = name
    return names


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
