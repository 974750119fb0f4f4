"""The copy kernel: copies pieces in device memory to and from whole pages, in mapped host memory or in a slab.

It runs few threads, each with several vectors in flight. Together they have no more in flight than the link
can carry, because loads and stores that wait for the link delay all other memory traffic of the card. This is
the only module that imports cupy.
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
    """A launch configuration: blocks, threads per block, and vectors that a thread copies at a time."""

    blocks: int
    threads: int
    vectors: int


UP = Grid(8, 256, 4)
"""For copies from host memory: 128 KiB in flight.

Measurements show that less does not fill the link, and that more does not speed up copies but slows down
concurrent compute.
"""

DOWN = Grid(4, 256, 4)
"""For copies to host memory: 64 KiB in flight, because stores queue up behind the link."""

NEAR = Grid(16, 1024, 4)
"""For copies within device memory, which reach eight times the speed of the link."""

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

// table: base, stride and offset of each piece; pages, in host memory: the slots, then where their pages lie
// elsewhere. An item is 32 * UNROLLED vectors of a piece of a page, and a warp's; a block has items in a row, and takes
// their pages over into shared memory: each number crosses the link once.
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
    """Slots and addresses of one launch, in page-locked memory that the kernel reads directly.

    They are not uploaded, because an upload would wait for the copies that are queued on the link. The event
    ``read`` happens when the launch has ended.
    """

    memory: torch.Tensor
    read: torch.cuda.Event


@cache
def _compiled(index: int, width: int, vectors: int) -> Any:
    """Return the kernel, compiled for one card."""
    import cupy

    options = ("--std=c++14", f"-DVECTOR={_WIDTHS[width]}", f"-DUNROLLED={vectors}")
    with cupy.cuda.Device(index):
        return cupy.RawModule(code=_SOURCE, options=options).get_function("move")


class Pieces:
    """Copies the pieces of slots to and from pages at given addresses.

    It queues copies and never waits for them.

    Use one instance for each stream, because tables are reused in the order of launches.
    """

    def __init__(self, segments: Segments, device: torch.device, grid: Grid) -> None:
        """Compile the kernel for these pieces. ImportError without cupy.

        Args:
            segments: The pieces, which ``suits`` must accept. They are not read after the call.
            device: The card.
            grid: The launch configuration.
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
        """Return whether the kernel can copy pages of these pieces at a good speed."""
        return segments is not None and addresses.in_equal_pieces(segments) is not None

    def scatter(self, slots: NDArray[np.int64], pages: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Queue copies from the pages at these addresses into the slots."""
        self._launch(slots, pages, 1, stream)

    def gather(self, slots: NDArray[np.int64], pages: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Queue copies from the slots to the pages at these addresses."""
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
        """Return the oldest table, or a new one if a launch still reads that table or it is too short."""
        if self._tables and self._tables[0].read.query():  # type: ignore[no-untyped-call]
            table = self._tables.popleft()
            if len(table.memory) >= entries:
                return table
        length = 1 << max(9, (entries - 1).bit_length())
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return _Table(torch.empty(length, dtype=torch.int64, pin_memory=True), event)


class _Handle:
    """Offers a torch stream through the CUDA stream protocol."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._handle = stream.cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


def _foreign(cupy: Any, stream: torch.cuda.Stream) -> Any:
    """Return torch's stream as a cupy stream. Cupy 13 has only the older constructor."""
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Handle(stream))
    return cupy.cuda.ExternalStream(stream.cuda_stream)
