"""Tests of batches, several answers to one prompt, and beams. Results equal those of plain transformers."""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.adapters.tiny import (
    PAGE,
    ask,
    generate_batch,
    open_store,
    pad_left,
    plain,
    plain_batch,
    random_prompt,
    tiny_llama,
    watch,
)
from tests.support.pages import PATIENCE_S
from tierstore.adapters.huggingface import TierStoreCache, cache_argument
from tierstore.store import TierStore
from tierstore.types import Tier


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def in_use(store: TierStore) -> int:
    """Return the number of HBM slots that callers own or leases hold."""
    occupancy: Any = store.stats()["tiers"]
    hbm = occupancy["HBM"]
    return int(hbm["owned"]) + int(hbm["pinned"])


def answers(model: LlamaForCausalLM, store: TierStore, prompts: list[list[int]], **options: Any) -> Any:
    """Run a batch with the store. Return its rows, the number of reused tokens, and the width of each forward pass."""
    ids, mask = pad_left(prompts)
    with watch(model) as fed, TierStoreCache(store, ids, mask, model=model) as cache:
        rows = generate_batch(model, ids, cache, attention_mask=mask, **options)
        assert cache.get_seq_length() == rows.shape[1] - 1
    return rows.tolist(), cache.reused_tokens, fed.widths


def test_batch_of_mixed_lengths_and_mixed_reuse(model: LlamaForCausalLM) -> None:
    prompts = [random_prompt(length, seed=length) for length in (PAGE - 3, 2 * PAGE, 3 * PAGE + 5, 5 * PAGE)]
    ids, mask = pad_left(prompts)
    expected = plain_batch(model, ids, attention_mask=mask).tolist()
    with open_store(model, hbm=40) as store:
        ask(store, model, prompts[1])
        ask(store, model, prompts[2][: 2 * PAGE])
        rows, reused, _ = answers(model, store, prompts)
        assert rows == expected
        assert reused == 0, "the longest prompt is cold, and all rows start in the same column"
        # Now all prompts are stored, and each row computes one column.
        rows, reused, widths = answers(model, store, prompts)
        assert rows == expected
        assert (reused, widths[0]) == (sum(map(len, prompts)) - 4, 1)


def test_rows_with_more_than_the_common_prefix_rewrite_nothing(model: LlamaForCausalLM) -> None:
    held, cold = random_prompt(4 * PAGE, seed=1), random_prompt(3 * PAGE, seed=2)
    with open_store(model) as store:
        ask(store, model, held)
        with store.acquire(store.keys(held)) as lease:
            pages = store.pages
            assert isinstance(pages, torch.Tensor)
            before = pages[lease.slots].clone()
            rows, reused, widths = answers(model, store, [held, cold])
            assert torch.equal(pages[lease.slots], before)
        assert rows == plain_batch(model, *pad_and_mask([held, cold])).tolist()
        assert (reused, widths[0]) == (PAGE, 3 * PAGE)


def pad_and_mask(prompts: list[list[int]]) -> tuple[torch.Tensor]:
    ids, _ = pad_left(prompts)
    return (ids,)


@pytest.mark.parametrize("chunk", [3, PAGE, 13])
def test_padded_batch_in_chunks(model: LlamaForCausalLM, chunk: int) -> None:
    prompts = [random_prompt(length, seed=length) for length in (3, 2 * PAGE + 1, 4 * PAGE)]
    ids, mask = pad_left(prompts)
    expected = plain_batch(model, ids, attention_mask=mask).tolist()
    with open_store(model) as store:
        for _ in range(2):
            rows, reused, _ = answers(model, store, prompts, prefill_chunk_size=chunk)
            assert rows == expected
        assert reused == sum(map(len, prompts)) - 3


def test_pages_of_a_padded_batch_serve_single_requests(model: LlamaForCausalLM) -> None:
    prompts = [random_prompt(length, seed=length) for length in (PAGE + 2, 4 * PAGE - 1)]
    with open_store(model) as store:
        answers(model, store, prompts)
        for prompt in prompts:
            answer, cache = ask(store, model, prompt)
            assert (answer, cache.reused_tokens) == (plain(model, prompt), len(prompt) - 1)


def test_several_samples_of_one_prompt_share_its_pages(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(5 * PAGE + 3)
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 14}
    torch.manual_seed(3)
    expected = plain_batch(model, torch.tensor([prompt]), **options).tolist()
    assert len({tuple(row) for row in expected}) == 3, "the samples do not differ: this shows nothing"
    # HBM has room for the prompt and three answers that share its pages, but not for three copies of the prompt.
    with open_store(model, hbm=14) as store:
        for reused in (0, len(prompt) - 1):
            torch.manual_seed(3)
            with TierStoreCache(store, prompt, model=model) as cache:
                rows = generate_batch(model, torch.tensor([prompt]), cache, **options).tolist()
                assert cache.shared_pages == 5
                store.check()
            assert rows == expected
            assert cache.reused_tokens == reused


@pytest.mark.parametrize("beams", [2, 4])
def test_beams_share_pages_and_give_the_answer_of_plain_transformers(
    model: LlamaForCausalLM, beams: int
) -> None:
    prompt = random_prompt(5 * PAGE + 3)
    options: dict[str, Any] = {"num_beams": beams, "max_new_tokens": 19, "num_return_sequences": beams}
    expected = plain_batch(model, torch.tensor([prompt]), **options).tolist()
    with open_store(model, hbm=8 + 4 * beams) as store:
        for reused in (0, len(prompt) - 1):
            with TierStoreCache(store, prompt, model=model) as cache:
                rows = generate_batch(model, torch.tensor([prompt]), cache, **options).tolist()
                assert cache.shared_pages >= 5
                store.check()
            assert rows == expected
            assert cache.reused_tokens == reused


def test_beams_over_a_padded_batch(model: LlamaForCausalLM) -> None:
    prompts = [random_prompt(length, seed=length) for length in (PAGE + 1, 3 * PAGE + 2)]
    ids, mask = pad_left(prompts)
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 12, "attention_mask": mask}
    expected = plain_batch(model, ids, **options).tolist()
    with open_store(model, hbm=48) as store:
        for _ in range(2):
            with TierStoreCache(store, ids, mask, model=model) as cache:
                assert generate_batch(model, ids, cache, **options).tolist() == expected


def test_losing_beams_release_their_pages(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(2 * PAGE)
    name = cache_argument(model)
    with open_store(model) as store, torch.no_grad(), TierStoreCache(store, prompt, model=model) as cache:
        model(torch.tensor([prompt]), **{name: cache})
        cache.batch_repeat_interleave(4)
        for step in range(PAGE + 2):
            model(torch.tensor([[10 + row + step] for row in range(4)]), **{name: cache})
        assert in_use(store) >= 2 + 4 * 2
        cache.reorder_cache(torch.tensor([2, 2, 2, 2]))
        assert in_use(store) == 2 + 2, "the winner's pages, shared by all"
        model(torch.tensor([[3], [4], [5], [6]]), **{name: cache})
        assert in_use(store) == 2 + 1 + 4


def test_equal_rows_share_their_pages(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(4 * PAGE)
    with (
        open_store(model, hbm=6) as store,
        torch.no_grad(),
        TierStoreCache(store, torch.tensor([prompt] * 3), model=model) as cache,
    ):
        model(torch.tensor([prompt] * 3), **{cache_argument(model): cache})
        assert cache.shared_pages == 4


def test_rows_that_do_not_fit_change_nothing(model: LlamaForCausalLM) -> None:
    from tierstore.errors import CapacityError

    prompts = [random_prompt(3 * PAGE, seed=seed) for seed in range(3)]
    with open_store(model, hbm=8) as store:
        ids, mask = pad_left(prompts)
        with TierStoreCache(store, ids, mask, model=model, timeout_s=0.1) as cache:
            with pytest.raises(CapacityError):
                generate_batch(model, ids, cache, attention_mask=mask)
            assert cache.get_seq_length() == 0
            assert in_use(store) == 0


def test_batch_is_restored_from_the_tiers_below(model: LlamaForCausalLM) -> None:
    prompts = [random_prompt(length, seed=length) for length in (2 * PAGE, 3 * PAGE)]
    with open_store(model, hbm=16, host=32) as store:
        expected, _, _ = answers(model, store, prompts)
        for prompt in prompts:
            store.demote(store.keys(prompt), Tier.HOST)
        assert store.drain(PATIENCE_S)
        ids, mask = pad_left(prompts)
        with TierStoreCache(store, ids, mask, model=model) as cache:
            assert generate_batch(model, ids, cache, attention_mask=mask).tolist() == expected
        assert cache.reused_by_tier == {Tier.HOST: 5 * PAGE - 2}


@pytest.mark.parametrize("chunk", [3, PAGE, PAGE + 5])
def test_rows_that_diverge_in_a_later_chunk(model: LlamaForCausalLM, chunk: int) -> None:
    shared = random_prompt(2 * PAGE + 3)
    prompts = [shared + random_prompt(PAGE + 2, seed=seed) for seed in (1, 2)]
    expected = plain_batch(model, torch.tensor(prompts)).tolist()
    with open_store(model) as store:
        for reused in (0, 2 * (len(prompts[0]) - 1)):
            rows, found, _ = answers(model, store, prompts, prefill_chunk_size=chunk)
            assert (rows, found) == (expected, reused)
