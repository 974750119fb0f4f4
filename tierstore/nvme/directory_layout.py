"""Layout of the tier's home directory: file names, markers and one sub-directory per (fingerprint, shard).

    home/                      mode 0700; was empty when TierStore first used it
      tierstore-home.json      the home's marker
      <fingerprint>-<shard>.lock
      <fingerprint>-<shard>/   an LMDB environment, extent files if pages are stored in them, and a marker
                               that describes the model and says where pages are stored
      <fingerprint>-<shard>.damaged-<n>/   a damaged sub-directory that was renamed; only purge deletes it
      *.damaged-<n>            an unusable marker or lock file that was renamed

TierStore never touches files that it does not recognize. This module uses only the standard library, because it is
also imported by the child process that examines a directory before it is opened.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tierstore.errors import ConfigError

_log = logging.getLogger("tierstore.nvme.home")

HOME_MARKER = "tierstore-home.json"
SHARD_MARKER = "tierstore-shard.json"
DATA_FILE = "data.mdb"
LOCK_FILE = "lock.mdb"
PROBE_FILE = "direct.probe"
TOMBSTONES_FILE = "erased.bin"
HOME_VERSION = 1
FORMAT_VERSION = 2
"""Format version of a sub-directory.

In version 1, entries had no field for the location of a record in an extent file.
"""

_OUR_FILES = (
    DATA_FILE,
    LOCK_FILE,
    PROBE_FILE,
    SHARD_MARKER + ".new",
    TOMBSTONES_FILE,
    TOMBSTONES_FILE + ".new",
)
_EXTENT_NAME = re.compile(r"extent-(?P<number>(?!0{5})\d{5}|[1-9]\d{5,8})\.bin")
"""File names that ``extent_path`` returns for numbers that fit into an entry."""
_SHARD_NAME = re.compile(
    r"(?P<fingerprint>[0-9A-Za-z_]{1,128})-(?P<shard>\d{1,5})(?P<damaged>\.damaged-\d+)?"
)
_DAMAGED = re.compile(r"\.damaged-\d+\Z")
_BUSY_S = 10.0
_LONGEST_MARKER = 1 << 20

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""errno values of system calls that fail for lack of disk space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMarker:
    """The marker of a sub-directory, which describes its contents.

    Attributes:
        key_scheme: How the keys of the pages were derived. Markers older than this field get the default.
        codec: Codec of pages written since the directory was last opened. Records of any codec can be read.
        description: The caller's free-form description, for people.
        payload: Where page bytes are stored: "lmdb" or "extents".
        readers: Number of reader threads that suits this disk; 0 if it was not measured.
    """

    fingerprint: str
    shard: int
    page_nbytes: int
    capacity: int
    format_version: int = FORMAT_VERSION
    key_scheme: str = "tierstore-keys-1"
    payload: str = "lmdb"
    codec: str = "none"
    readers: int = 0
    description: Mapping[str, object] = field(default_factory=dict)


def claim(path: Path) -> Path:
    """Make ``path`` a home, or check that it is one, and return the resolved path.

    A path becomes a home only if it does not exist, if it is an empty directory, or if a process died while making
    it a home. A missing or damaged marker of an existing home is replaced, with one warning.

    Raises:
        ConfigError: The directory contains other files, is the home of a newer version, or cannot be used. It
            is left unchanged.
    """
    try:
        home = path.expanduser().resolve()
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        with alone(home):
            marker = home / HOME_MARKER
            if any(each.name != _on_its_way(marker).name for each in home.iterdir()):
                fault = _marker_fault(home)
                if fault is not None:
                    _mend_marker(home, fault)
            else:
                _write_home_marker(home)
    except OSError as error:
        raise _unusable(path, error) from error
    return home


def missing_folders(folder: Path) -> tuple[Path, ...]:
    """Return those of ``folder`` and its parents that do not exist, innermost first."""
    return tuple(each for each in (folder, *folder.parents) if not os.path.lexists(each))


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove these folders in order, stopping at the first one that is missing or not empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def unclaim(home: Path) -> None:
    """Delete the home's marker if the home contains nothing else. Raises OSError if that fails."""
    with alone(home):
        marker = home / HOME_MARKER
        if {each.name for each in home.iterdir()} == {marker.name}:
            marker.unlink()


def require_home(home: Path) -> None:
    """Raise ConfigError unless ``home`` is a store's directory.

    Changes nothing. A damaged marker only causes a warning.
    """
    if not home.exists():
        raise ConfigError(
            f"nvme.path is {home}, which does not exist; name a directory that TierStore created"
        )
    try:
        if home.is_dir() and not any(home.iterdir()):
            raise ConfigError(
                f"nvme.path is {home}, which is empty: no store has used it yet; choose a directory with pages"
            )
        fault = _marker_fault(home)
    except OSError as error:
        raise _unusable(home, error) from error
    if fault is not None:
        _log.warning(
            "%s cannot be used (%s); the sub-directories in %s are read anyway", HOME_MARKER, fault, home
        )


def _marker_fault(home: Path) -> str | None:
    """Return what is wrong with the marker of a home, or None if it is valid.

    A directory belongs to TierStore in three cases: its home marker says so, the marker of a sub-directory
    matches that sub-directory's name, or the home marker is damaged but all other files have TierStore's names.

    Raises:
        ConfigError: The directory does not belong to TierStore, or is a home of a newer version.
    """
    try:
        found = read_json(home / HOME_MARKER)
    except FileNotFoundError:
        if _has_own_shard(home):
            return "it is missing"
        raise _foreign(home) from None
    except (OSError, ValueError) as error:
        if _has_own_shard(home) or _all_ours(home):
            return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _foreign(home) from None
    if not isinstance(found, dict) or found.get("format") != "tierstore-nvme":
        if _has_own_shard(home) or (not isinstance(found, dict) and _all_ours(home)):
            return "it does not contain a home marker"
        raise _foreign(home)
    version = found.get("version")
    if version == HOME_VERSION:
        return None
    if isinstance(version, int) and version > HOME_VERSION:
        raise ConfigError(
            f"nvme.path is {home}, whose format version {version} is newer than {HOME_VERSION} (the newest that this "
            "TierStore supports); upgrade TierStore or choose a new directory"
        )
    return f"its version is {version!r}"


def _has_own_shard(home: Path) -> bool:
    """Return whether ``home`` has a sub-directory with a marker that matches the sub-directory's name."""
    for directory, fingerprint, _ in shard_directories(home):
        marker = read_marker(directory)
        if marker is not None and marker.fingerprint == fingerprint:
            return True
    return False


def _all_ours(home: Path) -> bool:
    """Return whether ``home`` contains only files and empty sub-directories whose names TierStore uses."""
    names = (HOME_MARKER, _on_its_way(home / HOME_MARKER).name)
    for path in home.iterdir():
        if path.is_dir() and not path.is_symlink() and path.name != HOME_MARKER:
            if _SHARD_NAME.fullmatch(path.name) is None or any(path.iterdir()):
                return False
        elif path.name not in names and _SHARD_NAME.fullmatch(path.name.removesuffix(".lock")) is None:
            return False
    return True


def _mend_marker(home: Path, fault: str) -> None:
    """Rename the home's damaged marker and write a new one, with one warning.

    If the disk is too full for a new marker, only the warning is logged.
    """
    marker = home / HOME_MARKER
    try:
        aside = move_aside(marker) if os.path.lexists(marker) else None
        _write_home_marker(home)
    except OSError as error:
        if error.errno not in FULL:
            raise
        aside, fault = None, f"{fault}; the disk is too full to write a new one"
    _log.warning(
        "%s in %s cannot be used (%s)%s; the pages there are kept",
        HOME_MARKER,
        home,
        fault,
        f" and was renamed to {aside.name}" if aside is not None else "",
    )


def _write_home_marker(home: Path) -> None:
    write_json(home / HOME_MARKER, {"format": "tierstore-nvme", "version": HOME_VERSION})


def shard_name(fingerprint: str, shard: int) -> str:
    """Return the name of a sub-directory. Raises ConfigError if the fingerprint or the shard is invalid."""
    name = f"{fingerprint}-{shard}"
    match = _SHARD_NAME.fullmatch(name)
    if match is None or match["damaged"]:
        raise ConfigError(
            f"the fingerprint must consist of letters, digits and _, and the shard must be from 0 to 65535, "
            f"got {fingerprint!r} and {shard}"
        )
    return name


def shard_directories(home: Path) -> Iterator[tuple[Path, str, bool]]:
    """Yield the path, fingerprint and damage flag of each sub-directory, sorted by name."""
    for path in sorted(home.iterdir()):
        match = _SHARD_NAME.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            yield path, match["fingerprint"], match["damaged"] is not None


def others(directory: Path) -> list[dict[str, object]]:
    """Return the name, size and damage flag of each sub-directory of the home except ``directory``.

    Return [] if the sub-directories cannot be listed.
    """
    try:
        return [
            {"name": path.name, "nbytes": disk_nbytes(path), "damaged": damaged}
            for path, _, damaged in shard_directories(directory.parent)
            if path != directory
        ]
    except OSError:
        return []


def extent_path(directory: Path, number: int) -> Path:
    """Return the path of extent file ``number``. Numbers start at 1."""
    return directory / f"extent-{number:05}.bin"


def extent_sizes(directory: Path) -> dict[int, int]:
    """Return the length in bytes of every extent file, by number."""
    found = {}
    for path in directory.iterdir():
        match = _EXTENT_NAME.fullmatch(path.name)
        if match and path.is_file() and not path.is_symlink():
            found[int(match["number"])] = path.stat().st_size
    return dict(sorted(found.items()))


def remove_extents(directory: Path) -> None:
    """Delete all extent files. The caller must hold the lock, and no catalogue may refer to the files."""
    for number in extent_sizes(directory):
        extent_path(directory, number).unlink(missing_ok=True)


def read_marker(directory: Path) -> ShardMarker | None:
    """Return the sub-directory's marker, or None if it is missing or unreadable."""
    try:
        return ShardMarker(**read_json(directory / SHARD_MARKER))
    except (OSError, ValueError, TypeError):
        return None


def read_json(path: Path) -> Any:
    """Return the value that ``write_json`` wrote to ``path``. Never blocks on a FIFO.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is damaged.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        raw = file.read(_LONGEST_MARKER)
    if not raw:
        raise ValueError("it is empty")
    try:
        return json.loads(raw)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def odd_kind(path: Path) -> str | None:
    """Return "a FIFO" or similar if ``path`` exists but is not a regular file, else None. Opens nothing."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    return next((name for is_kind, name in _ODD_KINDS if is_kind(mode)), None)


def unreadable(path: Path, flags: int = os.O_RDWR) -> str | None:
    """Return "a file that cannot be opened (reason)" if permissions forbid opening ``path``, else None.

    Opens the file with ``flags`` and closes it again. Do not call this for LMDB's files while an environment is
    open, because closing a file drops LMDB's locks.
    """
    try:
        os.close(os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW))
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            return f"a file that cannot be opened ({error.strerror})"
    return None


def fresh_file(path: Path, flags: int = os.O_RDWR) -> int:
    """Replace whatever is at ``path`` with an empty file (mode 0600) and return its open descriptor.

    Raises OSError, for example if ``path`` is a directory that is not empty.
    """
    with suppress(FileNotFoundError):
        remove_leftover(path)
    return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def remove_leftover(path: Path) -> None:
    """Delete a file, link, FIFO or empty directory. Raises OSError (FileNotFoundError if it is missing)."""
    try:
        path.unlink()
    except IsADirectoryError:
        path.rmdir()


def write_marker(directory: Path, marker: ShardMarker) -> None:
    """Atomically replace the sub-directory's marker."""
    write_json(directory / SHARD_MARKER, asdict(marker))


def set_aside(directory: Path) -> Path:
    """Rename a damaged sub-directory and return its new path. The caller must hold the lock."""
    return move_aside(directory)


def move_aside(path: Path) -> Path:
    """Append ``.damaged-<n>``, with the first unused number, to the name of ``path``. Return the new path."""
    number = 1
    while os.path.lexists(target := path.with_name(f"{path.name}.damaged-{number}")):
        number += 1
    path.rename(target)
    return target


def remove(directory: Path) -> bool:
    """Delete TierStore's files in a sub-directory, then the sub-directory itself if it is empty.

    The caller must hold the lock. Return whether the sub-directory itself was deleted.
    """
    # The catalogue is deleted first, so that an interruption leaves no entries without bytes. The marker is
    # deleted last, because it identifies the directory as TierStore's.
    names = sorted(path.name for path in directory.iterdir() if _is_ours(path.name))
    for name in sorted(names, key=lambda name: (name == SHARD_MARKER, name != DATA_FILE)):
        try:
            remove_leftover(directory / name)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise
    if any(directory.iterdir()):
        return False
    directory.rmdir()
    return True


def disk_nbytes(directory: Path) -> int:
    """Return the disk space, in bytes, allocated to a sub-directory and to TierStore's files in it.

    Return 0 if the sub-directory does not exist.
    """
    total = 0
    try:
        ours = [path for path in directory.iterdir() if _is_ours(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return 0
    for path in (directory, *ours):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def write_json(path: Path, value: object) -> None:
    """Atomically replace ``path`` with a file with mode 0600 that contains ``value`` as JSON."""
    temporary = _on_its_way(path)
    fd = fresh_file(temporary, os.O_WRONLY)
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(value, file, default=str)
            file.flush()
            os.fsync(fd)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def odd_files(directory: Path) -> dict[str, str]:
    """Find files in a sub-directory that have TierStore's names but cannot be used.

    Return a mapping from file name to what the file is, such as "a FIFO".
    """
    names = sorted(path.name for path in directory.iterdir())
    # The tombstone file is excluded: if it is unusable, every page counts as erased.
    ours = [n for n in names if _is_ours(n) and n != TOMBSTONES_FILE and _DAMAGED.search(n) is None]
    kinds = {name: odd_kind(directory / name) or unreadable(directory / name) for name in ours}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def _is_ours(name: str) -> bool:
    name = _DAMAGED.sub("", name)
    return name in _OUR_FILES or name == SHARD_MARKER or _EXTENT_NAME.fullmatch(name) is not None


def _on_its_way(path: Path) -> Path:
    """Return the path at which ``write_json`` writes a new file before renaming it to ``path``.

    A killed process or a full disk may leave a file there.
    """
    return path.with_name(path.name + ".new")


_ODD_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISCHR, "a character device"),
)


@contextmanager
def alone(home: Path) -> Iterator[None]:
    """Hold a lock on ``home``, so that only one process at a time looks for the marker and writes it.

    Waits up to 10 s for another process, then raises BlockingIOError.
    """
    fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _BUSY_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def _foreign(home: Path) -> ConfigError:
    return ConfigError(
        f"nvme.path is {home}, which holds files that TierStore did not create; choose a new or an empty directory, "
        "or one that TierStore created"
    )


def _unusable(path: Path, error: OSError) -> ConfigError:
    why = "Not a directory" if isinstance(error, FileExistsError) else error.strerror or error
    return ConfigError(f"nvme.path is {path}, which cannot be used ({why}); choose a writable directory")
