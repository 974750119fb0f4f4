"""What a request asks of the store, and what it may leave there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from tierstore.adapters.huggingface.pages import PageGroups
from tierstore.adapters.huggingface.weights import State
from tierstore.arguments import require_flag, require_seconds, require_time, seconds_at_most
from tierstore.keys import Extra
from tierstore.store import TierStore

Storing = Literal["all", "memory-only", "read-only", "no-store"]
"""What becomes of a request's pages.

    all          kept, in every tier
    memory-only  kept, never written to disk
    read-only    what is there is reused, nothing is kept
    no-store     nothing is looked up and nothing is kept
"""


@dataclass(frozen=True, slots=True)
class Terms:
    """The same for all sequences of a request."""

    store: TierStore
    pages: PageGroups
    num_models: int
    """How many models write into the pages: one, or two with a draft model."""
    weights: tuple[State, ...]
    """What the weights of each model were when its K/V were looked up: all pages of the request are of these."""
    window: int | None
    """Tokens that any layer of any of the models looks back; None: to the first."""
    root: bytes
    """Separates salts and extras in the index of prefixes (``root_of``)."""
    salt: bytes = b""
    extra: tuple[Extra, ...] = ()
    deadline_s: float | None = None
    timeout_s: float = 10.0
    wait_for_room_s: float = 1.0
    """Seconds that a prompt waits for room in HBM while pages are being saved; never longer than ``timeout_s``."""
    storing: Storing = "all"
    exact: bool = False
    """Pages that went through a lossy codec, or were computed over such, are computed anew."""

    def __post_init__(self) -> None:
        check_storing(self.storing)
        require_flag("exact", self.exact)
        require_seconds("timeout_s", self.timeout_s)
        seconds_at_most("wait_for_room_s", self.wait_for_room_s)
        if self.deadline_s is not None:
            require_time("deadline_s", self.deadline_s)

    @property
    def looks_up(self) -> bool:
        """Whether pages of earlier requests may be reused."""
        return self.storing != "no-store"

    @property
    def keeps(self) -> bool:
        """Whether pages of this request may be found by later ones."""
        return self.storing in ("all", "memory-only")

    @property
    def by_layers(self) -> bool:
        """Whether the first layers may be computed while the stored prefix of the last ones is on its way.

        A page that does not come after all is computed again from the tokens alone: not where an extra with a position
        says that tokens stand for something else. Draft models, windows and deadlines look at what is there before
        they begin.
        """
        return (
            self.num_models == 1
            and self.window is None
            and self.deadline_s is None
            and self.plain_tokens is None
        )

    @property
    def plain_tokens(self) -> int | None:
        """Tokens before the first placed extra: beyond them equal tokens may have other K/V; None: no limit."""
        return min((item[0] for item in self.extra if isinstance(item, tuple)), default=None)


def root_of(store: TierStore, page_size: int, salt: bytes, extra: Iterable[Extra]) -> bytes:
    """The same for requests whose equal tokens have equal keys, and for no others. Placed extras do not count.

    The key of one page that is the same for everybody: so what separates keys separates roots.
    """
    shared = [item for item in extra if not isinstance(item, tuple)]
    return store.keys([0] * page_size, salt=salt, extra=shared)[0]


def check_storing(storing: str) -> None:
    """Raise ValueError for what is no ``Storing``."""
    if storing not in get_args(Storing):
        raise ValueError(f"storing is {storing!r}; allowed: {', '.join(get_args(Storing))}")
