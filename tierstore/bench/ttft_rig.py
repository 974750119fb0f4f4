"""A model of random weights, a store with a long prefix in it, and the time to the first token of an answer."""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from tierstore.adapters.huggingface import ATTENTION, TierStoreCache, cache_argument, page_spec
from tierstore.bench import measurement
from tierstore.bench.link import device_of, settle
from tierstore.config import load_config
from tierstore.gpu.pool import GroupedPages
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier

PATIENCE_S = 600.0
_PAGES_AT_ONCE = 64
_MOST_LOSS = 0.1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a Llama."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def flops_per_token(self) -> float:
        """Of all matrix products with weights, without the vocabulary's."""
        head = self.hidden // self.heads
        kv = 2 * self.kv_heads * head
        return 2.0 * self.layers * self.hidden * (2 * self.hidden + kv + 3 * self.ffn)

    @property
    def weights_nbytes(self) -> int:
        """Of all weights in bfloat16; the vocabulary's twice, as they are not tied."""
        kv = 2 * self.kv_heads * self.head_dim
        layer = self.hidden * (2 * self.hidden + kv + 3 * self.ffn + 2)
        return 2 * (2 * self.vocabulary * self.hidden + self.layers * layer + self.hidden)

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return self.hidden // self.heads

    def chunk_nbytes(self, tokens: int) -> int:
        """What computing so many tokens at once takes beside weights and pages; by calculation, and rather too much:
        eight times what a layer is given, four times what its ffn makes of that, in bfloat16."""
        return 2 * tokens * (8 * self.hidden + 4 * self.ffn)

    def flops(self, first: int, end: int) -> float:
        """Of tokens ``first`` to ``end`` over all before them, and of one row of logits."""
        seen = (end * (end + 1) - first * (first + 1)) / 2
        attention = 4.0 * self.layers * self.hidden * seen
        return (end - first) * self.flops_per_token + attention + 2.0 * self.hidden * self.vocabulary


SHAPES = {
    "llama-3.1-8b": Sizes(32, 4096, 14336, 32, 8, 128256),
    "tiny": Sizes(4, 64, 128, 4, 2, 97),
}


class Answered(NamedTuple):
    """One answer: seconds from the call of ``acquire``, and from the call of ``TierStoreCache``, to its first token."""

    seconds: float
    request_seconds: float
    token: int
    reused: int
    tiers: frozenset[Tier]


class ClockedStore(TierStore):
    """Notes when it is first asked for pages."""

    asked_at: float | None = None

    def acquire(
        self,
        keys: Sequence[PageKey],
        deadline_s: float | None = None,
        into: Sequence[int] | None = None,
        *,
        exact: bool = False,
        wait_for_room_s: float = 0.0,
    ) -> Lease:
        """As ever."""
        if self.asked_at is None:
            self.asked_at = perf_counter()
        return super().acquire(keys, deadline_s, into, exact=exact, wait_for_room_s=wait_for_room_s)


def random_model(sizes: Sizes, device: str, longest: int) -> PreTrainedModel:
    """A Llama in bfloat16 for prompts of up to ``longest`` tokens. The same weights each time."""
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=longest,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(device_of(device)):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=torch.bfloat16)
    assert isinstance(model, PreTrainedModel)
    model.eval()
    return model


class Rig:
    """A store whose tiers hold the K/V of a prefix: random numbers, as good as computed ones for the time it takes."""

    def __init__(
        self, store: ClockedStore, model: PreTrainedModel, prompt: torch.Tensor, num_pages: int
    ) -> None:
        """``prompt``: ``[1, tokens]``, of which ``num_pages`` full pages are the prefix."""
        self.store, self.model, self._prompt = store, model, prompt
        self.keys = store.keys(prompt[0].tolist())
        self.prefix = self.keys[:num_pages]
        pages = store.pages
        assert not isinstance(pages, GroupedPages)
        self._pages = pages
        self.nbytes = num_pages * pages[0].nbytes
        slots = store.allocate(num_pages, timeout_s=PATIENCE_S)
        torch.manual_seed(1)
        pages.normal_()
        self._sums = self._summed(slots)
        self._first = pages[slots[0]].clone()
        settle(pages.device)
        store.put(self.prefix, slots)
        store.flush()
        store.drain(PATIENCE_S)

    def send_down(self, tier: Tier) -> None:
        """The prefix is readable in ``tier`` and below; what an answer left behind is nowhere."""
        self.store.evict(self.keys[len(self.prefix) :])
        for above in [t for t in Tier if t < tier]:
            self.store.evict(self.prefix, above)
        self.store.drain(PATIENCE_S)
        found = self.store.match(self.prefix)
        if found.num_pages < len(self.prefix) or set(found.tiers) != {tier}:
            raise RuntimeError(
                f"the prefix is not in {tier.name}: {found.num_pages} pages in {set(found.tiers)}"
            )

    def answer(self) -> Answered:
        """The first token of an answer, sampled greedily by ``generate``. RuntimeError unless all is reused."""
        settle(self._pages.device)
        self.store.asked_at = None
        begun = perf_counter()
        with TierStoreCache(self.store, self._prompt, model=self.model, timeout_s=PATIENCE_S) as cache:
            token = first_token(self.model, self._prompt, cache)
            ended = perf_counter()
            reused, tiers = cache.reused_tokens, frozenset(cache.reused_by_tier)
        if reused != len(self.prefix) * self._pages.shape[3]:
            raise RuntimeError(f"only {reused} tokens were reused")
        asked = self.store.asked_at
        assert asked is not None
        return Answered(ended - asked, ended - begun, token, reused, tiers)

    def recomputed(self, chunk: int, most: int | None = None) -> float:
        """Seconds to the first token with nothing reused, the prompt computed ``chunk`` tokens at a time.

        ``most``: of it, only so many tokens, to warm up.
        """
        prompt = self._prompt[:, :most]
        settle(self._pages.device)
        begun = perf_counter()
        with (
            torch.inference_mode(),
            TierStoreCache(self.store, prompt, model=self.model, storing="no-store") as cache,
        ):
            for part in prompt.split(chunk, dim=1):
                out = self.model(part, logits_to_keep=1, **{cache_argument(self.model): cache})
            int(out.logits[0, -1].argmax())
            return perf_counter() - begun

    def checked(self, *, lossy: bool) -> float:
        """The largest relative error of the pages in HBM. RuntimeError unless they are what was put, or near it."""
        with self.store.acquire(self.prefix) as lease:
            whole = lease.wait(PATIENCE_S) is LeaseState.READY and lease.num_pages == len(self.prefix)
            if not whole:
                raise RuntimeError(f"only {lease.num_pages} pages came back: {lease.missing_because}")
            first = self._pages[lease.slots[0]].float()
            want = self._first.float()
            error = float((first - want).norm() / want.norm())
            if not lossy and not torch.equal(self._summed(lease.slots), self._sums):
                raise RuntimeError("pages came back with other bytes")
        if error > (_MOST_LOSS if lossy else 0.0):
            raise RuntimeError(f"a page came back with a relative error of {error}")
        return error

    def _summed(self, slots: list[int]) -> torch.Tensor:
        words = self._pages.view(torch.int64)
        parts = [slots[i : i + _PAGES_AT_ONCE] for i in range(0, len(slots), _PAGES_AT_ONCE)]
        return torch.cat([words[part].flatten(1).sum(1) for part in parts])


def first_token(model: PreTrainedModel, prompt: torch.Tensor, cache: TierStoreCache) -> int:
    """On the host."""
    given = {cache_argument(model): cache}
    out = model.generate(prompt, max_new_tokens=1, do_sample=False, **given)  # type: ignore[operator]
    return int(out[0, -1])


@contextmanager
def rig(
    model: PreTrainedModel,
    prompt: torch.Tensor,
    page_size: int,
    prefix: int,
    below: Mapping[str, Mapping[str, object]],
) -> Iterator[Rig]:
    """A store with room for the prompt in HBM, and ``below`` it the tiers of this configuration."""
    spec = page_spec(model.config, page_size, model.dtype, "tierstore-bench")
    pages = -(-prompt.shape[1] // page_size) + 1
    config = {"hbm": {"capacity": pages * spec.page_nbytes, "device": str(model.device)}, **below}
    with ClockedStore.open(load_config(config), spec) as store:
        assert isinstance(store, ClockedStore)
        filled = Rig(store, model, prompt, prefix // page_size)
        with measurement.at_rest():
            yield filled
