"""The calls of the CUDA driver that torch does not offer: many copies in one call, streams of our own, page-locking.

Also ``has_happened``, which asks an event safely while a CUDA graph is being captured. The only importer of
cuda-bindings. Addresses travel as int64 arrays, never as Python lists.
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
"""Copies in one call: the first begins only when the driver has written down all of them, a microsecond each."""
_REGISTER_PORTABLE_AND_MAPPED = 3
_NON_BLOCKING = 1

CopyCall = Literal["batch", "each"]


class DriverError(RuntimeError):
    """The driver refused a call."""


class Driver:
    """One device's driver. Calls may come from any thread and leave its current device as it was.

    ``call``: "batch" gives the driver all pieces in one call, "each" one after the other.
    """

    def __init__(self, index: int) -> None:
        """ImportError without cuda-bindings; DriverError if the device does not answer."""
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

    def stream(self, index: int) -> torch.cuda.Stream:
        """A new stream of the lowest priority that waits for no other. It lives as long as the process."""
        with self._current():
            (lowest, _) = self._done(self._api.cuCtxGetStreamPriorityRange())
            (handle,) = self._done(self._api.cuStreamCreateWithPriority(_NON_BLOCKING, lowest))
        device = f"cuda:{index}"
        return torch.cuda.ExternalStream(int(handle), device=device)  # type: ignore[no-untyped-call]

    def all_work(self) -> torch.cuda.Event:
        """An event that happens once all that was launched on the device so far has ended, on whatever stream.

        RuntimeError from a driver before 12.5, and while a CUDA graph is captured, which fails then.
        """
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with self._current():
            event.record(torch.cuda.current_stream(self._index))  # only then it is there
            self._done(self._api.cuCtxRecordEvent(self._context, event.cuda_event))
        return event

    def copy(
        self,
        dst: NDArray[np.int64],
        src: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        stream: torch.cuda.Stream,
    ) -> None:
        """Queues ``len(dst)`` copies between device and page-locked host memory, in no order among themselves.

        Contiguous one-dimensional arrays; they may go when this returns. DriverError: some copies may have been queued.
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
            raise DriverError(f"the CUDA driver answers {result[0]}")
        return result[1:]


def batch_call(api: Any) -> Any:
    """The driver's ``cuMemcpyBatchAsync`` of ``api``, cuda-bindings' driver; None where the driver has none.

    It is called past the bindings, which want a list of Python objects for each argument.
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
    """Page-locks host memory for a device, mapped into its address space."""

    def __init__(self, index: int) -> None:
        self._index = index

    def pin(self, address: int, nbytes: int) -> None:
        """OSError when CUDA refuses."""
        with torch.cuda.device(self._index):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = int(runtime.cudaHostRegister(address, nbytes, _REGISTER_PORTABLE_AND_MAPPED))
        if code:
            raise OSError(f"cudaHostRegister of {nbytes} bytes: error {code}")

    def unpin(self, address: int) -> None:
        """Unlocks the range that was locked there."""
        with torch.cuda.device(self._index):
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


_REFUSED = range(900, 909)
"""cudaErrorStreamCapture...: of the question, not of what was asked about."""


class Asked(Protocol):
    """An event."""

    def query(self) -> bool:
        """Whether it has happened; never blocks."""
        ...


def has_happened(event: Asked) -> bool:
    """Whether it has, as far as can be told now: what it ends may go on while a graph is captured.

    RuntimeError when the device has failed.
    """
    try:
        return event.query()
    except torch.AcceleratorError as error:
        if getattr(error, "error_code", None) in _REFUSED:
            return False
        raise
