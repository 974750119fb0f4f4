"""CUDA driver calls that torch does not offer: many copies in one call, low-priority streams, page-locking.

``has_happened`` queries an event safely while a CUDA graph is captured. This is the only module that imports
cuda-bindings. Addresses are passed as int64 arrays, never as Python lists.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_BATCH_VERSION = 13000
_TOGETHER = 512
"""Most copies in one call. The first copy begins only when the driver has processed all, 1 us for each."""
_REGISTER_PORTABLE_AND_MAPPED = 3
_NON_BLOCKING = 1

CopyCall = Literal["batch", "each"]


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


class Driver:
    """The driver of one device. Any thread may call it; the thread's current device is left unchanged."""

    def __init__(self, index: int) -> None:
        """Open device ``index``. ImportError without cuda-bindings, DriverError if the device fails."""
        from cuda.bindings import driver

        self._api: Any = driver
        self._index = index
        torch.zeros(1, device=f"cuda:{index}")  # torch makes the device's context
        (device,) = self._done(driver.cuDeviceGet(index))
        (self._context,) = self._done(driver.cuDevicePrimaryCtxRetain(device))
        self._attributes = driver.CUmemcpyAttributes()
        self._attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        self._first = np.zeros(1, dtype=np.uint64)
        self._batch = batch_call(driver)
        self.call: CopyCall = "each" if self._batch is None else "batch"
        """``batch`` if ``copy`` gives the driver many pieces in one call, ``each`` if one piece per call."""

    def stream(self, index: int) -> torch.cuda.Stream:
        """Return a new non-blocking stream of the lowest priority. It lives as long as the process."""
        with self._current():
            (lowest, _) = self._done(self._api.cuCtxGetStreamPriorityRange())
            (handle,) = self._done(self._api.cuStreamCreateWithPriority(_NON_BLOCKING, lowest))
        device = f"cuda:{index}"
        return torch.cuda.ExternalStream(int(handle), device=device)  # type: ignore[no-untyped-call]

    def all_work(self) -> torch.cuda.Event:
        """Return an event after all work launched on the device so far, on any stream.

        RuntimeError if the driver is older than 12.5. RuntimeError also while a CUDA graph is captured, and
        the capture fails too.
        """
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with self._current():
            event.record(torch.cuda.current_stream(self._index))  # torch creates the event only now
            self._done(self._api.cuCtxRecordEvent(self._context, event.cuda_event))
        return event

    def copy(
        self,
        dst: NDArray[np.int64],
        src: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        stream: torch.cuda.Stream,
    ) -> None:
        """Queue ``len(dst)`` copies between device and page-locked host memory, in any order among them.

        The arrays are not read after the call.

        Args:
            dst: Addresses to write, int64, contiguous.
            src: Addresses to read, as ``dst``.
            nbytes: Length of each copy in bytes, as ``dst``.
            stream: The stream on which the copies are queued.

        Raises:
            DriverError: The driver refused a call. Some of the copies may have been queued.
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
            raise DriverError(f"cuMemcpyBatchAsync of {len(dst)} pieces: error {code}")

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._done(self._api.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            self._done(self._api.cuCtxPopCurrent())

    def _done(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        if int(result[0]):
            raise DriverError(f"a call of the CUDA driver failed: {result[0]}")
        return result[1:]


def batch_call(api: Any) -> Any:
    """Return ``cuMemcpyBatchAsync`` of ``api``, the driver module of cuda-bindings, or None if the driver has none.

    The function is called without the bindings, because they need a list of Python objects for each argument.
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
    """Page-locks host memory by cudaHostRegister, mapped into the address space of a device."""

    def __init__(self, index: int) -> None:
        self._index = index

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock a range. OSError if CUDA refuses. May take seconds."""
        with torch.cuda.device(self._index):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = int(runtime.cudaHostRegister(address, nbytes, _REGISTER_PORTABLE_AND_MAPPED))
        if code:
            raise OSError(f"cudaHostRegister of {nbytes} bytes: error {code}")

    def unpin(self, address: int) -> None:
        """Unlock the range that was locked at ``address``."""
        with torch.cuda.device(self._index):
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


_REFUSED = range(900, 909)
"""Codes of cudaErrorStreamCapture..., which mean that CUDA refused the query, not that the event failed."""


class Asked(Protocol):
    """An event that can be queried."""

    def query(self) -> bool:
        """Return whether the event has happened. Never blocks."""
        ...


def has_happened(event: Asked) -> bool:
    """Return whether the event is known to have happened.

    While a CUDA graph is captured events cannot be queried, and the result is False. RuntimeError if the
    device has failed.
    """
    try:
        return event.query()
    except torch.AcceleratorError as error:
        if getattr(error, "error_code", None) in _REFUSED:
            return False
        raise
