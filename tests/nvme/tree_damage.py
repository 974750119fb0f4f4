"""Changes single bytes and numbers in LMDB's data file in ways that would make LMDB crash or misbehave."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from tests.campaign.regions import BLOCK, tree_regions
from tests.nvme.rig import data_file


class Hurt:
    """The bytes of data.mdb of a closed tier. Tests change them, and ``save`` writes them back."""

    def __init__(self, home: Path) -> None:
        self._path = data_file(home)
        self.raw = bytearray(self._path.read_bytes())
        self.regions = tree_regions(bytes(self.raw), set())

    def save(self) -> None:
        self._path.write_bytes(self.raw)

    def page(self, region: str, *, branch: bool = False, index: int = 0) -> int:
        """Return the offset of a leaf or, with ``branch``, of a branch page of a region."""
        kind = 1 if branch else 2
        return [at.offset for at in self.regions[region] if self.raw[at.offset + 10] == kind][index]

    def number(self, form: str, at: int, change: Callable[[int], int]) -> None:
        struct.pack_into(form, self.raw, at, change(struct.unpack_from(form, self.raw, at)[0]))

    def node(self, page: int, index: int = 0) -> int:
        """Return the offset of a node in the page at offset ``page``."""
        [offset] = struct.unpack_from("<H", self.raw, page + 16 + 2 * index)
        return page + int(offset)

    def free(self) -> int:
        """Return the offset of a free-list record that lists at least three pages.

        Such a record contains the number of the pages, followed by their page numbers.
        """
        leaf = self.page("free list")
        for index in range((struct.unpack_from("<H", self.raw, leaf + 12)[0] - 16) // 2):
            at = self.node(leaf, index) + 8 + 8
            if struct.unpack_from("<H", self.raw, at - 12)[0] == 0 and self.raw[at] >= 3:
                return at
        raise AssertionError("no such record")

    def meta(self) -> int:
        """Return the offset of the newest meta page."""
        return max((0, BLOCK), key=lambda at: int(struct.unpack_from("<Q", self.raw, at + 144)[0]))


def _tree(hurt: Hurt, name: bytes) -> int:
    """Return the offset of the record that describes the tree ``name``."""
    leaf = hurt.page("names")
    return hurt.raw.index(name + struct.pack("<I", 0), leaf, leaf + BLOCK) + len(name)


def _exchange(hurt: Hurt) -> None:
    """Overwrite the first leaf of the catalogue with the second, except for its page number."""
    leaves = [hurt.page("catalogue", index=index) for index in (0, 1)]
    hurt.raw[leaves[0] + 10 : leaves[0] + BLOCK] = hurt.raw[leaves[1] + 10 : leaves[1] + BLOCK]


def _page(region: str, at: int, form: str, change: Callable[[int], int]) -> Callable[[Hurt], None]:
    """Return a function that changes the number at offset ``at`` of a region's first leaf."""
    return lambda hurt: hurt.number(form, hurt.page(region) + at, change)


def name_twice(hurt: Hurt, taken: int) -> None:
    """Add page ``taken``, which is in use, to a record of the free list."""
    at = hurt.free()
    count = struct.unpack_from("<Q", hurt.raw, at)[0]
    numbers = sorted({taken, *struct.unpack_from(f"<{count - 1}Q", hurt.raw, at + 16)}, reverse=True)
    struct.pack_into(f"<{len(numbers)}Q", hurt.raw, at + 8, *numbers)


DAMAGES: dict[str, tuple[Callable[[Hurt], object], str]] = {
    **{
        f"a page of the {region} {what}": (_page(region, at, form, change), "")
        for region in ("free list", "names", "catalogue", "meta")
        for what, at, form, change in (
            ("with another number", 0, "<Q", lambda n: n ^ 1),
            ("that LMDB takes for its own copy", 10, "<H", lambda n: n | 0x10),
            ("without its last node", 12, "<H", lambda n: n - 2),
            ("without any node", 12, "<H", lambda n: 16),
            ("with less in it than there is", 14, "<H", lambda n: n + 2),
            ("with a node that is elsewhere", 16, "<H", lambda n: n + 8),
        )
    },
    "a free list that names a page in use": (
        lambda hurt: name_twice(hurt, hurt.page("catalogue") // BLOCK),
        "claimed twice",
    ),
    "a free list that names a page beyond the file": (
        lambda hurt: hurt.number("<Q", hurt.free() + 8, lambda n: n + (1 << 31)),
        "beyond the end of the file",
    ),
    "a free list that is out of order": (
        lambda hurt: hurt.number("<Q", hurt.free() + 16, lambda n: n + (1 << 20)),
        "out of order",
    ),
    "a free list that names more pages than it has": (
        lambda hurt: hurt.number("<Q", hurt.free(), lambda n: n + 1000),
        "in a record of",
    ),
    "a free list that names a meta page": (
        lambda hurt: hurt.number(
            "<Q", hurt.free() + 8 * struct.unpack_from("<Q", hurt.raw, hurt.free())[0], lambda n: 1
        ),
        "claimed twice",
    ),
    "a free list of a transaction to come": (
        lambda hurt: hurt.number("<Q", hurt.free() - 8, lambda n: n + (1 << 40)),
        "",
    ),
    "a free list of other keys": (
        lambda hurt: hurt.number("<H", hurt.meta() + 16 + 24 + 4, lambda n: 0),
        "has the wrong type",
    ),
    "a tree of another kind": (
        lambda hurt: hurt.number("<H", _tree(hurt, b"catalogue") + 4, lambda n: 4),
        "has the wrong type",
    ),
    "a tree that is deeper": (
        lambda hurt: hurt.number("<H", _tree(hurt, b"catalogue") + 6, lambda n: n + 1),
        "has a header with a wrong page number, type or bound",
    ),
    "a tree with more records": (
        lambda hurt: hurt.number("<Q", _tree(hurt, b"catalogue") + 32, lambda n: n + 1),
        "but its root says",
    ),
    "a tree that is another's": (
        lambda hurt: hurt.number("<Q", _tree(hurt, b"meta") + 40, lambda n: hurt.page("catalogue") // BLOCK),
        "",
    ),
    "a tree that is no tree": (
        lambda hurt: hurt.number("<H", hurt.node(hurt.page("names")) + 4, lambda n: 0),
        "is not a tree",
    ),
    "an entry that LMDB takes for a tree": (
        lambda hurt: hurt.number("<H", hurt.node(hurt.page("catalogue"), 1) + 4, lambda n: 4),
        "has an invalid node",
    ),
    "a leaf over another": (_exchange, "out of order"),
    "a branch whose child is another's": (
        lambda hurt: hurt.number(
            "<H", hurt.node(hurt.page("catalogue", branch=True), 1), lambda n: hurt.page("meta") // BLOCK
        ),
        "",
    ),
    "a branch with another border": (
        lambda hurt: hurt.number(">Q", hurt.node(hurt.page("catalogue", branch=True), 1) + 8, lambda n: 0),
        "out of order",
    ),
}
