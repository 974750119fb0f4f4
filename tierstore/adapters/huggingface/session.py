"""Named chat sessions whose K/V are kept in a store.

Each session continues exactly where its last turn ended, and can be forked at any token. Full pages of a turn
are in the store and are found by their tokens, so they may be demoted between turns and promoted again. The
partially filled page at the end of the last turn has no key, so the session keeps this page in an HBM slot
until its next turn or until it expires. ``PrefixCache`` manages the sessions of one model in one store, and
also handles single prompts.
"""

# transformers leaves some functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import RLock
from time import monotonic, monotonic_ns
from types import TracebackType
from typing import Any, Literal, Self

import torch
from transformers import PreTrainedModel

from tierstore.adapters.huggingface.cache import TierStoreCache, cache_argument
from tierstore.adapters.huggingface.identity import plain_model, weights_now
from tierstore.adapters.huggingface.prefix import Tail, give_back
from tierstore.adapters.huggingface.request import PageGroups, Storing, check_storing
from tierstore.errors import CapacityError, StoreClosed
from tierstore.keys import Extra
from tierstore.prefetch import Sessions
from tierstore.store import TierStore
from tierstore.types import Hint, PageKey, require_flag, require_seconds, whole


@dataclass(frozen=True, slots=True)
class Turn:
    """Token counts of one turn.

    ``reused_tokens`` and ``computed_tokens`` add up to the turn's prompt, which is the whole conversation.
    """

    new_tokens: int
    """Number of tokens that were appended after the answer of the previous turn."""
    reused_tokens: int
    computed_tokens: int
    """Number of computed prompt tokens.

    The last token of the previous answer is one of them, because it was sampled but not fed to the model.
    """
    copied_tokens: int
    """Number of reused tokens in a copied page, because the conversation diverges within the stored page."""
    answer_tokens: int


class Session:
    """A named conversation, created by ``PrefixCache.session``. Not thread-safe.

    Other threads may expire the session, or free its partially filled page to make space, but not during a
    turn.
    """

    def __init__(self, home: PrefixCache, session_id: str, ttl_s: float) -> None:
        self.session_id = session_id
        self.ttl_s = ttl_s
        """Time from the end of the last turn until the session expires, in seconds."""
        self.turns: list[Turn] = []
        self._home = home
        self._tokens: list[int] = []
        self._answered = 0
        self._tail: Tail | None = None
        self._in_turn = False
        self._expires_at = home.now() + ttl_s

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the conversation so far, including answers."""
        return tuple(self._tokens)

    @property
    def expired(self) -> bool:
        """Return whether the session has expired. Always False during a turn."""
        return not self._in_turn and self._home.now() >= self._expires_at

    @property
    def keeps_page(self) -> bool:
        """Return whether the session owns a partially filled page in HBM."""
        return self._tail is not None

    def append(self, token_ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Append tokens to the conversation without computing anything.

        Returns:
            The whole conversation, ``[1, T]``, for ``generate``.

        Raises:
            ValueError: There are several rows, or a token is not in the model's vocabulary. Nothing is
                appended.
        """
        given = torch.as_tensor(token_ids)
        if given.ndim > 2 or (given.ndim == 2 and given.shape[0] != 1):
            raise ValueError(
                f"token_ids must be a single conversation of shape [T] or [1, T], got shape {tuple(given.shape)}"
            )
        tokens = [int(token) for token in given.reshape(-1).tolist()]
        size = plain_model(self._home.model).config.get_text_config(decoder=True).vocab_size
        strange = [token for token in tokens if not 0 <= token < size]
        if strange:
            raise ValueError(
                f"each token must be in the model's vocabulary (0 to {size - 1}), got {strange[0]}"
            )
        self._tokens += tokens
        return torch.tensor([self._tokens], device=self._home.model.device)

    @contextmanager
    def turn(self) -> Iterator[TierStoreCache]:
        """Open a cache for the conversation so far, and close it at the end of the block.

        Pass the cache to the model or its ``generate``. K and V of the tokens that were fed to the model are
        kept: full pages in the store, the partially filled last page by the session. After the block, append
        the answer to the session. ``Session.generate`` does all of this.

        Raises:
            ValueError: The conversation is empty, or a turn is already running.
        """
        with self._home.lock:
            if self._in_turn:
                raise ValueError(f"session {self.session_id!r} already has a turn in progress")
            self._in_turn = True
            tail, self._tail = self._tail, None
        self._home.turns.began(self.session_id)
        try:
            with self._home.request(self._tokens, tail=tail) as cache:
                yield cache
                self._tail = cache.take_tail()
        finally:
            self._in_turn = False
            self._rest()
            self._home.keep(self)

    def generate(self, **options: Any) -> list[int]:
        """Answer the conversation with ``model.generate(**options)``, append the answer and return it.

        Uses the draft model of the ``PrefixCache``, if there is one.

        Raises:
            ValueError: The options ask for several answers.
        """
        if options.get("num_return_sequences", 1) != 1:
            raise ValueError(
                "num_return_sequences must be 1, because a session has one answer per turn; fork the session to try "
                "several answers"
            )
        model: Any = self._home.model
        prompt = torch.tensor([self._tokens], device=model.device)
        with self.turn() as cache:
            given: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), **options}
            if self._home.has_draft:
                given.setdefault("assistant_model", cache.draft_model)
            out = model.generate(prompt, **given, **{cache_argument(model): cache})
        rows = out if isinstance(out, torch.Tensor) else out.sequences
        answer: list[int] = rows[0, prompt.shape[1] :].tolist()
        start = cache.reused_tokens
        self.turns.append(
            Turn(
                new_tokens=len(self._tokens) - self._answered,
                reused_tokens=start,
                computed_tokens=len(self._tokens) - start,
                copied_tokens=cache.copied_tokens,
                answer_tokens=len(answer),
            )
        )
        self.append(answer)
        self._answered = len(self._tokens)
        self._rest()
        return answer

    def fork(self, session_id: str, num_tokens: int | None = None) -> Session:
        """Return a new session with the first ``num_tokens`` tokens of this one. It shares their pages.

        If the last of these tokens is within a page, the new session copies that page when it continues.
        Stored pages are never written to.

        Raises:
            ValueError: The name is in use, or this session has fewer tokens. Nothing has changed.
            TypeError: ``num_tokens`` is not an integer, or the name is not a string. Nothing has changed.
        """
        count = len(self._tokens) if num_tokens is None else whole("num_tokens", num_tokens)
        if not isinstance(session_id, str):
            raise TypeError(f"session_id must be a string, got {session_id!r}")
        if count > len(self._tokens):
            raise ValueError(
                f"num_tokens of a fork must be from 0 to {len(self._tokens)} (the length of the session), got {count}"
            )
        other = self._home.new_session(session_id, self.ttl_s)
        other._tokens, other._answered = self._tokens[:count], min(count, self._answered)
        other._tail = self._copy_tail(count)
        self._home.keep(other)
        return other

    def retain(self, ttl_s: float) -> None:
        """Set the time until the session expires, and ask the store to evict other pages first until then.

        ``ttl_s`` is in seconds and counts from now; after another turn, it counts from the end of that turn.
        With infinity, the session never expires.

        Raises:
            TypeError, ValueError: ``ttl_s`` is not a duration. Nothing has changed.
        """
        require_seconds("ttl_s", ttl_s)
        self.ttl_s, self._expires_at = ttl_s, self._home.now() + ttl_s
        self._hint("retain", ttl_s)

    def drop(self) -> None:
        """End the session. Idempotent.

        Its partially filled page is freed, its name can be used again, and the store is asked to evict its
        stored pages early.
        """
        self.free_tail()
        self._home.forget(self)
        self._hint("wont_need", None)

    def free_tail(self) -> None:
        """Free the partially filled page. The next turn computes its tokens again."""
        with self._home.lock:
            tail, self._tail = self._tail, None
        give_back(self._home.store, tail)

    def _copy_tail(self, num_tokens: int) -> Tail | None:
        """Copy the partially filled page for a fork that ends within this page.

        Return None if there is no such page or no free slot.
        """
        # The lock prevents other threads from freeing the page during the copy. It is held only briefly,
        # because ``allocate`` does not wait.
        with self._home.lock:
            tail, page_size = self._tail, self._home.pages.page_size
            if tail is None or num_tokens <= tail.page * page_size:
                return None
            try:
                (slot,) = self._home.store.allocate(1, timeout_s=0.0)
            except CapacityError:
                return None
            self._home.pages.copy(tail.slot, slot)
            return Tail(slot, tail.page, tail.tokens[:num_tokens], tail.exact, tail.root)

    def _rest(self) -> None:
        """Restart the session's expiry time after a turn, and ask the store to retain the session's pages.

        If a prefetcher expects the next turn, it promotes the pages in time for the turn, and they are retained
        only until shortly after the turn is expected to start.
        """
        self._expires_at = self._home.now() + self.ttl_s
        with suppress(StoreClosed):
            keys = self._home.keys(self._tokens)
            self._hint("retain", self._home.turns.ended(self.session_id, keys, self.ttl_s))

    def _hint(self, need: Literal["retain", "wont_need"], ttl_s: float | None) -> None:
        with suppress(StoreClosed):
            keys = tuple(self._home.keys(self._tokens))
            if keys:
                # The revision is the time, so it exceeds those of an earlier session with the same name.
                hint = Hint(f"session {self.session_id}", monotonic_ns(), keys, need=need, ttl_s=ttl_s)
                self._home.store.hint(hint)


TAILS_OF_HBM = 8
"""At most one in this many HBM pages may be the partially filled page of an idle session."""


class PrefixCache:
    """Manages the sessions and single requests of one model in one store.

    Thread-safe, but each session must be used by one thread at a time. Close the ``PrefixCache`` before the
    store, because it owns pages of idle sessions.
    """

    def __init__(
        self,
        store: TierStore,
        model: PreTrainedModel,
        *,
        draft: PreTrainedModel | None = None,
        salt: bytes = b"",
        extra: Iterable[Extra] = (),
        timeout_s: float | None = None,
        storing: Storing = "all",
        exact: bool = False,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Set the options of all requests. They mean the same as in ``TierStoreCache``.

        ``clock`` returns the time in seconds. It decides when sessions expire.

        Raises:
            ValueError: ``storing`` is unknown, or ``timeout_s`` is not a duration.
            TypeError: ``exact`` is not True or False, or ``timeout_s`` is not a number.
        """
        check_storing(storing)
        require_flag("exact", exact)
        if timeout_s is not None:
            require_seconds("timeout_s", timeout_s)
        self.store = store
        self.model = model
        self.has_draft = draft is not None
        self.pages = PageGroups(store)
        self.now = clock
        self.turns = Sessions(store, clock=clock)
        """Predicts the next turns of sessions and gives hints about them to an attached prefetcher."""
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
        """Return a ``TierStoreCache`` for these prompts. The caller must close it.

        ``options`` override those of this ``PrefixCache``. Expired sessions are removed first.
        """
        self.expire()
        return TierStoreCache(self.store, input_ids, attention_mask, **{**self._options, **options})

    def session(self, session_id: str, *, ttl_s: float = 600.0) -> Session:
        """Return the session with this name, creating it if needed.

        The session expires ``ttl_s`` seconds after its last turn. Sessions that have expired are removed
        first.

        Raises:
            TypeError: The name is not a string, or ``ttl_s`` is not a number.
            ValueError: ``ttl_s`` is not a duration.
        """
        require_seconds("ttl_s", ttl_s)
        if not isinstance(session_id, str):
            raise TypeError(f"session_id must be a string, got {session_id!r}")
        self.expire()
        with self.lock:
            found = self._sessions.get(session_id)
            if found is None:
                return self.new_session(session_id, ttl_s)
            found.ttl_s = ttl_s
            return found

    def new_session(self, session_id: str, ttl_s: float) -> Session:
        """Create a session with a new name. Raises ValueError if the name is in use."""
        with self.lock:
            if session_id in self._sessions:
                raise ValueError(f"session {session_id!r} already exists")
            self._sessions[session_id] = Session(self, session_id, ttl_s)
            return self._sessions[session_id]

    def keep(self, session: Session) -> None:
        """Record that a session was just used.

        If idle sessions own too many partially filled pages, those of the least recently used sessions are
        freed. If this session was removed in the meantime, its partially filled page is freed.
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
        """Remove the session, so that its name can be used again."""
        with self.lock:
            if self._sessions.get(session.session_id) is session:
                del self._sessions[session.session_id]
                self.turns.forget(session.session_id)

    def expire(self) -> int:
        """Remove expired sessions and return their number. ``request`` and ``session`` call this."""
        with self.lock:
            late = [each for each in self._sessions.values() if each.expired]
            for session in late:
                session.free_tail()
                self.forget(session)
            return len(late)

    def keys(self, token_ids: Sequence[int]) -> list[PageKey]:
        """Return the keys of a sequence's full pages.

        They depend on this cache's salt and extras, and on the current weights.
        """
        models = [plain_model(each) for each in (self.model, self._options["draft"]) if each is not None]
        extra = self._options["extra"]
        _, changed = weights_now(self.store, models, told=any(not isinstance(item, tuple) for item in extra))
        return self.store.keys(token_ids, salt=self._options["salt"], extra=(*extra, *changed))

    def close(self) -> None:
        """Free the partially filled pages of all sessions and forget the sessions. Idempotent.

        Later requests can still find the sealed pages.
        """
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
