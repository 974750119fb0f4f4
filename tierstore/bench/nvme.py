"""Benchmark of the NVMe tier against the raw disk, and of the stalls that it causes in other threads.

A contender is a way to store pages: the tier, or a raw file. Each run of a contender is paired with a run of
the raw file just before or after it, and every run uses new files. In a run, one thread first writes all pages so
that they survive a power failure. The pages are then dropped from the page cache. Finally, ``readers`` threads read
the pages back, in random order, so that the kernel's read-ahead does not help.

Stalls are the delays of a thread that is due to run every millisecond while the tier works. They arise because
other threads hold the GIL.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from threading import Event
from time import perf_counter, process_time, sleep
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tierstore.bench.core import synthetic_key
from tierstore.bench.raw_disk import aligned, forget, open_direct, small_pages, whole
from tierstore.nvme.direct_io import reserve
from tierstore.nvme.disk_space import size, size_extents
from tierstore.nvme.tier import NvmeTier
from tierstore.threads import SharedFile, Worker
from tierstore.types import Tier, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Make = Callable[[Path, "Load"], "Contender"]

_TRANSFER_PAGES = 32
_PATIENCE_S = 300.0


class Load(NamedTuple):
    """The work of one run.

    ``pages`` contains the pages to write, uint8 ``[pages, page_nbytes]`` in memory aligned for direct I/O. ``order``
    is the order in which the pages are read back. ``batch_pages`` is the number of pages between two syncs of the
    raw file, and ``readers`` is the number of reading threads.
    """

    pages: Bytes
    order: list[int]
    batch_pages: int
    readers: int


def capacity_for(nbytes: int) -> int:
    """Return a capacity in bytes with which the tier holds ``nbytes`` bytes of pages in a few long files.

    The tier divides its capacity among many files. With a capacity that just fits the pages, it would create
    sixteen short files and make their names durable during the measurement. The raw file, in contrast, is
    allocated before the measurement starts.
    """
    return int(nbytes * 1.4) + (64 << 20) + min(4 << 30, 7 * nbytes)


class Contender(ABC):
    """A way to store pages in files.

    ``write`` and ``read`` are measured. The contender creates ``folder`` for its files, and nothing else writes
    there.
    """

    def __init__(self, folder: Path, load: Load) -> None:
        folder.mkdir()
        self.folder = folder
        self.load = load

    @abstractmethod
    def write(self) -> None:
        """Store all pages, and return once they are durable."""

    @abstractmethod
    def read(self, out: Bytes) -> None:
        """Read all pages back into ``out``, uint8 ``[pages, page_nbytes]``."""

    def cool(self) -> None:
        """Ask the kernel to drop the contender's files from the page cache, so that reads come from the disk."""
        for path in self.folder.rglob("*"):
            if path.is_file() and path.suffix != ".lock" and path.name != "lock.mdb":
                forget(path)

    @abstractmethod
    def close(self) -> None:
        """Close the files. The caller removes the folder."""

    def _spread(self, act: Callable[[int], None]) -> None:
        """Call ``act(index)`` for every page in reading order, divided evenly among the reader threads."""
        order, readers = self.load.order, self.load.readers

        def some(first: int) -> None:
            for index in order[first::readers]:
                act(index)

        with ThreadPoolExecutor(readers) as pool:
            list(pool.map(some, range(readers)))


class RawFile(Contender):
    """The ceiling: one preallocated file, synced with fdatasync after each batch of pages.

    It uses direct I/O if the file system supports it.
    """

    def __init__(self, folder: Path, load: Load) -> None:
        super().__init__(folder, load)
        self._fd, self.direct = open_direct(folder / "raw")
        reserve(self._fd, load.pages.nbytes)

    def write(self) -> None:
        for index, page in enumerate(self.load.pages):
            whole(os.pwrite(self._fd, page.data, index * page.nbytes), page.nbytes)
            if (index + 1) % self.load.batch_pages == 0:
                os.fdatasync(self._fd)
        os.fdatasync(self._fd)

    def read(self, out: Bytes) -> None:
        nbytes, file = out.shape[1], SharedFile(os.dup(self._fd))
        self._spread(lambda index: whole(os.preadv(file.fd, [out[index].data], index * nbytes), nbytes))

    def close(self) -> None:
        os.close(self._fd)


class SmallPages(RawFile):
    """The same as ``RawFile``, but with ordinary memory in 4 KiB pages, as most programs use it."""

    def __init__(self, folder: Path, load: Load) -> None:
        self._memory = tuple(small_pages(*load.pages.shape) for _ in range(2))
        np.copyto(self._memory[0], load.pages)
        super().__init__(folder, load._replace(pages=self._memory[0]))
        self._out = self._memory[1]

    def read(self, out: Bytes) -> None:
        super().read(self._memory[1])
        self._out = out

    def close(self) -> None:
        super().close()
        np.copyto(self._out, self._memory[1])  # copied here because close() is not measured


class TierRecords(Contender):
    """The NVMe tier. Unlike the raw file, it verifies checksums and also writes a catalogue."""

    def __init__(self, folder: Path, load: Load, payload: str, nbytes: int = 0) -> None:
        """Open the tier.

        Args:
            folder: The folder for the tier's directory. It must not exist.
            load: The pages.
            payload: The value of ``nvme.payload``.
            nbytes: Total size in bytes of all pages that will be written. Needed only if ``write`` is called
                more than once.
        """
        super().__init__(folder, load)
        self._done = Event()
        self._written = 0
        self._payload = payload
        self._capacity = capacity_for(max(nbytes, load.pages.nbytes))
        self._tier = self._open()

    def write(self) -> None:
        """Store all pages under new keys, and return once they are durable."""
        pieces = _pieces(range(len(self.load.pages)))
        for number, piece in enumerate(pieces):
            transfer = self._transfer(number, piece, self._written, Tier.HOST, Tier.NVME)
            self._tier.submit_write(transfer, [self.load.pages[index] for index in piece])
        self._wait(len(pieces))
        self._written += len(self.load.pages)
        if not self._tier.sync(_PATIENCE_S):
            raise OSError("the NVMe tier could not make the written pages durable")

    def read(self, out: Bytes) -> None:
        """Read back the pages that the last call to ``write`` stored."""
        first, pieces = self._written - len(self.load.pages), _pieces(self.load.order)
        for number, piece in enumerate(pieces):
            transfer = self._transfer(number, piece, first, Tier.NVME, Tier.HOST)
            self._tier.submit_read(transfer, [out[index] for index in piece])
        self._wait(len(pieces))

    def cool(self) -> None:
        self.close()  # the kernel does not drop pages of files that are still mapped
        super().cool()
        self._tier = self._open()

    def close(self) -> None:
        self._tier.close(_PATIENCE_S)

    def _open(self) -> NvmeTier:
        return NvmeTier.open(
            self.folder / "home",
            capacity=self._capacity,
            fingerprint="bench",
            shard=0,
            page_nbytes=self.load.pages.shape[1],
            wake=self._done.set,
            readers=self.load.readers,
            payload=self._payload,
        )

    def _wait(self, transfers: int) -> None:
        left = transfers
        while left:
            if not self._done.wait(_PATIENCE_S):
                raise OSError(f"the NVMe tier made no progress for {_PATIENCE_S:.0f} s")
            self._done.clear()
            for ack in self._tier.poll():
                if not ack.ok:
                    raise OSError(f"the NVMe tier could not store or read a page: {ack.failures[0][1].value}")
                left -= 1

    def _transfer(self, number: int, piece: Sequence[int], first: int, src: Tier, dst: Tier) -> Transfer:
        return Transfer(
            id=number,
            keys=tuple(synthetic_key(first + index) for index in piece),
            src=src,
            src_slots=(),
            dst=dst,
            dst_slots=(),
            nbytes=0,
            parents=(None,) * len(piece),
        )


def _pieces(numbers: Sequence[int]) -> list[Sequence[int]]:
    return [numbers[start : start + _TRANSFER_PAGES] for start in range(0, len(numbers), _TRANSFER_PAGES)]


def batch_pages_of(nbytes: int, page_nbytes: int, payload: str = "lmdb") -> int:
    """Return how many pages the tier writes between two syncs, if a run writes ``nbytes`` bytes of pages."""
    by_kind = size_extents if payload == "extents" else size
    return by_kind(capacity_for(nbytes), page_nbytes).batch_pages


_TICK_S = 1e-3


class Stalls(NamedTuple):
    """Delays of a thread that is due to run every millisecond: median, 99.9th percentile and maximum, in ms."""

    p50: float
    p999: float
    max: float


def stalls_during(act: Callable[[], object]) -> Stalls:
    """Call ``act``, and measure the stalls of another thread that sleeps for a millisecond at a time.

    The stalls include delays that the operating system causes. Compare them with ``idle_stalls``.
    """
    ticking, over, late = Event(), Event(), [0.0]

    def tick() -> None:
        begin = perf_counter()
        ticking.set()
        while not over.is_set():
            sleep(_TICK_S)
            now = perf_counter()
            late.append(now - begin - _TICK_S)
            begin = now

    watcher = Worker(tick, name="tierstore-bench-tick")
    watcher.start()
    ticking.wait()
    try:
        act()
    finally:
        over.set()
        watcher.join()
    p50, p999, worst = (float(found) * 1e3 for found in np.percentile(late, [50, 99.9, 100]))
    return Stalls(p50, p999, worst)


_GIB = 1 << 30
_STALL_PAGE = 2 << 20
_STALL_MEMORY = 256 << 20
OPS = ("write", "read")


class Run(NamedTuple):
    """Cost of writing or reading all pages of a ``Load``.

    ``seconds`` is the elapsed time, ``cpu`` is the CPU time of the process in seconds, and ``disk_nbytes`` is the
    number of bytes that were written to the disk or read from it (0 if unknown).
    """

    seconds: float
    cpu: float
    disk_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRow:
    """Results of one contender for one operation and page size. Rates are in GB/s (10^9 bytes/s).

    All values are medians over the rounds. ``gbps`` is the rate of the contender, and ``ceiling_gbps`` is the rate
    of the raw file. ``ratio`` is the median of the pairwise ratios of ``gbps`` to ``ceiling_gbps``, and ``spread``
    contains the smallest and the largest of these ratios. ``disk_per_byte`` is the number of bytes that the disk
    moved per byte of pages, or 0 if unknown. For reads, a value far below 1 means that pages came from the page
    cache, and a value far above 1 means that the kernel read ahead.
    """

    payload: str
    op: str
    page_bytes: int
    gbps: float
    ceiling_gbps: float
    ratio: float
    spread: tuple[float, float]
    cpu_s_per_gib: float
    disk_per_byte: float

    def plain(self) -> dict[str, object]:
        """Return the row as JSON-serializable data."""
        return asdict(self)


def ways(payloads: list[str]) -> dict[str, Make]:
    """Return the constructors of the contenders by name.

    The contenders are the NVMe tier with each of ``payloads``, and a raw file (see ``SmallPages``).
    """
    tiers: dict[str, Make] = {payload: partial(TierRecords, payload=payload) for payload in payloads}
    return {**tiers, "raw, 4 KiB pages": SmallPages}


def disk_rows(
    page_nbytes: int, *, nbytes: int, rounds: int, readers: int, ways: Mapping[str, Make], place: Path
) -> Iterator[list[DiskRow]]:
    """Measure each contender in turn, and yield its rows: one for writing and one for reading.

    Args:
        page_nbytes: Size of a page in bytes, a multiple of 4 KiB.
        nbytes: Total size of the pages of a run in bytes.
        rounds: Number of pairs of runs per contender.
        readers: Number of threads that read.
        ways: The contenders, from the function of the same name.
        place: Folder for the files, with free space for more than twice ``nbytes``. The files are deleted
            afterwards.

    Raises:
        OSError: The disk or the tier cannot store or read a page, or a page that was read back differs from the
            written one.
    """
    load, out = _load(page_nbytes, nbytes, readers), aligned(max(1, nbytes // page_nbytes), page_nbytes)
    for name, make in ways.items():
        load = load._replace(batch_pages=batch_pages_of(load.pages.nbytes, page_nbytes, name))
        pairs = [
            _pair(make, load, out, place / f"{number}", raw_first=number % 2 == 0) for number in range(rounds)
        ]
        yield [_row(name, op, load, pairs) for op in OPS]


def stalls(payload: str, *, nbytes: int, readers: int, place: Path) -> Stalls:
    """Measure stalls while ``nbytes`` bytes, in pages of 2 MiB, are written to the tier and read back."""
    count = max(1, min(nbytes, _STALL_MEMORY) // _STALL_PAGE)
    load = _load(_STALL_PAGE, count * _STALL_PAGE, readers)
    out = aligned(count, _STALL_PAGE)
    tier = TierRecords(place / "stalls", load, payload, nbytes)

    def work() -> None:
        for _ in range(max(1, nbytes // load.pages.nbytes)):
            tier.write()
            tier.read(out)

    try:
        return stalls_during(work)
    finally:
        tier.close()
        shutil.rmtree(tier.folder)


def idle_stalls(seconds: float) -> Stalls:
    """Measure stalls for ``seconds`` seconds while the process does nothing else."""
    return stalls_during(lambda: sleep(seconds))


def _load(page_nbytes: int, nbytes: int, readers: int) -> Load:
    pages = aligned(max(1, nbytes // page_nbytes), page_nbytes)
    noise = np.random.default_rng(0)
    for page in pages:
        page[:] = noise.integers(0, 256, page_nbytes, dtype=np.uint8)
    order = [int(index) for index in noise.permutation(len(pages))]
    return Load(pages, order, batch_pages_of(pages.nbytes, page_nbytes), readers)


def _pair(make: Make, load: Load, out: Bytes, place: Path, *, raw_first: bool) -> dict[str, tuple[Run, Run]]:
    """Run the contender and the raw file once each.

    ``raw_first`` says which of the two runs first. Return, for each operation, the run of the contender and the run
    of the raw file.
    """
    place.mkdir()
    makers: list[Make] = [RawFile, make] if raw_first else [make, RawFile]
    runs = [_both(maker, load, out, place / f"{number}") for number, maker in enumerate(makers)]
    shutil.rmtree(place)
    raw, way = runs if raw_first else reversed(runs)
    return {op: (way[op], raw[op]) for op in OPS}


def _both(make: Make, load: Load, out: Bytes, folder: Path) -> dict[str, Run]:
    contender = make(folder, load)
    try:
        write = _timed("write_bytes", contender.write)
        contender.cool()
        out.fill(0)
        read = _timed("read_bytes", partial(contender.read, out))
    finally:
        contender.close()
    if not np.array_equal(out, load.pages):
        raise OSError(f"{type(contender).__name__}: a page that was read back differs from the written one")
    return {"write": write, "read": read}


def _timed(counter: str, act: Callable[[], None]) -> Run:
    moved, begin, cpu = _moved(counter), perf_counter(), process_time()
    act()
    return Run(perf_counter() - begin, process_time() - cpu, _moved(counter) - moved)


def _moved(counter: str) -> int:
    """Return how many bytes the disks have read or written for this process so far, or 0 if this is unknown.

    ``counter`` is a line of ``/proc/self/io``: ``read_bytes`` or ``write_bytes``.
    """
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.partition(":")[2]) for line in lines if line.startswith(f"{counter}:"))


def _row(name: str, op: str, load: Load, pairs: list[dict[str, tuple[Run, Run]]]) -> DiskRow:
    nbytes = load.pages.nbytes
    runs = [pair[op] for pair in pairs]
    ratios = [raw.seconds / way.seconds for way, raw in runs]
    return DiskRow(
        payload=name,
        op=op,
        page_bytes=load.pages.shape[1],
        gbps=median(nbytes / way.seconds for way, _ in runs) / 1e9,
        ceiling_gbps=median(nbytes / raw.seconds for _, raw in runs) / 1e9,
        ratio=median(ratios),
        spread=(min(ratios), max(ratios)),
        cpu_s_per_gib=median(way.cpu for way, _ in runs) * _GIB / nbytes,
        disk_per_byte=median(way.disk_nbytes for way, _ in runs) / nbytes,
    )
