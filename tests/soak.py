"""Random clients on a small store, killed and reopened for as long as asked: no wrong byte, no hang, flat memory.

    python -m tests.soak --minutes 30

The parent starts a client process on one directory, kills most of them with SIGKILL at a random moment and lets some
close; each client first reads back everything that is offered. A client that does not answer in time is a hang. The
last line is one JSON object; the exit status is 0 only if nothing went wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from rich.progress import Progress

from tests.support.pages import SPEC, chain, read, same, tiers, write_each
from tierstore.errors import CapacityError
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier

DOCUMENTS = [chain(length, f"doc{length}") for length in range(1, 13)]
THREADS = 4
PATIENCE_S = 60.0


def say(**fields: object) -> None:
    """One line of JSON for whoever reads us."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def act(store: TierStore, rng: random.Random) -> None:
    """One random thing that a client may do; wrong bytes end in an AssertionError."""
    keys: list[PageKey] = rng.choice(DOCUMENTS)[: rng.randint(1, 12)]
    what = rng.random()
    try:
        if what < 0.35:
            write_each(store, keys)
        elif what < 0.75:
            with store.acquire(keys, deadline_s=rng.choice([None, None, 0.01])) as lease:
                if lease.wait(rng.choice([0.0, PATIENCE_S])) is LeaseState.READY:
                    pages = store.pages
                    for key, slot in zip(keys, lease.slots, strict=False):
                        page = pages[slot]
                        assert not isinstance(page, tuple)
                        assert same(page, key), f"wrong bytes in page {key.hex()}"
        elif what < 0.85:
            store.demote(keys, rng.choice([Tier.HOST, Tier.NVME]))
        elif what < 0.93:
            store.evict(keys, rng.choice([None, Tier.HBM, Tier.HOST, Tier.NVME]))
        elif what < 0.97:
            store.free(store.allocate(rng.randint(1, 3), timeout_s=rng.choice([0.0, 0.05])))
        else:
            store.flush()
    except CapacityError:
        time.sleep(0.001)


def client(home: Path, seed: int, seconds: float) -> None:
    """Reads all that is offered, then lets threads act at random; prints pages checked and memory used."""
    with TierStore.open(tiers(6, 10, home, nvme_pages=40), SPEC) as store:
        checked = sum(read(store, keys) for keys in DOCUMENTS)
        say(offered=checked)
        end = time.monotonic() + seconds
        failures: list[BaseException] = []
        actions = [0] * THREADS

        def work(index: int) -> None:
            rng = random.Random(seed * THREADS + index)
            try:
                while time.monotonic() < end and not failures:
                    act(store, rng)
                    actions[index] += 1
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.check()
        assert not failures, failures
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    say(actions=sum(actions), peak_nbytes=peak)


def soak(minutes: float, seconds_a_client: float) -> dict[str, object]:
    """Plays clients for ``minutes``; the summary."""
    rng = random.Random()
    summary: dict[str, object] = {}
    totals = {"clients": 0, "killed": 0, "closed": 0, "offered": 0, "actions": 0, "failed": 0, "hung": 0}
    peaks: list[int] = []
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as home, Progress(transient=True) as bar:
        task = bar.add_task("soak", total=60 * minutes)
        while (left := end - time.monotonic()) > 0:
            bar.update(task, completed=60 * minutes - left)
            _play(Path(home) / "store", rng, seconds_a_client, totals, peaks)
    summary.update(totals)
    summary["peak_nbytes"] = {"first": peaks[0], "last": peaks[-1], "max": max(peaks)} if peaks else None
    summary["ok"] = totals["failed"] == totals["hung"] == 0
    return summary


def _play(home: Path, rng: random.Random, seconds: float, totals: dict[str, int], peaks: list[int]) -> None:
    closes = rng.random() < 0.2
    args = [sys.executable, "-m", "tests.soak", "--client", str(home), "--seed", str(rng.getrandbits(32))]
    process = subprocess.Popen(
        [*args, "--seconds", str(seconds)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    totals["clients"] += 1
    try:
        out, err = process.communicate(timeout=PATIENCE_S + seconds if closes else 2 + rng.random() * seconds)
        totals["closed"] += 1
        if process.returncode:
            totals["failed"] += 1
            sys.stderr.write(err)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        totals["hung" if closes else "killed"] += 1
    for line in out.splitlines():
        report = json.loads(line)
        totals["offered"] += report.get("offered", 0)
        totals["actions"] += report.get("actions", 0)
        if "peak_nbytes" in report:
            peaks.append(report["peak_nbytes"])


def main() -> int:
    """The parent, or one client."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long a client acts")
    parser.add_argument("--client", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.client is not None:
        client(args.client, args.seed, args.seconds)
        return 0
    summary = soak(args.minutes, args.seconds)
    say(**summary)
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
