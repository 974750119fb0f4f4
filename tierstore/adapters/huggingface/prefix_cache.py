"""What one model keeps in one store, for a program that serves many requests: prompts by themselves, and chats."""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import RLock
from time import monotonic
from types import TracebackType
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from prefetch import Sessions
from tierstore.adapters.huggingface.cache import TierStoreCache
from tierstore.adapters.huggingface.identity import weights_now
from tierstore.adapters.huggingface.request import PageGroups, Storing, check_storing
from tierstore.adapters.huggingface.session import Session
from tierstore.adapters.huggingface.weights import plain_model
from tierstore.arguments import require_flag, require_seconds
from tierstore.keys import Extra
from tierstore.store import TierStore
from tierstore.types import PageKey

TAILS_OF_HBM = 8
"""One HBM page in this many may be a half full page of an idle session."""


class PrefixCache:
    """What one model keeps in one store: single requests, and sessions by name.

    Any thread; a session is for one thread at a time. Close it before the store: it owns pages of idle sessions.
    """

    def __init__(
        self,
        store: TierStore,
        model: PreTrainedModel,
        *,
        draft: PreTrainedModel | None = None,
        salt: bytes = b"",
        extra: Iterable[Extra] = (),
        timeout_s: float = 10.0,
        storing: Storing = "all",
        exact: bool = False,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """The options are those of ``TierStoreCache``, for every request. Changes nothing yet.

        ValueError for an unknown way of storing, TypeError unless ``exact`` is True or False, either for a
        ``timeout_s`` that is no duration.
        """
        check_storing(storing)
        require_flag("exact", exact)
        require_seconds("timeout_s", timeout_s)
        self.store = store
        self.model = model
        self.has_draft = draft is not None
        self.pages = PageGroups(store)
        self.now = clock
        self.turns = Sessions(store, clock=clock)
        """When sessions go on, as hints for an attached prefetcher."""
        self._sessions: dict[str, Session] = {}
        self.lock = RLock()
        self._options: dict[str, Any] = {
            "model": model,
            "draft": draft,
            "salt": salt,
            "extra": tuple(extra),
            "timeout_s": timeout_s,
            "storing": storing,
            "exact": exact,
        }
        self._max_tails = max(1, len(self.pages.groups[0]) // TAILS_OF_HBM)

    def request(
        self,
        input_ids: torch.Tensor | Sequence[int],
        attention_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> TierStoreCache:
        """A cache for these prompts, ``TierStoreCache(store, input_ids, attention_mask, ...)``; close it after use."""
        self.expire()
        return TierStoreCache(self.store, input_ids, attention_mask, **{**self._options, **options})

    def session(self, session_id: str, *, ttl_s: float = 600.0) -> Session:
        """The session of this name, a new one if there is none; it lasts ``ttl_s`` seconds beyond each turn.

        TypeError for a name that is no string or a ``ttl_s`` that is no number, ValueError for one that is no duration.
        """
        require_seconds("ttl_s", ttl_s)
        if not isinstance(session_id, str):
            raise TypeError(f"session_id is {session_id!r}; allowed: a string")
        self.expire()
        with self.lock:
            found = self._sessions.get(session_id)
            if found is None:
                return self.new_session(session_id, ttl_s)
            found.ttl_s = ttl_s
            return found

    def new_session(self, session_id: str, ttl_s: float) -> Session:
        """A session of a name that is not in use; ValueError if it is."""
        with self.lock:
            if session_id in self._sessions:
                raise ValueError(f"there is a session {session_id!r} already")
            self._sessions[session_id] = Session(self, session_id, ttl_s)
            return self._sessions[session_id]

    def keep(self, session: Session) -> None:
        """A turn of the session ended: it is the latest now. Of too many half full pages the oldest are given up.

        A session that ended meanwhile is not found again, and keeps no page.
        """
        with self.lock:
            if self._sessions.get(session.session_id) is not session:
                session.free_tail()
                return
            self._sessions[session.session_id] = self._sessions.pop(session.session_id)
            holding = [each for each in self._sessions.values() if each.keeps_page]
            for each in holding[: max(0, len(holding) - self._max_tails)]:
                each.free_tail()

    def forget(self, session: Session) -> None:
        """The session is not found by its name any more."""
        with self.lock:
            if self._sessions.get(session.session_id) is session:
                del self._sessions[session.session_id]
                self.turns.forget(session.session_id)

    def expire(self) -> int:
        """Drop the sessions whose time is over; how many. ``request`` and ``session`` do so by themselves."""
        with self.lock:
            late = [each for each in self._sessions.values() if each.expired]
            for session in late:
                session.free_tail()
                self.forget(session)
            return len(late)

    def keys(self, token_ids: Sequence[int]) -> list[PageKey]:
        """The keys of a sequence's full pages, under this cache's salt and extras and the weights as they are now."""
        models = [plain_model(each) for each in (self.model, self._options["draft"]) if each is not None]
        extra = self._options["extra"]
        _, changed = weights_now(self.store, models, told=any(not isinstance(item, tuple) for item in extra))
        return self.store.keys(token_ids, salt=self._options["salt"], extra=(*extra, *changed))

    def close(self) -> None:
        """Give back the half full pages of all sessions. Sealed pages stay matchable. Idempotent."""
        with self.lock:
            for session in list(self._sessions.values()):
                session.free_tail()
                self.forget(session)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
