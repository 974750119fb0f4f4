"""The part of the adapter's state machine that moves and checks pages, holds leases and reopens the store."""

# mypy: allow-untyped-calls
from __future__ import annotations

import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from transformers import DynamicCache, PreTrainedModel

from tests.adapters.tiny import PAGE, random_prompt
from tests.support.pages import PATIENCE_S
from tierstore.adapters.huggingface import PrefixCache, TierStoreCache, cache_argument, page_specs
from tierstore.adapters.huggingface.model_spec import kv_shape
from tierstore.adapters.huggingface.request import PageGroups
from tierstore.config import load_config
from tierstore.errors import StoreClosed
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import LeaseState, Tier

HBM, HOST, WAIT_S = 24, 12, 0.1
BASE = random_prompt(6 * PAGE, seed=100)

# Prompts diverge inside pages and at page boundaries, and some begin with tokens that others end with.
prompts = st.builds(
    lambda shared, more, seed: BASE[:shared] + random_prompt(more, seed=seed),
    st.sampled_from([0, 3, PAGE, PAGE + 5, 2 * PAGE, 2 * PAGE + 3, 4 * PAGE + 1]),
    st.sampled_from([1, 2, PAGE - 1, PAGE, PAGE + 2]),
    st.integers(0, 2),
)


@dataclass(eq=False)
class Open:
    """An open cache, with the tokens fed to the model (``fed``, by row) and to the draft model (``drafted``)."""

    cache: TierStoreCache
    paddings: list[int]
    fed: list[list[int]]
    rest: list[list[int]]
    """For each row, the tokens of its prompt that have not been fed yet."""
    drafted: list[int] = field(default_factory=list)

    @property
    def columns(self) -> int:
        return int(self.cache.get_seq_length())


class StoreMachine(RuleBasedStateMachine):
    """A state machine with a store and rules that act on it directly. Subclasses set the models and add rules."""

    model: ClassVar[PreTrainedModel]
    draft: ClassVar[PreTrainedModel | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.now = 0.0
        self.open: list[Open] = []
        self.held: list[tuple[Lease, list[torch.Tensor]]] = []
        self.open_store()

    def open_store(self) -> None:
        specs = page_specs(self.model, PAGE, draft=self.draft)
        nbytes = sum(spec.page_nbytes for spec in specs)
        config = {
            "hbm": {"capacity": HBM * nbytes, "device": "cpu"},
            "host": {"capacity": HOST * nbytes},
            "nvme": {"path": str(Path(self.directory.name)), "capacity": "64MiB"},
        }
        self.store = TierStore.open(load_config(config), specs)
        self.pages = PageGroups(self.store)
        self.chats = PrefixCache(
            self.store, self.model, draft=self.draft, timeout_s=WAIT_S, clock=lambda: self.now
        )
        self.talk: dict[str, list[int]] = {}

    # -- the store ----------------------------------------------------------------------------------------------

    @rule(tokens=prompts, how=st.sampled_from(["host", "disk", "evict", "evict later", "flush"]))
    def move(self, tokens: list[int], how: str) -> None:
        keys = self.store.keys(tokens)
        if how in ("host", "disk"):
            self.store.demote(keys, Tier.HOST if how == "host" else Tier.NVME)
            self.store.drain(PATIENCE_S)
        elif how == "flush":
            self.store.flush()
        else:
            self.store.evict(keys if how == "evict" else keys[1:])

    @rule(tokens=prompts, keep=st.booleans())
    def look(self, tokens: list[int], keep: bool) -> None:
        """Require that pages hold the K/V of their tokens for every model. If ``keep``, keep the lease open."""
        lease = self.store.acquire(self.store.keys(tokens))
        assert lease.wait(PATIENCE_S) is not LeaseState.PENDING
        if lease.slots:
            self.check_bytes(tokens[: lease.num_pages * PAGE], lease.slots)
        if keep and lease.num_pages and len(self.held) < 2:
            self.held.append((lease, self.bytes_of(lease)))
        else:
            lease.release()

    def check_bytes(self, tokens: list[int], slots: list[int]) -> None:
        first = 0
        for model in (self.model, self.draft):
            if model is not None:
                shape, kv = kv_shape(model.config), plain_kv(model, tokens)
                for layer, place in enumerate(shape.places):
                    pages = self.pages.groups[first + place.group][slots, place.index]
                    found = pages.transpose(0, 1).flatten(1, 2).transpose(1, 2)
                    torch.testing.assert_close(found, kv[layer], rtol=1e-3, atol=1e-3)
                first += len(shape.windows)

    def bytes_of(self, lease: Lease) -> list[torch.Tensor]:
        return [group[lease.slots].clone() for group in self.pages.groups]

    @rule()
    def let_go(self) -> None:
        if self.held:
            self.held.pop()[0].release()

    @rule(really=st.integers(0, 5))
    def reopen(self, really: int) -> None:
        if not really:
            self.leave()
            self.open_store()

    @invariant()
    def what_is_leased_is_not_written(self) -> None:
        self.store.check()
        for lease, before in self.held:
            assert all(map(torch.equal, self.bytes_of(lease), before)), "a leased page was written"

    def leave(self) -> None:
        """Close everything, and require that no slot and no lease leaked."""
        for cache in list(self.open):
            cache.cache.close()
        self.open = []
        for lease, _ in self.held:
            lease.release()
        self.held = []
        self.chats.close()
        try:
            # Pages in flight are pinned too.
            assert self.store.drain(PATIENCE_S)
            states: Any = self.store.stats()
            hbm = states["tiers"]["HBM"]
            assert (hbm["owned"], hbm["pinned"], states["leases"]) == (0, 0, 0), f"leaked: {hbm}"
            self.store.free(self.store.allocate(HBM, timeout_s=PATIENCE_S))
        finally:
            self.store.close()

    def teardown(self) -> None:
        try:
            with suppress(StoreClosed):  # the rule that failed to reopen the store has raised the error
                self.leave()
        finally:
            self.directory.cleanup()


def plain_kv(model: PreTrainedModel, tokens: list[int]) -> list[torch.Tensor]:
    """Return the K/V of each layer, ``[2, num_kv_heads, tokens, head_dim]``, as plain transformers computes them."""
    cache = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([tokens]), **{cache_argument(model): cache})
    layers: list[Any] = list(cache.layers)
    return [torch.cat([layer.keys, layer.values]) for layer in layers]


def same_logits(model: PreTrainedModel, tokens: list[int], found: torch.Tensor) -> None:
    """Require that ``found`` (``[n, vocabulary]``) equals plain transformers' logits for the last ``n`` tokens."""
    with torch.no_grad():
        expected = model(torch.tensor([tokens]), use_cache=False).logits[0, -len(found) :]
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
