"""Test that after a kill at any time all flushed pages are found, and no page has wrong bytes."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from tests.store.victim import LENGTH, config, sequence
from tests.support import forked, lanes
from tests.support.pages import SPEC, read_soon
from tierstore.store import TierStore


def kill_after(home: Path, first: int, lines: int, pause_s: float) -> int:
    """Run a victim that writes sequences from ``first`` on, and kill it.

    It is killed ``pause_s`` seconds after its first ``lines`` flushes. Return the number N of its last promise: the
    sequences below N are durable.
    """
    with forked.running("from tests.store.victim import main; main()", home, str(first)) as victim:
        said = [victim.stdout.readline() for _ in range(lines)]
        time.sleep(pause_s)
        victim.send_signal(signal.SIGKILL)
        said += victim.stdout.readlines()
    promises = [line for line in said if line.endswith("\n")]
    return int(promises[-1].split()[1]) if promises else first


def test_killed_process_leaves_all_flushed_pages_and_no_wrong_one(tmp_path: Path) -> None:
    # F046, F053
    chance = random.Random(5)
    durable: list[tuple[int, int]] = []
    for turn in range(lanes.examples(2, 6)):
        first = turn * 10_000
        flushed = kill_after(tmp_path, first, chance.randint(1, 6), chance.random() * 0.03)
        durable.append((first, flushed))
        with TierStore.open(config(tmp_path), SPEC) as store:
            for low, high in durable:
                assert all(store.match(sequence(n)).num_pages == LENGTH for n in range(low, high))
            for number in range(max(first, flushed - 8), flushed + 8):
                served = read_soon(store, sequence(number))
                assert served == LENGTH or number >= flushed
            store.check()
    assert all(high > low for low, high in durable)
