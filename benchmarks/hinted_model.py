"""Documents that a model answers questions over, for ``bench hints``: an answer is the first token and what follows."""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.hints import PATIENCE_S, Answer, put
from tierstore.adapters.huggingface import (
    ATTENTION,
    TierStoreCache,
    cache_argument,
    model_identity,
    page_spec,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tierstore.adapters.huggingface.request import Storing
    from tierstore.page import PageSpec
    from tierstore.store import TierStore

QUESTION = 16
"""Tokens of a question."""
ANSWER = 8
"""Tokens of an answer, the first of which is timed."""


def load_model(folder: Path, device: str) -> PreTrainedModel:
    """In float32, from a folder on this machine."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=ATTENTION, local_files_only=True
    )
    torch.nn.Module.to(model, device)
    model.eval()
    return model


def llama_8b(layers: int) -> LlamaConfig:
    """The shape of Llama 3.1 8B, which has 32 layers."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=1 << 18,
    )


def random_model(config: LlamaConfig, device: str) -> PreTrainedModel:
    """Random weights in bfloat16, the same each time."""
    torch.manual_seed(0)
    config._attn_implementation = ATTENTION
    config.dtype = torch.bfloat16
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.eval()
    return model


def spec_of(model: PreTrainedModel, page_size: int) -> PageSpec:
    """The pages of this very model."""
    return page_spec(model.config, page_size, model.dtype, model_identity(model))


def spec_of_random(model: PreTrainedModel, page_size: int) -> PageSpec:
    """The same, without reading the weights."""
    return page_spec(model.config, page_size, model.dtype, "random")


def texts(folder: Path, files: Sequence[Path], documents: int, tokens: int) -> list[list[int]]:
    """Token ids of so many pieces of these texts, one after the other. ValueError if they are too short."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids: list[int] = []
    for file in files:
        ids += tokenizer(file.read_text(errors="replace"), verbose=False)["input_ids"]
        if len(ids) >= documents * tokens:
            return [ids[start * tokens : (start + 1) * tokens] for start in range(documents)]
    raise ValueError(f"the texts have {len(ids)} tokens, but {documents * tokens} are needed")


class Answers:
    """``documents``: token ids; each but its last tokens is in the store, and these are the question.

    ``computed`` False: the pages hold random numbers that nobody computed, as good as others to be read.
    """

    def __init__(
        self,
        store: TierStore,
        model: PreTrainedModel,
        documents: Sequence[Sequence[int]],
        *,
        computed: bool = True,
    ) -> None:
        self.store = store
        self._model = model
        self._prompts = [list(ids) for ids in documents]
        self.documents = [store.keys(ids[:-QUESTION]) for ids in self._prompts]
        for number, ids in enumerate(self._prompts):
            if computed:
                self._run(ids[:-QUESTION], 1, "all")
            else:
                generator = torch.Generator(model.device).manual_seed(number)
                put(store, self.documents[number], partial(torch.Tensor.normal_, generator=generator))
        store.flush()

    def ask(self, number: int) -> Answer:
        """The document and its last tokens as a question; greedy."""
        seconds, tokens = self._run(self._prompts[number], ANSWER, "read-only")
        return Answer(seconds, tuple(tokens))

    @torch.no_grad()
    def _run(self, ids: list[int], length: int, storing: Storing) -> tuple[float, list[int]]:
        """Seconds until the first new token is on the host, and the first ``length``."""
        model: Any = self._model
        begin = perf_counter()
        first, found = 0.0, []
        options: dict[str, Any] = {"storing": storing, "timeout_s": PATIENCE_S}
        with TierStoreCache(self.store, ids, model=self._model, **options) as cache:
            given = torch.tensor([ids[cache.get_seq_length() :]], device=self._model.device)
            for number in range(length):
                out = model(given, logits_to_keep=1, **{cache_argument(self._model): cache})
                given = out.logits[:, -1:].argmax(-1)
                found.append(int(given))
                if number == 0:
                    first = perf_counter() - begin
        return first, found
