"""A small random Llama in float32, a store for a few of its prompts, and functions that run requests with both."""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.support.pages import PATIENCE_S
from tierstore.adapters.huggingface import (
    ATTENTION,
    TierStoreCache,
    cache_argument,
    page_specs,
)
from tierstore.adapters.huggingface.cache import TierStoreLayer
from tierstore.config import load_config
from tierstore.store import TierStore

Model = TypeVar("Model", bound=PreTrainedModel)

PAGE = 8
NEW = 7
"""Tokens of an answer, unless a test asks for another number."""
VOCABULARY = 97


def tiny_llama(
    num_kv_heads: int = 2, num_layers: int = 3, seed: int = 0, vocabulary: int = VOCABULARY
) -> LlamaForCausalLM:
    """Return a Llama with 4 query heads of 8 dimensions.

    Its large weights keep logits far apart, so that wrong K/V lead to other answers.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return strong(LlamaForCausalLM(config))


def strong(model: Model) -> Model:
    """Enlarge the weights of the model, prepare it for inference with a store, and return it."""
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    model.set_attn_implementation(ATTENTION)
    return model


def random_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(2, VOCABULARY, (length,), generator=generator)]


@contextmanager
def open_store(
    model: PreTrainedModel,
    hbm: int = 32,
    host: int = 0,
    disk: Path | None = None,
    page_size: int = PAGE,
    draft: PreTrainedModel | None = None,
    codec: str = "none",
    payload: str = "auto",
) -> Iterator[TierStore]:
    """Yield a store with an HBM tier of ``hbm`` pages, a HOST tier of ``host`` pages, and an NVMe tier in ``disk``.

    At the end, require that no page leaked.
    """
    specs = page_specs(model, page_size, draft=draft)
    nbytes = sum(spec.page_nbytes for spec in specs)
    config: dict[str, Any] = {"hbm": {"capacity": hbm * nbytes, "device": str(model.device)}}
    if host:
        config["host"] = {"capacity": host * nbytes}
    if disk is not None:
        config["nvme"] = {"path": str(disk), "capacity": "64MiB", "codec": codec, "payload": payload}
    with TierStore.open(load_config(config), specs) as store:
        yield store
        store.check()
        # All of HBM can be allocated only if nothing is owned or leased any more.
        store.free(store.allocate(hbm, timeout_s=PATIENCE_S))


@dataclass
class Fed:
    """A record of a model's forward passes. ``widths`` contains the number of tokens of each pass."""

    widths: list[int]


@contextmanager
def watch(model: PreTrainedModel) -> Iterator[Fed]:
    """Record the forward passes of the model while the context is open."""
    fed = Fed([])

    def note(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        fed.widths.append(args[0].shape[1])

    norm = model.base_model.get_submodule("norm")
    hook = norm.register_forward_pre_hook(note)
    yield fed
    hook.remove()


def generate(
    model: PreTrainedModel, prompt: list[int], cache: TierStoreCache | None, **options: Any
) -> list[int]:
    """Generate greedily unless ``options`` say otherwise. Return the new tokens.

    The mask of ones says that no token is padding. Without a mask, transformers treats each pad token in the prompt
    as padding, and a prompt that contains an earlier answer may contain one.
    """
    mask = torch.ones(1, len(prompt), dtype=torch.long, device=model.device)
    out = generate_batch(model, torch.tensor([prompt]), cache, **{"attention_mask": mask} | options)
    return [int(token) for token in out[0, len(prompt) :]]


def generate_batch(
    model: PreTrainedModel, ids: torch.Tensor, cache: TierStoreCache | None, **options: Any
) -> torch.Tensor:
    """Generate greedily unless ``options`` say otherwise. Return all rows, prompts included."""
    given: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0} | options
    if cache is not None:
        given[cache_argument(model)] = cache
    out: torch.Tensor = model.generate(ids.to(model.device), **given)  # type: ignore[operator]
    return out


def plain_batch(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the rows that transformers generates without a store, prompts included."""
    model.set_attn_implementation("sdpa")
    try:
        return generate_batch(model, ids, None, **options)
    finally:
        model.set_attn_implementation(ATTENTION)


def pad_left(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the prompts as rows padded on the left, and their mask."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    return ids, torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])


def plain(model: PreTrainedModel, prompt: list[int], **options: Any) -> list[int]:
    """Return the new tokens that transformers generates without a store."""
    model.set_attn_implementation("sdpa")
    try:
        return generate(model, prompt, None, **options)
    finally:
        model.set_attn_implementation(ATTENTION)


def ask(
    store: TierStore, model: PreTrainedModel, prompt: list[int], **options: Any
) -> tuple[list[int], TierStoreCache]:
    """Generate an answer with the store. Require that every token that was not reused was computed exactly once."""
    with watch(model) as fed, TierStoreCache(store, prompt, model=model) as cache:
        answer = generate(model, prompt, cache, **options)
        assert cache.get_seq_length() == len(prompt) + len(answer) - 1
        assert sum(fed.widths) == cache.get_seq_length() - cache.reused_tokens
        handles = [layer for layer in cache.layers if isinstance(layer, TierStoreLayer)]
        assert len(handles) == model.config.num_hidden_layers
        assert all(handle.keys is None and handle.values is None for handle in handles)
    return answer, cache
