"""What a page is: its geometry and identity, where its bytes lie in a slot, and memory for them.

A page is one contiguous blob in every tier, all layers together; with KV groups one blob a group, one after the
other.

``buffer`` gives memory that pages are read into and written from, in huge pages. Past the page cache a disk is
given the addresses of a transfer page by page. From pages of 4 KiB that is two thousand for 8 MiB, which are cut
into many small requests: a fast disk then gives a third of what it gives into huge pages (docs/benchmarks/disk.md,
"Memory that a disk reads into").
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from hashlib import sha256
from math import prod
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DTYPE_NBYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""The dtypes a page may have, by torch's names, and the bytes of one element."""

ALIGNMENT = 4096
"""Every blob of a page starts on this boundary, in every tier: a page is one DMA, one direct-I/O extent."""

LAYOUT_VERSION = 1
"""Part of every fingerprint: bytes of another layout are never read as this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSpec:
    """Geometry and identity of the pages of one KV group on one shard.

    ``kind``: "mha" (K and V per head; also GQA and MQA), "mla" (one latent plane) or "state" (one state a
    page). ``dtype`` is torch's name of it. ``model`` must change whenever equal tokens would give other KV in the same
    shard: weights, revision, adapters, quantisation, and how the model is spread over its shards ("tp=4").
    """

    kind: Literal["mha", "mla", "state"] = "mha"
    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    group: int = 0
    shard: int = 0
    model: str

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):
            raise ValueError(f"PageSpec.model is {self.model!r}; allowed: a string")
        if self.kind not in ("mha", "mla", "state"):
            raise ValueError(f"PageSpec.kind is {self.kind!r}; allowed: 'mha', 'mla', 'state'")
        if self.dtype not in DTYPE_NBYTES:
            raise ValueError(f"PageSpec.dtype is {self.dtype!r}; allowed: {', '.join(sorted(DTYPE_NBYTES))}")
        for name in ("num_layers", "page_size", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"PageSpec.{name} is {value!r}; allowed: an integer of at least 1")
        for name in ("group", "shard"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 16:
                raise ValueError(f"PageSpec.{name} is {value!r}; allowed: an integer of 0 to 65535")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """``[num_layers, planes, tokens, num_kv_heads, head_dim]``; planes is 2 (K, V) for "mha", else 1."""
        planes = 2 if self.kind == "mha" else 1
        tokens = 1 if self.kind == "state" else self.page_size
        return (self.num_layers, planes, tokens, self.num_kv_heads, self.head_dim)

    @property
    def page_nbytes(self) -> int:
        """Payload bytes of one page."""
        return prod(self.shape) * DTYPE_NBYTES[self.dtype]

    @property
    def layer_nbytes(self) -> int:
        """Payload bytes of one layer of one page."""
        return self.page_nbytes // self.num_layers

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything but the shard: equal fingerprints mean interchangeable bytes."""
        parts = [f"tierstore-layout-{LAYOUT_VERSION}"]
        parts += [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name != "shard"]
        digest = hashlib.sha256()
        for part in parts:
            raw = part.encode("utf-8", "surrogatepass")
            digest.update(len(raw).to_bytes(8, "little") + raw)
        return digest.hexdigest()


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


HUGE_NBYTES = 2 << 20
"""Of a huge page; larger ones of other machines are multiples of it."""

_WORTH_NBYTES = 64 << 10


def buffer(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed flat memory of its own, on a page boundary, and on that of a huge page from 64 KiB on.

    Untouched it costs nothing; touched, whole huge pages where the kernel has them (transparent_hugepage ``always`` or
    ``madvise``). It returns to the system with the last view. A forked child has no such memory: else a transfer under
    way while a process forks could go to the child's copy.
    """
    import numpy as np  # here: who wants only the geometry of pages loads nothing heavy

    huge = nbytes >= _WORTH_NBYTES
    unit = HUGE_NBYTES if huge else mmap.PAGESIZE
    length = max(1, -(-nbytes // unit)) * unit
    # Private: shared memory has huge pages only where an administrator gave it some.
    mapping = mmap.mmap(-1, length + (unit if huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in [mmap.MADV_DONTFORK, *([mmap.MADV_HUGEPAGE] if huge else [])]:
        with suppress(OSError):  # a kernel without huge pages
            mapping.madvise(advice)
    whole = np.frombuffer(mapping, dtype=np.uint8)
    start = -whole.ctypes.data % unit
    return whole[start : start + nbytes]
