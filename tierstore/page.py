"""Define a page: its geometry and identity, where its bytes lie in a slot, and memory to hold them.

A page is one contiguous blob in every tier, all layers together. With several KV groups it is one blob per group, one
after the other.

``buffer`` allocates memory for direct I/O in huge pages. With O_DIRECT the kernel hands the disk the physical address
of every memory page: 8 MiB in pages of 4 KiB are two thousand addresses, cut into many small requests, and a fast disk
then reaches a third of its throughput (docs/benchmarks/disk.md,
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
"""Dtypes that a page may have, by torch's names, and the bytes of one element."""

ALIGNMENT = 4096
"""Every blob of a page starts on this boundary in every tier, so a page is one DMA copy and one direct-I/O extent."""

LAYOUT_VERSION = 1
"""Part of every fingerprint, so that bytes of another layout are never read as this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSpec:
    """Describe the pages of one KV group on one shard: geometry and identity. All arguments are keyword-only.

    Args:
        kind: "mha" (K and V per head; also GQA and MQA), "mla" (one latent plane) or "state" (one state per page).
        num_layers: Layers of the group.
        page_size: Tokens per page.
        num_kv_heads: KV heads of this shard.
        head_dim: Elements per head.
        dtype: Torch's name of the dtype, such as "bfloat16". A ``torch.dtype`` is taken as its name.
        group: Number of the KV group, 0 to 65535.
        shard: Number of the shard (tensor parallel rank), 0 to 65535.
        model: Name of everything else that KV depends on. It must change whenever equal tokens would give other KV in
            the same shard: weights, revision, adapters, quantisation, how the model is spread over shards ("tp=4").

    Raises:
        ValueError: An argument is out of range; the message names it.
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
            raise ValueError(f"PageSpec.model must be a string, got {self.model!r}")
        if self.kind not in ("mha", "mla", "state"):
            raise ValueError(f"PageSpec.kind must be 'mha', 'mla' or 'state', got {self.kind!r}")
        if type(self.dtype).__module__ == "torch":  # a torch.dtype, whose text is "torch.bfloat16"
            object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        if self.dtype not in DTYPE_NBYTES:
            raise ValueError(
                f"PageSpec.dtype must be one of {', '.join(sorted(DTYPE_NBYTES))}, got {self.dtype!r}"
            )
        for name in ("num_layers", "page_size", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"PageSpec.{name} must be an integer of at least 1, got {value!r}")
        for name in ("group", "shard"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 16:
                raise ValueError(f"PageSpec.{name} must be an integer from 0 to 65535, got {value!r}")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape ``[num_layers, planes, tokens, num_kv_heads, head_dim]``; planes is 2 (K, V) for "mha", else 1."""
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
        """Hex digest of everything but the shard. Pages of equal fingerprints are interchangeable."""
        parts = [f"tierstore-layout-{LAYOUT_VERSION}"]
        parts += [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name != "shard"]
        digest = hashlib.sha256()
        for part in parts:
            raw = part.encode("utf-8", "surrogatepass")
            digest.update(len(raw).to_bytes(8, "little") + raw)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Geometry of one page of all KV groups; the same in every tier."""

    specs: tuple[PageSpec, ...]

    @classmethod
    def of(cls, spec: PageSpec | Sequence[PageSpec]) -> PageLayout:
        """Return the layout of one spec, or of a sequence of KV groups.

        Raises:
            ValueError: There is no spec, an item is not a PageSpec, or page_size or shard differ between groups.
        """
        given = spec if isinstance(spec, Sequence) and not isinstance(spec, str | bytes) else (spec,)
        specs = tuple(given)
        for each in specs:
            if not isinstance(each, PageSpec):
                raise ValueError(f"spec must be a PageSpec or a sequence of them, got {type(each).__name__}")
        if not specs:
            raise ValueError("spec must have at least one PageSpec, got an empty sequence")
        for name in ("page_size", "shard"):
            values = {getattr(s, name) for s in specs}
            if len(values) > 1:
                raise ValueError(f"KV groups must have the same {name}, got {sorted(values)}")
        return cls(specs)

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.specs[0].page_size

    @property
    def shard(self) -> int:
        """Number of the shard that these pages belong to."""
        return self.specs[0].shard

    @property
    def page_nbytes(self) -> int:
        """Payload bytes of a page, summed over its groups."""
        return sum(spec.page_nbytes for spec in self.specs)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offset in bytes of each group's blob in the slot."""
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
        """Distance in bytes between slots in memory."""
        return _aligned(self.blob_nbytes)

    @property
    def fingerprint(self) -> str:
        """Hex digest of all groups; a single group keeps its own. Pages of equal fingerprints are interchangeable."""
        if len(self.specs) == 1:
            return self.specs[0].fingerprint
        return sha256("\n".join(spec.fingerprint for spec in self.specs).encode()).hexdigest()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


HUGE_NBYTES = 2 << 20
"""Bytes of a huge page. Larger huge pages of other machines are multiples of it."""

_WORTH_NBYTES = 64 << 10


def buffer(nbytes: int) -> NDArray[np.uint8]:
    """Return zeroed flat memory, aligned to a memory page, and to a huge page from 64 KiB on.

    Memory is committed when it is first touched, in whole huge pages if the kernel has them (transparent_hugepage
    ``always`` or ``madvise``), and returns to the system with the last view. A forked child does not inherit it;
    otherwise a transfer in flight during a fork could end in the child's copy.
    """
    import numpy as np  # imported here, so that the geometry of pages costs no NumPy import

    huge = nbytes >= _WORTH_NBYTES
    unit = HUGE_NBYTES if huge else mmap.PAGESIZE
    length = max(1, -(-nbytes // unit)) * unit
    # Private: shared memory gets huge pages only if an administrator has enabled them.
    mapping = mmap.mmap(-1, length + (unit if huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in [mmap.MADV_DONTFORK, *([mmap.MADV_HUGEPAGE] if huge else [])]:
        with suppress(OSError):  # a kernel without huge pages
            mapping.madvise(advice)
    whole = np.frombuffer(mapping, dtype=np.uint8)
    start = -whole.ctypes.data % unit
    return whole[start : start + nbytes]
