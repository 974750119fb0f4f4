"""The configuration: frozen models, loaded from a YAML file or a mapping.

The parser of a value raises a ValueError whose message says only what the value must be, such as "true or
false". ``load_config`` turns it into a ConfigError that names the file, the key and the value.
"""

from __future__ import annotations

import difflib
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
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
_FLAGS = {"yes": "true", "on": "true", "y": "true", "1": "true", "no": "false", "off": "false", "n": "false"}
_A_SHARE = "a number above 0 and up to 1"


def parse_size(value: object) -> int:
    """Return a size in bytes. KB, MB and so on are powers of 1000; KiB, MiB and so on are powers of 1024.

    Args:
        value: A number of bytes, or text with an optional unit in upper or lower case. The result is rounded
            down to whole bytes.

    Raises:
        ValueError: The value is not a size. The message says what it must be.
    """
    nbytes = _quantity(value, _SIZES, _A_SIZE)
    if not 1 <= nbytes < 1 << 63:
        raise ValueError(_A_SIZE)
    return int(nbytes)


def parse_seconds(value: object) -> float:
    """Return a duration in seconds.

    Args:
        value: A number of seconds, or text with one of the units us, ms, s and min. Text without a unit is
            rejected, because the author of ``flush: 200`` could mean 200 s or 200 ms.

    Raises:
        ValueError: The value is not a duration. The message says what it must be.
    """
    units = _TIMES if isinstance(value, str) else {"": Decimal(1)}
    seconds = float(_quantity(value, units, _A_TIME))
    if not 0 < seconds <= 3600:
        raise ValueError(_A_TIME)
    return seconds


def parse_share(value: object) -> float:
    """Return a fraction above 0 and at most 1.

    Raises:
        ValueError: The value is not such a fraction. The message says what it must be.
    """
    share = float(_quantity(value, {"": Decimal(1)}, _A_SHARE))
    if not 0 < share <= 1:
        raise ValueError(_A_SHARE)
    return share


def parse_readers(value: object) -> int | Literal["auto"]:
    """Return a number of reader threads, or "auto".

    Raises:
        ValueError: The value is neither "auto" nor an allowed number. The message says what it must be.
    """
    text = written(value)
    if text == "auto":
        return "auto"
    if re.fullmatch("[1-9][0-9]?", text) is None or int(text) > MOST_READERS:
        near = ["auto"] if text.lower() == "auto" else []
        raise ValueError(_with_guess(f"'auto', or 1 to {MOST_READERS}", near))
    return int(text)


def parse_flag(value: object) -> bool:
    """Return a boolean. Text must be one of YAML's spellings: true, True, TRUE, false, False or FALSE.

    Raises:
        ValueError: The value is not a boolean. The message says what it must be.
    """
    if isinstance(value, bool):
        return value
    if written(value) in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return written(value).lower() == "true"
    near = _FLAGS.get(written(value).lower())
    raise ValueError("true or false" + (f"; did you mean {near}?" if near else ""))


def written(value: object) -> str:
    """Return the value as text, or "" for a boolean or an integer that is too long for ``str``."""
    try:
        return "" if isinstance(value, bool) else str(value)
    except ValueError:  # an integer with thousands of digits
        return ""


def _quantity(value: object, units: Mapping[str, Decimal], wanted: str) -> Decimal:
    text = written(value).strip() if isinstance(value, int | float | str) else ""
    found = _QUANTITY.fullmatch(text)
    if found is None:
        raise ValueError(wanted)
    number, unit = found.groups()
    known = {name.lower(): factor for name, factor in units.items()}
    if unit.lower() not in known:
        near = [name for name in units if name and _could_mean(unit, name)]
        raise ValueError(_with_guess(wanted, [number + name for name in near]))
    return Decimal(number) * known[unit.lower()]


def _could_mean(unit: str, name: str) -> bool:
    """Return whether ``unit`` may mean ``name``: shortened ("2G"), spelled out ("200 msec") or omitted ("200")."""
    given, known = unit.lower(), name.lower()
    if name.endswith("B"):
        return given[:1] == known[0] and (given[1:2] != "i" or known[1] == "i")
    if given == "":
        return name in ("ms", "s")
    return known.startswith(given) or given.startswith(known)


def _with_guess(wanted: str, near: Sequence[str]) -> str:
    """Return ``wanted``, with a suggestion appended if there are similar allowed values."""
    return f"{wanted}; did you mean {' or '.join(map(repr, near))}?" if near else wanted


def _tokens(value: object) -> int:
    if re.fullmatch("[1-9][0-9]{0,5}", written(value)) is None:
        raise ValueError("a whole number of tokens, 1 to 999999")
    return int(written(value))


def is_device(value: object) -> bool:
    """Return whether ``value`` names a device, as in ``hbm.device``. The device need not exist."""
    return isinstance(value, str) and re.fullmatch(_DEVICE, value) is not None


def _device(value: object) -> str:
    if not isinstance(value, str) or not is_device(value):
        text = written(value).lower().replace("gpu", "cuda")
        near = [text] if re.fullmatch(_DEVICE, text) else []
        raise ValueError(_with_guess("'cpu', 'cuda' or 'cuda:N'", near))
    return value


def _directory(value: object) -> Path:
    """Return an absolute path, so that a later ``chdir`` does not change the store's directory."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
    if not isinstance(text, str) or not text.strip() or not is_path(text) or text in _YAML_NULLS:
        raise ValueError("the path of a directory")
    if isinstance(value, str) and _VARIABLE.search(text):
        raise ValueError(
            "a path without shell variables, which are not expanded here; write the path out, or use ~ for your "
            "home directory"
        )
    try:
        return Path(os.path.abspath(Path(text).expanduser()))
    except RuntimeError:
        raise ValueError("a path in which ~user names a user of this machine") from None


_VARIABLE = re.compile(r"(^|/)\$[\w{(]")
"""Matches a shell variable in a path. Without this check, ``$HOME/tier`` would create a directory named
``$HOME``.

A ``$`` inside a name is accepted, and so is any ``$`` in a Path object.
"""


_YAML_NULLS = ("~", "null", "Null", "NULL")
"""YAML's spellings of null.

``path: ~`` and ``path: null`` give no path. They do not mean the home directory or a directory named "null".
"""

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
"""For each eviction policy that was removed, the policy that replaces it (docs/decisions/024)."""
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
    """Settings of HBM, the fastest tier.

    Its pages are in GPU memory, or in ordinary memory if `device` is `cpu`.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"owner": {"const": "engine"}}, "required": ["owner"]},
            "else": {"required": ["capacity"]},
        }
    )

    capacity: Size | None = None
    """Size of the tier in bytes. Required unless `owner` is `engine`."""
    device: Device
    """Device of the tier: `cpu` (ordinary memory), `cuda` or `cuda:N`.

    On a GPU, install the `gpu` extra for copies at the full speed of the link.
    """
    policy: Policy = "lru"
    """Eviction policy: decides which page is evicted first."""
    owner: Literal["store", "engine"] = "store"
    """`store`: the store allocates the memory. `engine`: an inference engine registers its own tensors."""

    @model_validator(mode="after")
    def _capacity_of_its_own(self) -> Self:
        if self.owner == "store" and self.capacity is None:
            raise PydanticCustomError("capacity_missing", "")
        return self


class HostConfig(_Section):
    """Settings of the host tier: pages in host memory, which is pinned (page-locked) if HBM is on a GPU."""

    capacity: Size
    """Size of the tier in bytes."""
    pin: Literal["auto", "always", "never"] = "auto"
    """Whether to pin (page-lock) the memory.

    `auto`: if HBM is on a GPU, pin the first GiB at once and the rest in the background. Memory that cannot
    be pinned is copied more slowly, and one warning is logged. `always`: pin all memory before the store
    opens, or raise a ConfigError. `never`: do not pin memory.
    """
    policy: Policy = "lru"
    """Eviction policy: decides which page is evicted first."""
    codec: HostCodec = "none"
    """Codec of pages in host memory.

    Pages are encoded when they are copied to host memory, and are written to disk in encoded form. All codecs
    except `none` are lossy. With a lossy codec, the same memory holds 1.9 to 3.6 times as many pages, and
    `nvme.codec` must be `none`, the same codec, or the same codec with `+zstd`. Under vLLM, only `none` and
    `int8` are allowed.
    """


class NvmeConfig(_Section):
    """Settings of the NVMe tier: pages on disk, in extent files or in LMDB, with a catalogue in LMDB."""

    path: Directory
    """Directory of the tier: a new directory, an empty one, or one that a store created.

    The path is made absolute when the configuration is loaded.
    """
    capacity: Size
    """Size of the tier on disk in bytes, including the catalogue and all overhead."""
    codec: DiskCodec = "none"
    """Codec of pages on disk.

    `exp` is lossless. It saves a third of the disk space for bfloat16 pages, and a seventh for float16 pages.
    All other codecs except `none` are lossy. With them, pages take a third to half of their unencoded size.
    """
    payload: Literal["auto", "lmdb", "extents"] = "auto"
    """Where the bytes of pages are stored: in LMDB (`lmdb`), or in preallocated files next to it (`extents`).

    `auto` keeps the format of an existing directory. A new directory uses extents if its capacity is at least
    1 GiB.
    """
    admission: Admission = "all"
    """Which pages are written to disk without an explicit request.

    `all`: every page. `second_hit`: pages that were requested a second time. `cost`: the half of the pages
    that is most likely to be requested again.
    """
    daily_writes: Size | None = None
    """Limit on the bytes written to disk in 24 hours without an explicit request.

    Each process counts from zero. No limit by default.
    """
    flush: Seconds = 0.2
    """Longest time that a page waits to be written."""
    timeout: Seconds = 10.0
    """Timeout of reads and writes.

    A read that exceeds it is a cache miss. A write that exceeds it makes the tier read-only until the write
    completes.
    """
    readers: Readers = "auto"
    """Number of reader threads, 1 to 64.

    `auto` chooses a number that suits the disk if the directory is new and its capacity is at least 1 GiB,
    and 2 otherwise.
    """
    policy: Policy = "lru"
    """Eviction policy: decides which page is evicted first."""
    read_only: Flag = False
    """Open a directory that another store has filled, and never write to it.

    This is meant for containers that ship with a cache, and works on a read-only mount. Pages of the
    directory are found and loaded; new pages stay in memory. `capacity`, `payload`, `admission`,
    `daily_writes`, `flush` and `policy` have no effect. Several processes may open the directory read-only at
    once, but not while another process has it open for writing.
    """


class PrefetchConfig(_Section):
    """Settings of the prefetcher."""

    max_in_flight: Size = 2 << 30
    """Maximum number of bytes that are being prefetched at any time."""
    share_of_host: Share = 0.25
    """Maximum share of host memory that prefetched pages may take, above 0 and at most 1."""

    def pages_in_flight(self, page_nbytes: int) -> int:
        """Return the number of pages that ``max_in_flight`` allows, at least one."""
        return max(1, self.max_in_flight // page_nbytes)

    def pages_of_host(self, num_slots: int) -> int:
        """Return the number of pages that ``share_of_host`` allows, at least one."""
        return max(1, int(num_slots * self.share_of_host))


class StoreConfig(_Section):
    """The complete configuration of a store. A section that was not given is None."""

    page_size: Tokens | None = None
    """Number of tokens per page.

    By default it is taken from the PageSpec; if both are given, they must be equal.
    """
    hbm: HbmConfig | None = None
    host: HostConfig | None = None
    nvme: NvmeConfig | None = None
    prefetch: PrefetchConfig | None = None

    @property
    def codec(self) -> str:
        """The codec of the lowest configured tier below HBM.

        This is ``nvme.codec``. It is ``host.codec`` if there is no disk tier, or if ``nvme.codec`` is "none",
        because pages are then written to disk in the form that they have in host memory.
        """
        host, disk = ("none" if section is None else section.codec for section in (self.host, self.nvme))
        return host if disk == "none" else disk

    def effective(self) -> dict[str, Any]:
        """Return all values in effect, including defaults, as nested mappings of plain values.

        ``load_config`` turns the result into an equal configuration.
        """
        return self.model_dump(mode="json", exclude_none=True)


def load_config(source: str | os.PathLike[str] | Mapping[str, object]) -> StoreConfig:
    """Load and check a configuration.

    Environment variables are not read, except to expand ``~`` to the home directory. Thread-safe.

    Args:
        source: The path of a YAML file, or a mapping with the same keys. A size without a unit is in bytes. A
            duration without a unit is in seconds, and is accepted only in a mapping: in a file, durations need
            a unit.

    Returns:
        The configuration, with defaults for all keys that are not given.

    Raises:
        ConfigError: The file cannot be read or is not YAML, a key is unknown, missing or given twice, or a
            value is invalid. The message lists all errors, with the file, the key, the value and what the
            value must be.
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
    """Return the JSON schema of a configuration file, for editors.

    ``load_config`` also checks conditions that a schema cannot express.
    """
    schema = StoreConfig.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "TierStore configuration",
    }


class _TextLoader(yaml.BaseLoader):
    """A YAML loader that reads every scalar as text and rejects repeated keys.

    This preserves the spelling of values that YAML would convert, such as ``off``, ``010`` and ``1:30``.
    """

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
        found = "it is empty" if tree is None else f"it contains {_shown(tree)}"
        raise ConfigError(
            f"{name}: the file must be a YAML mapping (allowed keys: {_names(StoreConfig)}), but {found}"
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
    """Return a readable message for one error: the dotted key, the value, and what the value must be."""
    path = [part if part.isprintable() else _shown(part) for part in map(str, detail["loc"])]
    key, value = ".".join(path), _shown(detail["input"])
    section = _SECTIONS.get(path[0] if path else "", StoreConfig) if len(path) > 1 else StoreConfig
    match detail["type"]:
        case "extra_forbidden" | "invalid_key":
            near = difflib.get_close_matches(path[-1].lower(), section.model_fields, n=1, cutoff=0.5)
            guess = f" (did you mean {'.'.join([*path[:-1], near[0]])}?)" if near else ""
            return f"{key} (with value {value}) is not a key{guess}; the keys here are {_names(section)}"
        case "string_unicode":
            return f"{value} is not a key{f' of {key}' if key else ''}, and is not valid Unicode text"
        case "missing":
            return f"{key} is missing; it must be {_NEEDED[path[-1]]}"
        case "capacity_missing":
            return (
                f"{key}.capacity is missing; give a size, or owner: engine if an engine brings its own memory"
            )
        case "literal_error" if path[-1] == "policy" and str(detail["input"]) in WITHDRAWN_POLICIES:
            successor = WITHDRAWN_POLICIES[str(detail["input"])]
            return f"{key} is {value}, an eviction policy that this version no longer has; use '{successor}' instead"
        case "literal_error":
            names = re.findall("'([^']*)'", detail["ctx"]["expected"])
            near = difflib.get_close_matches(written(detail["input"]).lower(), names, n=1, cutoff=0.6)
            return f"{key} is {value}, but must be {_with_guess(detail['ctx']['expected'], near)}"
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
    """Return the value's repr, shortened to at most 80 characters even if the value is large or nested."""
    try:
        text = _SHORT.repr(value)
    except ValueError:
        text = "an integer of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


_SHORT = reprlib.Repr()
_SHORT.maxlevel = _SHORT.maxlist = _SHORT.maxdict = 4
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
