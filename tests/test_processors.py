"""Test how many threads torch uses: one per core that affinity, quota and load leave, unless the user sets a number."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.test_free_memory import V1_MOUNT, V2_MOUNT, machine
from tierstore.cli import doctor
from tierstore.host.processors import (
    Processors,
    choose_threads,
    processors,
    use_fewer_threads,
    use_threads,
)

CPU_MOUNT = V1_MOUNT.replace("cgroup/memory", "cgroup/cpu,cpuacct").replace("rw,memory", "rw,cpu,cpuacct")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("found", "free"),
    [
        (Processors(2, 2, None, 0.3), 2),
        (Processors(2, 2, None, 1.2), 1),
        (Processors(2, 2, None, 12.0), 1),
        (Processors(64, 64, None, 10.0), 54),
        (Processors(4, 64, None, 10.0), 4),
        (Processors(64, 64, 3.5, 0.0), 4),
        (Processors(64, 64, 0.2, 0.0), 1),
        (Processors(8, 8, 6.0, 5.0), 3),
    ],
)
def test_free_cores_are_the_minimum_of_affinity_quota_and_idle_cores(found: Processors, free: int) -> None:
    assert found.free == free


def test_torch_gets_at_most_its_default_number_of_threads() -> None:
    assert choose_threads(4, None, Processors(8, 8, None, 0.0), {}).count == 4
    assert choose_threads(8, None, Processors(8, 8, None, 5.0), {}).count == 3


def test_an_explicit_setting_wins() -> None:
    busy = Processors(2, 2, None, 12.0)
    assert choose_threads(2, 2, busy, {"OMP_NUM_THREADS": "7"}).count == 2
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        chosen = choose_threads(7, None, busy, {name: "7"})
        assert (chosen.count, chosen.why) == (7, f"{name} is set")
    assert choose_threads(7, None, busy, {"OMP_NUM_THREADS": ""}).count == 1


def test_a_chosen_number_of_threads_is_reported_with_its_reason() -> None:
    told = choose_threads(2, None, Processors(2, 2, 1.5, 12.34), {}).described()
    assert told == (
        "torch computes with 1 thread (2 cores, of which control groups allow 1.5; load average 12.3); "
        "use --threads to set another number"
    )


@pytest.mark.usefixtures("threads")
def test_threads_are_set_on_the_cpu_and_unchanged_on_a_gpu_unless_given() -> None:
    torch.set_num_threads(1)
    assert use_threads("cuda", None) is None
    assert torch.get_num_threads() == 1
    chosen = use_threads("cuda", 2)
    assert chosen is not None
    assert (chosen.count, torch.get_num_threads()) == (2, 2)
    chosen = use_threads("cpu", 1)
    assert chosen is not None
    assert (chosen.count, torch.get_num_threads()) == (1, 1)


@pytest.mark.parametrize(
    ("text", "quota"),
    [("max 100000", None), ("150000 100000", 1.5), ("", None), ("150000", None), ("150000 0", None)],
)
def test_the_quota_of_version_2_is_read(tmp_path: Path, text: str, quota: float | None) -> None:
    root = machine(tmp_path, {"sys/fs/cgroup/box": {"cpu.max": text}}, member="0::/box")
    assert processors(root).quota == quota


@pytest.mark.parametrize(("number", "quota"), [(-1, None), (50000, 0.5), ("", None)])
def test_the_quota_of_version_1_is_read(tmp_path: Path, number: object, quota: float | None) -> None:
    files = {"cpu.cfs_quota_us": number, "cpu.cfs_period_us": 100000}
    root = machine(
        tmp_path, {"sys/fs/cgroup/cpu,cpuacct/a/b": files}, member="3:cpu,cpuacct:/a/b", mounts=CPU_MOUNT
    )
    assert processors(root).quota == quota


def test_the_least_quota_of_nested_groups_counts(tmp_path: Path) -> None:
    groups = {
        "sys/fs/cgroup/pod": {"cpu.max": "200000 100000"},
        "sys/fs/cgroup/pod/box": {"cpu.max": "400000 100000"},
    }
    assert processors(machine(tmp_path, groups, member="0::/pod/box", mounts=V2_MOUNT)).quota == 2.0


def test_the_affinity_of_this_process_counts() -> None:
    found = processors()
    assert found.cores == len(os.sched_getaffinity(0))
    assert found.total >= 1


def test_doctor_shows_cores_quota_load_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    root = machine(tmp_path, {"sys/fs/cgroup/box": {"cpu.max": "max 100000"}}, member="0::/box")
    check = doctor.cores(root)
    assert (check.value, check.state) == ("4 cores; load average 0.0: 4 threads for computing", "ok")
    (root / "sys/fs/cgroup/box/cpu.max").write_text("100000 100000")
    check = doctor.cores(root)
    assert check.value == "4 cores, of which control groups allow 1; load average 0.0: 1 thread for computing"
    assert check.state == "note"
    assert "--threads" in check.why


@pytest.mark.usefixtures("threads")
def test_threads_that_are_kept_waiting_become_fewer() -> None:
    """Report fewer and fewer cores, as if other programs used them. On one core, two threads are slower than one."""
    torch.set_num_threads(4)
    assert use_fewer_threads(3.9) is None
    assert use_fewer_threads(2.8) is None
    assert torch.get_num_threads() == 4
    chosen = use_fewer_threads(2.7)
    assert chosen is not None
    assert (chosen.count, torch.get_num_threads()) == (2, 2)
    assert chosen.described().startswith(
        "torch computes with 2 threads (4 threads got the CPU time of only 2.7 cores)"
    )
    chosen = use_fewer_threads(0.4)
    assert chosen is not None
    assert chosen.count == torch.get_num_threads() == 1
    assert use_fewer_threads(0.1) is None
