"""Tenants, the checks that every request must pass (key, body size, host name), and the access log.

A tenants file is YAML: ``tenants: {name: [SHA-256 of a key in hex, ...]}``. The file contains digests, not the keys
themselves. Each page key includes the name of the tenant, so tenants never share pages. The access log never
contains the body of a request.
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
from tierstore.types import exact_size

ALONE = ""
"""Name of the only tenant of a server that requires no keys."""

_ALLOWED = "tenants: {name: [the SHA-256 of a key, 64 hex digits, ...], ...}"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Tenants:
    """The tenants and the digests of their keys. Immutable and thread-safe.

    If the server requires no keys, all clients belong to the tenant ``ALONE``.
    """

    def __init__(self, tenants: Mapping[str, list[str]] | None = None) -> None:
        """Check the names and the digests of the tenants.

        Args:
            tenants: For each tenant's name, the SHA-256 digests of its keys in hex. None if clients need no keys.

        Raises:
            ConfigError: A name or a digest is invalid, or a digest occurs twice.
        """
        self._names = {} if tenants is None else _names(tenants)
        self.open = tenants is None

    @classmethod
    def load(cls, file: Path) -> Tenants:
        """Load the tenants from a YAML file.

        Raises:
            ConfigError: The file cannot be read or is invalid. The message never contains a digest.
        """
        try:
            tree = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
        except OSError as error:
            raise ConfigError(f"--keys {file}: cannot read the YAML file: {error.strerror}") from error
        except _RepeatedNameError as error:
            raise ConfigError(f"--keys {file} must use each name only once; expected {_ALLOWED}") from error
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"--keys {file} must be valid YAML; expected {_ALLOWED}") from error
        found = tree.get("tenants") if isinstance(tree, dict) and len(tree) == 1 else None
        if not isinstance(found, dict) or not found:
            raise ConfigError(
                f"--keys {file} must list at least one tenant and nothing else; expected {_ALLOWED}"
            )
        try:
            return cls(found)
        except ConfigError as error:
            raise ConfigError(f"--keys {file}: {error}") from error

    def of(self, authorization: str | None) -> str | None:
        """Return the name of the tenant whose key an ``Authorization`` header contains.

        Return None if the header is missing, is not of the form ``Bearer KEY``, or has an unknown key.
        """
        if self.open:
            return ALONE
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        given, found = sha256(key.strip().encode()).hexdigest(), None
        for digest, name in self._names.items():  # checks all digests, so that the time reveals nothing
            if compare_digest(digest, given):
                found = name
        return found


class _RepeatedNameError(yaml.YAMLError):
    pass


class _Loader(yaml.BaseLoader):
    """A YAML loader that reads every scalar as a string, and rejects mappings with repeated keys.

    A digest that consists of decimal digits is therefore not read as an integer.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(names) > len(set(names)):
            raise _RepeatedNameError
        return super().construct_mapping(node, deep=deep)


def _names(tenants: Mapping[str, list[str]]) -> dict[str, str]:
    """Return a dict from the digest of each key, in lower case, to the name of the key's tenant.

    Raises ConfigError if a name or a digest is invalid, or if a digest occurs twice.
    """
    names: dict[str, str] = {}
    for name, digests in tenants.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                f"the name of a tenant must have 1 to 64 characters (A-Z, a-z, 0-9, '.', '_' or '-') and start with a "
                f"letter or digit, got {name!r:.80}"
            )
        if not isinstance(digests, list) or not digests:
            raise ConfigError(f"tenant {name} must have a list of keys; expected {_ALLOWED}")
        for digest in digests:
            if not isinstance(digest, str) or not _DIGEST.fullmatch(digest.lower()):
                raise ConfigError(
                    f"every key of tenant {name} must be a SHA-256 digest in hex; expected {_ALLOWED}"
                )
            if digest.lower() in names:
                raise ConfigError(
                    f"tenant {name} has a key that tenant {names[digest.lower()]} also has; "
                    "each key must occur only once"
                )
            names[digest.lower()] = name
    return names


log = logging.getLogger("tierstore.serve")

MAX_BODY = 16 << 20
"""Maximum size of a request body in bytes. 16 MiB of text are about four million tokens."""


class Gate:
    """Middleware that checks the key and the body size of each request and writes the access log.

    Requests to ``/v1`` need the key of a tenant. The key is checked before the body is read, and the tenant's name
    is stored in ``request.state.tenant``. If the body has more than ``max_body`` bytes, the request is rejected with
    status 413.
    """

    def __init__(self, app: ASGIApp, tenants: Tenants, max_body: int = MAX_BODY) -> None:
        self._app, self._tenants, self._max_body = app, tenants, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, and log its method, path, status and duration."""
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
            # Log the raw path. A decoded path may contain line breaks, which would let a client forge log lines.
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
        return f"the body must be at most {exact_size(self._max_body)}"

    def _counted(self, receive: Receive) -> Receive:
        """Wrap ``receive`` to raise HTTPException 413 once the body exceeds the limit.

        This also limits bodies that have no Content-Length header.
        """
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
    """Middleware that accepts only requests whose Host header is one of ``hosts``. ``*`` accepts any value.

    Unlike Starlette's ``TrustedHostMiddleware``, it sends an error response that is JSON and lists the accepted
    names.
    """

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...]) -> None:
        self._app, self._hosts = app, tuple(dict.fromkeys(hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or reject it with status 400."""
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
