"""Opens a sub-directory: locks it, checks disk space and contents, and starts with an empty one after damage."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Mapping
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
from tierstore.types import exact_size

_log = logging.getLogger("tierstore.nvme.opening")

DEFAULT_READERS = 2
"""Number of reader threads if the disk was not measured."""

_LOCK_NBYTES = 125 * 64  # 125 reader slots of LMDB's lock file; the file's header fits into the same blocks
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


class Traces:
    """Paths that did not exist before an attempt to open a directory. A failed attempt removes what it created."""

    def __init__(self, path: Path, name: str) -> None:
        """Record which of the home ``path``, its parents and its sub-directory ``name`` do not exist."""
        self._home: Path | None = None
        self._missing: set[Path] = set()
        with suppress(OSError, RuntimeError):  # ``claim`` refuses a path that cannot be resolved
            self._home = path.expanduser().resolve()
            self._folders = directory_layout.missing_folders(self._home)
            directory = self._home / name
            ours = (directory, lock_path(directory), self._home / directory_layout.HOME_MARKER)
            self._missing = {each for each in ours if not os.path.lexists(each)}

    def remove(self, lock: FileLock | None) -> None:
        """Remove the recorded paths, except folders that contain other files, and release the lock."""
        if lock is not None:
            try:
                self._remove_shard(lock)
            finally:
                lock.release()
        if self._home is None:
            return
        with suppress(OSError):
            if self._home / directory_layout.HOME_MARKER in self._missing:
                directory_layout.unclaim(self._home)
        directory_layout.remove_empty(self._folders)

    def _remove_shard(self, lock: FileLock) -> None:
        with suppress(OSError):
            for each in self._missing:
                if each.is_dir():
                    directory_layout.remove(each)
            if lock.path in self._missing:
                lock.remove()


class OpenShard(NamedTuple):
    """A locked sub-directory and its open catalogue.

    Attributes:
        direct: Whether the self-test of O_DIRECT passed.
        readers: Number of reader threads to use.
        traces: Record of the paths that were created when the sub-directory was opened.
        shortage: Why nothing can be written now, or None.
    """

    directory: Path
    lock: FileLock
    catalogue: Catalogue
    sizing: Sizing
    payload: str
    direct: bool
    readers: int
    traces: Traces
    shortage: str | None = None

    def undo(self) -> None:
        """Release the lock and remove everything that was created when the sub-directory was opened.

        Used if opening the tier fails later. The caller must have closed the environment.
        """
        self.traces.remove(self.lock)


def open_shard(
    path: Path,
    marker: directory_layout.ShardMarker,
    payload: str,
    *,
    readers: int | None,
    coding: Coding = Coding(),  # noqa: B008  it never changes
) -> OpenShard:
    """Lock, check and open the sub-directory of ``path`` that the marker names.

    A damaged sub-directory is renamed, with one warning, and an empty one is opened in its place. On a full
    disk, a directory that contains records is opened anyway, and ``shortage`` gives the reason.

    Args:
        path: The home directory.
        marker: Fingerprint, shard, capacity and codec of the tier.
        payload: "lmdb", "extents" or "auto". "auto" keeps the storage of an existing directory, and chooses by the
            capacity for a new one.
        readers: Number of reader threads. None: the number that was measured when the directory was created,
            or 2 if it was not measured.
        coding: How the writer encodes pages.

    Raises:
        ConfigError: The directory cannot be opened. The lock is then released, and everything that this call
            created is removed.
    """
    _sizing(marker, payload)
    name = directory_layout.shard_name(marker.fingerprint, marker.shard)
    traces, lock = Traces(path, name), None
    try:
        directory = directory_layout.claim(path) / name
        lock = _lock(directory)
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
        return OpenShard(directory, lock, catalogue, sizing, marker.payload, works, readers, traces, shortage)
    except (OSError, lmdb.Error) as error:
        traces.remove(lock)
        raise ConfigError(
            f"nvme.path is {path}, where the tier cannot be opened ({_reason(error)}); choose a writable directory"
        ) from error
    except BaseException:
        traces.remove(lock)
        raise


class FrozenShard(NamedTuple):
    """A sub-directory that is opened read-only.

    ``lock`` is shared with other readers. The other fields are the same as in ``OpenShard``.
    """

    directory: Path
    lock: FileLock
    catalogue: FrozenCatalogue
    sizing: Sizing
    payload: str
    direct: bool
    readers: int

    def undo(self) -> None:
        """Release the lock. Used if opening the tier fails later."""
        self.lock.release()


def open_frozen(
    path: Path,
    marker: directory_layout.ShardMarker,
    *,
    readers: int | None,
    held_nbytes: int | None,
) -> FrozenShard:
    """Open the sub-directory of ``path`` that the marker names. The medium may be read-only.

    Nothing is written except a missing lock file.

    Args:
        path: Home directory that a store has filled.
        marker: Fingerprint, shard, format, key scheme and page size that the directory must have. The other
            fields are ignored.
        readers: Number of reader threads. None: the number in the directory's own marker, or 2 if it has none.
        held_nbytes: See ``RecordReader``.

    Raises:
        ConfigError: The directory is missing, has no pages of this model, is damaged, or is open for writing
            in another process. No lock is held then.
    """
    home = path.expanduser().resolve()
    directory_layout.require_home(home)
    directory = home / directory_layout.shard_name(marker.fingerprint, marker.shard)
    if directory.is_symlink() or not has_records(directory):
        others = (
            ", ".join(found.name for found, _, _ in directory_layout.shard_directories(home)) or "nothing"
        )
        raise ConfigError(
            f"nvme.path is {home}, which has no pages of this model: {directory.name} is missing or empty (found: "
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
                "again, or open it once without nvme.read_only: its pages are then set aside and the tier starts empty"
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
                f"nvme.path is {home}, which is already open in this process; share that store, or close it first"
            ) from error
        raise ConfigError(
            f"nvme.path is {home}, which cannot be opened read-only ({_reason(error)}); make it readable for this user"
        ) from error
    except BaseException:
        lock.release()
        raise


def _reason(error: OSError | lmdb.Error) -> str:
    """Return the error's text without the errno and without the file name, which the caller's message contains."""
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
        f"nvme.path is {directory.parent}, which is in use by "
        f"{f'process {lock}' if lock else 'processes that read it'}; "
        "close the store there or choose another directory (a directory can be open in one process at a time, or in "
        "any number of processes if all set nvme.read_only)"
    )


def _sizing(marker: directory_layout.ShardMarker, payload: str, catalogue_nbytes: int = 0) -> Sizing:
    if payload == "extents":
        return size_extents(marker.capacity, marker.page_nbytes, catalogue_nbytes, codec=marker.codec)
    return size(marker.capacity, marker.page_nbytes, codec=marker.codec)


def _prepare(
    directory: Path, marker: directory_layout.ShardMarker, payload: str, *, ask: bool
) -> tuple[directory_layout.ShardMarker, Sizing, str | None]:
    """Make a directory ready to open: create or examine it, and write its new marker.

    Args:
        directory: Sub-directory whose lock the caller holds.
        ask: Whether to benchmark the disk of a new directory to find the number of readers.

    Returns:
        The marker as written, the sizes, and a description of the disk's shortage of space, or None.
    """
    _require_directory(directory)
    shortage = disk_space.shortage(directory, marker)
    fault = _foreign(directory, marker)
    if fault is not None:
        _set_aside(directory, fault)
    directory.mkdir(mode=0o700, exist_ok=True)
    directory.chmod(0o700)  # ours, but others may have had write access before
    _clear_odd_files(directory)
    old = (
        directory_layout.read_marker(directory) if (directory / directory_layout.DATA_FILE).exists() else None
    )
    if old is not None:
        marker = replace(marker, readers=old.readers, description=_still_named(old, marker))
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
    """Set aside anything at the sub-directory's path that is not a directory.

    Raises ConfigError for a symbolic link.
    """
    if directory.is_symlink():
        raise ConfigError(
            f"nvme.path holds {directory}, which is a symbolic link; replace it with a directory, or remove it"
        )
    if directory.exists() and not directory.is_dir():
        _set_aside(directory, "it is not a directory")


def _clear_odd_files(directory: Path) -> None:
    """Rename unusable files that have names used by TierStore, and log one warning."""
    moved = [
        f"{name} is {kind} and was renamed to {directory_layout.move_aside(directory / name).name}"
        for name, kind in directory_layout.odd_files(directory).items()
    ]
    if moved:
        _log.warning(
            "the NVMe tier at %s continues without some of its files: %s", directory, ", ".join(moved)
        )


def _tell_of_lost_catalogue(directory: Path) -> None:
    """Warn if the directory has a marker from an earlier use, but no catalogue that could contain a record."""
    if has_records(directory) or not (directory / directory_layout.SHARD_MARKER).exists():
        return
    what = "has 0 bytes" if (directory / directory_layout.DATA_FILE).exists() else "is missing"
    _log.warning("the NVMe tier at %s starts empty: %s %s", directory, directory_layout.DATA_FILE, what)


def _reserve_lock_file(directory: Path) -> None:
    """Allocate LMDB's lock file before LMDB maps it, because a hole in it causes SIGBUS on a full disk."""
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


def _still_named(
    old: directory_layout.ShardMarker, new: directory_layout.ShardMarker
) -> Mapping[str, object]:
    """Return the new description, with the old one's name if the new one has none."""
    name = old.description.get("name") if isinstance(old.description, dict) else None
    return new.description if name is None else {"name": name, **new.description}


def _write_marker(directory: Path, marker: directory_layout.ShardMarker) -> None:
    """Write the directory's new marker. On a full disk, keep the old one if it names the same storage."""
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
    """Return where to store page bytes: "lmdb" or "extents".

    If existing records are in the other storage and ``payload`` is not "auto", delete these records and log one
    warning.
    """
    if payload == "auto" and old is None:
        return "extents" if capacity >= EXTENTS_FROM else "lmdb"
    if payload == "auto" and old is not None:
        return old.payload
    if old is not None and old.payload != payload:
        _log.warning(
            "the NVMe tier at %s starts empty: nvme.payload is %s, but the old pages are in %s",
            directory,
            payload,
            old.payload,
        )
        _empty(directory)
    return payload


def _rates(directory: Path, capacity: int, page_nbytes: int) -> disk_probe.Rates | None:
    """Benchmark the disk. Return None if the capacity is below EXTENTS_FROM or the benchmark fails."""
    if capacity < EXTENTS_FROM:
        return None
    try:
        rates = disk_probe.ask(directory, page_nbytes)
    except OSError:
        return None
    _log.info(
        "the disk at %s writes %.2f GB/s and reads %.2f GB/s with %d readers",
        directory,
        rates.write / 1e9,
        rates.reads[rates.readers] / 1e9,
        rates.readers,
    )
    return rates


def _fitting(directory: Path, marker: directory_layout.ShardMarker) -> Sizing:
    """Return sizes that fit the existing records. If no sizes fit, delete the records and log one warning."""
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
            "the NVMe tier at %s starts empty: its data.mdb is larger than nvme.capacity allows", directory
        )
        _empty(directory)
    return sizing


def _empty(directory: Path) -> None:
    directory_layout.remove(directory)
    directory.mkdir(mode=0o700, exist_ok=True)


def _foreign(directory: Path, marker: directory_layout.ShardMarker, flags: int = os.O_RDWR) -> str | None:
    """Return why the tier cannot use the existing contents of the directory, or None if it can.

    ``flags`` are the flags with which the data file will be opened.
    """
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
        return "its marker is missing or names another model or shard"
    if old.payload not in ("lmdb", "extents"):
        return f"its marker says that pages are stored in {old.payload!r}, which this version does not know"
    if old.key_scheme != marker.key_scheme:
        return f"its keys use scheme {old.key_scheme!r}, not {marker.key_scheme!r}, so no lookup would find a page"
    if old.page_nbytes != marker.page_nbytes:
        return f"the size of its pages is {exact_size(old.page_nbytes)}, not {exact_size(marker.page_nbytes)}"
    return None


def _usable(
    opened: Callable[[], Catalogue], directory: Path, marker: directory_layout.ShardMarker
) -> Catalogue:
    """Open the environment. If it is damaged or full, open a new, empty one in its place.

    The directory of a damaged environment is renamed. A full environment is deleted.
    """
    try:
        catalogue = opened()
    except _BROKEN as error:
        _set_aside(directory, str(error))
        directory.mkdir(mode=0o700)
        directory_layout.write_marker(directory, marker)
        catalogue = opened()
    except lmdb.MapFullError:  # no space even for a transaction that erases
        _log.warning(
            "the NVMe tier at %s starts empty: its capacity is too small for the existing catalogue",
            directory,
        )
        _empty(directory)
        directory_layout.write_marker(directory, marker)
        catalogue = opened()
    if catalogue.num_dropped:
        _log.warning(
            "the NVMe tier at %s dropped %d records, because its capacity was lowered",
            directory,
            catalogue.num_dropped,
        )
    return catalogue


def _set_aside(directory: Path, fault: str) -> None:
    aside = directory_layout.set_aside(directory)
    _log.warning(
        "the NVMe tier at %s starts empty, and the old directory is now %s: %s", directory, aside.name, fault
    )
