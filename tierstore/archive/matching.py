"""Whether pages of one description may stand for pages of another, and the first reason why not, in words."""

from __future__ import annotations

from dataclasses import fields

from tierstore.archive.form import Description
from tierstore.errors import ArchiveError
from tierstore.page import PageSpec

_ORDER = ("model", "page_size", "dtype")  # what people know their pages by, said before the rest


def require_same(found: Description, allowed: Description) -> None:
    """ArchiveError, naming what was found and what is allowed, unless the pages can stand for each other."""
    if found.key_scheme != allowed.key_scheme:
        raise ArchiveError(_says("the key scheme", found.key_scheme, allowed.key_scheme))
    ours, theirs = allowed.layout.specs, found.layout.specs
    if len(ours) != len(theirs):
        raise ArchiveError(_says("the number of KV groups", len(theirs), len(ours)))
    for number, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        difference = _difference(their, our)
        if difference is not None:
            where = f" of KV group {number}" if len(ours) > 1 else ""
            name, value, expected = difference
            raise ArchiveError(_says(f"the {name}{where}", value, expected))
    if found.loss_class != allowed.loss_class:
        raise ArchiveError(_says("the loss class", found.loss_class, allowed.loss_class))


def _difference(their: PageSpec, our: PageSpec) -> tuple[str, object, object] | None:
    for name in dict.fromkeys((*_ORDER, *(field.name for field in fields(PageSpec)))):
        if getattr(their, name) != getattr(our, name):
            return name, getattr(their, name), getattr(our, name)
    return None


def _says(what: str, found: object, allowed: object) -> str:
    return f"{what} of its pages is {found!r}; allowed here: {allowed!r}"
