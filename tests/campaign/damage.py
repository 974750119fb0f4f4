"""The damage campaign: batches of damage to a closed directory, which a child process then opens and uses.

A batch damages one region, regions that are chosen at random for each strike, or records and a few places of another
region. The choice ignores the sizes of the regions, so small ones are hit as often as large ones. Some batches damage
only records, because damage to the catalogue sets the whole directory aside, and then no record is read.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from tests.campaign.children import Child, Failed
from tests.campaign.kill import ENOUGH, PAGES
from tests.campaign.regions import BLOCK, DATA, Span, tree_regions
from tests.campaign.strikes import STRIKES, Files, cut
from tests.campaign.survivor import PLANTS, Fate, Ordeal, prepare, survive
from tests.campaign.turns import Subject
from tests.nvme.rig import FINGERPRINT
from tierstore.nvme.directory_layout import HOME_MARKER, SHARD_MARKER

__all__ = ["PLANTS", "Damages"]

_RECORDS = ("heads", "payload")
_FEW = 3
"""Maximum number of strikes on another region in a batch that damages records."""

_HEADER = 16
"""Number of bytes before the head of a record: LMDB's page header or, in extent files, a fixed prefix."""

_LIFE = 20
"""Number of batches that damage copies of the same directory."""


class Damages:
    """Runs batches of strikes one after the other, and adds up the results."""

    def __init__(
        self,
        folder: Path,
        *,
        payload: str,
        codec: Literal["none", "exp"],
        seed: int,
        batch: int,
        plant: str = "",
    ) -> None:
        self._folder, self._payload, self._codec = folder, payload, codec
        self._batch, self._plant = batch, plant
        self._chance = random.Random(seed)
        self._deck: list[str] = []
        self.counts: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self.faults: list[str] = []

    def play(self, damages: int, tell: Callable[[int], None]) -> None:
        """Run batches with ``damages`` strikes in total. ``tell`` is called with the number of strikes so far."""
        done = 0
        while done < damages and len(self.faults) < ENOUGH:
            if self.counts["batches"] % _LIFE == 0:
                self._make(self.counts["batches"] // _LIFE)
            self._play_batch(min(self._batch, damages - done))
            done += self._batch
            tell(min(done, damages))

    def summary(self) -> dict[str, Any]:
        """Return all counts, and the faults that were found."""
        counts = {name: self.counts[name] for name in sorted(self.counts)}
        struck: Counter[str] = Counter()
        for name, number in self.struck.items():
            struck[name.partition(":")[0]] += number
        total = sum(struck.values())
        return {"damages": total, "signals": 0, **counts, "struck": dict(struck), "faults": self.faults}

    def _make(self, life: int) -> None:
        """Create a directory whose pages were written, replaced and erased, and locate the regions of its files."""
        page = PAGES[life % len(PAGES)]
        home = self._folder / f"clean-{life}"
        self._ordeal = Ordeal(
            subject=Subject(codec=self._codec, page_nbytes=page, space=240),
            home=home,
            payload=self._payload,
            capacity=400 * (page + 8192),
            seed=self._chance.getrandbits(32),
            there={},
            history={},
        )
        told = json.loads(Child(prepare, self._ordeal).end()[-1])
        self._there = {int(number): version for number, version in told["there"].items()}
        self._history = {int(number): versions for number, versions in told["history"].items()}
        self._records = {int(number): Span(*where) for number, where in told["records"].items()}
        shard = home / f"{FINGERPRINT}-0"
        names = [
            path.name for path in shard.iterdir() if path.name.startswith((DATA, "extent-", SHARD_MARKER))
        ]
        self._clean = {name: (shard / name).read_bytes() for name in sorted(names)}
        self._clean[HOME_MARKER] = (home / HOME_MARKER).read_bytes()
        self._regions = self._find_regions()
        shutil.rmtree(home)

    def _find_regions(self) -> dict[str, list[Span]]:
        places = self._records.values()
        inline = {at for span in places if span.name == DATA for at in _blocks(span)}
        found = {
            **tree_regions(self._clean[DATA], inline),
            "page headers": [Span(DATA, span.offset, _HEADER) for span in places if span.name == DATA],
            "heads": [Span(span.name, span.offset + _HEADER, BLOCK - _HEADER) for span in places],
            "payload": [Span(span.name, span.offset + BLOCK, span.length) for span in places],
            "marker": [Span(SHARD_MARKER, 0, len(self._clean[SHARD_MARKER]))],
        }
        return {name: spans for name, spans in found.items() if spans}

    def _play_batch(self, count: int) -> None:
        if not self._deck:
            small = [name for name in self._regions if name not in _RECORDS]
            few = [f"records, few {name}" for name in [*small, *small, "cuts", "home"]]
            self._deck = [*self._regions, "records", "records", "all", "cuts", *few]
            self._chance.shuffle(self._deck)
        kind = self._deck.pop()
        files = {name: bytearray(raw) for name, raw in self._clean.items()}
        self._strike(files, kind, count)
        home = self._folder / f"batch-{self.counts['batches']}"
        self._write(home, files)
        self.counts["batches"] += 1
        ordeal = Ordeal(
            subject=self._ordeal.subject,
            home=home,
            payload=self._payload,
            capacity=self._ordeal.capacity,
            seed=self._chance.getrandbits(32),
            there=self._there,
            history=self._history,
            plant=self._plant,
        )
        before = len(self.faults)
        try:
            self._judge(Fate.heard(Child(survive, ordeal).end()[-1]), files, kind)
        except Failed as failed:
            self.counts["signals"] += "SIG" in str(failed)
            self._fault(kind, str(failed))
        if len(self.faults) == before:
            shutil.rmtree(home)
        else:
            again = home.with_name(home.name + "-before")
            self._write(again, files)
            sys.stderr.write(f"as it was before the open: {again}\n")

    def _strike(self, files: Files, kind: str, count: int) -> None:
        region, _, few = kind.partition(", few ")
        others = self._chance.randint(1, min(_FEW, count)) if few else 0
        for number in range(count):
            self._one(files, few if number < others else region)

    def _one(self, files: Files, region: str) -> None:
        if region == "cuts" and (self._chance.random() < 0.1 or self.counts["batches"] % 2):
            cut(files, [name for name in files if name != HOME_MARKER], self._chance)
            self.struck["cut"] += 1
            return
        if region == "records" or region == "cuts":
            region = self._chance.choice(_RECORDS)
        elif region == "all":
            region = self._chance.choice(list(self._regions))
        home = [Span(HOME_MARKER, 0, len(self._clean[HOME_MARKER]))]
        spans = home if region == "home" else self._regions[region]
        name = self._chance.choice(list(STRIKES))
        STRIKES[name](files, spans, self._chance)
        self.struck[f"{region}: {name}"] += 1

    def _write(self, home: Path, files: Files) -> None:
        shard = home / f"{FINGERPRINT}-0"
        shard.mkdir(mode=0o700, parents=True)
        for name, raw in files.items():
            (home if name == HOME_MARKER else shard).joinpath(name).write_bytes(raw)

    def _judge(self, fate: Fate, files: Files, kind: str) -> None:
        """Check the result of a batch, and record each error as a fault."""
        self.counts["pages compared"] += fate.compared
        for name, number in fate.later.items():
            self.counts[name] += number
        for fault in fate.faults:
            self._fault(kind, fault)
        rolled_back = files[DATA][: 2 * BLOCK] != self._clean[DATA][: 2 * BLOCK]
        if (
            fate.older or any(fate.later[n] for n in fate.later if n.startswith("older"))
        ) and not rolled_back:
            self._fault(kind, f"earlier versions of pages came back: {fate.older}, {fate.later}")
        self.counts["pages of the commit before"] += fate.older
        if fate.refused:
            self.counts["opens refused"] += 1
            if files[HOME_MARKER] == self._clean[HOME_MARKER]:
                self._fault(kind, f"an open was refused: {fate.refused}")
            return
        if fate.set_aside:
            self.counts["directories set aside"] += 1
            if not fate.warnings:
                self._fault(kind, "a directory was set aside without a warning")
            if self._only_records(files):
                self._fault(
                    kind, f"a directory was set aside although only records were damaged: {fate.warnings}"
                )
            return
        self._judge_pages(fate, files, kind)

    def _judge_pages(self, fate: Fate, files: Files, kind: str) -> None:
        """Check the pages of a directory that was opened.

        A damaged page must not be readable. If only records were damaged, all other pages must be readable.
        """
        unharmed = self._only_records(files)
        for number, span in self._records.items():
            outcome = fate.outcomes[number]
            hurt = self._hurt(files, span)
            self.counts["damaged pages counted"] += hurt and outcome != "ok"
            self.counts["whole pages lost"] += not hurt and outcome != "ok"
            if hurt and outcome == "ok":
                self._fault(kind, f"page {number} is damaged, but was read without an error")
            if unharmed and not hurt and outcome != "ok":
                self._fault(kind, f"page {number} is undamaged, but could not be read: {outcome}")

    def _hurt(self, files: Files, span: Span) -> bool:
        """Return whether the head or the payload of a record has changed, regardless of the bytes before the head."""
        first, end = span.offset + _HEADER, span.offset + BLOCK + span.length
        return files[span.name][first:end] != self._clean[span.name][first:end]

    def _only_records(self, files: Files) -> bool:
        """Return whether only records were damaged, and no file was truncated."""
        if any(
            files[name] != raw for name, raw in self._clean.items() if name in (SHARD_MARKER, HOME_MARKER)
        ):
            return False
        if any(len(files[name]) != len(raw) for name, raw in self._clean.items()):
            return False
        return all(
            files[span.name][span.offset : span.offset + span.length]
            == self._clean[span.name][span.offset : span.offset + span.length]
            for region, spans in self._regions.items()
            if region not in _RECORDS
            for span in spans
        )

    def _fault(self, kind: str, what: str) -> None:
        told = f"batch {self.counts['batches']}, {kind}, pages of {self._ordeal.subject.page_nbytes}: "
        sys.stderr.write(f"{told}{what}\n")
        self.faults.append(told + what.strip().splitlines()[-1])


def _blocks(span: Span) -> range:
    first = span.offset // BLOCK
    return range(first, first + 1 + -(-span.length // BLOCK))
