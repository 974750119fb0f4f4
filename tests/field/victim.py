"""A process to be killed: opens a store, fills it, flushes, says so, and waits.

Arguments: home, pages of the NVMe tier, name of its pages, how many. One line on stdout: what was then in use.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.pages import SPEC, chain, tier_stats, tiers, write
from tierstore.store import TierStore
from tierstore.types import PageKey, Tier


def pages(name: str, count: int) -> list[PageKey]:
    """Single pages, none the parent of another."""
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
