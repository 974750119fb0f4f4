"""Test that answers with the store equal those of plain transformers, whichever tier the prefix comes from."""

# mypy: allow-untyped-calls
from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.adapters.tiny import (
    PAGE,
    VOCABULARY,
    ask,
    generate,
    open_store,
    plain,
    random_prompt,
    tiny_llama,
    watch,
)
from tests.support import lanes
from tests.support.pages import PATIENCE_S, tier_stats
from tierstore.adapters.huggingface import TierStoreCache, cache_argument
from tierstore.store import TierStore
from tierstore.types import Tier

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


# F060
@pytest.mark.parametrize(
    ("num_kv_heads", "length"),
    lanes.some(
        product((1, 2, 4), (1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE, 5 * PAGE + 3)),
        lambda heads, length: heads == 2 or length == 5 * PAGE + 3,
    ),
)
def test_cold_and_warm_answers_equal_plain_transformers(num_kv_heads: int, length: int) -> None:
    model, prompt = tiny_llama(num_kv_heads), random_prompt(length)
    expected = plain(model, prompt)
    with open_store(model) as store:
        cold, cache = ask(store, model, prompt)
        assert (cold, cache.reused_tokens) == (expected, 0)
        for _ in range(2):
            warm, cache = ask(store, model, prompt)
            assert warm == expected
            # The answer filled the prompt's last page, so all tokens but the last are stored.
            assert cache.reused_tokens == length - 1


def test_logits_over_reused_pages_equal_those_without_a_cache(model: LlamaForCausalLM) -> None:
    prompt = torch.tensor([random_prompt(83)])
    with open_store(model) as store, torch.no_grad():
        expected = model(prompt, use_cache=False).logits
        with TierStoreCache(store, prompt[:, :50], model=model) as cache:
            model(prompt[:, :50], **{cache_argument(model): cache})
        with TierStoreCache(store, prompt, model=model) as cache:
            start = cache.get_seq_length()
            assert start == 48
            logits = model(prompt[:, start:], **{cache_argument(model): cache}).logits
    torch.testing.assert_close(logits, expected[:, start:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_prefix_below_hbm_is_restored_and_answers_are_equal(
    model: LlamaForCausalLM, tier: Tier, tmp_path: Path
) -> None:
    prompt = random_prompt(5 * PAGE + 3)
    with open_store(model, host=32, disk=tmp_path) as store:
        expected, _ = ask(store, model, prompt)
        _send_down(store, prompt, tier)
        answer, cache = ask(store, model, prompt)
        assert answer == expected == plain(model, prompt)
        assert cache.reused_by_tier == {tier: 5 * PAGE, Tier.HBM: 2}, "the page of prompt and answer stayed"


def test_new_process_of_the_store_reuses_what_the_last_one_wrote(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    prompt = random_prompt(4 * PAGE)
    with open_store(model, host=8, disk=tmp_path) as store:
        ask(store, model, prompt)
        _send_down(store, prompt, Tier.NVME)
    with open_store(model, host=8, disk=tmp_path) as store:
        answer, cache = ask(store, model, prompt)
    assert answer == plain(model, prompt)
    assert cache.reused_by_tier == {Tier.NVME: 4 * PAGE - 1}


def test_other_weights_find_nothing_of_this_model(model: LlamaForCausalLM, tmp_path: Path) -> None:
    prompt, other = random_prompt(4 * PAGE), tiny_llama(seed=1)
    with open_store(model, disk=tmp_path) as store:
        ask(store, model, prompt)
        _send_down(store, prompt, Tier.NVME)
    with open_store(other, disk=tmp_path) as store:
        answer, cache = ask(store, other, prompt)
    assert cache.reused_tokens == 0
    assert answer == plain(other, prompt)


def test_damaged_record_means_fewer_reused_tokens_and_the_same_answer(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    prompt = random_prompt(6 * PAGE + 1)
    with open_store(model, disk=tmp_path) as store:
        expected, _ = ask(store, model, prompt)
        keys = store.keys(prompt)
        with store.acquire(keys) as lease:
            page = store.pages[lease.slots[3]]
            assert isinstance(page, torch.Tensor)
            third = page.contiguous().view(torch.uint8).numpy().tobytes()
        _send_down(store, prompt, Tier.NVME)
    _flip_a_bit(tmp_path, third)
    with open_store(model, disk=tmp_path) as store:
        answer, cache = ask(store, model, prompt)
    assert answer == expected
    assert cache.reused_tokens == 3 * PAGE


def test_next_turn_reuses_prompt_and_answer(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(2 * PAGE + 5)
    with open_store(model) as store:
        for turn in range(3):
            answer, cache = ask(store, model, prompt)
            assert answer == plain(model, prompt)
            if turn:
                assert cache.reused_tokens == (len(prompt) - 6) // PAGE * PAGE
            prompt = prompt + answer + random_prompt(5, seed=turn)


def test_diverging_prompts_share_only_their_common_prefix(model: LlamaForCausalLM) -> None:
    shared = random_prompt(3 * PAGE + 4)
    with open_store(model) as store:
        ask(store, model, shared + random_prompt(9, seed=1))
        prompt = shared + random_prompt(9, seed=2)
        answer, cache = ask(store, model, prompt)
        assert cache.reused_tokens == 3 * PAGE + 4, "to the split inside the page"
        assert answer == plain(model, prompt)


def test_salt_and_extra_keep_requests_apart(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(4 * PAGE)
    with open_store(model) as store:
        with TierStoreCache(store, prompt, model=model, salt=b"one", extra=["lora-7"]) as cache:
            generate(model, prompt, cache)
        for salt, extra, reused in (
            (b"one", ["lora-7"], 4 * PAGE - 1),
            (b"two", ["lora-7"], 0),
            (b"one", [], 0),
        ):
            with TierStoreCache(store, prompt, model=model, salt=salt, extra=extra) as cache:
                assert cache.reused_tokens == reused


def test_sampling_with_a_seed_gives_the_tokens_of_plain_transformers(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(3 * PAGE + 2)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "max_new_tokens": 16}
    with open_store(model) as store:
        for _ in range(2):
            torch.manual_seed(5)
            expected = plain(model, prompt, **options)
            torch.manual_seed(5)
            assert ask(store, model, prompt, **options)[0] == expected


@pytest.mark.parametrize("chunk", [5, PAGE, 11])
def test_chunked_prefill_cold_and_warm(model: LlamaForCausalLM, chunk: int) -> None:
    prompt, start = random_prompt(4 * PAGE + 3), random_prompt(4 * PAGE + 3)[: 2 * PAGE]
    expected = plain(model, prompt)
    with open_store(model) as store:
        ask(store, model, start)
        for reused in (2 * PAGE, 4 * PAGE + 2):
            answer, cache = ask(store, model, prompt, prefill_chunk_size=chunk)
            assert (answer, cache.reused_tokens) == (expected, reused)


def test_prompt_lookup_rolls_back_and_answers_are_equal(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(6) * 4
    with open_store(model) as store:
        with watch(model) as fed, TierStoreCache(store, prompt, model=model) as cache:
            answer = generate(model, prompt, cache, prompt_lookup_num_tokens=4, max_new_tokens=24)
            assert cache.get_seq_length() == len(prompt) + len(answer) - 1
            assert max(fed.widths[1:]) > 1, "no candidates were ever tried: this shows nothing"
        assert answer == plain(model, prompt, max_new_tokens=24)
        with watch(model) as fed, TierStoreCache(store, prompt, model=model) as cache:
            assert cache.get_seq_length() == len(prompt) - 1
            again = generate(model, prompt, cache, prompt_lookup_num_tokens=4, max_new_tokens=24)
            # Assisted decoding passes the whole prompt to a warm cache again. It must not be computed again.
            assert fed.widths[0] <= 1 + 4
        assert again == answer


def test_pages_written_after_a_rollback_follow_the_right_page(model: LlamaForCausalLM) -> None:
    prompt, other = random_prompt(5 * PAGE), random_prompt(2 * PAGE, seed=7)
    name = cache_argument(model)
    with open_store(model) as store, torch.no_grad():
        with TierStoreCache(store, prompt, model=model) as cache:
            model(torch.tensor([prompt]), **{name: cache})
            cache.crop(-(3 * PAGE + 3))
            assert cache.get_seq_length() == 2 * PAGE - 3
            model(torch.tensor([other]), **{name: cache})
            assert cache.get_seq_length() == 4 * PAGE - 3
        branch = prompt[: 2 * PAGE - 3] + other
        keys = store.keys(branch)
        parents = [page["parent"] for page in store.explain(keys)]
        assert parents == [None, *(key.hex() for key in keys[:-1])]
        for ids in (branch, prompt):
            answer, cache = ask(store, model, ids)
            assert answer == plain(model, ids)
            assert cache.reused_tokens == min(len(ids) // PAGE * PAGE, len(ids) - 1)


@pytest.mark.parametrize("left", [0, 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 3])
def test_rollback_releases_pages_after_it_and_keeps_pages_before_it(
    model: LlamaForCausalLM, left: int
) -> None:
    prompt = random_prompt(6 * PAGE)
    expected = plain(model, prompt)
    with open_store(model) as store:
        with TierStoreCache(store, prompt, model=model) as cache:
            generate(model, prompt, cache)
        with TierStoreCache(store, prompt, model=model) as cache:
            before = tier_stats(store, Tier.HBM)["pinned"]
            cache.crop(left - cache.get_seq_length())
            held = -(-left // PAGE)
            assert (before, tier_stats(store, Tier.HBM)["pinned"]) == (6, held)
            store.evict(store.keys(prompt))
            assert store.match(store.keys(prompt)).num_pages == 0
            assert generate(model, prompt, cache) == expected
            store.check()
        store.check()


def test_pages_that_cannot_meet_the_deadline_are_computed(model: LlamaForCausalLM, tmp_path: Path) -> None:
    prompt = random_prompt(5 * PAGE)
    with open_store(model, disk=tmp_path) as store:
        ask(store, model, prompt)
        _send_down(store, prompt, Tier.NVME)
        with TierStoreCache(store, prompt, model=model, deadline_s=0.0) as cache:
            assert cache.reused_tokens == 0
            assert generate(model, prompt, cache) == plain(model, prompt)


@pytest.mark.parametrize(
    "config",
    [MistralConfig(sliding_window=None, **_SMALL), Qwen2Config(**_SMALL), Qwen3Config(head_dim=8, **_SMALL)],
    ids=["Mistral", "Qwen2", "Qwen3"],
)
def test_models_built_like_llama_work_too(config: PreTrainedConfig) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="tierstore")
    model.eval()
    prompt = random_prompt(3 * PAGE + 2)
    with open_store(model) as store:
        for reused in (0, 3 * PAGE + 1):
            answer, cache = ask(store, model, prompt)
            assert (answer, cache.reused_tokens) == (plain(model, prompt), reused)


def test_two_open_caches_of_one_model_do_not_mix(model: LlamaForCausalLM) -> None:
    one, two = random_prompt(2 * PAGE + 1, seed=1), random_prompt(3 * PAGE, seed=2)
    name = cache_argument(model)
    with open_store(model) as store, torch.no_grad():
        with (
            TierStoreCache(store, one, model=model) as first,
            TierStoreCache(store, two, model=model) as second,
        ):
            for at in range(0, 2 * PAGE, 4):
                model(torch.tensor([one[at : at + 4]]), **{name: first})
                model(torch.tensor([two[at : at + 4]]), **{name: second})
        for prompt in (one, two):
            answer, cache = ask(store, model, prompt)
            assert (answer, cache.reused_tokens) == (plain(model, prompt), 2 * PAGE)


def test_prompt_that_holds_the_pad_token_needs_a_mask_and_then_works(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(20)
    prompt[4] = 0
    mask = torch.ones(1, 20, dtype=torch.long)
    with open_store(model) as store:
        for _ in range(2):
            with TierStoreCache(store, prompt, model=model) as cache:
                with pytest.raises(ValueError, match="attention_mask of ones"):
                    generate(model, prompt, cache, attention_mask=None)
                answer = generate(model, prompt, cache, attention_mask=mask)
            assert answer == plain(model, prompt, attention_mask=mask)


def test_model_with_this_attention_still_works_without_the_store(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(21)
    for options in ({}, {"use_cache": False}, {"prefill_chunk_size": 6}):
        assert generate(model, prompt, None, **options) == plain(model, prompt)
    batch = torch.tensor([[0] * 5 + random_prompt(9, seed=3), random_prompt(14, seed=4)])
    mask = (batch != 0).long()
    padded = model.generate(batch, attention_mask=mask, do_sample=False, max_new_tokens=6, pad_token_id=0)
    assert padded[0, 14:].tolist() == plain(model, batch[0, 5:].tolist(), max_new_tokens=6)


def _send_down(store: TierStore, prompt: list[int], tier: Tier) -> None:
    """Demote the pages of ``prompt``, so that ``tier`` is the highest tier that has them."""
    keys = store.keys(prompt)
    assert store.demote(keys, tier) == len(keys)
    assert store.drain(PATIENCE_S)
    store.flush()
    assert set(store.match(keys).tiers) == {tier}


def _flip_a_bit(folder: Path, page: bytes) -> None:
    """Flip one bit of this page in the file under ``folder`` that stores it."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (at := path.read_bytes().find(page)) >= 0:
            with path.open("r+b") as file:
                file.seek(at + len(page) // 2)
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1]))
            return
    raise AssertionError("the page's bytes are nowhere on disk")


@pytest.mark.parametrize("image_at", [0, PAGE + 3, 3 * PAGE])
def test_equal_tokens_with_another_image_diverge_at_its_page(model: LlamaForCausalLM, image_at: int) -> None:
    prompt = random_prompt(5 * PAGE + 4)
    with open_store(model) as store:
        for image, reused in (
            (b"cat", 0),
            (b"dog", image_at // PAGE * PAGE),
            (b"cat", len(prompt) // PAGE * PAGE),
        ):
            with TierStoreCache(store, prompt, model=model, extra=[(image_at, image)]) as cache:
                generate(model, prompt, cache)
            # Reuse never ends inside a page, because what its tokens mean can depend on the image.
            assert cache.reused_tokens == reused


def test_equivalent_salts_share_pages(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(3 * PAGE + 2)
    with open_store(model) as store:
        for salt, extra, reused in (
            (b"tenant", [b"lora"], 0),
            (bytearray(b"tenant"), [bytearray(b"lora")], len(prompt) - 1),
            (b"tenant", ["lora"], 0),
        ):
            options: Any = {"salt": bytes(salt), "extra": extra}
            with TierStoreCache(store, prompt, model=model, **options) as cache:
                generate(model, prompt, cache)
            assert cache.reused_tokens == reused
