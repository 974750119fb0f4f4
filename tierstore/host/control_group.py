"""The control groups (cgroups) of this process, and the values in their files.

A control group limits the resources of a container, a service or a user session. Both versions of the kernel
interface are supported, even on a machine that uses both. See cgroups(7), and
``Documentation/admin-guide/cgroup-v2.rst`` and ``Documentation/admin-guide/cgroup-v1/`` in the Linux source.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

Version = Literal[1, 2]

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A control group in one hierarchy: a directory of small text files."""

    name: str
    """Path of the group in its hierarchy, as written in ``/proc/self/cgroup``."""
    folder: Path
    version: Version

    def number(self, file: str) -> int | None:
        """Return the number in a file, or None if it contains "max", does not exist or cannot be read."""
        words = self.words(file)
        return int(words[0]) if words and _is_number(words[0]) else None

    def figures(self, file: str) -> dict[str, int]:
        """Return the numbers in a file with lines of the form "name number", by name.

        The result is empty if the file cannot be read.
        """
        words = self.words(file)
        pairs = zip(words[::2], words[1::2], strict=False)
        return {name: int(value) for name, value in pairs if _is_number(value)}

    def words(self, file: str) -> list[str]:
        """Return the words of a file, or [] if the file cannot be read."""
        return _text(self.folder / file).split()


def control_groups(controller: str, root: Path = _ROOT) -> Iterator[ControlGroup]:
    """Yield the groups of this process that may limit a resource, each followed by its ancestors.

    A container often sees only its own group and the groups below. A group whose files are not visible is
    yielded nevertheless, and reads as if its files did not exist. If no mount contains the process's group, the
    group at the top of each mount is yielded instead.

    Args:
        controller: Name of the version 1 controller, such as "memory" or "cpu". Version 2 has one hierarchy
            for all controllers.
        root: Root of the file system. Tests pass another directory.
    """
    mounts = _mounts(controller, root)
    for version, group in _memberships(controller, root):
        places = [(top, point) for kind, top, point in mounts if kind == version]
        showing = [(top, point) for top, point in places if _shows(top, group)]
        for top, point in showing or places:
            parts = group.relative_to(top).parts if showing else ()
            for length in range(len(parts), -1, -1):
                name = top.joinpath(*parts[:length])
                yield ControlGroup(str(name), point.joinpath(*parts[:length]), version)


def _shows(top: PurePosixPath, group: PurePosixPath) -> bool:
    return group.is_relative_to(top) and ".." not in group.parts  # "..": outside the cgroup namespace


def _memberships(controller: str, root: Path) -> list[tuple[Version, PurePosixPath]]:
    """Return the groups named in ``/proc/self/cgroup``, or the root groups if it cannot be read."""
    found: list[tuple[Version, PurePosixPath]] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found.append((2, PurePosixPath(path)))
        elif controller in controllers.split(","):
            found.append((1, PurePosixPath(path)))
    return found or [(2, PurePosixPath("/")), (1, PurePosixPath("/"))]


def _mounts(controller: str, root: Path) -> list[tuple[Version, PurePosixPath, Path]]:
    """Return the version, mounted group and mount point of every hierarchy in ``/proc/self/mountinfo``.

    The usual mount points are returned if that file cannot be read.
    """
    found: dict[str, tuple[Version, PurePosixPath, Path]] = {}
    lines = _text(root / "proc/self/mountinfo").splitlines()
    for line in lines:
        head, _, tail = line.partition(" - ")
        fields, kind = head.split(" "), tail.split(" ")
        if len(fields) < 5 or len(kind) < 3:
            continue
        top, point = PurePosixPath(_unescaped(fields[3])), _unescaped(fields[4])
        found.pop(point, None)  # a later mount hides an earlier one at the same mount point
        if kind[0] == "cgroup2":
            found[point] = 2, top, root / point.lstrip("/")
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            found[point] = 1, top, root / point.lstrip("/")
    if lines:
        return list(found.values())
    usual = root / "sys/fs/cgroup"
    return [(2, PurePosixPath("/"), usual), (1, PurePosixPath("/"), usual / controller)]


def _unescaped(text: str) -> str:
    """Decode a path from mountinfo, where spaces and some other characters are written as octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _is_number(word: str) -> bool:
    return re.fullmatch("[0-9]+", word) is not None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
