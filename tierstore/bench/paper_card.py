"""A card on paper: streams, events and a driver that keep the time which a link takes, and move nothing.

What the host does for a restore can be measured where no card is: everything above the driver's calls is real.
"""

from __future__ import annotations

from contextlib import nullcontext
from time import perf_counter, sleep
from typing import TYPE_CHECKING

import torch

from tierstore.gpu.layer_events import NOT_YET, Arriving

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray

    from tierstore.codecs.held import Held
    from tierstore.types import Ack


class PaperStream:
    """Work in order; ``free``: when what is queued has ended, by ``perf_counter``."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.free = 0.0

    def wait_event(self, event: PaperEvent) -> None:
        """What is queued from now on begins after the event."""
        self.free = max(self.free, event.at)


class PaperEvent:
    """Happens when its stream gets there."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self, stream: PaperStream) -> None:
        """After what is queued there now."""
        self.at = max(perf_counter(), stream.free)

    def query(self) -> bool:
        """Whether it has happened."""
        return perf_counter() >= self.at

    def synchronize(self) -> None:
        """Blocks until it has happened."""
        sleep(max(0.0, self.at - perf_counter()))

    def elapsed_time(self, end: PaperEvent) -> float:
        """Milliseconds from this one to ``end``."""
        return (end.at - self.at) * 1e3


class PaperDriver:
    """A link of ``rate`` bytes a second, which may be changed, and counts of what it was asked for.

    A call takes no time of its own.
    """

    def __init__(self, rate: float) -> None:
        self.calls = self.pieces = 0
        self.rate = rate

    def copy(
        self, dst: NDArray[np.int64], src: NDArray[np.int64], nbytes: NDArray[np.int64], stream: PaperStream
    ) -> None:
        """As ``Driver.copy``."""
        self.calls += 1
        self.pieces += len(dst)
        stream.free = max(perf_counter(), stream.free) + int(nbytes.sum()) / self.rate


class PaperKernel:
    """A kernel of Triton that does nothing. ``arg_names``: as of the real one."""

    def __init__(self, arg_names: list[str]) -> None:
        self.arg_names = arg_names
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *tensors: object, **constants: object) -> None:
        self.launches += 1


class PaperCard:
    """What ``coded.Coded`` asks of a card."""

    def event(self) -> PaperEvent:
        """See ``coded.Card``."""
        return PaperEvent()

    def zeros(self, nbytes: int) -> torch.Tensor:
        """See ``coded.Card``."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def uploaded(self, slots: NDArray[np.int64]) -> torch.Tensor:
        """See ``coded.Card``."""
        return torch.from_numpy(slots)

    def flags(self, pages: int) -> torch.Tensor:
        """See ``coded.Card``."""
        return torch.zeros(pages, dtype=torch.int32)

    def using(self, stream: PaperStream) -> AbstractContextManager[object]:
        """See ``coded.Card``."""
        return nullcontext()


class PaperHost:
    """Host slots that are addresses and nothing else, all of them page-locked."""

    pinning = False

    def __init__(self, num_slots: int, held: Held) -> None:
        self.num_slots = self.pinned_slots = num_slots
        self.held = held

    def addresses(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the pages of these slots would start."""
        return slots * self.held.slot_nbytes


class PaperPool:
    """HBM slots that are numbers and nothing else."""

    def __init__(self, num_slots: int, page_nbytes: int) -> None:
        self.num_slots = num_slots
        self.nbytes = num_slots * page_nbytes


class NoThreads:
    """The copy engine for memory that is not page-locked: there is none."""

    polled = False

    def poll(self) -> list[Ack]:
        """Nothing."""
        return []

    def close(self, timeout_s: float) -> bool:
        """True."""
        return True

    def arriving(self, slots: object, layer: int) -> Arriving:
        """It knows of none."""
        return NOT_YET
