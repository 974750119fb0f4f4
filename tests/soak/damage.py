"""Damage to the directory of a store, done after a client has closed the store and before the next client opens it."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from tierstore.nvme.directory_layout import DATA_FILE, SHARD_MARKER, shard_directories
from tierstore.nvme.inspection import purge

_Damage = Callable[[Path, random.Random], None]


def _flip_bits(shard: Path, chance: random.Random) -> None:
    data = shard / DATA_FILE
    size = data.stat().st_size
    with data.open("r+b") as file:
        for _ in range(chance.choice([1, 1, 4])):
            at = chance.choice([chance.randrange(size), chance.randrange(min(size, 20 * 4096))])
            file.seek(at)
            old = file.read(1)
            file.seek(at)
            file.write(bytes([old[0] ^ 1 << chance.randrange(8)]))


def _cut(shard: Path, chance: random.Random) -> None:
    data = shard / DATA_FILE
    os.truncate(data, int(data.stat().st_size * chance.random()))


def _overwrite(shard: Path, chance: random.Random) -> None:
    """Overwrite a sector with zeros, as if it had never been written, or with random bytes."""
    data = shard / DATA_FILE
    sectors = max(1, data.stat().st_size // 512)
    with data.open("r+b") as file:
        file.seek(512 * chance.randrange(sectors))
        file.write(chance.choice([bytes(512), chance.randbytes(512)]))


def _remove_data(shard: Path, chance: random.Random) -> None:
    (shard / DATA_FILE).unlink()


def _remove_shard(shard: Path, chance: random.Random) -> None:
    shutil.rmtree(shard)


def _spoil_marker(shard: Path, chance: random.Random) -> None:
    (shard / SHARD_MARKER).write_bytes(chance.choice([b"", b"{}", chance.randbytes(100)]))


def _spoil_lock(shard: Path, chance: random.Random) -> None:
    (shard / "lock.mdb").write_bytes(chance.randbytes(8192))


def _half_a_marker(shard: Path, chance: random.Random) -> None:
    """Leave half of a temporary file, like a process that is killed while it replaces a marker."""
    (shard / (SHARD_MARKER + ".new")).write_bytes(b'{"finger')


DAMAGES: dict[str, _Damage] = {
    "bits flipped": _flip_bits,
    "data cut": _cut,
    "sector overwritten": _overwrite,
    "data removed": _remove_data,
    "shard removed": _remove_shard,
    "marker spoiled": _spoil_marker,
    "lock file spoiled": _spoil_lock,
    "half a marker": _half_a_marker,
}


class Vandal:
    """Damages the directory of a closed store, and checks that a store leaves foreign files alone."""

    def __init__(self, home: Path, chance: random.Random) -> None:
        self.home = home
        self.set_aside = 0
        """Number of sub-directories that opens have set aside as damaged."""
        self._chance = chance
        self._deck: list[str] = []
        self._strange: dict[str, bytes] = {}

    def strike(self) -> str | None:
        """Do one kind of damage. Return its name, or None if there is no store yet.

        All kinds are done equally often, in random order.
        """
        shards = self._shards()
        if not shards:
            return None
        if not self._deck:
            self._deck = [*DAMAGES, "strange files"]
            self._chance.shuffle(self._deck)
        name = self._deck.pop()
        shard = self._chance.choice(shards)
        if name in DAMAGES:
            DAMAGES[name](shard, self._chance)
        else:
            self._leave_strange_files(shard)
        return name

    def deal(self, name: str) -> None:
        """Make ``name`` the next kind of damage."""
        self._deck.append(name)

    def look(self) -> str | None:
        """Check that the last client left foreign files alone. Return a description of the fault, or None."""
        for name, want in self._strange.items():
            found = list(self.home.rglob(name))
            if len(found) != 1 or found[0].read_bytes() != want:
                return f"the file {name}, which is not the store's, was not left alone"
        for name in self._strange:
            next(self.home.rglob(name)).unlink()
        self._strange.clear()
        self._purge()
        return None

    def _shards(self) -> list[Path]:
        if not self.home.exists():
            return []
        found = [path for path, _, damaged in shard_directories(self.home) if not damaged]
        return [path for path in found if (path / DATA_FILE).exists()]

    def _leave_strange_files(self, shard: Path) -> None:
        for folder in (self.home, shard):
            name = f"strange-{self._chance.getrandbits(32):08x}"
            self._strange[name] = self._chance.randbytes(self._chance.randrange(10_000))
            (folder / name).write_bytes(self._strange[name])

    def _purge(self) -> None:
        if self.home.exists():
            damaged = [path for path, _, damaged in shard_directories(self.home) if damaged]
            self.set_aside += len(damaged)
            if damaged:
                purge(self.home, "damaged")
