"""Schemas of request bodies: OpenAI's completions and chat completions, documents, and questions.

An OpenAI field that this server does not support is accepted only with a value that requests nothing
(``n: 1``, ``tools: []``, null). Other values and unknown fields are rejected with an error that names the field. All
supported fields have an effect, except ``user`` and ``safety_identifier``, which are only labels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tierstore.serve.request import Sampling


def _unicode(text: str) -> str:
    """Raise ValueError if the text has unpaired surrogates, which JSON can express but UTF-8 files cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode, but contains an unpaired surrogate") from None
    return text


FORMS = frozenset({"<string>", "<strings>", "<list>", "<lists>"})
"""Tags for the alternative types of a field. They appear in pydantic's error paths, but not in our messages."""


def _form(given: object) -> str | None:
    """Return the tag of the type that the client seems to have meant, or None if the value fits no type.

    Pydantic then validates the value as that type only, so the client gets a single error.
    """
    match given:
        case str():
            return "<string>"
        case [str(), *_]:
            return "<strings>"
        case [list(), *_]:
            return "<lists>"
        case list():
            return "<list>"
    return None


def _forms(allowed: str) -> Discriminator:
    return Discriminator(_form, custom_error_type="form", custom_error_message=f"must be {allowed}")


_UNICODE = AfterValidator(_unicode)
Text = Annotated[str, _UNICODE]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Some = Annotated[str, StringConstraints(min_length=1), _UNICODE]
Word = Annotated[str, StringConstraints(min_length=1, max_length=1000), _UNICODE]
Words = Annotated[list[Word], Field(max_length=4)]
Stop = Annotated[
    Annotated[Word, Tag("<string>")] | Annotated[Words, Tag("<strings>")] | Annotated[Words, Tag("<list>")],
    _forms("a string, or a list of up to 4"),
]
Prompt = Annotated[
    Annotated[Text, Tag("<string>")]
    | Annotated[list[Text], Tag("<strings>")]
    | Annotated[list[list[Token]], Tag("<lists>")]
    | Annotated[list[Token], Field(min_length=1), Tag("<list>")],
    _forms("a string, or a list of tokens"),
]

_PENALTIES: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "logit_bias": ({},),
    "n": (1,),
}


def _refused(field: str, why: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{why}", {"field": field, "why": why})


class Strict(BaseModel):
    """Base class of schemas that reject unknown fields and do not convert values to the expected types."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Unsupported fields, each with the values that are accepted besides null. These values request nothing."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_has_no_effect(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name in given.keys() & cls.NEUTRAL.keys():
            value, neutral = given[name], cls.NEUTRAL[name]
            # Compare the types, too, because True == 1 in Python.
            if value is not None and (type(value), value) not in [(type(n), n) for n in neutral]:
                allowed = " or ".join([*map(json.dumps, neutral), "null"])
                raise _refused(name, f"is not supported here and must be {allowed}")
        return {name: value for name, value in given.items() if name not in cls.NEUTRAL}


class StreamOptions(Strict):
    NEUTRAL = {"include_obfuscation": (False,)}

    include_usage: bool | None = None


class Choosing(Strict):
    """Request fields that control how the tokens of an answer are chosen, and where it ends."""

    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | None = None

    def sampling(self, temperature: float = 1.0) -> Sampling:
        """Return the sampling settings. ``temperature`` is the default for requests that do not set one."""
        return Sampling(
            temperature=temperature if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=self.seed,
        )

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the strings that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Completing(Choosing):
    """Request fields that OpenAI's completions and chat completions have in common."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _refused("stream_options", "needs stream: true")
        return self

    @property
    def with_usage(self) -> bool:
        """Return whether the client asked for a usage chunk at the end of the stream."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(Completing):
    """Body of ``POST /v1/completions``. ``prompt`` is a single prompt, as text or as token IDs."""

    NEUTRAL = _PENALTIES | {"best_of": (1,), "echo": (False,), "logprobs": (), "suffix": ("",)}

    prompt: Prompt

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if isinstance(self.prompt, list) and not isinstance(self.prompt[0], int) and len(self.prompt) > 1:
            raise _refused("prompt", "must be a single prompt")
        return self

    @property
    def one(self) -> str | list[int]:
        """Return the prompt, as text or as token IDs, without the list that may enclose it."""
        match self.prompt:
            case [str() | list() as only]:
                return only
        return self.prompt  # type: ignore[return-value]  # _one_prompt has rejected lists of several prompts


class TextPart(Strict):
    type: Literal["text"]
    text: Text


Content = Annotated[
    Annotated[Text, Tag("<string>")]
    | Annotated[list[TextPart], Tag("<list>")]
    | Annotated[list[TextPart], Tag("<strings>")]
    | Annotated[list[TextPart], Tag("<lists>")],
    _forms('a string, or a list of {"type": "text", "text": ...}'),
]


class Message(Strict):
    """A chat message. Its content is a text or a list of text parts, which are joined by line breaks."""

    NEUTRAL = {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "name": (),
        "refusal": (),
        "tool_calls": ([],),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def plain(self) -> dict[str, str]:
        """Return the message for a chat template, with the content as a single string.

        The role "developer" is changed to "system", because chat templates do not know OpenAI's newer name.
        """
        content = self.content if isinstance(self.content, str) else "\n".join(p.text for p in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(Completing):
    """Body of ``POST /v1/chat/completions``."""

    NEUTRAL = _PENALTIES | {
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "logprobs": (False,),
        "metadata": ({},),
        "modalities": (["text"],),
        "moderation": (),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "prompt_cache_key": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "reasoning_effort": ("none",),
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise _refused("max_tokens", "means the same as max_completion_tokens: give only one of them")
        return self


class DocumentRequest(Strict):
    """Body of ``POST /v1/documents``."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=200, strip_whitespace=True), _UNICODE]
    text: Some


class QuestionRequest(Choosing):
    """Body of ``POST /v1/documents/{id}/ask``."""

    question: Some
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
