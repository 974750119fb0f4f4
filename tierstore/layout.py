"""Where the bytes of a page's KV groups lie in its slot: one blob a group, one after the other. Derived values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from tierstore.types import ALIGNMENT, PageSpec


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The geometry of one page of all KV groups; the same in every tier."""

    specs: tuple[PageSpec, ...]

    @classmethod
    def of(cls, spec: PageSpec | Sequence[PageSpec]) -> PageLayout:
        """ValueError unless there is at least one spec, each is one, and all have one page_size and one shard."""
        given = spec if isinstance(spec, Sequence) and not isinstance(spec, str | bytes) else (spec,)
        specs = tuple(given)
        for each in specs:
            if not isinstance(each, PageSpec):
                raise ValueError(
                    f"spec is a {type(each).__name__}; allowed: a PageSpec, or a sequence of them"
                )
        if not specs:
            raise ValueError("spec is empty; allowed: a PageSpec, or a sequence of at least one")
        for name in ("page_size", "shard"):
            values = {getattr(s, name) for s in specs}
            if len(values) > 1:
                raise ValueError(f"KV groups have {name} {sorted(values)}; allowed: one value for all groups")
        return cls(specs)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.specs[0].page_size

    @property
    def shard(self) -> int:
        """The shard these pages belong to."""
        return self.specs[0].shard

    @property
    def page_nbytes(self) -> int:
        """Payload bytes of a page: the sum over its groups."""
        return sum(spec.page_nbytes for spec in self.specs)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each group's blob starts in the slot."""
        starts = [0]
        for spec in self.specs[:-1]:
            starts.append(_aligned(starts[-1] + spec.page_nbytes))
        return tuple(starts)

    @property
    def blob_nbytes(self) -> int:
        """Bytes from the start of the slot to the end of the last blob: what is copied and stored."""
        return self.offsets[-1] + self.specs[-1].page_nbytes

    @property
    def slot_nbytes(self) -> int:
        """Distance between slots in memory."""
        return _aligned(self.blob_nbytes)

    @property
    def fingerprint(self) -> str:
        """Hex digest; equal ones mean interchangeable pages. A single group keeps its own fingerprint."""
        if len(self.specs) == 1:
            return self.specs[0].fingerprint
        return sha256("\n".join(spec.fingerprint for spec in self.specs).encode()).hexdigest()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
