"""The disk tier compared with the raw disk, and the stalls that a serving thread sees.

Every run is paired with a raw one just before or after it, on new files. A contender stores all pages so that they
survive a power failure, drops them from the page cache, and reads all of them back in an order that defeats
read-ahead. One thread writes and ``readers`` threads read in every case. Stalls measure how late a thread runs that
should run every millisecond, because other threads hold Python's lock.
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
from threading import Event, Thread
from time import perf_counter, process_time, sleep
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tierstore.bench.core import synthetic_key
from tierstore.bench.raw_disk import aligned, forget, open_direct, small_pages, whole
from tierstore.nvme.direct_io import reserve
from tierstore.nvme.disk_space import size, size_extents
from tierstore.nvme.tier import NvmeTier
from tierstore.types import Tier, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Make = Callable[[Path, "Load"], "Contender"]

_TRANSFER_PAGES = 32
_PATIENCE_S = 300.0


class Load(NamedTuple):
    """The pages of one run, ``[pages, page_nbytes]`` in aligned memory, and how they are divided.

    ``order`` is the order in which the pages are read.
    """

    pages: Bytes
    order: list[int]
    batch_pages: int
    readers: int


def capacity_for(nbytes: int) -> int:
    """Return a tier capacity for ``nbytes`` of pages that gives the tier files as long as those in real use.

    A capacity that is just large enough would give sixteen short files. The tier would allocate each of them
    and make its name durable within the measured time, whereas the raw file exists before the measurement
    starts.
    """
    return int(nbytes * 1.4) + (64 << 20) + min(4 << 30, 7 * nbytes)


class Contender(ABC):
    """One way to store pages. ``write`` and ``read`` are measured; ``folder`` is its own."""

    def __init__(self, folder: Path, load: Load) -> None:
        folder.mkdir()
        self.folder = folder
        self.load = load

    @abstractmethod
    def write(self) -> None:
        """Store every page durably."""

    @abstractmethod
    def read(self, out: Bytes) -> None:
        """Read every page into ``out``."""

    def cool(self) -> None:
        """Ask the kernel to drop the files' pages from the page cache."""
        for path in self.folder.rglob("*"):
            if path.is_file() and path.suffix != ".lock" and path.name != "lock.mdb":
                forget(path)

    @abstractmethod
    def close(self) -> None:
        """Close it. The caller removes the folder."""

    def _spread(self, act: Callable[[int], None]) -> None:
        """Call ``act(index)`` for every page, with the reader threads taking turns."""
        order, readers = self.load.order, self.load.readers

        def some(first: int) -> None:
            for index in order[first::readers]:
                act(index)

        with ThreadPoolExecutor(readers) as pool:
            list(pool.map(some, range(readers)))


class RawFile(Contender):
    """The ceiling: one preallocated file with direct I/O if the file system supports it, and fdatasync per batch."""

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
        nbytes = out.shape[1]
        self._spread(lambda index: whole(os.preadv(self._fd, [out[index].data], index * nbytes), nbytes))

    def close(self) -> None:
        os.close(self._fd)


class SmallPages(RawFile):
    """The ceiling's file with ordinary memory in 4 KiB pages, which most programs use."""

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
        np.copyto(self._out, self._memory[1])  # not within the measured time


class TierRecords(Contender):
    """The NVMe tier: every byte is checked, catalogue and parents are written."""

    def __init__(self, folder: Path, load: Load, payload: str, nbytes: int = 0) -> None:
        """``nbytes`` is the total size of pages if ``write`` is called more than once."""
        super().__init__(folder, load)
        self._done = Event()
        self._written = 0
        self._payload = payload
        self._capacity = capacity_for(max(nbytes, load.pages.nbytes))
        self._tier = self._open()

    def write(self) -> None:
        """Store the pages under new keys."""
        pieces = _pieces(range(len(self.load.pages)))
        for number, piece in enumerate(pieces):
            transfer = self._transfer(number, piece, self._written, Tier.HOST, Tier.NVME)
            self._tier.submit_write(transfer, [self.load.pages[index] for index in piece])
        self._wait(len(pieces))
        self._written += len(self.load.pages)
        if not self._tier.sync(_PATIENCE_S):
            raise OSError("the tier could not be synced")

    def read(self, out: Bytes) -> None:
        """Read what the last ``write`` stored."""
        first, pieces = self._written - len(self.load.pages), _pieces(self.load.order)
        for number, piece in enumerate(pieces):
            transfer = self._transfer(number, piece, first, Tier.NVME, Tier.HOST)
            self._tier.submit_read(transfer, [out[index] for index in piece])
        self._wait(len(pieces))

    def cool(self) -> None:
        self.close()  # the kernel keeps mapped pages and their neighbours
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
                raise OSError(f"the tier made no progress for {_PATIENCE_S:.0f} s")
            self._done.clear()
            for ack in self._tier.poll():
                if not ack.ok:
                    raise OSError(f"the tier refused pages: {ack.failures[0][1].value}")
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
    """Return how many pages the tier writes between two syncs, in a run of ``nbytes`` bytes of pages."""
    by_kind = size_extents if payload == "extents" else size
    return by_kind(capacity_for(nbytes), page_nbytes).batch_pages


_TICK_S = 1e-3


class Stalls(NamedTuple):
    """Milliseconds by which ticks were late: median, one in a thousand, maximum."""

    p50: float
    p999: float
    max: float


def stalls_during(act: Callable[[], object]) -> Stalls:
    """Measure the stalls of a thread that sleeps a millisecond at a time while ``act`` runs in this one.

    They include the scheduler's own delays: compare with a run in which nothing happens.
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

    watcher = Thread(target=tick, name="tierstore-bench-tick", daemon=True)
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
    """One write or read of a whole load: elapsed and CPU seconds, and bytes that the disk moved."""

    seconds: float
    cpu: float
    disk_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRow:
    """Rates of one contender, operation and page size in GB/s (powers of 1000), medians over the rounds.

    ``ratio`` is the median of paired ratios, ``spread`` their minimum and maximum. ``disk_per_byte`` is the bytes
    that the disk moved per byte of a page: far below 1 the page cache answered, far above 1 there was read-ahead; 0
    if unknown.
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
        """Return the row for JSON."""
        return asdict(self)


def ways(payloads: list[str]) -> dict[str, Make]:
    """Return the contenders by name: the tier with each payload, and the raw file with ordinary memory."""
    tiers: dict[str, Make] = {payload: partial(TierRecords, payload=payload) for payload in payloads}
    return {**tiers, "raw, 4 KiB pages": SmallPages}


def disk_rows(
    page_nbytes: int, *, nbytes: int, rounds: int, readers: int, ways: Mapping[str, Make], place: Path
) -> Iterator[list[DiskRow]]:
    """Yield the rows of each contender in turn, for ``nbytes`` per run in pages of ``page_nbytes`` (a multiple of 4
    KiB).

    ``place`` needs free space for more than twice ``nbytes``; everything created there is removed. OSError if the
    disk or the tier refuses, or a page changes.
    """
    load, out = _load(page_nbytes, nbytes, readers), aligned(max(1, nbytes // page_nbytes), page_nbytes)
    for name, make in ways.items():
        load = load._replace(batch_pages=batch_pages_of(load.pages.nbytes, page_nbytes, name))
        pairs = [
            _pair(make, load, out, place / f"{number}", raw_first=number % 2 == 0) for number in range(rounds)
        ]
        yield [_row(name, op, load, pairs) for op in OPS]


def stalls(payload: str, *, nbytes: int, readers: int, place: Path) -> Stalls:
    """Measure stalls while ``nbytes`` in pages of 2 MiB are written to a tier and read back."""
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
    """Measure stalls while nothing happens."""
    return stalls_during(lambda: sleep(seconds))


def _load(page_nbytes: int, nbytes: int, readers: int) -> Load:
    pages = aligned(max(1, nbytes // page_nbytes), page_nbytes)
    noise = np.random.default_rng(0)
    for page in pages:
        page[:] = noise.integers(0, 256, page_nbytes, dtype=np.uint8)
    order = [int(index) for index in noise.permutation(len(pages))]
    return Load(pages, order, batch_pages_of(pages.nbytes, page_nbytes), readers)


def _pair(make: Make, load: Load, out: Bytes, place: Path, *, raw_first: bool) -> dict[str, tuple[Run, Run]]:
    """Return the contender's and the raw run by operation. Which one comes first changes from round to round."""
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
        raise OSError(f"{type(contender).__name__}: a page came back changed")
    return {"write": write, "read": read}


def _timed(counter: str, act: Callable[[], None]) -> Run:
    moved, begin, cpu = _moved(counter), perf_counter(), process_time()
    act()
    return Run(perf_counter() - begin, process_time() - cpu, _moved(counter) - moved)


def _moved(counter: str) -> int:
    """Return the bytes that this process made the disks read or write so far; 0 if the kernel does not say."""
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
