"""Tests of kills, forks and exits without a close: pages that were synced survive, and no page has wrong bytes."""

from __future__ import annotations

import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from tests.nvme.rig import CAPACITY, PAGE, Rig, blank, data_file, key, page
from tests.support import forked, lanes
from tierstore.errors import ConfigError, StoreClosed
from tierstore.nvme.tier import NvmeTier
from tierstore.types import Ack, Failure, Tier, Transfer


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python 3.12 and later warn about forks of a process with threads
        return os.fork()


def kill_a_victim(
    home: Path, first: int, payload: str = "auto", *, lines: int, pause_s: float
) -> list[tuple[str, int]]:
    """Start ``tests/nvme/victim.py``, wait for "open" and ``lines`` more lines, and kill it after ``pause_s``.

    Returns all lines that it printed after "open", each as a word and a number.
    """
    with forked.running("from tests.nvme.victim import main; main()", home, str(first), payload) as victim:
        said = [victim.stdout.readline() for _ in range(1 + lines)]
        assert said[0] == "open\n"
        time.sleep(pause_s)
        victim.send_signal(signal.SIGKILL)
        said += victim.stdout.readlines()
    words = [line.split() for line in said[1:] if line.endswith("\n")]
    return [(word, int(number)) for word, number in words]


def test_killed_process_leaves_all_synced_pages_and_no_wrong_one(tmp_path: Path, payload: str) -> None:
    home = tmp_path / "home"
    chance = random.Random(20)
    for turn in range(lanes.examples(3, 8)):
        first = turn * 100_000
        lines, pause_s = chance.randint(0, 12), chance.random() * 0.03
        said = kill_a_victim(home, first, payload, lines=lines, pause_s=pause_s)
        synced = max([first, *(number for word, number in said if word == "sync")])
        gone = max([first, *(number for word, number in said if word == "gone")])
        erased_at_most = max(gone, first + 27 * ((synced + 9 - first) // 27) - 100)
        rig = Rig(home)
        counted = {record[0] for record in rig.tier.records()}
        numbers = range(first, synced + 50)
        there = rig.present(numbers)
        assert {key(n) for n in there} == counted & {key(n) for n in numbers}
        assert there >= set(range(erased_at_most, synced))
        assert there.isdisjoint(range(first, gone))
        assert len(counted) * rig.tier.record_nbytes <= rig.tier.budget_nbytes
        rig.tier.submit_erase(list(counted))
        rig.close()
    assert sum(path.lstat().st_blocks * 512 for path in home.rglob("*")) <= CAPACITY


def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    kill_a_victim(tmp_path / "home", 0, lines=1, pause_s=0.0)
    Rig(tmp_path / "home").close()


@pytest.mark.usefixtures("payload")
def test_forked_child_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "home")
    rig.write([0])
    transfer = rig.transfer([key(0)])
    child = fork()
    if child == 0:
        refused = 0
        for call in (
            lambda: rig.tier.submit_write(transfer, [blank()]),
            lambda: rig.tier.submit_read(transfer, [blank()]),
            lambda: rig.tier.submit_erase([key(0)]),
            rig.tier.poll,
            lambda: rig.tier.sync(1.0),
            rig.tier.stats,
        ):
            try:
                call()
            except StoreClosed:
                refused += 1
        os._exit(0 if refused == 6 and rig.tier.close(1.0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert rig.write([1]).ok
    assert rig.present([0, 1]) == {0, 1}
    rig.close()


def test_a_forked_child_does_not_keep_the_lock_of_a_closed_tier(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "home")
    ready, go_on = os.pipe()
    child = fork()
    if child == 0:
        os.close(go_on)
        os.read(ready, 1)
        os._exit(0)
    os.close(ready)
    rig.close()
    Rig(tmp_path / "home").close()
    os.close(go_on)
    os.waitpid(child, 0)


def test_a_process_that_never_closes_ends_and_loses_nothing_it_synced(tmp_path: Path, payload: str) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.nvme.rig import Rig\n"
        "rig = Rig(Path(sys.argv[1]), payload=sys.argv[2])\n"
        "rig.write(range(20)); rig.tier.sync(60.0); rig.submit_write(range(20, 9000))\n"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", program, str(tmp_path / "home"), payload]
    child = subprocess.run(command, check=True, cwd=root, capture_output=True, text=True, timeout=240)
    assert child.stderr == ""
    rig = Rig(tmp_path / "home")
    assert rig.present(range(90)) >= set(range(20))
    rig.close()


HOLD = """
import lmdb, sys
env = lmdb.open(sys.argv[1], map_size=int(sys.argv[2]), max_dbs=4)
with env.begin(write=True):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.usefixtures("payload")
def test_a_thread_that_does_not_exit_is_abandoned_and_delays_no_caller(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "home")
    assert rig.write([0]).ok
    command = [sys.executable, "-c", HOLD, str(data_file(tmp_path / "home").parent), str(CAPACITY)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        begun = rig.submit_write([1])
        assert rig.tier.sync(0.1) is False
        late = rig.submit_write([2])
        assert rig.present([0]) == {0}
        assert rig.tier.close(0.1) is False
        with pytest.raises(ConfigError, match="in use by process"):
            Rig(tmp_path / "home")
        holder.communicate()
    rig.close()
    assert rig.ack(begun).ok
    assert rig.ack(late).failures == ((0, Failure.CLOSED),)
    rig = Rig(tmp_path / "home")
    assert rig.present([0, 1, 2]) == {0, 1}
    rig.close()


def test_wake_may_call_back_into_the_tier(tmp_path: Path) -> None:
    acks: queue.SimpleQueue[Ack] = queue.SimpleQueue()
    opened = threading.Event()

    def wake() -> None:
        assert opened.wait(60.0)
        tier.submit_erase([key(9)])
        for ack in tier.poll():
            acks.put(ack)

    tier = NvmeTier.open(
        tmp_path / "home", capacity=CAPACITY, fingerprint="ab12", shard=0, page_nbytes=PAGE, wake=wake
    )
    opened.set()
    transfer = Transfer(
        id=7,
        keys=(key(0),),
        src=Tier.HOST,
        src_slots=(),
        dst=Tier.NVME,
        dst_slots=(),
        nbytes=0,
        parents=(None,),
    )
    tier.submit_write(transfer, [page(0)])
    assert acks.get(timeout=60.0).ok
    tier.submit_read(transfer, [blank()])
    assert acks.get(timeout=60.0).ok
    assert tier.close(60.0)


def test_the_checking_child_imports_nothing_heavy() -> None:
    program = (
        "import sys, tierstore.nvme.lmdb_walker\n"
        "sys.exit(' '.join({'numpy', 'torch', 'lmdb'} & set(sys.modules)))"
    )
    child = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.stderr.strip() == ""
