"""Bounds for hit rates: the hit rate of a simulated cache that knows the future, for a trace and a capacity.

The simulated cache applies Belady's rule to a tree of prefixes. It evicts the leaf whose next use is the latest, and
does not keep a new page whose next use is later than that of every other page. The rule is not proven optimal here,
because the pages of a sequence are hit together or not at all, but no policy can beat it by much.

Each bound is computed once and stored in a file. The file names the trace, the capacity and the version of the
rule, and contains a digest. If the file is damaged or its contents do not match, the bound is computed again.
"""

from __future__ import annotations

import json
from contextlib import suppress
from hashlib import blake2b
from heapq import heappop, heappush
from os import getpid
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.replay.traces import Request, Trace
    from tierstore.types import PageKey

_NEVER = 1 << 60


def clairvoyant_hits(requests: Sequence[Request], pages: int) -> list[int]:
    """Simulate a clairvoyant cache of ``pages`` pages. Return, for each request, how many pages of its prefix are hits.

    Takes O(n log n) time for n requested pages.
    """
    cache = _Clairvoyant(pages)
    return [
        cache.serve(request.keys, following)
        for request, following in zip(requests, _next_uses(requests), strict=True)
    ]


def _next_uses(requests: Sequence[Request]) -> list[list[int]]:
    """Return, for each page of each request, the index of the next request with the same page.

    The index is ``_NEVER`` if no later request has the page.
    """
    upcoming: dict[PageKey, int] = {}
    found: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        keys = requests[number].keys
        found.append([upcoming.get(key, _NEVER) for key in keys])
        upcoming.update(dict.fromkeys(keys, number))
    return found[::-1]


class _Clairvoyant:
    """A simulated cache that knows the future. A heap contains its leaves, with the latest next use first."""

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self._next: dict[PageKey, int] = {}
        self._parent: dict[PageKey, PageKey] = {}
        self._children: dict[PageKey, int] = {}
        self._leaves: list[tuple[int, int, PageKey]] = []
        self._order = 0

    def serve(self, keys: Sequence[PageKey], following: Sequence[int]) -> int:
        """Add all pages of a request, then evict pages until the remaining ones fit.

        ``following`` contains the index of the next request that uses each page. Return how many pages of the
        request's prefix were already cached.
        """
        hits = 0
        while hits < len(keys) and keys[hits] in self._next:
            hits += 1
        before: PageKey | None = None
        for key, upcoming in zip(keys, following, strict=True):
            if key not in self._next:
                self._children.setdefault(key, 0)
                if before is not None:
                    self._parent[key] = before
                    self._children[before] += 1
            self._next[key] = upcoming
            before = key
        if before is not None and not self._children[before]:
            self._offer(before)
        while len(self._next) > self._pages:
            self._drop()
        return hits

    def _offer(self, key: PageKey) -> None:
        self._order += 1
        heappush(self._leaves, (-self._next[key], -self._order, key))

    def _drop(self) -> None:
        upcoming, _, key = heappop(self._leaves)
        if self._next.get(key) != -upcoming or self._children[key]:
            return
        del self._next[key], self._children[key]
        parent = self._parent.pop(key, None)
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                self._offer(parent)


_VERSION = 1
"""Version of the rule and of the file format. Increment it whenever one of them changes."""


def user_folder() -> Path | None:
    """Return the current user's folder for files with bounds, or None if the user has no home directory."""
    try:
        return Path.home() / ".cache" / "tierstore" / "bounds"
    except RuntimeError:
        return None


class Bounds:
    """Computes bounds and stores them in the files of ``folder``.

    If ``folder`` is None or cannot be written, bounds are kept only in this object.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._digests: dict[int, tuple[Trace, str]] = {}
        self._known: dict[tuple[str, int], int] = {}

    def rate(self, trace: Trace, pages: int) -> float:
        """Return the bound for a trace and a cache of ``pages`` pages.

        It is the number of prefix-hit tokens divided by the number of requested tokens, over the second half of
        the trace.
        """
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
    """Return a digest of all contents of a trace that the bound depends on.

    Token counts and the pattern of repeated blocks are included; names and times are not.
    """
    told = blake2b(digest_size=16)
    numbers: dict[bytes, int] = {}
    for request in trace.requests:
        blocks = [numbers.setdefault(key, len(numbers)) for key in request.keys]
        told.update(f"{request.tokens}:{blocks};".encode())
    told.update(f"{trace.block_tokens}".encode())
    return told.hexdigest()
