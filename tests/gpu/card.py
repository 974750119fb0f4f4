"""Helpers for GPU tests: device work that runs after the call returns, and pages whose bytes identify their key."""

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
"""Pages of 256 KiB. Copying them takes long enough for other work to overtake the copies."""

_CYCLES_PER_MS = 1_700_000


def small_tiers(hbm: int, host: int) -> StoreConfig:
    return tiers(hbm, host, page_nbytes=SPEC.page_nbytes)


def delay(ms: float, stream: torch.cuda.Stream | None = None) -> None:
    """Keep a stream, by default the current one, busy for about ``ms`` milliseconds. Return immediately."""
    with torch.cuda.stream(stream or torch.cuda.current_stream()):
        torch.cuda._sleep(int(ms * _CYCLES_PER_MS))  # type: ignore[no-untyped-call]


def stall_copies(bench: Bench, dst: Tier, ms: float) -> None:
    """Delay the start of copies to ``dst`` by ``ms`` milliseconds, for copies that are submitted from now on."""
    engine = bench.copies.inner
    assert isinstance(engine, CudaCopyEngine)
    delay(ms, engine._lanes[dst].stream)


def pattern(key: PageKey) -> torch.Tensor:
    """Return the content of a key's page as int16 ``[page_nbytes / 2]``, computed on the current stream."""
    seed = int.from_bytes(key[:2], "little")
    ramp = torch.arange(SPEC.page_nbytes // 2, dtype=torch.int32, device="cuda:0")
    return (ramp * 7 + seed).to(torch.int16)


def as_integers(store: TierStore, slot: int) -> torch.Tensor:
    """Return a view of a slot as int16 ``[page_nbytes / 2]``."""
    return page_tensor(store)[slot].view(torch.int16).flatten()


def write_late(store: TierStore, key: PageKey, slot: int, ms: float) -> None:
    """Queue a kernel of ``ms`` milliseconds and then the write of the page on the current stream, without waiting."""
    want = pattern(key)
    delay(ms)
    as_integers(store, slot).copy_(want)


class Reader:
    """Compares pages and counts the differences on the GPU, in the current stream, so that the CPU never waits."""

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
