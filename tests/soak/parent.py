"""The parent process: it runs clients, kills some of them, damages the directory between them, and adds up results."""

from __future__ import annotations

import random
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from time import monotonic
from typing import Any

from rich.progress import Progress

from tests.soak.account import rss_nbytes
from tests.soak.client import KINDS, Role
from tests.soak.damage import Vandal
from tests.soak.faults import PROFILES
from tests.soak.playing import Ending, Playing, arguments

CLIENT_GROWS = 32 << 20
PARENT_GROWS = 16 << 20
FLAT = (
    f"a client that closed ends with at most {CLIENT_GROWS >> 20} MiB more than after the first quarter of its life; "
    f"the parent with at most {PARENT_GROWS >> 20} MiB more than after its first client"
)
"""The rule by which a client's memory counts as flat. The summary quotes it."""


class Soak:
    """Runs clients one after the other on one directory, and adds up their reports."""

    def __init__(self, home: Path, seed: int, seconds: float, *, plant: bool) -> None:
        self._home = home
        self._seconds = seconds
        self._plant = plant
        self._chance = random.Random(seed)
        self._vandal = Vandal(home, self._chance)
        self._deck: list[tuple[str, str]] = []
        self._counts: dict[str, Counter[str]] = {}
        self._failed: list[dict[str, object]] = []
        self._rss: list[dict[str, int]] = []
        self._parent_start = 0
        self.endings: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.damage: Counter[str] = Counter()

    def play(self) -> None:
        """Run the next client. All combinations of kind and profile are equally frequent."""
        if not self._deck:
            self._deck = [(k, p) for k in KINDS if k != "alone" for p in PROFILES]
            self._chance.shuffle(self._deck)
        kind, profile = ("own", "none") if self._plant else self._deck.pop()
        role = Role(
            kind=kind,
            profile=profile,
            seed=self._chance.getrandbits(32),
            seconds=self._seconds,
            plant=self._plant,
        )
        if self._chance.random() < 0.3 and (damage := self._vandal.strike()) is not None:
            self.damage[damage] += 1
        dice, moment = self._chance.random(), self._chance.random()
        playing = Playing(role, self._home)
        if self._plant or dice < 0.35:
            ending = playing.end()
        elif dice < 0.45:
            ending = playing.kill_after(3.0 * moment, ready=False)
        else:
            ending = playing.kill_after(self._seconds * moment, ready=True)
        self.add(role, ending)
        self._require_strange_files_left(role)
        self._parent_start = self._parent_start or rss_nbytes()

    def add(self, role: Role, ending: Ending) -> None:
        """Add the results of one client to the totals."""
        self.endings[ending.how] += 1
        self.kinds[f"{role.kind}, {role.profile}"] += 1
        for subject, names in ending.counts.items():
            counter = self._counts.setdefault(subject, Counter())
            counter.update({name: int(number) for name, number in names.items()})
        if ending.rss is not None:
            self._rss.append(ending.rss)
        if "stalls" in ending.counts:
            sys.stderr.write(f"slow: {again(role)}\n{ending.why}\n")
        if ending.how not in ("closed", "killed"):
            self._fail(role, ending.how, ending.why)

    def summary(self) -> dict[str, object]:
        """Return everything that was counted. ``ok`` is True if nothing went wrong."""
        end = rss_nbytes()
        parent = {"start": self._parent_start or end, "end": end}
        grown = [rss["end"] - rss["start"] for rss in self._rss]
        flat = max(grown, default=0) <= CLIENT_GROWS
        flat = flat and parent["end"] - parent["start"] <= PARENT_GROWS
        counts: dict[str, Any] = {name: dict(sorted(each.items())) for name, each in self._counts.items()}
        hangs, wrong = self.endings["hang"], self.endings["wrong bytes"]
        return {
            "clients": sum(self.endings.values()),
            "killed": self.endings["killed"],
            "closed": self.endings["closed"],
            "wrong_bytes": wrong,
            "hangs": hangs,
            "failed": self._failed,
            "pages": counts.get("pages", {}),
            "actions": counts.get("actions", {}),
            "no_room": counts.get("no room", {}),
            "faults": counts.get("faults", {}),
            "misses": counts.get("misses", {}),
            "stalls": counts.get("stalls", {}),
            "damage": dict(self.damage),
            "set_aside": self._vandal.set_aside,
            "played": dict(sorted(self.kinds.items())),
            "memory": {
                "flat": flat,
                "rule": FLAT,
                "most_grown_nbytes": max(grown, default=None),
                "longest_life": self._rss[-1] if self._rss else None,
                "parent": parent,
            },
            "ok": flat and not self._failed,
        }

    def _require_strange_files_left(self, role: Role) -> None:
        if (fault := self._vandal.look()) is not None:
            self._fail(role, "failed", fault)

    def _fail(self, role: Role, how: str, why: str) -> None:
        told = {"how": how, "seed": role.seed, "again": again(role), "why": why.split("\n")[0]}
        self._failed.append(told)
        sys.stderr.write(f"{how}: {again(role)}\n{why}\n")


def again(role: Role) -> str:
    """Return the command that runs a client again."""
    return f"python -m tests.soak --client DIR {shlex.join(arguments(role))}"


def soak(
    minutes: float, seconds: float, seed: int, *, plant: bool = False, least: int = 1
) -> dict[str, object]:
    """Run clients for ``minutes`` minutes, and at least ``least`` clients. Returns the summary.

    The directory is kept if something went wrong.
    """
    folder = Path(tempfile.mkdtemp(prefix="tierstore-soak-"))
    game = Soak(folder / "store", seed, seconds, plant=plant)
    end = monotonic() + 60 * minutes
    role = Role(kind="alone", profile="all", seed=seed, seconds=60 * minutes)
    alone = Playing(role, folder / "alone")
    try:
        with Progress(transient=True) as bar:
            task = bar.add_task("soak", total=60 * minutes)
            while (left := end - monotonic()) > 0 or game.endings.total() < least:
                bar.update(task, completed=60 * minutes - left)
                game.play()
        game.add(role, alone.end())
    finally:
        alone.kill()
    summary = {"minutes": minutes, "seed": seed, **game.summary()}
    if summary["ok"]:
        shutil.rmtree(folder)
    else:
        sys.stderr.write(f"the directory is kept: {folder}\n")
    return summary
