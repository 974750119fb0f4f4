"""Readers for two formats of public request traces.

- Mooncake (``*.jsonl``): Each line is a request. Each entry of ``hash_ids`` stands for a block of 512 tokens and
  everything before it.
- kv-cache-tester (``*.json``): Each file is a session. ``hash_ids`` are the numbers of blocks within the
  session. The sessions in a folder form one trace, in which their requests are ordered by time.

One block of a trace is one page. The last block of a request is left out unless it is full, because a partially
filled page is never stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tierstore.errors import ConfigError
from tierstore.types import PageKey

if TYPE_CHECKING:
    from pathlib import Path

_MOONCAKE_TOKENS = 512
_LATEST = 1e300
_MOST_SAID = 40


@dataclass(frozen=True, slots=True)
class Request:
    """A request in a trace.

    ``at`` is the time of arrival in seconds since the start of the trace. ``tokens`` is the length of the prompt,
    and ``keys`` are the keys of its full blocks in order. ``output_tokens`` is the length of the answer in
    tokens, or 0 if the trace does not contain it.
    """

    at: float
    tokens: int
    keys: tuple[PageKey, ...]
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace: its requests in the order of arrival. A block has ``block_tokens`` tokens."""

    name: str
    block_tokens: int
    requests: tuple[Request, ...]


def read_traces(files: Sequence[Path]) -> list[Trace]:
    """Read traces from files.

    Each ``.jsonl`` file is one trace. All ``.json`` files in the same folder together are one trace.

    Raises:
        ConfigError: A file is not a trace. The message names the file, the line or request, and what was
            expected there.
    """
    strange = [file for file in files if file.suffix not in (".jsonl", ".json")]
    if strange:
        _require_file(strange[0])
        raise ConfigError(
            f"{strange[0]} ends in {strange[0].suffix!r}, expected a .jsonl file of requests or .json files of sessions"
        )
    traces = [_mooncake(file) for file in files if file.suffix == ".jsonl"]
    sessions = [file for file in files if file.suffix == ".json"]
    for folder, members in groupby(sorted(sessions), key=lambda file: file.parent):
        traces.append(_sessions(folder.name or folder.resolve().name, list(members)))
    return traces


class _Chain:
    """Computes the keys of blocks. Equal blocks after equal prefixes have equal keys; all other keys differ."""

    def __init__(self, name: str) -> None:
        self._root = PageKey(
            blake2b(name.encode("utf-8", "surrogatepass"), digest_size=32).digest() + bytes(4)
        )
        self._keys: dict[tuple[PageKey, int], PageKey] = {}

    def keys(self, blocks: Sequence[int]) -> tuple[PageKey, ...]:
        """Return a key for each block. It identifies the block together with all blocks before it."""
        key, found = self._root, []
        for block in blocks:
            place = (key, block)
            known = self._keys.get(place)
            if known is None:
                digest = blake2b(key + block.to_bytes(8, "little", signed=True), digest_size=32).digest()
                known = self._keys[place] = PageKey(digest + bytes(4))
            key = known
            found.append(key)
        return tuple(found)


def _mooncake(file: Path) -> Trace:
    chain, requests = _Chain(file.name), []
    for number, line in enumerate(_text(file).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        row = _object(where, line)
        at = _time(where, row, "timestamp") / 1000
        tokens = _count(where, row, "input_length", least=0)
        keys = chain.keys(_blocks(where, row, tokens // _MOONCAKE_TOKENS))
        requests.append(Request(at, tokens, keys, _output(row, "output_length")))
    if not requests:
        raise ConfigError(f"{file} is empty, expected one request per line")
    requests.sort(key=lambda request: request.at)
    return Trace(file.stem, _MOONCAKE_TOKENS, tuple(requests))


def _sessions(name: str, files: Sequence[Path]) -> Trace:
    requests: list[Request] = []
    sizes: dict[int, Path] = {}
    for file in files:
        session = _object(str(file), _text(file))
        size = _count(str(file), session, "block_size", least=1)
        sizes.setdefault(size, file)
        requests += _session(file, session, size)
    if len(sizes) > 1:
        (one, first), (other, second) = list(sizes.items())[:2]
        raise ConfigError(
            f"{second}: block_size is {other}, but {one} in {first}; all sessions in a folder must have the same "
            "block_size"
        )
    if not requests:
        raise ConfigError(f"{files[0]} has no requests, expected at least one")
    requests.sort(key=lambda request: request.at)
    return Trace(name, next(iter(sizes)), tuple(requests))


def _session(file: Path, session: Mapping[str, object], size: int) -> Iterator[Request]:
    rows = session.get("requests")
    if not isinstance(rows, list):
        raise ConfigError(f"{file}: requests {_found(session, 'requests')}, expected a list of objects")
    chain = _Chain(file.name)
    for number, row in enumerate(rows):
        where = f"{file}: requests[{number}]"
        if not isinstance(row, dict):
            raise ConfigError(f"{where} is {_short(row)}, expected an object with t, in and hash_ids")
        tokens = _count(where, row, "in", least=0)
        keys = chain.keys(_blocks(where, row, tokens // size))
        yield Request(_time(where, row, "t"), tokens, keys, _output(row, "out"))


def _output(row: Mapping[str, object], name: str) -> int:
    found = row.get(name)
    return found if isinstance(found, int) and found > 0 else 0


def _require_file(file: Path) -> None:
    if not file.is_file():
        found = "is a directory" if file.is_dir() else "no such file"
        raise ConfigError(f"{file}: {found}, expected a .jsonl file of requests or .json files of sessions")


def _text(file: Path) -> str:
    _require_file(file)
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{file}:{line} contains the invalid byte {error.object[error.start]:#04x}, expected UTF-8 text"
        ) from error


def _object(where: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        line = where if text.count("\n") == 0 else f"{where}:{error.lineno}"
        near = _short(text[error.pos : error.pos + 20])
        raise ConfigError(
            f"{line} is not valid JSON ({error.msg} at column {error.colno}, near {near}), expected a JSON object"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON ({error}), expected a JSON object") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is {_short(found)}, expected an object")
    return found


def _count(where: str, row: Mapping[str, object], name: str, least: int) -> int:
    number = row.get(name)
    if type(number) is not int or number < least:
        raise ConfigError(f"{where}: {name} {_found(row, name)}, expected a whole number of {least} or more")
    return number


def _blocks(where: str, row: Mapping[str, object], full: int) -> list[int]:
    """Return the IDs of a request's ``full`` full blocks. Raises ConfigError if ``hash_ids`` is invalid."""
    ids = row.get("hash_ids")
    if not isinstance(ids, list):
        raise ConfigError(f"{where}: hash_ids {_found(row, 'hash_ids')}, expected a list of whole numbers")
    for place, block in enumerate(ids):
        if type(block) is not int or not -(1 << 63) <= block < 1 << 63:
            raise ConfigError(
                f"{where}: hash_ids[{place}] is {_short(block)}, expected a signed 64-bit whole number"
            )
    if len(ids) < full:
        raise ConfigError(
            f"{where}: hash_ids has {len(ids)} IDs, expected at least {full}, one for each full block"
        )
    return ids[:full]


def _time(where: str, row: Mapping[str, object], name: str) -> float:
    at = row.get(name)
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at <= _LATEST:
        raise ConfigError(f"{where}: {name} {_found(row, name)}, expected a time of 0 or more")
    return float(at)


def _found(row: Mapping[str, object], name: str) -> str:
    return f"is {_short(row[name])}" if name in row else "is missing"


def _short(value: object) -> str:
    said = repr(value)
    return said if len(said) <= _MOST_SAID else f"{said[:_MOST_SAID]}..."
