"""The operations behind the commands ``inspect``, ``verify`` and ``purge`` for a home directory. No model is needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tierstore.nvme import directory_layout
from tierstore.nvme.catalogue import FrozenCatalogue
from tierstore.nvme.directory_lock import FileLock, clear_odd_lock, lock_holder, lock_path, locked_to_read
from tierstore.nvme.examination import examine
from tierstore.nvme.reader import RecordReader
from tierstore.types import PageKey

Progress = Callable[[str, int, int], None]
"""Callback with three arguments: a sub-directory's name, the number of its records checked so far, and their total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReport:
    """Description of one sub-directory.

    ``damaged`` is True if the sub-directory was set aside as damaged. ``records`` and ``fault`` are None if the
    sub-directory was not checked because it is in use or was set aside. ``fault`` is also None if the check found no
    damage. ``in_use_by`` is the PID of the process that holds the lock, 0 if the PID is unknown, or None if nobody
    holds it.
    """

    name: str
    fingerprint: str
    damaged: bool
    in_use_by: int | None
    records: int | None
    fault: str | None
    disk_nbytes: int
    capacity: int | None
    page_nbytes: int | None
    format_version: int | None
    payload: str | None
    codec: str | None
    description: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeReport:
    """Description of a home directory and its sub-directories, sorted by name.

    ``read_only`` says whether the file system is mounted read-only.
    """

    path: Path
    disk_nbytes: int
    shards: tuple[ShardReport, ...]
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardVerdict:
    """Result of ``verify`` for one sub-directory.

    ``checked`` is the number of records checked. ``bad`` lists the key of each unreadable or damaged record with
    the reason. ``skipped`` is the reason why the sub-directory was not checked, or None.
    """

    name: str
    checked: int = 0
    bad: tuple[tuple[PageKey, str], ...] = ()
    skipped: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeReport:
    """Result of ``purge``.

    ``removed`` lists the names of the deleted sub-directories, and ``freed_nbytes`` is the disk space that they
    occupied. ``kept`` maps the name of each other selected sub-directory to the reason why it was kept.
    """

    removed: tuple[str, ...]
    freed_nbytes: int
    kept: tuple[tuple[str, str], ...]


def inspect(path: Path) -> HomeReport:
    """Describe a home without changing it. Raises ConfigError if ``path`` is not a home."""
    root = _home(path)
    shards = tuple(_report(*found) for found in directory_layout.shard_directories(root))
    return HomeReport(
        path=root,
        disk_nbytes=sum(shard.disk_nbytes for shard in shards),
        shards=shards,
        read_only=bool(os.statvfs(root).f_flag & os.ST_RDONLY),
    )


def verify(path: Path, progress: Progress | None = None) -> tuple[ShardVerdict, ...]:
    """Check every record in all sub-directories that are not in use. No record is changed.

    Each sub-directory is locked while it is read, if its lock file can be written.

    Raises:
        ConfigError: ``path`` is not a home.
    """
    verdicts = []
    for directory, fingerprint, damaged in directory_layout.shard_directories(_home(path)):
        if damaged:
            verdicts.append(ShardVerdict(name=directory.name, skipped="set aside as damaged"))
            continue
        with locked_to_read(lock_path(directory)) as holder:
            if holder is None:
                verdicts.append(_verify(directory, fingerprint, progress or _silent))
            else:
                verdicts.append(ShardVerdict(name=directory.name, skipped=_in_use(holder)))
    return tuple(verdicts)


def purge(path: Path, which: str) -> PurgeReport:
    """Delete sub-directories of a home.

    Sub-directories in use and files that do not belong to TierStore are kept.

    Args:
        path: The home directory.
        which: "all", "damaged" (sub-directories that were set aside) or the beginning of a fingerprint.

    Raises:
        ConfigError: ``path`` is not a home.
        ValueError: ``which`` is empty.
    """
    if not which:
        raise ValueError("`which` must be 'all', 'damaged' or the beginning of a fingerprint, got ''")
    removed: list[str] = []
    kept: list[tuple[str, str]] = []
    freed = 0
    for directory, fingerprint, damaged in list(directory_layout.shard_directories(_home(path))):
        if not (which == "all" or (damaged and which == "damaged") or fingerprint.startswith(which)):
            continue
        nbytes = directory_layout.disk_nbytes(directory)
        reason = _remove(directory, damaged=damaged)
        if reason is None:
            removed.append(directory.name)
            freed += nbytes
        else:
            kept.append((directory.name, reason))
    return PurgeReport(removed=tuple(removed), freed_nbytes=freed, kept=tuple(kept))


def _home(path: Path) -> Path:
    root = path.expanduser().resolve()
    directory_layout.require_home(root)
    return root


def _report(directory: Path, fingerprint: str, damaged: bool) -> ShardReport:
    marker = directory_layout.read_marker(directory)
    with lock_holder(lock_path(directory)) as holder:
        examination = examine(directory) if holder is None and not damaged else None
    return ShardReport(
        name=directory.name,
        fingerprint=fingerprint,
        damaged=damaged,
        in_use_by=holder,
        records=examination.records if examination else None,
        fault=examination.fault if examination else None,
        disk_nbytes=directory_layout.disk_nbytes(directory),
        capacity=marker.capacity if marker else None,
        page_nbytes=marker.page_nbytes if marker else None,
        format_version=marker.format_version if marker else None,
        payload=marker.payload if marker else None,
        codec=marker.codec if marker else None,
        description=marker.description if marker else {},
    )


def _verify(directory: Path, fingerprint: str, progress: Progress) -> ShardVerdict:
    examination = examine(directory)
    if examination.fault is not None:
        return ShardVerdict(name=directory.name, skipped=f"damaged: {examination.fault}")
    if not examination.records:
        return ShardVerdict(name=directory.name)
    bad: list[tuple[PageKey, str]] = []
    checked = 0
    with open_reader(directory, fingerprint) as reader:
        for key, fault in reader.verify_all():
            checked += 1
            if fault is not None:
                bad.append((key, fault))
            progress(directory.name, checked, examination.records)
    return ShardVerdict(name=directory.name, checked=checked, bad=tuple(bad))


@contextmanager
def open_reader(directory: Path, fingerprint: str) -> Iterator[RecordReader]:
    """Open a reader of a sub-directory whose lock the caller holds.

    The sub-directory must contain records, and ``examine`` must have found no fault in it.
    """
    with closing(FrozenCatalogue(directory, fingerprint)) as catalogue:
        yield catalogue.reader


def _remove(directory: Path, *, damaged: bool) -> str | None:
    """Delete a sub-directory. Return None if it was deleted, or the reason why it was kept."""
    if damaged:
        return None if directory_layout.remove(directory) else "holds files that are not TierStore's"
    clear_odd_lock(directory)
    lock = FileLock.acquire(lock_path(directory))
    if not isinstance(lock, FileLock):
        return _in_use(lock)
    try:
        if not directory_layout.remove(directory):
            return "holds files that are not TierStore's"
        lock.remove()
        return None
    finally:
        lock.release()


def _in_use(holder: int | None) -> str:
    return f"in use by process {holder}" if holder else "in use by another process"


def _silent(name: str, checked: int, total: int) -> None:
    """Do nothing."""
