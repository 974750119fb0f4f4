"""One request under way: its prompt is read in chunks, then it answers token by token."""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

import torch

from tierstore.adapters.huggingface import TierStoreCache, cache_argument
from tierstore.serve.asking import Ask, Done, Event, FinishReason, Piece, Read, Usage
from tierstore.serve.reader import Reader
from tierstore.serve.sampling import Sampler
from tierstore.serve.text import Spelling
from tierstore.store import TierStore


class Running:
    """A request that has started. For the engine's thread; ``close`` gives back what it holds."""

    def __init__(
        self,
        reader: Reader,
        store: TierStore,
        ask: Ask,
        tell: Callable[[Event], None],
        *,
        asked_at: float,
        chunk: int,
    ) -> None:
        """Brings its stored prefix up, and waits for what of it is on disk. ``asked_at`` by ``monotonic``."""
        self._reader, self._ask, self._tell, self._chunk = reader, ask, tell, chunk
        self._asked_at, self._began_at = asked_at, monotonic()
        self._first_at: float | None = None
        self._ends = reader.ends
        self._tokens: list[int] = []
        self._device = reader.model.device
        self._sampler = Sampler(ask.sampling, self._device)
        self._spelling = Spelling(reader.tokenizer, ask.prompt, ask.stop)
        self._cache = TierStoreCache(
            store, torch.tensor([ask.prompt], device=self._device), model=reader.model, salt=ask.salt
        )
        self._given = {cache_argument(reader.model): self._cache}
        self._tell(Read(self._there))

    @property
    def _there(self) -> int:
        """Tokens of prompt and answer that have K and V."""
        return self._cache.get_seq_length()

    def step(self) -> Usage | None:
        """Compute one chunk of the prompt, or one token of the answer. What it took, once all is told."""
        with torch.inference_mode():
            if self._there < len(self._ask.prompt):
                return self._read()
            return self._go_on(self._tokens[-1:])

    def close(self) -> None:
        """Full pages stay in the store. Idempotent."""
        self._cache.close()

    def _read(self) -> Usage | None:
        first = self._there
        part = self._ask.prompt[first : first + self._chunk]
        if first + len(part) == len(self._ask.prompt) and self._ask.max_tokens:
            return self._go_on(list(part))
        self._forward(list(part))
        self._tell(Read(self._there))
        if self._there < len(self._ask.prompt):
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
            reused={tier.name: count for tier, count in self._cache.reused_by_tier.items() if count},
            waited_s=self._began_at - self._asked_at,
            ttft_s=self._first_at - self._asked_at,
            total_s=monotonic() - self._asked_at,
        )
        self._tell(Done(reason, usage))
        return usage
