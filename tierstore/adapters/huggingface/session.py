"""Chat sessions over a store, by name.

Each continues where its last turn ended, down to the token, and may fork anywhere. Full pages of a turn are in the
store and found by their tokens: they go down the tiers between turns and come back. The page that the last turn left
half full has no key; the session keeps its slot until the next turn, or until it expires. ``PrefixCache`` has the
sessions of one model in one store, and serves single prompts, too.
"""

# transformers leaves some of its functions untyped:
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

from prefetch import Sessions
from tierstore.adapters.huggingface.cache import TierStoreCache, cache_argument
from tierstore.adapters.huggingface.identity import plain_model, weights_now
from tierstore.adapters.huggingface.prefix import Tail, give_back
from tierstore.adapters.huggingface.request import PageGroups, Storing, check_storing
from tierstore.errors import CapacityError, StoreClosed
from tierstore.keys import Extra
from tierstore.store import TierStore
from tierstore.types import Hint, PageKey, require_flag, require_seconds, whole


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn cost. ``reused_tokens`` and ``computed_tokens`` count its prompt, the whole conversation."""

    new_tokens: int
    """Tokens appended since the last turn's answer."""
    reused_tokens: int
    computed_tokens: int
    """The new tokens and the last one before them: the last token of an answer is sampled, but not fed."""
    copied_tokens: int
    """Reused tokens in a page that was copied because the conversation diverges from the stored page inside it."""
    answer_tokens: int


class Session:
    """A conversation by name, made by ``PrefixCache.session``. For one thread at a time.

    Other threads may expire it, or give up its half full page for others; both wait for the end of a turn.
    """

    def __init__(self, home: PrefixCache, session_id: str, ttl_s: float) -> None:
        self.session_id = session_id
        self.ttl_s = ttl_s
        """Seconds until it expires after its last turn."""
        self.turns: list[Turn] = []
        self._home = home
        self._tokens: list[int] = []
        self._answered = 0
        self._tail: Tail | None = None
        self._in_turn = False
        self._expires_at = home.now() + ttl_s

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the conversation so far, answers included."""
        return tuple(self._tokens)

    @property
    def expired(self) -> bool:
        """Return whether it has expired. Never during a turn."""
        return not self._in_turn and self._home.now() >= self._expires_at

    @property
    def keeps_page(self) -> bool:
        """Return whether it owns a half full page in HBM now."""
        return self._tail is not None

    def append(self, token_ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Append tokens to the conversation, without computing anything.

        Returns:
            The whole conversation, ``[1, T]``, for ``generate``.

        Raises:
            ValueError: There are several rows, or a token is not in the model's vocabulary. Nothing is appended.
        """
        given = torch.as_tensor(token_ids)
        if given.ndim > 2 or (given.ndim == 2 and given.shape[0] != 1):
            raise ValueError(
                f"token_ids must be one conversation, [T] or [1, T], got shape {tuple(given.shape)}"
            )
        tokens = [int(token) for token in given.reshape(-1).tolist()]
        size = plain_model(self._home.model).config.get_text_config(decoder=True).vocab_size
        strange = [token for token in tokens if not 0 <= token < size]
        if strange:
            raise ValueError(f"a token must be 0 to {size - 1}, the model's vocabulary, got {strange[0]}")
        self._tokens += tokens
        return torch.tensor([self._tokens], device=self._home.model.device)

    @contextmanager
    def turn(self) -> Iterator[TierStoreCache]:
        """Open a cache for the conversation so far, with which to run ``generate`` or the model.

        Closed at the end of the block.

        What the model was fed is kept: full pages in the store, the half full last one by the session. Append the
        answer afterwards; the session's ``generate`` does all of this.

        Raises:
            ValueError: There is no token, or a turn is running.
        """
        with self._home.lock:
            if self._in_turn:
                raise ValueError(f"session {self.session_id!r} is in a turn already")
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

        Uses a draft model if the ``PrefixCache`` has one. ValueError for options that give several answers.
        """
        if options.get("num_return_sequences", 1) != 1:
            raise ValueError("a session has one answer per turn; fork it to try several")
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
        """Return a new session that begins with the first ``num_tokens`` tokens of this one and shares its pages.

        If the fork is inside a page, the new session copies that page when it continues: stored pages are never
        written.

        Raises:
            ValueError: The name is in use, or there are fewer tokens. Nothing changes.
            TypeError: The count is not an integer, or the name not a string. Nothing changes.
        """
        count = len(self._tokens) if num_tokens is None else whole("num_tokens", num_tokens)
        if not isinstance(session_id, str):
            raise TypeError(f"session_id must be a string, got {session_id!r}")
        if count > len(self._tokens):
            raise ValueError(f"a fork must be at 0 to {len(self._tokens)} tokens, got {count}")
        other = self._home.new_session(session_id, self.ttl_s)
        other._tokens, other._answered = self._tokens[:count], min(count, self._answered)
        other._tail = self._copy_tail(count)
        self._home.keep(other)
        return other

    def retain(self, ttl_s: float) -> None:
        """Expire ``ttl_s`` seconds from now, and ask the store to evict this conversation's pages after others.

        Infinity never expires. TypeError or ValueError if ``ttl_s`` is not a duration; then nothing changes.
        """
        require_seconds("ttl_s", ttl_s)
        self.ttl_s, self._expires_at = ttl_s, self._home.now() + ttl_s
        self._hint("retain", ttl_s)

    def drop(self) -> None:
        """End the session: release its half full page, and let its other pages be evicted before others. Idempotent."""
        self.free_tail()
        self._home.forget(self)
        self._hint("wont_need", None)

    def free_tail(self) -> None:
        """Release the half full page. Its tokens will be computed again."""
        with self._home.lock:
            tail, self._tail = self._tail, None
        give_back(self._home.store, tail)

    def _copy_tail(self, num_tokens: int) -> Tail | None:
        """Copy the half full page for a fork inside it. Returns None if there is none, or no slot for the copy."""
        # The lock keeps other threads from releasing the page during the copy. Nothing here waits.
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
        """End a turn. With a prefetcher, the pages are kept until the next turn is due and brought back by then."""
        self._expires_at = self._home.now() + self.ttl_s
        with suppress(StoreClosed):
            keys = self._home.keys(self._tokens)
            self._hint("retain", self._home.turns.ended(self.session_id, keys, self.ttl_s))

    def _hint(self, need: Literal["retain", "wont_need"], ttl_s: float | None) -> None:
        with suppress(StoreClosed):
            keys = tuple(self._home.keys(self._tokens))
            if keys:
                # A clock, as an earlier session of this name may have given hints.
                hint = Hint(f"session {self.session_id}", monotonic_ns(), keys, need=need, ttl_s=ttl_s)
                self._home.store.hint(hint)


TAILS_OF_HBM = 8
"""One HBM page in this many may be a half full page of an idle session."""


class PrefixCache:
    """The sessions and single requests of one model in one store.

    Thread-safe; each session is for one thread at a time. Close it before the store: it owns pages of idle
    sessions.
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
        """The options are those of ``TierStoreCache``, for every request. Nothing changes yet.

        Raises:
            ValueError: ``storing`` is unknown, or ``timeout_s`` is not a duration.
            TypeError: ``exact`` is not True or False, or ``timeout_s`` is not a number.
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
        """Predicts the next turns of sessions and hints them to an attached prefetcher."""
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
        """Return a cache for these prompts, ``TierStoreCache(store, input_ids, attention_mask, ...)``.

        Close it after use.
        """
        self.expire()
        return TierStoreCache(self.store, input_ids, attention_mask, **{**self._options, **options})

    def session(self, session_id: str, *, ttl_s: float = 600.0) -> Session:
        """Return the session of this name, a new one if there is none. It expires ``ttl_s`` seconds after each turn.

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
        """Return a session with a new name. ValueError if the name is in use."""
        with self.lock:
            if session_id in self._sessions:
                raise ValueError(f"there is a session {session_id!r} already")
            self._sessions[session_id] = Session(self, session_id, ttl_s)
            return self._sessions[session_id]

    def keep(self, session: Session) -> None:
        """Note that a turn of the session ended. If there are too many half full pages, the oldest are released.

        A session that was dropped meanwhile keeps no page.
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
        """Remove the session's name."""
        with self.lock:
            if self._sessions.get(session.session_id) is session:
                del self._sessions[session.session_id]
                self.turns.forget(session.session_id)

    def expire(self) -> int:
        """Drop expired sessions and return their number. ``request`` and ``session`` do this by themselves."""
        with self.lock:
            late = [each for each in self._sessions.values() if each.expired]
            for session in late:
                session.free_tail()
                self.forget(session)
            return len(late)

    def keys(self, token_ids: Sequence[int]) -> list[PageKey]:
        """Return the keys of a sequence's full pages, with this cache's salt and extras and the weights as they are
        now.
        """
        models = [plain_model(each) for each in (self.model, self._options["draft"]) if each is not None]
        extra = self._options["extra"]
        _, changed = weights_now(self.store, models, told=any(not isinstance(item, tuple) for item in extra))
        return self.store.keys(token_ids, salt=self._options["salt"], extra=(*extra, *changed))

    def close(self) -> None:
        """Release the half full pages of all sessions. Sealed pages can still be matched. Idempotent."""
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
