"""Ask a loaded model with the store and without it. Times start when the prompt is tokenized."""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from tierstore.adapters.huggingface import (
    ATTENTION,
    TierStoreCache,
    cache_argument,
    model_identity,
    page_spec,
)
from tierstore.page import PageSpec
from tierstore.store import TierStore
from tierstore.types import Tier

NEAR_TIE = 1e-4
"""Below this gap between the two best logits of the plain run, float32 rounding may decide either way."""


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """The answer of plain transformers. ``gaps`` has, for every token, its logit minus that of the runner-up."""

    tokens: list[int]
    ttft_s: float
    gaps: list[float] = field(repr=False)


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The answer over the store. ``tier`` is the slowest one that pages came from, None without a hit.

    ``exact``: no page went through a lossy codec, or was computed over such a page.
    """

    tokens: list[int]
    ttft_s: float
    reused_tokens: int
    tier: Tier | None
    exact: bool = True


class FirstToken(BaseStreamer):
    """Notes when ``generate`` returns the first new token. It hands over the prompt before that."""

    def __init__(self) -> None:
        self.calls = 0
        self.at: float | None = None

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


class Session:
    """A model and its tokenizer in float32 on ``device``, as in ``hbm.device``."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        """Load the model in ``folder``. Downloads nothing."""
        transformers_logging.disable_progress_bar()
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=ATTENTION, local_files_only=True
        ).eval()
        torch.nn.Module.to(self.model, device)

    def spec(self, page_size: int) -> PageSpec:
        """Return the pages of this model; its identity is a digest of the weights in memory."""
        return page_spec(self.model.config, page_size, self.model.dtype, model_identity(self.model))

    def prompt(self, document: str, question: str) -> list[int]:
        """Return the ids of one request. The document comes first, so that questions about it share a prefix."""
        text = f"{document}\n\nAnswer in one sentence. {question}"
        if self.tokenizer.chat_template:
            chat = [{"role": "user", "content": text}]
            text = str(self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def text(self, tokens: Sequence[int]) -> str:
        """Return the answer as one line of text."""
        return " ".join(str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)).split())

    def plain(self, ids: list[int], max_new_tokens: int) -> PlainAnswer:
        """Ask without the store: the whole prompt is computed, with transformers' own cache and SDPA."""
        self.model.set_attn_implementation("sdpa")
        first = FirstToken()
        begin = time.perf_counter()
        out = self._generate(ids, max_new_tokens, first, output_logits=True, return_dict_in_generate=True)
        top = [step[0].topk(2).values for step in out.logits]
        assert first.at is not None
        return PlainAnswer(
            out.sequences[0, len(ids) :].tolist(),
            first.at - begin,
            [float(pair[0] - pair[1]) for pair in top],
        )

    def ingest(self, store: TierStore, ids: list[int]) -> int:
        """Compute a document's K/V into the store. Returns the tokens that were there already."""
        self.model.set_attn_implementation(ATTENTION)
        with torch.no_grad(), TierStoreCache(store, ids, model=self.model) as cache:
            rest = torch.tensor([ids[cache.get_seq_length() :]], device=self.model.device)
            self.model(rest, logits_to_keep=1, **{cache_argument(self.model): cache})
            return cache.reused_tokens

    def stored(self, store: TierStore, ids: list[int], max_new_tokens: int) -> StoredAnswer:
        """Ask over the store. The time to first token covers match, restore and the rest of the prompt."""
        self.model.set_attn_implementation(ATTENTION)
        first = FirstToken()
        exact = store.match(store.keys(ids)).exact
        begin = time.perf_counter()
        with TierStoreCache(store, ids, model=self.model) as cache:
            out = self._generate(ids, max_new_tokens, first, **{cache_argument(self.model): cache})
            tier = max((tier for tier, count in cache.reused_by_tier.items() if count), default=None)
            assert first.at is not None
            return StoredAnswer(
                out[0, len(ids) :].tolist(), first.at - begin, cache.reused_tokens, tier, exact
            )

    def _generate(self, ids: list[int], max_new_tokens: int, first: FirstToken, **more: Any) -> Any:
        """Generate greedily. Without a mask, generate would take a pad token inside the text for padding."""
        assert isinstance(self.model, GenerationMixin)
        return self.model.generate(
            torch.tensor([ids], device=self.model.device),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=self.model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            streamer=first,
            pad_token_id=self.tokenizer.pad_token_id or 0,
            **more,
        )


def agreeing(plain: PlainAnswer, tokens: Sequence[int]) -> int:
    """Return the number of leading tokens that both answers share."""
    pairs = enumerate(zip(plain.tokens, tokens, strict=False))
    return next((step for step, (a, b) in pairs if a != b), min(len(plain.tokens), len(tokens)))


def differs(plain: PlainAnswer, tokens: Sequence[int]) -> str:
    """Return "same", "near-tie" (the plain run's two best logits are < 1e-4 apart where they differ) or "other"."""
    if plain.tokens == list(tokens):
        return "same"
    step = agreeing(plain, tokens)
    return "near-tie" if step < len(plain.gaps) and plain.gaps[step] < NEAR_TIE else "other"
