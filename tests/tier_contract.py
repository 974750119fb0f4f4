"""Test what every tier guarantees about bytes. The tests also read the tier's memory or files directly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tierstore.page import PageSpec

Page = NDArray[np.uint8]

SIZES = [(1, 1), (3, 1), (16, 64), (17, 5), (64, 64)]
"""Pairs of tokens per page and head_dim. Pages take a few bytes to several disk blocks; most are unaligned."""


def spec_of(size: tuple[int, int]) -> PageSpec:
    return PageSpec(
        num_layers=3, page_size=size[0], num_kv_heads=1, head_dim=size[1], dtype="uint8", model="contract"
    )


class TierUnderTest(ABC):
    """A tier with ``num_slots`` pages. ``write`` and ``read`` use the tier, ``look`` bypasses it."""

    num_slots: int

    @abstractmethod
    def write(self, slots: Sequence[int], pages: Sequence[Page]) -> None:
        """Write pages to these slots through the tier, as one batch."""

    @abstractmethod
    def read(self, slots: Sequence[int]) -> list[Page]:
        """Return the pages in these slots, read through the tier as one batch."""

    @abstractmethod
    def look(self, slot: int) -> Page:
        """Return the page in a slot, read without using the tier."""

    @abstractmethod
    def close(self) -> None: ...


class TierContract(ABC):
    """Tests of a tier's promises. A subclass implements ``open``, which opens the tier under test."""

    @abstractmethod
    def open(self, spec: PageSpec, num_slots: int, home: Path) -> TierUnderTest: ...

    def pages(self, spec: PageSpec, number: int, seed: int = 0) -> list[Page]:
        chance = np.random.default_rng(seed)
        return [chance.integers(0, 256, spec.page_nbytes, dtype=np.uint8) for _ in range(number)]

    @pytest.mark.parametrize("size", SIZES)
    def test_written_pages_are_listed_and_read_back(self, size: tuple[int, int], tmp_path: Path) -> None:
        spec = spec_of(size)
        tier = self.open(spec, 5, tmp_path)
        pages = self.pages(spec, 5)
        tier.write(range(5), pages)
        for slot, (page, got) in enumerate(zip(pages, tier.read(range(5)), strict=True)):
            np.testing.assert_array_equal(got, page)
            np.testing.assert_array_equal(tier.look(slot), page)
        tier.close()

    @pytest.mark.parametrize("size", SIZES)
    def test_one_slot_works(self, size: tuple[int, int], tmp_path: Path) -> None:
        spec = spec_of(size)
        tier = self.open(spec, 1, tmp_path)
        for seed in range(3):
            pages = self.pages(spec, 1, seed)
            tier.write([0], pages)
            np.testing.assert_array_equal(tier.look(0), pages[0])
            np.testing.assert_array_equal(tier.read([0])[0], pages[0])
        tier.close()

    def test_the_last_write_wins(self, tmp_path: Path) -> None:
        spec = spec_of((17, 5))
        tier = self.open(spec, 3, tmp_path)
        for seed in range(4):
            pages = self.pages(spec, 3, seed)
            tier.write([2, 0, 1], pages)
        for slot, page in zip([2, 0, 1], pages, strict=True):
            np.testing.assert_array_equal(tier.look(slot), page)
        tier.close()

    @pytest.mark.parametrize("size", SIZES)
    def test_slots_do_not_overlap(self, size: tuple[int, int], tmp_path: Path) -> None:
        spec = spec_of(size)
        tier = self.open(spec, 4, tmp_path)
        pages = self.pages(spec, 4)
        tier.write(range(4), pages)
        for slot in range(4):
            pages[slot] = self.pages(spec, 1, 100 + slot)[0]
            tier.write([slot], [pages[slot]])
            for other in range(4):
                np.testing.assert_array_equal(tier.look(other), pages[other])
        tier.close()

    def test_part_of_the_pages_in_any_order_may_be_read_and_written(self, tmp_path: Path) -> None:
        spec = spec_of((3, 1))
        tier = self.open(spec, 6, tmp_path)
        pages = self.pages(spec, 6)
        tier.write([5, 3, 1], [pages[5], pages[3], pages[1]])
        tier.write([0, 4], [pages[0], pages[4]])
        for slot, got in zip([1, 0, 5], tier.read([1, 0, 5]), strict=True):
            np.testing.assert_array_equal(got, pages[slot])
        assert tier.read([]) == []
        tier.close()

    def test_read_page_belongs_to_the_reader(self, tmp_path: Path) -> None:
        spec = spec_of((16, 64))
        tier = self.open(spec, 2, tmp_path)
        pages = self.pages(spec, 2)
        tier.write([0, 1], pages)
        got = tier.read([0])[0]
        got.fill(0)
        np.testing.assert_array_equal(tier.look(0), pages[0])
        tier.close()
