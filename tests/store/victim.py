"""A program that a test kills. Until then, it writes sequences to a small store, and flushes after every fourth one.

After each flush it prints a line ``flushed N``: the sequences below N are durable.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.pages import SPEC, chain, tiers, write
from tierstore.config import StoreConfig
from tierstore.store import TierStore
from tierstore.types import PageKey

LENGTH = 3


def config(home: Path) -> StoreConfig:
    return tiers(6, 4, home, nvme_pages=2000)


def sequence(number: int) -> list[PageKey]:
    return chain(LENGTH, f"killed{number}")


def main() -> None:
    home, first = Path(sys.argv[1]), int(sys.argv[2])
    store = TierStore.open(config(home), SPEC)
    number = first
    while True:
        for _ in range(4):
            write(store, sequence(number))
            number += 1
        store.flush()
        sys.stdout.write(f"flushed {number}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
