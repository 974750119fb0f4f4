"""The configuration: YAML or a mapping -> frozen models, checked once.

Every section is optional. Sizes are integers of bytes or text such as "24GiB" (powers of 1024), "10GB" (powers of
1000) or "1e9"; times are seconds or text such as "200ms". Nothing is read from the environment. A value that only a
later version understands is refused.

    page_size                                tokens of a page; optional, the PageSpec knows it
    hbm:      capacity device policy owner   the fastest tier: a CUDA device, or "cpu" without one
    host:     capacity pin policy codec      host memory
    nvme:     path capacity codec payload admission daily_writes flush timeout readers policy
    prefetch: max_in_flight share_of_host    limits of the prefetcher
"""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Mapping
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from tierstore.config_values import (
    Admission,
    Device,
    Directory,
    DiskCodec,
    HostCodec,
    Policy,
    Readers,
    Seconds,
    Share,
    Size,
    Tokens,
    is_path,
)
from tierstore.errors import ConfigError


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
