"""The messages between a kill campaign and its children: the arguments of a turn, and what was found after it."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from tests.nvme import rig
from tests.nvme.rig import key, page
from tierstore.page import PageLayout, PageSpec
from tierstore.types import PageKey

PLANTS = ("early", "stale", "greedy disk")
"""Faults that can be planted in a victim: it skips syncs, writes wrong versions, or opens with too large a capacity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The pages of a campaign: ``page_nbytes`` bytes each, with numbers below ``space``.

    The content of a page follows from its number and its version.
    """

    codec: Literal["none", "exp"]
    page_nbytes: int
    space: int
    fingerprint: str = rig.FINGERPRINT

    @property
    def layout(self) -> PageLayout:
        """Return the layout of a page: one KV group with 16-bit elements."""
        numbers, rest = divmod(self.page_nbytes, 4)
        tokens = 16 if numbers % 16 == 0 else 4
        assert not rest
        assert not numbers % tokens
        return PageLayout.of(
            PageSpec(
                num_layers=1,
                page_size=tokens,
                num_kv_heads=1,
                head_dim=numbers // tokens,
                dtype="bfloat16",
                model="campaign",
            )
        )

    def page(self, number: int, version: int) -> NDArray[np.uint8]:
        """Return the content of a page in this version.

        Pages contain noise. With the codec ``exp``, three pages in four contain data that the codec can encode.
        """
        if self.codec == "none" or number % 4 == 0:
            return page(number, version, self.page_nbytes)
        drawn = np.random.default_rng([number, version]).standard_normal(
            -(-self.page_nbytes // 2), dtype=np.float32
        )
        return (drawn.view(np.uint32) >> 16).astype("<u2").view(np.uint8)[: self.page_nbytes]

    def parent(self, number: int) -> PageKey | None:
        """Return the key of the previous page. Every eighth page has no parent."""
        return key(number - 1) if number % 8 else None

    def open(self, home: Path, capacity: int, payload: str) -> Rig:
        """Open a tier in ``home`` for this subject's pages."""
        return Rig(self, home, capacity, payload)


class Rig(rig.Rig):
    """A tier that holds the pages of a subject."""

    def __init__(self, subject: Subject, home: Path, capacity: int, payload: str) -> None:
        self._subject = subject
        super().__init__(
            home,
            capacity=capacity,
            page_nbytes=subject.page_nbytes,
            fingerprint=subject.fingerprint,
            payload=payload,
            codec=subject.codec,
            layout=subject.layout,
        )

    def submit(self, numbers: list[int], version: int) -> int:
        """Submit a write of this version of each page. Returns the ID of the transfer."""
        subject = self._subject
        transfer = self.transfer([key(n) for n in numbers], [subject.parent(n) for n in numbers])
        self.tier.submit_write(transfer, [subject.page(n, version) for n in numbers])
        return transfer.id


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Arguments of a victim.

    ``there`` maps each page in the directory to its version. A ``greedy`` victim ignores the budget. Versions of its
    writes start at ``first_version``.
    """

    subject: Subject
    home: Path
    payload: str
    capacity: int
    seed: int
    first_version: int
    there: dict[int, int]
    greedy: bool = False
    plant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The findings of a child that examined the directory after a kill.

    ``there`` maps each page that was found to its version. ``faults`` describes each error. ``pages`` and
    ``nbytes`` count what was compared.
    """

    there: dict[int, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    pages: int = 0
    nbytes: int = 0
    capacity: int = 0
    disk_nbytes: int = 0

    def line(self) -> str:
        """Return the result as the line that a child sends."""
        return json.dumps(asdict(self))

    @classmethod
    def heard(cls, line: str) -> Self:
        """Return the result that a child has sent as this line."""
        told = json.loads(line)
        told["there"] = {int(number): version for number, version in told["there"].items()}
        return cls(**told)


def disk_nbytes(home: Path) -> int:
    """Return how many bytes the disk has allocated for a directory. Files may be created and deleted meanwhile."""
    total = 0
    for folder, _, names in os.walk(home):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            with suppress(FileNotFoundError):
                total += os.lstat(path).st_blocks * 512
    return total
