"""The format of a page: its geometry and identity, its layout in a slot, and memory aligned for direct I/O.

In every tier, the page of one KV group is one contiguous blob that contains all layers. A page with several
KV groups consists of one blob per group, one after the other.

``buffer`` allocates memory for direct I/O in huge pages. With O_DIRECT, the kernel passes the physical
address of every memory page to the disk. A transfer of 8 MiB in 4 KiB memory pages has two thousand addresses.
The kernel splits it into many small requests, so a fast disk reaches only a third of its throughput
(docs/benchmarks/disk.md, "Memory that a disk reads into").
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
"""Size in bytes of one element of each supported dtype, by the dtype's name in torch."""

ALIGNMENT = 4096
"""Alignment in bytes of every blob of a page, in every tier.

With this alignment, a single DMA copy or a single direct-I/O request can transfer a page.
"""

LAYOUT_VERSION = 1
"""Version of the page layout.

It is part of every fingerprint, so pages that were written with another version are never found.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSpec:
    """The geometry and identity of the pages of one KV group on one shard. All arguments are keyword-only.

    Args:
        kind: "mha": K and V per head, as in MHA, GQA and MQA. "mla": one latent plane. "state": one recurrent
            state per page instead of one entry per token.
        num_layers: Number of layers in the group.
        page_size: Number of tokens per page.
        num_kv_heads: Number of KV heads on this shard.
        head_dim: Number of elements per head.
        dtype: Name of the dtype in torch, such as "bfloat16", or a ``torch.dtype``.
        group: Number of the KV group, 0 to 65535.
        shard: Number of the shard (tensor parallel rank), 0 to 65535.
        model: A name for everything else that K and V depend on: weights, revision, adapters, quantization,
            and how the model is split into shards ("tp=4"). Use another name whenever equal tokens would give
            different K or V on the same shard.

    Raises:
        ValueError: An argument is out of range. The message names it.
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
        if not self.model.strip():
            raise ValueError(
                f"PageSpec.model must name the model and its revision, got {self.model!r}; pages of two unnamed "
                "models could not be told apart"
            )
        if self.kind not in ("mha", "mla", "state"):
            raise ValueError(f"PageSpec.kind must be 'mha', 'mla' or 'state', got {self.kind!r}")
        if type(self.dtype).__module__ == "torch":  # a torch.dtype; its str() is "torch.bfloat16"
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
        """Shape ``[num_layers, planes, tokens, num_kv_heads, head_dim]`` of a page.

        ``planes`` is 2 (K and V) for "mha", else 1. ``tokens`` is 1 for "state", else ``page_size``.
        """
        planes = 2 if self.kind == "mha" else 1
        tokens = 1 if self.kind == "state" else self.page_size
        return (self.num_layers, planes, tokens, self.num_kv_heads, self.head_dim)

    @property
    def page_nbytes(self) -> int:
        """Size in bytes of one unencoded page of this group."""
        return prod(self.shape) * DTYPE_NBYTES[self.dtype]

    @property
    def layer_nbytes(self) -> int:
        """Size in bytes of one layer of an unencoded page."""
        return self.page_nbytes // self.num_layers

    @property
    def fingerprint(self) -> str:
        """Hex digest of all fields except ``shard``.

        Specs with equal fingerprints describe pages of the same model in the same layout.
        """
        parts = [f"tierstore-layout-{LAYOUT_VERSION}"]
        parts += [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name != "shard"]
        digest = hashlib.sha256()
        for part in parts:
            raw = part.encode("utf-8", "surrogatepass")
            digest.update(len(raw).to_bytes(8, "little") + raw)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The layout of one page in a slot, with all its KV groups. It is the same in every tier."""

    specs: tuple[PageSpec, ...]

    @classmethod
    def of(cls, spec: PageSpec | Sequence[PageSpec]) -> PageLayout:
        """Return the layout of pages with one KV group, or with a sequence of KV groups.

        Raises:
            ValueError: ``spec`` is empty, an item is not a PageSpec, or the groups differ in ``page_size`` or
                ``shard``.
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
                raise ValueError(
                    f"all KV groups must have the same {name}, got {', '.join(map(str, sorted(values)))}"
                )
        return cls(specs)

    @property
    def page_size(self) -> int:
        """Number of tokens per page."""
        return self.specs[0].page_size

    @property
    def shard(self) -> int:
        """Number of the shard that the pages belong to."""
        return self.specs[0].shard

    @property
    def page_nbytes(self) -> int:
        """Size in bytes of an unencoded page: the sum of its groups, without the gaps between blobs."""
        return sum(spec.page_nbytes for spec in self.specs)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offset in bytes of each group's blob from the start of the slot."""
        starts = [0]
        for spec in self.specs[:-1]:
            starts.append(_aligned(starts[-1] + spec.page_nbytes))
        return tuple(starts)

    @property
    def blob_nbytes(self) -> int:
        """Size in bytes of the part of a slot that is copied: from its start to the end of the last blob."""
        return self.offsets[-1] + self.specs[-1].page_nbytes

    @property
    def slot_nbytes(self) -> int:
        """Distance in bytes between consecutive slots in memory."""
        return _aligned(self.blob_nbytes)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of a single group, or a hex digest of the fingerprints of several groups.

        Layouts with equal fingerprints describe pages of the same model in the same layout.
        """
        if len(self.specs) == 1:
            return self.specs[0].fingerprint
        return sha256("\n".join(spec.fingerprint for spec in self.specs).encode()).hexdigest()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


HUGE_NBYTES = 2 << 20
"""Size of a huge page in bytes. Where huge pages are larger, their size is a multiple of this one."""

_WORTH_NBYTES = 64 << 10


def buffer(nbytes: int) -> NDArray[np.uint8]:
    """Allocate a zeroed uint8 array of ``nbytes`` bytes for direct I/O.

    The array starts at the beginning of a memory page or, if it has at least 64 KiB, of a huge page. The kernel
    provides the memory when it is first touched, in whole huge pages if transparent huge pages are enabled
    (``always`` or ``madvise``). The memory is freed when the last view is gone. A forked child process does not
    inherit it. Otherwise a transfer in flight during the fork could write to the child's copy instead of the
    parent's.
    """
    import numpy as np  # imported here, so that code that needs only the geometry does not import NumPy

    huge = nbytes >= _WORTH_NBYTES
    unit = HUGE_NBYTES if huge else mmap.PAGESIZE
    length = max(1, -(-nbytes // unit)) * unit
    # Private, because a shared mapping gets huge pages only if an administrator has enabled them.
    mapping = mmap.mmap(-1, length + (unit if huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in [mmap.MADV_DONTFORK, *([mmap.MADV_HUGEPAGE] if huge else [])]:
        with suppress(OSError):  # the kernel does not support huge pages
            mapping.madvise(advice)
    whole = np.frombuffer(mapping, dtype=np.uint8)
    start = -whole.ctypes.data % unit
    return whole[start : start + nbytes]
