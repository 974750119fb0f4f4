"""The control groups (of a container, a service, a user's session) that this process runs in, and their figures.

Both versions of the kernel's control groups are read, also side by side (a hybrid machine): see cgroups(7),
``Documentation/admin-guide/cgroup-v2.rst`` and ``Documentation/admin-guide/cgroup-v1/`` of Linux.
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
    """One group of one hierarchy, as a folder of small text files."""

    name: str
    """Its path in the hierarchy, as ``/proc/self/cgroup`` writes it."""
    folder: Path
    version: Version

    def number(self, file: str) -> int | None:
        """Return the number in a file, or None if it says "max", is not there or cannot be read."""
        words = self.words(file)
        return int(words[0]) if words and _is_number(words[0]) else None

    def figures(self, file: str) -> dict[str, int]:
        """Return a file of lines "name number" as a mapping, empty if it is not there or cannot be read."""
        words = self.words(file)
        pairs = zip(words[::2], words[1::2], strict=False)
        return {name: int(value) for name, value in pairs if _is_number(value)}

    def words(self, file: str) -> list[str]:
        """Return the words of a file, none if it is not there or cannot be read."""
        return _text(self.folder / file).split()


def control_groups(controller: str, root: Path = _ROOT) -> Iterator[ControlGroup]:
    """Yield the groups of this process that may limit a resource, each followed by its ancestors.

    A group whose files are not visible here (a container often sees only its own group, or only the part of the
    hierarchy below it) is yielded nevertheless: its figures read as absent. Where no mount shows the process's
    group, the mounted one stands for it.

    Args:
        controller: The controller of version 1, such as "memory" or "cpu". Version 2 has one hierarchy for all.
        root: The root of the file system; tests give another.
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
    return group.is_relative_to(top) and ".." not in group.parts  # "..": outside of the cgroup namespace


def _memberships(controller: str, root: Path) -> list[tuple[Version, PurePosixPath]]:
    """Return the groups named in ``/proc/self/cgroup``, or the top of both hierarchies if it cannot be read."""
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
    """Return version, mounted group and mount point of every hierarchy in ``/proc/self/mountinfo``.

    The usual places if that file cannot be read.
    """
    found: dict[str, tuple[Version, PurePosixPath, Path]] = {}
    lines = _text(root / "proc/self/mountinfo").splitlines()
    for line in lines:
        head, _, tail = line.partition(" - ")
        fields, kind = head.split(" "), tail.split(" ")
        if len(fields) < 5 or len(kind) < 3:
            continue
        top, point = PurePosixPath(_unescaped(fields[3])), _unescaped(fields[4])
        found.pop(point, None)  # a later mount hides one at the same place
        if kind[0] == "cgroup2":
            found[point] = 2, top, root / point.lstrip("/")
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            found[point] = 1, top, root / point.lstrip("/")
    if lines:
        return list(found.values())
    usual = root / "sys/fs/cgroup"
    return [(2, PurePosixPath("/"), usual), (1, PurePosixPath("/"), usual / controller)]


def _unescaped(text: str) -> str:
    """Return a path of mountinfo, which writes blanks and the like as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _is_number(word: str) -> bool:
    return re.fullmatch("[0-9]+", word) is not None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
