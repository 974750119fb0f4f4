"""Tests of host memory that several processes map."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tierstore.host.arena import HostArena
from tierstore.host.shared_memory import Handle, SharedMemory, use_huge_pages
from tierstore.page import HUGE_NBYTES, PageLayout, PageSpec

ROOT = Path(__file__).resolve().parents[2]
NBYTES = 3 * HUGE_NBYTES + 12_345
_OTHER = """
import sys
from tierstore.host.shared_memory import Handle, SharedMemory

found = SharedMemory.open(Handle(*map(int, sys.argv[1:])))
found.close()
found.bytes[-3:] = [7, 8, 9]
print(found.bytes[:3].tolist(), flush=True)
input()
print(found.bytes[:3].tolist(), flush=True)
"""


def other_process(handle: Handle) -> subprocess.Popen[str]:
    """Start a process that maps the memory, changes and prints some of it, and waits for a line of input."""
    return subprocess.Popen(
        [sys.executable, "-c", _OTHER, *map(str, handle)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def file_of(memory: SharedMemory) -> str:
    """Return the inode of a memory's file, which identifies it among the mappings of this process."""
    return str(os.stat(memory.handle.file).st_ino)


def is_mapped(file: str) -> bool:
    """Return whether this process has a mapping of the file of a memory."""
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(words[4] == file and words[5].startswith("/memfd:tierstore-host") for words in maps)


def test_another_process_reads_and_writes_the_same_bytes_and_keeps_them() -> None:
    memory = SharedMemory.create(NBYTES)
    assert len(memory.bytes) == NBYTES
    assert not memory.bytes.any()
    memory.bytes[:3] = [1, 2, 3]
    with other_process(memory.handle) as other:
        assert read(other) == "[1, 2, 3]"
        assert memory.bytes[-3:].tolist() == [7, 8, 9]
        memory.bytes[:3] = [4, 5, 6]
        file = file_of(memory)
        memory.close()
        assert is_mapped(file)
        del memory
        gc.collect()
        assert not is_mapped(file)
        out, _ = other.communicate("\n")
        assert out.strip() == "[4, 5, 6]"


def test_memory_stays_mapped_as_long_as_a_view_of_it() -> None:
    memory = SharedMemory.create(NBYTES)
    file, view = file_of(memory), memory.bytes[5:9]
    memory.close()
    memory.close()
    del memory
    gc.collect()
    assert is_mapped(file)
    view[:] = 1
    del view
    gc.collect()
    assert not is_mapped(file)


def test_only_the_memory_that_a_handle_names_is_opened(tmp_path: Path) -> None:
    memory, another = SharedMemory.create(NBYTES), SharedMemory.create(NBYTES)
    with (tmp_path / "file").open("wb") as file:
        wrong = {
            memory.handle._replace(token=memory.handle.token ^ 1): "of another store",
            memory.handle._replace(file=another.handle.file): "of another store",
            memory.handle._replace(nbytes=NBYTES + HUGE_NBYTES): "expected",
            memory.handle._replace(file=file.fileno()): "not shared host memory",
            memory.handle._replace(pid=1 << 30): "No such file",
        }
        opened = len(os.listdir("/proc/self/fd"))
        for handle, said in wrong.items():
            with pytest.raises(OSError, match=said):
                SharedMemory.open(handle)
        assert len(os.listdir("/proc/self/fd")) == opened
    memory.close()
    with pytest.raises(OSError, match="No such file"):
        SharedMemory.open(memory.handle)
    another.close()


def test_a_forked_child_does_not_inherit_the_memory() -> None:
    memory = SharedMemory.create(NBYTES)
    file = file_of(memory)
    memory.close()
    assert is_mapped(file)
    child = os.fork()
    if not child:
        os._exit(is_mapped(file))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_huge_pages_do_not_change_the_contents() -> None:
    memory = SharedMemory.create(NBYTES)
    memory.close()
    memory.bytes[::4096] = 5
    assert memory.bytes.ctypes.data % HUGE_NBYTES == 0
    use_huge_pages(memory.bytes.ctypes.data + 4096, NBYTES - 4096)
    assert (memory.bytes[::4096] == 5).all()
    assert not memory.bytes[1::4096].any()
    if _can_collapse():
        mapping = Path("/proc/self/smaps").read_text().partition(f"{memory.bytes.ctypes.data:x}-")[2]
        found = re.search(r"ShmemPmdMapped: +(\d+) kB", mapping)
        assert found is not None
        assert int(found[1]) >= HUGE_NBYTES // 1024


def _can_collapse() -> bool:
    """Return whether the kernel collapses shared memory into huge pages on request."""
    version = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    switch = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return version >= (6, 1) and switch.exists() and "[deny]" not in switch.read_text()


def test_arenas_of_two_processes_have_the_same_slots() -> None:
    layout = PageLayout.of(
        PageSpec(num_layers=1, page_size=3, num_kv_heads=1, head_dim=1000, dtype="uint8", model="shared")
    )
    first = SharedMemory.create(4 * layout.slot_nbytes)
    second = SharedMemory.open(first.handle)
    one, other = (HostArena(layout, 4, shared=memory) for memory in (first, second))
    one.view(3)[:] = 9
    assert (other.view(3) == 9).all()
    assert not other.view(2).any()
    assert one.addresses is not other.addresses
    for memory in (first, second):
        memory.close()
