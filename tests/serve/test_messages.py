"""Tests of error messages for rejected requests: they name the field as the request does, and the allowed values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.serving import CHAT, COMPLETION, Serving, serving

USER = {"role": "user"}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving() as found:
        yield found


def error_of(server: Serving, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.http.post(path, json=body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize(
    ("field", "value", "param", "said"),
    [
        ("prompt", 5, "prompt", "a string, or a list of tokens"),
        ("prompt", [1, "a"], "prompt.1", "integer"),
        ("prompt", [], "prompt", "at least 1"),
        ("stop", 5, "stop", "a string, or a list of up to 4"),
        ("stop", ["a", "b", "c", "d", "e"], "stop", "at most 4"),
        ("stop", ["a", ""], "stop.1", "at least 1 character"),
        ("stop", "", "stop", "at least 1 character"),
    ],
)
def test_error_of_a_union_field_is_about_the_intended_type(
    server: Serving, field: str, value: object, param: str, said: str
) -> None:
    error = error_of(server, "/v1/completions", COMPLETION | {field: value})
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert said in error["message"]


@pytest.mark.parametrize(
    ("content", "param", "said"),
    [
        (5, "messages.0.content", 'a string, or a list of {"type": "text", "text": ...}'),
        ([{"type": "image_url"}], "messages.0.content.0.type", "'text'"),
        ([{"type": "text", "text": 5}], "messages.0.content.0.text", "string"),
    ],
)
def test_error_of_a_message_is_about_the_intended_type(
    server: Serving, content: object, param: str, said: str
) -> None:
    error = error_of(server, "/v1/chat/completions", CHAT | {"messages": [USER | {"content": content}]})
    assert error["param"] == param
    assert said in error["message"]


def test_empty_text_is_refused(server: Serving) -> None:
    error = error_of(server, "/v1/documents", {"name": "a", "text": ""})
    assert error["message"] == "text: String should have at least 1 character"


def test_error_of_an_unreadable_body_names_the_expected_format(server: Serving) -> None:
    kind = {"Content-Type": "application/json"}
    response = server.http.post("/v1/documents", content=b'{"name": "a", "text": "\xff"}', headers=kind)
    assert response.json()["error"]["message"] == "the body cannot be read: it must be JSON in UTF-8"


def test_missing_paths_methods_and_documents_are_named(server: Serving) -> None:
    def said(method: str, path: str) -> str:
        return str(server.http.request(method, path).json()["error"]["message"])

    assert said("GET", "/v1/nothing") == "path /v1/nothing does not exist on this server"
    assert said("GET", "/v1/completions") == "/v1/completions does not support GET, only POST"
    assert said("DELETE", "/v1/documents/abc") == "document abc does not exist"


def test_unknown_host_returns_an_openai_error() -> None:
    with serving(hosts=("localhost", "127.0.0.1", "localhost")) as server:
        for host in ("evil.example", "", "[x"):
            response = server.http.get("/v1/models", headers={"Host": host})
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["code"] == "unknown_host"
            assert error["message"] == f"Host must be one of localhost, 127.0.0.1, got {host!r}"
