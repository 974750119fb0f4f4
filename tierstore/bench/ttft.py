"""The time to the first token of an answer over a long stored prefix, beside what it has to take, and recomputing it.

A real model class with random weights answers through the transformers adapter. Where the pages come from decides the
floor: the link (their bytes over that of one contiguous page-locked copy), the disk (the bytes of their records over
what the raw disk reads in the same pieces), or computing the question (the same answer with all pages in HBM).
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import mean, median
from typing import TYPE_CHECKING, Literal

from tierstore.bench.link import Ceiling
from tierstore.bench.raw_disk import RawDisk
from tierstore.bench.ttft_ask import Ask
from tierstore.bench.ttft_rig import SHAPES, random_model, rig
from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tierstore.bench.ttft_rig import Answered, Rig

Floor = Literal["link", "disk", "compute", "none"]

_CONTIGUOUS = 1 << 30
_HELD = 0.6
"""Of a page's bytes: the most that a fixed-ratio codec keeps, with some to spare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftRow:
    """Medians of the rounds. ``ttft_ms``: from the call of ``acquire`` to the first token on the host; ``request_ms``:
    from the prompt's tokens on, their keys made too. ``floor_ms``: what ``floor`` says it takes at least; ``ratio``:
    ``ttft_ms`` over it. ``nbytes``: what was moved, from disk or over the link."""

    tier: str
    codec: str
    prefix: int
    question: int
    rounds: int
    ttft_ms: float
    each_ms: tuple[float, ...]
    """TTFT of each round, in order."""
    least_ms: float
    most_ms: float
    request_ms: float
    nbytes: int
    floor: Floor
    floor_ms: float
    each_floor_ms: tuple[float, ...] = ()
    """Where a round has a floor of its own: by the raw disk before and after it."""
    ratio: float
    ceiling_gbps: float
    same_token: bool
    """As with all pages in HBM."""
    rel_error: float
    tflops: float = 0.0
    """Of a prompt that was computed, ``chunk`` tokens at a time."""
    chunk: int = 0

    def plain(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


class Bench:
    """One model on one device. ``link_gbps``: of one contiguous copy to the device, the median of ``rounds``."""

    def __init__(self, ask: Ask) -> None:
        """Makes the model. ConfigError for a device that is not there."""
        self.ask = ask
        block = Ceiling(ask.device, min(_CONTIGUOUS, ask.prefix * 4096))
        block.gbps("h2d")
        self.link_gbps = median(block.gbps("h2d") for _ in range(ask.rounds))
        del block
        self._model = random_model(SHAPES[ask.shape], ask.device, ask.prefix + ask.question + ask.page_size)
        self._hit_s = 0.0
        self._token: dict[int, int] = {}
        """With all pages in HBM, by length of prefix."""

    @property
    def parameters(self) -> int:
        """Of the model."""
        return self._model.num_parameters()

    def memory_rows(self, chunks: Sequence[int]) -> Iterator[TtftRow]:
        """From HBM and from HOST as they are, and the whole prompt computed, once with chunks of each size."""
        with self._rig(self.ask.prefix, {"host": self._host(self.ask.prefix)}) as store:
            hits = self._answers(store, Tier.HBM)
            self._hit_s = median(each.seconds for each in hits)
            self._token[self.ask.prefix] = hits[0].token
            yield self._row("HBM", "none", self.ask.prefix, hits, 0, ("none", 0.0, 0.0), 0.0)
            store.checked(lossy=False)
            found = self._answers(store, Tier.HOST)
            error = store.checked(lossy=False)
            yield self._row(
                "HOST", "none", self.ask.prefix, found, store.nbytes, self._link(store.nbytes), error
            )
            store.send_down(Tier.HOST)
            for chunk in chunks:
                yield self._recomputed(store, chunk)

    def coded_row(self, codec: str) -> TtftRow:
        """From HOST that holds pages encoded."""
        held = {"host": {**self._host(self.ask.prefix, _HELD), "codec": codec}}
        with self._rig(self.ask.prefix, held) as store:
            found = self._answers(store, Tier.HOST)
            moved = len(store.prefix) * _slot_nbytes(store)
            error = store.checked(lossy=True)
            return self._row("HOST", codec, self.ask.prefix, found, moved, self._link(moved), error)

    def disk_row(self, codec: str, prefix: int, place: Path, readers: int) -> TtftRow:
        """From NVMe in ``place``, which is made, and removed again. With a lossy codec host memory holds pages encoded.

        A raw file beside it is read before each round and after the last. A round's floor is the mean of its two
        neighbours, as a disk's speed wanders; ``ratio`` is the median of the rounds'.
        """
        place.mkdir()
        lossy = codec not in ("none", "exp")
        host = self._host(prefix)
        if lossy:  # as one would set it: pages stay encoded up to the device, which decodes them
            host = {**self._host(prefix, _HELD), "codec": codec.removesuffix("+zstd")}
        nvme: dict[str, object] = {
            "path": str(place / "store"),
            "capacity": int(self.ask.pages_nbytes(prefix) * 1.5) + (256 << 20),
            "codec": codec,
            "readers": readers,
            "timeout": 60,
        }
        try:
            with self._rig(prefix, {"host": host, "nvme": nvme}) as store:
                moved = _on_disk(store)
                raw = RawDisk(place / "raw", moved, moved // len(store.prefix), readers)
                raws: list[float] = []
                try:
                    found = self._answers(store, Tier.NVME, lambda: raws.append(moved / raw.gbps() / 1e9))
                    raws.append(moved / raw.gbps() / 1e9)
                finally:
                    raw.close()
                error = store.checked(lossy=lossy)
            floors = [mean(pair) for pair in pairwise(raws)]
            floor = median(floors)
            row = self._row("NVME", codec, prefix, found, moved, ("disk", floor, moved / floor / 1e9), error)
            ratios = (each.seconds / beside for each, beside in zip(found, floors, strict=True))
            return replace(row, ratio=median(ratios), each_floor_ms=tuple(each * 1e3 for each in floors))
        finally:
            shutil.rmtree(place)

    # -- inside -------------------------------------------------------------------------------------------------

    def _rig(self, prefix: int, below: Mapping[str, Mapping[str, object]]) -> AbstractContextManager[Rig]:
        return rig(self._model, self.ask.prompt(prefix), self.ask.page_size, prefix, below)

    def _host(self, prefix: int, share: float = 1.0) -> dict[str, object]:
        pin = "never" if self.ask.device == "cpu" else "always"
        return {"capacity": int(self.ask.pages_nbytes(prefix) * share), "pin": pin}

    def _answers(self, store: Rig, tier: Tier, between: Callable[[], None] = lambda: None) -> list[Answered]:
        """One that does not count, and the rounds, ``between`` before each."""
        found: list[Answered] = []
        for _ in range(self.ask.rounds + 1):
            store.send_down(tier)
            if found:
                between()
            found.append(store.answer())
            if found[-1].tiers != {tier}:
                raise RuntimeError(f"pages came from {found[-1].tiers}, not from {tier.name}")
        return found[1:]

    def _link(self, nbytes: int) -> tuple[Floor, float, float]:
        seconds = nbytes / self.link_gbps / 1e9
        return (
            ("link", seconds, self.link_gbps)
            if seconds > self._hit_s
            else ("compute", self._hit_s, self.link_gbps)
        )

    def _row(
        self,
        tier: str,
        codec: str,
        prefix: int,
        found: list[Answered],
        nbytes: int,
        floor: tuple[Floor, float, float],
        error: float,
    ) -> TtftRow:
        times = [each.seconds for each in found]
        first = self._token.setdefault(prefix, found[0].token)
        return TtftRow(
            tier=tier,
            codec=codec,
            prefix=found[0].reused,
            question=self.ask.question,
            rounds=len(found),
            ttft_ms=median(times) * 1e3,
            each_ms=tuple(each * 1e3 for each in times),
            least_ms=min(times) * 1e3,
            most_ms=max(times) * 1e3,
            request_ms=median(each.request_seconds for each in found) * 1e3,
            nbytes=nbytes,
            floor=floor[0],
            floor_ms=floor[1] * 1e3,
            ratio=median(times) / floor[1] if floor[1] else 0.0,
            ceiling_gbps=floor[2],
            same_token=all(each.token == first for each in found),
            rel_error=error,
        )

    def _recomputed(self, store: Rig, chunk: int) -> TtftRow:
        """One round, after three chunks to warm up: it takes long."""
        store.recomputed(chunk, 3 * chunk)
        seconds = store.recomputed(chunk)
        end = len(store.prefix) * self.ask.page_size + self.ask.question
        return TtftRow(
            tier="none",
            codec="none",
            prefix=0,
            question=end,
            rounds=1,
            ttft_ms=seconds * 1e3,
            each_ms=(seconds * 1e3,),
            least_ms=seconds * 1e3,
            most_ms=seconds * 1e3,
            request_ms=seconds * 1e3,
            nbytes=0,
            floor="none",
            floor_ms=0.0,
            ratio=0.0,
            ceiling_gbps=0.0,
            same_token=False,
            rel_error=0.0,
            tflops=SHAPES[self.ask.shape].flops(0, end) / seconds / 1e12,
            chunk=chunk,
        )


def _slot_nbytes(store: Rig) -> int:
    host = store.store.stats()["host"]
    assert isinstance(host, dict)
    return int(host["slot_nbytes"])


def _on_disk(store: Rig) -> int:
    disk = store.store.stats()["nvme"]
    assert isinstance(disk, dict)
    return int(disk["live_nbytes"])
