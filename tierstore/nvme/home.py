"""The directory of the tier: its marker, one sub-directory per (fingerprint, shard), and what may be deleted.

    home/                      0700; never written to unless it was empty or has our marker
      tierstore-home.json      the marker
      <fingerprint>-<shard>.lock
      <fingerprint>-<shard>/   one LMDB environment, extent files if pages are kept there, and a marker that describes
                               the model and says which of the two it is
      <fingerprint>-<shard>.damaged-<n>/   set aside at an open that found it broken; only purge touches it

Files we do not know are left alone everywhere.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tierstore.errors import ConfigError

HOME_MARKER = "tierstore-home.json"
SHARD_MARKER = "tierstore-shard.json"
DATA_FILE = "data.mdb"
PROBE_FILE = "direct.probe"
TOMBSTONES_FILE = "erased.bin"
HOME_VERSION = 1
FORMAT_VERSION = 2
"""Of a sub-directory: 1 had catalogue records without a place in extent files."""

_OUR_FILES = (
    DATA_FILE,
    "lock.mdb",
    PROBE_FILE,
    SHARD_MARKER + ".new",
    TOMBSTONES_FILE,
    TOMBSTONES_FILE + ".new",
)
_EXTENT_NAME = re.compile(r"extent-(?P<number>\d{5,10})\.bin")
_SHARD_NAME = re.compile(
    r"(?P<fingerprint>[0-9A-Za-z_]{1,128})-(?P<shard>\d{1,5})(?P<damaged>\.damaged-\d+)?"
)
_BUSY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMarker:
    """What a sub-directory says of itself; ``description`` is the caller's, for people.

    ``key_scheme``: how its pages' keys were made. A marker without one is older than this field. ``payload``: where
    page bytes are, "lmdb" or "extents". ``codec``: how pages were encoded at the last opening; records of any are read.
    ``readers``: how many threads read this disk best; 0: it was never asked.
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
    """Make ``path`` a home, or check that it is one, and return it resolved.

    Only a missing or empty directory becomes a home, or one whose making was cut short; ConfigError for anything
    else, which is left as it was.
    """
    try:
        home = path.expanduser().resolve()
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(home):
            if (home / HOME_MARKER).exists():
                require_home(home)
            elif any(path.name != _on_its_way(home / HOME_MARKER).name for path in home.iterdir()):
                raise _foreign(home)
            else:
                write_json(home / HOME_MARKER, {"format": "tierstore-nvme", "version": HOME_VERSION})
    except OSError as error:
        raise _unusable(path, error) from error
    return home


def require_home(home: Path) -> None:
    """ConfigError unless ``home`` carries a marker of ours. Changes nothing."""
    if not home.exists():
        raise ConfigError(
            f"nvme.path is {home}, which does not exist; allowed: a directory that TierStore made"
        )
    try:
        marker = json.loads((home / HOME_MARKER).read_text())
    except FileNotFoundError:
        if home.is_dir() and not any(home.iterdir()):
            raise ConfigError(f"{home} is empty: no store has used it yet") from None
        raise _foreign(home) from None
    except OSError as error:
        raise _unusable(home, error) from error
    except ValueError:
        raise _foreign(home) from None
    if not isinstance(marker, dict) or marker.get("format") != "tierstore-nvme":
        raise _foreign(home)
    if marker.get("version") != HOME_VERSION:
        raise ConfigError(
            f"nvme.path is {home}, of version {marker.get('version')!r}; allowed: version {HOME_VERSION}, or new"
        )


def shard_name(fingerprint: str, shard: int) -> str:
    """Name of the sub-directory. ConfigError for a fingerprint that is no plain name."""
    name = f"{fingerprint}-{shard}"
    match = _SHARD_NAME.fullmatch(name)
    if match is None or match["damaged"]:
        raise ConfigError(
            f"fingerprint {fingerprint!r}, shard {shard}; allowed: letters, digits and _; 0 to 65535"
        )
    return name


def shard_directories(home: Path) -> Iterator[tuple[Path, str, bool]]:
    """Every sub-directory of ours: path, fingerprint, whether it was set aside as damaged. Sorted by name."""
    for path in sorted(home.iterdir()):
        match = _SHARD_NAME.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            yield path, match["fingerprint"], match["damaged"] is not None


def others(directory: Path) -> list[dict[str, object]]:
    """Name, bytes on disk and whether it is damaged, of every sub-directory beside this one; none if it cannot look."""
    try:
        return [
            {"name": path.name, "nbytes": disk_nbytes(path), "damaged": damaged}
            for path, _, damaged in shard_directories(directory.parent)
            if path != directory
        ]
    except OSError:
        return []


def lock_path(directory: Path) -> Path:
    """The lock file of a sub-directory."""
    return directory.with_name(directory.name + ".lock")


def extent_path(directory: Path, number: int) -> Path:
    """The extent file of that number, from 1."""
    return directory / f"extent-{number:05}.bin"


def extent_sizes(directory: Path) -> dict[int, int]:
    """Number and length in bytes of every extent file, by number."""
    found = {}
    for path in directory.iterdir():
        match = _EXTENT_NAME.fullmatch(path.name)
        if match and path.is_file() and not path.is_symlink():
            found[int(match["number"])] = path.stat().st_size
    return dict(sorted(found.items()))


def remove_extents(directory: Path) -> None:
    """Delete every extent file. The caller holds the lock, and no catalogue names them."""
    for number in extent_sizes(directory):
        extent_path(directory, number).unlink(missing_ok=True)


def read_marker(directory: Path) -> ShardMarker | None:
    """The sub-directory's marker, or None if it has none that can be read."""
    try:
        return ShardMarker(**json.loads((directory / SHARD_MARKER).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_marker(directory: Path, marker: ShardMarker) -> None:
    """Replace the sub-directory's marker in one step."""
    write_json(directory / SHARD_MARKER, asdict(marker))


def set_aside(directory: Path) -> Path:
    """Rename a broken sub-directory out of the way and return its new path. The caller holds its lock."""
    number = 1
    while (target := directory.with_name(f"{directory.name}.damaged-{number}")).exists():
        number += 1
    directory.rename(target)
    return target


def remove(directory: Path) -> bool:
    """Delete our files in a sub-directory, and the directory if nothing else is in it. The caller holds its lock."""
    for name in _OUR_FILES:  # the catalogue first: what is cut short here has no entries without bytes
        (directory / name).unlink(missing_ok=True)
    remove_extents(directory)
    (directory / SHARD_MARKER).unlink(missing_ok=True)
    if any(directory.iterdir()):
        return False
    directory.rmdir()
    return True


def disk_nbytes(directory: Path) -> int:
    """Bytes the sub-directory takes on disk, itself included (allocated blocks, not file lengths)."""
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
    """Replace ``path`` by ``value`` as JSON, mode 0600, whole or not at all."""
    temporary = _on_its_way(path)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(value, file, default=str)
        file.flush()
        os.fsync(fd)
    temporary.replace(path)


def _is_ours(name: str) -> bool:
    return name in _OUR_FILES or name == SHARD_MARKER or _EXTENT_NAME.fullmatch(name) is not None


def _on_its_way(path: Path) -> Path:
    """What ``write_json`` writes first, and a kill or a full disk may leave behind."""
    return path.with_name(path.name + ".new")


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """One process at a time between looking for the marker and writing it."""
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
        f"nvme.path is {home}, which holds what is not TierStore's; allowed: a new, an empty or a directory it made"
    )


def _unusable(path: Path, error: OSError) -> ConfigError:
    why = "Not a directory" if isinstance(error, FileExistsError) else error.strerror or error
    return ConfigError(f"nvme.path is {path}, which cannot be used ({why}); allowed: a writable directory")
