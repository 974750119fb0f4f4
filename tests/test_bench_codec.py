"""The codec's benchmark at tiny sizes: every figure is there, the last line is JSON, and the pages are what is said."""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from tests.adapters.tiny import tiny_llama
from tierstore.bench import kv
from tierstore.bench.codec import codec_rows
from tierstore.bench.rows import Row
from tierstore.cli.app import app


def tiny_model(folder: Path) -> Path:
    """A tiny Llama and a tokenizer of one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    tiny_llama(vocabulary=256).save_pretrained(folder)
    return folder


def test_bench_codec_tells_every_figure_and_what_it_was_taken_on() -> None:
    arguments = ["bench", "codec", "--synthetic", "--tokens", "32", "--page-size", "16", "--seconds", "0"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert set(report) == {"device", "source", "load_average", "rows"}
    assert report["source"].startswith("synthetic bfloat16")
    assert len(report["load_average"]) == 2
    found = {row["what"]: row["value"] for row in report["rows"]}
    assert found["entropy limit"] > found["exp: raw bytes by stored bytes"] > 1.3
    for what in ("encode, a core's own time", "decode, a core's own time"):
        assert found[what] > 0
    for what in ("encode, two threads by one", "decode, two threads by one", "zstandard 1 on the raw page"):
        assert found[what] > 0


def test_pages_of_a_model_are_its_own_keys_and_values(tmp_path: Path) -> None:
    folder, text = tiny_model(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text("a licence " * 20)
    sample = kv.of_model(folder, text, 100, 32)
    assert sample.spec.shape == (3, 2, 32, 2, 8)
    assert len(sample.pages) == 3
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = PreTrainedTokenizerFast.from_pretrained(folder)("a licence " * 20, return_tensors="pt").input_ids
    with torch.inference_mode():
        layers = model(ids[:, :100], use_cache=True).past_key_values.layers
    for layer in range(3):
        for plane, tensor in enumerate((layers[layer].keys, layers[layer].values)):
            wanted = tensor[0, :, 32:64].transpose(0, 1).contiguous().view(torch.int16).numpy()
            got = sample.pages[1].view(np.int16).reshape(sample.spec.shape)[layer, plane]
            np.testing.assert_array_equal(got, wanted)


def test_pages_that_are_not_worth_encoding_are_counted_as_they_are() -> None:
    sample = kv.synthetic(32, 16)
    noise = np.random.default_rng(0).integers(0, 256, sample.spec.page_nbytes, dtype=np.uint8)
    rows = {row.what: row for row in codec_rows(kv.Sample(sample.spec, [noise], "noise"), 0.0)}
    ratio = rows["exp: raw bytes by stored bytes"]
    assert ratio.value == 1.0
    assert not ratio.ok


def test_a_goal_may_be_the_least() -> None:
    assert Row("anything", 1.0, "x", at_least=1.0).ok
    assert not Row("anything", 0.9, "x", at_least=1.0).ok
    assert Row("anything", 0.9, "x", at_least=1.0).plain()["goal"] == 1.0
