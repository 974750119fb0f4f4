"""Tests of ``free_memory``: it is limited by the machine and by every control group of the process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tierstore.cli import doctor
from tierstore.config import load_config
from tierstore.errors import ConfigError
from tierstore.host.control_group import control_groups
from tierstore.host.free_memory import FreeMemory, available_nbytes, free_memory
from tierstore.page import PageSpec
from tierstore.store import TierStore

GIB, MIB = 1 << 30, 1 << 20
CHECKOUT = Path(__file__).parents[1]
SPEC = PageSpec(num_layers=4, page_size=16, num_kv_heads=4, head_dim=32, dtype="bfloat16", model="m")

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
OTHER_MOUNT = "34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset"
UNIFIED_MOUNT = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"
NO_LIMIT_V1 = "9223372036854771712"


def machine(
    root: Path,
    groups: Mapping[str, Mapping[str, object]],
    *,
    member: str,
    mounts: str | None = V2_MOUNT,
    free: int = 64 * GIB,
) -> Path:
    """Create the /proc and /sys files of a machine under ``root``, and return ``root``.

    The machine has ``free`` bytes of available memory. ``groups`` maps the folder of each control group to the contents
    of its files.
    """
    files: dict[str, object] = {
        "proc/meminfo": f"MemTotal: {100 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {free // 1024} kB\n",
        "proc/self/cgroup": member,
    }
    if mounts is not None:
        files["proc/self/mountinfo"] = f"22 27 0:21 / /proc rw - proc proc rw\n{mounts}\n"
    for folder, contents in groups.items():
        files |= {f"{folder}/{name}": text for name, text in contents.items()}
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


def v2(limit: int | str, used: int, stat: str = "anon 1", **more: object) -> dict[str, object]:
    return {"memory.max": limit, "memory.current": used, "memory.stat": stat} | {
        f"memory.{name}": value for name, value in more.items()
    }


def v1(limit: int | str, used: int, stat: str = "rss 1") -> dict[str, object]:
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


def found(root: Path) -> FreeMemory:
    free = free_memory(root)
    assert free is not None
    return free


def test_without_cgroups_free_memory_is_that_of_the_machine(tmp_path: Path) -> None:
    free = found(machine(tmp_path, {}, member="0::/"))
    assert free == FreeMemory(64 * GIB, 36 * GIB, 100 * GIB, "the memory of this machine")


def test_free_memory_is_none_if_nothing_can_be_read(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None


@pytest.mark.parametrize(
    "meminfo", ["", "MemTotal: 1 kB", "MemAvailable: many kB\nMemTotal: 1 kB", "rubbish"]
)
def test_an_odd_meminfo_leaves_the_groups(tmp_path: Path, meminfo: str) -> None:
    root = machine(tmp_path, {"sys/fs/cgroup/a": v2(GIB, MIB)}, member="0::/a")
    (root / "proc/meminfo").write_text(meminfo)
    assert found(root).nbytes == GIB - MIB


def test_own_cgroup_of_the_process_counts(tmp_path: Path) -> None:
    groups = {"sys/fs/cgroup/system.slice/box.service": v2(500 * MIB, 120 * MIB)}
    free = found(machine(tmp_path, groups, member="0::/system.slice/box.service"))
    assert free == FreeMemory(
        380 * MIB, 120 * MIB, 500 * MIB, "memory.max of the control group /system.slice/box.service"
    )


@pytest.mark.parametrize(("inner", "outer", "least"), [(8, 2, 1), (2, 8, 1), (3, 3, 2)])
def test_the_tightest_of_nested_groups_counts(tmp_path: Path, inner: int, outer: int, least: int) -> None:
    groups = {
        "sys/fs/cgroup/pod": v2(outer * GIB, GIB),
        "sys/fs/cgroup/pod/box": v2(inner * GIB, GIB),
        "sys/fs/cgroup/pod/other": v2(MIB, MIB),
    }
    assert found(machine(tmp_path, groups, member="0::/pod/box")).nbytes == least * GIB


def test_a_group_without_the_controller_has_the_limits_of_its_ancestors(tmp_path: Path) -> None:
    groups: dict[str, Mapping[str, object]] = {
        "sys/fs/cgroup/user": v2(GIB, MIB),
        "sys/fs/cgroup/user/session": {"cgroup.procs": 1},
    }
    assert found(machine(tmp_path, groups, member="0::/user/session")).nbytes == GIB - MIB


def test_a_container_that_sees_its_group_as_the_root_of_version_2(tmp_path: Path) -> None:
    groups = {"sys/fs/cgroup": v2(500 * MIB, 100 * MIB)}
    free = found(machine(tmp_path, groups, member="0::/"))
    assert free == FreeMemory(400 * MIB, 100 * MIB, 500 * MIB, "memory.max of the control group /")


@pytest.mark.parametrize(
    "member", ["4:memory:/docker/3f", "4:memory:/docker/3f\n0::/docker/3f", "4:cpu,memory:/docker/3f"]
)
def test_a_container_whose_mount_is_its_group_of_version_1(tmp_path: Path, member: str) -> None:
    mount = V1_MOUNT.replace(" / /sys", " /docker/3f /sys")
    groups = {"sys/fs/cgroup/memory": v1(500 * MIB, 100 * MIB)}
    free = found(machine(tmp_path, groups, member=member, mounts=mount))
    assert free == FreeMemory(
        400 * MIB, 100 * MIB, 500 * MIB, "memory.limit_in_bytes of the control group /docker/3f"
    )


def test_a_group_within_a_container_whose_mount_is_a_group(tmp_path: Path) -> None:
    mount = V1_MOUNT.replace(" / /sys", " /docker/3f /sys")
    groups = {
        "sys/fs/cgroup/memory": v1(900 * MIB, 100 * MIB),
        "sys/fs/cgroup/memory/inner": v1(500 * MIB, 100 * MIB),
    }
    free = found(machine(tmp_path, groups, member="4:memory:/docker/3f/inner", mounts=mount))
    assert (free.nbytes, free.limit) == (
        400 * MIB,
        "memory.limit_in_bytes of the control group /docker/3f/inner",
    )


def test_mounted_cgroup_is_used_if_no_mount_shows_the_own_one(tmp_path: Path) -> None:
    mount = V1_MOUNT.replace(" / /sys", " /docker/3f /sys")
    groups = {"sys/fs/cgroup/memory": v1(500 * MIB, 100 * MIB)}
    assert found(machine(tmp_path, groups, member="4:memory:/elsewhere", mounts=mount)).nbytes == 400 * MIB


def test_a_group_outside_of_the_namespace_reads_no_files_outside_of_the_mount(tmp_path: Path) -> None:
    groups = {"sys/fs/cgroup": v2(GIB, MIB), "sys/fs/other": v2(MIB, MIB)}
    assert found(machine(tmp_path, groups, member="0::/../other")).nbytes == GIB - MIB


def test_mount_of_another_cgroup_is_ignored_if_one_shows_ours(tmp_path: Path) -> None:
    other = V2_MOUNT.replace(" / /sys/fs/cgroup ", " /other /mnt/other ")
    groups = {"sys/fs/cgroup/ours": v2(GIB, MIB), "mnt/other": v2(MIB, MIB)}
    root = machine(tmp_path, groups, member="0::/ours", mounts=f"{V2_MOUNT}\n{other}")
    assert found(root).nbytes == GIB - MIB


@pytest.mark.parametrize("where", ["/dev/cgroup", r"/mnt/control\040groups"])
def test_a_hierarchy_that_is_mounted_elsewhere(tmp_path: Path, where: str) -> None:
    mount = V2_MOUNT.replace("/sys/fs/cgroup", where)
    groups = {f"{where.removeprefix('/')}/box".replace(r"\040", " "): v2(GIB, MIB)}
    assert found(machine(tmp_path, groups, member="0::/box", mounts=mount)).nbytes == GIB - MIB


def test_both_versions_count_on_a_hybrid_machine(tmp_path: Path) -> None:
    mounts = "\n".join([OTHER_MOUNT, V1_MOUNT, UNIFIED_MOUNT])
    member = "9:name=systemd:/\n4:memory:/a/b\n3:cpuset:/x\n0::/c"
    groups: dict[str, Mapping[str, object]] = {
        "sys/fs/cgroup/memory/a": v1(3 * GIB, GIB),
        "sys/fs/cgroup/memory/a/b": v1(NO_LIMIT_V1, GIB),
        "sys/fs/cgroup/cpuset/x": v1(MIB, 0),
        "sys/fs/cgroup/unified/c": {"cgroup.procs": 1},
    }
    root = machine(tmp_path, groups, member=member, mounts=mounts)
    assert found(root).nbytes == 2 * GIB
    for name, text in v2(GIB, MIB).items():
        (root / "sys/fs/cgroup/unified/c" / name).write_text(str(text))
    assert found(root).nbytes == GIB - MIB


@pytest.mark.parametrize(
    "limit", [NO_LIMIT_V1, "9223372036854710272", "18446744073709551615", "-1", "", "max", "x"]
)
def test_unlimited_cgroup_sets_no_limit(tmp_path: Path, limit: str) -> None:
    member = "4:memory:/a\n0::/a"
    groups = {
        "sys/fs/cgroup/memory/a": v1(limit, GIB),
        "sys/fs/cgroup/a": v2("max", GIB, high="max"),
    }
    root = machine(tmp_path, groups, member=member, mounts=f"{V1_MOUNT}\n{V2_MOUNT}")
    assert found(root).limit == "the memory of this machine"


@pytest.mark.parametrize("lost", ["memory.max", "memory.current"])
def test_a_limit_or_a_use_that_cannot_be_read_is_no_limit(tmp_path: Path, lost: str) -> None:
    root = machine(tmp_path, {"sys/fs/cgroup/a": v2(GIB, MIB)}, member="0::/a")
    (root / "sys/fs/cgroup/a" / lost).unlink()
    (root / "sys/fs/cgroup/a" / lost).mkdir()  # reading a folder fails, even for root
    assert found(root).limit == "the memory of this machine"


def test_default_cgroup_paths_are_read_without_mountinfo(tmp_path: Path) -> None:
    groups = {"sys/fs/cgroup/a": v2(2 * GIB, MIB), "sys/fs/cgroup/memory/b": v1(GIB, MIB)}
    root = machine(tmp_path, groups, member="4:memory:/b\n0::/a", mounts=None)
    assert found(root).nbytes == GIB - MIB
    (root / "sys/fs/cgroup/memory/b/memory.limit_in_bytes").unlink()
    assert found(root).nbytes == 2 * GIB - MIB


def test_root_cgroup_is_read_without_the_membership(tmp_path: Path) -> None:
    root = machine(tmp_path, {"sys/fs/cgroup": v2(GIB, MIB)}, member="0::/")
    (root / "proc/self/cgroup").unlink()
    assert found(root).nbytes == GIB - MIB


@pytest.mark.parametrize(
    "line", ["", "rubbish", "4:memory", ":::", "30 23 0:26 / /sys/fs/cgroup rw", " - cgroup2"]
)
def test_unparsable_lines_are_skipped(tmp_path: Path, line: str) -> None:
    groups = {"sys/fs/cgroup/a": v2(GIB, MIB)}
    root = machine(tmp_path, groups, member=f"{line}\n0::/a", mounts=f"{line}\n{V2_MOUNT}")
    assert found(root).nbytes == GIB - MIB


def test_page_cache_within_a_group_counts_as_free(tmp_path: Path) -> None:
    stat = f"anon {GIB}\nfile {14 * GIB}\ninactive_file {10 * GIB}\nactive_file {4 * GIB}\nslab_reclaimable {MIB}"
    root = machine(tmp_path, {"sys/fs/cgroup/a": v2(16 * GIB, 15 * GIB + MIB, stat)}, member="0::/a")
    assert found(root) == FreeMemory(15 * GIB, GIB, 16 * GIB, "memory.max of the control group /a")


def test_page_cache_of_version_1_counts_with_that_of_the_groups_below(tmp_path: Path) -> None:
    stat = f"inactive_file 1\nactive_file 1\ntotal_inactive_file {10 * GIB}\ntotal_active_file {4 * GIB}"
    root = machine(
        tmp_path,
        {"sys/fs/cgroup/memory/a": v1(16 * GIB, 15 * GIB, stat)},
        member="4:memory:/a",
        mounts=V1_MOUNT,
    )
    assert found(root).nbytes == 15 * GIB


def test_shared_and_locked_memory_does_not_count_as_free(tmp_path: Path) -> None:
    stat = f"file {14 * GIB}\nshmem {10 * GIB}\nunevictable {4 * GIB}\ninactive_file 0\nactive_file 0"
    root = machine(tmp_path, {"sys/fs/cgroup/a": v2(16 * GIB, 15 * GIB, stat)}, member="0::/a")
    assert found(root).nbytes == GIB


def test_more_cache_than_use_and_more_use_than_limit_stay_within_the_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, {"sys/fs/cgroup/a": v2(GIB, MIB, f"inactive_file {GIB}")}, member="0::/a")
    assert found(root).nbytes == GIB
    (root / "sys/fs/cgroup/a/memory.stat").write_text("")
    (root / "sys/fs/cgroup/a/memory.current").write_text(str(2 * GIB))
    assert found(root).nbytes == 0


def test_memory_high_limits_as_memory_max_does(tmp_path: Path) -> None:
    root = machine(tmp_path, {"sys/fs/cgroup/a": v2(8 * GIB, GIB, high=3 * GIB)}, member="0::/a")
    assert found(root) == FreeMemory(2 * GIB, GIB, 3 * GIB, "memory.high of the control group /a")


def test_memory_with_swap_limits_in_version_1(tmp_path: Path) -> None:
    swap = {"memory.memsw.limit_in_bytes": 2 * GIB, "memory.memsw.usage_in_bytes": 3 * GIB // 2}
    groups = {"sys/fs/cgroup/memory/a": v1(2 * GIB, GIB) | swap}
    root = machine(tmp_path, groups, member="4:memory:/a", mounts=V1_MOUNT)
    assert found(root).nbytes == GIB // 2


def test_a_host_tier_beyond_the_groups_limit_is_refused_with_limit_use_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path, {"sys/fs/cgroup/box": v2(500 * MIB, 120 * MIB)}, member="0::/box")
    monkeypatch.setattr("tierstore.build.free_memory", lambda: free_memory(root))
    config = load_config({"host": {"capacity": "1GiB"}})
    with pytest.raises(ConfigError) as refused:
        TierStore.open(config, SPEC)
    assert str(refused.value) == (
        "host.capacity needs 1 GiB (1,073,741,824 bytes) of memory, but only 380 MiB (398,458,880 bytes) is free: "
        "memory.max of the control group /box is 500 MiB (524,288,000 bytes), and 120 MiB (125,829,120 bytes) is "
        "in use, not counting the page cache; lower host.capacity, raise the limit, or free memory used by other "
        "programs"
    )


def test_a_host_tier_that_fits_next_to_cached_files_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = f"inactive_file {10 * MIB}\nactive_file {4 * MIB}"
    root = machine(tmp_path, {"sys/fs/cgroup/box": v2(16 * MIB, 15 * MIB, stat)}, member="0::/box")
    monkeypatch.setattr("tierstore.build.free_memory", lambda: free_memory(root))
    with TierStore.open(load_config({"host": {"capacity": "8MiB"}}), SPEC, pump=False) as store:
        assert store.stats()
    (root / "sys/fs/cgroup/box/memory.stat").write_text("")
    with pytest.raises(ConfigError, match="only 1 MiB"):
        TierStore.open(load_config({"host": {"capacity": "8MiB"}}), SPEC, pump=False)


def test_doctor_shows_the_tightest_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, {"sys/fs/cgroup/box": v2(500 * MIB, 120 * MIB)}, member="0::/box")
    check = doctor.memory(root)
    assert (check.value, check.state, check.why) == (
        "380 MiB free of 500 MiB",
        "ok",
        "memory.max of the control group /box",
    )
    assert doctor.memory(tmp_path / "nowhere").state == "note"


LIMIT = 600 * MIB

WITHIN = """
import os, sys
from pathlib import Path
folder, cached = Path(sys.argv[1]), Path(sys.argv[2])
(folder / "cgroup.procs").write_text(str(os.getpid()))
from tierstore.host.free_memory import free_memory
from tierstore.config import load_config
from tierstore.errors import ConfigError
from tierstore.page import PageSpec
from tierstore.store import TierStore
with open(cached, "wb") as file:
    for _ in range(400):
        file.write(bytes(1 << 20))
    os.fsync(file.fileno())
free = free_memory()
print(free.limit_nbytes, free.nbytes, free.limit)
spec = PageSpec(num_layers=4, page_size=16, num_kv_heads=4, head_dim=32, dtype="bfloat16", model="m")
try:
    TierStore.open(load_config({"host": {"capacity": "1GiB"}}), spec)
except ConfigError as error:
    print(error)
TierStore.open(load_config({"host": {"capacity": "64MiB"}}), spec).close()
"""


@pytest.fixture
def real_group() -> Iterator[Path]:
    """Yield a child of this process's control group, limited to 600 MiB. Skip the test if it cannot be created."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a control group")
    for group in control_groups("memory"):
        file = "memory.max" if group.version == 2 else "memory.limit_in_bytes"
        folder = group.folder / f"tierstore-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / file).write_text(str(LIMIT))
        except OSError:
            folder.rmdir()  # the memory controller is off in this group
            continue
        try:
            yield folder
        finally:
            folder.rmdir()
        return
    pytest.skip("no control group of memory can be made here")


@pytest.mark.deep
def test_in_a_real_group_a_store_beyond_its_limit_is_refused_and_cached_files_do_not_count(
    real_group: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", WITHIN, str(real_group), str(tmp_path / "cached")]
    child = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=240, check=False)
    assert child.returncode == 0, child.stderr
    told, refused = child.stdout.splitlines()
    limit, free, name = told.split(" ", 2)
    assert int(limit) == LIMIT
    assert 200 * MIB < int(free) < LIMIT, "400 MiB of files are cached in the group"
    assert name.endswith(real_group.name)
    assert "is 600 MiB (629,145,600 bytes)" in refused
    assert refused.startswith("host.capacity needs 1 GiB")


def test_free_memory_of_this_machine_is_positive() -> None:
    assert (available_nbytes() or 0) > 0
