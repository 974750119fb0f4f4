"""Tests of what all requests have in common: keys, limits and log lines, disconnects, errors and shutdown."""

from __future__ import annotations

import json
import logging
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from hashlib import sha256
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx2 as httpx
import pytest

from tests.serve.serving import CHAT, COMPLETION, Serving, events, serving
from tests.serve.small import reader, standing_at
from tests.support.pages import PATIENCE_S
from tierstore.errors import ConfigError
from tierstore.serve.auth import MAX_BODY, Tenants
from tierstore.serve.engine import Engine
from tierstore.serve.request import Ask

ANNE, BOB = "anne's key", "bob's key"
TENANTS = {"anne": [sha256(ANNE.encode()).hexdigest()], "bob": [sha256(BOB.encode()).hexdigest().upper()]}
LONG = COMPLETION | {"max_tokens": 400, "stream": True}
MIDDLE = 200
"""A forward pass in the middle of a long answer, counted from 0."""


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def figure(server: Serving, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"tierstore_serve_{name} ")))


def outcome(server: Serving, name: str) -> float:
    return figure(server, f'requests_total{{outcome="{name}"}}')


def test_without_a_key_only_health_and_metrics_are_served() -> None:
    with serving(Tenants(TENANTS)) as server:
        for headers in (
            {},
            bearer("wrong"),
            {"Authorization": "Bearer"},
            {"Authorization": f"Basic {ANNE}"},
            bearer("ä"),
        ):
            raw = [(name.encode(), value.encode()) for name, value in headers.items()]
            for path in ("/v1/models", "/v1/documents", "/v1/nothing"):
                response = server.http.get(path, headers=raw)
                assert response.status_code == 401
                assert response.headers["www-authenticate"] == "Bearer"
                assert response.json()["error"]["code"] == "invalid_api_key"
        assert server.http.post("/v1/completions", json=COMPLETION).status_code == 401
        for path in ("/health", "/metrics", "/"):
            assert server.http.get(path).status_code == 200
        for key in (ANNE, BOB):
            assert server.http.get("/v1/models", headers=bearer(key)).status_code == 200


def test_tenants_share_no_page_and_no_document() -> None:
    with serving(Tenants(TENANTS)) as server:
        asked = COMPLETION | {"prompt": "A secret that both happen to know. " * 3}

        def cached(key: str) -> int:
            found = server.http.post("/v1/completions", json=asked, headers=bearer(key)).json()
            return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached(ANNE) == 0
        assert cached(BOB) == 0
        assert cached(ANNE) > 0
        text = {"name": "diary", "text": "Dear diary, nobody reads you. " * 3}
        id = server.http.post("/v1/documents", json=text, headers=bearer(ANNE)).json()["id"]  # noqa: A001
        bobs = server.http.post("/v1/documents", json=text, headers=bearer(BOB)).json()["id"]
        assert bobs != id
        assert server.http.get(f"/v1/documents/{id}", headers=bearer(BOB)).status_code == 404
        assert server.http.delete(f"/v1/documents/{id}", headers=bearer(BOB)).status_code == 404
        question = {"question": "What?", "max_tokens": 2}
        path = f"/v1/documents/{id}/ask"
        assert server.http.post(path, json=question, headers=bearer(BOB)).status_code == 404
        assert server.http.post(path, json=question, headers=bearer(ANNE)).status_code == 200
        listed = server.http.get("/v1/documents", headers=bearer(BOB)).json()["data"]
        assert [each["id"] for each in listed] == [bobs]
        told = server.http.get("/metrics").text
        assert "anne" not in told
        assert "bob" not in told


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tenants: {a: [" + "0" * 64 + "]}", None),
        ("tenants: {a: [" + "f" * 63 + "]}", "SHA-256"),
        ("tenants: {a: []}", "must have a list"),
        ("tenants: {}", "must list at least one tenant and nothing else"),
        ("- a", "must list at least one tenant and nothing else"),
        ("tenants: {a b: [" + "0" * 64 + "]}", "name"),
        ("tenants: {a: [" + "0" * 64 + "], b: [" + "0" * 64 + "]}", "also has"),
        ("tenants: {a: [" + "0" * 64 + "], a: [" + "1" * 64 + "]}", "use each name only once"),
        ("tenants: {a: [", "must be valid YAML"),
        ("tenants: {a: [" + "0" * 64 + "]}\nmore: 1", "must list at least one tenant and nothing else"),
    ],
)
def test_a_file_of_tenants_is_checked(tmp_path: Path, text: str, said: str | None) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    if said is None:
        assert not Tenants.load(file).open
        return
    with pytest.raises(ConfigError, match=said) as error:
        Tenants.load(file)
    assert str(file) in str(error.value)
    assert "0" * 64 not in str(error.value)


def test_body_beyond_the_limit_is_refused_with_or_without_content_length() -> None:
    with serving() as server:
        kind = {"Content-Type": "application/json"}

        def parts() -> Iterator[bytes]:
            for _ in range(MAX_BODY >> 20):
                yield b" " * (1 << 20)
            yield b" "

        response = server.http.post("/v1/completions", content=parts(), headers=kind)
        assert response.status_code == 413
        assert f"{MAX_BODY:,}" in response.json()["error"]["message"]
        bare = HTTPConnection(server.http.base_url.host, server.http.base_url.port, timeout=PATIENCE_S)
        with closing(bare):
            bare.putrequest("POST", "/v1/completions")
            bare.putheader("Content-Length", str(MAX_BODY + 1))
            bare.endheaders()  # the server answers before any byte of the body is sent
            assert bare.getresponse().status == 413
        assert server.http.post("/v1/completions", json=COMPLETION).status_code == 200


def test_unknown_host_header_is_refused() -> None:
    with serving(hosts=("localhost", "127.0.0.1")) as server:
        assert server.http.get("/v1/models").status_code == 200
        assert server.http.get("/v1/models", headers={"Host": "localhost:1"}).status_code == 200
        assert server.http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 400


def test_request_is_logged_in_one_line_without_its_prompt(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tierstore.serve")
    with serving() as server:
        server.http.post("/v1/completions", json=COMPLETION | {"prompt": "unspeakable"})
        server.http.get("/v1/a%0Ab")
    asked, strange = [m for m in caplog.messages if "/v1/" in m]
    assert asked.startswith("POST /v1/completions 200 ")
    assert strange.startswith("GET /v1/a%0Ab 404 ")
    assert "unspeakable" not in caplog.text


def is_cancelled(server: Serving) -> bool:
    """Return whether the only running request is marked as cancelled."""
    return server.engine._active[0][0].cancelled.is_set()


def test_a_stream_whose_client_disconnects_is_cancelled() -> None:
    with serving() as server, standing_at(MIDDLE, reader(chats=True).model) as model:
        with server.http.stream("POST", "/v1/completions", json=LONG) as response:
            lines = response.iter_lines()  # a reference that keeps the connection open
            next(lines)
            model.wait()
        until(lambda: is_cancelled(server))
        model.go_on.set()
        until(lambda: outcome(server, "cancelled") == 1)
        assert figure(server, "active") == 0


def test_an_answer_whose_client_disconnects_is_cancelled() -> None:
    with serving() as server, standing_at(MIDDLE, reader(chats=True).model) as model:
        bare = HTTPConnection(server.http.base_url.host, server.http.base_url.port, timeout=PATIENCE_S)
        with closing(bare):
            asked = json.dumps(LONG | {"stream": False})
            bare.request("POST", "/v1/completions", asked, {"Content-Type": "application/json"})
            model.wait()
        until(lambda: is_cancelled(server))
        model.go_on.set()
        until(lambda: outcome(server, "cancelled") == 1)


@contextmanager
def held(engine: Engine) -> Iterator[Callable[[], None]]:
    """Stop the engine in the middle of a step, until the ``with`` block ends or calls the yielded function."""
    stands, go = Event(), Event()

    def stand_still(_: object) -> None:
        stands.set()
        go.wait(PATIENCE_S)

    engine.submit(Ask(prompt=(1, 2, 3), max_tokens=1), stand_still)
    assert stands.wait(PATIENCE_S)
    try:
        yield go.set
    finally:
        go.set()


@contextmanager
def posted(server: Serving, body: dict[str, Any]) -> Iterator[list[httpx.Response]]:
    """Request a completion in a thread while the block runs. After it, the yielded list contains the response."""
    got: list[httpx.Response] = []

    def post() -> None:
        with httpx.Client(base_url=server.http.base_url, trust_env=False, timeout=PATIENCE_S) as client:
            got.append(client.post("/v1/completions", json=body))

    thread = Thread(target=post)
    thread.start()
    try:
        yield got
    finally:
        thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_request_beyond_the_limit_gets_a_retry_after() -> None:
    with serving(max_active=1, max_waiting=1) as server:
        with held(server.engine) as let_go, posted(server, COMPLETION) as waiting:
            until(lambda: figure(server, "waiting") == 1)
            response = server.http.post("/v1/chat/completions", json=CHAT)
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["type"] == "rate_limit_error"
            let_go()
        assert waiting[0].status_code == 200


def test_at_shutdown_streams_end_with_an_error_and_waiting_requests_get_503() -> None:
    with serving(max_active=2) as server, ExitStack() as stack:
        model = stack.enter_context(standing_at(MIDDLE, reader(chats=True).model))
        stream = stack.enter_context(server.http.stream("POST", "/v1/completions", json=LONG))
        lines = stream.iter_lines()
        next(lines)
        model.wait()
        with posted(server, COMPLETION) as waiting:
            until(lambda: figure(server, "waiting") == 1)
            server.server.should_exit = True
            until(lambda: not server.engine.ready)
            model.go_on.set()
            rest = [line for line in lines if line]
    assert '"error"' in rest[-1]
    assert "closing" in rest[-1]
    assert not any("[DONE]" in line for line in rest)
    assert waiting[0].status_code == 503
    assert waiting[0].json()["error"]["type"] == "server_error"


def test_a_server_whose_engine_is_closed_is_not_ready() -> None:
    with serving() as server:
        assert server.http.get("/health").json() == {"ready": True}
        assert server.http.head("/health").status_code == 200
        server.engine.close()
        response = server.http.get("/health")
        assert response.status_code == 503
        assert response.json() == {"ready": False}
        assert server.http.post("/v1/completions", json=COMPLETION).status_code == 503


@contextmanager
def failing_at(forward: int) -> Iterator[None]:
    """Within the block, make the model fail in this forward pass, counted from 0."""
    passes = count()

    def fail(*_: object) -> None:
        if next(passes) == forward:
            raise RuntimeError("the card fell off the bus")

    hook = reader(chats=True).model.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def test_an_error_before_the_first_piece_is_status_500_and_a_later_one_an_error_event() -> None:
    with serving() as server:
        with failing_at(0):
            response = server.http.post("/v1/completions", json=LONG | {"prompt": "first"})
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        with failing_at(MIDDLE):
            response = server.http.post("/v1/completions", json=LONG | {"prompt": "second"})
        assert response.status_code == 200
        found = [data for _, data in events(response)]
        assert "choices" in found[0]
        assert "fell off" in found[-1]["error"]["message"]
        with failing_at(MIDDLE):
            response = server.http.post("/v1/completions", json=LONG | {"prompt": "third", "stream": False})
        assert response.status_code == 500
        document = {"name": "a", "text": "Nothing of this will be read."}
        with failing_at(0):
            id = server.http.post("/v1/documents", json=document).json()["id"]  # noqa: A001
            until(lambda: server.http.get(f"/v1/documents/{id}").json()["state"] == "failed")
        assert "fell off" in server.http.get(f"/v1/documents/{id}").json()["error"]
        assert server.http.post("/v1/documents", json=document).status_code == 202
        until(lambda: server.http.get(f"/v1/documents/{id}").json()["state"] == "ready")


def test_metrics_include_those_of_the_store_and_the_engine() -> None:
    with serving() as server:
        server.http.post("/v1/completions", json=COMPLETION)
        response = server.http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert outcome(server, "done") == 1
        assert 'tierstore_pages{state="resident",tier="HBM"}' in response.text


def test_the_page_runs_only_its_own_script_and_contacts_no_other_server() -> None:
    with serving() as server:
        response = server.http.get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    for tag in ("script", "style"):
        inside = response.text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        digest = b64encode(sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    page = response.text
    for word in ("innerHTML", "http://", "https://", " style=", "onclick=", "eval("):
        assert word not in page
    assert page.count("<script>") == page.count("<style>") == 1


def test_without_a_chat_template_a_chat_is_refused() -> None:
    with serving(chats=False) as server:
        response = server.http.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 400
        assert "template" in response.json()["error"]["message"]
        assert (
            events(server.http.post("/v1/completions", json=COMPLETION | {"stream": True}))[-1][1] == "[DONE]"
        )
