"""A connector some of whose loads fail, with anything at all in the blocks they were to fill. vLLM loads it by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tierstore.adapters.vllm.connector import TierStoreConnector
from tierstore.adapters.vllm.kv_layout import KVLayout
from tierstore.adapters.vllm.messages import Report
from tierstore.adapters.vllm.worker import WorkerHalf
from tierstore.config import StoreConfig
from tierstore.types import Ack, Erase, Failure, Tier, Transfer

FAILS_EVERY = 3


class FaultyHalf(WorkerHalf):
    """The last page of every third load into HBM fails; the same ones on every rank."""

    tensors: Sequence[Any] = ()

    @classmethod
    def open(cls, config: StoreConfig, kv_layout: KVLayout, rank: int) -> WorkerHalf:
        """As its base does."""
        half = super().open(config, kv_layout, rank)
        assert isinstance(half, FaultyHalf)
        half.tensors = kv_layout.pages.tensors
        half.loads = {}
        half.seen = 0
        return half

    loads: dict[int, Transfer]
    seen: int

    def _submit(self, commands: Sequence[Transfer | Erase]) -> None:
        for command in commands:
            if isinstance(command, Transfer) and command.dst == Tier.HBM:
                self.seen += 1
                if FAILS_EVERY and self.seen % FAILS_EVERY == 0:
                    self.loads[command.id] = command
        super()._submit(commands)

    def report(self) -> Report | None:
        """With what failed."""
        found = super().report()
        if found is None:
            return None
        return replace(
            found, acks={rank: tuple(map(self._spoilt, acks)) for rank, acks in found.acks.items()}
        )

    def _spoilt(self, ack: Ack) -> Ack:
        load = self.loads.pop(ack.transfer_id, None)
        if load is None or not ack.ok:
            return ack
        for tensor in self.tensors:
            tensor[load.dst_slots[-1]].fill_(1e4)
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
    """The product's connector over such a worker."""

    _open_half = staticmethod(FaultyHalf.open)
