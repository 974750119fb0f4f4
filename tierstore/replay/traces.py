"""Readers of public traces. A request is when it came, how many tokens it had, and the keys of its full blocks.

Mooncake (``*.jsonl``): one request a line, ``hash_ids`` of 512 tokens that already stand for the whole prefix.
kv-cache-tester (``*.json``): one session a file, ``hash_ids`` that count within the session; several files are
interleaved by their times. One block is one page. The last block of a request is left out unless it is full: nobody
can ever reuse it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tierstore.errors import ConfigError
from tierstore.types import PageKey

if TYPE_CHECKING:
    from pathlib import Path

_MOONCAKE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Request:
    """``at``: seconds from the start. ``tokens``: those of the prompt. ``keys``: its full blocks, first to last."""

    at: float
    tokens: int
    keys: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order in which they came, of blocks of ``block_tokens``."""

    name: str
    block_tokens: int
    requests: tuple[Request, ...]


def read_traces(files: Sequence[Path]) -> list[Trace]:
    """Each ``.jsonl`` file is a trace; the ``.json`` files of one folder are one, interleaved by their times.

    ConfigError, naming the file and what is wrong, for what is neither.
    """
    traces = [_mooncake(file) for file in files if file.suffix == ".jsonl"]
    sessions = [file for file in files if file.suffix == ".json"]
    for folder, members in groupby(sorted(sessions), key=lambda file: file.parent):
        traces.append(_sessions(folder.name or folder.resolve().name, list(members)))
    strange = [file for file in files if file.suffix not in (".jsonl", ".json")]
    if strange:
        raise ConfigError(f"{strange[0]}: allowed: a .jsonl file of requests, .json files of sessions")
    return traces


class _Chain:
    """Keys of blocks by their place in a tree of prefixes."""

    def __init__(self, name: str) -> None:
        self._root = PageKey(
            blake2b(name.encode("utf-8", "surrogatepass"), digest_size=32).digest() + bytes(4)
        )
        self._keys: dict[tuple[PageKey, int], PageKey] = {}

    def keys(self, blocks: Sequence[int]) -> tuple[PageKey, ...]:
        """A key each, of the block and all before it."""
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
    for number, line in enumerate(_text(file).splitlines(), 1):
        row = _object(f"{file}:{number}", line)
        tokens, blocks = _numbers(f"{file}:{number}", row, "input_length", "hash_ids")
        at = _time(f"{file}:{number}", row, "timestamp") / 1000
        requests.append(Request(at, tokens, chain.keys(blocks[: tokens // _MOONCAKE_TOKENS])))
    requests.sort(key=lambda request: request.at)
    return Trace(file.stem, _MOONCAKE_TOKENS, tuple(requests))


def _sessions(name: str, files: Sequence[Path]) -> Trace:
    requests, sizes = [], set()
    for file in files:
        session = _object(str(file), _text(file))
        size, rows = session.get("block_size"), session.get("requests")
        if not isinstance(size, int) or size < 1 or not isinstance(rows, list):
            raise ConfigError(f"{file}: allowed: a session with block_size and requests")
        sizes.add(size)
        chain = _Chain(file.name)
        for number, row in enumerate(rows):
            where = f"{file}: request {number}"
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: allowed: an object")
            tokens, blocks = _numbers(where, row, "in", "hash_ids")
            requests.append(Request(_time(where, row, "t"), tokens, chain.keys(blocks[: tokens // size])))
    if len(sizes) > 1:
        raise ConfigError(
            f"{files[0].parent}: block_size {sorted(sizes)}; allowed: sessions of one block_size"
        )
    requests.sort(key=lambda request: request.at)
    return Trace(name, sizes.pop(), tuple(requests))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8; allowed: a trace of requests") from error


def _object(where: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is not JSON: {error}; allowed: a trace of requests") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: allowed: an object")
    return found


def _numbers(where: str, row: Mapping[str, object], tokens: str, blocks: str) -> tuple[int, list[int]]:
    number, ids = row.get(tokens), row.get(blocks)
    if not isinstance(number, int) or number < 0 or not isinstance(ids, list):
        raise ConfigError(f"{where}: allowed: a number {tokens} and a list {blocks}")
    if not all(isinstance(i, int) and -(1 << 63) <= i < 1 << 63 for i in ids):
        raise ConfigError(f"{where}: {blocks}; allowed: whole numbers of 64 bits")
    return number, ids


def _time(where: str, row: Mapping[str, object], name: str) -> float:
    at = row.get(name)
    if not isinstance(at, int | float) or not 0 <= at < float("inf"):
        raise ConfigError(f"{where}: {name} is {at!r}; allowed: a time of 0 or more")
    return float(at)
