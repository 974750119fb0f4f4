"""Host memory that the tensor-parallel ranks of a pipeline stage share, if the KV is the same on all of them (MLA).

Each page is then stored once. The ranks agree, while they open their tiers, on whether all of them can map the memory.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tierstore.host.shared_memory import Handle, SharedMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_log = logging.getLogger("tierstore.adapters.vllm.replicas")


class Peers(Protocol):
    """The ranks that share memory, and the ranks of other stages, all of which make the same calls."""

    @property
    def first(self) -> bool:
        """Return whether this rank creates the memory."""
        ...

    def summed(self, numbers: Sequence[int]) -> list[int]:
        """Return the sums of the numbers of the ranks that share memory. Blocks until all of them have called."""
        ...

    def all_agree(self, agrees: bool) -> bool:
        """Return whether all ranks of all stages agree. Blocks until they have called."""
        ...


class VllmPeers:
    """Implements ``Peers`` with vLLM's process groups for CPU tensors."""

    def __init__(self, tensor: Any, pipeline: Any) -> None:
        """Use vLLM's coordinators of the tensor-parallel ranks and of the pipeline stages."""
        self._tensor, self._pipeline = tensor, pipeline

    @property
    def first(self) -> bool:
        """See ``Peers``."""
        return bool(self._tensor.rank_in_group == 0)

    def summed(self, numbers: Sequence[int]) -> list[int]:
        """See ``Peers``."""
        return _summed(numbers, self._tensor)

    def all_agree(self, agrees: bool) -> bool:
        """See ``Peers``."""
        here = self.summed([agrees]) == [self._tensor.world_size]
        return _summed([here], self._pipeline) == [self._pipeline.world_size]


def _summed(numbers: Sequence[int], group: Any) -> list[int]:
    if group.world_size == 1:
        return list(numbers)
    found = torch.tensor(numbers, dtype=torch.int64)
    torch.distributed.all_reduce(found, group=group.cpu_group)
    return [int(number) for number in found]


def shared_memory(peers: Peers, nbytes: Callable[[], int]) -> SharedMemory | None:
    """Return memory that all ranks of the stage map, or None if they cannot share any.

    The result is None on every rank unless all ranks of all stages can share memory. If it is None, a warning says why.
    All ranks must call this function, because it blocks until they have.

    Args:
        peers: The ranks.
        nbytes: Returns the size of the memory in bytes, the same on all ranks of a stage. Called on the first rank.

    Raises:
        Exception: ``nbytes`` raised it, or memory could not be shared for a reason other than an OSError. It is raised
            after all ranks have agreed not to share memory.
    """
    mine: SharedMemory | None = None
    reason = ""
    try:
        if peers.first:
            mine = SharedMemory.create(nbytes())
    except OSError as error:
        reason = str(error)
    finally:  # after any exception too, because the other ranks wait for this one
        handle = Handle(*peers.summed((0, 0, 0, 0) if mine is None else mine.handle))
        try:
            if not peers.first and handle.pid:
                mine = SharedMemory.open(handle)
        except OSError as error:
            reason = str(error)
        finally:
            agreed = peers.all_agree(mine is not None)
            if mine is not None:
                mine.close()
    if agreed:
        if peers.first:
            _log.info(
                "the tensor-parallel ranks share host memory: each page is stored once, not on every rank"
            )
        return mine
    if reason or peers.first:
        _log.warning(
            "the tensor-parallel ranks cannot share host memory%s: every rank stores its own copy of each page, so "
            "host memory and disk hold fewer pages; ranks can share memory if they run on the same machine, in the "
            "same container and as the same user",
            f" ({reason})" if reason else "",
        )
    return None
