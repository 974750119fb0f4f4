"""Test ``TierStoreStorage`` with host memory of its own, beside a disk and without one, against a dictionary."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from tests.adapters.sglang_stub import (
    AnchorPool,
    HeadPool,
    LatentPool,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    StatePool,
    fill,
    key,
    opened,
    raw,
    stubbed,
    tokens,
)
from tests.adapters.test_sglang import find, keys, read, write, writing_rank
from tests.nvme.rig import change
from tests.nvme.watch import Calls
from tests.support.lanes import seeds
from tests.support.sick_disk import Failing, Hanging, replace_preadv
from tests.support.waiting import wait_for
from tierstore.errors import ConfigError
from tierstore.nvme import extents
from tierstore.nvme.direct_io import padded

PAGE = padded(2 * HeadPool().part_nbytes)
KEPT = 8
"""Pages for which there is host memory in most tests."""


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    with stubbed() as found:
        yield found


@contextmanager
def hosting(module: ModuleType, home: Path, kv: Any, pages: int = KEPT, **more: Any) -> Iterator[Any]:
    """Yield a backend with host memory for ``pages`` pages. ``disk=False``: without a disk."""
    host = {"host": {"capacity": pages * PAGE}}
    nvme = {"nvme": {"path": str(home), "capacity": 4 << 20, "payload": "extents", **more.pop("nvme", {})}}
    config = {**host, **(nvme if more.pop("disk", True) else {})}
    extra = {"config": config, "staging": "64KiB", **more.pop("extra", {})}
    with opened(module, home, kv, extra=extra, **more) as storage:
        yield storage


def hits(storage: Any) -> tuple[int, int]:
    """Return the number of pages that were read, and how many of them from host memory of TierStore."""
    figures = storage.tier_stats()["kv"]
    return figures["pages_hit"], figures["pages_host_hit"]


class Model:
    """What a backend must find: pages in host memory, least recently used first, and pages on disk."""

    def __init__(self, kept: int, disk: bool) -> None:
        self.kept, self.has_disk = kept, disk
        self.host: list[int] = []
        self.disk: set[int] = set()

    def store(self, numbers: list[int]) -> None:
        self.use(numbers)
        self._enter([number for number in numbers if not (self.has_disk and number in self.disk)])
        self.use(numbers)
        if self.has_disk:
            self.disk |= {*numbers}

    def load(self, numbers: list[int]) -> list[bool]:
        found = [number in self.host or number in self.disk for number in numbers]
        self.use(numbers)
        self._enter([number for number, held in zip(numbers, found, strict=True) if held])
        self.use(numbers)
        return found

    def use(self, numbers: list[int]) -> None:
        for number in reversed(numbers):
            if number in self.host:
                self.host.remove(number)
                self.host.append(number)

    def _enter(self, numbers: list[int]) -> None:
        for number in reversed(numbers):
            if number not in self.host:
                if len(self.host) == self.kept:
                    self.host.pop(0)
                self.host.append(number)

    def clear(self) -> None:
        self.host.clear()
        self.disk.clear()

    def run(self, numbers: list[int]) -> int:
        found = [number in self.host or number in self.disk for number in numbers]
        return found.index(False) if False in found else len(found)


@pytest.mark.parametrize("disk", [True, False], ids=["disk", "memory only"])
@pytest.mark.parametrize("seed", seeds(2, 12))
def test_random_calls_find_what_a_dictionary_predicts(
    module: ModuleType, tmp_path: Path, disk: bool, seed: int
) -> None:
    choose, model = random.Random(seed), Model(KEPT, disk)
    pool = HeadPool()
    for _ in range(3):  # the backend is attached three times
        model.host.clear()
        with hosting(module, tmp_path, pool, disk=disk) as storage:
            for _ in range(80):
                first = choose.randrange(24)
                numbers = [*range(first, first + choose.randint(1, 5))]
                names = [key(number) for number in numbers]
                places = choose.sample(range(64), len(numbers))
                what = choose.choice(["set", "set", "get", "get", "get", "exists", "clear"])
                if what == "set":
                    for place, number in zip(places, numbers, strict=True):
                        fill(pool, place, number)
                    assert all(storage.batch_set_v1(names, tokens(pool, places)))
                    assert storage.flush(60.0)
                    model.store(numbers)
                elif what == "get":
                    pool.kv_buffer.zero_()
                    found = storage.batch_get_v1(names, tokens(pool, places))
                    check_bytes(pool, places, numbers, found)
                    assert found == model.load(numbers)
                elif what == "exists":
                    assert storage.batch_exists(names) == model.run(numbers)
                elif choose.random() < 0.2:
                    assert storage.clear()
                    model.clear()
                assert storage.check() == []
                assert storage.tier_stats()["kv"]["host_pages"] == len(model.host)
                for number in range(28):
                    assert storage.exists(key(number)) == (number in model.host or number in model.disk)


def check_bytes(pool: Any, places: list[int], numbers: list[int], found: list[bool]) -> None:
    expected = type(pool)()
    for place, number, arrived in zip(places, numbers, found, strict=True):
        if arrived:
            fill(expected, 0, number)
            assert torch.equal(raw(pool, place), raw(expected, 0))
        else:
            assert not raw(pool, place).any()


def test_pages_that_were_set_or_read_come_from_memory(module: ModuleType, tmp_path: Path) -> None:
    pool = HeadPool()
    with hosting(module, tmp_path, pool) as storage:
        write(storage, pool, range(KEPT))
        assert read(storage, pool, range(KEPT)) == [True] * KEPT
        assert hits(storage) == (KEPT, KEPT)
    with hosting(module, tmp_path, pool) as storage:
        pool.kv_buffer.zero_()
        assert read(storage, pool, range(KEPT)) == [True] * KEPT
        assert hits(storage) == (KEPT, 0)
        assert read(storage, pool, range(KEPT)) == [True] * KEPT
        assert hits(storage) == (2 * KEPT, KEPT)
        assert storage.tier_stats()["kv"]["host_nbytes"] == KEPT * PAGE


def test_a_prompt_longer_than_memory_keeps_its_beginning(module: ModuleType, tmp_path: Path) -> None:
    pool = HeadPool()
    with hosting(module, tmp_path, pool, disk=False) as storage:
        write(storage, pool, range(KEPT))
        write(storage, pool, range(100, 102))
        assert storage.batch_exists(keys(range(KEPT))) == KEPT - 2
        assert storage.tier_stats()["kv"]["host_evicted"] == 2


@pytest.mark.parametrize("disk", [True, False], ids=["disk", "memory only"])
@pytest.mark.parametrize("count", [KEPT + 2, 5 * KEPT])
def test_a_call_with_more_pages_than_memory_keeps_the_first_ones(
    module: ModuleType, tmp_path: Path, disk: bool, count: int
) -> None:
    pool = HeadPool()
    with hosting(module, tmp_path, pool, disk=disk) as storage:
        for page in range(40, 44):
            fill(pool, page, page)
        assert all(storage.batch_set_v1(keys(range(40, 44)), tokens(pool, [*range(40, 44)])))  # evicted below
        assert storage.flush(60.0)
        for page in range(count):
            fill(pool, page, page)
        stored = storage.batch_set_v1(keys(range(count)), tokens(pool, [*range(count)]))
        assert storage.flush(60.0)
        assert stored == [True] * KEPT + [disk] * (count - KEPT)
        for _ in range(2):
            pool.kv_buffer.zero_()
            before = hits(storage)[1]
            assert read(storage, pool, range(count)) == stored
            assert hits(storage)[1] - before == KEPT
        assert storage.batch_exists(keys(range(count))) == (count if disk else KEPT)
        cache = storage._opened()["kv"]._cache
        assert [number for number in range(count) if bytes.fromhex(key(number)) + bytes(4) in cache] == [
            *range(KEPT)
        ]


def test_damage_on_disk_does_not_reach_pages_in_memory(module: ModuleType, tmp_path: Path) -> None:
    pool = HeadPool()
    with hosting(module, tmp_path, pool) as storage:
        write(storage, pool, range(KEPT))
        content = fill(HeadPool(), 2, 2).numpy().tobytes()
        path, at = find(tmp_path, content)
        change(path, at + 7, bytes([content[7] ^ 0x10]))
        assert read(storage, pool, range(KEPT)) == [True] * KEPT
        write(storage, pool, range(100, 100 + KEPT))  # evicts the pages from memory
        pool.kv_buffer.zero_()
        assert read(storage, pool, range(4)) == [True, True, False, True]
        assert not storage.exists(key(2))


def test_a_page_is_not_evicted_while_its_write_is_queued(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, go_on = HeadPool(), threading.Event()

    def hangs(fd: int, buffers: Any, offset: int) -> int:
        assert go_on.wait(60.0)
        return os.pwritev(fd, buffers, offset)

    with hosting(module, tmp_path, pool, nvme={"timeout": 60.0}) as storage:
        write(storage, pool, range(40, 44))
        monkeypatch.setattr(extents, "os", Calls(pwritev=hangs))
        for page in range(KEPT):
            fill(pool, page, page)
        assert all(storage.batch_set_v1(keys(range(KEPT)), tokens(pool, [*range(KEPT)])))
        pool.kv_buffer.zero_()
        assert read(storage, pool, range(KEPT)) == [True] * KEPT  # without waiting for the disk
        assert hits(storage) == (KEPT, KEPT)
        assert read(storage, pool, range(40, 44)) == [True] * 4  # from disk: no page can be evicted for them
        assert storage.batch_exists(keys(range(KEPT))) == KEPT
        assert not go_on.is_set()
        go_on.set()
        assert storage.flush(60.0)
        assert storage.check() == []
    with hosting(module, tmp_path, pool) as storage:
        pool.kv_buffer.zero_()
        assert read(storage, pool, range(KEPT)) == [True] * KEPT


@pytest.mark.parametrize("event", ["evicted", "cleared", "closed"])
def test_a_slot_is_not_reused_while_a_reader_copies(module: ModuleType, tmp_path: Path, event: str) -> None:
    pool, other = HeadPool(), HeadPool()
    with hosting(module, tmp_path, pool, disk=False) as storage:
        write(storage, pool, range(KEPT))
        pages = storage._opened()["kv"]
        wanted = [bytes.fromhex(key(number)) + bytes(4) for number in range(KEPT)]
        far = module.time.monotonic() + 60.0
        copied: dict[int, bytes] = {}

        def disturb() -> None:
            if event == "cleared":
                storage.clear()
            if event == "closed":
                storage.close()
                return
            for number in range(100, 120):  # take every slot that is not pinned
                fill(other, 0, number)
                storage.batch_set_v1([key(number)], tokens(other, [0]))

        def copy(asked: Sequence[int], memory: Any, rows: Sequence[int]) -> None:
            before = memory[list(rows)].tobytes()
            if not copied:
                thread = threading.Thread(target=disturb)
                thread.start()
                thread.join()
            assert memory[list(rows)].tobytes() == before
            copied.update({page: memory[row].tobytes() for page, row in zip(asked, rows, strict=True)})

        found = pages.get(wanted, copy, far)
        assert found[0]
        expected = HeadPool()
        for page in copied:
            fill(expected, 0, page)
            assert copied[page][: 2 * pool.part_nbytes] == raw(expected, 0).numpy().tobytes()
        if event != "closed":
            assert storage.check() == []
            assert storage.exists(key(0)) == (event == "evicted")


def test_a_page_that_was_read_before_a_clear_is_not_kept(module: ModuleType, tmp_path: Path) -> None:
    pool = HeadPool()
    with hosting(module, tmp_path, pool) as storage:
        write(storage, pool, range(4))
    with hosting(module, tmp_path, pool) as storage:
        pages, original = storage._opened()["kv"], module._Buffers.fill

        def fill_and_clear(memory: Any, *rest: Any) -> None:
            original(memory, *rest)
            storage.clear()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module._Buffers, "fill", fill_and_clear)
            storage.batch_get_v1(keys(range(4)), tokens(pool, [*range(4)]))
        assert pages.figures()["host_pages"] == 0
        assert storage.batch_exists(keys(range(4))) == 0
        assert storage.check() == []


def test_several_threads_see_whole_pages(module: ModuleType, tmp_path: Path) -> None:
    pool = HeadPool()
    failed: list[BaseException] = []

    with hosting(module, tmp_path, pool, nvme={"capacity": 1 << 20}) as storage:

        def work(seed: int) -> None:
            choose, expected = random.Random(seed), HeadPool()
            mine = [seed * 8 + place for place in range(5)]  # each thread has pages of its own
            try:
                for turn in range(80):
                    numbers = choose.sample(range(60), 5)
                    names = [key(number) for number in numbers]
                    if turn % 40 == 39:
                        storage.clear()
                    if choose.random() < 0.5:
                        for place, number in zip(mine, numbers, strict=True):
                            fill(pool, place, number)
                        storage.batch_set_v1(names, tokens(pool, mine))
                        continue
                    found = storage.batch_get_v1(names, tokens(pool, mine))
                    for place, number, arrived in zip(mine, numbers, found, strict=True):
                        fill(expected, place, number)
                        assert not arrived or torch.equal(raw(pool, place), raw(expected, place))
            except BaseException as error:  # noqa: BLE001  the top of a thread: the test raises it
                failed.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        assert storage.flush(60.0)
        assert storage.check() == []
        assert hits(storage)[1] > 0


def test_memory_takes_pages_while_the_disk_is_full(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    pool = HeadPool()
    with hosting(module, tmp_path, pool) as storage:
        monkeypatch.setattr(extents, "os", Calls(pwritev=full))
        write(storage, pool, range(3))
        write(storage, pool, range(3, 5))  # the disk refuses further writes now
        assert read(storage, pool, range(6)) == [True] * 5 + [False]
        assert storage.check() == []
        monkeypatch.setattr(extents, "os", os)

        def is_on_disk() -> bool:
            write(storage, pool, range(5))
            return bool(storage.tier_stats()["kv"]["chunks"] == 5)

        wait_for(is_on_disk)


def test_memory_serves_pages_while_the_disk_hangs_or_fails(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = HeadPool()
    with hosting(module, tmp_path, pool, nvme={"timeout": 1.0}) as storage:
        write(storage, pool, range(20, 40))
        write(storage, pool, range(KEPT))
        disk = Hanging(8)
        replace_preadv(monkeypatch, disk)
        assert not all(storage.batch_get_v1(keys(range(20, 40)), tokens(pool, [*range(20)])))
        pool.kv_buffer.zero_()
        assert storage.batch_exists(keys(range(KEPT))) == KEPT
        assert read(storage, pool, range(KEPT)) == [True] * KEPT
        disk.go_on.set()
        replace_preadv(monkeypatch, Failing())
        for page in range(20, 28):
            storage.batch_get_v1(keys(range(page, page + 1)), tokens(pool, [page]))
        pool.kv_buffer.zero_()
        assert read(storage, pool, range(KEPT)) == [True] * KEPT
        replace_preadv(monkeypatch, None)
        wait_for(lambda: storage.batch_exists(keys(range(30, 40))) == 10)  # the others failed
        assert storage.check() == []


@pytest.mark.parametrize("disk", [True, False], ids=["disk", "memory only"])
def test_states_and_sidecars_limit_hits_from_memory(module: ModuleType, tmp_path: Path, disk: bool) -> None:
    pool, states, indexer = HeadPool(), StatePool(), HeadPool()
    pools = {PoolName.KV: pool, PoolName.MAMBA: states, PoolName.INDEXER: indexer}
    with hosting(module, tmp_path, pool, pages=64, disk=disk, pools=pools) as storage:
        write(storage, pool, range(8))
        contents = {number: fill(states, number, 100 + number) for number in (2, 5)}
        state = PoolTransfer(PoolName.MAMBA, torch.tensor([2, 5]), [key(2), key(5)])
        sidecar = PoolTransfer(PoolName.INDEXER, tokens(indexer, [*range(7)]), keys(range(7)))
        assert storage.batch_set_v2([state, sidecar]) == {
            PoolName.MAMBA: [True] * 2,
            PoolName.INDEXER: [True] * 7,
        }
        assert storage.flush(60.0)
        asked = PoolTransfer(PoolName.MAMBA, None, [key(9)], PoolHitPolicy.TRAILING_PAGES)
        found = storage.batch_exists_v2(keys(range(10)), [asked, PoolTransfer(PoolName.INDEXER)])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (6, [3, 6])
        states.states.zero_()
        state = PoolTransfer(PoolName.MAMBA, torch.tensor([1, 7]), [key(2), key(5)])
        assert storage.batch_get_v2([state]) == {PoolName.MAMBA: [True, True]}
        assert torch.equal(raw(states, 1), contents[2])
        assert torch.equal(raw(states, 7), contents[5])
        figures = storage.tier_stats()
        assert figures["mamba"]["pages_host_hit"] == 2
        assert sum(each["host_nbytes"] for each in figures.values()) <= 64 * PAGE


def test_an_anchor_without_memory_gets_none(module: ModuleType, tmp_path: Path) -> None:
    anchor, pool = AnchorPool(), HeadPool()
    with hosting(module, tmp_path, anchor, disk=False, pools={"deepseek_v4_c4": pool}) as storage:
        assert storage.batch_set_v1(keys(range(3)), tokens(anchor, [0, 1, 2])) == [True] * 3
        moved = PoolTransfer("deepseek_v4_c4", tokens(pool, [0, 1]), keys(range(2)))  # type: ignore[arg-type]
        assert all(storage.batch_set_v2([moved])["deepseek_v4_c4"])
        assert storage.batch_exists_v2(keys(range(3)), [moved]).kv_hit_pages == 2
        assert storage.check() == []


def test_the_memory_is_freed_when_the_backend_closes(module: ModuleType, tmp_path: Path) -> None:
    pool = HeadPool()
    with hosting(module, tmp_path, pool, disk=False) as storage:
        write(storage, pool, range(2))
        pages = storage._opened()["kv"]
        storage.close()
        assert pages._memory.nbytes == 0
        far = module.time.monotonic() + 60.0
        assert pages.put([b"y" * 36], lambda *_: None, far) == [False]
        assert pages.get([bytes.fromhex(key(0)) + bytes(4)], lambda *_: None, far) == [False]
        assert pages.exist([bytes.fromhex(key(0)) + bytes(4)]) == [False]


def test_a_follower_keeps_what_it_has_read_until_a_clear(module: ModuleType, tmp_path: Path) -> None:
    nvme = {"payload": "extents", "capacity": 1 << 20}
    pool = LatentPool()
    mla = {"is_mla_model": True, "tp_size": 2, "tp_rank": 1}
    with (
        writing_rank(tmp_path, nvme) as store,
        hosting(module, tmp_path, pool, pages=16, nvme=nvme, **mla) as reader,
    ):
        store(0, 5)
        wait_for(lambda: reader.batch_exists(keys(range(5))) == 5)
        wait_for(lambda: reader.batch_get_v1(keys(range(5)), tokens(pool, [*range(5)])) == [True] * 5)
        before = hits(reader)[1]
        pool.kv_buffer.zero_()
        assert reader.batch_get_v1(keys(range(5)), tokens(pool, [*range(5)])) == [True] * 5
        check_bytes(pool, [*range(5)], [*range(5)], [True] * 5)
        assert hits(reader)[1] == before + 5
        assert reader.clear()
        assert reader.tier_stats()["kv"]["host_pages"] == 0
        assert reader.check() == []


def test_the_writer_for_other_ranks_promises_only_what_they_find(module: ModuleType, tmp_path: Path) -> None:
    pool = LatentPool()
    mla = {"is_mla_model": True, "tp_size": 2, "tp_rank": 0}
    with hosting(module, tmp_path, pool, pages=16, **mla) as storage:
        for page in range(3):
            fill(pool, page, page)
        assert all(storage.batch_set_v1(keys(range(3)), tokens(pool, [0, 1, 2])))
        assert storage.flush(60.0)
        assert storage.batch_exists(keys(range(3))) == 3
        storage._opened()["kv"]._chunks.clear()  # as if the pages had been evicted from disk
        assert storage.batch_exists(keys(range(3))) == 0
        pool.kv_buffer.zero_()
        assert storage.batch_get_v1(keys(range(3)), tokens(pool, [0, 1, 2])) == [True] * 3


def test_metrics_tell_memory_and_disk_apart(module: ModuleType, tmp_path: Path) -> None:
    def value(name: str) -> float:
        labels = {"pool": "kv", "rank": "dp0-pp0-tp0"}
        return REGISTRY.get_sample_value(f"tierstore_sglang_{name}", labels) or 0.0

    pool = HeadPool()
    with hosting(module, tmp_path, pool) as storage:
        storage.get_stats()
        before = value("host_hit_pages_total"), value("host_evicted_pages_total")
        write(storage, pool, range(KEPT))
        write(storage, pool, range(KEPT, KEPT + 3))
        read(storage, pool, range(KEPT))
        read(storage, pool, range(KEPT))
        storage.get_stats()
        assert value("host_pages") == KEPT
        assert value("host_bytes") == KEPT * PAGE
        assert value("disk_pages") == KEPT + 3
        assert value("host_hit_pages_total") - before[0] == hits(storage)[1] > KEPT
        assert value("host_evicted_pages_total") - before[1] >= 3
    assert value("host_pages") == value("host_bytes") == 0


@pytest.mark.parametrize(
    ("pages", "more", "named"),
    [
        (0.5, {}, "host.capacity must leave at least one page of 4 KiB .* for each rank's pool kv, which gets 2 KiB"),
        (1 << 40, {}, "host.capacity needs .* of memory for this rank, but only .* is free"),
        (
            64,
            {"disk": False, "is_mla_model": True, "tp_size": 2},
            "nvme is missing: with MLA and 2 tensor parallel ranks",
        ),
    ],
    ids=["too little", "too much", "no disk for MLA"],
)  # fmt: skip
def test_memory_that_cannot_work_is_refused(
    module: ModuleType, tmp_path: Path, pages: float, more: dict[str, Any], named: str
) -> None:
    pool = LatentPool() if more else HeadPool()
    extra = {"config": {"host": {"capacity": int(pages * PAGE)}}}
    more = {name: value for name, value in more.items() if name != "disk"}
    with pytest.raises(ConfigError, match=named), opened(module, tmp_path, pool, extra=extra, **more):
        pass
