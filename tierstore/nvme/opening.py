"""From a path to an environment that may be used: home, lock, room, examination, and a fresh start after damage."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import NamedTuple

import lmdb

from tierstore.errors import ConfigError
from tierstore.nvme import home
from tierstore.nvme.catalogue import Catalogue
from tierstore.nvme.check import examine
from tierstore.nvme.lock import FileLock
from tierstore.nvme.sizing import Sizing

_log = logging.getLogger(__name__)

_BROKEN = (
    lmdb.BadDbiError,
    lmdb.CorruptedError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.NotFoundError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
)


class OpenShard(NamedTuple):
    """A sub-directory held by ``lock``, and its environment."""

    directory: Path
    lock: FileLock
    catalogue: Catalogue


def open_shard(path: Path, marker: home.ShardMarker, sizing: Sizing, *, readers: int) -> OpenShard:
    """Lock the marker's sub-directory of ``path``, see that it may be used, and open it.

    One that is damaged is set aside with one warning, and an empty one opened in its place. ConfigError if it cannot
    be had; then nothing is held.
    """
    name = home.shard_name(marker.fingerprint, marker.shard)
    directory = home.claim(path) / name
    lock = _lock(directory)
    try:
        _prepare(directory, marker, sizing)
        return OpenShard(directory, lock, _open_catalogue(directory, marker, sizing, readers))
    except (OSError, lmdb.Error) as error:
        lock.release()
        raise ConfigError(
            f"nvme.path is {path}, where the tier cannot be opened ({error}); allowed: a writable directory"
        ) from error
    except BaseException:
        lock.release()
        raise


def _lock(directory: Path) -> FileLock:
    try:
        lock = FileLock.acquire(home.lock_path(directory))
    except OSError as error:
        raise ConfigError(
            f"nvme.path is {directory.parent}, which cannot be locked ({error}); allowed: a writable directory"
        ) from error
    if isinstance(lock, FileLock):
        return lock
    raise ConfigError(
        f"nvme.path is {directory.parent}, in use by process {lock or 'unknown'}; allowed: one user at a time"
    )


def _prepare(directory: Path, marker: home.ShardMarker, sizing: Sizing) -> None:
    """Leave a directory that may be opened: examined, or made anew, with a marker of this opening."""
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise ConfigError(
            f"nvme.path holds {directory}, which is no directory; allowed: one that TierStore made"
        )
    own = home.disk_nbytes(directory)
    disk = os.statvfs(directory.parent)
    free = disk.f_bavail * disk.f_frsize
    if marker.capacity > free + own:
        raise ConfigError(
            f"nvme.capacity is {marker.capacity} bytes; allowed: at most {free + own}, free disk and what it has"
        )
    data = directory / home.DATA_FILE
    if data.exists() and data.stat().st_size > sizing.map_size:
        _log.warning(
            "the NVMe tier at %s starts empty: the old one is larger than its capacity now", directory
        )
        home.remove(directory)
    fault = _fault(directory, marker)
    if fault is not None:
        _set_aside(directory, fault)
    directory.mkdir(mode=0o700, exist_ok=True)
    directory.chmod(0o700)  # one that others could write to before, and none that belongs to somebody else
    home.write_marker(directory, marker)


def _fault(directory: Path, marker: home.ShardMarker) -> str | None:
    if not (directory / home.DATA_FILE).exists():
        return None
    old = home.read_marker(directory)
    if old is None or (old.fingerprint, old.shard, old.format_version) != (
        marker.fingerprint,
        marker.shard,
        marker.format_version,
    ):
        return "its marker is missing or names something else"
    if old.key_scheme != marker.key_scheme:
        return f"its keys are of scheme {old.key_scheme!r}, not {marker.key_scheme!r}: no look-up would find a page"
    if old.page_nbytes != marker.page_nbytes:
        return f"its pages have {old.page_nbytes} bytes, not {marker.page_nbytes}"
    return examine(directory).fault


def _open_catalogue(directory: Path, marker: home.ShardMarker, sizing: Sizing, readers: int) -> Catalogue:
    """The environment. One that breaks on first use, though a child could walk it, makes room for an empty one."""
    try:
        return _catalogue(directory, marker, sizing, readers)
    except _BROKEN as error:
        _set_aside(directory, str(error))
    directory.mkdir(mode=0o700)
    home.write_marker(directory, marker)
    return _catalogue(directory, marker, sizing, readers)


def _catalogue(directory: Path, marker: home.ShardMarker, sizing: Sizing, readers: int) -> Catalogue:
    return Catalogue(
        directory, sizing, fingerprint=marker.fingerprint, page_nbytes=marker.page_nbytes, readers=readers
    )


def _set_aside(directory: Path, fault: str) -> None:
    aside = home.set_aside(directory)
    _log.warning("the NVMe tier at %s starts empty, the old one is now %s: %s", directory, aside.name, fault)
