"""Killed at any moment: what was flushed is there and right, and nothing that is there is wrong."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.store.victim import LENGTH, config, sequence
from tests.support import lanes
from tests.support.pages import SPEC, read_soon
from tierstore.store import TierStore

CHECKOUT = Path(__file__).parents[2]


def kill_after(home: Path, first: int, lines: int, pause_s: float) -> int:
    """Runs a victim from sequence ``first``, kills it so long after so many promises; sequences below are durable."""
    command = [sys.executable, "-m", "tests.store.victim", str(home), str(first)]
    victim = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT)
    assert victim.stdout is not None
    said = [victim.stdout.readline() for _ in range(lines)]
    time.sleep(pause_s)
    victim.send_signal(signal.SIGKILL)
    said += victim.stdout.readlines()
    victim.wait()
    victim.stdout.close()
    promises = [line for line in said if line.endswith("\n")]
    return int(promises[-1].split()[1]) if promises else first


def test_a_killed_process_leaves_all_that_was_flushed_and_nothing_wrong(tmp_path: Path) -> None:
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
