"""A program that opens a store, fills and flushes it, and waits to be killed.

Arguments: the directory, the capacity of the NVMe tier in pages, the name of the pages to put, and their number.
After the flush, it prints how many bytes of the NVMe tier are used.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.pages import SPEC, chain, tier_stats, tiers, write
from tierstore.store import TierStore
from tierstore.types import PageKey, Tier


def pages(name: str, count: int) -> list[PageKey]:
    """Return the keys of ``count`` pages, each of which is the first page of a different sequence."""
    return [chain(1, f"{name}{i}")[0] for i in range(count)]


def main() -> None:
    home, nvme_pages, name, count = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    store = TierStore.open(tiers(8, 16, home, nvme_pages=nvme_pages), SPEC)
    for key in pages(name, count):
        write(store, [key])
    store.flush()
    sys.stdout.write(f"{tier_stats(store, Tier.NVME)['used_nbytes']}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
