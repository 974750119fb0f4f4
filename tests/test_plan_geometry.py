"""Tests of the page geometry and the work per token that follow from a model's config, and of rejected configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.models import GQA, MLA, WINDOWS, read, work
from tierstore.errors import ConfigError
from tierstore.plan.geometry import Prefill, known_models, read_model


@pytest.mark.parametrize(
    ("change", "shape"),
    [
        ({}, (2, 2, 4, 2, 8)),
        ({"num_key_value_heads": 1}, (2, 2, 4, 1, 8)),
        ({"num_key_value_heads": None}, (2, 2, 4, 4, 8)),
        ({"head_dim": 16}, (2, 2, 4, 2, 16)),
        (MLA, (2, 1, 4, 1, 16)),
    ],
    ids=["grouped heads", "one head", "no grouping", "a head_dim of its own", "latents"],
)
def test_pages_have_the_shape_that_the_config_describes(
    change: dict[str, Any], shape: tuple[int, ...]
) -> None:
    (spec,) = read(GQA | change).specs(4)
    assert spec.shape == shape


def test_the_text_part_of_a_larger_config_is_read_and_its_dtype_may_stand_above() -> None:
    text = {name: value for name, value in GQA.items() if name != "torch_dtype"}
    top = {
        "text_config": text,
        "dtype": "torch.float32",
        "hidden_size": 7,
        "vision_config": {"hidden_size": 9},
    }
    (spec,) = read(top).specs(4)
    assert spec.dtype == "float32"
    assert spec.shape == (2, 2, 4, 2, 8)


def test_layers_with_a_window_are_a_separate_group_after_the_full_ones() -> None:
    full, windows = read_model("gemma-3-270m").specs(64)
    assert (full.group, full.shape) == (0, (3, 2, 64, 1, 256))
    assert (windows.group, windows.shape) == (1, (15, 2, 64, 1, 256))
    (only,) = read(GQA | {"sliding_window": 3}).specs(4)
    assert only.shape == (2, 2, 4, 2, 8)


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        (WINDOWS, (3, None)),
        ({"sliding_window": 3}, (3, 3)),
        ({"sliding_window": 3, "use_sliding_window": False}, (None, None)),
        ({"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1}, (None, 3)),
        ({"sliding_window": 3, "sliding_window_pattern": 2}, (3, None)),
        ({"sliding_window": 3, "model_type": "gemma2"}, (3, None)),
        ({"sliding_window": None}, (None, None)),
    ],
)
def test_each_layer_has_its_window(fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(GQA | fields).windows == windows


def test_table_shows_which_gemma_layers_attend_to_all_tokens() -> None:
    windows = read_model("gemma-3-270m").windows
    assert [layer for layer, window in enumerate(windows) if window is None] == [5, 11, 17]
    assert set(windows) == {None, 512}


@pytest.mark.parametrize("name", sorted(known_models()))
def test_every_known_model_has_pages_and_work(name: str) -> None:
    model = read_model(name)
    assert sum(spec.page_nbytes for spec in model.specs(64)) > 0
    assert isinstance(model.prefill, Prefill)
    assert read_model(name.rpartition("/")[2].upper()) == model


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("Llama-3.1-8B", 131072),
        ("Llama-3.1-70B", 327680),
        ("Qwen3-8B", 147456),
        ("SmolLM2-135M", 23040),
        ("DeepSeek-V3", 70272),
    ],
)
def test_bytes_per_token(name: str, nbytes: int) -> None:
    (spec,) = read_model(name).specs(1)
    assert spec.page_nbytes == nbytes


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("Llama-3.1-8B", 8.03e9 - 128256 * 4096),
        ("Qwen2.5-7B", 7.62e9 - 152064 * 3584),
        ("Mixtral-8x7B-v0.1", 12.9e9 - 32000 * 4096),
        ("Qwen3-30B-A3B", 3.35e9 - 151936 * 2048),
        ("DeepSeek-V3", 36.6e9),
    ],
)
def test_active_weights_per_token_match_the_published_number(name: str, active: float) -> None:
    found = read_model(name).prefill
    assert isinstance(found, Prefill)
    assert found.weights + found.head == pytest.approx(active, rel=0.01)


def test_work_of_a_dense_model_equals_a_calculation_by_hand() -> None:
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64
    assert work(GQA).weights == 2 * layer
    full = 5 * 6 // 2
    assert work(GQA).operations(5) == 2 * (2 * layer * 5 + 32 * 100 + 2 * full * 2 * 4 * 8)
    window = 1 + 2 + 3 + 3 + 3
    assert work(GQA | WINDOWS).operations(5) == 2 * (2 * layer * 5 + 32 * 100 + (full + window) * 2 * 4 * 8)


def test_work_of_latent_attention_equals_a_calculation_by_hand() -> None:
    query, latent = 32 * 16 + 16 * 4 * 12, 32 * 16 + 12 * 4 * 16
    assert work(MLA).weights == 2 * (query + latent + 4 * 8 * 32 + 3 * 32 * 64)
    assert work(MLA).score == 4 * (12 + 8)


@pytest.mark.parametrize(
    ("fields", "feed_forward"),
    [
        ({"num_local_experts": 4, "num_experts_per_tok": 2}, 2 * (3 * 32 * 2 * 64 + 32 * 4)),
        (
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [0]},
            3 * 32 * 64 + 3 * 32 * 2 * 8 + 32 * 4,
        ),
        (
            {
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 8,
                "n_shared_experts": 1,
                "first_k_dense_replace": 1,
            },
            3 * 32 * 64 + 3 * 32 * 3 * 8 + 32 * 4,
        ),
        (
            {
                "num_experts": 4,
                "num_experts_per_tok": 1,
                "moe_intermediate_size": 8,
                "shared_expert_intermediate_size": 16,
                "decoder_sparse_step": 2,
            },
            3 * 32 * 64 + 3 * 32 * (8 + 16) + 32 * 4,
        ),
    ],
)
def test_only_the_chosen_experts_count(fields: dict[str, Any], feed_forward: int) -> None:
    attention = 2 * (2 * 32 * 32 + 2 * 32 * 16)
    assert work(GQA | fields).weights == attention + feed_forward


def test_with_a_sparse_step_of_two_every_second_layer_has_experts() -> None:
    fields = GQA | {
        "num_hidden_layers": 3,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 2,
    }
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
    assert work(fields).weights == 3 * layer + 32 * 4


def test_unknown_name_is_refused_naming_the_nearest_and_all_known() -> None:
    with pytest.raises(ConfigError, match=r"did you mean Llama-3.1-8B.*\? known names: .*DeepSeek-V3"):
        read_model("llama-3.1-8")
    with pytest.raises(ConfigError, match=r"a known name; known names: "):
        read_model("/nowhere/to/be/found")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1, got 0"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads must be an integer of at least 1, got '2'"),
        ({"num_attention_heads": None, "num_key_value_heads": None}, "num_attention_heads is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 30}, "30 is not a multiple of num_attention_heads 4"),
        ({"kv_lora_rank": 12}, "qk_rope_head_dim is missing"),
        ({"layer_types": ["full_attention"]}, "must be a list of 2"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "sliding_attention, got linear_attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window is missing"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers is 1, so the model has layers that share"),
        ({"v_head_dim": 4, "head_dim": 8}, "v_head_dim must equal head_dim or be missing, got 4"),
    ],
)
def test_unsupported_config_is_refused_by_field(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: ") as refused:
        read(GQA | change)
    assert told in str(refused.value)


@pytest.mark.parametrize("text", ["[1]", "{", "\xff"])
def test_a_file_that_holds_no_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(
        ConfigError, match=r"model's config\.json (is not valid JSON|must contain a JSON object)"
    ):
        read_model(str(tmp_path))


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the model's config.json"):
        read_model(str(tmp_path))


def test_a_dtype_that_pages_cannot_have_is_refused() -> None:
    model = read({**GQA, "torch_dtype": "auto"})
    with pytest.raises(ConfigError, match="names no dtype; --dtype must be one of bfloat16"):
        model.specs(4)
    with pytest.raises(ConfigError, match="cannot have pages of dtype 'float3'"):
        model.specs(4, "float3")
    assert model.specs(4, "int8")[0].dtype == "int8"
