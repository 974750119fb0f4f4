"""Test that wrong use raises one clear error, that full memory raises CapacityError, and that neither leaks a page."""

# mypy: allow-untyped-calls
from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.adapters.tiny import PAGE, ask, generate, open_store, plain, random_prompt, tiny_llama
from tierstore.adapters.huggingface import TierStoreCache, cache_argument
from tierstore.errors import CapacityError


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def test_another_number_of_rows_is_refused(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(9)
    with (
        open_store(model) as store,
        torch.no_grad(),
        TierStoreCache(store, torch.tensor([prompt] * 2), model=model) as cache,
        pytest.raises(ValueError, match="holds 2 sequences, but the model runs a batch of 3"),
    ):
        model(torch.tensor([prompt] * 3), **{cache_argument(model): cache})


@pytest.mark.parametrize("mask", [[1] * 9 + [0] * 2, [0, 1, 0] + [1] * 8, [0] * 11])
def test_mask_that_hides_more_than_padding_on_the_left_is_refused(
    model: LlamaForCausalLM, mask: list[int]
) -> None:
    with open_store(model) as store, pytest.raises(ValueError, match="pad on the left"):
        TierStoreCache(store, torch.tensor([random_prompt(11)]), torch.tensor([mask]), model=model)


def test_mask_of_another_shape_is_refused(model: LlamaForCausalLM) -> None:
    with (
        open_store(model) as store,
        pytest.raises(ValueError, match="attention_mask must have the same shape"),
    ):
        TierStoreCache(store, torch.tensor([random_prompt(11)]), torch.ones(1, 10), model=model)


def test_padding_unknown_to_the_cache_is_refused(model: LlamaForCausalLM) -> None:
    prompt = [0, 0, *random_prompt(9)]
    with (
        open_store(model) as store,
        TierStoreCache(store, prompt, model=model) as cache,
        pytest.raises(ValueError, match="same attention_mask"),
    ):
        generate(model, prompt, cache, attention_mask=torch.tensor([[0, 0] + [1] * 9]))


def test_padding_unknown_to_generate_is_refused(model: LlamaForCausalLM) -> None:
    ids, mask = torch.tensor([[5, 5, *random_prompt(9)]]), torch.tensor([[0, 0] + [1] * 9])
    with (
        open_store(model) as store,
        TierStoreCache(store, ids, mask, model=model) as cache,
        pytest.raises(ValueError, match="differ from the prompt"),
    ):
        model(ids, **{cache_argument(model): cache})


def test_unknown_storing_mode_is_refused_by_name(model: LlamaForCausalLM) -> None:
    with (
        open_store(model) as store,
        pytest.raises(ValueError, match="storing must be one of all, memory-only, read-only, no-store"),
    ):
        TierStoreCache(store, random_prompt(9), model=model, storing="none")  # type: ignore[arg-type]


def test_empty_prompt_is_refused(model: LlamaForCausalLM) -> None:
    with open_store(model) as store, pytest.raises(ValueError, match="empty"):
        TierStoreCache(store, [], model=model)


def test_model_with_another_attention_is_refused(model: LlamaForCausalLM) -> None:
    with open_store(model) as store:
        model.set_attn_implementation("sdpa")
        with pytest.raises(ValueError, match='attn_implementation="tierstore"'):
            TierStoreCache(store, random_prompt(9), model=model)
        model.set_attn_implementation("tierstore")


def test_attention_changed_under_an_open_cache_is_noticed(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(9)
    with open_store(model) as store, TierStoreCache(store, prompt, model=model) as cache:
        model.set_attn_implementation("sdpa")
        with pytest.raises(ValueError, match=r'that the cache returned.*attn_implementation="tierstore"'):
            generate(model, prompt, cache)
        model.set_attn_implementation("tierstore")


def test_store_of_another_geometry_is_refused(model: LlamaForCausalLM) -> None:
    with (
        open_store(tiny_llama(num_layers=2)) as store,
        pytest.raises(
            ValueError, match="of 2 layers with 2 heads of dimension 8, but the model needs 3 layers with"
        ),
    ):
        TierStoreCache(store, random_prompt(9), model=model)


def test_model_of_another_dtype_is_refused(model: LlamaForCausalLM) -> None:
    half = tiny_llama().to(torch.bfloat16)  # type: ignore[arg-type]
    with open_store(model) as store, pytest.raises(ValueError, match="another dtype"):
        TierStoreCache(store, random_prompt(9), model=half)


def test_model_that_computes_in_another_dtype_is_refused(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(9)
    with (
        open_store(model) as store,
        TierStoreCache(store, prompt, model=model) as cache,
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match=r"computes in torch.bfloat16 .*float32"),
    ):
        generate(model, prompt, cache)


def test_cached_tokens_fed_again_without_their_positions_are_refused(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(19)
    with open_store(model) as store:
        ask(store, model, prompt)
        with (
            TierStoreCache(store, prompt, model=model) as cache,
            pytest.raises(ValueError, match="differ from the prompt"),
        ):
            model(torch.tensor([prompt]), **{cache_argument(model): cache})


def test_prompt_other_than_the_caches_is_refused(model: LlamaForCausalLM) -> None:
    prompt, other = random_prompt(19, seed=1), random_prompt(19, seed=2)
    with open_store(model) as store, TierStoreCache(store, prompt, model=model) as cache:
        with pytest.raises(ValueError, match="differ from the prompt"):
            generate(model, other, cache)
        assert generate(model, prompt, cache) == plain(model, prompt)


def test_closed_cache_is_refused_and_close_may_be_repeated(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(9)
    with open_store(model) as store:
        cache = TierStoreCache(store, prompt, model=model)
        cache.close()
        cache.close()
        with pytest.raises(ValueError, match="closed"):
            generate(model, prompt, cache)


def test_prompt_larger_than_hbm_ends_in_capacity_error(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(5 * PAGE)
    with open_store(model, hbm=4, host=4) as store:
        with TierStoreCache(store, prompt, model=model, timeout_s=0.2, streaming=False) as cache:
            with pytest.raises(CapacityError):
                generate(model, prompt, cache)
            assert cache.get_seq_length() == 0
        assert ask(store, model, prompt[:20])[0] == plain(model, prompt[:20])


def test_answer_that_outgrows_hbm_ends_in_capacity_error_and_its_pages_stay_usable(
    model: LlamaForCausalLM,
) -> None:
    prompt = random_prompt(2 * PAGE)
    with open_store(model, hbm=3, host=4) as store:
        with (
            TierStoreCache(store, prompt, model=model, timeout_s=0.2, streaming=False) as cache,
            pytest.raises(CapacityError),
        ):
            generate(model, prompt, cache, max_new_tokens=20)
        answer, cache = ask(store, model, prompt, max_new_tokens=4)
        assert answer == plain(model, prompt, max_new_tokens=4)
        assert cache.reused_tokens == 2 * PAGE - 1


def test_fully_cached_prompt_needs_no_free_page_for_its_last_token(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(3 * PAGE)
    with open_store(model, hbm=3, host=8) as store:
        with TierStoreCache(store, prompt, model=model, timeout_s=0.2) as cache:
            expected = generate(model, prompt, cache, max_new_tokens=1)
        with TierStoreCache(store, prompt, model=model, timeout_s=0.2) as cache:
            assert cache.reused_tokens == 3 * PAGE - 1
            assert generate(model, prompt, cache, max_new_tokens=1) == expected


def test_close_during_an_answer_releases_everything(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(2 * PAGE + 3)
    with open_store(model, hbm=8) as store, torch.no_grad():
        cache = TierStoreCache(store, prompt, model=model)
        model(torch.tensor([prompt]), **{cache_argument(model): cache})
        cache.close()
        store.free(store.allocate(8))


# F058
def test_sealed_pages_are_never_written(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(3 * PAGE)
    with open_store(model) as store, torch.no_grad():
        ask(store, model, prompt)
        with store.acquire(store.keys(prompt)) as lease:
            assert lease.num_pages == 3
            pages = store.pages
            assert isinstance(pages, torch.Tensor)
            before = pages[lease.slots].clone()
            with TierStoreCache(store, prompt, model=model) as cache:
                generate(model, prompt, cache)
                cache.crop(-20)
                model(torch.tensor([random_prompt(9, seed=8)]), **{cache_argument(model): cache})
            assert torch.equal(pages[lease.slots], before)


def test_prompt_that_differs_only_where_the_cache_is_warm_is_refused(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(3 * PAGE + 4)
    other = [*random_prompt(2 * PAGE, seed=9), *prompt[2 * PAGE :]]
    with open_store(model) as store:
        ask(store, model, prompt)
        with TierStoreCache(store, prompt, model=model) as cache:
            assert cache.reused_tokens > 2 * PAGE
            for options in ({}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 2}):
                with pytest.raises(ValueError, match="differ from the prompt"):
                    generate(model, other, cache, **options)
            assert generate(model, prompt, cache) == plain(model, prompt)


def test_copy_of_a_model_generates_with_its_own_weights(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(PAGE + 2)
    with open_store(model) as store:
        ask(store, model, prompt)
    other = deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.copy_(other.lm_head.weight.flip(0))
    assert generate(other, prompt, None) != generate(model, prompt, None)
    assert other.prepare_inputs_for_generation.__self__ is other
