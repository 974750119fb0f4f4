"""Tests of requests that do not fit into HBM: pages stream from host memory, and answers equal plain transformers."""

# mypy: allow-untyped-calls
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.adapters.test_hf_windows import tiny_gemma, tiny_mistral
from tests.adapters.tiny import (
    PAGE,
    generate,
    generate_batch,
    open_store,
    pad_left,
    plain,
    plain_batch,
    random_prompt,
    tiny_llama,
    watch,
)
from tests.support import lanes
from tests.support.pages import PATIENCE_S
from tierstore.adapters.huggingface import PrefixCache, TierStoreCache, cache_argument, page_specs
from tierstore.config import load_config
from tierstore.errors import CapacityError
from tierstore.store import TierStore
from tierstore.types import Tier

HBM, HOST = 4, 64
"""Sizes in pages. HBM holds a tenth of a document."""
DOCUMENT = 40 * PAGE
NEW = 2 * PAGE + 5
"""Tokens of an answer. It fills pages of its own, which move to host memory, too."""


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def streamed(cache: TierStoreCache) -> int:
    """Return the number of pages of the first row that stream from host memory."""
    return len(cache.batch.rows[0].hosted)


def tiers(store: TierStore, state: str) -> dict[str, int]:
    found: Any = store.stats()["tiers"]
    return {name: int(figures[state]) for name, figures in found.items()}


def answer(
    store: TierStore, model: LlamaForCausalLM, prompt: list[int], **options: Any
) -> tuple[list[int], int, list[int]]:
    """Return the answer, the number of reused tokens, and the widths of the forward passes."""
    with watch(model) as fed, TierStoreCache(store, prompt, model=model, **options) as cache:
        tokens = generate(model, prompt, cache, max_new_tokens=NEW)
        assert streamed(cache) > 0
        assert cache.get_seq_length() == len(prompt) + NEW - 1
        store.check()
        return tokens, cache.reused_tokens, fed.widths


@pytest.mark.parametrize("more", lanes.some([0, 1, 5, PAGE - 1], lambda more: more in (0, 5)))
def test_document_ten_times_larger_than_hbm_is_read_and_answered(model: LlamaForCausalLM, more: int) -> None:
    prompt = random_prompt(DOCUMENT + more)
    expected = plain(model, prompt, max_new_tokens=NEW)
    with open_store(model, HBM, HOST) as store:
        tokens, reused, widths = answer(store, model, prompt)
        assert (tokens, reused) == (expected, 0)
        assert sum(widths) == len(prompt) + NEW - 1
        assert max(widths) <= HBM * PAGE


@pytest.mark.parametrize("more", [0, 5])
def test_second_request_computes_only_what_is_not_in_host_memory(model: LlamaForCausalLM, more: int) -> None:
    prompt = random_prompt(DOCUMENT + more)
    expected = plain(model, prompt, max_new_tokens=NEW)
    with open_store(model, HBM, HOST) as store:
        answer(store, model, prompt)
        tokens, reused, widths = answer(store, model, prompt)
        assert tokens == expected
        assert reused == len(prompt) - 1  # all but the last token
        assert widths == [1] * NEW


def test_two_documents_in_turn_and_then_the_first_again(model: LlamaForCausalLM) -> None:
    prompts = [random_prompt(DOCUMENT // 2 + seed, seed) for seed in (3, 4)]
    with open_store(model, HBM, HOST) as store:
        for prompt in [*prompts, prompts[0]]:
            expected = plain(model, prompt, max_new_tokens=NEW)
            assert answer(store, model, prompt)[0] == expected


def test_two_open_requests_share_hbm_and_the_pages_in_host_memory(model: LlamaForCausalLM) -> None:
    document = random_prompt(DOCUMENT)
    prompts = [[*document, *random_prompt(3 + seed, seed)] for seed in (1, 2)]
    expected = [plain(model, prompt, max_new_tokens=5) for prompt in prompts]
    with open_store(model, HBM, HOST) as store:
        answer(store, model, document)
        with (
            TierStoreCache(store, prompts[0], model=model) as one,
            TierStoreCache(store, prompts[1], model=model) as other,
        ):
            found = [
                generate(model, prompt, cache, max_new_tokens=5)
                for prompt, cache in zip(prompts, (one, other), strict=True)
            ]
            assert one.batch.rows[0].hosted[:40] == other.batch.rows[0].hosted[:40]
            assert tiers(store, "pinned")["HOST"] < 45
        assert found == expected


def test_document_is_found_on_disk_after_a_restart(model: LlamaForCausalLM, tmp_path: Path) -> None:
    prompt = random_prompt(DOCUMENT + 3)
    expected = plain(model, prompt, max_new_tokens=NEW)
    with open_store(model, HBM, HOST, tmp_path) as store:
        assert answer(store, model, prompt)[0] == expected
    with open_store(model, HBM, HOST, tmp_path) as store:
        assert set(store.match(store.keys(prompt)).tiers) == {Tier.NVME}
        tokens, reused, _ = answer(store, model, prompt)
        assert (tokens, reused) == (expected, DOCUMENT)


def test_questions_about_one_document_share_what_is_streamed(model: LlamaForCausalLM) -> None:
    document = random_prompt(DOCUMENT)
    prompts = [[*document, *random_prompt(length, length)] for length in (1, 5, 6)]
    ids, mask = pad_left(prompts)
    expected = plain_batch(model, ids, attention_mask=mask, max_new_tokens=NEW)
    with open_store(model, 8, HOST) as store:
        answer(store, model, document)
        with TierStoreCache(store, ids, mask, model=model) as cache:
            rows = generate_batch(model, ids, cache, attention_mask=mask, max_new_tokens=NEW)
            hosted = [row.hosted for row in cache.batch.rows]
            assert hosted[0][:40] == hosted[1][:40] == hosted[2][:40]
            assert cache.reused_tokens == 3 * DOCUMENT - 1 - 5  # all rows start in the same column
            store.check()
        assert rows.tolist() == expected.tolist()


@pytest.mark.parametrize("hbm", [6, 13])
def test_a_batch_without_stored_pages_is_computed_in_parts(model: LlamaForCausalLM, hbm: int) -> None:
    document = random_prompt(DOCUMENT // 2)
    prompts = [[*document, *random_prompt(length, length)] for length in (1, 5, 11)]
    ids, mask = pad_left(prompts)
    expected = plain_batch(model, ids, attention_mask=mask, max_new_tokens=NEW)
    with open_store(model, hbm, 2 * HOST) as store:
        with TierStoreCache(store, ids, mask, model=model) as cache:
            rows = generate_batch(model, ids, cache, attention_mask=mask, max_new_tokens=NEW)
            store.check()
        assert rows.tolist() == expected.tolist()


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"num_return_sequences": 2, "num_beams": 2}])
def test_beams_stream_the_pages_that_they_share(model: LlamaForCausalLM, options: dict[str, Any]) -> None:
    prompt = random_prompt(DOCUMENT + 5)
    ids = torch.tensor([prompt])
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, **options}
    expected = plain_batch(model, ids, **given)
    with open_store(model, 10, HOST) as store:
        for _ in range(2):
            with TierStoreCache(store, ids, model=model) as cache:
                assert generate_batch(model, ids, cache, **given).tolist() == expected.tolist()
                assert streamed(cache) > 30
                store.check()


def test_a_divided_pass_returns_the_output_of_all_its_tokens(model: LlamaForCausalLM) -> None:
    prompt = torch.tensor([random_prompt(12 * PAGE + 3)])
    with torch.no_grad():
        expected = model(prompt, use_cache=False, output_hidden_states=True)
    with open_store(model, HBM, HOST) as store, TierStoreCache(store, prompt, model=model) as cache:
        with torch.no_grad():
            found = model(prompt, output_hidden_states=True, **{cache_argument(model): cache})
        assert found.logits.shape == expected.logits.shape
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-3, atol=1e-3)
        for mine, want in zip(found.hidden_states, expected.hidden_states, strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-3, atol=1e-3)


def test_request_too_large_for_host_memory_fails_before_anything_is_computed(
    model: LlamaForCausalLM,
) -> None:
    first, prompt = random_prompt(10 * PAGE, 1), random_prompt(DOCUMENT)
    with open_store(model, HBM, 16) as store:
        answer(store, model, first)
        with (
            watch(model) as fed,
            TierStoreCache(store, prompt, model=model) as cache,
            pytest.raises(CapacityError, match=r"40 pages, .* room for 20 .*raise host\.capacity"),
        ):
            generate(model, prompt, cache)
        assert fed.widths == []
        assert store.match(store.keys(first)).num_pages == 10
        assert answer(store, model, first)[1] == 10 * PAGE - 1


def test_answer_that_outgrows_host_memory_fails_and_keeps_the_pages_of_the_prompt(
    model: LlamaForCausalLM,
) -> None:
    prompt = random_prompt(12 * PAGE, 1)
    with open_store(model, HBM, 12) as store:
        with TierStoreCache(store, prompt, model=model, timeout_s=0.2) as cache:
            with pytest.raises(CapacityError, match=r"raise host\.capacity or hbm\.capacity"):
                generate(model, prompt, cache, max_new_tokens=8 * PAGE)
            assert store.match(store.keys(prompt)).num_pages == 12
            store.check()
        assert store.match(store.keys(prompt)).num_pages == 12


def test_host_pages_of_an_open_request_are_kept_although_others_want_their_space(
    model: LlamaForCausalLM,
) -> None:
    prompt, other = random_prompt(20 * PAGE, 1), random_prompt(20 * PAGE, 2)
    expected = plain(model, prompt, max_new_tokens=NEW)
    with open_store(model, 6, 30) as store:
        with TierStoreCache(store, prompt, model=model) as cache:
            first = generate(model, prompt, cache, max_new_tokens=3)
            with (
                TierStoreCache(store, other, model=model, timeout_s=0.2) as late,
                pytest.raises(CapacityError),
            ):
                generate(model, other, late)
            store.evict(store.keys(prompt)[:10])  # nobody else finds them, but this request still reads them
            ids = [*prompt, *first]
            assert first + generate(model, ids, cache, max_new_tokens=NEW - 3) == expected
        assert tiers(store, "pinned") == {"HBM": 0, "HOST": 0}


def test_request_that_ends_in_the_middle_releases_its_host_pages(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(DOCUMENT)
    with open_store(model, HBM, HOST) as store:
        cache = TierStoreCache(store, prompt, model=model)
        with torch.no_grad():
            model(torch.tensor([prompt[: DOCUMENT // 2]]), **{cache_argument(model): cache})
        assert tiers(store, "pinned")["HOST"] > 0
        cache.close()
        assert tiers(store, "pinned") == {"HBM": 0, "HOST": 0}
        assert store.match(store.keys(prompt)).num_pages == 20
        assert answer(store, model, prompt)[1] == DOCUMENT // 2


def test_request_continues_after_an_exception_in_the_model(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(DOCUMENT + 3)
    expected = plain(model, prompt, max_new_tokens=NEW)
    calls = 0

    def fail(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("out of luck")

    with open_store(model, HBM, HOST) as store, TierStoreCache(store, prompt, model=model) as cache:
        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            generate(model, prompt, cache, max_new_tokens=NEW)
        hook.remove()
        store.check()
        assert 0 < cache.get_seq_length() < len(prompt)
        assert generate(model, prompt, cache, max_new_tokens=NEW) == expected


def test_reset_cache_starts_again(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(DOCUMENT)
    expected = plain(model, prompt, max_new_tokens=5)
    with open_store(model, HBM, HOST) as store, TierStoreCache(store, prompt, model=model) as cache:
        assert generate(model, prompt, cache, max_new_tokens=5) == expected
        with pytest.raises(ValueError, match="stream from host memory and are not writable"):
            cache.crop(-DOCUMENT // 2)
        cache.reset()
        assert generate(model, prompt, cache, max_new_tokens=5) == expected


def test_chat_continues_when_it_is_larger_than_hbm(model: LlamaForCausalLM) -> None:
    with open_store(model, HBM, HOST) as store, PrefixCache(store, model) as home:
        session, tokens = home.session("chat"), [*random_prompt(DOCUMENT // 2)]
        session.append(tokens)
        for seed in range(3):
            got = session.generate(max_new_tokens=5, do_sample=False, pad_token_id=0)
            assert got == plain(model, tokens, max_new_tokens=5)
            turn = random_prompt(7, seed)
            session.append(turn)
            tokens = [*tokens, *got, *turn]
        assert session.turns[-1].computed_tokens <= 8
        session.drop()


def test_layers_with_windows_and_full_layers_stream_together() -> None:
    model = tiny_gemma()
    prompt = random_prompt(DOCUMENT // 2 + 3)
    expected = plain(model, prompt, max_new_tokens=NEW)
    with open_store(model, HBM, HOST) as store:
        for reused in (0, len(prompt) - 1):
            with TierStoreCache(store, prompt, model=model) as cache:
                assert generate(model, prompt, cache, max_new_tokens=NEW) == expected
                assert streamed(cache) > 15
                assert cache.reused_tokens == reused


def test_a_model_in_which_every_layer_has_a_window_keeps_its_pages_in_hbm() -> None:
    model = tiny_mistral()
    prompt = random_prompt(DOCUMENT // 2 + 3)
    with open_store(model, 24, HOST) as store, TierStoreCache(store, prompt, model=model) as cache:
        assert generate(model, prompt, cache, max_new_tokens=NEW) == plain(model, prompt, max_new_tokens=NEW)
        assert streamed(cache) == 0


@pytest.mark.parametrize(
    "options", [{"streaming": False}, {"storing": "read-only"}, {"storing": "no-store"}], ids=str
)
def test_requests_that_may_not_stream_fail_if_they_do_not_fit(
    model: LlamaForCausalLM, options: dict[str, Any]
) -> None:
    prompt = random_prompt(DOCUMENT)
    with (
        open_store(model, HBM, HOST) as store,
        TierStoreCache(store, prompt, model=model, timeout_s=0.1, **options) as cache,
    ):
        with pytest.raises(CapacityError, match="HBM has only 4 slots"):
            generate(model, prompt, cache)
        assert streamed(cache) == 0


def test_pages_that_a_host_codec_would_change_are_not_streamed(model: LlamaForCausalLM) -> None:
    specs = page_specs(model, PAGE)
    nbytes = sum(spec.page_nbytes for spec in specs)
    config = load_config(
        {
            "hbm": {"capacity": HBM * nbytes, "device": "cpu"},
            "host": {"capacity": HOST * nbytes, "codec": "int8"},
        }
    )
    prompt = random_prompt(DOCUMENT)
    with (
        TierStore.open(config, specs) as store,
        TierStoreCache(store, prompt, model=model, timeout_s=0.1) as cache,
        pytest.raises(CapacityError, match="HBM has only 4 slots"),
    ):
        generate(model, prompt, cache)


def test_pages_that_went_through_a_lossy_codec_are_computed_again(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    prompt = random_prompt(DOCUMENT + 3)
    expected = plain(model, prompt, max_new_tokens=NEW)
    with open_store(model, HBM, HOST, tmp_path, codec="int4") as store:
        assert answer(store, model, prompt)[0] == expected
    with open_store(model, HBM, HOST, tmp_path, codec="int4") as store:
        assert not store.match(store.keys(prompt)).exact
        tokens, reused, _ = answer(store, model, prompt)
        assert (tokens, reused) == (expected, 0)


def test_a_request_that_fits_does_not_stream(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(20 * PAGE + 3)
    with open_store(model, 32, HOST) as store:
        for _ in range(2):
            with watch(model) as fed, TierStoreCache(store, prompt, model=model) as cache:
                generate(model, prompt, cache)
                assert streamed(cache) == 0
        assert len(fed.widths) == 7


def test_request_that_fills_hbm_while_it_answers_streams_from_then_on(model: LlamaForCausalLM) -> None:
    prompt = random_prompt(5 * PAGE + 3)
    expected = plain(model, prompt, max_new_tokens=5 * PAGE)
    with open_store(model, 8, HOST) as store, TierStoreCache(store, prompt, model=model) as cache:
        generate_first = generate(model, prompt, cache, max_new_tokens=5 * PAGE)
        assert generate_first == expected
        assert 0 < streamed(cache) < 6
        assert store.drain(PATIENCE_S)
