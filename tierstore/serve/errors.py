"""Error responses in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from tierstore.errors import StoreClosed
from tierstore.serve.request import BusyError, RefusedError
from tierstore.serve.schemas import FORMS

AGAIN = {"Retry-After": "1"}
"""Header that asks the client to retry after one second."""
CLIENT_GONE = 499
"""Status in the access log for a request whose client disconnected. It is never sent to a client."""

_MOST_SHOWN = 1000
"""Maximum number of characters of an error message; longer messages are cut and end with "..."."""


class FaultError(Exception):
    """Raised by an endpoint to send an error response.

    ``status`` is the HTTP status, ``param`` is the name of the request field at fault, and ``code`` is a
    machine-readable error code.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class FailedError(Exception):
    """The engine failed a request before the client received any part of the answer."""


class ClosingError(FailedError):
    """The request failed because the engine is closing."""


class DeletedError(FailedError):
    """The question failed because its document was deleted."""


class GoneError(Exception):
    """The client disconnected before it received the whole answer."""


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, dict[str, str | None]]:
    """Return the JSON body of an error response. The field ``type`` is derived from the status.

    ``message`` and ``param`` may contain text from the request. Each is cut to 1,000 characters, and unpaired
    surrogates are replaced by question marks.
    """
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")
    kind = "server_error" if status >= 500 else kind
    shown = None if param is None else _shown(param)
    return {"error": {"message": _shown(message), "type": kind, "param": shown, "code": code}}


def _shown(text: str) -> str:
    cut = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
    return cut.encode(errors="replace").decode()


def fault(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Return an error response in OpenAI's format. See ``error_body`` for the arguments."""
    return JSONResponse(error_body(status, message, param, code), status, headers=dict(headers or {}))


def answer_faults(app: FastAPI) -> None:
    """Register handlers that convert every exception of an endpoint to an error response in OpenAI's format."""
    app.add_exception_handler(FaultError, _fault)
    app.add_exception_handler(RequestValidationError, _not_valid)
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(RefusedError, _refused)
    app.add_exception_handler(BusyError, _busy)
    app.add_exception_handler(FailedError, _failed)
    app.add_exception_handler(StoreClosed, _failed)
    app.add_exception_handler(OSError, _of_the_system)
    app.add_exception_handler(GoneError, _gone)
    app.add_exception_handler(Exception, _unexpected)


async def _fault(_: Request, error: Exception) -> Response:
    assert isinstance(error, FaultError)
    return fault(error.status, str(error), param=error.param, code=error.code)


async def _not_valid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param, message = _explained(first)
    return fault(400, message, param=param, code="unknown_parameter" if _is_unknown(first) else None)


def _explained(detail: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return (field, message): the dotted name of the invalid field, or None for the whole body, and an error message.

    The message does not quote the invalid value, because it may be a prompt.
    """
    context = detail.get("ctx", {})
    path = [str(part) for part in detail["loc"][1:] if part not in FORMS]
    match detail["type"]:
        case "json_invalid":
            return None, f"the body is not valid JSON: {context.get('error', '')}"
        case "missing" if not path:
            return None, "the request has no body: send a JSON object with Content-Type: application/json"
        case "model_attributes_type" | "dict_type" if not path:
            return None, "the body must be a JSON object with Content-Type: application/json"
        case "refused":
            path.append(context["field"])
    field = ".".join(path)
    if _is_unknown(detail):
        return field, f"{field}: unknown field"
    return field, f"{field}: {detail['msg']}"


def _is_unknown(detail: Mapping[str, Any]) -> bool:
    return bool(detail["type"] == "extra_forbidden")


async def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, allowed = request.scope["path"], (error.headers or {}).get("Allow", "")
    said = {
        400: "the body cannot be read: it must be JSON in UTF-8",
        404: f"path {path} does not exist on this server",
        405: f"{path} does not support {request.method}, only {allowed}",
    }
    return fault(error.status_code, said.get(error.status_code, str(error.detail)), headers=error.headers)


async def _refused(_: Request, error: Exception) -> Response:
    return fault(400, str(error))


async def _busy(_: Request, error: Exception) -> Response:
    return fault(429, str(error), code="rate_limit_exceeded", headers=AGAIN)


async def _failed(_: Request, error: Exception) -> Response:
    if isinstance(error, ClosingError | StoreClosed):
        return fault(503, str(error), headers=AGAIN)
    if isinstance(error, DeletedError):
        return fault(404, str(error), param="id", code="document_not_found")
    return fault(500, str(error))


async def _of_the_system(_: Request, error: Exception) -> Response:
    assert isinstance(error, OSError)
    return fault(500, f"the document cannot be stored or removed: {error.strerror}")


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _unexpected(_: Request, __: Exception) -> Response:
    return fault(500, "the server failed unexpectedly; its log contains the error")
