"""The documents of ``bench hints`` with a model: it answers questions, and the time to the first token is measured."""

# Some functions of transformers have no types:
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
"""Number of tokens in a question."""
ANSWER = 8
"""Number of tokens in an answer. Only the time until the first one is measured."""


def load_model(folder: Path, device: str) -> PreTrainedModel:
    """Load a model in float32 from a local folder, without access to the network."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=ATTENTION, local_files_only=True
    )
    torch.nn.Module.to(model, device)
    model.eval()
    return model


def llama_8b(layers: int) -> LlamaConfig:
    """Return the config of a model with the shape of Llama 3.1 8B, except for the number of layers (Llama has 32)."""
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
    """Create a model with random weights in bfloat16. The weights are the same in every run."""
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
    """Return the page specification of the model. Its identity is a digest of the weights."""
    return page_spec(model.config, page_size, model.dtype, model_identity(model))


def spec_of_random(model: PreTrainedModel, page_size: int) -> PageSpec:
    """Return the page specification of a model with random weights, without reading the weights for its identity."""
    return page_spec(model.config, page_size, model.dtype, "random")


def texts(folder: Path, files: Sequence[Path], documents: int, tokens: int) -> list[list[int]]:
    """Cut the texts of ``files`` into consecutive documents of ``tokens`` token IDs each.

    Raises:
        ValueError: The texts are too short.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids: list[int] = []
    for file in files:
        ids += tokenizer(file.read_text(errors="replace"), verbose=False)["input_ids"]
        if len(ids) >= documents * tokens:
            return [ids[start * tokens : (start + 1) * tokens] for start in range(documents)]
    raise ValueError(
        f"the texts have {len(ids)} tokens, but {documents * tokens} are needed; give more --docs or lower --tokens"
    )


class Answers:
    """A library of documents about which a model answers questions.

    The last ``QUESTION`` tokens of each document are the question. The pages of the tokens before the question are put
    into the store on creation.

    Args:
        store: The store.
        model: The model.
        documents: Token IDs of each document.
        computed: Whether the model computes the pages. If False, the pages are filled with random numbers, which take
            as long to load.
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
        """Answer the question about a document by greedy decoding, and measure the time to the first token."""
        seconds, tokens = self._run(self._prompts[number], ANSWER, "read-only")
        return Answer(seconds, tuple(tokens))

    @torch.no_grad()
    def _run(self, ids: list[int], length: int, storing: Storing) -> tuple[float, list[int]]:
        """Generate ``length`` tokens. Return the seconds until the first token is on the host, and all tokens."""
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
