"""Test that ``serve`` and ``demo`` reject folders whose model cannot be loaded or served, with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from tests.adapters.tiny import tiny_llama
from tests.support.folders import save_with_byte_tokenizer
from tierstore.demo.answers import Session
from tierstore.errors import ConfigError
from tierstore.serve.model import Reader

Load = Callable[[Path], object]


def by_serve(folder: Path) -> object:
    return Reader.load(folder, "cpu")


def by_demo(folder: Path) -> object:
    return Session(folder)


def a_llama(folder: Path, **more: object) -> None:
    save_with_byte_tokenizer(tiny_llama(vocabulary=256), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | more))


def whose_package_is_missing(folder: Path) -> str:
    if find_spec("compressed_tensors") is not None:
        pytest.skip("compressed-tensors is installed here")
    a_llama(folder, quantization_config={"quant_method": "compressed-tensors"})
    return "compressed-tensors.*required"


def with_weights_of_other_sizes(folder: Path) -> str:
    a_llama(folder, hidden_size=64)
    return "ignore_mismatched_sizes"


def whose_configuration_contradicts_itself(folder: Path) -> str:
    a_llama(folder, num_attention_heads=5)
    return "not a multiple of the number of attention heads"


def cut_short(folder: Path) -> str:
    a_llama(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return "deserializing header"


def with_a_soft_cap(folder: Path) -> str:
    config = Gemma2Config(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    model: PreTrainedModel = Gemma2ForCausalLM(config)
    save_with_byte_tokenizer(model, folder)
    return "soft cap on attention logits of 50.0"


@pytest.mark.parametrize("load", [by_serve, by_demo])
@pytest.mark.parametrize(
    "make",
    [
        whose_package_is_missing,
        with_weights_of_other_sizes,
        whose_configuration_contradicts_itself,
        cut_short,
        with_a_soft_cap,
    ],
)
def test_a_folder_that_cannot_be_served_is_refused_by_name_when_it_is_loaded(
    load: Load, make: Callable[[Path], str], tmp_path: Path
) -> None:
    why = make(tmp_path)
    with pytest.raises(ConfigError, match=f"--model {tmp_path}: .*{why}"):
        load(tmp_path)
