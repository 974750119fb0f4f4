"""Test exporting pages from any tier of a running store, and importing them into a running store."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.archive.rig import CancelledAt, Shelf, TurnByTurn, archive, exported, imported, record, run
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    fill,
    page_tensor,
    read,
    read_soon,
    require_nothing_held,
    tiers,
    where,
    write,
    write_each,
)
from tierstore.archive.intake import read_contents
from tierstore.config import load_config
from tierstore.errors import ArchiveError, ConfigError, StoreClosed
from tierstore.gpu.engine_pages import EnginePages
from tierstore.nvme.reader import RecordBuffers, RecordReader, read_record
from tierstore.nvme.record_format import Codec
from tierstore.store import TierStore
from tierstore.types import PageKey, Tier


def open_store(*sizes: int | Path | None, **more: dict[str, object]) -> TierStore:
    hbm, host, nvme = sizes
    assert not isinstance(hbm, Path)
    assert not isinstance(host, Path)
    assert not isinstance(nvme, int)
    return TierStore.open(tiers(hbm, host, nvme, **more), SPEC)  # type: ignore[arg-type]


def export(store: TierStore, path: Path, keys: Sequence[PageKey]) -> None:
    done = run(store.export_pages(keys, path))
    assert (done.pages, done.missing) == (len(keys), ())
    sink = Shelf()
    assert imported(path, sink).complete
    sink.require_right()
    parents = [sink.records[key].head.parent for key in keys]
    assert parents == [None, *keys[:-1]]


@pytest.mark.parametrize("tier", [Tier.HBM, Tier.HOST, Tier.NVME])
def test_pages_are_exported_from_whichever_tier_has_them(tmp_path: Path, tier: Tier) -> None:
    keys = chain(6)
    with open_store(8, 8, tmp_path / "store") as store:
        write(store, keys)
        if tier is not Tier.HBM:
            store.demote(keys, tier)
            assert store.drain(PATIENCE_S)
        assert all(min(where(store, key)) is tier for key in keys)
        export(store, tmp_path / "x.tier", keys)
        require_nothing_held(store)


def test_sequence_longer_than_memory_is_exported_page_by_page(tmp_path: Path) -> None:
    keys = chain(40)
    with open_store(2, 3, tmp_path / "store") as store:
        write_each(store, keys)
        export(store, tmp_path / "x.tier", keys)
        require_nothing_held(store)


def test_pages_of_disk_are_lent_as_they_are_encoded(tmp_path: Path) -> None:
    keys = chain(2)
    with open_store(4, None, tmp_path / "store", nvme_more={"codec": "exp"}) as store:
        slots = store.allocate(2)
        for slot in slots:
            page_tensor(store)[slot].copy_(torch.ones(SPEC.shape, dtype=torch.float16))
        store.put(keys, slots)
        store.flush()
        assert run(store.export_pages(keys, tmp_path / "x.tier")).codecs == {"exp": 2}
        again = run(read_contents(tmp_path / "x.tier"))
        assert {item.codec for item in again.items} == {Codec.EXP}
    with open_store(4, None, None) as other:
        assert run(other.import_pages(tmp_path / "x.tier")).complete
        with other.acquire(keys) as lease:
            lease.wait(PATIENCE_S)
            assert lease.num_pages == 2
            assert all(bool((page_tensor(other)[slot] == 1).all()) for slot in lease.slots)


def test_a_page_that_cannot_be_read_is_named_and_the_file_has_the_others(tmp_path: Path) -> None:
    keys = chain(3)
    with open_store(4, None, tmp_path / "store") as store:
        write(store, keys)
        store.demote(keys, Tier.NVME)
        store.flush()
        assert where(store, keys[1]) == {Tier.NVME: "ready"}
        (data,) = (tmp_path / "store").rglob("data.mdb")
        raw = data.read_bytes()
        needle = record(keys[1], keys[0]).payload.tobytes()
        assert raw.count(needle) == 1
        with data.open("r+b") as file:
            file.seek(raw.index(needle))
            file.write(bytes(8))
        done = run(store.export_pages(keys, tmp_path / "x.tier"))
        assert [key for key, _ in done.missing] == [keys[1]]
        assert done.pages == 2
        store.check()


def test_memory_only_pages_are_not_exported(tmp_path: Path) -> None:
    keys = chain(3)
    with open_store(4, 4, None) as store:
        write(store, keys[:2])
        slots = store.allocate(1)
        fill(store, keys[2:], slots)
        store.put(keys[2:], slots, memory_only=True)
        done = run(store.export_pages(keys, tmp_path / "x.tier"))
        assert done.missing == ((keys[2], "it was put with memory_only"),)
        assert record(keys[2], None).payload.tobytes() not in (tmp_path / "x.tier").read_bytes()


def test_keys_of_missing_pages_are_named(tmp_path: Path) -> None:
    with open_store(4, 4, None) as store:
        write(store, chain(2))
        done = run(store.export_pages([*chain(2), *chain(1, "else")], tmp_path / "x.tier"))
        assert done.missing == ((chain(1, "else")[0], "not found"),)
        with pytest.raises(TypeError, match="a sequence of page keys"):
            run(store.export_pages(chain(1)[0], tmp_path / "y.tier"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sizes", [(8, None, False), (2, 3, True), (1, None, True), (8, 8, False), (3, 8, False)]
)
def test_pages_are_imported_into_any_existing_tiers(
    tmp_path: Path, sizes: tuple[int, int | None, bool]
) -> None:
    path, keys = archive(tmp_path / "x.tier", 6)
    hbm, host, disk = sizes
    with open_store(hbm, host, tmp_path / "store" if disk else None) as store:
        done = run(store.import_pages(path))
        assert (done.pages, done.complete) == (6, True)
        assert store.match(keys).num_pages == 6
        again = run(store.import_pages(path))
        assert (again.pages, again.present) == (0, 6)
        for key in keys:
            assert read_soon(store, [key]) == 1
        require_nothing_held(store)
        store.flush()
    if disk:
        with open_store(8, None, tmp_path / "store") as store:
            assert read(store, keys) == 6


def test_a_full_store_keeps_the_first_pages_and_counts_the_rest_as_not_fitting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore.live_archive._PATIENCE_S", 0.2)
    path, keys = archive(tmp_path / "x.tier", 9)
    with open_store(4, None, None) as store:
        done = run(store.import_pages(path))
        there = store.match(keys).num_pages
        assert done.pages == there
        assert set(done.no_room) == set(keys[there:])
        assert not done.complete
        assert 1 <= there <= 4
        assert read(store, keys[:there]) == there
        require_nothing_held(store)


def test_import_into_a_fully_leased_store_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore.live_archive._PATIENCE_S", 0.2)
    path, keys = archive(tmp_path / "x.tier", 2)
    mine = chain(4, "mine")
    with open_store(4, None, None) as store:
        write(store, mine)
        with store.acquire(mine) as lease:
            lease.wait(PATIENCE_S)
            done = run(store.import_pages(path))
            assert (done.pages, done.no_room) == (0, tuple(keys))
        assert read(store, mine) == 4
        require_nothing_held(store)


def test_admission_does_not_keep_an_import_from_the_disk(tmp_path: Path) -> None:
    path, keys = archive(tmp_path / "x.tier", 6)
    with open_store(2, None, tmp_path / "store", nvme_more={"admission": "second_hit"}) as store:
        assert run(store.import_pages(path)).complete
        assert store.drain(PATIENCE_S)
        assert all(Tier.NVME in where(store, key) for key in keys)


def test_a_store_of_another_model_refuses_and_is_unchanged(tmp_path: Path) -> None:
    path, _ = archive(tmp_path / "x.tier")
    other = SPEC.__class__(
        num_layers=2, page_size=4, num_kv_heads=2, head_dim=8, dtype="float16", model="another"
    )
    with TierStore.open(tiers(4, None, None), other) as store:
        with pytest.raises(
            ArchiveError, match="the model of its pages is 'test', but this store needs 'another'"
        ):
            run(store.import_pages(path))
        require_nothing_held(store)


def test_with_engine_owned_hbm_pages_are_exported_from_disk_and_none_imported(tmp_path: Path) -> None:
    keys = chain(3)
    path, _ = archive(tmp_path / "y.tier")
    tensor = torch.zeros((4, *SPEC.shape), dtype=torch.float16)
    for slot, key in enumerate(keys):
        tensor[slot].copy_(torch.from_numpy(record(key, None).payload).view(torch.float16).view(SPEC.shape))
    memory: dict[str, object] = {
        "hbm": {"device": "cpu", "owner": "engine"},
        "host": {"capacity": 4 * SPEC.page_nbytes, "pin": "never"},
    }
    disk = {"path": str(tmp_path / "store"), "capacity": "1MiB"}
    for config in (load_config(memory), load_config({**memory, "nvme": disk})):
        with TierStore.open(config, SPEC) as store:
            store.register(EnginePages([tensor], "BLKNHD"))
            store.put(keys, [0, 1, 2])
            store.drain(PATIENCE_S)
            store.flush()
            if config.nvme is None:
                with pytest.raises(ArchiveError, match="only pages that `flush` wrote there"):
                    run(store.export_pages(keys, tmp_path / "x.tier"))
            else:
                export(store, tmp_path / "x.tier", keys)
            with pytest.raises(ConfigError, match=r"import_pages needs hbm\.owner: store"):
                run(store.import_pages(path))


def test_closed_store_exports_and_imports_nothing(tmp_path: Path) -> None:
    path, keys = archive(tmp_path / "x.tier")
    with open_store(4, None, None) as store:
        pass
    with pytest.raises(StoreClosed):
        run(store.export_pages(keys, tmp_path / "y.tier"))
    with pytest.raises(StoreClosed):
        run(store.import_pages(path))
    assert [each.name for each in tmp_path.iterdir()] == ["x.tier"]


def test_closing_the_store_ends_a_running_export_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore.archive.export.most_ahead", lambda page_nbytes: 2)
    keys = chain(6)
    store = open_store(8, None, tmp_path / "store")
    write(store, keys)
    store.flush()

    def close_at_third(done: int, total: int) -> None:
        if done == 3:
            store.close()

    with pytest.raises(StoreClosed):
        run(store.export_pages(keys, tmp_path / "x.tier", close_at_third))
    assert [each.name for each in tmp_path.iterdir()] == ["store"]


def test_the_tier_closes_only_after_a_read_that_it_lends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = chain(2)
    store = open_store(4, None, tmp_path / "store")
    write(store, keys)
    store.flush()
    begun, go_on, results = threading.Event(), threading.Event(), []
    read = read_record

    def slow(reader: RecordReader, key: PageKey, memory: RecordBuffers) -> object:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return read(reader, key, memory)

    monkeypatch.setattr("tierstore.nvme.reader.read_record", slow)
    tier = store._parts.nvme
    assert tier is not None
    reading = threading.Thread(target=lambda: results.append(tier.lender.record(keys[0])))
    reading.start()
    assert begun.wait(PATIENCE_S)
    assert tier.close(0.05) is False
    go_on.set()
    reading.join(PATIENCE_S)
    assert tier.close(PATIENCE_S) is True
    assert tier.lender.record(keys[0]) == "the tier is closed"
    store.close()


@pytest.mark.parametrize("direction", ["out", "in"])
def test_cancelling_at_any_wait_leaks_nothing_in_the_store(tmp_path: Path, direction: str) -> None:
    path, keys = archive(tmp_path / "x.tier", 3)

    async def play(at: int, store: TierStore) -> bool:
        work = (
            store.export_pages(keys, tmp_path / "y.tier") if direction == "out" else store.import_pages(path)
        )
        try:
            await CancelledAt(at, work)
        except asyncio.CancelledError:
            return False
        return True

    waits = 0
    while True:
        with open_store(4, None, None) as store:
            if direction == "out":
                write(store, keys)
            with asyncio.Runner(loop_factory=TurnByTurn) as runner:
                done = runner.run(play(waits + 1, store))
            assert sorted(os.listdir(tmp_path)) == ["x.tier", *["y.tier"] * (done and direction == "out")]
            assert read(store, keys) == store.match(keys).num_pages
            require_nothing_held(store)
        if done:
            break
        waits += 1
    assert waits > 3


def test_progress_counts_every_page(tmp_path: Path) -> None:
    keys = chain(3)
    seen: list[tuple[int, int]] = []
    with open_store(4, None, None) as store:
        write(store, keys)
        run(store.export_pages(keys, tmp_path / "x.tier", lambda done, total: seen.append((done, total))))
        run(store.import_pages(tmp_path / "x.tier", lambda done, total: seen.append((done, total))))
    assert seen == [(1, 3), (2, 3), (3, 3)] * 2


def test_damaged_page_and_its_descendants_are_not_imported_by_a_running_store(tmp_path: Path) -> None:
    keys = chain(4)
    source = Shelf.of(keys)
    exported(tmp_path / "x.tier", source)
    item = {item.key: item for item in run(read_contents(tmp_path / "x.tier")).items}[keys[2]]
    raw = bytearray((tmp_path / "x.tier").read_bytes())
    raw[item.end - 1] ^= 1
    (tmp_path / "x.tier").write_bytes(raw)
    with open_store(4, None, None) as store:
        done = run(store.import_pages(tmp_path / "x.tier"))
        assert (done.damaged, done.orphans) == (
            ((keys[2], "the record does not match its checksum"),),
            (keys[3],),
        )
        assert read(store, keys) == 2
        slots = store.allocate(1)
        fill(store, [keys[2]], slots)
        store.free(slots)


def test_pages_that_are_read_ahead_share_the_little_free_space_in_hbm(tmp_path: Path) -> None:
    keys = chain(40)
    with open_store(2, 44, None) as store:
        write_each(store, keys)
        assert store.drain(PATIENCE_S)
        done = run(store.export_pages(keys, tmp_path / "x.tier"))
        assert (done.pages, done.missing) == (40, ())
        require_nothing_held(store)
    sink = Shelf()
    assert imported(tmp_path / "x.tier", sink).complete
    sink.require_right()
