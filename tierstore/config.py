"""The configuration: YAML or a mapping -> frozen models, checked once; sizes and durations as people write them.

A checker of a value raises ValueError whose text is what is allowed; the model names the key and the value.
"""

from __future__ import annotations

import difflib
import os
import re
import reprlib
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, WithJsonSchema, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from tierstore.errors import ConfigError

_QUANTITY = re.compile(r"((?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-z]*)")
_SIZES = {"": Decimal(1), "b": Decimal(1)}
_SIZES |= {f"{prefix}b": Decimal(1000**power) for power, prefix in enumerate("kmgtpe", 1)}
_SIZES |= {f"{prefix}ib": Decimal(1024**power) for power, prefix in enumerate("kmgtpe", 1)}
_TIMES = {"": Decimal(1), "us": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": Decimal(1), "min": Decimal(60)}
MOST_READERS = 64

_SIZE_ALLOWED = 'a size of at least 1 byte and less than 8 EiB, such as 1048576, "1e9", "10GB" or "24GiB"'
_TIME_ALLOWED = 'a time above 0 and up to an hour, such as 2, "1.5s" or "200ms"'
_SHARE_ALLOWED = "a number above 0 and up to 1"


def parse_size(value: object) -> int:
    """Bytes: GB and its kin are powers of 1000, GiB and its kin of 1024; a fraction of a byte is dropped."""
    nbytes = _quantity(value, _SIZES, _SIZE_ALLOWED)
    if not 1 <= nbytes < 1 << 63:
        raise ValueError(_SIZE_ALLOWED)
    return int(nbytes)


def parse_seconds(value: object) -> float:
    """Seconds, from a number or a number with us, ms, s or min."""
    seconds = float(_quantity(value, _TIMES, _TIME_ALLOWED))
    if not 0 < seconds <= 3600:
        raise ValueError(_TIME_ALLOWED)
    return seconds


def parse_share(value: object) -> float:
    """A part of a whole: above 0, at most 1."""
    share = float(_quantity(value, {"": Decimal(1)}, _SHARE_ALLOWED))
    if not 0 < share <= 1:
        raise ValueError(_SHARE_ALLOWED)
    return share


def parse_readers(value: object) -> int | Literal["auto"]:
    """A number of threads, or "auto"."""
    text = written(value)
    if text == "auto":
        return "auto"
    if re.fullmatch("[1-9][0-9]?", text) is None or int(text) > MOST_READERS:
        raise ValueError(f"'auto', or 1 to {MOST_READERS}")
    return int(text)


def written(value: object) -> str:
    """What stands in a file for this value; "" for True, False and an integer that Python would not write."""
    try:
        return "" if isinstance(value, bool) else str(value)
    except ValueError:  # thousands of digits
        return ""


def format_size(nbytes: int) -> str:
    """For people: at most four digits and a unit of 1024."""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if size == int(size) else f"{size:.1f} {units[0]}"


def _quantity(value: object, units: Mapping[str, Decimal], allowed: str) -> Decimal:
    text = written(value).strip() if isinstance(value, int | float | str) else ""
    found = _QUANTITY.fullmatch(text)
    if found is None or found[2].lower() not in units:
        raise ValueError(allowed)
    return Decimal(found[1]) * units[found[2].lower()]


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
_QUANTITY_TEXT = _TEXT | {"pattern": "^[0-9]"}
_DEVICE = "^(cpu|cuda(:(0|[1-9][0-9]?))?)$"
_SHARE = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
_COUNT = {"type": "integer", "minimum": 1}

Size = Annotated[int, BeforeValidator(parse_size), WithJsonSchema({"anyOf": [_COUNT, _QUANTITY_TEXT]})]
Seconds = Annotated[
    float,
    BeforeValidator(parse_seconds),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": 3600}, _QUANTITY_TEXT]}),
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
Policy = Literal["lru", "fifo", "priority", "gdsf", "session", "adaptive"]
WITHDRAWN_POLICIES = {"lfu": "adaptive", "slru": "adaptive", "s3-fifo": "adaptive", "w-tinylfu": "adaptive"}
"""Eviction orders that former versions had, and the order to use instead (docs/decisions/024)."""
Admission = Literal["all", "second_hit", "cost"]


def is_path(text: str) -> bool:
    """Whether the system takes it as the name of something."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HbmConfig(_Section):
    """``capacity``: payload bytes, required unless ``owner`` is "engine" (an engine brings its own tensors)."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"owner": {"const": "engine"}}, "required": ["owner"]},
            "else": {"required": ["capacity"]},
        }
    )

    capacity: Size | None = None
    device: Device
    policy: Policy = "lru"
    owner: Literal["store", "engine"] = "store"

    @model_validator(mode="after")
    def _capacity_of_its_own(self) -> Self:
        if self.owner == "store" and self.capacity is None:
            raise PydanticCustomError("capacity_missing", "")
        return self


class HostConfig(_Section):
    """``capacity``: payload bytes. ``pin``: page-lock the memory when it can be ("auto"), must be, or never.

    ``codec``: what pages lose on their way there so that more fit (tierstore.codecs); they go to disk as they are held.
    """

    capacity: Size
    pin: Literal["auto", "always", "never"] = "auto"
    policy: Policy = "lru"
    codec: HostCodec = "none"


class NvmeConfig(_Section):
    """``capacity``: everything on disk. ``path``: made absolute at load. ``flush``: seconds a write may wait;
    ``timeout``: seconds a read or a batch of writes may take before nobody waits for it;
    ``readers``: threads that read; "auto" asks the disk when a directory of 1 GiB or more is made, and is 2 else.

    ``codec``: "exp" stores the exponents of 16-bit pages compressed, losslessly;
    those after it lose something (tierstore.codecs). ``payload``: where page
    bytes are, LMDB or extent files; "auto" keeps what is there, and else asks the disk. ``admission``: which pages go
    to disk by themselves. ``daily_writes``: bytes that may, in 24 hours; None: no limit.
    """

    path: Directory
    capacity: Size
    codec: DiskCodec = "none"
    payload: Literal["auto", "lmdb", "extents"] = "auto"
    admission: Admission = "all"
    daily_writes: Size | None = None
    flush: Seconds = 0.2
    timeout: Seconds = 10.0
    readers: Readers = "auto"
    policy: Policy = "lru"


class PrefetchConfig(_Section):
    """``max_in_flight``: bytes being promoted at once. ``share_of_host``: of host capacity, at most."""

    max_in_flight: Size = 2 << 30
    share_of_host: Share = 0.25


class StoreConfig(_Section):
    """The whole configuration. A section is None when it was not given."""

    page_size: Tokens | None = None
    hbm: HbmConfig | None = None
    host: HostConfig | None = None
    nvme: NvmeConfig | None = None
    prefetch: PrefetchConfig | None = None

    @property
    def codec(self) -> str:
        """The codec that pages are written to disk with, which host memory may have encoded already."""
        host, disk = ("none" if section is None else section.codec for section in (self.host, self.nvme))
        return host if disk == "none" else disk

    def effective(self) -> dict[str, Any]:
        """Every value in force, defaults included, as plain data; ``load_config`` reads it back to an equal one."""
        return self.model_dump(mode="json", exclude_none=True)


def load_config(source: str | os.PathLike[str] | Mapping[str, object]) -> StoreConfig:
    """Read a YAML file, or check a mapping of the same form. Pure but for reading the file.

    ConfigError, naming the file, the key, its value and what is allowed, for whatever cannot be used as it is:
    a file that cannot be read, text that is not YAML, a repeated or unknown key, a missing or impossible value.
    """
    if isinstance(source, Mapping):
        return _checked("configuration", dict(source))
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"configuration is {_shown(source)}; allowed: the path of a YAML file, or a mapping"
        )
    name = os.fspath(source)
    if not is_path(name):
        raise ConfigError(f"configuration is {_shown(name)}; allowed: the path of a YAML file, or a mapping")
    return _checked(name, _read(name))


def config_schema() -> dict[str, Any]:
    """The JSON schema of a configuration file, for editors. The loader checks more than it can say."""
    schema = StoreConfig.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "TierStore configuration",
    }


class _TextLoader(yaml.BaseLoader):
    """Every scalar stays text, so that ``off``, ``010`` and ``1:30`` mean what they say; no key comes twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _read(name: str) -> dict[Any, Any]:
    try:
        with open(name, encoding="utf-8") as file:
            tree = yaml.load(file, Loader=_TextLoader)
    except OSError as error:
        raise ConfigError(
            f"{name}: cannot be read: {error.strerror}; allowed: a readable YAML file"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{name}: {_problem(error)}; allowed: YAML, a mapping of sections, each key once"
        ) from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{name}: holds {_shown(tree)}; allowed: a mapping with {_names(StoreConfig)}")
    return tree


def _problem(error: Exception) -> str:
    match error:
        case yaml.MarkedYAMLError(problem_mark=yaml.Mark() as mark, problem=problem):
            return f"line {mark.line + 1}: {problem}"
        case RecursionError():
            return "is nested too deeply"
        case UnicodeDecodeError():
            return "is not UTF-8"
    return f"is not YAML: {error}"


def _checked(name: str, tree: dict[Any, Any]) -> StoreConfig:
    try:
        return StoreConfig.model_validate(tree)
    except ValidationError as error:
        details = error.errors(include_url=False)
    raise ConfigError(f"{name}: " + "; and ".join(_explained(detail) for detail in details))


def _explained(detail: ErrorDetails) -> str:
    """One fault in our words: dotted key, value, what is allowed."""
    path = [part if part.isprintable() else _shown(part) for part in map(str, detail["loc"])]
    key, value = ".".join(path), _shown(detail["input"])
    section = _SECTIONS.get(path[0] if path else "", StoreConfig) if len(path) > 1 else StoreConfig
    match detail["type"]:
        case "extra_forbidden" | "invalid_key":
            near = difflib.get_close_matches(path[-1].lower(), section.model_fields, n=1, cutoff=0.5)
            guess = f"did you mean {'.'.join([*path[:-1], near[0]])}? " if near else ""
            return f"{key} (= {value}) is not a key; {guess}allowed here: {_names(section)}"
        case "string_unicode":
            return f"{value} is not a key{f' of {key}' if key else ''}; allowed: text that a file can hold"
        case "missing":
            return f"{key} is missing; allowed: {_NEEDED[path[-1]]}"
        case "capacity_missing":
            return (
                f"{key}.capacity is missing; allowed: a size, or owner: engine, which brings its own memory"
            )
        case "literal_error" if path[-1] == "policy" and str(detail["input"]) in WITHDRAWN_POLICIES:
            successor = WITHDRAWN_POLICIES[str(detail["input"])]
            return (
                f"{key} is {value}, an eviction order that this version no longer has; use '{successor}' instead "
                f"(allowed: {detail['ctx']['expected']})"
            )
        case "literal_error":
            return f"{key} is {value}; allowed in this version: {detail['ctx']['expected']}"
        case "value_error":
            return f"{key} is {value}; allowed: {detail['ctx']['error']}"
        case "model_type":
            return f"{key} is {value}; allowed: a mapping with {_names(_SECTIONS[key])}"
    return f"{key} is {value}; {detail['msg']}"


_SECTIONS: dict[str, type[_Section]] = {
    "hbm": HbmConfig,
    "host": HostConfig,
    "nvme": NvmeConfig,
    "prefetch": PrefetchConfig,
}
_NEEDED = {"capacity": 'a size such as "24GiB"', "device": "'cpu', 'cuda' or 'cuda:N'", "path": "a directory"}


def _names(section: type[_Section]) -> str:
    return ", ".join(section.model_fields)


def _shown(value: object) -> str:
    """At most 80 characters, however large or deeply shared the value is."""
    try:
        text = _SHORT.repr(value)
    except ValueError:
        text = "an integer of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


_SHORT = reprlib.Repr()
_SHORT.maxlevel = _SHORT.maxlist = _SHORT.maxdict = 4
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
