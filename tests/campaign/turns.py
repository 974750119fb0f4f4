"""One turn of a kill campaign, as it travels to the child that plays it, and what a look afterwards found."""

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
"""Lies a victim may be told to tell: a sync that was none, a version that is another's, a capacity that is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is written: pages of ``page_nbytes``, numbered below ``space``. Content follows from number and version."""

    codec: Literal["none", "exp"]
    page_nbytes: int
    space: int
    fingerprint: str = rig.FINGERPRINT

    @property
    def layout(self) -> PageLayout:
        """One group of 16-bit numbers."""
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
        """Noise; with ``exp`` three pages of four are worth encoding."""
        if self.codec == "none" or number % 4 == 0:
            return page(number, version, self.page_nbytes)
        drawn = np.random.default_rng([number, version]).standard_normal(
            -(-self.page_nbytes // 2), dtype=np.float32
        )
        return (drawn.view(np.uint32) >> 16).astype("<u2").view(np.uint8)[: self.page_nbytes]

    def parent(self, number: int) -> PageKey | None:
        """The page before; none for the first of eight."""
        return key(number - 1) if number % 8 else None

    def open(self, home: Path, capacity: int, payload: str) -> Rig:
        """A tier for these pages."""
        return Rig(self, home, capacity, payload)


class Rig(rig.Rig):
    """A tier with the pages of a subject."""

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
        """Write a version of each; the transfer's id."""
        subject = self._subject
        transfer = self.transfer([key(n) for n in numbers], [subject.parent(n) for n in numbers])
        self.tier.submit_write(transfer, [subject.page(n, version) for n in numbers])
        return transfer.id


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a victim is given. ``there``: version of each page in the directory. ``greedy``: it minds no budget."""

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
    """What was found. ``faults``: everything that must not be, in words."""

    there: dict[int, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    pages: int = 0
    nbytes: int = 0
    capacity: int = 0
    disk_nbytes: int = 0

    def line(self) -> str:
        """As a child says it."""
        return json.dumps(asdict(self))

    @classmethod
    def heard(cls, line: str) -> Self:
        """From the line."""
        told = json.loads(line)
        told["there"] = {int(number): version for number, version in told["there"].items()}
        return cls(**told)


def disk_nbytes(home: Path) -> int:
    """Allocated bytes of everything in a home, whose files and folders may come and go meanwhile."""
    total = 0
    for folder, _, names in os.walk(home):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            with suppress(FileNotFoundError):
                total += os.lstat(path).st_blocks * 512
    return total
