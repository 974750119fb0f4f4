"""Bugs to plant in the transformers adapter. Each is a small change of behaviour, and its name says what goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.planting import Plants
from tierstore.adapters.huggingface import prefix, sequence, session
from tierstore.adapters.huggingface.batch import PagedBatch
from tierstore.adapters.huggingface.prefix import Opening, SharedLease, Tail
from tierstore.adapters.huggingface.request import PageGroups, Terms
from tierstore.adapters.huggingface.sequence import PagedSequence
from tierstore.adapters.huggingface.session import Session
from tierstore.block_table import BlockTable, PrivateSlots
from tierstore.lease import Lease
from tierstore.types import PageKey

LLAMA = Plants()
DRAFT = Plants()
WINDOW = Plants()


@LLAMA.bug
def fork_shares_without_counting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrivateSlots, "share", lambda self, slots: None)


@LLAMA.bug
def fork_holds_no_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SharedLease, "share", lambda self: self)


@LLAMA.bug
def select_closes_the_winner(patch: pytest.MonkeyPatch) -> None:
    select = PagedBatch.select

    def wrong(self: PagedBatch, indices: Sequence[int]) -> None:
        winner = self.rows[indices[0]]
        changed = list(indices) != list(range(len(self.rows)))
        select(self, indices)
        if changed:
            winner.close()

    patch.setattr(PagedBatch, "select", wrong)


@LLAMA.bug
def select_forgets_the_padding(patch: pytest.MonkeyPatch) -> None:
    select = PagedBatch.select

    def wrong(self: PagedBatch, indices: Sequence[int]) -> None:
        before = self.paddings
        select(self, indices)
        self.paddings = (before * len(indices))[: len(indices)]

    patch.setattr(PagedBatch, "select", wrong)


@LLAMA.bug
def losers_are_not_closed(patch: pytest.MonkeyPatch) -> None:
    select = PagedBatch.select

    def wrong(self: PagedBatch, indices: Sequence[int]) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(PagedSequence, "close", lambda row: None)
            select(self, indices)

    patch.setattr(PagedBatch, "select", wrong)


@LLAMA.bug
def half_page_has_one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    copy = prefix._copy

    def wrong(terms: Terms, opened: Opening, lease: Lease, count: int) -> None:
        copy(terms, opened, lease, min(count + 1, terms.pages.page_size))

    patch.setattr(prefix, "_copy", wrong)


@LLAMA.bug
def half_page_is_not_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageGroups, "copy", lambda self, src, dst: None)


@DRAFT.bug
def only_the_first_group_is_copied(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: PageGroups, src: int, dst: int) -> None:
        self.groups[0][dst].copy_(self.groups[0][src])

    patch.setattr(PageGroups, "copy", wrong)


@LLAMA.bug
def keys_outlive_a_rollback(patch: pytest.MonkeyPatch) -> None:
    old: dict[int, list[PageKey]] = {}
    keys_to = PagedSequence._keys_to

    def wrong(self: PagedSequence, stop: int) -> list[PageKey]:
        kept = old.get(id(self), [])
        if len(kept) >= stop:
            return kept[:stop]
        old[id(self)] = keys_to(self, stop)
        return old[id(self)]

    patch.setattr(PagedSequence, "_keys_to", wrong)


@WINDOW.bug
def window_is_dropped_too_early(patch: pytest.MonkeyPatch) -> None:
    def wrong(terms: Terms, num_tokens: int, page_size: int) -> int:
        return 0 if terms.window is None else max(0, num_tokens - terms.window) // page_size + 1

    patch.setattr(sequence, "first_needed", wrong)


@LLAMA.bug
def followers_are_not_forked_again(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: PagedBatch, model: int, width: int, token_ids: Any) -> None:
        for index in sorted(set(self._step)):
            start, stop = self._positions(index, model, width)
            self.rows[index].finish(model, start, stop, token_ids[index][width - (stop - start) :])
        self.columns[model] += width

    patch.setattr(PagedBatch, "finish", wrong)


@LLAMA.bug
def old_lease_is_kept_too(patch: pytest.MonkeyPatch) -> None:
    own = PagedSequence._own_lease

    def wrong(self: PagedSequence, stop: int) -> bool:
        if self._holding is not None:
            self._holding._lease.share()
        return own(self, stop)

    patch.setattr(PagedSequence, "_own_lease", wrong)


@LLAMA.bug
def misfit_tail_is_not_freed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix, "give_back", lambda store, tail: None)


@LLAMA.bug
def given_up_tail_is_not_freed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(session, "give_back", lambda store, tail: None)


@LLAMA.bug
def fork_of_a_chat_takes_its_page(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Session, num_tokens: int) -> Tail | None:
        return self._tail

    patch.setattr(Session, "_copy_tail", wrong)


@DRAFT.bug
def page_of_one_model_is_sealed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagedSequence, "_agreed", lambda self: min(self.table.num_tokens, len(self.known)))


@LLAMA.bug
def sealed_pages_are_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockTable, "_to_copy", lambda self, stop, first: [])


@LLAMA.bug
def padding_is_counted_as_tokens(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: PagedBatch, index: int, model: int, width: int) -> tuple[int, int]:
        pad, start = self.paddings[index], self.columns[model]
        return max(0, start - pad + (pad > 0)), max(0, start + width - pad)

    patch.setattr(PagedBatch, "_positions", wrong)
