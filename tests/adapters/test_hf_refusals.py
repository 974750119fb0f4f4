"""Wrong use ends in one clear error, running out of room in CapacityError, and neither leaks a page."""

# mypy: allow-untyped-calls
from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

from tests.adapters.tiny import PAGE, ask, generate, open_store, plain, random_prompt, tiny_llama
from tierstore.adapters.huggingface import TierStoreCache, cache_argument, page_spec
from tierstore.errors import CapacityError


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def test_batches_are_refused(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(9)
    with open_store(model) as store:
        with pytest.raises(ValueError, match="not a batch"):
            TierStoreCache(store, torch.tensor([prompt, prompt]), model=model)
        with (
            TierStoreCache(store, prompt, model=model) as cache,
            pytest.raises(ValueError, match="a batch of 2"),
        ):
            model(torch.tensor([prompt, prompt]), **{cache_argument(model): cache})


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}])
def test_several_sequences_from_one_prompt_are_refused(
    model: LlamaForCausalLM, options: dict[str, object]
) -> None:
    prompt = random_prompt(9)
    with (
        open_store(model) as store,
        TierStoreCache(store, prompt, model=model) as cache,
        pytest.raises(ValueError, match="holds one sequence"),
    ):
        generate(model, prompt, cache, **options)


def test_padding_is_refused(model: LlamaForCausalLM) -> None:
    prompt = [0, 0, *random_prompt(9)]
    with (
        open_store(model) as store,
        TierStoreCache(store, prompt, model=model) as cache,
        pytest.raises(ValueError, match="padding"),
    ):
        generate(model, prompt, cache, attention_mask=torch.tensor([[0, 0] + [1] * 9]))


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
        with pytest.raises(ValueError, match="written, not read"):
            generate(model, prompt, cache)
        model.set_attn_implementation("tierstore")


def test_sliding_window_models_are_refused() -> None:
    config = MistralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, sliding_window=16
    )
    with pytest.raises(ValueError, match="sliding_attention"):
        page_spec(config, PAGE, "float32", "m")
    config.sliding_window = None
    assert page_spec(config, PAGE, "float32", "m").num_layers == 2
    assert MistralForCausalLM(config).config.sliding_window is None


def test_store_of_another_geometry_is_refused(model: LlamaForCausalLM) -> None:
    with (
        open_store(tiny_llama(num_layers=2)) as store,
        pytest.raises(ValueError, match="2 layers, the model 3"),
    ):
        TierStoreCache(store, random_prompt(9), model=model)


def test_model_of_another_dtype_is_refused(model: LlamaForCausalLM) -> None:
    half = tiny_llama().to(torch.bfloat16)  # type: ignore[arg-type]
    prompt = random_prompt(9)
    with (
        open_store(model) as store,
        TierStoreCache(store, prompt, model=half) as cache,
        pytest.raises(ValueError, match=r"bfloat16 .*float32"),
    ):
        generate(half, prompt, cache)


def test_whole_prompt_fed_to_a_warm_cache_is_refused(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(6) * 4
    with open_store(model) as store:
        ask(store, model, prompt)
        with TierStoreCache(store, prompt, model=model) as cache:
            with pytest.raises(ValueError, match=r"fed|those of the prompt"):
                generate(model, prompt, cache, prompt_lookup_num_tokens=4)
            assert cache.get_seq_length() == len(prompt) - 1


def test_another_prompt_than_the_caches_is_refused(model: LlamaForCausalLM) -> None:
    prompt, other = random_prompt(19, seed=1), random_prompt(19, seed=2)
    with open_store(model) as store, TierStoreCache(store, prompt, model=model) as cache:
        with pytest.raises(ValueError, match="not those of the prompt"):
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
        with TierStoreCache(store, prompt, model=model, timeout_s=0.2) as cache:
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
            TierStoreCache(store, prompt, model=model, timeout_s=0.2) as cache,
            pytest.raises(CapacityError),
        ):
            generate(model, prompt, cache, max_new_tokens=20)
        answer, cache = ask(store, model, prompt, max_new_tokens=4)
        assert answer == plain(model, prompt, max_new_tokens=4)
        assert cache.reused_tokens == 2 * PAGE - 1


def test_fully_cached_prompt_without_room_for_a_copy_computes_its_last_page(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(3 * PAGE)
    with open_store(model, hbm=3, host=8) as store:
        with TierStoreCache(store, prompt, model=model, timeout_s=0.2) as cache:
            expected = generate(model, prompt, cache, max_new_tokens=1)
        with TierStoreCache(store, prompt, model=model, timeout_s=0.2) as cache:
            assert cache.reused_tokens == 2 * PAGE
            assert generate(model, prompt, cache, max_new_tokens=1) == expected


def test_close_in_the_middle_of_an_answer_gives_everything_back(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(2 * PAGE + 3)
    with open_store(model, hbm=8) as store, torch.no_grad():
        cache = TierStoreCache(store, prompt, model=model)
        model(torch.tensor([prompt]), **{cache_argument(model): cache})
        cache.close()
        store.free(store.allocate(8))


def test_sealed_pages_are_never_written(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(3 * PAGE)
    with open_store(model) as store:
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
