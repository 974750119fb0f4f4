"""Tests of the OpenAI endpoints: shapes of responses, streams, and rejected requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from tests.serve.serving import CHAT, COMPLETION, Serving, events, serving
from tests.serve.small import ids_of

LONG = "It was a dark and stormy night, and the rain fell. " * 4


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving() as found:
        yield found


def complete(server: Serving, **more: Any) -> httpx.Response:
    return server.http.post("/v1/completions", json=COMPLETION | more)


def chat(server: Serving, **more: Any) -> httpx.Response:
    return server.http.post("/v1/chat/completions", json=CHAT | more)


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_the_model_is_listed(server: Serving) -> None:
    assert [model["id"] for model in server.http.get("/v1/models").json()["data"]] == ["tiny"]
    assert server.http.get("/v1/models/tiny").json()["object"] == "model"
    assert error_of(server.http.get("/v1/models/other"), 404)["code"] == "model_not_found"


def test_completion_has_the_openai_format(server: Serving) -> None:
    found = complete(server).json()
    assert found["object"] == "text_completion"
    assert found["model"] == "tiny"
    assert found["id"].startswith("cmpl-")
    (choice,) = found["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
    assert choice["finish_reason"] == "length"
    assert found["usage"]["prompt_tokens"] == len(COMPLETION["prompt"])  # type: ignore[arg-type]
    assert found["usage"]["completion_tokens"] == 6
    assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] + 6


def test_chat_has_the_openai_format(server: Serving) -> None:
    found = chat(server).json()
    assert found["object"] == "chat.completion"
    assert found["id"].startswith("chatcmpl-")
    (choice,) = found["choices"]
    assert choice["message"]["role"] == "assistant"
    assert isinstance(choice["message"]["content"], str)
    assert choice["finish_reason"] == "length"


def test_a_prompt_may_be_its_tokens(server: Serving) -> None:
    prompt = COMPLETION["prompt"]
    forms = (prompt, [prompt], ids_of(str(prompt)), [ids_of(str(prompt))])
    texts = [complete(server, prompt=form).json()["choices"][0]["text"] for form in forms]
    assert len(set(texts)) == 1


def test_text_parts_are_joined_and_developer_messages_are_system_messages(server: Serving) -> None:
    parts = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    plain = [{"role": "system", "content": "Be\nbrief."}, *CHAT["messages"]]  # type: ignore[misc]
    given = [{"role": "developer", "content": parts}, *CHAT["messages"]]  # type: ignore[misc]
    one, other = (chat(server, messages=m, temperature=0).json() for m in (plain, given))
    assert one["choices"] == other["choices"]
    assert one["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]


def test_repeated_prompt_is_mostly_cached(server: Serving) -> None:
    prompt = f"Twice: {LONG}"
    first, second = (complete(server, prompt=prompt).json() for _ in range(2))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompt) - 9
    assert first["choices"] == second["choices"]


def test_streamed_completion_equals_the_whole_one(server: Serving) -> None:
    whole = complete(server).json()
    response = complete(server, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, (_, mark) = events(response)
    assert mark == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for _, chunk in chunks) == whole["choices"][0]["text"]
    assert chunks[-1][1]["choices"][0]["finish_reason"] == "length"
    assert len({chunk["id"] for _, chunk in chunks}) == 1
    assert not any("usage" in chunk for _, chunk in chunks)


def test_a_streamed_chat_begins_with_its_role_and_ends_with_its_usage_if_asked(server: Serving) -> None:
    whole = chat(server).json()
    response = chat(server, stream=True, stream_options={"include_usage": True})
    *chunks, (_, last), (_, mark) = events(response)
    assert mark == "[DONE]"
    assert chunks[0][1]["object"] == "chat.completion.chunk"
    assert chunks[0][1]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for _, chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert all(chunk["usage"] is None for _, chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_seed_fixes_the_answer_and_a_stop_string_ends_it(server: Serving) -> None:
    more = {"temperature": 1.5, "max_tokens": 24}
    one, again, other = (complete(server, seed=s, **more).json()["choices"][0] for s in (1, 1, 2))
    assert one["text"] == again["text"] != other["text"]
    letter = next(c for c in one["text"][1:] if c.isascii() and c.isprintable())
    cut = complete(server, seed=1, stop=["never there", letter], **more).json()["choices"][0]
    assert cut["text"] == one["text"][: one["text"].index(letter)]
    assert cut["finish_reason"] == "stop"


def test_top_k_of_one_is_greedy(server: Serving) -> None:
    greedy = complete(server).json()["choices"]
    assert complete(server, temperature=2, top_k=1).json()["choices"] == greedy
    assert complete(server, temperature=2, top_p=0).json()["choices"] == greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("n", True),
        ("best_of", 2),
        ("echo", True),
        ("suffix", "x"),
        ("logprobs", 0),
        ("logit_bias", {"1": 5}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("min_p", 0.1),
        ("temperature", 2.5),
        ("temperature", "1"),
        ("top_p", -0.1),
        ("top_k", -1),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("seed", 2**63),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", ""),
        ("prompt", ["one", "two"]),
        ("prompt", []),
        ("prompt", [1, "a"]),
        ("prompt", [-1]),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_completion_fields_without_an_effect_are_refused_by_name(
    server: Serving, field: str, value: object
) -> None:
    error = error_of(complete(server, **{field: value}))
    assert error["type"] == "invalid_request_error"
    assert str(error["param"]).split(".")[0] == field
    assert field in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("reasoning_effort", "high"),
        ("store", True),
        ("modalities", ["audio"]),
        ("messages", []),
        ("messages", [{"role": "tool", "content": "4"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", [{"role": "user", "content": "a", "name": "Bob"}]),
        ("messages", [{"role": "user"}]),
        ("max_completion_tokens", 0),
        ("prompt", "for completions"),
        ("nonsense", 1),
    ],
)
def test_chat_fields_without_an_effect_are_refused_by_name(
    server: Serving, field: str, value: object
) -> None:
    error = error_of(chat(server, **{field: value}))
    assert str(error["param"]).split(".")[0] == field
    assert field in error["message"]


def test_fields_that_request_nothing_are_accepted(server: Serving) -> None:
    nothing = {
        "n": 1,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": False,
    }
    more = {
        "logprobs": False,
        "logit_bias": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "user": "me",
    }
    answered: dict[str, object] = {
        "role": "assistant",
        "content": "Her.",
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
    }
    messages = [*CHAT["messages"], answered, *CHAT["messages"]]  # type: ignore[misc]
    assert chat(server, messages=messages, **nothing, **more).status_code == 200
    empty = {"best_of": 1, "echo": False, "logprobs": None, "suffix": None, "top_k": 0}
    assert complete(server, **empty).status_code == 200


def test_max_tokens_and_max_completion_tokens_are_one_limit(server: Serving) -> None:
    found = server.http.post(
        "/v1/chat/completions",
        json={"model": "tiny", "messages": CHAT["messages"], "max_completion_tokens": 3},
    )
    assert found.json()["usage"]["completion_tokens"] == 3
    assert error_of(chat(server, max_completion_tokens=3))["param"] == "max_tokens"


def test_without_max_tokens_a_completion_has_16_tokens_and_a_chat_as_many_as_fit(
    server: Serving,
) -> None:
    found = server.http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "temperature": 0})
    assert found.json()["usage"]["completion_tokens"] == 16
    found = server.http.post("/v1/chat/completions", json={"model": "tiny", "messages": CHAT["messages"]})
    assert found.json()["usage"]["total_tokens"] == server.engine.max_tokens


def test_a_prompt_that_can_never_be_served_is_refused_with_the_sizes(server: Serving) -> None:
    error = error_of(complete(server, max_tokens=10**6))
    assert str(server.engine.max_tokens) in error["message"]
    assert "got 1000000" in error_of(complete(server, prompt=[10**6]))["message"]
    assert error_of(complete(server, prompt=""))["type"] == "invalid_request_error"


def test_an_unknown_model_is_not_found(server: Serving) -> None:
    assert error_of(complete(server, model="gpt"), 404)["code"] == "model_not_found"
    assert error_of(chat(server, model="gpt"), 404)["param"] == "model"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"{", "application/json"),
        (b"\xff", "application/json"),
        (b"[]", "application/json"),
        (b"", "application/json"),
        (json.dumps(COMPLETION).encode(), "text/plain"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "application/json"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "application/json"),
        (b"[" * 100_000, "application/json"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(server: Serving, body: bytes, kind: str) -> None:
    error_of(server.http.post("/v1/completions", content=body, headers={"Content-Type": kind}))


def test_requests_that_any_web_page_may_send_are_refused(server: Serving) -> None:
    """Check that requests without a JSON content type are refused.

    Browsers let any web page send such a request to any host, without a preflight request.
    """
    request = server.http.build_request("POST", "/v1/completions", content=json.dumps(COMPLETION))
    request.headers.pop("Content-Type", None)
    error_of(server.http.send(request))


def test_missing_paths_and_methods_return_openai_errors(server: Serving) -> None:
    error_of(server.http.get("/v1/nothing"), 404)
    error_of(server.http.get("/v1/completions"), 405)


def test_an_error_never_repeats_the_prompt(server: Serving) -> None:
    for response in (complete(server, prompt={"secret": 1}), complete(server, prompt=["secret", "secret"])):
        assert "secret" not in response.text


@pytest.mark.parametrize("name", ["\ud800", "x" * 100_000, "a\nb"])
def test_strange_names_are_refused_and_shown_shortened(server: Serving, name: str) -> None:
    given = json.dumps(COMPLETION | {"model": name}), json.dumps(COMPLETION | {name: 1})
    for body, status in zip(given, (404, 400), strict=True):
        response = server.http.post(
            "/v1/completions", content=body, headers={"Content-Type": "application/json"}
        )
        assert error_of(response, status)["type"] == "invalid_request_error"
        assert len(response.content) < 5000
