"""Work that is still running on the card when the host goes on, and pages that tell whose they are."""

from __future__ import annotations

import torch

from tests.support.bench import Bench
from tests.support.pages import page_tensor, tiers
from tierstore.config import StoreConfig
from tierstore.gpu.cuda_copy_engine import CudaCopyEngine
from tierstore.page import PageSpec
from tierstore.store import TierStore
from tierstore.types import PageKey, Tier

SPEC = PageSpec(num_layers=4, page_size=64, num_kv_heads=4, head_dim=64, dtype="bfloat16", model="card")
"""Pages of 256 KiB: copies take long enough to be overtaken."""

_CYCLES_PER_MS = 1_700_000


def small_tiers(hbm: int, host: int) -> StoreConfig:
    return tiers(hbm, host, page_nbytes=SPEC.page_nbytes)


def delay(ms: float, stream: torch.cuda.Stream | None = None) -> None:
    """Keeps a stream, the current one if None, busy for about so long; returns at once."""
    with torch.cuda.stream(stream or torch.cuda.current_stream()):
        torch.cuda._sleep(int(ms * _CYCLES_PER_MS))  # type: ignore[no-untyped-call]


def stall_copies(bench: Bench, dst: Tier, ms: float) -> None:
    """Copies to the tier that are submitted from now on start so much later."""
    engine = bench.copies.inner
    assert isinstance(engine, CudaCopyEngine)
    delay(ms, engine._lanes[dst].stream)


def pattern(key: PageKey) -> torch.Tensor:
    """The page of a key on the card, as int16 ``[page_nbytes / 2]``; queued on the current stream."""
    seed = int.from_bytes(key[:2], "little")
    ramp = torch.arange(SPEC.page_nbytes // 2, dtype=torch.int32, device="cuda:0")
    return (ramp * 7 + seed).to(torch.int16)


def as_integers(store: TierStore, slot: int) -> torch.Tensor:
    """A slot in place, as int16 ``[page_nbytes / 2]``."""
    return page_tensor(store)[slot].view(torch.int16).flatten()


def write_late(store: TierStore, key: PageKey, slot: int, ms: float) -> None:
    """Queues a long kernel and then the page's bytes on the current stream; returns before they are written."""
    want = pattern(key)
    delay(ms)
    as_integers(store, slot).copy_(want)


class Reader:
    """Compares pages on the card, on the current stream, and counts differences there: nothing waits."""

    def __init__(self) -> None:
        self._wrong = torch.zeros((), dtype=torch.int64, device="cuda:0")
        self.pages = 0

    def check(self, store: TierStore, key: PageKey, slot: int, ms: float = 0.0) -> None:
        want = pattern(key)
        if ms:
            delay(ms)
        self._wrong += (as_integers(store, slot) != want).sum()
        self.pages += 1

    def require_right(self) -> None:
        torch.cuda.synchronize()
        assert int(self._wrong) == 0, f"{int(self._wrong)} wrong elements in {self.pages} pages"
