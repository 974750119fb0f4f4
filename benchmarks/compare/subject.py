"""The model under test, which answers with and without the store in float32; its draft model; and the requests."""

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
"""Random seed that is set before each call to ``generate``, with the store and without it."""


@dataclass(frozen=True, slots=True)
class Question:
    """The parameters that determine the answers.

    Each prompt gets ``rows`` answers (the samples or the beams) of ``new_tokens`` tokens each.
    """

    prompts: tuple[Prompt, ...]
    new_tokens: int
    kind: Literal["greedy", "samples", "beams"] = "greedy"
    rows: int = 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens, over all rows, that the model computes if it reuses nothing from earlier requests."""
        return self.rows * sum(len(prompt) + self.new_tokens - 1 for prompt in self.prompts)

    @property
    def paddings(self) -> list[int]:
        """Number of padding columns before each prompt."""
        width = max(map(len, self.prompts))
        return [width - len(prompt) for prompt in self.prompts]

    def tensors(self, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the prompts, padded on the left with ``pad``, and their mask: both int64 ``[prompts, columns]``."""
        pairs = list(zip(self.paddings, self.prompts, strict=True))
        ids = [[pad] * count + list(prompt) for count, prompt in pairs]
        mask = [[0] * count + [1] * len(prompt) for count, prompt in pairs]
        return torch.tensor(ids), torch.tensor(mask)

    def options(self) -> dict[str, Any]:
        """Return the arguments of ``generate`` for this question."""
        given: dict[str, Any] = {"max_new_tokens": self.new_tokens, "do_sample": self.kind == "samples"}
        if self.rows > 1:
            given["num_return_sequences"] = self.rows
        if self.kind == "beams":
            given["num_beams"] = self.rows
        return given


@dataclass(frozen=True, slots=True)
class Request:
    """A question that is asked with the store, and the expected amount of reuse.

    Only requests with the same ``salt`` share pages. ``chunk`` is the number of tokens per prefill chunk, or None for a
    prefill in one step. With ``assisted``, the draft model is used. At least ``least_reused`` tokens of the prompts
    must be reused. If ``found_in`` is set, at least ``least_found`` tokens must come from this tier.
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
        """Return the arguments of ``generate`` for a run with the store.

        Arguments that are not in ``Question.options`` must not change the answers.
        """
        chunk = {} if self.chunk is None else {"prefill_chunk_size": self.chunk}
        return self.question.options() | chunk


_LAYER = re.compile(r"(?<=layers)\.(\d+)\.")

DRAFTED = 4
"""Number of tokens that the draft model proposes at a time."""


class Subject:
    """A model and its draft model. Answers have a fixed length, because the end-of-sequence token is disabled."""

    def __init__(self, name: str, model: PreTrainedModel) -> None:
        """Prepare ``model`` for the comparison, which changes its attention and its generation defaults.

        Raises:
            ValueError: The adapter does not support the model.
        """
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
        """Load the model from ``folder`` to ``device``, without access to the network."""
        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=ATTENTION, local_files_only=True
        )
        torch.nn.Module.to(model, device)
        return cls(name, model)

    def specs(self, page_size: int, *, with_draft: bool) -> tuple[PageSpec, ...]:
        """Return the page specifications of the model and, with ``with_draft``, of its draft model."""
        return page_specs(self.model, page_size, draft=self.draft if with_draft else None)

    def plain(self, question: Question) -> Plain:
        """Return the answers of plain transformers, with its own cache and SDPA. Results are kept for later calls."""
        if question not in self._plain:
            self.model.set_attn_implementation("sdpa")
            try:
                self._plain[question] = self._ask_plain(question)
            finally:
                self.model.set_attn_implementation(ATTENTION)
        return self._plain[question]

    def stored(self, cache: TierStoreCache, request: Request) -> list[list[int]]:
        """Return the answers that the model gives with ``cache``, an open cache of the store."""
        given: dict[str, Any] = {cache_argument(self.model): cache}
        if request.assisted:
            given["assistant_model"] = cache.draft_model
        out = self._generate(request.question, **given, **request.options())
        return _answers(out, request.question)

    def score(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """Return the mean log-probability of an answer's tokens, computed without a cache."""
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
    """Load the tokenizer from ``folder``, without access to the network."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer


def drafting(model: PreTrainedModel) -> PreTrainedModel:
    """Return a draft model that shares the weights of ``model`` but skips an eighth of its layers.

    The missing layers are those after the first two thirds. About half of the drafts are correct, so that both accepted
    and rejected drafts occur.
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
    torch.nn.Module.to(draft, model.device)  # buffers were created on the CPU
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
    """Sizes in tokens, and the numbers of samples and beams.

    The defaults are those of ``tierstore compare``. Tests use smaller values.
    """

    long: int = 1080
    short: int = 632
    new: int = 24
    page: int = 32
    chunk: int = 150
    samples: int = 3
    beams: int = 4
    inside: int = 7
    """Number of tokens that a prompt shares with a stored one in the page in which it diverges."""
    tail: int = 60
    """Length of the part at the end of a prompt that differs from the stored prompt."""
    turn: int = 45
    """Length of a question in a chat."""

    def stored(self, length: int) -> int:
        """Return how many tokens of a prompt with ``length`` tokens can be reused once it has been answered.

        A prompt token can be reused if it is in a full page, which may also contain tokens of the answer. The last
        prompt token is always computed.
        """
        return min(length - 1, (length + self.new - 1) // self.page * self.page)


def read_texts(tokenizer: PreTrainedTokenizerBase, sizes: Sizes, paths: Sequence[Path] = ()) -> list[Prompt]:
    """Return ``TEXTS`` different real texts of ``sizes.long`` tokens. Raises DocumentError if there are too few."""
    found = find_documents(tokenizer, TEXTS, sizes.long, sizes.long * 5 // 4, paths)
    return [tuple(tokenizer(document.text, verbose=False)["input_ids"][: sizes.long]) for document in found]


def mixed_batch(texts: Sequence[Prompt], sizes: Sizes) -> Question:
    """Return a batch of four prompts of different lengths, for a store that contains only the first text.

    The prompts are the first text, a prompt that shares three quarters of that text's pages, a prompt that diverges
    from that text inside a page, and a new prompt. All rows of a batch start to compute at the same column. The new
    prompt is so short that this column lies inside the page in which the third prompt diverges, so part of that page is
    reused.
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
    """Return a prompt that begins like ``text``, diverges from it inside a page, and continues with ``other``."""
    leaves = (len(text) - sizes.tail) // sizes.page * sizes.page + sizes.inside
    return text[:leaves] + _unlike(text[leaves], other)[: sizes.tail]


def _unlike(token: int, text: Prompt) -> Prompt:
    """Return ``text`` from its first token that differs from ``token``. The start token is skipped."""
    begin = next(i for i, each in enumerate(text) if i and each != token)
    return text[begin:]
