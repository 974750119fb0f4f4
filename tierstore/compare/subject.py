"""A model that is asked with the store and without it, in float32, and a draft model for it."""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from tierstore.adapters.huggingface import ATTENTION, TierStoreCache, cache_argument, page_specs
from tierstore.adapters.huggingface.model_spec import kv_shape
from tierstore.compare.judging import Plain
from tierstore.compare.request import SEED, Question, Request
from tierstore.page import PageSpec

_LAYER = re.compile(r"(?<=layers)\.(\d+)\.")

DRAFTED = 4
"""Tokens that the draft model proposes at a time."""


class Subject:
    """One model. Answers have a fixed length: no token ends one."""

    def __init__(self, name: str, model: PreTrainedModel) -> None:
        """Takes the model over: its attention and generation defaults change. ValueError if it cannot be served."""
        kv_shape(model.config)
        self.name = name
        self.model = model.eval()
        self.draft = drafting(model)
        for each in (self.model, self.draft):
            each.set_attn_implementation(ATTENTION)
            assert each.generation_config is not None
            each.generation_config.eos_token_id = None
        self.pad: int = model.config.get_text_config().pad_token_id or 0
        self._plain: dict[Question, Plain] = {}

    @classmethod
    def load(cls, name: str, folder: Path, device: str = "cpu") -> Self:
        """The model in ``folder``, on ``device``; nothing is downloaded."""
        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=ATTENTION, local_files_only=True
        )
        torch.nn.Module.to(model, device)
        return cls(name, model)

    def specs(self, page_size: int, *, with_draft: bool) -> tuple[PageSpec, ...]:
        """The KV groups of the model's pages, and of its draft's."""
        return page_specs(self.model, page_size, draft=self.draft if with_draft else None)

    def plain(self, question: Question) -> Plain:
        """The answer of transformers' own cache and SDPA; each question is asked once."""
        if question not in self._plain:
            self.model.set_attn_implementation("sdpa")
            try:
                self._plain[question] = self._ask_plain(question)
            finally:
                self.model.set_attn_implementation(ATTENTION)
        return self._plain[question]

    def stored(self, cache: TierStoreCache, request: Request) -> list[list[int]]:
        """The answers over an open cache."""
        given: dict[str, Any] = {cache_argument(self.model): cache}
        if request.assisted:
            given["assistant_model"] = cache.draft_model
        out = self._generate(request.question, **given, **request.options())
        return _answers(out, request.question)

    def score(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """Mean log-probability of an answer's tokens, without any cache."""
        self.model.set_attn_implementation("sdpa")
        try:
            with torch.no_grad():
                ids = torch.tensor([[*prompt, *answer]], device=self.model.device)
                logits = self.model(ids, use_cache=False).logits[0]
        finally:
            self.model.set_attn_implementation(ATTENTION)
        steps = logits[len(prompt) - 1 : -1].log_softmax(-1)
        return float(steps.gather(1, torch.tensor(list(answer), device=steps.device)[:, None]).mean())

    def _ask_plain(self, question: Question) -> Plain:
        if question.kind != "greedy":
            return Plain(_answers(self._generate(question, **question.options()), question))
        out = self._generate(question, **question.options(), output_logits=True, return_dict_in_generate=True)
        top = torch.stack([step.topk(2).values for step in out.logits])
        gaps = (top[..., 0] - top[..., 1]).T.tolist()
        return Plain(_answers(out.sequences, question), gaps)

    def _generate(self, question: Question, **options: Any) -> Any:
        device = self.model.device
        assert isinstance(self.model, GenerationMixin)
        ids, mask = (each.to(device) for each in question.tensors(self.pad))
        torch.manual_seed(SEED)
        return self.model.generate(ids, attention_mask=mask, pad_token_id=self.pad, **options)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in ``folder``; nothing is downloaded."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer


def drafting(model: PreTrainedModel) -> PreTrainedModel:
    """A draft model: the model without an eighth of its layers, after two thirds of them; weights are shared.

    Its drafts are right about half of the time, so that accepted and rejected ones both come up.
    """
    config = copy.deepcopy(model.config)
    number = config.num_hidden_layers
    left_out = range(number * 2 // 3, number * 2 // 3 + max(1, number // 8))
    kept = [layer for layer in range(number) if layer not in left_out]
    config.num_hidden_layers = len(kept)
    kinds = config.to_dict().get("layer_types")
    if kinds:
        config.layer_types = [kinds[layer] for layer in kept]
    draft: PreTrainedModel = type(model)(config)
    own = model.state_dict()
    names = {name: _LAYER.sub(lambda found: f".{kept[int(found[1])]}.", name) for name in draft.state_dict()}
    draft.load_state_dict({name: own[source] for name, source in names.items()}, assign=True)
    torch.nn.Module.to(draft, model.device)  # what is no weight was made on the CPU
    draft.tie_weights()
    settings = draft.generation_config
    assert settings is not None
    settings.num_assistant_tokens = DRAFTED
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = 0.0
    draft.eval()
    return draft


def _answers(out: torch.Tensor, question: Question) -> list[list[int]]:
    return [[int(token) for token in row[-question.new_tokens :]] for row in out]
