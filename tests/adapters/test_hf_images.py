"""Tests of image-and-text models: image requests are refused, and text requests are correct after any other request."""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from tests.adapters.test_hf_arrival import below, broken_after_the_first_layer
from tests.adapters.tiny import (
    NEW,
    PAGE,
    generate,
    generate_batch,
    open_store,
    pad_left,
    plain,
    plain_batch,
    strong,
)
from tierstore.adapters.huggingface import ATTENTION, PrefixCache, TierStoreCache, cache_argument

IMAGE, START, END = 90, 91, 92
TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def tokens(length: int, seed: int = 0) -> list[int]:
    """Return random text tokens, without image tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(2, 88, (length,), generator=generator)]


def tiny_qwen(version: str) -> PreTrainedModel:
    """Return a small Qwen VL model. Its positions have three axes, and an image of 16 tokens takes up 4 positions."""
    torch.manual_seed(0)
    kinds: dict[str, tuple[Any, Any]] = {
        "2": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
        "2.5": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    }
    vision: dict[str, dict[str, Any]] = {
        "2": {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
        "2.5": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    }
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    config, kind = kinds[version]
    made = config(
        text_config=TEXT | {"rope_parameters": rope},
        vision_config={"depth": 2, "num_heads": 4, "patch_size": 4, "temporal_patch_size": 2}
        | vision[version],
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
        video_token_id=93,
    )
    model: PreTrainedModel = strong(kind(made))
    return model


def with_image(before: list[int], after: list[int]) -> tuple[list[int], dict[str, Any]]:
    """Return a prompt with an image of 16 tokens, and the arguments that ``generate`` needs for the image."""
    prompt = [*before, START, *[IMAGE] * 16, END, *after]
    generator = torch.Generator().manual_seed(7)
    return prompt, {
        "pixel_values": torch.randn(64, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 8, 8]]),
        "mm_token_type_ids": (torch.tensor([prompt]) == IMAGE).long(),
    }


@pytest.fixture(scope="module", params=["2", "2.5"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_qwen(request.param)


def ask_with_image(model: PreTrainedModel) -> torch.Tensor:
    """Run a request with an image and without a store. Return the ``rope_deltas`` that it leaves on the model."""
    prompt, given = with_image(tokens(10, 5), tokens(20, 6))
    model.set_attn_implementation("sdpa")
    generate_batch(model, torch.tensor([prompt]), None, **given)
    model.set_attn_implementation(ATTENTION)
    state: Any = model.model
    left: torch.Tensor = state.rope_deltas
    assert left is not None
    assert left.abs().min() > 3, "the image shifts no position: this shows nothing"
    return left


def test_text_request_is_correct_cold_and_warm_after_one_with_an_image(model: PreTrainedModel) -> None:
    prompt = tokens(5 * PAGE + 3)
    longer = prompt + tokens(2 * PAGE, 1)
    expected = {len(each): plain(model, each) for each in (prompt, longer)}
    with open_store(model) as store:
        for asked, reused in ((prompt, 0), (prompt, 5 * PAGE + 2), (longer, 5 * PAGE + 3)):
            ask_with_image(model)
            with TierStoreCache(store, asked, model=model) as cache:
                assert cache.reused_tokens == reused
                assert generate(model, asked, cache) == expected[len(asked)]


def test_logits_over_a_warm_prefix_do_not_depend_on_an_image_before(model: PreTrainedModel) -> None:
    prompt, name = torch.tensor([tokens(5 * PAGE)]), cache_argument(model)
    with open_store(model) as store, torch.no_grad():
        ask_with_image(model)
        cold: Any = model(prompt, use_cache=False).logits
        for start, positions in ((0, None), (0, "given"), (3 * PAGE, None), (3 * PAGE, "given")):
            left = ask_with_image(model)
            with TierStoreCache(store, prompt[:, : max(start, 1)], model=model, storing="read-only") as cache:
                if start:
                    cache.crop(-cache.columns)
                    model(prompt[:, :start], **{name: cache})
                else:
                    cache.reset()
                # Restore the shift, as if another request with an image had just run.
                state: Any = model.model
                state.rope_deltas = left
                given = {}
                if positions:
                    given["position_ids"] = torch.arange(start, 5 * PAGE).expand(3, 1, -1)
                found = model(prompt[:, start:], **{name: cache}, **given).logits
            torch.testing.assert_close(found, cold[:, start:], rtol=1e-4, atol=1e-4)


def test_shifted_positions_are_refused(model: PreTrainedModel) -> None:
    prompt, name = torch.tensor([tokens(3 * PAGE)]), cache_argument(model)
    with open_store(model) as store, torch.no_grad():
        for axis in range(3):
            positions = torch.arange(3 * PAGE).expand(3, 1, -1).clone()
            positions[axis, 0, 5:] += 2
            with (
                TierStoreCache(store, prompt, model=model) as cache,
                pytest.raises(ValueError, match="at wrong positions"),
            ):
                model(prompt, position_ids=positions, **{name: cache})
        assert store.match(store.keys(prompt[0].tolist())).num_pages == 0


def test_cache_opened_before_an_image_request_is_refused(model: PreTrainedModel) -> None:
    prompt = tokens(3 * PAGE)
    with open_store(model) as store:
        with TierStoreCache(store, prompt, model=model) as cache:
            generate(model, prompt, cache)
        with TierStoreCache(store, prompt, model=model) as cache:
            ask_with_image(model)
            with pytest.raises(ValueError, match="open another TierStoreCache for this request"):
                generate(model, prompt, cache)
        with TierStoreCache(store, prompt, model=model) as cache:
            assert generate(model, prompt, cache) == plain(model, prompt)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}])
def test_text_requests_are_correct_in_every_generation_mode(
    model: PreTrainedModel, options: dict[str, Any]
) -> None:
    prompt = tokens(PAGE, 2) * 3 + tokens(5, 3)
    expected = plain(model, prompt, **options)
    with open_store(model, hbm=64) as store:
        for _ in range(2):
            ask_with_image(model)
            with TierStoreCache(store, prompt, model=model) as cache:
                assert generate(model, prompt, cache, **options) == expected


def test_padded_text_batches_are_correct(model: PreTrainedModel) -> None:
    ids, mask = pad_left([tokens(3 * PAGE + 2), tokens(2 * PAGE, 1), tokens(5, 2)])
    expected = plain_batch(model, ids, attention_mask=mask)
    with open_store(model, hbm=64) as store:
        for _ in range(2):
            ask_with_image(model)
            with TierStoreCache(store, ids, mask, model=model) as cache:
                assert generate_batch(model, ids, cache, attention_mask=mask).tolist() == expected.tolist()


def test_text_chat_continues_after_a_request_with_an_image(model: PreTrainedModel) -> None:
    said = [tokens(2 * PAGE + 3, 1), tokens(5, 2), tokens(9, 3)]
    with open_store(model) as store, PrefixCache(store, model) as cache:
        session = cache.session("one")
        for each in said:
            ask_with_image(model)
            session.append(each)
            expected = plain(model, list(session.tokens))
            ask_with_image(model)
            assert session.generate(do_sample=False, max_new_tokens=NEW) == expected
        assert session.turns[-1].reused_tokens > 3 * PAGE


def test_a_prompt_with_an_image_is_refused_with_and_without_it(model: PreTrainedModel) -> None:
    prompt, given = with_image(tokens(10), tokens(40, 1))
    longer = prompt + tokens(20, 2)
    assert plain(model, prompt, **given) != plain(model, prompt), (
        "the image does not matter: this shows nothing"
    )
    match = rf"token {IMAGE} \(image_token_id of {type(model).__name__}\)"
    with open_store(model) as store:
        for ids in (prompt, longer):
            for extra in ((), [(11, b"image-1")]):
                with pytest.raises(ValueError, match=match):
                    TierStoreCache(store, ids, model=model, extra=extra)
        with pytest.raises(ValueError, match=match):
            TierStoreCache(store, *pad_left([tokens(70), prompt]), model=model)
        with PrefixCache(store, model) as cache:
            session = cache.session("one")
            session.append(prompt)
            with pytest.raises(ValueError, match=match):
                session.generate(max_new_tokens=3)
        assert store.match(store.keys(prompt, extra=[(11, b"image-1")])).num_pages == 0
        text = tokens(3 * PAGE)
        with TierStoreCache(store, text, model=model) as cache_of_text:
            assert generate(model, text, cache_of_text) == plain(model, text)


def test_an_image_that_comes_with_another_prompt_is_refused_by_name(model: PreTrainedModel) -> None:
    prompt, given = with_image(tokens(10), tokens(40, 1))
    text, name = tokens(len(prompt)), cache_argument(model)
    with open_store(model) as store, torch.no_grad():
        with (
            TierStoreCache(store, text, model=model) as cache,
            pytest.raises(ValueError, match=r"was given .*TierStoreCache keeps K and V of text only"),
        ):
            generate(model, prompt, cache, **given)
        for key in ("pixel_values", "mm_token_type_ids"):
            with (
                TierStoreCache(store, text, model=model) as cache,
                pytest.raises(
                    ValueError, match=f"was given {key}, but TierStoreCache keeps K and V of text only"
                ),
            ):
                model(torch.tensor([text]), **{key: given[key]}, **{name: cache})
        assert store.match(store.keys(text)).num_pages == 0
        with TierStoreCache(store, text, model=model) as cache:
            types = torch.zeros(1, len(text), dtype=torch.long)
            assert generate(model, text, cache, mm_token_type_ids=types) == plain(model, text)


def test_gemma_with_images_is_correct_for_text_and_refuses_bidirectional_tokens() -> None:
    torch.manual_seed(0)
    config = Gemma3Config(
        text_config=TEXT
        | {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
        },
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )
    model, prompt = strong(Gemma3ForConditionalGeneration(config)), tokens(5 * PAGE)
    types = torch.zeros(1, len(prompt), dtype=torch.long)
    expected = plain(model, prompt)
    with open_store(model, hbm=64) as store:
        for given in ({}, {"token_type_ids": types}):
            with TierStoreCache(store, prompt, model=model) as cache:
                assert generate(model, prompt, cache, **given) == expected
        with pytest.raises(ValueError, match=rf"token {IMAGE} \(image_token_"):
            TierStoreCache(store, [*prompt, IMAGE, 5], model=model)
        types[0, 9:13] = 1
        with (
            TierStoreCache(store, prompt, model=model, storing="no-store") as cache,
            pytest.raises(ValueError, match="was given token_type_ids"),
        ):
            generate(model, prompt, cache, token_type_ids=types)
        # Without a store, the same attention supports these token types.
        ids = torch.tensor([prompt])
        with torch.no_grad():
            found = model(ids, token_type_ids=types, use_cache=False).logits
            model.set_attn_implementation("sdpa")
            wanted = model(ids, token_type_ids=types, use_cache=False).logits
            causal = model(ids, use_cache=False).logits
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert (causal - wanted).abs().max() > 0.1


@pytest.mark.parametrize("stale", [False, True], ids=["fresh", "after an image"])
def test_pages_that_fail_to_arrive_are_computed_at_text_positions(
    monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, stale: bool
) -> None:
    prompt = tokens(4 * PAGE + 3)
    expected = plain(model, prompt)
    with below(model, prompt) as store:
        broken_after_the_first_layer(monkeypatch, 1)
        if stale:
            ask_with_image(model)
        with TierStoreCache(store, prompt, model=model, timeout_s=1.0) as cache:
            assert cache.batch.arriving
            assert generate(model, prompt, cache) == expected
            assert cache.reused_tokens < 4 * PAGE, "nothing was lost: this shows nothing"
