"""Test copying records unchanged from the directory of one closed store into that of another."""

from __future__ import annotations

import errno
import gc
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Condition, Event
from typing import Any

import numpy as np
import pytest
import torch

from tests.archive.rig import Shelf, exported, imported, run
from tests.support import forked
from tests.support.pages import PATIENCE_S, chain, nvme_capacity, page_tensor, tiers
from tierstore.archive import closed_store
from tierstore.archive.closed_store import open_sink, open_source, shards_of
from tierstore.archive.export import Exported, write_archive
from tierstore.archive.file_format import Description
from tierstore.archive.intake import Imported, read_archive, read_contents
from tierstore.errors import ArchiveError, ConfigError, TransferError
from tierstore.nvme import extents, lmdb_pages, record_storage
from tierstore.nvme.catalogue import Catalogue, Page
from tierstore.nvme.disk_space import size, size_extents
from tierstore.nvme.inspection import verify
from tierstore.nvme.reader import Record
from tierstore.nvme.record_format import Codec
from tierstore.page import PageLayout, PageSpec
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey

SPEC = PageSpec(num_layers=2, page_size=16, num_kv_heads=2, head_dim=64, dtype="bfloat16", model="closed@1")
LAYOUT = PageLayout.of(SPEC)
PAGES = 8


@pytest.fixture(params=["lmdb", "extents"])
def payload(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def numbers(key: PageKey) -> torch.Tensor:
    """Return a page that ``exp`` can compress."""
    generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "little"))
    return torch.randn(SPEC.shape, generator=generator).to(torch.bfloat16)


@contextmanager
def store(home: Path, *, payload: str = "lmdb", codec: str = "none", pages: int = 100) -> Iterator[TierStore]:
    config = tiers(
        16,
        None,
        home,
        page_nbytes=SPEC.page_nbytes,
        nvme_pages=pages,
        nvme_more={"payload": payload, "codec": codec},
    )
    with TierStore.open(config, SPEC) as opened:
        yield opened


def fill(home: Path, keys: Sequence[PageKey], *, payload: str = "lmdb", codec: str = "none") -> None:
    with store(home, payload=payload, codec=codec) as opened:
        slots = opened.allocate(len(keys))
        for key, slot in zip(keys, slots, strict=True):
            page_tensor(opened)[slot].copy_(numbers(key))
        opened.put(keys, slots)


def require_answers(
    home: Path, keys: Sequence[PageKey], *, payload: str = "lmdb", codec: str = "none"
) -> int:
    """Return how many pages of the sequence the store serves. Require that each is bit-exact."""
    with store(home, payload=payload, codec=codec) as opened, opened.acquire(keys) as lease:
        assert lease.wait(PATIENCE_S) is not LeaseState.PENDING
        for key, slot in zip(keys, lease.slots, strict=False):
            found = page_tensor(opened)[slot].view(torch.int16)
            assert torch.equal(found, numbers(key).view(torch.int16))
        opened.check()
        return lease.num_pages


def export(home: Path, path: Path, keys: Sequence[PageKey] | None = None) -> Exported:
    (shard,) = shards_of(home)
    with open_source(shard) as source:
        return run(write_archive(path, source.keys() if keys is None else keys, source))


def import_(
    path: Path, home: Path, *, payload: str = "lmdb", codec: str = "none", pages: int = 100
) -> Imported:
    capacity = nvme_capacity(pages, SPEC.page_nbytes)
    description = Description(LAYOUT)
    with open_sink(home, description, capacity=capacity, codec=codec, payload=payload) as sink:
        return run(read_archive(path, sink))


def test_another_empty_store_serves_the_exported_pages(tmp_path: Path, payload: str) -> None:
    keys = chain(PAGES)
    fill(tmp_path / "one", keys, payload=payload)
    done = export(tmp_path / "one", tmp_path / "x.tier")
    assert (done.pages, done.missing, done.codecs) == (PAGES, (), {"none": PAGES})
    assert import_(tmp_path / "x.tier", tmp_path / "two", payload=payload).complete
    assert require_answers(tmp_path / "two", keys, payload=payload) == PAGES
    assert [verdict.bad for verdict in verify(tmp_path / "two")] == [()]


@pytest.mark.parametrize("codec", ["none", "exp"])
def test_encoded_records_are_moved_unchanged_regardless_of_the_other_stores_codec(
    tmp_path: Path, payload: str, codec: str
) -> None:
    keys = chain(PAGES)
    fill(tmp_path / "one", keys, payload=payload, codec="exp")
    done = export(tmp_path / "one", tmp_path / "x.tier")
    assert done.codecs == {"exp": PAGES}
    assert done.nbytes < PAGES * (SPEC.page_nbytes + 4080)
    assert import_(tmp_path / "x.tier", tmp_path / "two", payload=payload, codec=codec).complete
    with (
        open_source(shards_of(tmp_path / "one")[0]) as one,
        open_source(shards_of(tmp_path / "two")[0]) as two,
    ):
        for key in keys:
            ours, theirs = one.record(key), two.record(key)
            assert isinstance(ours, Record)
            assert isinstance(theirs, Record)
            assert ours.head.codec is theirs.head.codec is Codec.EXP
            np.testing.assert_array_equal(ours.payload, theirs.payload)
    assert require_answers(tmp_path / "two", keys, payload=payload, codec=codec) == PAGES


@pytest.mark.parametrize("codec", ["int8+zstd", "k8v4"])
def test_lossy_records_are_moved_unchanged_and_only_between_equal_loss_classes(
    tmp_path: Path, payload: str, codec: str
) -> None:
    keys = chain(PAGES)
    fill(tmp_path / "one", keys, payload=payload, codec=codec)
    assert export(tmp_path / "one", tmp_path / "x.tier").codecs == {codec: PAGES}
    found = run(read_contents(tmp_path / "x.tier")).description
    assert found == Description(LAYOUT, codec.partition("+")[0])
    options = {"capacity": nvme_capacity(100, SPEC.page_nbytes), "payload": payload}
    with (
        pytest.raises(ArchiveError, match="the loss class of the pages is"),
        open_sink(tmp_path / "two", found, codec="exp", **options),  # type: ignore[arg-type]
    ):
        raise AssertionError
    with (
        store(tmp_path / "two") as opened,
        pytest.raises(ArchiveError, match="the loss class of its pages is"),
    ):
        run(opened.import_pages(tmp_path / "x.tier"))
    three = tmp_path / "three"
    with open_sink(three, found, codec=codec, **options) as sink:  # type: ignore[arg-type]
        assert run(read_archive(tmp_path / "x.tier", sink)).complete
    with open_source(shards_of(tmp_path / "one")[0]) as one, open_source(shards_of(three)[0]) as other:
        for key in keys:
            ours, theirs = one.record(key), other.record(key)
            assert isinstance(ours, Record)
            assert isinstance(theirs, Record)
            np.testing.assert_array_equal(ours.payload, theirs.payload)
    with store(three, payload=payload, codec=codec) as opened:
        assert opened.match(keys).num_pages == PAGES
        assert not opened.match(keys).exact
        with pytest.raises(ArchiveError, match="import_pages needs a store of loss class"):
            run(opened.import_pages(tmp_path / "x.tier"))
        assert run(opened.export_pages(keys, tmp_path / "y.tier")).codecs == {codec: PAGES}


def test_a_store_that_has_some_pages_gets_the_others(tmp_path: Path, payload: str) -> None:
    keys = chain(PAGES)
    fill(tmp_path / "one", keys)
    export(tmp_path / "one", tmp_path / "x.tier")
    fill(tmp_path / "two", keys[:3], payload=payload, codec="exp")
    done = import_(tmp_path / "x.tier", tmp_path / "two", payload=payload)
    assert (done.pages, done.present, done.complete) == (PAGES - 3, 3, True)
    again = import_(tmp_path / "x.tier", tmp_path / "two", payload=payload)
    assert (again.pages, again.present, again.complete) == (0, PAGES, True)
    assert require_answers(tmp_path / "two", keys, payload=payload) == PAGES


def test_pages_after_an_unreachable_page_are_imported_only_with_the_missing_page(
    tmp_path: Path, payload: str
) -> None:
    keys = chain(PAGES)
    fill(tmp_path / "one", keys)
    export(tmp_path / "one", tmp_path / "whole.tier")
    export(tmp_path / "one", tmp_path / "end.tier", keys[5:])
    fill(tmp_path / "two", keys[:5], payload=payload)
    with store(tmp_path / "two", payload=payload) as opened:
        opened.evict(keys[1:2])
        opened.flush()
    end = import_(tmp_path / "end.tier", tmp_path / "two", payload=payload)
    assert (end.pages, end.orphans) == (0, tuple(keys[5:]))
    whole = import_(tmp_path / "whole.tier", tmp_path / "two", payload=payload)
    assert (whole.present, whole.complete) == (4, True)
    assert require_answers(tmp_path / "two", keys, payload=payload) == PAGES


def test_an_import_lowers_no_capacity(tmp_path: Path, payload: str) -> None:
    keys = chain(PAGES)
    fill(tmp_path / "one", keys, payload=payload)
    export(tmp_path / "one", tmp_path / "x.tier")
    with pytest.raises(
        ConfigError,
        match=r"nvme\.capacity is .* \([0-9,]+ bytes\), but .* with .* \([0-9,]+ bytes\); use at least",
    ):
        import_(tmp_path / "x.tier", tmp_path / "one", payload=payload, pages=20)
    assert require_answers(tmp_path / "one", keys, payload=payload) == PAGES


def test_import_keeps_the_budget_and_reports_pages_that_do_not_fit(tmp_path: Path, payload: str) -> None:
    keys = chain(16)
    fill(tmp_path / "one", keys)
    export(tmp_path / "one", tmp_path / "x.tier")
    capacity = 420 << 10 if payload == "lmdb" else 440 << 10
    description = Description(LAYOUT)
    with open_sink(tmp_path / "two", description, capacity=capacity, codec="none", payload=payload) as sink:
        done = run(read_archive(tmp_path / "x.tier", sink))
    sizing = (size if payload == "lmdb" else size_extents)(capacity, LAYOUT.blob_nbytes)
    assert done.pages == sizing.budget_nbytes // sizing.record_nbytes
    assert 0 < done.pages < 16
    assert done.no_room == tuple(keys[done.pages :])
    on_disk = sum(path.lstat().st_blocks * 512 for path in (tmp_path / "two").rglob("*"))
    assert on_disk <= capacity
    assert export(tmp_path / "two", tmp_path / "y.tier").pages == done.pages
    assert imported(tmp_path / "y.tier", Shelf(description)).complete


def test_pages_that_find_no_slot_drop_their_successors_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = chain(PAGES)
    fill(tmp_path / "one", keys)
    export(tmp_path / "one", tmp_path / "x.tier")
    store_all = Catalogue.store

    def one_hole(catalogue: Catalogue, pages: Sequence[Page]) -> list[int | None]:
        left = [page for page in pages if page.key != keys[3]]
        sizes = dict(zip([page.key for page in left], store_all(catalogue, left), strict=True))
        return [sizes.get(page.key) for page in pages]

    monkeypatch.setattr(Catalogue, "store", one_hole)
    done = import_(tmp_path / "x.tier", tmp_path / "two")
    monkeypatch.undo()
    assert (done.pages, done.no_room) == (3, tuple(keys[3:]))
    assert export(tmp_path / "two", tmp_path / "y.tier").pages == 3


def test_full_directory_ends_the_import_and_keeps_the_imported_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = chain(PAGES)
    fill(tmp_path / "one", keys)
    export(tmp_path / "one", tmp_path / "x.tier")

    def refuse(catalogue: Catalogue, pages: Sequence[Page]) -> list[int | None]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    import_(tmp_path / "x.tier", tmp_path / "two")
    monkeypatch.setattr(Catalogue, "store", refuse)
    with pytest.raises(TransferError, match="No space left"):
        import_(tmp_path / "x.tier", tmp_path / "three")
    assert import_(tmp_path / "x.tier", tmp_path / "two").present == PAGES


def test_killed_import_leaves_a_prefix_and_can_be_completed(tmp_path: Path, payload: str) -> None:
    keys = chain(PAGES)
    fill(tmp_path / "one", keys)
    export(tmp_path / "one", tmp_path / "x.tier")
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from tests.archive import test_closed_store\n"
        "from tierstore.archive import closed_store, intake\n"
        "intake._BATCH_PAGES = 3\n"
        "store = closed_store.ClosedSink._store\n"
        "def killed(sink, records):\n"
        "    kept = store(sink, records)\n"
        "    if len(sink._present) >= 6: os.kill(os.getpid(), 9)\n"
        "    return kept\n"
        "closed_store.ClosedSink._store = killed\n"
        "test_closed_store.import_(Path(sys.argv[1]), Path(sys.argv[2]), payload=sys.argv[3])\n"
    )
    done = forked.run(program, tmp_path / "x.tier", tmp_path / "two", payload)
    assert done.returncode == -signal.SIGKILL
    assert require_answers(tmp_path / "two", keys, payload=payload) == 6
    rest = import_(tmp_path / "x.tier", tmp_path / "two", payload=payload)
    assert (rest.pages, rest.present) == (PAGES - 6, 6)
    assert require_answers(tmp_path / "two", keys, payload=payload) == PAGES


def test_damaged_record_is_skipped_and_named(tmp_path: Path, payload: str) -> None:
    keys = chain(PAGES)
    fill(tmp_path / "one", keys, payload=payload)
    needle = numbers(keys[4]).view(torch.uint8).numpy().tobytes()[:64]
    for path in (tmp_path / "one").rglob("*"):
        raw = path.read_bytes() if path.is_file() else b""
        if needle in raw:
            path.write_bytes(raw.replace(needle, needle[:-1] + bytes([needle[-1] ^ 1])))
    done = export(tmp_path / "one", tmp_path / "x.tier")
    assert done.missing == ((keys[4], "the record does not match its checksum"),)
    got = import_(tmp_path / "x.tier", tmp_path / "two", payload=payload)
    assert (got.pages, got.orphans) == (4, tuple(keys[5:]))


def test_store_in_use_is_refused_for_export_and_import(tmp_path: Path) -> None:
    keys = chain(PAGES)
    fill(tmp_path / "one", keys)
    export(tmp_path / "one", tmp_path / "x.tier")
    with store(tmp_path / "one"):
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
            export(tmp_path / "one", tmp_path / "y.tier")
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
            import_(tmp_path / "x.tier", tmp_path / "one")
    assert not (tmp_path / "y.tier").exists()
    assert require_answers(tmp_path / "one", keys) == PAGES


def test_pages_of_another_loss_class_or_key_scheme_make_no_directory(tmp_path: Path) -> None:
    ours = Description(LAYOUT)
    for description in (replace(ours, loss_class="int8"), replace(ours, key_scheme="tierstore-keys-9")):
        with (
            pytest.raises(ArchiveError, match=r"but with nvme\.codec|but this TierStore uses"),
            open_sink(tmp_path / "two", description, capacity=1 << 20, codec="none", payload="lmdb"),
        ):
            raise AssertionError
    assert not (tmp_path / "two").exists()


def test_export_from_a_directory_without_pages_is_refused(tmp_path: Path) -> None:
    with store(tmp_path / "one"):
        pass
    (shard,) = shards_of(tmp_path / "one")
    with pytest.raises(ArchiveError, match="holds no pages"), open_source(shard):
        raise AssertionError


def test_directory_with_an_inconsistent_marker_is_not_offered(tmp_path: Path) -> None:
    fill(tmp_path / "one", chain(2))
    (shard,) = shards_of(tmp_path / "one")
    assert shard.description == Description(LAYOUT)
    marker = shard.directory / "tierstore-shard.json"
    marker.write_text(marker.read_text().replace('"num_layers": 2', '"num_layers": 3'))
    assert shards_of(tmp_path / "one") == []


def test_lock_is_released_after_any_exception(tmp_path: Path) -> None:
    fill(tmp_path / "one", chain(2))
    shard = shards_of(tmp_path / "one")[0]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), open_source(shard):
            raise KeyboardInterrupt
        with (
            pytest.raises(KeyboardInterrupt),
            open_sink(tmp_path / "two", Description(LAYOUT), capacity=1 << 20, codec="none", payload="lmdb"),
        ):
            raise KeyboardInterrupt
    assert exported(tmp_path / "x.tier", Shelf.of(chain(1))).pages == 1


class Held:
    """Makes reads of a record stop midway, in the LMDB map or in a file, until ``go_on`` is set."""

    def __init__(self, patch: pytest.MonkeyPatch, payload: str) -> None:
        self.inside, self.go_on = Event(), Event()
        module = lmdb_pages if payload == "lmdb" else extents
        memory_for = record_storage.memory_for

        def held(*args: Any) -> Any:
            self.inside.set()
            assert self.go_on.wait(60)
            return memory_for(*args)

        patch.setattr(module, "memory_for", held)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def interrupted_in_its_wait(close: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    with patch.context() as handler:
        handler.setattr(Condition, "wait_for", interrupted)
        close()


@pytest.mark.parametrize("hangs", [False, True])
def test_a_read_in_progress_keeps_the_directory_open(
    tmp_path: Path, payload: str, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Close the directory during a read. A signal handler interrupts the wait for the read, or the wait times out."""
    keys = chain(2)
    fill(tmp_path / "one", keys, payload=payload)
    (shard,) = shards_of(tmp_path / "one")
    monkeypatch.setattr(closed_store, "_CLOSE_S", 0.0)
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool, ExitStack() as opened:
        read = Held(patch, payload)
        with ExitStack() as going_on:
            going_on.callback(read.go_on.set)
            found = pool.submit(opened.enter_context(open_source(shard)).record, keys[0])
            assert read.inside.wait(60)
            if hangs:
                opened.close()
            else:
                with pytest.raises(KeyboardInterrupt):
                    interrupted_in_its_wait(opened.close, patch)
            with pytest.raises(ConfigError, match="in use by process"), open_source(shard):
                raise AssertionError
        record = found.result()
    assert isinstance(record, Record)
    expected = numbers(keys[0]).view(torch.uint8).flatten().numpy()
    np.testing.assert_array_equal(record.payload, expected)
    gc.collect()  # the read has ended, so nothing keeps the directory open
    with open_source(shard) as again:
        assert isinstance(again.record(keys[1]), Record)


def test_a_closed_source_reads_nothing(tmp_path: Path, payload: str) -> None:
    fill(tmp_path / "one", chain(1), payload=payload)
    (shard,) = shards_of(tmp_path / "one")
    with open_source(shard) as source:
        pass
    assert source.record(chain(1)[0]) == "the tier is closed"
