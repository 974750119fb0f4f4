"""The bound of a trace and a capacity, computed once: kept in a folder of small files, one each.

A file says what it is of and ends with a digest of itself. One that is damaged, of another version or of something else
counts as none and is written anew; a folder that cannot be written costs the time only. Files are replaced whole, so
several replays may share a folder.
"""

from __future__ import annotations

import json
from contextlib import suppress
from hashlib import blake2b
from os import getpid
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.replay.bound import clairvoyant_hits

if TYPE_CHECKING:
    from tierstore.replay.traces import Trace

_VERSION = 1
"""Of the bound and of the files: a change of either is another."""


def user_folder() -> Path | None:
    """Where bounds are kept for the user who runs this; None for one without a home."""
    try:
        return Path.home() / ".cache" / "tierstore" / "bounds"
    except RuntimeError:
        return None


class Bounds:
    """The clairvoyant hit rate of a trace and a capacity. ``folder`` None: kept as long as this object only."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._digests: dict[int, tuple[Trace, str]] = {}
        self._known: dict[tuple[str, int], int] = {}

    def rate(self, trace: Trace, pages: int) -> float:
        """Prefix-hit tokens by tokens asked for, over the second half of the trace."""
        half = len(trace.requests) // 2
        hits = self._hits(trace, pages, half) * trace.block_tokens
        return hits / max(1, sum(request.tokens for request in trace.requests[half:]))

    def _hits(self, trace: Trace, pages: int, half: int) -> int:
        place = (self._digest(trace), pages)
        if place not in self._known:
            most = sum(len(request.keys) for request in trace.requests[half:])
            found = self._read(*place, most)
            if found is None:
                found = sum(clairvoyant_hits(trace.requests, pages)[half:])
                self._write(*place, found)
            self._known[place] = found
        return self._known[place]

    def _digest(self, trace: Trace) -> str:
        known = self._digests.get(id(trace))
        if known is None:
            known = self._digests[id(trace)] = (trace, _digest(trace))
        return known[1]

    def _file(self, digest: str, pages: int) -> Path | None:
        return None if self._folder is None else self._folder / f"{digest}-{pages}.json"

    def _read(self, digest: str, pages: int, most: int) -> int | None:
        file = self._file(digest, pages)
        if file is None:
            return None
        try:
            tree = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        hits = tree.get("hits") if isinstance(tree, dict) else None
        if type(hits) is not int or not 0 <= hits <= most or tree != _tree(digest, pages, hits):
            return None
        return hits

    def _write(self, digest: str, pages: int, hits: int) -> None:
        file = self._file(digest, pages)
        if file is None:
            return
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            draft = file.with_suffix(f".{getpid()}")
            draft.write_text(json.dumps(_tree(digest, pages, hits)), encoding="utf-8")
            draft.replace(file)


def _tree(digest: str, pages: int, hits: int) -> dict[str, object]:
    told = f"{_VERSION} {digest} {pages} {hits}"
    check = blake2b(told.encode(), digest_size=8).hexdigest()
    return {"version": _VERSION, "trace": digest, "pages": pages, "hits": hits, "check": check}


def _digest(trace: Trace) -> str:
    """Of all that the bound depends on, and the number of tokens; not of the trace's name."""
    told = blake2b(digest_size=16)
    numbers: dict[bytes, int] = {}
    for request in trace.requests:
        blocks = [numbers.setdefault(key, len(numbers)) for key in request.keys]
        told.update(f"{request.tokens}:{blocks};".encode())
    told.update(f"{trace.block_tokens}".encode())
    return told.hexdigest()
