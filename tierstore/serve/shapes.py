"""The shapes of answers: OpenAI's two, and that of an answer about a document."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from secrets import token_hex
from typing import Any

from tierstore.serve.errors import error_body
from tierstore.serve.request import Done, FinishReason, Usage

_DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class Completion:
    """An answer to ``POST /v1/completions``. ``with_usage``: a stream ends with a chunk that has it."""

    model: str
    with_usage: bool = False
    id: str = field(default_factory=lambda: f"cmpl-{token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, done: Done) -> dict[str, Any]:
        """All of it."""
        return self._object("text_completion", [_text(text, done.reason)]) | {"usage": _usage(done.usage)}

    def opening(self) -> Iterator[str]:
        """Nothing."""
        yield from ()

    def piece(self, text: str) -> str:
        """A chunk with a piece."""
        return self._chunk([_text(text, None)])

    def closing(self, done: Done) -> Iterator[str]:
        """Why it ended, its usage if that was asked for, and OpenAI's mark of the end."""
        yield self._chunk([_text("", done.reason)])
        yield from self._end(done)

    def failure(self, why: str) -> str:
        """An error, and no mark of the end."""
        return _data(error_body(500, why))

    _streamed = "text_completion"

    def _end(self, done: Done) -> Iterator[str]:
        if self.with_usage:
            yield _data(self._object(self._streamed, []) | {"usage": _usage(done.usage)})
        yield _DONE

    def _chunk(self, choices: list[dict[str, Any]]) -> str:
        usage = {"usage": None} if self.with_usage else {}
        return _data(self._object(self._streamed, choices) | usage)

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


@dataclass(frozen=True)
class Chat(Completion):
    """An answer to ``POST /v1/chat/completions``."""

    id: str = field(default_factory=lambda: f"chatcmpl-{token_hex(12)}")

    _streamed = "chat.completion.chunk"

    def whole(self, text: str, done: Done) -> dict[str, Any]:
        """All of it."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": done.reason}
        return self._object("chat.completion", [choice]) | {"usage": _usage(done.usage)}

    def opening(self) -> Iterator[str]:
        """Whose message it is."""
        yield self._chunk([_delta({"role": "assistant", "content": "", "refusal": None}, None)])

    def piece(self, text: str) -> str:
        """A chunk with a piece."""
        return self._chunk([_delta({"content": text}, None)])

    def closing(self, done: Done) -> Iterator[str]:
        """Why it ended, its usage if that was asked for, and OpenAI's mark of the end."""
        yield self._chunk([_delta({}, done.reason)])
        yield from self._end(done)


@dataclass(frozen=True)
class About:
    """An answer about a document. ``waited_s``: seconds from the question to the asking, for the document's reading."""

    waited_s: float = 0.0

    def whole(self, text: str, done: Done) -> dict[str, Any]:
        """All of it."""
        return {"answer": text} | self._end(done)

    def opening(self) -> Iterator[str]:
        """Nothing."""
        yield from ()

    def piece(self, text: str) -> str:
        """An event ``piece``."""
        return _event("piece", {"text": text})

    def closing(self, done: Done) -> Iterator[str]:
        """An event ``done``."""
        yield _event("done", self._end(done))

    def failure(self, why: str) -> str:
        """An event ``error``."""
        return _event("error", error_body(500, why))

    def _end(self, done: Done) -> dict[str, Any]:
        usage, wait = done.usage, self.waited_s
        usage = replace(
            usage, waited_s=usage.waited_s + wait, ttft_s=usage.ttft_s + wait, total_s=usage.total_s + wait
        )
        return {"finish_reason": done.reason, "usage": asdict(usage)}


def _text(text: str, reason: FinishReason | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}


def _delta(delta: dict[str, Any], reason: FinishReason | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.reused_tokens},
    }


def _data(value: dict[str, Any]) -> str:
    """In ASCII: some clients take U+2028 for the end of a line."""
    return f"data: {json.dumps(value)}\n\n"


def _event(name: str, value: dict[str, Any]) -> str:
    return f"event: {name}\n{_data(value)}"
