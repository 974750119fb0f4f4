"""The sequences of one request: a left-padded batch, several answers to one prompt, or beams.

transformers measures lengths in columns of the padded batch. They include the padding, and all rows have the same
number of columns. A row's tokens start after its padding. Pages contain no padding: each row has the pages that its
unpadded sequence would have alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tierstore.adapters.huggingface.prefix import Tail
from tierstore.adapters.huggingface.request import Terms
from tierstore.adapters.huggingface.sequence import PagedSequence
from tierstore.block_table import PrivateSlots
from tierstore.errors import CapacityError, StoreClosed
from tierstore.types import Tier

_ROOM_S = 1.0
"""Maximum time to wait for HBM that others use before pages of the request move to host memory, in seconds."""


@dataclass(frozen=True, slots=True)
class Span:
    """One row's part of a forward pass.

    The pass computes tokens ``[start, stop)`` of the row. K and V of these and all earlier tokens are in
    ``slots``.
    """

    start: int
    stop: int
    slots: torch.Tensor
    """The row's block table, int64 ``[pages]``, on the pages' device. NO_PAGE for pages that were dropped."""
    pages: NDArray[np.int64]
    """The same block table in host memory."""
    hosted: int = 0
    """Number of the first pages that stream from host memory. Their entries in the block tables are host slots."""


@dataclass(frozen=True, slots=True)
class Places:
    """The places to which a forward pass writes new K and V. All tensors are int64.

    K and V in row ``rows[i]`` and column ``columns[i]`` of the pass's input are written to token
    ``offsets[i]`` of the page in slot ``slots[i]``. Columns are counted from the first one fed in the pass.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    slots: torch.Tensor
    offsets: torch.Tensor


class PagedBatch:
    """The rows of a request. Row r has ``paddings[r]`` columns of padding, followed by a sequence. Not thread-safe."""

    def __init__(
        self, terms: Terms, prompts: Sequence[Sequence[int]], width: int, tail: Tail | None = None
    ) -> None:
        """Open a sequence for every prompt.

        Args:
            terms: Options of the request.
            prompts: The unpadded prompts.
            width: Number of columns in the padded batch.
            tail: The partially filled last page of an earlier request. Allowed only with a single
                prompt. The prompt continues the page if the page's tokens match it.
        """
        self.terms = terms
        self.rows: list[PagedSequence] = []
        self.paddings = [width - len(prompt) for prompt in prompts]
        self._private = PrivateSlots()
        self._step: list[int] = []
        try:
            for prompt in prompts:
                self.rows.append(PagedSequence.open(terms, self._private, prompt, tail))
        except BaseException:
            self.close()
            raise
        hits = [pad + row.held for pad, row in zip(self.paddings, self.rows, strict=True)]
        start = max(0, min(*hits, width - 1))
        self.columns = [start] * terms.num_models
        """For each model, the number of columns in the cache: found in the store, or fed since."""
        self.behind = 0
        """How many of the last columns must be fed again, because their stored pages could not be loaded."""
        self._feeding = 0
        """The value of ``behind`` before ``owed``, during the forward pass that feeds these columns again."""
        self.shortened = False
        """Whether the cache has fewer columns than the caller may think, because such a pass was interrupted."""
        self.in_parts = False
        """Whether the current pass is one of several into which a call was divided, and not the last one."""
        self.copied_tokens = sum(row.copied_tokens for row in self.rows)
        self.reused_by_tier: Counter[Tier] = Counter()
        for pad, row in zip(self.paddings, self.rows, strict=True):
            self._count_reused(row.origins, max(0, start - pad))

    @property
    def shared_pages(self) -> int:
        """Return how many pages are currently used by at least two rows."""
        pointing = Counter(slot for row in self.rows for slot in set(row.slots))
        return sum(count > 1 for count in pointing.values())

    @property
    def arriving(self) -> bool:
        """Return whether pages of a stored prefix may still be in flight."""
        return any(row.arrival is not None for row in self.rows)

    def comes(self) -> bool:
        """Wait until the copies of the first layer of all stored prefixes have been submitted.

        Return False if this failed for a row, or if columns must be fed again. The caller must then call ``settle``.
        """
        if self.behind:
            return False
        coming = [row.arrival is None or row.arrival.comes() for row in self.rows]
        return all(coming)

    def await_layer(self, group: int, index: int) -> None:
        """Make the caller's current stream wait for layer ``index`` of KV group ``group`` in all rows.

        On the CPU, the caller itself waits.
        """
        for row in self.rows:
            if row.arrival is not None:
                row.arrival.layer(group, index)

    def settle(self) -> bool:
        """Wait for all stored pages in flight. Return True if any could not be loaded.

        In this case, the results of forward passes that ran in the meantime are invalid, and the last
        ``behind`` columns must be fed again.
        """
        lost = False
        try:
            for row in self.rows:
                lost |= row.settle()
        finally:
            # also if the wait for a later row was interrupted
            if lost:
                self._count_behind()
        return lost

    def _count_behind(self) -> None:
        """Recompute ``behind`` and the numbers of reused tokens, because pages of some rows could not be loaded."""
        held = min(pad + row.held for pad, row in zip(self.paddings, self.rows, strict=True))
        self.behind = max(0, self.columns[0] - held)
        self.reused_by_tier.clear()
        for pad, row in zip(self.paddings, self.rows, strict=True):
            self._count_reused(row.origins, max(0, self.columns[0] - self.behind - pad))
        self.copied_tokens = sum(row.copied_tokens for row in self.rows)

    def owed(self, rows: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return the tokens and positions of the last ``behind`` columns, which must be fed again.

        From now on, these columns count as not fed. If the next pass fails, call ``not_fed``.

        Args:
            rows: Number of rows in the next pass, a multiple of the rows in the cache.

        Returns:
            The tokens and the positions. Each is a list with one list per row of the next pass.
        """
        first, stop = self.columns[0] - self.behind, self.columns[0]
        self.columns, self.behind, self._feeding = [first] * len(self.columns), 0, self.behind
        tokens, positions = [], []
        for fed in range(rows):
            index = fed * len(self.rows) // rows
            pad, prompt = self.paddings[index], self.rows[index].expected
            where = [max(0, column - pad) for column in range(first, stop)]
            positions.append(where)
            tokens.append([prompt[at] for at in where])
        return tokens, positions

    def not_fed(self) -> None:
        """Undo ``owed`` after its forward pass has failed, so that the next pass feeds the columns again."""
        if self._feeding:
            self.columns = [columns + self._feeding for columns in self.columns]
            self.behind, self._feeding = self._feeding, 0

    def begin_pass(self) -> None:
        """Find out whether the last forward pass was interrupted after ``owed``, for example by Ctrl-C.

        ``not_fed`` is not called for such a pass, because torch calls hooks only after subclasses of Exception. The
        columns that the pass was to feed again count as not fed from then on.
        """
        self.shortened |= self._feeding > 0
        self._feeding = 0

    def expand(self, rows: int) -> None:
        """Repeat each row until there are ``rows`` rows, for ``num_return_sequences`` or beams.

        The copies of a row are adjacent and share its pages.

        Raises:
            ValueError: ``rows`` is not a multiple of the current number of rows.
        """
        times, odd = divmod(rows, len(self.rows))
        if odd or not times:
            raise ValueError(
                f"this cache holds {len(self.rows)} sequences, but the model runs a batch of {rows}: create a "
                "TierStoreCache for the prompts of this batch"
            )
        if times > 1:
            self.select([row for row in range(len(self.rows)) for _ in range(times)])

    def select(self, indices: Sequence[int]) -> None:
        """Replace row ``i`` with the current row ``indices[i]``.

        A row that is selected several times is forked. A row that is not selected is closed. Unless all rows
        stay in place, this first waits for pages in flight.

        Raises:
            ValueError: ``indices`` is empty or contains an invalid index. Nothing has changed.
        """
        if not indices or not all(0 <= index < len(self.rows) for index in indices):
            raise ValueError(
                f"indices must select at least one row, each from 0 to {len(self.rows) - 1}, got {list(indices)}"
            )
        if list(indices) == list(range(len(self.rows))):
            return
        self.settle()
        old = self.rows
        kept = set[int]()
        self.rows = []
        for index in indices:
            self.rows.append(old[index].fork() if index in kept else old[index])
            kept.add(index)
        self.paddings = [self.paddings[index] for index in indices]
        for index, row in enumerate(old):
            if index not in kept:
                row.close()

    def expect(self, token_ids: Sequence[Sequence[int]], first_column: int) -> None:
        """Raise ValueError if tokens differ from the prompts. Tokens after the end of a prompt are not checked.

        Args:
            token_ids: One list of tokens per row, including padding.
            first_column: The column of the first token in each list.
        """
        times, odd = divmod(len(token_ids), len(self.rows))
        if not odd:
            for fed, tokens in enumerate(token_ids):
                # Rows that will be repeated (``expand``) are adjacent in the input.
                index = fed // times
                start = max(0, first_column - self.paddings[index])
                stop = max(0, first_column + len(tokens) - self.paddings[index])
                self.rows[index].expect(start, tokens[len(tokens) - (stop - start) :])

    def begin(
        self, model: int, width: int, token_ids: Sequence[Sequence[int]] | None
    ) -> tuple[list[Span], Places]:
        """Prepare to feed ``width`` columns to ``model``. Waits for free slots, for all rows at once.

        Args:
            model: Index of the model.
            width: Number of columns.
            token_ids: ``width`` tokens for each row. None if unknown.

        Returns:
            One span per row, and the places to which new K and V must be written. Rows with equal content
            that are fed equal tokens are written only once.

        Raises:
            CapacityError: HBM did not have enough space in time.
        """
        stop = self.columns[model] + width
        self._step = self._leaders(model, width, token_ids)
        writes = {}
        for index in sorted(set(self._step)):
            start, end = self._positions(index, model, width)
            tokens = None if token_ids is None else token_ids[index][width - (end - start) :]
            writes[index] = (self.rows[index].begin(model, start, end, tokens), end)
        self._grow(writes)
        hosts = {leader: self._block_table(self.rows[leader]) for leader in writes}
        device = self.terms.pages.device
        tables = {leader: torch.from_numpy(slots).to(device) for leader, slots in hosts.items()}
        spans = []
        for index, leader in enumerate(self._step):
            start, end = self._positions(index, model, width)
            spans.append(Span(start, end, tables[leader], hosts[leader], self.rows[leader].num_hosted))
        return spans, self._places(writes, tables, stop - width)

    def finish(self, model: int, width: int, token_ids: Sequence[Sequence[int]] | None) -> None:
        """Record that all layers of ``model`` have written the tokens prepared by ``begin``.

        Rows that were equal to a written row become forks of it.
        """
        for index in sorted(set(self._step)):
            start, stop = self._positions(index, model, width)
            tokens = None if token_ids is None else token_ids[index][width - (stop - start) :]
            self.rows[index].finish(model, start, stop, tokens, certain=self.in_parts)
        # Only leaders were written. Replace each other row by a fork of its leader, but keep its own prompt.
        if self._step != list(range(len(self.rows))):
            expected = [row.expected for row in self.rows]
            self.select(self._step)
            for row, prompt in zip(self.rows, expected, strict=True):
                row.expected = list(prompt)
        self.columns[model] += width
        self._feeding, self.shortened = 0, False

    def crop(self, model: int, columns: int) -> None:
        """Remove the last ``columns`` columns of ``model``.

        If ``model`` is 0, the first model, the columns are removed for all models and their pages are released.
        """
        self.settle()
        self.begin_pass()
        stop = max(0, self.columns[model] - columns)
        self.behind = max(0, self.behind - columns)
        if model == 0:
            for pad, row in zip(self.paddings, self.rows, strict=True):
                row.truncate(max(0, stop - pad))
            self.columns = [min(stop, each) for each in self.columns]
        self.columns[model] = stop

    def reset(self) -> None:
        """Remove all tokens. Unlike ``crop``, this also works after pages were dropped or moved to host memory.

        Call it only after all copies from host memory have completed.
        """
        self.settle()
        self.behind = self._feeding = 0
        self.shortened = False
        for row in self.rows:
            row.reset()
        if self.terms.host is not None:
            self.terms.host.let_go()
        self.columns = [0] * self.terms.num_models

    def take_tail(self) -> Tail | None:
        """Remove the partially filled last page from the only row and return it.

        The caller owns the page's slot. Return None if there are several rows, or if the row has no such page
        or shares it.
        """
        self.settle()
        tail = self.rows[0].take_tail() if len(self.rows) == 1 else None
        if tail is not None:
            stop = self.paddings[0] + tail.page * self.terms.pages.page_size
            self.columns = [min(stop, each) for each in self.columns]
        return tail

    def close(self) -> None:
        """Close all rows, which seals their full pages and frees all others. Idempotent."""
        for row in self.rows:
            row.close()
        if self.terms.host is not None:
            with suppress(StoreClosed):
                self.terms.host.let_go()

    @property
    def most_columns(self) -> int:
        """Return how many columns a pass may have so that the pages that it writes fit into HBM."""
        each = self.terms.hbm_slots // len(self.rows)
        return max(1, (each - 1) * self.terms.pages.page_size)

    def too_wide(self, width: int) -> bool:
        """Return whether a pass of ``width`` columns must be divided, because HBM cannot hold all pages that it writes.

        Raises:
            CapacityError: Not even HBM and host memory together can hold these pages.
        """
        host, size = self.terms.host, self.terms.pages.page_size
        if host is None or width <= self.most_columns:
            return False
        pages, room = len(self.rows) * (width // size), self.terms.hbm_slots + host.num_slots - len(host)
        if pages > room:
            raise CapacityError(
                f"{width} new tokens in {len(self.rows)} sequences need {pages} pages, but HBM and host memory have "
                f"room for {room} ({self.terms.hbm_slots} and {host.num_slots} pages, {len(host)} of them in use by "
                "this request): raise host.capacity or hbm.capacity, or shorten the prompt"
            )
        return True

    def tight(self, width: int) -> bool:
        """Return whether older pages may have to leave HBM before a pass of ``width`` columns."""
        if self.terms.host is None:
            return False
        used = {slot for row in self.rows for slot in row.slots}
        new = len(self.rows) * (width // self.terms.pages.page_size + 2)
        return len(used) + new > self.terms.hbm_slots

    # -- inside -------------------------------------------------------------------------------------------------

    def _positions(self, index: int, model: int, width: int) -> tuple[int, int]:
        """Return the positions ``(start, stop)`` of a row's tokens in the next ``width`` columns of ``model``.

        ``start`` equals ``stop`` if these columns are all padding.
        """
        pad, start = self.paddings[index], self.columns[model]
        return max(0, start - pad), max(0, start + width - pad)

    def _leaders(self, model: int, width: int, token_ids: Sequence[Sequence[int]] | None) -> list[int]:
        """Return the leader of each row: the first row that has the same content and is fed the same tokens.

        Only leaders are written. If the tokens are unknown, each row is its own leader.
        """
        leaders: list[int] = []
        for index, row in enumerate(self.rows):
            twin = index
            if token_ids is not None:
                for other in sorted(set(leaders)):
                    if (
                        token_ids[other] == token_ids[index]
                        and self.paddings[other] == self.paddings[index]
                        and self.rows[other].equals(row)
                    ):
                        twin = other
                        break
            leaders.append(twin)
        return leaders

    def _grow(self, writes: dict[int, tuple[int, int]]) -> None:
        needs = {index: self.rows[index].missing_slots(*write) for index, write in writes.items()}
        total = sum(needs.values())
        slots = self._allocate(total) if total else []
        for index, count in needs.items():
            taken, slots = slots[:count], slots[count:]
            # If an earlier row has just copied a page that it shared with this row, the page is no longer
            # shared, so this row needs one slot less.
            spare = count - self.rows[index].missing_slots(*writes[index])
            if spare:
                self.terms.store.free(taken[:spare])
            self.rows[index].grow(*writes[index], taken[spare:])

    def _allocate(self, count: int) -> list[int]:
        """Allocate slots. If HBM is full, the request's oldest pages move to host memory to make room."""
        store, wait_s = self.terms.store, self.terms.space_s
        used = {slot for row in self.rows for slot in row.slots}
        if self.terms.host is None or count > self.terms.hbm_slots:
            return store.allocate(count, timeout_s=wait_s)
        # Others that use the rest of HBM may be about to free it.
        fits = len(used) + count <= self.terms.hbm_slots
        wait_s = min(_ROOM_S, wait_s) if fits else 0.0
        with suppress(CapacityError):
            return store.allocate(count, timeout_s=wait_s)
        depth = self._depth(count)
        for row in self.rows:
            row.move_down(depth)
        return store.allocate(count, timeout_s=self.terms.space_s)

    def _depth(self, count: int) -> int:
        """Return how many pages every row must move down so that ``count`` slots become free, or all if too few do."""
        movable = [row.movable for row in self.rows]
        longest = max(map(len, movable))
        for depth in range(1, longest):
            kept = {
                slot for row, own in zip(self.rows, movable, strict=True) for slot in row.slots[len(own) :]
            }
            kept |= {slot for own in movable for slot in own[depth:]}
            if len({slot for own in movable for slot in own[:depth]} - kept) >= count:
                return depth
        return longest

    def _block_table(self, row: PagedSequence) -> NDArray[np.int64]:
        slots = np.array(row.table.slots, dtype=np.int64)
        slots[: row.num_hosted] = row.hosted[: row.num_hosted]
        return slots

    def _places(
        self, writes: dict[int, tuple[int, int]], tables: dict[int, torch.Tensor], first_column: int
    ) -> Places:
        page_size, device = self.terms.pages.page_size, self.terms.pages.device
        rows, columns, slots, offsets = [], [], [], []
        for index, (first, stop) in writes.items():
            where = torch.arange(first, stop, device=device)
            rows.append(torch.full_like(where, index))
            columns.append(where + self.paddings[index] - first_column)
            slots.append(tables[index][where // page_size])
            offsets.append(where % page_size)
        return Places(torch.cat(rows), torch.cat(columns), torch.cat(slots), torch.cat(offsets))

    def _count_reused(self, origins: Sequence[tuple[Tier, int]], num_tokens: int) -> None:
        for tier, count in origins:
            self.reused_by_tier[tier] += min(count, num_tokens)
            num_tokens -= min(count, num_tokens)
