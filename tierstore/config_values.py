"""What the keys of a configuration may hold: types that check a value and convert it, and describe it to editors.

A checker raises ValueError whose text is what is allowed; ``config`` names the key and the value.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, WithJsonSchema

from tierstore.units import MOST_READERS, parse_readers, parse_seconds, parse_share, parse_size, written


def _tokens(value: object) -> int:
    if re.fullmatch("[1-9][0-9]{0,5}", written(value)) is None:
        raise ValueError("a whole number of tokens, 1 to 999999")
    return int(written(value))


def _device(value: object) -> str:
    if not isinstance(value, str) or re.fullmatch(_DEVICE, value) is None:
        raise ValueError("'cpu', 'cuda' or 'cuda:N'")
    return value


def _directory(value: object) -> Path:
    """Absolute, so that a later chdir does not move the store."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
    if not isinstance(text, str) or not text.strip() or not is_path(text) or text in _YAML_NULLS:
        raise ValueError("the path of a directory")
    try:
        return Path(os.path.abspath(Path(text).expanduser()))
    except RuntimeError:
        raise ValueError("the path of a directory whose ~user exists") from None


_YAML_NULLS = ("~", "null", "Null", "NULL")
"""What says "none" in YAML: whoever writes it means no directory of that name, and ``~`` not all of their home."""

_TEXT = {"type": "string"}
_QUANTITY = _TEXT | {"pattern": "^[0-9]"}
_DEVICE = "^(cpu|cuda(:(0|[1-9][0-9]?))?)$"
_SHARE = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
_COUNT = {"type": "integer", "minimum": 1}

Size = Annotated[int, BeforeValidator(parse_size), WithJsonSchema({"anyOf": [_COUNT, _QUANTITY]})]
Seconds = Annotated[
    float,
    BeforeValidator(parse_seconds),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": 3600}, _QUANTITY]}),
]
Share = Annotated[float, BeforeValidator(parse_share), WithJsonSchema(_SHARE)]
Readers = Annotated[
    int | Literal["auto"],
    BeforeValidator(parse_readers),
    WithJsonSchema(
        {"anyOf": [_COUNT | {"maximum": MOST_READERS}, _TEXT | {"pattern": "^(auto|[1-9][0-9]?)$"}]}
    ),
]
Tokens = Annotated[int, BeforeValidator(_tokens), WithJsonSchema(_COUNT | {"maximum": 999999})]
Device = Annotated[str, BeforeValidator(_device), WithJsonSchema(_TEXT | {"pattern": _DEVICE})]
Directory = Annotated[Path, BeforeValidator(_directory), WithJsonSchema(_TEXT | {"minLength": 1})]
DiskCodec = Literal["none", "exp", "fp8", "fp8+zstd", "int8", "int8+zstd", "k8v4", "int4", "int4-64"]
HostCodec = Literal["none", "fp8", "int8", "k8v4", "int4", "int4-64"]
Policy = Literal[
    "lru", "fifo", "lfu", "slru", "s3-fifo", "w-tinylfu", "gdsf", "priority", "session", "adaptive"
]
Admission = Literal["all", "second_hit", "cost"]


def is_path(text: str) -> bool:
    """Whether the system takes it as the name of something."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False
