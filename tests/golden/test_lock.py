"""Test that only one process at a time can open a directory, whichever version of the code it runs."""

from __future__ import annotations

import fcntl
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

import tierstore
from tests.golden.command import run, told
from tests.golden.directories import (
    CASES,
    DOCUMENTS,
    KEPT,
    Case,
    documents_of,
    open_store,
    put_documents,
    store_config,
)
from tests.golden.trees import load, require_same

CHECKOUT = Path(__file__).parents[2]
EARLIER = "5edb623"
"""A commit of an earlier version. Directories that it wrote are still in use."""


def lock_of(home: Path) -> Path:
    (lock,) = home.glob("*.lock")
    return lock


@pytest.mark.parametrize("case", CASES[:1], ids=["lmdb-none"])
def test_the_lock_is_an_flock_of_a_file_beside_the_directory_with_the_holders_pid(
    case: Case, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    with open_store(case, home) as store:
        (shard,) = [path for path in home.iterdir() if path.is_dir()]
        lock = lock_of(home)
        assert shard.name == f"{store.stats()['fingerprint']}-0"
        assert lock.name == f"{shard.name}.lock"
        assert lock.read_bytes() == f"{os.getpid()}\n".encode()
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600
        with lock.open("rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with pytest.raises(tierstore.ConfigError, match=rf"in use by process {os.getpid()}\b"):
            open_store(case, home)
        assert told("inspect", home)["shards"][0]["in_use_by"] == os.getpid()
        assert run("purge", home, "--yes").exit_code == 1
    with lock.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_holder_of_the_flock_owns_the_directory(tmp_path: Path) -> None:
    case, home = CASES[0], tmp_path / "home"
    with open_store(case, home) as store:
        put_documents(store)
    lock = lock_of(home)
    lock.write_text("4711\n")
    with lock.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(tierstore.ConfigError, match="in use by process 4711"):
            open_store(case, home)
    with open_store(case, home) as store:
        assert {name: store.match(store.keys(tokens)).num_pages for name, tokens in DOCUMENTS.items()} == KEPT


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the packages of the commit ``EARLIER``."""
    command = ["git", "archive", EARLIER, "tierstore", "prefetch"]
    made = subprocess.run(command, cwd=CHECKOUT, capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"git has no commit {EARLIER} here: {made.stderr.decode().strip()}")
    root = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as packed:
        packed.extractall(root, filter="data")
    return root


PROGRAM = """
import hashlib, json, sys
root, config, specs, documents = json.loads(sys.argv[1])
sys.path.insert(0, root)
import tierstore, torch
assert tierstore.__file__.startswith(root), tierstore.__file__
try:
    store = tierstore.TierStore.open(tierstore.load_config(config), [tierstore.PageSpec(**s) for s in specs])
except tierstore.ConfigError as error:
    print(json.dumps({"refused": str(error)}))
    sys.exit()
pages = {}
for name, tokens in documents.items():
    keys, pages[name] = store.keys(tokens), {}
    with store.acquire(keys) as lease:
        lease.wait(60.0)
        for key, slot in zip(keys, lease.slots):
            page = store.pages[slot]
            parts = page if isinstance(page, tuple) else (page,)
            raw = b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
            pages[name][key.hex()] = hashlib.sha256(raw).hexdigest()
print(json.dumps({"pages": pages}), flush=True)
sys.stdin.readline()
store.close()
"""
"""Opens a directory, prints the digests of its pages or the error, and closes it when standard input ends."""


@contextmanager
def opened_by(earlier: Path, case: Case, home: Path) -> Iterator[Any]:
    """Open a directory in a process with the earlier code, until the block ends. Yield what the process prints."""
    specs = [asdict(spec) for spec in case.specs]
    told = json.dumps([str(earlier), store_config(case, home), specs, DOCUMENTS])
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, told], stdin=PIPE, stdout=PIPE, text=True, cwd=earlier
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            yield {"pid": child.pid, **json.loads(child.stdout.readline())}
        finally:
            child.stdin.close()
    assert child.returncode == 0


def bytes_in(home: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a directory, except lock files, which every open changes."""
    files = [path for path in home.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {str(path.relative_to(home)): path.read_bytes() for path in files if path.name != "lock.mdb"}


@pytest.mark.deep
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_earlier_code_opens_todays_directory_or_refuses_it_and_erases_nothing(
    case: Case, earlier: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    with open_store(case, home) as store:
        put_documents(store)
        with opened_by(earlier, case, home) as said:
            assert f"in use by process {os.getpid()}" in said["refused"]
    before = bytes_in(home)
    with opened_by(earlier, case, home) as said:
        if "refused" in said:
            assert bytes_in(home) == before
        else:
            require_same(case.name, load(case.name)["pages"], said["pages"])
            with pytest.raises(tierstore.ConfigError, match=rf"in use by process {said['pid']}\b"):
                open_store(case, home)
            assert told("inspect", home)["shards"][0]["in_use_by"] == said["pid"]
    with open_store(case, home) as store:
        require_same(case.name, load(case.name)["pages"], documents_of(store))
