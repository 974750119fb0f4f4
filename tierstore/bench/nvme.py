"""The disk tier beside the disk: every run is paired with a raw one just before or after it, on new files."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tierstore.bench.contenders import (
    Contender,
    FilePerPage,
    Load,
    PlainLmdb,
    RawFile,
    SmallPages,
    TierRecords,
    batch_pages_of,
)
from tierstore.bench.raw_disk import aligned
from tierstore.bench.ticks import Stalls, stalls_during

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Make = Callable[[Path, Load], Contender]

_GIB = 1 << 30
_STALL_PAGE = 2 << 20
_STALL_MEMORY = 256 << 20
OPS = ("write", "read")


class Run(NamedTuple):
    """One write or read of a whole load: seconds by the clock and of processor time, bytes that the disk moved."""

    seconds: float
    cpu: float
    disk_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRow:
    """One way, one operation, one page size. GB (powers of 1000) a second, medians over the rounds.

    ``ratio`` is the median of paired ratios, ``spread`` the least and the most of them. ``disk_per_byte``: bytes the
    disk moved for one of a page; far below 1 the page cache answered, far above it read ahead. 0: not told.
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
        """For JSON."""
        return asdict(self)


def ways(payloads: list[str]) -> dict[str, Make]:
    """What is compared, by name: the tier with each payload, the raw file out of and into ordinary memory, and what one
    would do without a tier."""
    tiers: dict[str, Make] = {payload: partial(TierRecords, payload=payload) for payload in payloads}
    return {**tiers, "raw, 4 KiB pages": SmallPages, "plain LMDB": PlainLmdb, "file per page": FilePerPage}


def disk_rows(
    page_nbytes: int, *, nbytes: int, rounds: int, readers: int, payloads: list[str], place: Path
) -> Iterator[list[DiskRow]]:
    """The rows of each way in turn, for pages of ``page_nbytes`` (a multiple of 4 KiB) and ``nbytes`` of them a run.

    ``place`` must have room for twice ``nbytes``, with some to spare; what is made there is removed again. OSError
    if the disk or the tier refuses, or a page does not come back as it was.
    """
    load, out = _load(page_nbytes, nbytes, readers), aligned(max(1, nbytes // page_nbytes), page_nbytes)
    for name, make in ways(payloads).items():
        load = load._replace(batch_pages=batch_pages_of(load.pages.nbytes, page_nbytes, name))
        pairs = [
            _pair(make, load, out, place / f"{number}", raw_first=number % 2 == 0) for number in range(rounds)
        ]
        yield [_row(name, op, load, pairs) for op in OPS]


def stalls(payload: str, *, nbytes: int, readers: int, place: Path) -> Stalls:
    """Stalls while ``nbytes`` of pages of 2 MiB are written to a tier and read back."""
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
    """Stalls while nothing happens."""
    return stalls_during(lambda: sleep(seconds))


def _load(page_nbytes: int, nbytes: int, readers: int) -> Load:
    pages = aligned(max(1, nbytes // page_nbytes), page_nbytes)
    noise = np.random.default_rng(0)
    for page in pages:
        page[:] = noise.integers(0, 256, page_nbytes, dtype=np.uint8)
    order = [int(index) for index in noise.permutation(len(pages))]
    return Load(pages, order, batch_pages_of(pages.nbytes, page_nbytes), readers)


def _pair(make: Make, load: Load, out: Bytes, place: Path, *, raw_first: bool) -> dict[str, tuple[Run, Run]]:
    """By operation: the way's run and the raw one beside it. Who goes first changes from round to round."""
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
        raise OSError(f"{type(contender).__name__}: a page did not come back as it was")
    return {"write": write, "read": read}


def _timed(counter: str, act: Callable[[], None]) -> Run:
    moved, begin, cpu = _moved(counter), perf_counter(), process_time()
    act()
    return Run(perf_counter() - begin, process_time() - cpu, _moved(counter) - moved)


def _moved(counter: str) -> int:
    """Bytes that this process made the disks read or write so far; 0 where the kernel does not say."""
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
