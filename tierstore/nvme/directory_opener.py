"""Open a sub-directory of a home: lock it, check disk space, have it examined, and start afresh after damage."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import lmdb

from tierstore.errors import ConfigError, IntegrityError
from tierstore.nvme import direct_io, directory_layout, disk_probe, disk_space
from tierstore.nvme.catalogue import Catalogue, FrozenCatalogue
from tierstore.nvme.directory_lock import FileLock, clear_odd_lock, lock_path
from tierstore.nvme.disk_space import EXTENTS_FROM, Sizing, has_records, size, size_extents
from tierstore.nvme.examination import examine
from tierstore.nvme.page_codecs import Coding

_log = logging.getLogger("tierstore.nvme.opening")

DEFAULT_READERS = 2
"""Number of readers if the disk was not measured."""

_LOCK_NBYTES = 125 * 64  # of LMDB's lock file: its reader slots. LMDB adds its header, in the same blocks
_MOST_LOCK_NBYTES = 64 << 10

_BROKEN = (
    IntegrityError,
    lmdb.BadDbiError,
    lmdb.BadTxnError,
    lmdb.CorruptedError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.NotFoundError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
)


class OpenShard(NamedTuple):
    """A sub-directory held by ``lock``, and its environment.

    Attributes:
        direct: Whether the self-test of O_DIRECT passed.
        readers: How many threads should read.
        shortage: Why nothing can be written now, or None.
    """

    directory: Path
    lock: FileLock
    catalogue: Catalogue
    sizing: Sizing
    payload: str
    direct: bool
    readers: int
    shortage: str | None = None


def open_shard(
    path: Path,
    marker: directory_layout.ShardMarker,
    payload: str,
    *,
    readers: int | None,
    coding: Coding = Coding(),  # noqa: B008  it never changes
) -> OpenShard:
    """Lock the sub-directory of ``path`` that the marker names, check it, and open it.

    A damaged sub-directory is set aside with one warning, and an empty one is opened in its place. A full disk is no
    reason to refuse a directory that holds records: it is opened, and ``shortage`` says so.

    Args:
        path: The home directory.
        marker: Fingerprint, shard, capacity and codec of the tier.
        payload: "lmdb", "extents", or "auto", which keeps what is there and else decides by the capacity.
        readers: Threads that read; None for the number measured when the directory was made.
        coding: How the writer encodes pages.

    Raises:
        ConfigError: The directory cannot be opened. Nothing is held then.
    """
    _sizing(marker, payload)
    name = directory_layout.shard_name(marker.fingerprint, marker.shard)
    directory = directory_layout.claim(path) / name
    lock = _lock(directory)
    try:
        marker, sizing, shortage = _prepare(directory, marker, payload, ask=readers is None)
        readers = readers or marker.readers or DEFAULT_READERS
        works = direct_io.works(directory)
        opened = partial(
            Catalogue,
            directory,
            sizing,
            fingerprint=marker.fingerprint,
            page_nbytes=marker.page_nbytes,
            readers=readers,
            direct=works,
            coding=coding,
        )
        catalogue = _usable(opened, directory, marker)
        return OpenShard(directory, lock, catalogue, sizing, marker.payload, works, readers, shortage)
    except (OSError, lmdb.Error) as error:
        lock.release()
        raise ConfigError(
            f"nvme.path is {path}, where the tier cannot be opened ({_reason(error)}); choose a writable directory"
        ) from error
    except BaseException:
        lock.release()
        raise


class FrozenShard(NamedTuple):
    """A sub-directory that is read and not written. ``lock`` is shared with others who read; the rest as of
    ``OpenShard``.
    """

    directory: Path
    lock: FileLock
    catalogue: FrozenCatalogue
    sizing: Sizing
    payload: str
    direct: bool
    readers: int


def open_frozen(
    path: Path,
    marker: directory_layout.ShardMarker,
    *,
    readers: int | None,
    held_nbytes: int | None,
) -> FrozenShard:
    """Open the marker's sub-directory of ``path`` to be read, also on a read-only medium; nothing is changed.

    Args:
        path: A directory that a store has filled.
        marker: Of this opening. Its capacity means nothing here: what is there is used.
        readers: Threads that are to read; None for as many as the directory says.
        held_nbytes: As of ``RecordReader``.

    Raises:
        ConfigError: There is no such directory, it holds no pages of this model, it is damaged, or a process that
            writes it has it open. Nothing is held then.
    """
    home = path.expanduser().resolve()
    directory_layout.require_home(home)
    directory = home / directory_layout.shard_name(marker.fingerprint, marker.shard)
    if directory.is_symlink() or not has_records(directory):
        others = (
            ", ".join(found.name for found, _, _ in directory_layout.shard_directories(home)) or "nothing"
        )
        raise ConfigError(
            f"nvme.path is {home}, which has no pages of this model: {directory.name} is missing or empty (there is "
            f"{others}); with nvme.read_only the directory must have been filled with the same model, dtype and "
            "page_size"
        )
    lock = _lock(directory, FileLock.share)
    try:
        fault = _foreign(directory, marker, os.O_RDONLY) or examine(directory).fault
        old = directory_layout.read_marker(directory)
        if fault is not None or old is None:
            fault = fault or "its marker cannot be read"
            raise ConfigError(
                f"nvme.path is {home}, where {directory.name} cannot be opened read-only: {fault}; fill the directory "
                "anew, or open it without nvme.read_only, which sets damaged pages aside"
            )
        data = directory / directory_layout.DATA_FILE
        sizing = _sizing(old, old.payload, data.stat().st_size)
        direct = direct_io.reads_directly(data)
        catalogue = FrozenCatalogue(directory, marker.fingerprint, direct=direct, held_nbytes=held_nbytes)
        return FrozenShard(
            directory,
            lock,
            catalogue,
            sizing,
            old.payload,
            direct,
            readers or old.readers or DEFAULT_READERS,
        )
    except (OSError, lmdb.Error) as error:
        lock.release()
        if "already open in this process" in str(error):
            raise ConfigError(
                f"nvme.path is {home}, which is open in this process already; share that store, or close it first"
            ) from error
        raise ConfigError(
            f"nvme.path is {home}, which cannot be opened read-only ({_reason(error)}); it must be readable"
        ) from error
    except BaseException:
        lock.release()
        raise


def _reason(error: OSError | lmdb.Error) -> str:
    """Return the error's text without the error number and the file, which the message names anyway."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _lock(directory: Path, take: Callable[[Path], FileLock | int | None] = FileLock.acquire) -> FileLock:
    try:
        if take == FileLock.acquire:
            clear_odd_lock(directory)
        lock = take(lock_path(directory))
    except OSError as error:
        raise ConfigError(
            f"nvme.path is {directory.parent}, which cannot be locked ({_reason(error)}); choose a writable directory"
        ) from error
    if isinstance(lock, FileLock):
        return lock
    raise ConfigError(
        f"nvme.path is {directory.parent}, in use by {f'process {lock}' if lock else 'processes that read it'}; a "
        "directory serves one process at a time, or any number with nvme.read_only: close that store or choose another "
        "directory"
    )


def _sizing(marker: directory_layout.ShardMarker, payload: str, catalogue_nbytes: int = 0) -> Sizing:
    if payload == "extents":
        return size_extents(marker.capacity, marker.page_nbytes, catalogue_nbytes, codec=marker.codec)
    return size(marker.capacity, marker.page_nbytes, codec=marker.codec)


def _prepare(
    directory: Path, marker: directory_layout.ShardMarker, payload: str, *, ask: bool
) -> tuple[directory_layout.ShardMarker, Sizing, str | None]:
    """Leave a directory that may be opened: examined or newly made, with the marker of this opening.

    Args:
        directory: The sub-directory, whose lock the caller holds.
        ask: Benchmark the disk of a new directory to find the number of readers.

    Returns:
        The marker as written, the sizes, and the disk's shortage of space, if any.
    """
    _require_directory(directory)
    shortage = disk_space.shortage(directory, marker)
    fault = _foreign(directory, marker)
    if fault is not None:
        _set_aside(directory, fault)
    directory.mkdir(mode=0o700, exist_ok=True)
    directory.chmod(0o700)  # ours, but others may have been able to write to it before
    _clear_odd_files(directory)
    old = (
        directory_layout.read_marker(directory) if (directory / directory_layout.DATA_FILE).exists() else None
    )
    if old is not None:
        marker = replace(marker, readers=old.readers)
    elif ask and (found := _rates(directory, marker.capacity, marker.page_nbytes)):
        marker = replace(marker, readers=found.readers)
    marker = replace(marker, payload=_kind(directory, old, payload, marker.capacity))
    sizing = _fitting(directory, marker)
    _tell_of_lost_catalogue(directory)
    fault = examine(directory).fault
    if fault is not None:
        _set_aside(directory, fault)
        directory.mkdir(mode=0o700)
        sizing = _sizing(marker, marker.payload)
    if marker.payload != "extents":
        directory_layout.remove_extents(directory)
    _reserve_lock_file(directory)
    _write_marker(directory, marker)
    return marker, sizing, shortage


def _require_directory(directory: Path) -> None:
    """Set aside whatever stands in the place of the sub-directory. Raises ConfigError for a symbolic link."""
    if directory.is_symlink():
        raise ConfigError(
            f"nvme.path holds {directory}, which is a symbolic link; replace it by a directory, or remove it"
        )
    if directory.exists() and not directory.is_dir():
        _set_aside(directory, "it is no directory")


def _clear_odd_files(directory: Path) -> None:
    """Move anything that is not a regular file away from our file names, with one warning.

    Only if the directory has no catalogue; otherwise the whole directory was set aside.
    """
    moved = [
        f"{name} is {kind} and was renamed to {directory_layout.move_aside(directory / name).name}"
        for name, kind in directory_layout.odd_files(directory).items()
    ]
    if moved:
        _log.warning("the NVMe tier at %s goes on without files of its own: %s", directory, ", ".join(moved))


def _tell_of_lost_catalogue(directory: Path) -> None:
    """Warn if an earlier opening left a marker, but no catalogue that could hold a record."""
    if has_records(directory) or not (directory / directory_layout.SHARD_MARKER).exists():
        return
    what = "has 0 bytes" if (directory / directory_layout.DATA_FILE).exists() else "is missing"
    _log.warning("the NVMe tier at %s starts empty: %s %s", directory, directory_layout.DATA_FILE, what)


def _reserve_lock_file(directory: Path) -> None:
    """Allocate LMDB's lock file before LMDB maps it: on a full disk, a hole in it causes SIGBUS."""
    fd = os.open(
        directory / directory_layout.LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )
    try:
        length = min(max(_LOCK_NBYTES, os.fstat(fd).st_size), _MOST_LOCK_NBYTES)
        direct_io.reserve(fd, mmap.PAGESIZE)  # enough for the tier's own readers
        with suppress(OSError):
            direct_io.reserve(fd, length)
    except OSError as error:
        if error.errno in directory_layout.FULL:
            raise
    finally:
        os.close(fd)


def _write_marker(directory: Path, marker: directory_layout.ShardMarker) -> None:
    """Write the marker of this opening. If the disk is full, the last one stays, if it says where pages are."""
    try:
        directory_layout.write_marker(directory, marker)
    except OSError as error:
        old = directory_layout.read_marker(directory)
        if error.errno not in directory_layout.FULL or old is None or old.payload != marker.payload:
            raise


def _kind(
    directory: Path,
    old: directory_layout.ShardMarker | None,
    payload: str,
    capacity: int,
) -> str:
    """Choose where page bytes go from now on. Records of the other kind are removed, with one warning, on request."""
    if payload == "auto" and old is None:
        return "extents" if capacity >= EXTENTS_FROM else "lmdb"
    if payload == "auto" and old is not None:
        return old.payload
    if old is not None and old.payload != payload:
        _log.warning(
            "the NVMe tier at %s starts empty: nvme.payload is %s and the old one is in %s",
            directory,
            payload,
            old.payload,
        )
        _empty(directory)
    return payload


def _rates(directory: Path, capacity: int, page_nbytes: int) -> disk_probe.Rates | None:
    """Benchmark the disk. None if the capacity is too small to be worth it, or direct I/O does not work."""
    if capacity < EXTENTS_FROM:
        return None
    try:
        rates = disk_probe.ask(directory, page_nbytes)
    except OSError:
        return None
    _log.info(
        "the disk at %s takes %.2f GB/s and gives %.2f GB/s to %d readers",
        directory,
        rates.write / 1e9,
        rates.reads[rates.readers] / 1e9,
        rates.readers,
    )
    return rates


def _fitting(directory: Path, marker: directory_layout.ShardMarker) -> Sizing:
    """Return the sizes that fit the existing records. If none do, the records are removed."""
    data = directory / directory_layout.DATA_FILE
    length = data.stat().st_size if data.exists() else 0
    try:
        sizing = _sizing(marker, marker.payload, length)
    except ConfigError:
        if not length:
            raise
        sizing = _sizing(marker, marker.payload)
    if length > sizing.map_size:
        _log.warning(
            "the NVMe tier at %s starts empty: the old one is larger than its capacity now", directory
        )
        _empty(directory)
    return sizing


def _empty(directory: Path) -> None:
    directory_layout.remove(directory)
    directory.mkdir(mode=0o700, exist_ok=True)


def _foreign(directory: Path, marker: directory_layout.ShardMarker, flags: int = os.O_RDWR) -> str | None:
    """Return why the existing content does not suit this opening, or None. ``flags``: as the data file is opened."""
    odd = directory_layout.odd_kind(directory / directory_layout.DATA_FILE) or directory_layout.unreadable(
        directory / directory_layout.DATA_FILE, flags
    )
    if odd is not None:
        return f"{directory_layout.DATA_FILE} is {odd}"
    if not (directory / directory_layout.DATA_FILE).exists():
        return None
    old = directory_layout.read_marker(directory)
    if old is not None and old.format_version != marker.format_version:
        return f"its format is version {old.format_version}, not {marker.format_version}"
    if old is None or (old.fingerprint, old.shard) != (marker.fingerprint, marker.shard):
        return "its marker is missing or names something else"
    if old.payload not in ("lmdb", "extents"):
        return f"its pages are in {old.payload!r}"
    if old.key_scheme != marker.key_scheme:
        return f"its keys are of scheme {old.key_scheme!r}, not {marker.key_scheme!r}: no look-up would find a page"
    if old.page_nbytes != marker.page_nbytes:
        return f"its pages have {old.page_nbytes} bytes, not {marker.page_nbytes}"
    return None


def _usable(
    opened: Callable[[], Catalogue], directory: Path, marker: directory_layout.ShardMarker
) -> Catalogue:
    """Open the environment. If it fails on first use, or is full, an empty one replaces it."""
    try:
        catalogue = opened()
    except _BROKEN as error:
        _set_aside(directory, str(error))
        directory.mkdir(mode=0o700)
        directory_layout.write_marker(directory, marker)
        catalogue = opened()
    except lmdb.MapFullError:  # not even an erasing transaction has space
        _log.warning("the NVMe tier at %s starts empty: its capacity is too low for the old one", directory)
        _empty(directory)
        directory_layout.write_marker(directory, marker)
        catalogue = opened()
    if catalogue.num_dropped:
        _log.warning(
            "the NVMe tier at %s dropped %d records: its capacity is lower now",
            directory,
            catalogue.num_dropped,
        )
    return catalogue


def _set_aside(directory: Path, fault: str) -> None:
    aside = directory_layout.set_aside(directory)
    _log.warning("the NVMe tier at %s starts empty, the old one is now %s: %s", directory, aside.name, fault)
