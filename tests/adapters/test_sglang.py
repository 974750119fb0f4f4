"""Test ``TierStoreStorage`` without SGLang, with stand-ins for the few classes that it uses, as in SGLang 0.5.23."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY

from tests.adapters.sglang_stub import (
    ARGS,
    CAPACITY,
    PAGE_SIZE,
    PARALLEL,
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
    storage_config,
    stubbed,
    tokens,
)
from tests.nvme.rig import change, on_disk
from tests.nvme.watch import Calls
from tests.support.lanes import some
from tests.support.sick_disk import Failing, Hanging, replace_preadv
from tests.support.waiting import wait_for
from tierstore.errors import ConfigError, StoreClosed, TierStoreError
from tierstore.nvme import extents


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    with stubbed() as found:
        yield found


def keys(numbers: range) -> list[str]:
    return [key(number) for number in numbers]


def write(storage: Any, pool: Any, numbers: range) -> None:
    """Store pages, wait until they are on disk, and zero the host memory."""
    for number in numbers:
        fill(pool, number, number)
    assert storage.batch_set_v1(keys(numbers), tokens(pool, [*numbers])) == [True] * len(numbers)
    assert storage.flush(60.0)
    pool.kv_buffer.zero_()


def read(storage: Any, pool: Any, numbers: range) -> list[bool]:
    """Read pages, and check the bytes of each page that arrived."""
    found = storage.batch_get_v1(keys(numbers), tokens(pool, [*numbers]))
    expected = HeadPool(pool.dtype)
    for number, arrived in zip(numbers, found, strict=True):
        if arrived:
            fill(expected, number, number)
            assert torch.equal(raw(pool, number), raw(expected, number))
        else:
            assert not raw(pool, number).any()
    assert storage.check() == []
    return list(found)


def find(home: Path, needle: bytes) -> tuple[Path, int]:
    """Find the only occurrence of ``needle`` in the files below ``home``. Return the file and the offset."""
    found = [
        (path, at)
        for path in home.rglob("*")
        if path.is_file() and (at := path.read_bytes().find(needle)) >= 0
    ]
    assert len(found) == 1
    return found[0]


def test_pages_survive_a_restart_byte_for_byte(module: ModuleType, tmp_path: Path) -> None:
    pool = HeadPool()
    with opened(module, tmp_path, pool) as storage:
        assert storage.batch_exists(keys(range(6))) == 0
        write(storage, pool, range(5))
        assert storage.batch_exists(keys(range(6))) == 5
        assert storage.batch_exists(keys(range(5, 7))) == 0
        assert read(storage, pool, range(6)) == [True] * 5 + [False]
        metrics = storage.get_stats()
        assert (sum(metrics.backup_pgs), sum(metrics.prefetch_pgs)) == (5, 5)
        assert all(rate > 0 for rate in metrics.backup_bandwidth + metrics.prefetch_bandwidth)
        assert storage.get_stats().prefetch_pgs == []
    pool.kv_buffer.zero_()
    with opened(module, tmp_path, pool) as storage:
        assert read(storage, pool, range(5)) == [True] * 5
    with pytest.raises(StoreClosed, match="attaches again"):
        storage.batch_exists(keys(range(1)))


def test_pages_are_found_before_their_write_has_ended(module: ModuleType, tmp_path: Path) -> None:
    pool = HeadPool()
    with opened(module, tmp_path, pool) as storage:
        for number in range(40):
            fill(pool, number, number)
        assert all(storage.batch_set_v1(keys(range(40)), tokens(pool, [*range(40)])))
        pool.kv_buffer.zero_()  # SGLang may reuse the memory as soon as the call returns
        assert storage.batch_exists(keys(range(40))) == 40
        assert read(storage, pool, range(40)) == [True] * 40


def test_a_damaged_page_is_a_miss_and_never_reaches_host_memory(module: ModuleType, tmp_path: Path) -> None:
    pool = HeadPool()
    with opened(module, tmp_path, pool) as storage:
        write(storage, pool, range(4))
        content = fill(HeadPool(), 2, 2).numpy().tobytes()
        path, at = find(tmp_path, content)
        change(path, at + 7, bytes([content[7] ^ 0x10]))
        assert read(storage, pool, range(4)) == [True, True, False, True]
        assert storage.batch_exists(keys(range(4))) == 2
        write(storage, pool, range(2, 3))
        assert read(storage, pool, range(4)) == [True] * 4


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.float16},
        {"extra": {"model": "other"}},
        {"tp_size": 2},
        {"pp_size": 2},
        {"attn_cp_size": 2},
        {"model_name": "other"},
        {"args": {"revision": "1234"}},
        {"args": {"kv_cache_dtype": "fp8_e5m2"}},
        {"args": {"model_path": "org/other"}},
    ],
    ids=str,
)
def test_no_page_of_another_configuration_is_found(
    module: ModuleType, tmp_path: Path, other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = HeadPool()
    with opened(module, tmp_path, pool) as storage:
        write(storage, pool, range(2))
    for name, value in other.get("args", {}).items():
        monkeypatch.setattr(f"tests.adapters.sglang_stub.ARGS.{name}", value)
    more = {name: value for name, value in other.items() if name not in ("args", "dtype")}
    with opened(module, tmp_path, HeadPool(other.get("dtype", pool.dtype)), **more) as storage:
        assert storage.batch_exists(keys(range(2))) == 0
        assert storage.batch_get_v1(keys(range(2)), tokens(pool, [0, 1])) == [False, False]


def test_the_least_recently_used_pages_make_space(module: ModuleType, tmp_path: Path) -> None:
    pool = HeadPool()
    with opened(module, tmp_path, pool, nvme={"capacity": 1 << 20}) as storage:
        for start in range(0, 2000, 50):
            for page, number in enumerate(range(start, start + 50)):
                fill(pool, page, number)
            assert all(storage.batch_set_v1(keys(range(start, start + 50)), tokens(pool, [*range(50)])))
            assert storage.flush(60.0)
            assert storage.check() == []
        held = [number for number in range(2000) if storage.exists(key(number))]
        full, rest = divmod(len(held), 50)
        oldest = 1950 - 50 * full  # of pages stored together, the last ones are evicted first
        assert held == [*range(oldest, oldest + rest), *range(oldest + 50, 2000)]
        assert 20 < len(held) < 250
    assert on_disk(tmp_path) <= 1 << 20


def test_a_clear_removes_pages_on_disk_and_in_flight(module: ModuleType, tmp_path: Path) -> None:
    pool = HeadPool()
    with opened(module, tmp_path, pool) as storage:
        write(storage, pool, range(3))
        assert all(storage.batch_set_v1(keys(range(3, 9)), tokens(pool, [*range(6)])))
        assert storage.clear()
        assert not any(storage.exists(key(number)) for number in range(9))
        assert storage.flush(60.0)
        assert not any(storage.exists(key(number)) for number in range(9))
        write(storage, pool, range(3))
    with opened(module, tmp_path, pool) as storage:
        assert [number for number in range(9) if storage.exists(key(number))] == [0, 1, 2]


def test_metrics_count_pages_by_pool_and_outcome(module: ModuleType, tmp_path: Path) -> None:
    def value(name: str, **more: str) -> float:
        labels = {"pool": "kv", "rank": "dp0-pp0-tp0", **more}
        return REGISTRY.get_sample_value(f"tierstore_sglang_{name}", labels) or 0.0

    def hits() -> tuple[float, float]:
        return value("pages_total", outcome="hit"), value("pages_total", outcome="miss")

    pool = HeadPool()
    for _ in range(2):  # the counters grow further after a restart
        with opened(module, tmp_path, pool) as storage:
            storage.get_stats()
            before = hits()
            write(storage, pool, range(3))
            read(storage, pool, range(4))
            storage.get_stats()
            storage.get_stats()
            assert tuple(now - then for now, then in zip(hits(), before, strict=True)) == (3, 1)
            assert value("disk_pages") == 3
            assert value("disk_bytes") == storage.tier_stats()["kv"]["used_nbytes"]
            assert value("disk_ok") == 1
            read(storage, pool, range(2))
        assert tuple(now - then for now, then in zip(hits(), before, strict=True)) == (5, 1)
        assert value("disk_pages") == value("disk_bytes") == 0  # nothing is attached


def test_indices_that_are_not_whole_pages_are_refused(module: ModuleType, tmp_path: Path) -> None:
    pool = HeadPool()
    with opened(module, tmp_path, pool) as storage:
        assert storage.batch_set_v1(keys(range(2)), tokens(pool, [0])) == [False, False]
        assert storage.batch_set_v1(keys(range(2)), torch.arange(8).flip(0)) == [False, False]
        assert storage.batch_get_v1(keys(range(1)), torch.arange(PAGE_SIZE - 1)) == [False]


def test_the_interface_with_tensors_stores_the_same_pages(module: ModuleType, tmp_path: Path) -> None:
    with opened(module, tmp_path, extra={"interface_v1": 0}) as storage:
        pages = [torch.randn(HeadPool().part_nbytes, dtype=torch.bfloat16) for _ in range(3)]
        assert storage.batch_set(keys(range(3)), pages)
        assert storage.set(key(3), pages[0])
        assert not storage.set(key(4), pages[0][:-1])
        assert storage.flush(60.0)
        targets = [torch.zeros_like(pages[0]) for _ in range(4)]
        found = storage.batch_get([*keys(range(3)), "no such page"], targets)
        assert found[3] is None
        assert all(torch.equal(one, other) for one, other in zip(found, pages, strict=False))
        assert torch.equal(storage.get(key(3), targets[3]), pages[0])
        assert storage.get(key(0)) is None
        assert storage.get(key(0), torch.zeros(2 * len(pages[0]), dtype=torch.bfloat16)[::2]) is None


def test_states_limit_a_hit_to_prefixes_that_end_at_one(module: ModuleType, tmp_path: Path) -> None:
    pool, states = HeadPool(), StatePool()
    with opened(module, tmp_path, pool, pools={PoolName.KV: pool, PoolName.MAMBA: states}) as storage:
        write(storage, pool, range(8))
        contents = {number: fill(states, number, 100 + number) for number in (2, 5)}
        transfer = PoolTransfer(PoolName.MAMBA, torch.tensor([2, 5]), [key(2), key(5)])
        assert storage.batch_set_v2([transfer]) == {PoolName.MAMBA: [True, True]}
        assert storage.flush(60.0)
        asked = PoolTransfer(PoolName.MAMBA, None, [key(9)], PoolHitPolicy.TRAILING_PAGES)
        found = storage.batch_exists_v2(keys(range(10)), [asked])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (6, [3, 6])
        assert found.extra_pool_hit_pages == {PoolName.KV: 8, PoolName.MAMBA: 6}
        states.states.zero_()
        transfer = PoolTransfer(PoolName.MAMBA, torch.tensor([1, 0, 7]), [key(2), key(3), key(5)])
        assert storage.batch_get_v2([transfer]) == {PoolName.MAMBA: [True, False, True]}
        assert torch.equal(raw(states, 1), contents[2])
        assert torch.equal(raw(states, 7), contents[5])
        assert not raw(states, 0).any()
        assert set(storage.tier_stats()) == {"kv", "mamba"}
        assert on_disk(tmp_path) <= CAPACITY


def test_a_window_must_be_complete_at_the_end_of_a_prefix(module: ModuleType, tmp_path: Path) -> None:
    pool, windows = HeadPool(), HeadPool()
    with opened(module, tmp_path, pool, pools={"swa": windows}) as storage:
        write(storage, pool, range(8))
        stored = [0, 3, 4, 5, 7]
        moved = PoolTransfer("swa", tokens(windows, stored), [key(n) for n in stored])  # type: ignore[arg-type]
        assert all(storage.batch_set_v2([moved])["swa"])
        asked = PoolTransfer("swa", None, [""] * 2, PoolHitPolicy.TRAILING_PAGES)  # type: ignore[arg-type]
        found = storage.batch_exists_v2(keys(range(8)), [asked])
        assert found.restorable_prefix_pages == [1, 5, 6]


def test_a_sidecar_shortens_the_hit_and_every_pool_is_answered(module: ModuleType, tmp_path: Path) -> None:
    pool, indexer = HeadPool(), HeadPool()
    with opened(module, tmp_path, pool, pools={PoolName.INDEXER: indexer}) as storage:
        write(storage, pool, range(6))
        transfer = PoolTransfer(
            PoolName.INDEXER, tokens(indexer, [0, 1, 2, 5]), [key(n) for n in (0, 1, 2, 5)]
        )
        assert all(storage.batch_set_v2([transfer])[PoolName.INDEXER])
        asked = [PoolTransfer(PoolName.INDEXER)]
        assert storage.batch_exists_v2(keys(range(6)), asked).kv_hit_pages == 3
        groups = PoolTransfer(PoolName.INDEXER, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
        assert storage.batch_exists_v2(keys(range(6)), [groups]).kv_hit_pages == 6
        unknown = PoolTransfer(PoolName.DRAFT, tokens(pool, [0]), [key(0)])
        assert storage.batch_exists_v2(keys(range(6)), [unknown]).kv_hit_pages == 0
        assert storage.batch_get_v2([unknown, PoolTransfer(PoolName.INDEXER, None, [key(0)])]) == {
            PoolName.DRAFT: [False],
            PoolName.INDEXER: [False],
        }
        assert storage.batch_set_v2([unknown]) == {PoolName.DRAFT: [False]}


def test_an_anchor_without_memory_leaves_the_decision_to_the_other_pools(
    module: ModuleType, tmp_path: Path
) -> None:
    anchor, pool = AnchorPool(), HeadPool()
    with opened(module, tmp_path, anchor, pools={"deepseek_v4_c4": pool}) as storage:
        assert storage.batch_set_v1(keys(range(3)), tokens(anchor, [0, 1, 2])) == [True] * 3
        assert storage.batch_get_v1(keys(range(3)), tokens(anchor, [0, 1, 2])) == [True] * 3
        assert storage.batch_exists(keys(range(3))) == 0
        moved = PoolTransfer("deepseek_v4_c4", tokens(pool, [0, 1]), keys(range(2)))  # type: ignore[arg-type]
        assert all(storage.batch_set_v2([moved])["deepseek_v4_c4"])
        assert storage.batch_exists_v2(keys(range(3)), [moved]).kv_hit_pages == 2


def test_ranks_keep_their_own_pages_in_one_home(module: ModuleType, tmp_path: Path) -> None:
    first, second = HeadPool(), HeadPool()
    with (
        opened(module, tmp_path, first, tp_size=2, tp_rank=0) as one,
        opened(module, tmp_path, second, tp_size=2, tp_rank=1) as other,
    ):
        write(one, first, range(3))
        assert other.batch_exists(keys(range(3))) == 0
        write(other, second, range(2))
        assert read(one, first, range(3)) == [True] * 3
        assert read(other, second, range(3)) == [True, True, False]
        with (
            pytest.raises(ConfigError, match="in use"),
            opened(module, tmp_path, HeadPool(), tp_size=2, tp_rank=1),
        ):
            pass
    assert on_disk(tmp_path) <= CAPACITY


def test_a_pool_that_is_registered_late_gets_its_share(module: ModuleType, tmp_path: Path) -> None:
    pool, draft = HeadPool(), HeadPool()
    with opened(module, tmp_path, pool) as storage:
        write(storage, pool, range(3))
        whole = storage.tier_stats()["kv"]["budget_nbytes"]
        storage.register_mem_host_pool_v2(draft, PoolName.DRAFT)
        assert read(storage, pool, range(3)) == [True] * 3
        parts = [figures["budget_nbytes"] for figures in storage.tier_stats().values()]
        assert len(parts) == 2
        assert sum(parts) < whole


def test_calls_from_several_threads_see_whole_pages(module: ModuleType, tmp_path: Path) -> None:
    pools = [HeadPool() for _ in range(3)]
    failed: list[BaseException] = []

    with opened(
        module, tmp_path, pools[0], nvme={"capacity": 2 << 20}, extra={"staging": "64KiB"}
    ) as storage:

        def work(seed: int) -> None:
            generator = np.random.default_rng(seed)
            expected = HeadPool()
            try:
                for _ in range(60):
                    numbers = generator.choice(200, 5, replace=False).tolist()
                    mine = [seed * 8 + place for place in range(5)]  # each thread has pages of its own
                    names = [key(number) for number in numbers]
                    if generator.random() < 0.5:
                        for place, number in zip(mine, numbers, strict=True):
                            fill(pools[0], place, number)
                        storage.batch_set_v1(names, tokens(pools[0], mine))
                        continue
                    found = storage.batch_get_v1(names, tokens(pools[0], mine))
                    for place, number, arrived in zip(mine, numbers, found, strict=True):
                        fill(expected, place, number)
                        assert not arrived or torch.equal(raw(pools[0], place), raw(expected, place))
            except BaseException as error:  # noqa: BLE001  the top of a thread: the test raises it
                failed.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        assert storage.flush(60.0)
        assert storage.check() == []


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"extra": {"root": "x"}}, "unknown keys root; known keys are backend_name"),
        ({"extra": {"model": " "}}, "model must be a non-blank name for the weights, got ' '"),
        ({"extra": {"staging": "much"}}, "staging must be a size .* got 'much'"),
        ({"extra": {"config": {}}}, "nvme is missing"),
        (
            {"nvme": {"codec": "exp"}},
            "nvme.codec must be none for an NVMe tier below SGLang's host memory, got exp",
        ),
        (
            {"nvme": {"admission": "cost"}},
            "nvme.admission must be all for an NVMe tier below SGLang's host memory, got cost",
        ),
        ({"dcp_size": 2}, "decode context parallelism is not supported"),
        ({"nvme": {"capacity": 1000}}, "nvme.capacity must be at least"),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused(
    module: ModuleType, tmp_path: Path, more: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named), opened(module, tmp_path / "new", HeadPool(), **more):
        pass
    assert not (tmp_path / "new").exists()


def test_a_configuration_is_required(module: ModuleType, tmp_path: Path) -> None:
    config = storage_config(tmp_path)
    del config.extra_config["config"]
    with pytest.raises(ConfigError, match="config is missing; name a YAML file"):
        module.TierStoreStorage(config, {})


def test_a_read_that_hangs_is_a_miss_and_never_writes_to_reused_memory(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, later = HeadPool(), HeadPool()
    nvme = {"payload": "extents", "timeout": 2.0, "readers": 2}
    with opened(module, tmp_path, pool, nvme=nvme) as storage:
        write(storage, pool, range(4))
        disk = Hanging(1)
        replace_preadv(monkeypatch, disk)
        found = storage.batch_get_v1(keys(range(4)), tokens(pool, [*range(4)]))
        assert not disk.go_on.is_set()  # the call returned although the read still hangs
        assert not all(found)
        for page in range(4):  # SGLang gives the memory to other pages
            fill(pool, page, 100 + page)
            fill(later, page, 100 + page)
        disk.go_on.set()
        wait_for(lambda: storage.tier_stats()["kv"]["hung_reads"] == 0)
        wait_for(lambda: storage.batch_exists(keys(range(4))) == 4)
        assert torch.equal(pool.kv_buffer.view(torch.uint8), later.kv_buffer.view(torch.uint8))
        assert read(storage, pool, range(4)) == [True] * 4


def test_a_write_that_hangs_blocks_no_call(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, go_on = HeadPool(), threading.Event()

    def hangs(fd: int, buffers: Any, offset: int) -> int:
        assert go_on.wait(60.0)
        return os.pwritev(fd, buffers, offset)

    nvme = {"payload": "extents", "timeout": 2.0}
    with opened(module, tmp_path, pool, nvme=nvme, extra={"staging": "64KiB"}) as storage:
        write(storage, pool, range(4))
        monkeypatch.setattr(extents, "os", Calls(pwritev=hangs))
        stored = storage.batch_set_v1(keys(range(10, 50)), tokens(pool, [*range(40)]))
        assert not go_on.is_set()
        assert not all(stored)
        assert storage.tier_stats()["kv"]["pages_timeout"] == 1  # the call waited for staging buffers
        assert not storage.flush(0.0)
        wait_for(lambda: storage.batch_set_v1(keys(range(50, 51)), tokens(pool, [0])) == [False])
        assert not storage.exists(key(10))
        assert read(storage, pool, range(4)) == [True] * 4
        go_on.set()
        assert storage.flush(60.0)
        wait_for(lambda: all(storage.batch_set_v1(keys(range(50, 51)), tokens(pool, [0]))))


def test_a_detach_while_the_disk_hangs_is_completed_later(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = HeadPool()
    nvme = {"payload": "extents", "timeout": 1.0, "readers": 2}
    disk = Hanging(1)
    storage = module.TierStoreStorage(storage_config(tmp_path, nvme=nvme), {})
    storage.register_mem_pool_host(pool)
    write(storage, pool, range(2))
    replace_preadv(monkeypatch, disk)
    assert not all(storage.batch_get_v1(keys(range(2)), tokens(pool, [0, 1])))
    monkeypatch.setattr(module, "CLOSE_S", 0.0)
    with pytest.raises(TierStoreError, match="the disk did not respond"):
        storage.close()
    with pytest.raises(ConfigError, match="in use"), opened(module, tmp_path, pool, nvme=nvme):
        pass
    monkeypatch.setattr(module, "CLOSE_S", 30.0)
    disk.go_on.set()

    def attaches() -> bool:
        try:
            with opened(module, tmp_path, pool, nvme=nvme) as storage:
                return read(storage, pool, range(2)) == [True, True]
        except ConfigError:
            return False

    wait_for(attaches)


def test_a_full_disk_refuses_pages_and_keeps_the_others(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    pool = HeadPool()
    with opened(module, tmp_path, pool, nvme={"payload": "extents"}) as storage:
        write(storage, pool, range(4))
        monkeypatch.setattr(extents, "os", Calls(pwritev=full))
        storage.batch_set_v1(keys(range(10, 14)), tokens(pool, [*range(4)]))
        assert storage.flush(60.0)
        assert storage.batch_exists(keys(range(10, 14))) == 0
        assert storage.batch_set_v1(keys(range(14, 15)), tokens(pool, [0])) == [False]
        assert read(storage, pool, range(4)) == [True] * 4
        assert storage.check() == []
        monkeypatch.setattr(extents, "os", os)
        wait_for(lambda: all(storage.batch_set_v1(keys(range(14, 15)), tokens(pool, [0]))))


def test_a_disk_that_has_failed_is_used_again(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = HeadPool()
    with opened(module, tmp_path, pool, nvme={"payload": "extents"}) as storage:
        write(storage, pool, range(20))
        replace_preadv(monkeypatch, Failing())
        for page in range(8):
            storage.batch_get_v1(keys(range(page, page + 1)), tokens(pool, [page]))
        assert storage.batch_exists(keys(range(10, 20))) == 0
        replace_preadv(monkeypatch, None)
        wait_for(lambda: storage.batch_exists(keys(range(10, 20))) == 10)
        assert read(storage, pool, range(10, 20)) == [True] * 10


def test_pages_of_all_pools_share_one_timeout(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = {"kv": HeadPool(), "swa": HeadPool(), "indexer": HeadPool()}
    nvme = {"payload": "extents", "timeout": 1.0, "readers": 1}
    with opened(module, tmp_path, pools["kv"], pools=pools, nvme=nvme) as storage:
        transfers = [PoolTransfer(name, tokens(pool, [0]), [key(0)]) for name, pool in pools.items()]  # type: ignore[arg-type]
        assert all(storage.batch_set_v2(transfers).values())
        assert storage.flush(60.0)
        disk, deadlines, original = Hanging(3), [], storage._deadline

        def deadline() -> float:
            deadlines.append(original())
            return float(deadlines[-1])

        monkeypatch.setattr(storage, "_deadline", deadline)
        replace_preadv(monkeypatch, disk)
        assert storage.batch_get_v2(transfers) == {name: [False] for name in pools}
        assert len(deadlines) == 1
        disk.go_on.set()


@pytest.mark.parametrize("host", [False, True], ids=["disk", "disk and memory"])
def test_pages_that_are_stored_again_after_a_clear_are_written(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: bool
) -> None:
    pool, expected, go_on, hangs = HeadPool(), HeadPool(), threading.Event(), threading.Event()

    def pwritev(fd: int, buffers: Any, offset: int) -> int:
        hangs.set()
        assert go_on.wait(60.0)
        return os.pwritev(fd, buffers, offset)

    config: dict[str, Any] = {"nvme": {"path": str(tmp_path), "capacity": CAPACITY, "payload": "extents"}}
    if host:
        config["host"] = {"capacity": 64 << 10}
    with opened(module, tmp_path, pool, extra={"config": config}) as storage:
        with monkeypatch.context() as patch:
            patch.setattr(extents, "os", Calls(pwritev=pwritev))
            for page in range(5):
                fill(pool, page, page)
            assert all(storage.batch_set_v1(keys(range(5)), tokens(pool, [*range(5)])))
            assert hangs.wait(60.0)
            assert storage.clear()
            for page in range(5):
                fill(pool, page, 1000 + page)
            assert all(storage.batch_set_v1(keys(range(5)), tokens(pool, [*range(5)])))
            go_on.set()
            assert storage.flush(60.0)
        assert storage.tier_stats()["kv"]["chunks"] == 5
        assert storage.check() == []
    with opened(module, tmp_path, pool, extra={"config": config}) as storage:
        pool.kv_buffer.zero_()
        assert storage.batch_get_v1(keys(range(5)), tokens(pool, [*range(5)])) == [True] * 5
        for page in range(5):
            fill(expected, page, 1000 + page)
            assert torch.equal(raw(pool, page), raw(expected, page))


def test_a_page_in_flight_is_not_promised_to_ranks_that_read_from_disk(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, go_on = LatentPool(), threading.Event()

    def pwritev(fd: int, buffers: Any, offset: int) -> int:
        assert go_on.wait(60.0)
        return os.pwritev(fd, buffers, offset)

    mla = {"is_mla_model": True, "tp_size": 2, "tp_rank": 0}
    with opened(module, tmp_path, pool, nvme={"payload": "extents"}, **mla) as storage:
        monkeypatch.setattr(extents, "os", Calls(pwritev=pwritev))
        assert all(storage.batch_set_v1(keys(range(5)), tokens(pool, [*range(5)])))
        assert storage.batch_exists(keys(range(5))) == 0
        go_on.set()
        assert storage.flush(60.0)
        assert storage.batch_exists(keys(range(5))) == 5


def test_a_call_that_began_before_a_clear_stores_nothing(module: ModuleType, tmp_path: Path) -> None:
    pool = HeadPool()

    with opened(module, tmp_path, pool) as storage:
        disk = storage._opened()["kv"]
        cleared: list[int] = []

        def copy(pages: Sequence[int], memory: Any, rows: Sequence[int]) -> None:
            if not cleared:
                cleared.extend(pages)
                storage.clear()

        far = module.time.monotonic() + 60.0
        assert disk.put([b"x" * 36, b"y" * 36], copy, far) == [False, False]
        assert disk.exist([b"x" * 36, b"y" * 36]) == [False, False]
        assert storage.check() == []


def test_a_call_on_a_pool_that_closes_gets_misses(module: ModuleType, tmp_path: Path) -> None:
    pool = HeadPool()
    with opened(module, tmp_path, pool) as storage:
        write(storage, pool, range(2))
        disk = storage._opened()["kv"]
        far = module.time.monotonic() + 60.0
        assert disk.put([b"x" * 36], lambda *_: disk.close(30.0), far) == [False]
        assert disk.get([bytes.fromhex(key(0)) + bytes(4)], lambda *_: None, far) == [False]
        assert disk.put([b"y" * 36], lambda *_: None, far) == [False]
        assert disk.flush(far)
        assert disk._memory.nbytes == 0  # the staging memory is free although somebody still holds the pool


@pytest.mark.parametrize("change", ["states", "config", "adapter", "replica"])
def test_hidden_changes_of_the_model_are_noticed(
    module: ModuleType, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, adapter, home = tmp_path / "model", tmp_path / "adapter", tmp_path / "home"
    for folder in (model, adapter):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(bytes(100))
    monkeypatch.setattr(ARGS, "model_path", str(model))
    monkeypatch.setattr(ARGS, "lora_paths", [f"name={adapter}"], raising=False)

    def found(states: StatePool) -> list[bool]:
        with opened(module, home, pools={PoolName.MAMBA: states}) as storage:
            asked = PoolTransfer(PoolName.MAMBA, torch.tensor([0]), [key(0)])
            held: list[bool] = storage.batch_get_v2([asked])[PoolName.MAMBA]
            assert storage.batch_set_v2([asked])[PoolName.MAMBA] == [True]
            assert storage.flush(60.0)
            return held

    assert found(StatePool()) == [False]
    assert found(StatePool()) == [True]
    if change == "config":
        (model / "config.json").write_text('{"rope_scaling": {"type": "yarn"}}')
    elif change == "adapter":
        (adapter / "adapter_model.safetensors").write_bytes(bytes(99) + b"1")
    elif change == "replica":
        monkeypatch.setattr(PARALLEL, "dp_rank", 1)  # as with --dp-size 2 without data-parallel attention
    assert found(StatePool(torch.float16 if change == "states" else torch.bfloat16)) == [False]


def test_sglangs_own_keys_in_the_extra_configuration_are_accepted(module: ModuleType, tmp_path: Path) -> None:
    with opened(module, tmp_path, extra={"file_storage_path": "/tmp/other", "allocator": "shm"}) as storage:
        assert storage.batch_exists(keys(range(1))) == 0


WRITER = """
import sys
from pathlib import Path
from tests.adapters.sglang_stub import LatentPool, fill, key, opened, stubbed, tokens

pool, mla = LatentPool(), {"tp_size": 2, "is_mla_model": True}
with stubbed() as module, opened(module, Path(sys.argv[1]), pool, nvme={nvme!r}, **mla) as storage:
    for line in sys.stdin:
        first, last = map(int, line.split())
        for number in range(first, last):
            fill(pool, number % 60, number)
            assert storage.batch_set_v1([key(number)], tokens(pool, [number % 60])) == [True]
            if number % 10 == 9 or number == last - 1:
                assert storage.flush(60.0)
        print("stored", flush=True)
"""


@contextmanager
def writing_rank(home: Path, nvme: dict[str, Any]) -> Iterator[Callable[[int, int], None]]:
    """Start the first of two ranks in a process of its own. Yield a function that makes it store pages."""
    program = WRITER.replace("{nvme!r}", repr(nvme))
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", program, str(home)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        told, heard = process.stdin, process.stdout

        def store(first: int, last: int) -> None:
            told.write(f"{first} {last}\n")
            told.flush()
            assert heard.readline() == "stored\n"

        yield store
        told.close()
        assert process.wait(60) == 0


@pytest.mark.parametrize("payload", some(["lmdb", "extents"], lambda payload: payload == "extents"))
def test_with_mla_one_rank_writes_and_the_others_read(
    module: ModuleType, tmp_path: Path, payload: str
) -> None:
    nvme = {"payload": payload, "capacity": 1 << 20}
    pool, expected = LatentPool(), LatentPool()
    mla = {"is_mla_model": True, "tp_size": 2, "tp_rank": 1}
    with opened(module, tmp_path, pool, nvme=nvme, **mla) as reader:
        assert reader.batch_exists(keys(range(2))) == 0  # the writer has not started yet
        assert reader.batch_get_v1(keys(range(2)), tokens(pool, [0, 1])) == [False, False]
    with (
        writing_rank(tmp_path, nvme) as store,
        opened(module, tmp_path, pool, nvme=nvme, **mla) as reader,
    ):
        store(0, 5)
        wait_for(
            lambda: reader.batch_exists(keys(range(5))) == 5
        )  # the writer's index decides about the minimum
        assert (
            reader.batch_set_v1(keys(range(5)), tokens(pool, [*range(5)])) == [True] * 5
        )  # nothing is written
        held = 0
        for first in range(5, 905, 100):  # more than fits: the writer evicts pages and reuses their slots
            store(first, first + 100)
            numbers = [0, 4, first, first + 98, first + 99, first + 100]
            found = reader.batch_get_v1([key(number) for number in numbers], tokens(pool, [*range(6)]))
            for page, (number, arrived) in enumerate(zip(numbers, found, strict=True)):
                fill(expected, 0, number)
                assert not arrived or torch.equal(raw(pool, page), raw(expected, 0))
            assert found[5] is False
            held += sum(found)
        assert held > 9
        assert reader.clear()  # the writer clears
        assert reader.check() == []
        reader.get_stats()


def test_a_follower_notices_that_the_writer_has_begun_with_new_files(
    module: ModuleType, tmp_path: Path
) -> None:
    nvme = {"payload": "extents", "capacity": 1 << 20}
    pool = LatentPool()
    with writing_rank(tmp_path, nvme) as store:
        store(0, 3)
    with opened(module, tmp_path, pool, nvme=nvme, is_mla_model=True, tp_size=2, tp_rank=1) as reader:
        wait_for(lambda: reader.batch_get_v1(keys(range(3)), tokens(pool, [0, 1, 2])) == [True] * 3)
        (directory,) = (path for path in tmp_path.iterdir() if path.is_dir())
        directory.rename(tmp_path / "aside")  # as a writer does with damaged files
        shutil.rmtree(tmp_path / "aside")
        with writing_rank(tmp_path, nvme) as store:
            store(10, 13)
            wait_for(lambda: reader.batch_get_v1(keys(range(10, 13)), tokens(pool, [0, 1, 2])) == [True] * 3)
            assert reader.batch_get_v1(keys(range(1)), tokens(pool, [0])) == [False]
        assert reader.check() == []
