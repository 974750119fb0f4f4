"""Test that a user's model is restored once every cache on it is closed or dropped."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from tests.adapters.test_hf_images import ask_with_image, tiny_qwen
from tests.adapters.test_hf_images import tokens as qwen_tokens
from tests.adapters.tiny import PAGE, ask, generate, open_store, plain, random_prompt, tiny_llama
from tierstore.adapters.huggingface import PrefixCache, TierStoreCache, cache_argument, page_specs
from tierstore.adapters.huggingface.identity import weights_of
from tierstore.config import load_config
from tierstore.store import TierStore

PREPARE = "prepare_inputs_for_generation"


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama()


def kept_by(model: PreTrainedModel) -> dict[str, object]:
    """Return a model's configuration and everything that its modules hold (attributes, hooks, parameters), by name."""
    found: dict[str, object] = {
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "generation": model.generation_config.to_dict() if model.generation_config else None,
    }
    for place, module in model.named_modules():
        found[f"{place}: class"] = type(module)
        for name, value in vars(module).items():
            found[f"{place}.{name}"] = _Held(value)
            if isinstance(value, dict):
                found |= {f"{place}.{name}[{key}]": _Held(each) for key, each in value.items()}
    return found


class _Held:
    """A strong reference to an object. It is equal only to references to the same object."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return repr(self.value)[:60]


@contextmanager
def left_as_it_was(*models: PreTrainedModel) -> Iterator[None]:
    before = [kept_by(each) for each in models]
    yield
    for each, kept in zip(models, before, strict=True):
        now = kept_by(each)
        assert {place: now.get(place) for place in kept | now} == {
            place: kept.get(place) for place in kept | now
        }


def hooks_on(model: PreTrainedModel) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())


def test_closed_cache_leaves_the_model_unchanged(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(2 * PAGE + 3)
    with open_store(model) as store:
        for _ in range(2):
            with left_as_it_was(model):
                with TierStoreCache(store, prompt, model=model) as cache:
                    assert hooks_on(model)
                    generate(model, prompt, cache)
                cache.close()


def test_closed_cache_leaves_target_and_draft_model_unchanged(model: LlamaForCausalLM) -> None:
    draft, prompt = tiny_llama(num_layers=1, seed=5), random_prompt(2 * PAGE + 3)
    expected = plain(model, prompt)
    with open_store(model, draft=draft) as store:
        with TierStoreCache(
            store, prompt, model=model, draft=draft
        ) as cache:  # generate changes options of the draft
            generate(model, prompt, cache, assistant_model=cache.draft_model)
        with left_as_it_was(model, draft), TierStoreCache(store, prompt, model=model, draft=draft) as cache:
            assert hooks_on(draft)
            assert generate(model, prompt, cache, assistant_model=cache.draft_model) == expected


def test_sessions_leave_the_model_unchanged(model: LlamaForCausalLM) -> None:
    with open_store(model) as store, left_as_it_was(model), PrefixCache(store, model) as prefixes:
        session = prefixes.session("chat")
        session.append(random_prompt(PAGE + 3))
        session.generate(max_new_tokens=4, do_sample=False)
        with pytest.raises(RuntimeError, match="in the middle of a turn"), session.turn():
            raise RuntimeError("in the middle of a turn")


def test_model_is_unchanged_after_a_refused_prompt(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(2 * PAGE + 3)
    with open_store(model) as store:
        ask(store, model, prompt)
        with (
            left_as_it_was(model),
            pytest.raises(ValueError, match="differ from the prompt"),
            TierStoreCache(store, prompt, model=model) as cache,
        ):
            generate(model, random_prompt(2 * PAGE + 3, seed=9), cache)


def test_model_is_unchanged_after_an_exception_during_a_pass(model: LlamaForCausalLM) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a layer failed")

    prompt = random_prompt(2 * PAGE + 3)
    expected = plain(model, prompt)
    with open_store(model) as store, left_as_it_was(model):
        with (
            pytest.raises(RuntimeError, match="a layer failed"),
            TierStoreCache(store, prompt, model=model) as cache,
            model.model.layers[1].register_forward_pre_hook(fail),
        ):
            generate(model, prompt, cache)
        assert ask(store, model, prompt)[0] == expected


def test_a_model_is_unchanged_after_a_cache_that_could_not_be_created(model: LlamaForCausalLM) -> None:
    with open_store(model) as store, left_as_it_was(model):
        with pytest.raises(ValueError, match=r"must be non-empty and of shape .*, got shape"):
            TierStoreCache(store, [], model=model)
        with pytest.raises(ValueError, match="KV groups"):
            TierStoreCache(store, random_prompt(PAGE), model=model, draft=tiny_llama(num_layers=1))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_caches_on_one_model_may_be_closed_in_either_order(
    model: LlamaForCausalLM, order: tuple[int, int]
) -> None:
    prompts = random_prompt(2 * PAGE + 3), random_prompt(PAGE + 5, seed=9)
    expected = [plain(model, each) for each in prompts]
    with open_store(model) as store, left_as_it_was(model):
        caches = [TierStoreCache(store, each, model=model) for each in prompts]
        first, last = order
        assert generate(model, prompts[first], caches[first]) == expected[first]
        caches[first].close()
        with pytest.raises(ValueError, match="this TierStoreCache is closed"):
            generate(model, prompts[first], caches[first])
        with pytest.raises(ValueError, match="differ from the prompt"):
            generate(model, random_prompt(PAGE + 5, seed=3), caches[last])
        assert generate(model, prompts[last], caches[last]) == expected[last]
        caches[last].close()


def test_cache_of_one_model_is_refused_by_another_with_an_open_cache(
    model: LlamaForCausalLM,
) -> None:
    other, prompt = tiny_llama(seed=5), random_prompt(PAGE + 3)
    with (
        open_store(model) as store,
        open_store(other) as theirs,
        TierStoreCache(store, prompt, model=model) as cache,
        TierStoreCache(theirs, prompt, model=other),
        pytest.raises(ValueError, match="created for another model"),
    ):
        generate(other, prompt, cache)


def drop_open_cache(store: TierStore, model: PreTrainedModel, in_cycle: bool) -> None:
    """Run the model with a cache, and drop the cache without closing it."""
    prompt = random_prompt(2 * PAGE)
    cache: Any = TierStoreCache(store, prompt, model=model)
    with torch.no_grad():
        model(torch.tensor([prompt]), **{cache_argument(model): cache})
    assert hooks_on(model)
    if in_cycle:
        cache.itself = cache
    del cache
    if in_cycle:
        assert hooks_on(model)
        gc.collect()


@pytest.mark.parametrize("in_cycle", [True, False])
def test_dropped_cache_leaves_the_model_unchanged(model: LlamaForCausalLM, in_cycle: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        with open_store(model) as store, left_as_it_was(model):
            with pytest.warns(ResourceWarning, match="dropped without release"):
                drop_open_cache(store, model, in_cycle)
            assert not hooks_on(model)
    finally:
        gc.enable()


def test_dropped_cache_does_not_affect_an_open_one(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(2 * PAGE + 3, seed=9)
    expected = plain(model, prompt)
    with open_store(model) as store, left_as_it_was(model):
        with TierStoreCache(store, prompt, model=model) as cache:
            with pytest.warns(ResourceWarning, match="dropped without release"):
                drop_open_cache(store, model, in_cycle=False)
            assert generate(model, prompt, cache) == expected
        assert not hooks_on(model)


def model_dropped_with_an_open_cache(store_of: list[TierStore]) -> ref[PreTrainedModel]:
    """Drop a model and its open cache, and return a weak reference to the model."""
    model = tiny_llama()
    specs = page_specs(model, PAGE)
    config = load_config({"hbm": {"capacity": 8 * specs[0].page_nbytes, "device": "cpu"}})
    store_of.append(TierStore.open(config, specs))
    TierStoreCache(store_of[0], random_prompt(PAGE), model=model)
    return ref(model)


def test_model_is_freed_together_with_a_cache_that_was_not_closed() -> None:
    stores: list[TierStore] = []
    with pytest.warns(ResourceWarning, match="dropped without release"):
        there = model_dropped_with_an_open_cache(stores)
    gc.collect()
    assert there() is None
    stores[0].close()


def test_attributes_the_user_had_set_on_the_model_are_restored(model: LlamaForCausalLM) -> None:
    seen: list[int] = []
    prepare = model.prepare_inputs_for_generation

    def mine(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        seen.append(input_ids.shape[1])
        return prepare(input_ids, **kwargs)

    model.prepare_inputs_for_generation = mine
    prompt = random_prompt(2 * PAGE + 3)
    with open_store(model) as store, left_as_it_was(model):
        ask(store, model, prompt)
        with TierStoreCache(store, prompt, model=model) as cache:
            with pytest.raises(ValueError, match="differ from the prompt"):
                generate(model, random_prompt(2 * PAGE + 3, seed=9), cache)
            generate(model, prompt, cache)
    assert seen
    assert vars(model)[PREPARE] is mine


def test_attributes_set_on_the_model_while_a_cache_is_open_are_kept(model: LlamaForCausalLM) -> None:
    prompt, seen = random_prompt(PAGE + 3), [0, 0]
    expected = plain(model, prompt)

    def count(*_: Any) -> None:
        seen[0] += 1

    with open_store(model) as store:
        with TierStoreCache(store, prompt, model=model) as cache:
            under = model.prepare_inputs_for_generation

            def over(*args: Any, **kwargs: Any) -> Any:
                seen[1] += 1
                return under(*args, **kwargs)

            model.prepare_inputs_for_generation = over
            hook = model.register_forward_pre_hook(count)
            assert generate(model, prompt, cache) == expected
        passes = tuple(seen)
        assert min(passes) > 0
        assert generate(model, prompt, None) == expected
        assert tuple(seen) == (2 * passes[0], 2 * passes[1])
        assert vars(model)[PREPARE] is over
        hook.remove()
    assert not hooks_on(model)


def test_model_with_an_open_cache_is_not_copied(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(PAGE + 3)
    with open_store(model) as store:
        with (
            TierStoreCache(store, prompt, model=model),
            pytest.raises(TypeError, match="open on this model"),
        ):
            deepcopy(model)
        assert not hooks_on(deepcopy(model))


def test_opening_and_closing_a_cache_is_not_a_weight_change(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(PAGE + 3)
    with open_store(model) as store:
        seen = weights_of(model).look(model)
        for _ in range(2):
            with TierStoreCache(store, prompt, model=model) as cache:
                assert weights_of(model).look(model) is seen
                generate(model, prompt, cache)
            assert weights_of(model).look(model) is seen


def test_threads_open_and_close_caches_on_one_model(model: LlamaForCausalLM) -> None:
    prompts = [random_prompt(PAGE + 3 + seed, seed=seed) for seed in range(4)]
    expected = [plain(model, each) for each in prompts]
    with open_store(model) as store, left_as_it_was(model), ThreadPoolExecutor(4) as threads:

        def answers(number: int) -> list[list[int]]:
            found = []
            for _ in range(5):
                with TierStoreCache(store, prompts[number], model=model) as cache:
                    found.append(generate(model, prompts[number], cache))
            return found

        for number, found in enumerate(threads.map(answers, range(4))):
            assert found == [expected[number]] * 5


@pytest.mark.parametrize("build", [partial(tiny_qwen, "2"), partial(tiny_qwen, "2.5")])
def test_vision_model_keeps_the_positions_of_its_own_last_request(
    build: Callable[[], PreTrainedModel],
) -> None:
    model = build()
    state: Any = model.model
    prompt = qwen_tokens(2 * PAGE + 3)
    left = ask_with_image(model)
    with open_store(model) as store:
        for _ in range(2):
            with left_as_it_was(model), TierStoreCache(store, prompt, model=model) as cache:
                assert state.rope_deltas is None
                generate(model, prompt, cache)
            assert state.rope_deltas is left
        with TierStoreCache(store, prompt, model=model) as cache:
            generate(model, prompt, cache)
            later = ask_with_image(model)
            assert later is not left
        assert state.rope_deltas is later


def test_vision_model_is_unchanged_after_an_exception_during_a_pass() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a layer failed")

    model = tiny_qwen("2.5")
    inner: Any = model.model
    prompt = qwen_tokens(2 * PAGE + 3)
    ask_with_image(model)
    with (
        open_store(model) as store,
        left_as_it_was(model),
        pytest.raises(RuntimeError, match="a layer failed"),
        TierStoreCache(store, prompt, model=model) as cache,
        inner.language_model.layers[1].register_forward_pre_hook(fail),
    ):
        generate(model, prompt, cache)
