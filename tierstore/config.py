"""Read and check the configuration: YAML or a mapping becomes frozen models.

A parser of one value raises ValueError with a noun phrase, what the value must be; ``load_config`` turns it into a
ConfigError that names the file, the key and the value.
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
from tierstore.types import MOST_READERS

_QUANTITY = re.compile(r"((?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-z]*)")
_PREFIXES = "KMGTPE"
_SIZES = {"": Decimal(1), "B": Decimal(1)}
_SIZES |= {f"{prefix}B": Decimal(1000**power) for power, prefix in enumerate(_PREFIXES, 1)}
_SIZES |= {f"{prefix}iB": Decimal(1024**power) for power, prefix in enumerate(_PREFIXES, 1)}
_TIMES = {"us": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": Decimal(1), "min": Decimal(60)}

_A_SIZE = 'a size from 1 byte to less than 8 EiB, such as 1048576, "1e9", "10GB" or "24GiB"'
_A_TIME = 'a duration above 0 and up to an hour with its unit, such as "200ms", "1.5s" or "1min"'
_A_SHARE = "a number above 0 and up to 1"


def parse_size(value: object) -> int:
    """Return a size in bytes. GB and the like are powers of 1000, GiB and the like powers of 1024.

    Args:
        value: A number of bytes, or text with an optional unit in any case; a fraction of a byte is dropped.

    Raises:
        ValueError: The value is not a size; the text says what it must be.
    """
    nbytes = _quantity(value, _SIZES, _A_SIZE)
    if not 1 <= nbytes < 1 << 63:
        raise ValueError(_A_SIZE)
    return int(nbytes)


def parse_seconds(value: object) -> float:
    """Return a duration in seconds.

    Args:
        value: A number of seconds, or text with one of the units us, ms, s and min. Text without a unit is refused:
            ``flush: 200`` in a file may mean 200 s or 200 ms.

    Raises:
        ValueError: The value is not a duration; the text says what it must be.
    """
    units = _TIMES if isinstance(value, str) else {"": Decimal(1)}
    seconds = float(_quantity(value, units, _A_TIME))
    if not 0 < seconds <= 3600:
        raise ValueError(_A_TIME)
    return seconds


def parse_share(value: object) -> float:
    """Return a share of a whole, above 0 and at most 1. ValueError says what the value must be."""
    share = float(_quantity(value, {"": Decimal(1)}, _A_SHARE))
    if not 0 < share <= 1:
        raise ValueError(_A_SHARE)
    return share


def parse_readers(value: object) -> int | Literal["auto"]:
    """Return a number of reader threads, or "auto". ValueError says what the value must be."""
    text = written(value)
    if text == "auto":
        return "auto"
    if re.fullmatch("[1-9][0-9]?", text) is None or int(text) > MOST_READERS:
        raise ValueError(f"'auto', or 1 to {MOST_READERS}")
    return int(text)


def parse_flag(value: object) -> bool:
    """Return a boolean, or what YAML spells so. ValueError says what the value must be."""
    if isinstance(value, bool):
        return value
    if written(value) in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return written(value).lower() == "true"
    raise ValueError("true or false")


def written(value: object) -> str:
    """Return how a file would spell this value; "" for booleans and for integers too long for ``str``."""
    try:
        return "" if isinstance(value, bool) else str(value)
    except ValueError:  # thousands of digits
        return ""


def format_size(nbytes: int) -> str:
    """Return a size for people: at most four digits and a unit of 1024."""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if size == int(size) else f"{size:.1f} {units[0]}"


def exact_size(nbytes: int) -> str:
    """Return a size for messages: short for people, and exact: "1.5 KiB (1,536 bytes)"."""
    return f"{nbytes} bytes" if abs(nbytes) < 1024 else f"{format_size(nbytes)} ({nbytes:,} bytes)"


def _quantity(value: object, units: Mapping[str, Decimal], wanted: str) -> Decimal:
    text = written(value).strip() if isinstance(value, int | float | str) else ""
    found = _QUANTITY.fullmatch(text)
    if found is None:
        raise ValueError(wanted)
    number, unit = found.groups()
    known = {name.lower(): factor for name, factor in units.items()}
    if unit.lower() not in known:
        near = [name for name in units if name and _could_mean(unit, name)]
        guess = f"; did you mean {' or '.join(repr(number + name) for name in near)}?" if near else ""
        raise ValueError(wanted + guess)
    return Decimal(number) * known[unit.lower()]


def _could_mean(unit: str, name: str) -> bool:
    """Whether a unit was shortened: "2G" for GB or GiB, "2Gi" for GiB, a bare number for any unit of time."""
    return (
        name.lower().startswith(unit.lower()) if name[0] in _PREFIXES else unit == "" and name in ("ms", "s")
    )


def _tokens(value: object) -> int:
    if re.fullmatch("[1-9][0-9]{0,5}", written(value)) is None:
        raise ValueError("a whole number of tokens, 1 to 999999")
    return int(written(value))


def _device(value: object) -> str:
    if not isinstance(value, str) or re.fullmatch(_DEVICE, value) is None:
        raise ValueError("'cpu', 'cuda' or 'cuda:N'")
    return value


def _directory(value: object) -> Path:
    """Return an absolute path, so that a later chdir does not move the store."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
    if not isinstance(text, str) or not text.strip() or not is_path(text) or text in _YAML_NULLS:
        raise ValueError("the path of a directory")
    if isinstance(value, str) and _VARIABLE.search(text):
        raise ValueError(
            "a path without shell variables, which are not expanded here; write it out, or use ~ for your home"
        )
    try:
        return Path(os.path.abspath(Path(text).expanduser()))
    except RuntimeError:
        raise ValueError("the path of a directory whose ~user exists") from None


_VARIABLE = re.compile(r"(^|/)\$(\w|\{)")
"""``$HOME/tier`` would make a folder named ``$HOME``. A ``$`` within a name is kept, and any ``$`` of a Path object."""


_YAML_NULLS = ("~", "null", "Null", "NULL")
"""YAML's spellings of null: an empty value, not a directory of that name, and ``~`` alone not the home directory."""

_TEXT = {"type": "string"}
_QUANTITY_TEXT = _TEXT | {"pattern": "^[0-9]"}
_DEVICE = "^(cpu|cuda(:(0|[1-9][0-9]?))?)$"
_SHARE = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
_COUNT = {"type": "integer", "minimum": 1}

Size = Annotated[int, BeforeValidator(parse_size), WithJsonSchema({"anyOf": [_COUNT, _QUANTITY_TEXT]})]
Seconds = Annotated[
    float,
    BeforeValidator(parse_seconds),
    WithJsonSchema(_TEXT | {"pattern": r"^[0-9].*(us|ms|s|min)$"}),
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
Flag = Annotated[
    bool,
    BeforeValidator(parse_flag),
    WithJsonSchema(
        {"anyOf": [{"type": "boolean"}, _TEXT | {"pattern": "^(true|True|TRUE|false|False|FALSE)$"}]}
    ),
]
Device = Annotated[str, BeforeValidator(_device), WithJsonSchema(_TEXT | {"pattern": _DEVICE})]
Directory = Annotated[Path, BeforeValidator(_directory), WithJsonSchema(_TEXT | {"minLength": 1})]
DiskCodec = Literal["none", "exp", "fp8", "fp8+zstd", "int8", "int8+zstd", "k8v4", "int4", "int4-64"]
HostCodec = Literal["none", "fp8", "int8", "k8v4", "int4", "int4-64"]
Policy = Literal["lru", "fifo", "priority", "gdsf", "session", "adaptive"]
WITHDRAWN_POLICIES = {"lfu": "adaptive", "slru": "adaptive", "s3-fifo": "adaptive", "w-tinylfu": "adaptive"}
"""Eviction orders that former versions had, and the order to use instead (docs/decisions/024)."""
Admission = Literal["all", "second_hit", "cost"]


def is_path(text: str) -> bool:
    """Return whether the operating system accepts this text as a path."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class HbmConfig(_Section):
    """The fastest tier: pages in GPU memory, or in ordinary memory that plays its part."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"owner": {"const": "engine"}}, "required": ["owner"]},
            "else": {"required": ["capacity"]},
        }
    )

    capacity: Size | None = None
    """Bytes of pages. Required unless `owner` is `engine`."""
    device: Device
    """`cpu` (ordinary memory), `cuda` or `cuda:N`. On a card the extra `gpu` gives copies at the speed of the link."""
    policy: Policy = "lru"
    """Eviction order: which page leaves the tier first."""
    owner: Literal["store", "engine"] = "store"
    """`store` allocates the memory; `engine`: an engine registers its own tensors."""

    @model_validator(mode="after")
    def _capacity_of_its_own(self) -> Self:
        if self.owner == "store" and self.capacity is None:
            raise PydanticCustomError("capacity_missing", "")
        return self


class HostConfig(_Section):
    """Pages in host memory, page-locked where HBM is on a card."""

    capacity: Size
    """Bytes of pages."""
    pin: Literal["auto", "always", "never"] = "auto"
    """Page-lock the memory.

    `auto`: if HBM is on a card, in the background after the first GiB; memory that cannot be locked is copied more
    slowly, with one warning. `always`: all of it at open, or a ConfigError. `never`: no.
    """
    policy: Policy = "lru"
    """Eviction order: which page leaves the tier first."""
    codec: HostCodec = "none"
    """Encode pages on their way to host memory; they go to disk as they are held.

    All but `none` are lossy and keep 1.9 to 3.6 times as many pages in the same memory. `nvme.codec` may then be
    `none`, the same codec, or the same with `+zstd`.
    """


class NvmeConfig(_Section):
    """Pages on disk, in extent files or in LMDB, with an LMDB catalogue."""

    path: Directory
    """A directory that is new, empty, or a store's. Made absolute when the configuration is loaded."""
    capacity: Size
    """Bytes on disk, everything included."""
    codec: DiskCodec = "none"
    """`exp` is lossless: bfloat16 pages take a third less disk, float16 pages a seventh.

    All others but `none` are lossy and take half to a third of the disk.
    """
    payload: Literal["auto", "lmdb", "extents"] = "auto"
    """Where page bytes live: in `lmdb`, or in `extents`, preallocated files beside it.

    `auto` keeps what the directory has; a new directory has extents from 1 GiB up.
    """
    admission: Admission = "all"
    """Pages written without being asked for: `all`, those requested a second time (`second_hit`), or the half that is
    most likely to return (`cost`)."""
    daily_writes: Size | None = None
    """Bytes written without being asked for in 24 hours; each process counts from zero. No limit by default."""
    flush: Seconds = 0.2
    """Longest time that a page waits to be written."""
    timeout: Seconds = 10.0
    """A read that takes longer is a cache miss; a write that takes longer makes the tier read-only until it ends."""
    readers: Readers = "auto"
    """Reader threads, 1 to 64. `auto`: as many as the disk needs in a new directory of 1 GiB or more, otherwise 2."""
    policy: Policy = "lru"
    """Eviction order: which page leaves the tier first."""
    read_only: Flag = False
    """Open a directory that another store has filled, and write nothing: for containers that ship a cache, also on a
    read-only mount. Its pages are found and loaded, and new pages stay in memory. `capacity`, `payload`, `admission`,
    `daily_writes`, `flush` and `policy` have no effect. Several processes may have the directory open so at once, but
    none of them beside one that writes."""


class PrefetchConfig(_Section):
    """Limits of an attached prefetcher."""

    max_in_flight: Size = 2 << 30
    """Bytes that the prefetcher moves at once."""
    share_of_host: Share = 0.25
    """Share of host memory for pages that the prefetcher brings up; above 0, at most 1."""

    def pages_in_flight(self, page_nbytes: int) -> int:
        """Return how many pages ``max_in_flight`` allows, at least one."""
        return max(1, self.max_in_flight // page_nbytes)

    def pages_of_host(self, num_slots: int) -> int:
        """Return how many pages ``share_of_host`` allows, at least one."""
        return max(1, int(num_slots * self.share_of_host))


class StoreConfig(_Section):
    """The whole configuration. A section is None if it was not given."""

    page_size: Tokens | None = None
    """Tokens per page. The PageSpec's by default; if both are given they must be equal."""
    hbm: HbmConfig | None = None
    host: HostConfig | None = None
    nvme: NvmeConfig | None = None
    prefetch: PrefetchConfig | None = None

    @property
    def codec(self) -> str:
        """Return the codec of pages on disk; host memory may hold them encoded already."""
        host, disk = ("none" if section is None else section.codec for section in (self.host, self.nvme))
        return host if disk == "none" else disk

    def effective(self) -> dict[str, Any]:
        """Return every value in force, defaults included, as plain data.

        ``load_config`` reads the mapping back to an equal configuration.
        """
        return self.model_dump(mode="json", exclude_none=True)


def load_config(source: str | os.PathLike[str] | Mapping[str, object]) -> StoreConfig:
    """Read a YAML file, or check a mapping of the same form.

    Args:
        source: The path of a YAML file, or a mapping. In a mapping a number is bytes or seconds; in a file a duration
            needs its unit.

    Raises:
        ConfigError: The file cannot be read, the text is not YAML, a key is unknown, given twice or missing, or a value
            cannot be used. The message names the file, the key, the value and what the value must be, for all faults at
            once.

    Thread-safe. Reads nothing from the environment but the home directory for ``~``.
    """
    if isinstance(source, Mapping):
        return _checked("configuration", dict(source))
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"the configuration must be the path of a YAML file or a mapping, got {_shown(source)}"
        )
    name = os.fspath(source)
    if not is_path(name):
        raise ConfigError(f"the configuration must be the path of a YAML file, got {_shown(name)}")
    return _checked(name, _read(name))


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration file, for editors. The loader also checks what a schema cannot say."""
    schema = StoreConfig.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "TierStore configuration",
    }


class _TextLoader(yaml.BaseLoader):
    """Load every scalar as text, so that ``off``, ``010`` and ``1:30`` keep their spelling; refuse repeated keys."""

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
        raise ConfigError(f"{name}: cannot read the configuration file: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{name}: cannot parse the configuration file: {_problem(error)}") from error
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{name}: the file must hold a mapping with {_names(StoreConfig)}, got {_shown(tree)}"
        )
    return tree


def _problem(error: Exception) -> str:
    match error:
        case yaml.MarkedYAMLError(problem_mark=yaml.Mark() as mark, problem=problem):
            return f"line {mark.line + 1}: {problem}"
        case RecursionError():
            return "it is nested too deeply"
        case UnicodeDecodeError():
            return "it is not UTF-8"
    return f"it is not YAML: {error}"


def _checked(name: str, tree: dict[Any, Any]) -> StoreConfig:
    try:
        return StoreConfig.model_validate(tree)
    except ValidationError as error:
        details = error.errors(include_url=False)
    raise ConfigError(f"{name}: " + "; and ".join(_explained(detail) for detail in details))


def _explained(detail: ErrorDetails) -> str:
    """Return one fault in plain words: dotted key, value, and what the value must be."""
    path = [part if part.isprintable() else _shown(part) for part in map(str, detail["loc"])]
    key, value = ".".join(path), _shown(detail["input"])
    section = _SECTIONS.get(path[0] if path else "", StoreConfig) if len(path) > 1 else StoreConfig
    match detail["type"]:
        case "extra_forbidden" | "invalid_key":
            near = difflib.get_close_matches(path[-1].lower(), section.model_fields, n=1, cutoff=0.5)
            guess = f"did you mean {'.'.join([*path[:-1], near[0]])}? " if near else ""
            return f"{key} (with value {value}) is not a key; {guess}Keys here are {_names(section)}"
        case "string_unicode":
            return f"{value} is not a key{f' of {key}' if key else ''}, nor text that a file can hold"
        case "missing":
            return f"{key} is missing; it must be {_NEEDED[path[-1]]}"
        case "capacity_missing":
            return (
                f"{key}.capacity is missing; give a size, or owner: engine if an engine brings its own memory"
            )
        case "literal_error" if path[-1] == "policy" and str(detail["input"]) in WITHDRAWN_POLICIES:
            successor = WITHDRAWN_POLICIES[str(detail["input"])]
            return f"{key} is {value}, an eviction order that this version no longer has; use '{successor}' instead"
        case "literal_error":
            names = re.findall("'([^']*)'", detail["ctx"]["expected"])
            near = difflib.get_close_matches(written(detail["input"]).lower(), names, n=1, cutoff=0.6)
            guess = f"; did you mean '{near[0]}'?" if near else ""
            return f"{key} is {value}, but must be {detail['ctx']['expected']}{guess}"
        case "value_error":
            return f"{key} is {value}, but must be {detail['ctx']['error']}"
        case "model_type":
            return f"{key} is {value}, but must be a mapping with {_names(_SECTIONS[key])}"
    return f"{key} is {value}; {detail['msg']}"


_SECTIONS: dict[str, type[_Section]] = {
    "hbm": HbmConfig,
    "host": HostConfig,
    "nvme": NvmeConfig,
    "prefetch": PrefetchConfig,
}
_NEEDED = {
    "capacity": 'a size such as "24GiB"',
    "device": "'cpu', 'cuda' or 'cuda:N'",
    "path": "the path of a directory",
}


def _names(section: type[_Section]) -> str:
    return ", ".join(section.model_fields)


def _shown(value: object) -> str:
    """Return at most 80 characters, however large or deeply shared the value is."""
    try:
        text = _SHORT.repr(value)
    except ValueError:
        text = "an integer of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


_SHORT = reprlib.Repr()
_SHORT.maxlevel = _SHORT.maxlist = _SHORT.maxdict = 4
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
