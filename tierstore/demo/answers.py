"""Asks a model questions with and without the store. Times do not include tokenizing the prompt."""

# transformers leaves some functions untyped:
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
from tierstore.adapters.huggingface.model_spec import check_model, model_of_option
from tierstore.page import PageSpec
from tierstore.store import TierStore
from tierstore.types import Tier

NEAR_TIE = 1e-4
"""Maximum difference between the two highest logits for which float32 rounding may decide which token is chosen."""


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """An answer from plain transformers, without the store.

    ``tokens`` are the token IDs of the answer, and ``ttft_s`` is the time to first token in seconds. ``gaps``
    contains, for each token, the difference between the highest logit and the second highest. ``cores`` is the
    average number of cores that the process kept busy until the first token.
    """

    tokens: list[int]
    ttft_s: float
    gaps: list[float] = field(repr=False)
    cores: float = 0.0


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer that was computed with the store.

    Attributes:
        tokens: The token IDs of the answer.
        ttft_s: Time to first token in seconds.
        reused_tokens: Number of prompt tokens whose pages were reused.
        tier: The slowest tier that reused pages came from, or None if no page was reused.
        exact: False if a stored page of the prompt went through a lossy codec, or was computed from a page that did.
        stored_tokens: Number of prompt tokens whose pages were in the store.
        missing_because: Why fewer tokens were reused than were stored. See ``TierStoreCache.missing_because``.
    """

    tokens: list[int]
    ttft_s: float
    reused_tokens: int
    tier: Tier | None
    exact: bool = True
    stored_tokens: int = 0
    missing_because: str | None = None


class FirstToken(BaseStreamer):
    """A streamer that records when ``generate`` produces the first token of the answer.

    ``at`` is that time on the clock of ``time.perf_counter``. ``generate`` first calls ``put`` with the prompt, so
    the second call delivers the first token.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.at: float | None = None
        self.used_s = time.process_time()
        """CPU time of the process, in seconds, from the creation of this object to the first token.

        Before the first token, this is the total CPU time of the process when the object was created.
        """

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            self.at = time.perf_counter()
            self.used_s = time.process_time() - self.used_s

    def end(self) -> None:
        pass


class Session:
    """A model with its tokenizer, which answers prompts. The model computes in float32."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        """Load the model in ``folder``. Nothing is downloaded.

        Args:
            folder: The model's folder, in the format of transformers.
            device: The device that runs the model, named as in ``hbm.device``.

        Raises:
            ConfigError: transformers cannot load the model, or TierStore does not support it.
        """
        transformers_logging.disable_progress_bar()
        self._folder = folder
        with model_of_option(folder):
            self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                folder, local_files_only=True
            )
            self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation=ATTENTION, local_files_only=True
            ).eval()
            check_model(self.model)
            torch.nn.Module.to(self.model, device)

    def spec(self, page_size: int) -> PageSpec:
        """Return the specification of this model's pages. It identifies the model by a digest of the weights."""
        with model_of_option(self._folder):
            return page_spec(self.model.config, page_size, self.model.dtype, model_identity(self.model))

    def prompt(self, document: str, question: str) -> list[int]:
        """Return the token IDs of the prompt that asks a question about a document.

        The document comes first, so that all prompts about it share a prefix.
        """
        text = f"{document}\n\nAnswer in one sentence. {question}"
        if self.tokenizer.chat_template:
            chat = [{"role": "user", "content": text}]
            text = str(self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def text(self, tokens: Sequence[int]) -> str:
        """Decode an answer to one line of text, without special tokens."""
        return " ".join(str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)).split())

    def plain(self, ids: list[int], max_new_tokens: int) -> PlainAnswer:
        """Answer a prompt without the store, with transformers' own cache and SDPA. Computes the whole prompt."""
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
            first.used_s / (first.at - begin),
        )

    def ingest(self, store: TierStore, ids: list[int]) -> int:
        """Compute the K and V of a document and put them into the store.

        Return the number of tokens that were already stored.
        """
        self.model.set_attn_implementation(ATTENTION)
        with torch.no_grad(), TierStoreCache(store, ids, model=self.model) as cache:
            rest = torch.tensor([ids[cache.get_seq_length() :]], device=self.model.device)
            self.model(rest, logits_to_keep=1, **{cache_argument(self.model): cache})
            return cache.reused_tokens

    def stored(self, store: TierStore, ids: list[int], max_new_tokens: int) -> StoredAnswer:
        """Answer a prompt with the store.

        The time to first token includes the lookup, the restore, and computing the rest of the prompt.
        """
        self.model.set_attn_implementation(ATTENTION)
        first = FirstToken()
        found = store.match(store.keys(ids))
        begin = time.perf_counter()
        with TierStoreCache(store, ids, model=self.model) as cache:
            out = self._generate(ids, max_new_tokens, first, **{cache_argument(self.model): cache})
            tier = max((tier for tier, count in cache.reused_by_tier.items() if count), default=None)
            assert first.at is not None
            return StoredAnswer(
                out[0, len(ids) :].tolist(),
                first.at - begin,
                cache.reused_tokens,
                tier,
                found.exact,
                found.num_pages * cache.batch.terms.pages.page_size,
                cache.missing_because,
            )

    def _generate(self, ids: list[int], max_new_tokens: int, first: FirstToken, **more: Any) -> Any:
        """Generate an answer greedily.

        An attention mask is passed, because without one, ``generate`` would treat pad tokens in the text as padding.
        """
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
    """Return the number of tokens before the first one that differs between the two answers."""
    pairs = enumerate(zip(plain.tokens, tokens, strict=False))
    return next((step for step, (a, b) in pairs if a != b), min(len(plain.tokens), len(tokens)))


def differs(plain: PlainAnswer, tokens: Sequence[int]) -> str:
    """Compare an answer with that of plain transformers. Return "same", "near-tie" or "other".

    "near-tie" means that, at the first token that differs, the two highest logits of the plain run are less than
    1e-4 apart. Rounding may then decide between them.
    """
    if plain.tokens == list(tokens):
        return "same"
    step = agreeing(plain, tokens)
    return "near-tie" if step < len(plain.gaps) and plain.gaps[step] < NEAR_TIE else "other"
