"""Test LMDB after a failed write: it refuses every transaction (MDB_PANIC), and the tier reopens it by itself.

A library that is preloaded into a child process makes the child's writes fail.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import lmdb
import pytest

from tests.nvme.rig import PATIENCE_S, PAYLOADS, Rig, data_file, key
from tests.support import lanes
from tests.support.forked import CHECKOUT
from tests.support.waiting import wait_for
from tierstore.nvme.lmdb_environment import Environment

FAULTS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/uio.h>
#include <unistd.h>
static int meta, data, syncs;
void fail_meta(int n) { meta = n; }
void fail_data(int n) { data = n; }
void fail_syncs(int n) { syncs = n; }
int left(void) { return meta + data + syncs; }
static int fails(off64_t o, size_t c) {
  int *n = o < 8192 && c < 4096 ? &meta : &data;
  if (*n > 0) { --*n; errno = EIO; return 1; }
  return 0; }
#define REAL(name) static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)
ssize_t pwrite64(int f, const void *b, size_t c, off64_t o) {
  REAL(pwrite64); return fails(o, c) ? -1 : real(f, b, c, o); }
ssize_t pwrite(int f, const void *b, size_t c, off_t o) { return pwrite64(f, b, c, o); }
ssize_t pwritev64(int f, const struct iovec *v, int c, off64_t o) {
  REAL(pwritev64); return fails(o, 4096) ? -1 : real(f, v, c, o); }
ssize_t pwritev(int f, const struct iovec *v, int c, off_t o) { return pwritev64(f, v, c, o); }
int fdatasync(int f) {
  REAL(fdatasync); if (syncs > 0) { --syncs; errno = EIO; return -1; } return real(f); }
"""

CHILD = """
import ctypes, json, sys, time
from pathlib import Path
from tests.nvme.rig import Rig, key, wait_until_writable
from tests.support.waiting import wait_for
faults = ctypes.CDLL(None)
home, payload = Path(sys.argv[1]), sys.argv[2]
rig = Rig(home, payload=payload)
assert rig.write(range(20)).ok
def told(**found):
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    folder = tmp_path_factory.mktemp("faults")
    (folder / "faults.c").write_text(FAULTS)
    source, made = str(folder / "faults.c"), str(folder / "faults.so")
    command = [compiler, "-shared", "-fPIC", "-o", made, source, "-ldl"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder / "faults.so"


@pytest.fixture
def child(library: Path, tmp_path: Path, payload: str) -> Callable[[str], dict[str, Any]]:
    """Return a function that runs a script in a child process, after code that opens a tier of 20 pages.

    The script makes writes fail with ``faults``. The function returns what the script passed to ``told``, and the
    child's stderr as ``warnings``.
    """

    def run(script: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", CHILD + script, str(tmp_path / "home"), payload],
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
            check=False,
            cwd=CHECKOUT,
            env={**os.environ, "LD_PRELOAD": str(library)},
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return {**found, "warnings": done.stderr}

    return run


def test_one_failed_write_of_a_meta_page_loses_no_page(child: Callable[[str], dict[str, Any]]) -> None:
    found = child("""
faults.fail_meta(1)
ok = rig.write(range(20, 40)).ok
there = sorted(rig.present(range(40)))
told(ok=ok, there=there, left=faults.left(), stats=rig.tier.stats())
rig.close()
""")
    assert found["ok"]
    assert found["left"] == 0
    assert found["there"] == list(range(40))
    assert (found["stats"]["state"], found["stats"]["reopened"], found["stats"]["records"]) == ("ok", 1, 40)
    assert found["warnings"].count("closed and reopened") == 1


@pytest.mark.parametrize(
    ("payload", "kind"),
    lanes.some(
        product(PAYLOADS, ["meta", "data", "syncs"]),
        lambda payload, kind: (payload == "extents") == (kind == "data"),
    ),
    indirect=["payload"],
)
def test_disk_is_written_to_again_after_write_failures(
    child: Callable[[str], dict[str, Any]], kind: str, tmp_path: Path
) -> None:
    found = child(f"""
faults.fail_{kind}(4)
turns = 0
while not rig.write(range(20, 40)).ok or faults.left():
    turns += 1
    time.sleep(0.02)
wait_for(lambda: rig.tier.state == "ok")
there = sorted(rig.present(range(40)))
told(there=there, stats=rig.tier.stats())
rig.close()
""")
    assert found["there"] == list(range(40))
    rig = Rig(tmp_path / "home")
    assert rig.present(range(40)) == set(range(40))
    rig.close()


def test_an_erase_whose_commit_ends_in_panic_is_durable_once_synced(
    child: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    found = child("""
import os, signal
faults.fail_meta(1000)
rig.erase(range(5))
ok = rig.tier.sync(60.0)
told(ok=ok, pending=rig.tier.stats()["pending_erases"], state=rig.tier.state)
sys.stdout.flush()
os._exit(0)
""")
    assert found["ok"]
    assert (found["pending"], found["state"]) == (0, "read_only")
    rig = Rig(tmp_path / "home")
    assert {record[0] for record in rig.tier.records()} == {key(number) for number in range(5, 20)}
    rig.close()


def test_reads_during_a_panic_lose_no_record(child: Callable[[str], dict[str, Any]]) -> None:
    found = child("""
from tierstore.types import Failure
reasons = set()
for turn in range(10):
    faults.fail_meta(3)
    write = rig.submit_write(range(100 + turn, 101 + turn))
    for number in range(20):
        ack, _ = rig.read([number])
        reasons |= {failure.value for _, failure in ack.failures}
    rig.ack(write)
wait_until_writable(rig)
there = sorted(rig.present(range(20)))
told(there=there, reasons=sorted(reasons), left=faults.left())
rig.close()
""")
    assert found["there"] == list(range(20))
    assert set(found["reasons"]) <= {"unavailable"}


def open_environment(home: Path) -> Environment:
    directory = str(data_file(home).parent)
    return Environment(lambda: lmdb.open(directory, map_size=4 << 20, max_dbs=4, create=False))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    rig = Rig(tmp_path / "home")
    assert rig.write(range(20)).ok
    rig.close()
    return tmp_path / "home"


def test_reopening_waits_for_the_running_lookup_and_blocks_the_next(home: Path) -> None:
    env = open_environment(home)
    inside, go_on, entered = threading.Event(), threading.Event(), threading.Event()

    def look() -> None:
        with env.begin() as txn:
            inside.set()
            assert go_on.wait(PATIENCE_S)
            assert txn.get(key(3), db=env.catalogue) is not None

    def look_next() -> None:
        with env.begin() as txn:
            entered.set()
            assert txn.get(key(3), db=env.catalogue) is not None

    first, second = threading.Thread(target=look), threading.Thread(target=look_next)
    reopening = threading.Thread(target=env.reopen, args=(PATIENCE_S,))
    first.start()
    assert inside.wait(PATIENCE_S)
    reopening.start()
    wait_for(lambda: env._shut)
    second.start()
    assert not entered.is_set()
    go_on.set()
    for thread in (first, reopening, second):
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert entered.is_set()
    env.close()


def test_reopening_gives_up_on_a_lookup_that_does_not_end(home: Path) -> None:
    env = open_environment(home)
    with env.begin() as txn:
        with pytest.raises(TimeoutError, match="is still running"):
            env.reopen(0.01)
        assert txn.get(key(3), db=env.catalogue) is not None
    env.reopen(PATIENCE_S)
    with env.begin() as txn:
        assert txn.get(key(3), db=env.catalogue) is not None
    env.close()


def test_replaced_file_is_not_reopened_as_the_old_one(home: Path) -> None:
    env, data = open_environment(home), data_file(home)
    shutil.copy(data, data.with_name("copy"))
    data.rename(data.with_name("aside"))
    data.with_name("copy").rename(data)
    with pytest.raises(FileNotFoundError, match="not the file"):
        env.reopen(PATIENCE_S)
    with pytest.raises(lmdb.PanicError), env.begin():
        pass
    data.with_name("aside").rename(data)
    env.reopen(PATIENCE_S)
    with env.begin() as txn:
        assert txn.get(key(3), db=env.catalogue) is not None
    env.close()


def test_a_file_that_is_cut_short_is_not_mapped_again(home: Path) -> None:
    env, data = open_environment(home), data_file(home)
    whole = data.read_bytes()
    with env.begin(write=True):
        pass
    os.truncate(data, 3 * 4096)
    with pytest.raises(OSError, match=r"data\.mdb is truncated: its length is 12 KiB .*, but was"):
        env.reopen(PATIENCE_S)
    data.write_bytes(whole)
    env.reopen(PATIENCE_S)
    env.close()


def test_a_file_that_has_lost_commits_is_not_written_to(home: Path) -> None:
    env, data = open_environment(home), data_file(home)
    before = data.read_bytes()
    with env.begin(write=True) as txn:
        txn.put(b"one more", b"", db=env.meta)
    with data.open("r+b") as file:
        file.write(before)
    with pytest.raises(OSError, match="has lost commits"):
        env.reopen(PATIENCE_S)
    env.close()
