"""A copy kernel for pages too small for DMA: a few blocks move 16 bytes a thread between HBM and mapped host memory.

The only importer of cupy. The kernel and the number of blocks are those that measured best: more blocks gain nothing on
the link and take memory bandwidth from compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierstore.gpu.segments import Segments

BLOCKS = 16
_THREADS = 1024
_VECTOR = 16

_SOURCE = r"""
extern "C" __global__ void move(const long long* at, long long vectors, long long pieces) {
    const long long all = vectors * pieces;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < all;
         i += (long long)gridDim.x * blockDim.x) {
        const long long piece = i / vectors, offset = i - piece * vectors;
        const int4* from = (const int4*)at[piece] + offset;
        int4* to = (int4*)at[pieces + piece] + offset;
        int4 v;
        asm volatile("ld.global.nc.L1::no_allocate.v4.s32 {%0,%1,%2,%3},[%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
        asm volatile("st.global.wt.v4.s32 [%0],{%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
    }
}
"""


class Kernel:
    """A route (see ``routes.Route``) for slots whose pages are one piece of a multiple of 16 bytes."""

    name = "kernel"

    def __init__(self, segments: Segments, device: torch.device) -> None:
        """ImportError without cupy. ``segments``: one, see ``suits``."""
        import cupy

        self._cupy: Any = cupy
        self._segments = segments
        self._vectors = int(segments.nbytes[0]) // _VECTOR
        self._device = device
        self._streams: dict[int, Any] = {}
        with cupy.cuda.Device(device.index):
            self._move = cupy.RawModule(code=_SOURCE, options=("--std=c++14",)).get_function("move")

    @staticmethod
    def suits(segments: Segments) -> bool:
        """Whether pages of this form can go this way."""
        return len(segments) == 1 and not any(
            int(column[0]) % _VECTOR for column in (segments.base, segments.stride, segments.nbytes)
        )

    def load(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Host to device."""
        self._launch(host, self._segments.addresses(slots).ravel(), stream)

    def save(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Device to host."""
        self._launch(self._segments.addresses(slots).ravel(), host, stream)

    def _launch(self, src: NDArray[np.int64], dst: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            # Pinned by torch, which gives the memory to nobody else before this stream has read it.
            at = torch.from_numpy(np.concatenate((src, dst))).pin_memory().to(self._device, non_blocking=True)
        foreign = self._streams.get(stream.cuda_stream)
        if foreign is None:
            foreign = self._streams[stream.cuda_stream] = _foreign(self._cupy, stream)
        with self._cupy.cuda.Device(self._device.index), foreign:
            arguments = (np.uint64(at.data_ptr()), np.int64(self._vectors), np.int64(len(src)))
            self._move((BLOCKS,), (_THREADS,), arguments)


class _Handle:
    """A stream under the CUDA stream protocol."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._handle = stream.cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


def _foreign(cupy: Any, stream: torch.cuda.Stream) -> Any:
    """torch's stream as cupy's; cupy 13 has only the older way."""
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Handle(stream))
    return cupy.cuda.ExternalStream(stream.cuda_stream)
