"""What all sources of hints do: each hint is newer than the last of its name, and a closed store is no error."""

from __future__ import annotations

from contextlib import suppress
from time import monotonic_ns
from typing import TYPE_CHECKING

from tierstore.errors import StoreClosed
from tierstore.types import Hint, HintResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.store import TierStore
    from tierstore.types import PageKey


def expect(
    store: TierStore,
    name: str,
    keys: Sequence[PageKey],
    in_s: float,
    *,
    priority: int = 0,
    ttl_s: float | None = None,
) -> bool:
    """Hints that these pages are needed in ``in_s`` seconds; whether somebody will bring them up."""
    # The clock, since somebody may have given hints of this name before.
    hint = Hint(name, monotonic_ns(), tuple(keys), deadline_s=max(0.0, in_s), priority=priority, ttl_s=ttl_s)
    with suppress(StoreClosed):
        return store.hint(hint) is HintResult.DEFERRED
    return False


def end(store: TierStore, name: str) -> None:
    """Nothing is expected under this name any more."""
    with suppress(StoreClosed):
        store.hint(Hint(name, monotonic_ns(), ()))
