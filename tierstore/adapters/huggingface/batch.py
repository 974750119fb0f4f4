"""The sequences of one request: a batch with left padding, several answers to one prompt, or beams.

transformers counts columns, which are the same for all rows. A row's tokens begin after its padding. Pages hold no
padding: they are the pages of the unpadded sequence, whatever else is in the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tierstore.adapters.huggingface.prefix import Tail
from tierstore.adapters.huggingface.request import Terms
from tierstore.adapters.huggingface.sequence import PagedSequence
from tierstore.block_table import NO_PAGE, PrivateSlots
from tierstore.types import Tier


@dataclass(frozen=True, slots=True)
class Span:
    """What a forward pass does to one row: queries for tokens ``[start, stop)``, keys in ``slots``."""

    start: int
    stop: int
    slots: torch.Tensor
    """The block table, int64 ``[pages]``; NO_PAGE behind a window."""
    pages: NDArray[np.int64]
    """The same block table on the host."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where new K and V go: column ``columns[i]`` of row ``rows[i]`` to ``offsets[i]`` in ``slots[i]``; int64."""

    rows: torch.Tensor
    columns: torch.Tensor
    slots: torch.Tensor
    offsets: torch.Tensor


class PagedBatch:
    """The rows of a request. Row r is one sequence after ``paddings[r]`` columns of padding. Not thread-safe."""

    def __init__(
        self, terms: Terms, prompts: Sequence[Sequence[int]], width: int, tail: Tail | None = None
    ) -> None:
        """Open every prompt.

        Args:
            width: Columns of the padded batch.
            tail: A half-full page that the only prompt may continue.
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
        """Columns that each model has fed."""
        self.behind = 0
        """Number of these columns that must be fed again, because their stored pages did not arrive."""
        self.copied_tokens = sum(row.copied_tokens for row in self.rows)
        self.reused_by_tier: Counter[Tier] = Counter()
        for pad, row in zip(self.paddings, self.rows, strict=True):
            self._count_reused(row.origins, max(0, start - pad))

    @property
    def shared_pages(self) -> int:
        """Number of pages that at least two rows share now."""
        pointing = Counter(slot for row in self.rows for slot in set(row.table.slots) if slot != NO_PAGE)
        return sum(count > 1 for count in pointing.values())

    @property
    def arriving(self) -> bool:
        """Whether a part of the stored prefixes is still in flight."""
        return any(row.arrival is not None for row in self.rows)

    def comes(self) -> bool:
        """Wait until the first layers of the stored prefixes are in flight. False if some of them failed."""
        coming = [row.arrival is None or row.arrival.comes() for row in self.rows]
        return all(coming)

    def await_layer(self, group: int, index: int) -> None:
        """Make the caller's stream wait for this layer of KV group ``group``, as far as it arrives."""
        for row in self.rows:
            if row.arrival is not None:
                row.arrival.layer(group, index)

    def settle(self) -> bool:
        """Wait for everything in flight. Returns whether something failed; then forward passes since then are void."""
        lost = [row.settle() for row in self.rows]
        if not any(lost):
            return False
        held = min(pad + row.held for pad, row in zip(self.paddings, self.rows, strict=True))
        self.behind = max(0, self.columns[0] - held)
        self.reused_by_tier.clear()
        for pad, row in zip(self.paddings, self.rows, strict=True):
            self._count_reused(row.origins, max(0, self.columns[0] - self.behind - pad))
        self.copied_tokens = sum(row.copied_tokens for row in self.rows)
        return True

    def owed(self, rows: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return the tokens and positions of the columns ``behind``, to be fed with the next ones.

        Args:
            rows: Number of rows that are fed.

        Returns:
            Two lists with one entry per row. From now on these columns count as not fed.
        """
        first, stop = self.columns[0] - self.behind, self.columns[0]
        self.columns, self.behind = [first] * len(self.columns), 0
        tokens, positions = [], []
        for fed in range(rows):
            index = fed * len(self.rows) // rows
            pad, prompt = self.paddings[index], self.rows[index].expected
            where = [max(0, column - pad) for column in range(first, stop)]
            positions.append(where)
            tokens.append([prompt[at] for at in where])
        return tokens, positions

    def expand(self, rows: int) -> None:
        """Repeat each row so that there are ``rows`` of them (``num_return_sequences``, beams). Pages are shared."""
        times, odd = divmod(rows, len(self.rows))
        if odd or not times:
            raise ValueError(f"this cache holds {len(self.rows)} sequences, the model runs a batch of {rows}")
        if times > 1:
            self.select([row for row in range(len(self.rows)) for _ in range(times)])

    def select(self, indices: Sequence[int]) -> None:
        """Replace row ``i`` by the present row ``indices[i]``: winning beams are forked, losing ones end.

        Raises:
            ValueError: ``indices`` is empty or names a row that does not exist. Nothing changes.
        """
        if not indices or not all(0 <= index < len(self.rows) for index in indices):
            raise ValueError(
                f"indices must name at least one row, from 0 to {len(self.rows) - 1}, got {list(indices)}"
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
        """Raise ValueError if these tokens, one list per row, fed from ``first_column`` on, contradict the prompts."""
        times, odd = divmod(len(token_ids), len(self.rows))
        if not odd:
            for fed, tokens in enumerate(token_ids):
                # Rows that will be repeated (``expand``) are fed side by side.
                index = fed // times
                start = max(0, first_column - self.paddings[index])
                stop = max(0, first_column + len(tokens) - self.paddings[index])
                self.rows[index].expect(start, tokens[len(tokens) - (stop - start) :])

    def begin(
        self, model: int, width: int, token_ids: Sequence[Sequence[int]] | None
    ) -> tuple[list[Span], Places]:
        """Prepare for ``width`` columns of ``model``: allocate space in one step for all rows.

        Args:
            token_ids: ``width`` tokens for each row; None if unknown.

        Raises:
            CapacityError: HBM has no space for them.
        """
        stop = self.columns[model] + width
        self._step = self._leaders(model, width, token_ids)
        writes = {}
        for index in sorted(set(self._step)):
            start, end = self._positions(index, model, width)
            tokens = None if token_ids is None else token_ids[index][width - (end - start) :]
            writes[index] = (self.rows[index].begin(model, start, end, tokens), end)
        self._grow(writes)
        hosts = {leader: np.array(self.rows[leader].table.slots, dtype=np.int64) for leader in writes}
        device = self.terms.pages.device
        tables = {leader: torch.from_numpy(slots).to(device) for leader, slots in hosts.items()}
        spans = []
        for index, leader in enumerate(self._step):
            start, end = self._positions(index, model, width)
            spans.append(Span(start, end, tables[leader], hosts[leader]))
        return spans, self._places(writes, tables, stop - width)

    def finish(self, model: int, width: int, token_ids: Sequence[Sequence[int]] | None) -> None:
        """Note that all layers of ``model`` have written what ``begin`` prepared."""
        for index in sorted(set(self._step)):
            start, stop = self._positions(index, model, width)
            tokens = None if token_ids is None else token_ids[index][width - (stop - start) :]
            self.rows[index].finish(model, start, stop, tokens)
        # The followers were equal until now; the tokens fed to them are their own.
        if self._step != list(range(len(self.rows))):
            expected = [row.expected for row in self.rows]
            self.select(self._step)
            for row, prompt in zip(self.rows, expected, strict=True):
                row.expected = list(prompt)
        self.columns[model] += width

    def crop(self, model: int, columns: int) -> None:
        """Remove the last ``columns`` of ``model``. If it is the first model, they are removed for all models."""
        self.settle()
        stop = max(0, self.columns[model] - columns)
        self.behind = max(0, self.behind - columns)
        if model == 0:
            for pad, row in zip(self.paddings, self.rows, strict=True):
                row.truncate(max(0, stop - pad))
            self.columns = [min(stop, each) for each in self.columns]
        self.columns[model] = stop

    def reset(self) -> None:
        """Start again with nothing, whatever was dropped behind a window."""
        self.settle()
        self.behind = 0
        for row in self.rows:
            row.reset()
        self.columns = [0] * self.terms.num_models

    def take_tail(self) -> Tail | None:
        """Return the half-full last page of the only row, if it exists and is not shared.

        The row then ends before it.
        """
        self.settle()
        tail = self.rows[0].take_tail() if len(self.rows) == 1 else None
        if tail is not None:
            stop = self.paddings[0] + tail.page * self.terms.pages.page_size
            self.columns = [min(stop, each) for each in self.columns]
        return tail

    def close(self) -> None:
        """End all rows. Calling it again has no effect."""
        for row in self.rows:
            row.close()

    # -- inside -------------------------------------------------------------------------------------------------

    def _positions(self, index: int, model: int, width: int) -> tuple[int, int]:
        """Return the range of tokens of a row in the next ``width`` columns; empty if they are all padding."""
        pad, start = self.paddings[index], self.columns[model]
        return max(0, start - pad), max(0, start + width - pad)

    def _leaders(self, model: int, width: int, token_ids: Sequence[Sequence[int]] | None) -> list[int]:
        """Return for each row the first row that is equal and is fed the same; that row writes for all of them."""
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
        slots = self.terms.store.allocate(total, timeout_s=self.terms.timeout_s) if total else []
        for index, count in needs.items():
            taken, slots = slots[:count], slots[count:]
            # Earlier rows may have copied a page that this one shared with them; then it needs one slot less.
            spare = count - self.rows[index].missing_slots(*writes[index])
            if spare:
                self.terms.store.free(taken[:spare])
            self.rows[index].grow(*writes[index], taken[spare:])

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
