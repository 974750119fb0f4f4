"""A CUDA kernel that copies pages between slots, in which pages consist of pieces, and contiguous memory.

The contiguous memory is mapped host memory or a slab. The kernel runs few threads, each with several vectors
in flight. Together they have just enough bytes in flight to saturate the link. More would be harmful, because
loads and stores that wait for the link delay all other memory traffic on the GPU. This is the only module that
imports cupy.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from tierstore.gpu import addresses

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierstore.gpu.addresses import Segments

_MOST_ITEMS = 1 << 31
_WIDTHS = {16: "int4", 8: "int2", 4: "int", 2: "short", 1: "char"}


class Grid(NamedTuple):
    """A launch configuration: the numbers of blocks, of threads per block, and of vectors in flight per thread."""

    blocks: int
    threads: int
    vectors: int


UP = Grid(8, 256, 4)
"""Configuration for copies from host memory, with 128 KiB in flight.

Measurements show that fewer bytes in flight do not saturate the link. More bytes do not speed up copies, but
slow down concurrent compute.
"""

DOWN = Grid(4, 256, 4)
"""Configuration for copies to host memory. Only 64 KiB are in flight, because stores queue up at the link."""

NEAR = Grid(16, 1024, 4)
"""Configuration for copies within device memory, which run at eight times the speed of the link."""

_SOURCE = r"""
typedef unsigned long long u64;
#define TABLE 1024

template <typename T> __device__ __forceinline__ T read(const T* at) { return *at; }
template <typename T> __device__ __forceinline__ void write(T* at, T v) { *at = v; }
template <> __device__ __forceinline__ int4 read<int4>(const int4* at) {
    int4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.s32 {%0,%1,%2,%3},[%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}
template <> __device__ __forceinline__ void write<int4>(int4* at, int4 v) {
    asm volatile("st.global.wt.v4.s32 [%0],{%1,%2,%3,%4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}

// table: the bases, then the strides, then the offsets of the pieces. pages, in host memory: the slots, then the
// addresses of the contiguous pages. A work item is 32 * UNROLLED vectors of one piece of one page, copied by one warp.
// A block copies consecutive items. It first reads the entries of their pages into shared memory, so that each entry
// is transferred over the link only once per block.
extern "C" __global__ void move(const long long* __restrict__ table, const long long* pages, unsigned pieces,
                                unsigned number, unsigned vectors, unsigned parts, unsigned inward) {
    __shared__ long long slot[TABLE], far[TABLE];
    const unsigned lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const unsigned each = pieces * parts;
    const u64 all = (u64)number * each;
    u64 begin = all * blockIdx.x / gridDim.x;
    const u64 end = all * (blockIdx.x + 1) / gridDim.x;
    while (begin < end) {
        const unsigned first = (unsigned)(begin / each), last = (unsigned)((end - 1) / each);
        const unsigned here = last - first < TABLE ? last - first + 1 : TABLE;
        __syncthreads();
        for (unsigned i = threadIdx.x; i < here; i += blockDim.x) {
            slot[i] = pages[first + i];
            far[i] = pages[number + first + i];
        }
        __syncthreads();
        const u64 known = (u64)(first + here) * each, stop = known < end ? known : end;
        for (unsigned item = (unsigned)begin + warp; item < stop; item += warps) {
            const unsigned rest = item / parts, page = rest / pieces, piece = rest - page * pieces;
            const long long near = table[piece] + slot[page - first] * table[pieces + piece];
            const long long away = far[page - first] + table[2 * pieces + piece];
            const VECTOR* from = (const VECTOR*)(inward ? away : near);
            VECTOR* to = (VECTOR*)(inward ? near : away);
            const unsigned at = (item - rest * parts) * (32 * UNROLLED) + lane;
            VECTOR v[UNROLLED];
#pragma unroll
            for (unsigned u = 0; u < UNROLLED; ++u)
                if (at + 32 * u < vectors) v[u] = read(from + at + 32 * u);
#pragma unroll
            for (unsigned u = 0; u < UNROLLED; ++u)
                if (at + 32 * u < vectors) write(to + at + 32 * u, v[u]);
        }
        begin = stop;
    }
}
"""


@dataclass(slots=True)
class _Table:
    """The slots and addresses for one launch, in pinned memory that the kernel reads directly.

    The table is not uploaded, because an upload would wait behind the copies queued on the link. ``read`` is
    an event that completes with the launch; only then may the memory be reused.
    """

    memory: torch.Tensor
    read: torch.cuda.Event


@cache
def _compiled(index: int, width: int, vectors: int) -> Any:
    """Return the kernel for GPU ``index``, compiled for ``vectors`` vectors of ``width`` bytes per thread."""
    import cupy

    options = ("--std=c++14", f"-DVECTOR={_WIDTHS[width]}", f"-DUNROLLED={vectors}")
    with cupy.cuda.Device(index):
        return cupy.RawModule(code=_SOURCE, options=options).get_function("move")


class Pieces:
    """Copies pages between slots, in which pages consist of pieces, and buffers, in which pages are contiguous.

    Methods queue copies and return without waiting for them. Use each instance with one stream only, because
    tables are reused in launch order.
    """

    def __init__(self, segments: Segments, device: torch.device, grid: Grid) -> None:
        """Compile the kernel for these pieces.

        Args:
            segments: The pieces. ``suits`` must accept them. The arrays are not read after this call.
            device: The GPU.
            grid: The launch configuration.

        Raises:
            ImportError: cupy is not installed.
        """
        import cupy

        self._cupy: Any = cupy
        equal = addresses.in_equal_pieces(segments)
        assert equal is not None
        width = addresses.alignment(equal)
        self._number = len(equal)
        self._vectors = int(equal.nbytes[0]) // width
        self._parts = -(-self._vectors // (32 * grid.vectors))
        self._grid = grid
        self._device = device
        columns = np.concatenate((equal.base, equal.stride, equal.offset))
        self._segments = torch.from_numpy(columns).to(device)
        self._tables: deque[_Table] = deque()
        self._streams: dict[int, Any] = {}
        self._move = _compiled(device.index, width, grid.vectors)

    @staticmethod
    def suits(segments: Segments | None) -> bool:
        """Return whether the kernel is suited to these pieces. False for None, which stands for too many pieces."""
        return segments is not None and addresses.in_equal_pieces(segments) is not None

    def scatter(self, slots: NDArray[np.int64], pages: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Queue copies from the pages at the addresses ``pages`` into the slots."""
        self._launch(slots, pages, 1, stream)

    def gather(self, slots: NDArray[np.int64], pages: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Queue copies from the slots to the pages at the addresses ``pages``."""
        self._launch(slots, pages, 0, stream)

    def _launch(
        self, slots: NDArray[np.int64], pages: NDArray[np.int64], inward: int, stream: torch.cuda.Stream
    ) -> None:
        most = _MOST_ITEMS // (self._number * self._parts)
        for start in range(0, len(slots), most):
            self._queue(slots[start : start + most], pages[start : start + most], inward, stream)

    def _queue(
        self, slots: NDArray[np.int64], pages: NDArray[np.int64], inward: int, stream: torch.cuda.Stream
    ) -> None:
        number = len(slots)
        table = self._table(2 * number)
        filled = table.memory.numpy()
        filled[:number], filled[number : 2 * number] = slots, pages
        items = number * self._number * self._parts
        sizes = (self._number, number, self._vectors, self._parts, inward)
        arguments = (np.uint64(self._segments.data_ptr()), np.uint64(table.memory.data_ptr()))
        blocks = min(self._grid.blocks, -(-items * 32 // self._grid.threads))
        foreign = self._streams.get(stream.cuda_stream)
        if foreign is None:
            foreign = self._streams[stream.cuda_stream] = _foreign(self._cupy, stream)
        with self._cupy.cuda.Device(self._device.index), foreign:
            self._move((blocks,), (self._grid.threads,), (*arguments, *map(np.uint32, sizes)))
        table.read.record(stream)
        self._tables.append(table)

    def _table(self, entries: int) -> _Table:
        """Return a table that no launch is using and that has space for at least ``entries`` entries.

        Reuse the oldest table if its launch is complete and it is long enough, else allocate a new one.
        """
        if self._tables and self._tables[0].read.query():  # type: ignore[no-untyped-call]
            table = self._tables.popleft()
            if len(table.memory) >= entries:
                return table
        length = 1 << max(9, (entries - 1).bit_length())
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return _Table(torch.empty(length, dtype=torch.int64, pin_memory=True), event)


class _Handle:
    """Exposes a torch stream through the ``__cuda_stream__`` protocol."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._handle = stream.cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


def _foreign(cupy: Any, stream: torch.cuda.Stream) -> Any:
    """Wrap a torch stream as a cupy stream. CuPy 13 has no ``from_external``, so use ``ExternalStream`` there."""
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Handle(stream))
    return cupy.cuda.ExternalStream(stream.cuda_stream)
