"""A connector in which some loads fail and leave garbage in their blocks. vLLM loads it by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tierstore.adapters.vllm.connector import TierStoreConnector
from tierstore.adapters.vllm.kv_layout import KVLayout
from tierstore.adapters.vllm.messages import Report
from tierstore.adapters.vllm.worker import WorkerHalf
from tierstore.config import StoreConfig
from tierstore.host.shared_memory import SharedMemory
from tierstore.types import Ack, Erase, Failure, Tier, Transfer

FAILS_EVERY = 3

SPOILS = False
"""Whether states are replaced by garbage after they were loaded. This only works if the engine runs in one process."""

_states: set[int] = set()
"""Blocks of states that loads will fill."""


class FaultyHalf(WorkerHalf):
    """A worker half in which one of every ``FAILS_EVERY`` loads into HBM fails at its last page, on all ranks alike."""

    tensors: Sequence[Any] = ()

    @classmethod
    def open(
        cls,
        config: StoreConfig,
        kv_layout: KVLayout,
        rank: int,
        replicas: int = 1,
        shared: SharedMemory | None = None,
    ) -> WorkerHalf:
        """Open a worker half in the same way as ``WorkerHalf.open``, and keep the KV tensors."""
        half = super().open(config, kv_layout, rank, replicas, shared)
        assert isinstance(half, FaultyHalf)
        half.tensors = kv_layout.pages.tensors
        half.loads, half.filled = {}, {}
        half.seen = 0
        return half

    loads: dict[int, Transfer]
    filled: dict[int, tuple[int, ...]]
    seen: int

    def _submit(self, commands: Sequence[Transfer | Erase]) -> None:
        for command in commands:
            if isinstance(command, Transfer) and command.dst == Tier.HBM:
                self.seen += 1
                self.filled[command.id] = command.dst_slots
                if FAILS_EVERY and self.seen % FAILS_EVERY == 0:
                    self.loads[command.id] = command
        super()._submit(commands)

    def report(self) -> Report | None:
        """Return the report of ``WorkerHalf`` with the failures added to its acks."""
        found = super().report()
        if found is None:
            return None
        return replace(
            found, acks={rank: tuple(map(self._spoilt, acks)) for rank, acks in found.acks.items()}
        )

    def _spoilt(self, ack: Ack) -> Ack:
        if SPOILS:
            for block in _states.intersection(self.filled.pop(ack.transfer_id, ())):
                for tensor in self.tensors:
                    tensor[block].copy_(tensor[block].roll(tensor.shape[-1] // 8 * 4, -1))
        load = self.loads.pop(ack.transfer_id, None)
        if load is None or not ack.ok:
            return ack
        for tensor in self.tensors:
            tensor[load.dst_slots[-1]].fill_(1e4 if tensor.is_floating_point() else 99)
        ready = ack.num_ready - 1
        return replace(
            ack,
            ok=False,
            num_ready=ready,
            nbytes=ack.nbytes // ack.num_ready * ready,
            failures=((ready, Failure.IO_ERROR),),
            sizes=(),
        )


class FaultyConnector(TierStoreConnector):
    """A ``TierStoreConnector`` with ``FaultyHalf`` as its worker half."""

    _open_half = staticmethod(FaultyHalf.open)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Do the same as ``TierStoreConnector``, and record the blocks of states."""
        tables = blocks.get_block_ids()
        _states.update(
            block for group in self._deployment.groups.states for block in tables[group.number] if block
        )
        super().update_state_after_alloc(request, blocks, num_external_tokens)
