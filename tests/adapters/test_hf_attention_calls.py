"""Test that a model is refused if it alters K and V from the cache, or if its attention cannot run over pages."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    BertConfig,
    BertLMHeadModel,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.adapters.tiny import (
    PAGE,
    VOCABULARY,
    generate,
    generate_batch,
    open_store,
    pad_left,
    plain,
    plain_batch,
    random_prompt,
    strong,
    tiny_llama,
)
from tierstore.adapters.huggingface import ATTENTION, TierStoreCache, cache_argument, page_specs

Change = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

CHANGES: dict[str, Change] = {
    "scaled V": lambda k, v: (k, v * 0.5),
    "K normalised again": lambda k, v: (torch.nn.functional.normalize(k, dim=-1), v),
    "heads repeated": lambda k, v: (k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)),
    "heads chunked": lambda k, v: (k, torch.cat(v.chunk(2, dim=1)[::-1], dim=1)),
    "the last keys only": lambda k, v: (k[:, :, -4:], v[:, :, -4:]),
    "a sink before": lambda k, v: (torch.cat([k[:, :, :1], k], 2), torch.cat([v[:, :, :1], v], 2)),
    "V for K": lambda k, v: (v, v),
    "K and V exchanged": lambda k, v: (v, k),
    "V written in place": lambda k, v: (k, v.mul_(0.5)),
    "K written through a view": lambda k, v: (k[:, :, :1].zero_() * 0 + k, v),
    "a copy": lambda k, v: (k.clone(), v),
    "V written through .data": lambda k, v: (k, (v.data.mul_(0.5), v)[1]),
}


def give(
    model: LlamaForCausalLM,
    change: Change = lambda k, v: (k, v),
    query: Callable[[torch.Tensor], torch.Tensor] = lambda q: q,
    layers: tuple[int, ...] = (0, 1, 2),
    **more: Any,
) -> None:
    """Replace the attention of these layers. ``change`` alters K and V after ``cache.update`` has returned them."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: Any,
        attention_mask: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (
            project(hidden_states).view(shape).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx, kwargs=kwargs)
            k, v = change(k, v)
        attend = AttentionInterface().get_interface(self.config._attn_implementation, None)  # type: ignore[arg-type]
        out, _ = attend(self, query(q), k, v, attention_mask, scaling=self.scaling, **{**kwargs, **more})
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None

    for index in layers:
        attention = model.model.layers[index].self_attn
        attention.forward = MethodType(forward, attention)


@contextmanager
def refused(model: PreTrainedModel, prompt: list[int], match: str) -> Iterator[None]:
    """Check that every way to run the model with a store raises ValueError and leaves nothing in the store."""
    name = cache_argument(model)
    ids, mask = pad_left([prompt, prompt[:11]])
    with open_store(model) as store, torch.no_grad():
        with TierStoreCache(store, prompt, model=model) as cache, pytest.raises(ValueError, match=match):
            generate(model, prompt, cache)
        with TierStoreCache(store, prompt, model=model) as cache, pytest.raises(ValueError, match=match):
            generate(model, prompt, cache, prefill_chunk_size=5)
        with TierStoreCache(store, prompt, model=model) as cache:
            for _ in range(2):
                with pytest.raises(ValueError, match=match):
                    model(torch.tensor([prompt]), **{name: cache})
        with (
            TierStoreCache(store, ids, mask, model=model) as cache,
            pytest.raises(ValueError, match=match),
        ):
            generate_batch(model, ids, cache, attention_mask=mask)
        yield
        assert store.match(store.keys(prompt)).num_pages == 0
        assert store.match(store.keys(prompt[:11])).num_pages == 0


def tiny_diff_llama() -> DiffLlamaForCausalLM:
    """Return a small DiffLlama, which calls attention twice: once for each half of the value heads, repeated."""
    torch.manual_seed(0)
    config = DiffLlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return strong(DiffLlamaForCausalLM(config))


def test_diff_llama_is_refused_before_generating_or_storing() -> None:
    with refused(tiny_diff_llama(), random_prompt(20), "that the cache returned"):
        pass


def test_diff_llama_as_a_draft_model_is_refused() -> None:
    model, prompt = tiny_llama(), random_prompt(20)
    draft = tiny_diff_llama()
    with (
        open_store(model, draft=draft) as store,
        TierStoreCache(store, prompt, model=model, draft=draft) as cache,
        pytest.raises(ValueError, match="that the cache returned"),
    ):
        generate(model, prompt, cache, assistant_model=cache.draft_model)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_k_or_v_changed_after_the_cache_returned_them_is_refused(change: Change) -> None:
    model = tiny_llama()
    give(model, change)
    with refused(model, random_prompt(3 * PAGE), "that the cache returned"):
        pass


def test_a_change_only_in_the_last_layer_is_refused() -> None:
    model = tiny_llama()
    give(model, CHANGES["scaled V"], layers=(2,))
    with refused(model, random_prompt(3 * PAGE), "that the cache returned"):
        pass


def test_a_change_while_decoding_over_a_warm_prefix_is_refused() -> None:
    model, prompt = tiny_llama(), random_prompt(3 * PAGE)
    give(model, lambda k, v: (k, v if k.shape[2] > 1 else v * 0.5))
    with open_store(model) as store, torch.no_grad():
        for reused in (0, 3 * PAGE - 1):
            with TierStoreCache(store, prompt, model=model) as cache:
                assert cache.reused_tokens == reused
                with pytest.raises(ValueError, match="that the cache returned"):
                    generate(model, prompt, cache)


@pytest.mark.parametrize("name", ["V written in place", "K written through a view"])
def test_k_or_v_changed_in_inference_mode_is_refused(name: str) -> None:
    model, prompt = tiny_llama(), random_prompt(3 * PAGE)
    give(model, CHANGES[name])
    with (
        open_store(model) as store,
        TierStoreCache(store, prompt, model=model) as cache,
        torch.inference_mode(),
        pytest.raises(ValueError, match="that the cache returned"),
    ):
        generate(model, prompt, cache)


def test_v_used_outside_attention_is_refused() -> None:
    model, seen = tiny_llama(), []

    def use(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert (v.shape[1], v.dtype, v.contiguous() is v, v.to(torch.float32) is v) == (
            2,
            k.dtype,
            True,
            True,
        )
        seen.append(v[:, :, :1])
        return k, v

    give(model, use)
    with refused(model, random_prompt(3 * PAGE), "that the cache returned"):
        pass
    assert not seen


def test_autocast_is_refused_where_k_and_v_have_the_dtype_of_the_pages_again() -> None:
    model, prompt = tiny_llama(), random_prompt(3 * PAGE)
    for layer in model.model.layers:
        for project in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            project.register_forward_hook(lambda module, args, output: output.float())
    with (
        open_store(model) as store,
        TierStoreCache(store, prompt, model=model) as cache,
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match=r"torch.autocast in torch.bfloat16.*run it without autocast"),
    ):
        generate(model, prompt, cache)


def test_attention_that_changes_nothing_works_in_inference_mode() -> None:
    model, prompt = tiny_llama(), random_prompt(3 * PAGE)
    expected = plain(model, prompt)
    give(model)
    with open_store(model) as store:
        for _ in range(2):
            with TierStoreCache(store, prompt, model=model) as cache, torch.inference_mode():
                assert generate(model, prompt, cache) == expected


@pytest.mark.parametrize(
    "more",
    [
        {"softcap": 20.0},
        {"s_aux": torch.zeros(4)},
        {"position_bias": torch.zeros(1, 4, 24, 24)},
        {"alibi": torch.zeros(4)},
        {"head_mask": torch.ones(4)},
        {"a_keyword_of_next_year": 0.5},
        {"dropout": 0.1},
    ],
    ids=lambda more: next(iter(more)),
)
def test_attention_keyword_that_pages_cannot_represent_is_refused_by_name(more: dict[str, Any]) -> None:
    model = tiny_llama()
    give(model, **more)
    with refused(model, random_prompt(3 * PAGE), f"does not support {next(iter(more))}"):
        pass


def test_fewer_queries_than_new_tokens_are_refused() -> None:
    model = tiny_llama()
    give(model, query=lambda q: q[:, :, -1:])
    with refused(model, random_prompt(3 * PAGE), "one query for each new token"):
        pass


def test_bidirectional_attention_without_a_mask_is_refused() -> None:
    model = tiny_llama()
    give(model, is_causal=False)
    with open_store(model) as store, torch.no_grad():
        prompt = random_prompt(3 * PAGE)
        with (
            TierStoreCache(store, prompt, model=model) as cache,
            pytest.raises(ValueError, match="bidirectional"),
        ):
            model(torch.tensor([prompt]), **{cache_argument(model): cache})
        assert store.match(store.keys(prompt)).num_pages == 0


def test_a_layer_that_attends_to_another_layers_k_and_v_is_refused() -> None:
    model, prompt, kept = tiny_llama(), random_prompt(3 * PAGE), {}

    def keep(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept["kv"] = k, v
        return k, v

    give(model, keep, layers=(0,))
    give(model, lambda *_: kept["kv"], layers=(1,))
    with refused(model, prompt, "that the cache returned"):
        pass

    def forward(self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        q = self.q_proj(hidden_states).view(*hidden_states.shape[:-1], -1, self.head_dim).transpose(1, 2)
        attend = AttentionInterface().get_interface(ATTENTION, None)  # type: ignore[arg-type]
        out, _ = attend(self, q, *kept["kv"], None, scaling=self.scaling)
        return self.o_proj(out.flatten(2)), None

    attention: Any = model.model.layers[1].self_attn
    attention.forward = MethodType(forward, attention)
    with refused(model, prompt, "another layer's K and V"):
        pass


def test_a_model_that_skips_a_layer_is_refused() -> None:
    model = tiny_llama()

    def skip(self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None

    for index, match in ((1, "layer 2 wrote K and V when layer 1 was due"), (2, "K and V of 2 layers")):
        attention: Any = model.model.layers[index].self_attn
        attention.forward = MethodType(skip, attention)
        with refused(model, random_prompt(3 * PAGE), match):
            pass
        del attention.forward


def test_k_of_another_shape_than_configured_is_refused() -> None:
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.k_proj = torch.nn.Linear(32, 8, bias=False)
    with pytest.raises(
        ValueError, match=r"computes K with 1 heads of dimension 8, .* says 2 heads of dimension 8"
    ):
        page_specs(model, PAGE)


def test_a_sliding_mask_on_a_layer_that_the_configuration_calls_full_is_refused() -> None:
    from tests.adapters.test_hf_windows import tiny_gemma

    model = tiny_gemma()
    specs = page_specs(model, PAGE)
    assert len(specs) == 2
    # Layer 2 attends to all tokens. Give it the mask of a sliding layer.
    decoder: Any = model.model.layers[2]
    full: Any = model.model.layers[1]
    masks: list[Any] = []
    full.register_forward_pre_hook(
        lambda _, __, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    decoder.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "attention_mask": masks.pop()}), with_kwargs=True
    )
    with refused(model, random_prompt(3 * PAGE), "sliding_window=16, but .* sliding_window=None"):
        pass


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_plain_transformers_caches_work_with_this_attention(cache: str) -> None:
    from tests.adapters.test_hf_windows import tiny_gemma, tiny_mistral

    for model in (tiny_llama(), tiny_gemma(), tiny_mistral()):
        ids, mask = pad_left([random_prompt(3 * PAGE), random_prompt(11, seed=1)])
        options: dict[str, Any] = {"cache_implementation": cache, "disable_compile": True}
        for given in ({"ids": ids, "attention_mask": mask}, {"ids": ids[:1]}):
            rows = given.pop("ids")
            expected = plain_batch(model, rows, **given, **options)
            assert generate_batch(model, rows, None, **given, **options).tolist() == expected.tolist()


def test_bidirectional_model_is_refused_and_correct_without_the_store() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        is_decoder=False,
    )
    model, ids = strong(BertLMHeadModel(config)), torch.tensor([random_prompt(3 * PAGE)])
    with open_store(model) as store, torch.no_grad():
        with (
            TierStoreCache(store, ids, model=model) as cache,
            pytest.raises(ValueError, match="custom attention mask"),
        ):
            model(ids, **{cache_argument(model): cache})
        assert store.match(store.keys(ids[0].tolist())).num_pages == 0
        found = model(ids, use_cache=False).logits
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(found, model(ids, use_cache=False).logits)
