"""A model that is asked with the store and without it, in float32, a draft model for it, and what it is asked."""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from benchmarks.compare.verdicts import Plain
from tierstore.adapters.huggingface import ATTENTION, TierStoreCache, cache_argument, page_specs
from tierstore.adapters.huggingface.model_spec import kv_shape
from tierstore.demo.documents import find_documents
from tierstore.page import PageSpec
from tierstore.types import Tier

Prompt = tuple[int, ...]

SEED = 7
"""Samples are drawn after this seed, with the store and without it."""


@dataclass(frozen=True, slots=True)
class Question:
    """What decides the answer: ``rows`` of them to each prompt (samples, or all beams), ``new_tokens`` each."""

    prompts: tuple[Prompt, ...]
    new_tokens: int
    kind: Literal["greedy", "samples", "beams"] = "greedy"
    rows: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens that a model without any cache of earlier requests computes, of all rows."""
        return self.rows * sum(len(prompt) + self.new_tokens - 1 for prompt in self.prompts)

    @property
    def paddings(self) -> list[int]:
        """Columns of padding before each prompt."""
        width = max(map(len, self.prompts))
        return [width - len(prompt) for prompt in self.prompts]

    def tensors(self, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The prompts side by side, padded on the left, and their mask; int64 ``[prompts, columns]``."""
        pairs = list(zip(self.paddings, self.prompts, strict=True))
        ids = [[pad] * count + list(prompt) for count, prompt in pairs]
        mask = [[0] * count + [1] * len(prompt) for count, prompt in pairs]
        return torch.tensor(ids), torch.tensor(mask)

    def options(self) -> dict[str, Any]:
        """Arguments of ``generate``."""
        given: dict[str, Any] = {"max_new_tokens": self.new_tokens, "do_sample": self.kind == "samples"}
        if self.rows > 1:
            given["num_return_sequences"] = self.rows
        if self.kind == "beams":
            given["num_beams"] = self.rows
        return given


@dataclass(frozen=True, slots=True)
class Request:
    """A question as it is put to the store, and what must be found there.

    ``salt``: requests of one salt share pages. ``least_reused``: tokens of the prompts that must not be computed again;
    ``found_in``: the tier that ``least_found`` of them must come from.
    """

    case: str
    question: Question
    salt: bytes = b""
    chunk: int | None = None
    assisted: bool = False
    least_reused: int = 0
    found_in: Tier | None = None
    least_found: int = 0

    def options(self) -> dict[str, Any]:
        """Arguments of ``generate`` over the store; those beyond the question's must not change the answer."""
        chunk = {} if self.chunk is None else {"prefill_chunk_size": self.chunk}
        return self.question.options() | chunk


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


TEXTS = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens. The defaults are those of ``tierstore compare``; tests make it small."""

    long: int = 1080
    short: int = 632
    new: int = 24
    page: int = 32
    chunk: int = 150
    samples: int = 3
    beams: int = 4
    inside: int = 7
    """How far into a page a prompt follows a stored one before it leaves it."""
    tail: int = 60
    """The own part of a prompt that shares the rest."""
    turn: int = 45
    """A question of a chat."""

    def stored(self, length: int) -> int:
        """Tokens of a prompt of ``length`` that need not be computed once it was answered: those in full pages.

        Its last token always is.
        """
        return min(length - 1, (length + self.new - 1) // self.page * self.page)


def read_texts(tokenizer: PreTrainedTokenizerBase, sizes: Sizes, paths: Sequence[Path] = ()) -> list[Prompt]:
    """TEXTS different real texts of ``sizes.long`` tokens each. Raises DocumentError if there are too few."""
    found = find_documents(tokenizer, TEXTS, sizes.long, sizes.long * 5 // 4, paths)
    return [tuple(tokenizer(document.text, verbose=False)["input_ids"][: sizes.long]) for document in found]


def mixed_batch(texts: Sequence[Prompt], sizes: Sizes) -> Question:
    """Four prompts of different lengths, when the first text is stored and nothing else.

    One whole; one that shares three quarters of its pages; one that leaves it inside a page; one that is new, and so
    short that the columns of the third are reused beyond that page's begin: a batch begins at one column for all.
    """
    stored, *others = texts
    pages = sizes.long // sizes.page
    leaves = (pages - 3) * sizes.page + sizes.inside
    inside = stored[:leaves] + _unlike(stored[leaves], others[1])[: sizes.tail]
    shared = pages * 3 // 4 * sizes.page
    partly = stored[:shared] + _unlike(stored[shared], others[0])[: sizes.tail]
    new = _unlike(stored[0], others[2])[: sizes.tail + sizes.inside // 2]
    return Question((stored, partly, inside, new), sizes.new)


def forks_inside_a_page(text: Prompt, other: Prompt, sizes: Sizes) -> Prompt:
    """The beginning of ``text``, up to a token inside a page, and then another text."""
    leaves = (len(text) - sizes.tail) // sizes.page * sizes.page + sizes.inside
    return text[:leaves] + _unlike(text[leaves], other)[: sizes.tail]


def _unlike(token: int, text: Prompt) -> Prompt:
    """The text from its first word on that is another token than ``token``; the start token left out."""
    begin = next(i for i, each in enumerate(text) if i and each != token)
    return text[begin:]
