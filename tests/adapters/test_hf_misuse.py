"""Test that misuse is refused or handled correctly, and causes no wrong byte, unclear error or lost page."""

# mypy: allow-untyped-calls
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.adapters.tiny import (
    NEW,
    PAGE,
    VOCABULARY,
    ask,
    generate,
    generate_batch,
    open_store,
    pad_left,
    plain,
    plain_batch,
    random_prompt,
    tiny_llama,
)
from tierstore.adapters.huggingface import TierStoreCache, cache_argument, page_specs
from tierstore.config import load_config
from tierstore.store import TierStore


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def test_model_of_equal_geometry_and_other_weights_is_refused(model: LlamaForCausalLM) -> None:
    other, twin = tiny_llama(seed=5), tiny_llama()
    prompt = random_prompt(19)
    with open_store(model) as store:
        ask(store, model, prompt)
        with pytest.raises(ValueError, match="opened for another model"):
            TierStoreCache(store, prompt, model=other)
        assert ask(store, twin, prompt)[0] == plain(model, prompt)


def test_cache_given_to_another_model_than_its_own_is_refused(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(19)
    with open_store(model) as store, TierStoreCache(store, prompt, model=model) as cache:
        with pytest.raises(ValueError, match="created for another model"):
            generate(tiny_llama(seed=5), prompt, cache)
        assert generate(model, prompt, cache) == plain(model, prompt)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 32,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_embeddings_that_depend_on_the_length_of_the_request_are_refused(rope: Any) -> None:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters=rope,
    )
    with pytest.raises(ValueError, match=f"{rope['rope_type']} rotary embeddings are not supported"):
        page_specs(LlamaForCausalLM(config), PAGE)


def test_tokens_at_wrong_positions_are_refused_and_nothing_is_stored(
    model: LlamaForCausalLM,
) -> None:
    prompt = random_prompt(19)
    positions = torch.arange(19)[None].clone()
    positions[0, 3] = 9
    with open_store(model) as store:
        with (
            torch.no_grad(),
            TierStoreCache(store, prompt, model=model) as cache,
            pytest.raises(ValueError, match="at wrong positions"),
        ):
            model(torch.tensor([prompt]), position_ids=positions, **{cache_argument(model): cache})
        assert store.match(store.keys(prompt)).num_pages == 0


def test_another_prompt_is_refused_for_several_answers_and_with_drafts(model: LlamaForCausalLM) -> None:
    prompt, draft = random_prompt(19), tiny_llama(num_layers=2)
    with open_store(model) as store:
        ask(store, model, prompt)
        with TierStoreCache(store, prompt, model=model) as cache:
            with pytest.raises(ValueError, match="differ from the prompt"):
                generate(model, [*prompt[:-1], 3], cache, num_return_sequences=2, do_sample=True)
            with pytest.raises(ValueError, match="differ from the prompt"):
                generate(model, [3, *prompt[1:]], cache, assistant_model=draft)


def test_gradients_are_refused_and_pages_never_require_grad(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(9)
    with open_store(model) as store, TierStoreCache(store, prompt, model=model) as cache:
        with pytest.raises(ValueError, match="no gradients"):
            model(torch.tensor([prompt]), **{cache_argument(model): cache})
        pages = store.pages
        assert isinstance(pages, torch.Tensor)
        assert not pages.requires_grad
        assert generate(model, prompt, cache) == plain(model, prompt)


def test_store_opened_in_inference_mode_serves_outside_it(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(19)
    specs = page_specs(model, PAGE)
    config = load_config({"hbm": {"capacity": 16 * specs[0].page_nbytes, "device": "cpu"}})
    with torch.inference_mode():
        store = TierStore.open(config, specs)
        answer, _ = ask(store, model, prompt)
    with store:
        assert ask(store, model, prompt)[0] == answer == plain(model, prompt)


def test_prompt_already_in_the_cache_is_refused(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(19)
    with open_store(model) as store, TierStoreCache(store, prompt, model=model) as cache:
        answer = generate(model, prompt, cache, max_new_tokens=11)
        longer = [*prompt, *answer, 5, 6]
        assert generate(model, longer, cache) == plain(model, longer)
        with pytest.raises(ValueError, match="crop or reset it"):
            generate(model, prompt, cache)
        cache.reset()
        assert generate(model, prompt, cache) == plain(model, prompt)


def test_reset_cache_has_the_slots_of_the_pages_it_started_with(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(67)  # 8 full pages; HBM has 12
    with open_store(model, hbm=12, host=32) as store:
        ask(store, model, prompt)
        with TierStoreCache(store, prompt, model=model, timeout_s=0.1) as cache:
            assert cache.reused_tokens == 66
            cache.reset()
            assert generate(model, prompt, cache) == plain(model, prompt)


def test_copy_of_a_cache_is_refused(model: LlamaForCausalLM) -> None:
    with (
        open_store(model) as store,
        TierStoreCache(store, random_prompt(9), model=model) as cache,
        pytest.raises(TypeError, match="cannot be copied"),
    ):
        copy.deepcopy(cache)


@pytest.mark.parametrize(
    ("indices", "kept"),
    [([-1], [2]), ([True, False, True], [0, 2]), ([1, 1], [1, 1]), ([2, 0, 2], [2, 0, 2])],
)
def test_batch_rows_are_selected_like_tensor_rows(
    model: LlamaForCausalLM, indices: list[Any], kept: list[int]
) -> None:
    prompts = [random_prompt(PAGE + 3, seed=seed) for seed in range(3)]
    name = cache_argument(model)
    with (
        open_store(model) as store,
        torch.no_grad(),
        TierStoreCache(store, torch.tensor(prompts), model=model) as cache,
    ):
        model(torch.tensor(prompts), **{name: cache})
        cache.batch_select_indices(torch.tensor(indices))
        found = model(torch.tensor([[7]] * len(kept)), **{name: cache}).logits[:, -1]
        expected = model(torch.tensor([[*prompts[row], 7] for row in kept]), use_cache=False).logits[:, -1]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("indices", "error"), [([3], IndexError), ([], ValueError)])
def test_selecting_no_row_or_a_missing_row_changes_nothing(
    model: LlamaForCausalLM, indices: list[int], error: type[Exception]
) -> None:
    prompts = [random_prompt(PAGE + 3, seed=seed) for seed in range(3)]
    with open_store(model) as store, TierStoreCache(store, torch.tensor(prompts), model=model) as cache:
        with pytest.raises(error):
            cache.batch_select_indices(torch.tensor(indices, dtype=torch.long))
        rows = generate_batch(model, torch.tensor(prompts), cache)
        assert rows.tolist() == plain_batch(model, torch.tensor(prompts)).tolist()


def test_prompt_edited_in_place_is_another_prompt(model: LlamaForCausalLM) -> None:
    ids = torch.tensor([random_prompt(2 * PAGE + 3)])
    with open_store(model) as store:
        ask(store, model, ids[0].tolist())
        with TierStoreCache(store, ids, model=model) as cache:
            ids[0, 3] = 1
            with pytest.raises(ValueError, match="differ from the prompt"):
                generate_batch(model, ids, cache)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_pass_that_was_interrupted_can_be_repeated(model: LlamaForCausalLM, layer: int) -> None:
    prompt = random_prompt(2 * PAGE + 3)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with open_store(model) as store:
        ask(store, model, [*prompt[: PAGE + 4], 3, 4, 5, 6])
        with TierStoreCache(store, prompt, model=model) as cache:
            assert cache.reused_tokens == PAGE + 4
            hook = model.model.layers[layer].mlp.register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                generate(model, prompt, cache)
            hook.remove()
            assert store.match(store.keys(prompt)).num_pages == 1
            assert generate(model, prompt, cache) == plain(model, prompt)


def test_finished_batch_rows_are_stored_with_the_tokens_they_were_fed(model: LlamaForCausalLM) -> None:
    prompts = [random_prompt(length, seed=length) for length in (5, 9, 14)]
    ids, mask = pad_left(prompts)
    long = plain_batch(model, ids, attention_mask=mask, max_new_tokens=30)
    options: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": 30,
        "eos_token_id": int(long[0, ids.shape[1] + 2]),
    }
    expected = plain_batch(model, ids, **options)
    assert (expected[0, ids.shape[1] + 3 :] == 0).all(), "no row ended early: this shows nothing"
    with open_store(model) as store:
        with TierStoreCache(store, ids, mask, model=model) as cache:
            assert generate_batch(model, ids, cache, **options).tolist() == expected.tolist()
        # A prompt with the same padding tokens finds these pages, and its answer is right.
        row = expected[0, ids.shape[1] - 5 :]
        ones = torch.ones(1, len(row), dtype=torch.long)
        with TierStoreCache(store, row, ones[0], model=model) as cache:
            assert cache.reused_tokens > 2 * PAGE
            found = generate_batch(model, row[None], cache, attention_mask=ones)
        assert found.tolist() == plain_batch(model, row[None], attention_mask=ones).tolist()


def test_prompt_fed_as_embeddings_is_not_stored_and_answered_correctly(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(2 * PAGE + 3)
    embedded = model.get_input_embeddings()(torch.tensor([prompt])).detach()
    with open_store(model) as store, TierStoreCache(store, prompt, model=model) as cache:
        out = model.generate(
            inputs_embeds=embedded,
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=NEW,
            pad_token_id=0,
            **{cache_argument(model): cache},
        )
        assert out[0].tolist() == plain(model, prompt)
        assert store.match(store.keys(prompt)).num_pages == 0


def test_closed_cache_has_no_tail(model: LlamaForCausalLM) -> None:
    with open_store(model) as store:
        with TierStoreCache(store, random_prompt(9), model=model) as cache:
            generate(model, random_prompt(9), cache)
        assert cache.take_tail() is None


def test_store_closed_under_an_open_cache_raises_store_closed(model: LlamaForCausalLM) -> None:
    from tierstore.errors import StoreClosed

    prompt = random_prompt(9)
    with open_store(model) as store, TierStoreCache(store, prompt, model=model) as cache:
        answer = generate(model, prompt, cache)
    specs = page_specs(model, PAGE)
    config = load_config({"hbm": {"capacity": 16 * specs[0].page_nbytes, "device": "cpu"}})
    with TierStore.open(config, specs) as store:
        cache = TierStoreCache(store, prompt, model=model)
        generate(model, prompt, cache)
    with pytest.raises(StoreClosed):
        generate(model, [*prompt, *answer, *prompt], cache)
    cache.close()
