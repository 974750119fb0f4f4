"""Documents of random pages, for ``bench hints`` without a model: an answer is a lease that is ready."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import torch

from tierstore.bench.hinted import PATIENCE_S, Answer
from tierstore.config import load_config
from tierstore.gpu.pool import GroupedPages
from tierstore.page import PageSpec
from tierstore.store import TierStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tierstore.types import PageKey

_AT_ONCE = 32


def page_spec(layers: int) -> PageSpec:
    """Pages of 64 tokens, 8 KV heads of 128 numbers of 2 bytes: 8 MiB with 32 layers."""
    return PageSpec(
        num_layers=layers, page_size=64, num_kv_heads=8, head_dim=128, dtype="bfloat16", model="bench hints"
    )


def open_store(
    spec: PageSpec, pages: int, documents: int, device: str, place: Path | None = None
) -> TierStore:
    """HBM for one document and a little, host memory for all, and NVMe for all if there is a place for it."""
    nbytes = spec.page_nbytes
    spare = max(4, pages // 16)
    host: dict[str, object] = {"capacity": (documents * pages + 2 * spare) * nbytes}
    if device != "cpu":
        host["pin"] = "always"
    tree: dict[str, object] = {
        "hbm": {"capacity": (pages + spare) * nbytes, "device": device},
        "host": host,
    }
    if place is not None:
        disk_nbytes = (documents * pages + spare) * nbytes * 5 // 4 + (64 << 20)
        tree["nvme"] = {"path": str(place), "capacity": disk_nbytes}
    return TierStore.open(load_config(tree), spec)


def put(store: TierStore, keys: Sequence[PageKey], write: Callable[[torch.Tensor], object]) -> list[int]:
    """Fills pages one after the other and seals them; a sum of the bits of each."""
    tensor, sums = pages_of(store), []
    for start in range(0, len(keys), _AT_ONCE):
        with store.acquire(keys[max(0, start - 1) : start]) as parent:
            parent.wait(PATIENCE_S)
            slots = store.allocate(len(keys[start : start + _AT_ONCE]), PATIENCE_S)
            for slot in slots:
                write(tensor[slot])
            sums += summed(tensor, slots)
            store.put(keys[start : start + _AT_ONCE], slots, lease=parent)
    return sums


def pages_of(store: TierStore) -> torch.Tensor:
    """The HBM pages of a store of one KV group."""
    if isinstance(store.pages, GroupedPages):
        raise TypeError("pages of several KV groups; allowed: one")
    return store.pages


def summed(tensor: torch.Tensor, slots: Sequence[int]) -> list[int]:
    """A sum of every page's bits, taken as whole numbers of 16."""
    sums = [tensor[slot].view(torch.int16).sum(dtype=torch.int64) for slot in slots]
    return [int(total) for total in torch.stack(sums).tolist()] if sums else []


class Pages:
    """``documents`` of so many pages of random bits, put into a store and saved."""

    def __init__(self, store: TierStore, documents: int, pages: int, page_size: int) -> None:
        self.store = store
        self._tensor = pages_of(store)
        self.documents = [store.keys([number + 1] * (pages * page_size)) for number in range(documents)]
        self._sums = [self._fill(number) for number in range(documents)]
        store.flush()

    def ask(self, number: int) -> Answer:
        """A lease on all pages; the answer is whether each has the bytes that were put."""
        begin = perf_counter()
        with self.store.acquire(self.documents[number]) as lease:
            lease.wait(PATIENCE_S)
            seconds = perf_counter() - begin
            return Answer(seconds, summed(self._tensor, lease.slots) == self._sums[number])

    def _fill(self, number: int) -> list[int]:
        generator = torch.Generator(self._tensor.device).manual_seed(number)

        def write(page: torch.Tensor) -> None:
            page.view(torch.int16).random_(-(1 << 15), 1 << 15, generator=generator)

        return put(self.store, self.documents[number], write)
