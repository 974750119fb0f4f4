"""Tests of stores that open a filled directory read-only: pages are served, and nothing on disk changes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nvme.rig import change, data_file, extent_files, find
from tests.nvme.watch import Calls
from tests.support import forked
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    content,
    page_tensor,
    read,
    read_soon,
    require_nothing_held,
    tiers,
    where,
    write,
)
from tierstore.config import StoreConfig, load_config
from tierstore.errors import ConfigError
from tierstore.nvme import directory_lock
from tierstore.nvme.inspection import inspect
from tierstore.page import PageSpec
from tierstore.store import TierStore
from tierstore.types import Tier

WARMED = chain(6)


def config(home: Path, *, hbm: int = 8, host: int | None = 16, **nvme_more: object) -> StoreConfig:
    return tiers(hbm, host, home, nvme_more={"read_only": True, **nvme_more})


@pytest.fixture(params=["lmdb", "extents"])
def home(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return the directory of a closed store that contains the pages of ``WARMED``."""
    home = tmp_path / "home"
    with TierStore.open(tiers(8, 16, home, nvme_more={"payload": request.param}), SPEC) as store:
        write(store, WARMED)
        assert store.flush().durable == len(WARMED)
    return home


def everything(home: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return the mode, modification time and content of the directory and everything in it, by relative path."""
    return {
        str(path.relative_to(home)): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in [home, *sorted(home.rglob("*"))]
    }


def nvme(store: TierStore) -> dict[str, object]:
    found = store.stats()["nvme"]
    assert isinstance(found, dict)
    return found


def test_pages_are_served_and_nothing_on_disk_changes(home: Path) -> None:
    before = everything(home)
    new = chain(4, "new")
    with TierStore.open(config(home), SPEC) as store:
        assert store.match(WARMED).num_pages == len(WARMED)
        assert read(store, WARMED) == len(WARMED)
        write(store, new)
        assert read(store, new) == len(new)
        assert store.drain(PATIENCE_S)
        found = store.flush()
        assert (found.durable, found.failed, found.pending) == (len(WARMED), len(new), 0)
        assert all(Tier.NVME not in where(store, key) for key in new)
        assert store.demote(new, Tier.NVME) == len(new)
        assert store.drain(PATIENCE_S)
        assert all(Tier.NVME not in where(store, key) for key in new)
        figures = nvme(store)
        assert (figures["read_only"], figures["state"], figures["records"]) == (True, "ok", len(WARMED))
        assert store.tiers[Tier.NVME].read_only
        store.check()
        require_nothing_held(store)
    assert everything(home) == before


def test_more_new_pages_than_memory_holds_lose_no_page_on_disk(home: Path) -> None:
    with TierStore.open(config(home, hbm=4, host=4), SPEC) as store:
        for number in range(20):
            write(store, chain(3, f"new{number}"))
            store.check()
        assert store.match(chain(3, "new19")).num_pages == 3
        assert store.match(chain(3, "new0")).num_pages == 0
        assert store.explain(chain(1, "new0"))[0]["lost"] == "not_admitted"
        assert store.match(WARMED).num_pages == len(WARMED)
        assert read_soon(store, WARMED[:4]) == 4
        store.check()
    assert [shard.records for shard in inspect(home).shards] == [len(WARMED)]


def test_new_pages_after_warmed_ones_are_found_while_memory_holds_them(home: Path) -> None:
    longer = [*WARMED, *chain(2, "more")]
    with TierStore.open(config(home), SPEC) as store:
        with store.acquire(longer) as lease:
            lease.wait(PATIENCE_S)
            assert lease.num_pages == len(WARMED)
            slots = store.allocate(2)
            for slot, key in zip(slots, longer[-2:], strict=True):
                page_tensor(store)[slot].copy_(content(key))
            store.put(longer[-2:], slots, parent=WARMED[-1])
        assert read(store, longer) == len(longer)
        store.check()
    with TierStore.open(config(home), SPEC) as store:
        assert store.match(longer).num_pages == len(WARMED)


def test_a_damaged_page_is_a_miss_and_its_record_stays(home: Path) -> None:
    path, position = find(home, content(WARMED[4]).numpy().tobytes(), SPEC.fingerprint)
    change(path, position, bytes(8))
    before = everything(home)
    with TierStore.open(config(home), SPEC) as store:
        assert read(store, WARMED) == 4
        assert store.match(WARMED).num_pages == 4
        with store.acquire(WARMED[:4]) as lease:
            lease.wait(PATIENCE_S)
            (slot,) = store.allocate(1)
            page_tensor(store)[slot].copy_(content(WARMED[4]))
            store.put(WARMED[4:5], [slot], parent=WARMED[3])
        assert read(store, WARMED) == len(WARMED), (
            "once the page is put again, the page after it must be found"
        )
        assert store.flush().failed == 1
        store.check()
    assert everything(home) == before


def test_evicted_page_returns_at_the_next_open_and_is_a_pending_erase(home: Path) -> None:
    with TierStore.open(config(home), SPEC) as store:
        assert store.evict(WARMED[5:]) == 1
        assert store.match(WARMED).num_pages == 5
        assert store.flush().pending_erases == 1
        assert store.flush_evictions() == 1
    with TierStore.open(config(home), SPEC) as store:
        assert read(store, WARMED) == len(WARMED)


def test_page_with_only_a_tombstone_is_not_found(home: Path) -> None:
    from tierstore.nvme.catalogue import Catalogue

    def refuse(self: Catalogue, keys: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch, TierStore.open(tiers(8, 16, home), SPEC) as store:
        patch.setattr(Catalogue, "erase", refuse)
        store.evict(WARMED[5:])
        assert store.flush_evictions() == 0
    with TierStore.open(config(home), SPEC) as store:
        assert store.match(WARMED).num_pages == 5


READER = """
import sys
from pathlib import Path
from tests.field.test_read_only import SPEC, WARMED, config, read
from tierstore.nvme.inspection import inspect, verify
from tierstore.store import TierStore
home = Path(sys.argv[1])
with TierStore.open(config(home), SPEC) as store:
    assert read(store, WARMED) == len(WARMED)
assert [verdict.checked for verdict in verify(home)] == [len(WARMED)]
assert [(shard.in_use_by, shard.records) for shard in inspect(home).shards] == [(None, len(WARMED))]
"""


def test_many_readers_and_no_writer_may_open_a_directory(home: Path) -> None:
    with TierStore.open(config(home), SPEC) as first:
        others = [forked.run(READER, home) for _ in range(2)]
        assert [(other.returncode, other.stderr) for other in others] == [(0, "")] * 2
        with pytest.raises(ConfigError, match="is already open in this process"):
            TierStore.open(config(home), SPEC)
        with pytest.raises(ConfigError, match="in use by processes that read it"):
            TierStore.open(tiers(8, 16, home), SPEC)
        assert read(first, WARMED) == len(WARMED)
    with TierStore.open(tiers(8, 16, home), SPEC) as writer:
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
            TierStore.open(config(home), SPEC)
        assert read(writer, WARMED) == len(WARMED)


def test_a_killed_reader_locks_out_no_process(home: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.field.test_read_only import config, SPEC; "
        "from tierstore.store import TierStore; store = TierStore.open(config(Path(sys.argv[1])), SPEC); "
        "print('open', flush=True); sys.stdin.read()"
    )
    with forked.running(program, home) as reader:
        assert reader.stdout.readline() == "open\n"
        with pytest.raises(ConfigError, match="in use by processes that read it"):
            TierStore.open(tiers(8, 16, home), SPEC)
        reader.send_signal(signal.SIGKILL)
        reader.wait()
    with TierStore.open(tiers(8, 16, home), SPEC) as store:
        assert read(store, WARMED) == len(WARMED)


def test_a_directory_without_its_lock_file_keeps_writers_out_too(home: Path) -> None:
    for lock in home.glob("*.lock"):
        lock.unlink()
    with TierStore.open(config(home), SPEC) as store:
        assert read(store, WARMED) == len(WARMED)
        with pytest.raises(ConfigError, match="in use by processes that read it"):
            TierStore.open(tiers(8, 16, home), SPEC)


def test_lock_file_is_optional_where_none_can_be_created(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for lock in home.glob("*.lock"):
        lock.unlink()

    def read_only(path: object, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            raise OSError(30, "Read-only file system")
        return os.open(str(path), flags, mode)

    monkeypatch.setattr(directory_lock, "os", Calls(open=read_only))
    before = everything(home)
    with TierStore.open(config(home), SPEC) as store:
        assert read(store, WARMED) == len(WARMED)
    assert everything(home) == before


def _missing(home: Path) -> Path:
    return home / "nowhere"


def _empty(home: Path) -> Path:
    (home.parent / "empty").mkdir()
    return home.parent / "empty"


def _foreign(home: Path) -> Path:
    (home.parent / "foreign").mkdir()
    (home.parent / "foreign" / "letter.txt").write_text("mine")
    return home.parent / "foreign"


def _cut(home: Path) -> Path:
    os.truncate(data_file(home, SPEC.fingerprint), 5000)
    return home


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_missing, "does not exist"),
        (_empty, "is empty: no store has used it yet"),
        (_foreign, "TierStore did not create"),
        (_cut, "cannot be opened read-only: data.mdb is truncated: its length is 4.9 KiB"),
    ],
)
def test_a_directory_that_cannot_be_used_is_refused_and_stays_as_it_is(
    home: Path, spoil: Callable[[Path], Path], told: str
) -> None:
    place = spoil(home)
    before = everything(home.parent)
    with pytest.raises(ConfigError, match=told):
        TierStore.open(config(place), SPEC)
    assert everything(home.parent) == before


def test_a_directory_of_another_model_is_refused_and_both_are_named(home: Path) -> None:
    other = PageSpec(num_layers=2, page_size=4, num_kv_heads=2, head_dim=8, dtype="float16", model="other")
    before = everything(home)
    with pytest.raises(ConfigError, match="has no pages of this model") as refused:
        TierStore.open(config(home), other)
    assert SPEC.fingerprint in str(refused.value)
    assert other.fingerprint in str(refused.value)
    assert everything(home) == before


def test_capacity_of_a_read_only_store_is_ignored(home: Path) -> None:
    with TierStore.open(config(home, capacity=1), SPEC) as store:
        assert store.match(WARMED).num_pages == len(WARMED)


def test_extent_files_are_opened_to_be_read(home: Path) -> None:
    for path in [*extent_files(home, SPEC.fingerprint), data_file(home, SPEC.fingerprint)]:
        path.chmod(0o400)
    with TierStore.open(config(home), SPEC) as store:
        assert read(store, WARMED) == len(WARMED)


@pytest.mark.parametrize(("text", "value"), [("true", True), ("False", False), (True, True)])
def test_read_only_must_be_a_bool(tmp_path: Path, text: object, value: bool) -> None:
    read = load_config({"nvme": {"path": tmp_path, "capacity": "1GiB", "read_only": text}})
    assert read.nvme is not None
    assert read.nvme.read_only is value


@pytest.mark.parametrize("text", ["yes", 1, "", None, "on"])
def test_other_words_for_read_only_are_refused(tmp_path: Path, text: object) -> None:
    with pytest.raises(ConfigError, match=r"nvme\.read_only is .*, but must be true or false"):
        load_config({"nvme": {"path": tmp_path, "capacity": "1GiB", "read_only": text}})


@pytest.mark.parametrize("home", [pytest.param("lmdb", marks=pytest.mark.deep), "extents"], indirect=True)
def test_a_read_only_mount_is_read(home: Path) -> None:
    # A bind mount in a separate mount namespace is read-only even for root
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        allowed = subprocess.run([*namespace, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if allowed.returncode != 0:
        pytest.skip(f"no mount namespace here: {allowed.stderr.decode().strip()}")
    before = everything(home)
    program = (
        "import sys; from tests.field import mounts, read_only_mount; home = sys.argv[1]\n"
        "mounts.unshare(); mounts.mount('--bind', home, home); mounts.mount('-o', 'remount,bind,ro', home)\n"
        "read_only_mount.main()"
    )
    run = forked.run(program, home, timeout=4 * PATIENCE_S)
    assert run.returncode == 0, run.stderr
    assert everything(home) == before
