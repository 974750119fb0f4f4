"""Hints in vLLM's ``kv_hints``, translated into hints for the store.

A request may carry an envelope of actions, and each component handles its own actions. TierStore's actions
have version "1": ``tierstore.will_need`` with ``deadline_s`` and ``priority``, ``tierstore.retain`` with
``ttl_s`` and ``priority``, and ``tierstore.wont_need``. An invalid action is logged and skipped; it never
fails the request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from tierstore.adapters.vllm import compat
from tierstore.types import Hint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.store import TierStore
    from tierstore.types import PageKey

_log = logging.getLogger("tierstore.adapters.vllm.told")

PREFIX = "tierstore."
VERSION = "1"
_MOST = 10**9
"""Maximum value of times, in seconds (about 30 years), and of priorities.

Python's integers are unbounded, but a huge one cannot be added to a clock's time, which is a float.
"""
_PAYLOADS = {
    "will_need": {"deadline_s", "priority"},
    "retain": {"ttl_s", "priority"},
    "wont_need": set[str](),
}


@dataclass(frozen=True, slots=True)
class RequestHints:
    """The hints of one request.

    Attributes:
        starts_in_s: Seconds until the request is expected to start.
        priority: Among requests that start at the same time, those with a higher priority go first.
        after: What to do with the pages of the finished request: retain them, or evict them early. None if no hint
            asks for this.
        keep_s: How long the request's pages are retained, in seconds.
        keep_priority: Priority of the retained pages.
    """

    starts_in_s: float = 0.0
    priority: int = 0
    after: Literal["retain", "wont_need"] | None = None
    keep_s: float = 0.0
    keep_priority: int = 0


NO_HINTS = RequestHints()


def hints_of(request: object) -> RequestHints:
    """Return the hints of a vLLM request. If there are several actions of one kind, the last one counts."""
    hints = NO_HINTS
    for action in compat.hint_actions(request):
        if action.action_type.startswith(PREFIX):
            try:
                hints = _with(hints, action)
            except ValueError as error:
                _log.warning("kv_hints: action %s is ignored: %s", action.action_id, error)
    return hints


class PageRetention:
    """Asks the store to retain the pages of finished requests or to evict them early, as the requests' hints say."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._revisions = count(1)

    def waits(self, request_id: str, hints: RequestHints, keys: Sequence[PageKey]) -> None:
        """Retain the pages of a queued request from now on, if its hints ask to retain them after it has finished."""
        if hints.after == "retain":
            self._hint(request_id, hints, keys)

    def ended(self, request_id: str, hints: RequestHints, keys: Sequence[PageKey]) -> None:
        """Retain the pages of a finished request, or mark them for early eviction.

        Pages that are still being copied from vLLM's blocks are retained once they are stored. Pages are only
        marked for early eviction if they are stored already.
        """
        if hints.after is not None and keys:
            self._hint(request_id, hints, keys)

    def _hint(self, request_id: str, hints: RequestHints, keys: Sequence[PageKey]) -> None:
        assert hints.after is not None
        ttl_s = hints.keep_s if hints.after == "retain" else None
        name, revision = f"{request_id} afterwards", next(self._revisions)
        self._store.hint(Hint(name, revision, tuple(keys), hints.after, None, hints.keep_priority, ttl_s))


def _with(hints: RequestHints, action: Any) -> RequestHints:
    kind, payload = action.action_type.removeprefix(PREFIX), action.payload
    if kind not in _PAYLOADS or action.action_version != VERSION:
        allowed = ", ".join(PREFIX + name for name in _PAYLOADS)
        raise ValueError(
            f"an action must be one of {allowed} in version {VERSION!r}, got {action.action_type!r} in version "
            f"{action.action_version!r}"
        )
    if not isinstance(payload, Mapping):
        raise ValueError(f"the payload of {action.action_type} must be a mapping, got {payload!r:.60}")
    strange = sorted(map(repr, payload.keys() - _PAYLOADS[kind]))
    if strange:
        allowed = ", ".join(sorted(_PAYLOADS[kind]))
        must = f"may only have the keys {allowed}" if allowed else "must have no keys"
        raise ValueError(f"the payload of {action.action_type} {must}, got the key {strange[0]}")
    if kind == "wont_need":
        return replace(hints, after="wont_need")
    priority = _number(payload, "priority", 0)
    if priority != int(priority):
        raise ValueError(f"priority must be a whole number, got {priority!r}")
    if kind == "will_need":
        return replace(hints, starts_in_s=_number(payload, "deadline_s", 0.0), priority=int(priority))
    keep_s = _number(payload, "ttl_s", 0.0)
    if not keep_s:
        raise ValueError("tierstore.retain needs a ttl_s above 0: pages cannot be retained forever")
    return replace(hints, after="retain", keep_s=keep_s, keep_priority=int(priority))


def _number(payload: Mapping[str, object], name: str, otherwise: float) -> float:
    found = payload.get(name, otherwise)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found <= _MOST:
        raise ValueError(f"{name} must be a number from 0 to {_MOST}, got {found!r:.60}")
    return found
