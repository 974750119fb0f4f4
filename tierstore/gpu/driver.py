"""CUDA driver calls that torch does not expose: batched copies, low-priority streams, and pinning of host memory.

``has_happened`` queries an event safely during CUDA graph capture. This is the only module that imports
cuda-bindings. Addresses are passed as int64 arrays, never as Python lists.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch

from tierstore.types import exact_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_BATCH_VERSION = 13000
_TOGETHER = 512
"""Maximum number of copies per driver call.

The driver needs about 1 us to process each copy, and starts the first one only after it has processed all of them.
"""
_REGISTER_PORTABLE_AND_MAPPED = 3
_NON_BLOCKING = 1

CopyCall = Literal["batch", "each"]


class DriverError(RuntimeError):
    """A CUDA driver call failed."""


class Driver:
    """The CUDA driver API for one device. Thread-safe; preserves the calling thread's current device."""

    def __init__(self, index: int) -> None:
        """Open device ``index``.

        Raises:
            ImportError: cuda-bindings is not installed.
            DriverError: The device cannot be opened.
        """
        from cuda.bindings import driver

        self._api: Any = driver
        self._index = index
        torch.zeros(1, device=f"cuda:{index}")  # makes torch create the device's context
        (device,) = self._done(driver.cuDeviceGet(index))
        (self._context,) = self._done(driver.cuDevicePrimaryCtxRetain(device))
        self._attributes = driver.CUmemcpyAttributes()
        self._attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        self._first = np.zeros(1, dtype=np.uint64)
        self._batch = batch_call(driver)
        self.call: CopyCall = "each" if self._batch is None else "batch"
        """How ``copy`` calls the driver: ``batch`` for many pieces per call, ``each`` for one piece per call.
        """

    def stream(self, index: int) -> torch.cuda.Stream:
        """Create a non-blocking stream with the lowest priority on device ``index``. It is never destroyed."""
        with self._current():
            (lowest, _) = self._done(self._api.cuCtxGetStreamPriorityRange())
            (handle,) = self._done(self._api.cuStreamCreateWithPriority(_NON_BLOCKING, lowest))
        device = f"cuda:{index}"
        return torch.cuda.ExternalStream(int(handle), device=device)  # type: ignore[no-untyped-call]

    def all_work(self) -> torch.cuda.Event:
        """Return an event that completes after all work launched on the device so far, on any stream.

        Raises:
            RuntimeError: The driver is older than 12.5, or a CUDA graph is being captured, in which case the
                capture fails too.
        """
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with self._current():
            event.record(torch.cuda.current_stream(self._index))  # creates the event's CUDA handle
            self._done(self._api.cuCtxRecordEvent(self._context, event.cuda_event))
        return event

    def copy(
        self,
        dst: NDArray[np.int64],
        src: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        stream: torch.cuda.Stream,
    ) -> None:
        """Queue ``len(dst)`` copies between device memory and pinned host memory. They may run in any order.

        The arrays are not read after this call.

        Args:
            dst: Destination addresses, int64, contiguous.
            src: Source addresses, int64, contiguous.
            nbytes: Length of each copy in bytes, int64, contiguous.
            stream: The stream to queue the copies on.

        Raises:
            DriverError: A driver call failed. Some of the copies may have been queued.
        """
        if not len(dst):
            return
        with self._current():
            if self._batch is None:
                for to, at, length in zip(dst.tolist(), src.tolist(), nbytes.tolist(), strict=True):
                    self._done(self._api.cuMemcpyAsync(to, at, length, stream.cuda_stream))
                return
            for start in range(0, len(dst), _TOGETHER):
                part = slice(start, start + _TOGETHER)
                self._queue(self._batch, dst[part], src[part], nbytes[part], stream)

    def _queue(
        self,
        batch: Any,
        dst: NDArray[np.int64],
        src: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        stream: torch.cuda.Stream,
    ) -> None:
        code = batch(
            dst.ctypes.data,
            src.ctypes.data,
            nbytes.ctypes.data,
            len(dst),
            self._attributes.getPtr(),
            self._first.ctypes.data,
            1,
            stream.cuda_stream,
        )
        if code:
            raise DriverError(f"cuMemcpyBatchAsync of {len(dst)} pieces failed with error {code}")

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._done(self._api.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            self._done(self._api.cuCtxPopCurrent())

    def _done(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        if int(result[0]):
            raise DriverError(f"a CUDA driver call failed: {result[0]}")
        return result[1:]


def batch_call(api: Any) -> Any:
    """Return ``cuMemcpyBatchAsync``, or None if the driver does not provide it.

    ``api`` is the driver module of cuda-bindings. The function is called through ctypes, because the bindings
    require a list of Python objects for each argument.
    """
    if not hasattr(api, "cuGetProcAddress"):
        return None
    error, address, _ = api.cuGetProcAddress(b"cuMemcpyBatchAsync", _BATCH_VERSION, 0)
    if int(error) or not address:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    kind = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer)
    return kind(int(address))


class CudaPinner:
    """Pins host memory with cudaHostRegister and maps it into a device's address space."""

    def __init__(self, index: int) -> None:
        self._index = index

    def pin(self, address: int, nbytes: int) -> None:
        """Pin a range of host memory. May take seconds.

        Raises:
            OSError: CUDA refused to register the range.
        """
        with torch.cuda.device(self._index):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = int(runtime.cudaHostRegister(address, nbytes, _REGISTER_PORTABLE_AND_MAPPED))
        if code:
            raise OSError(f"cudaHostRegister of {exact_size(nbytes)} failed with error {code}")

    def unpin(self, address: int) -> None:
        """Unpin the range that was pinned at ``address``."""
        with torch.cuda.device(self._index):
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


_REFUSED = range(900, 909)
"""The error codes ``cudaErrorStreamCapture...``.

During a graph capture, CUDA rejects event queries with one of these codes, although the event has not failed.
"""


class Asked(Protocol):
    """An event whose completion can be queried."""

    def query(self) -> bool:
        """Return whether the event has completed. Never blocks."""
        ...


def has_happened(event: Asked) -> bool:
    """Return whether the event is known to have completed.

    Events cannot be queried during CUDA graph capture; the result is then False.

    Raises:
        RuntimeError: The device has failed.
    """
    try:
        return event.query()
    except torch.AcceleratorError as error:
        if getattr(error, "error_code", None) in _REFUSED:
            return False
        raise
