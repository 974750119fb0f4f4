"""One request under way: its prompt is read in chunks, then it answers token by token."""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import numpy as np
import torch

from tierstore.adapters.huggingface import TierStoreCache, cache_argument
from tierstore.adapters.huggingface.request import PageGroups
from tierstore.serve.coming import Coming
from tierstore.serve.model import Reader
from tierstore.serve.request import Ask, Done, Event, FinishReason, Piece, Read, Usage
from tierstore.serve.sampling import Sampler, Spelling
from tierstore.store import TierStore
from tierstore.types import PageKey, Tier

_ROOM_S = 0.1
"""Seconds that a request waits for HBM pages that are being saved: all other answers wait as long."""


class Running:
    """A request that has started. For the engine's thread; ``close`` gives back what it holds."""

    def __init__(
        self,
        reader: Reader,
        store: TierStore,
        ask: Ask,
        keys: Sequence[PageKey],
        tell: Callable[[Event], None],
        *,
        asked_at: float,
        chunk: int,
    ) -> None:
        """Begins to bring its stored prefix up. ``asked_at`` by ``monotonic``."""
        self._reader, self._store, self._ask, self._tell, self._chunk = reader, store, ask, tell, chunk
        self._asked_at, self._began_at = asked_at, monotonic()
        self._first_at: float | None = None
        self._ends = reader.ends
        self._tokens: list[int] = []
        self._device = reader.model.device
        self._sampler = Sampler(ask.sampling, self._device)
        self._spelling = Spelling(reader.tokenizer, ask.prompt, ask.stop)
        self._reused: dict[str, int] = {}
        self._given: dict[str, TierStoreCache] = {}
        self._coming = Coming(store, keys)
        self._cache: TierStoreCache | None = None

    @property
    def waits(self) -> bool:
        """Whether a step would do nothing yet: its pages are still on their way from disk."""
        return self._cache is None and not self._coming.here

    def step(self) -> Usage | None:
        """Compute one chunk of the prompt, or one token of the answer. What it took, once all is told."""
        if self.waits:
            return None
        there = (self._cache or self._open()).get_seq_length()
        with torch.inference_mode():
            if there < len(self._ask.prompt):
                return self._read(there)
            return self._go_on(self._tokens[-1:])

    def close(self) -> None:
        """Full pages stay in the store. Idempotent."""
        self._coming.close()
        if self._cache is not None:
            self._cache.close()

    def _open(self) -> TierStoreCache:
        """The pages that came, and what host memory and HBM have of the rest."""
        model = self._reader.model
        # By way of numpy: torch itself takes 40 ms for a tuple of 131,072 numbers.
        prompt = torch.from_numpy(np.array(self._ask.prompt, dtype=np.int64))
        self._cache = cache = TierStoreCache(
            self._store, prompt, model=model, salt=self._ask.salt, wait_for_room_s=_ROOM_S
        )
        self._given[cache_argument(model)] = cache
        reused, came = cache.reused_by_tier, self._coming.origins(PageGroups(self._store).page_size)
        for tier in (Tier.HOST, Tier.NVME):
            moved = min(came[tier], reused[Tier.HBM])
            reused[Tier.HBM] -= moved
            reused[tier] += moved
        self._reused = {tier.name: count for tier, count in reused.items() if count}
        self._coming.close()
        self._tell(Read(cache.get_seq_length()))
        return cache

    def _read(self, first: int) -> Usage | None:
        part = self._ask.prompt[first : first + self._chunk]
        if first + len(part) == len(self._ask.prompt) and self._ask.max_tokens:
            return self._go_on(list(part))
        self._forward(list(part))
        self._tell(Read(first + len(part)))
        if first + len(part) < len(self._ask.prompt):
            return None
        self._first_at = monotonic()
        return self._done("length")

    def _go_on(self, part: list[int]) -> Usage | None:
        """The next token, after these."""
        token = self._sampler.choose(self._forward(part))
        if self._first_at is None:
            self._first_at = monotonic()
            self._tell(Read(len(self._ask.prompt)))
        self._tokens.append(token)
        if token in self._ends:
            return self._done("stop")
        text = self._spelling.add(token)
        if text:
            self._tell(Piece(text))
        if self._spelling.stopped:
            return self._done("stop")
        return self._done("length") if len(self._tokens) == self._ask.max_tokens else None

    def _forward(self, part: list[int]) -> torch.Tensor:
        """Logits after the last of these tokens, ``[1, vocabulary]``."""
        given: Any = torch.tensor([part], device=self._device)
        found: torch.Tensor = self._reader.model(given, logits_to_keep=1, **self._given).logits[:, -1]
        return found

    def _done(self, reason: FinishReason) -> Usage:
        rest = self._spelling.end()
        if rest:
            self._tell(Piece(rest))
        assert self._first_at is not None
        usage = Usage(
            prompt_tokens=len(self._ask.prompt),
            completion_tokens=len(self._tokens),
            reused=self._reused,
            waited_s=self._began_at - self._asked_at,
            ttft_s=self._first_at - self._asked_at,
            total_s=monotonic() - self._asked_at,
        )
        self._tell(Done(reason, usage))
        return usage
