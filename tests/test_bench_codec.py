"""Test ``bench codec`` at tiny sizes: its figures, its JSON line, and the pages that it measures."""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from tests.adapters.tiny import tiny_llama
from tierstore.bench import codec, fidelity
from tierstore.bench.codec import codec_rows
from tierstore.bench.measurement import Row
from tierstore.bench.model import Reader
from tierstore.cli.app import app
from tierstore.codecs import LOSSY
from tierstore.page import PageSpec


def tiny_model(folder: Path) -> Path:
    """Save a tiny Llama with a tokenizer that has one token per byte, and return the folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    tiny_llama(vocabulary=256).save_pretrained(folder)
    return folder


def report_of(*arguments: str) -> dict[str, Any]:
    """Run the command and return the JSON report in its last line."""
    result = CliRunner().invoke(app, ["bench", "codec", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return report


def test_bench_codec_prints_every_figure_and_its_input() -> None:
    report = report_of("--synthetic", "--tokens", "64", "--page-size", "32", "--seconds", "0")
    assert set(report) == {"device", "source", "texts", "load_average", "floor", "rows", "exp", "lossy"}
    assert report["source"].startswith("synthetic bfloat16")
    assert len(report["load_average"]) == 2
    assert report["floor"] is None
    rows = {row["codec"]: row for row in report["rows"]}
    assert tuple(rows) == fidelity.NAMES
    assert rows["int4"]["ratio"] == 3.2
    assert rows["none"]["rel_error"] == rows["exp"]["rel_error"] == 0
    assert all(row["encode_mbps"] > 0 and row["decode_mbps"] > 0 for row in report["rows"])
    assert all(row["kl"] is None and row["top1"] is None for row in report["rows"])
    found = {row["what"]: row["value"] for row in report["exp"]}
    assert found["entropy limit"] > found["exp: raw bytes / stored bytes"] > 1.3
    for what in ("encode, per second of CPU time", "decode, per second of CPU time"):
        assert found[what] > 0
    for what in (
        "encode, two threads / one thread",
        "decode, two threads / one thread",
        "zstandard level 1 on the unencoded page",
    ):
        assert found[what] > 0
    assert [row["what"] for row in report["lossy"]] == [
        f"{name}: {what}, two threads / one thread" for name in LOSSY for what in ("encode", "decode")
    ]
    assert all(row["value"] > 0 for row in report["lossy"])


def test_bench_codec_continues_generation_from_decoded_pages(tmp_path: Path) -> None:
    folder, docs = tiny_model(tmp_path / "model"), tmp_path / "docs"
    docs.mkdir()
    for number in range(3):
        (docs / f"{number}.txt").write_text(f"a licence of {number} words, " * 40)
    sizes = ["--prefix", "160", "--following", "24", "--page-size", "32", "--tokens", "160", "--seconds", "0"]
    report = report_of("--model", str(folder), "--docs", str(docs), *sizes)
    assert len(report["texts"]) == 3
    assert report["source"] == "model, 0.txt, 160 tokens"
    rows = {row["codec"]: row for row in report["rows"]}
    for name in ("none", "exp"):
        assert (rows[name]["kl"], rows[name]["top1"]) == (0, 1)
    assert 0 < rows["int8"]["kl"] < rows["int4"]["kl"]
    assert rows["int8"]["kl"] == rows["int8+zstd"]["kl"]
    assert 0 < rows["int8"]["rel_error"] < rows["int4"]["rel_error"] < 1
    assert report["floor"]["kl"] >= 0
    assert all(row["kl_error"] >= 0 for row in rows.values())
    assert rows["int4"]["kl_error"] > 0
    report = report_of("--model", str(folder), "--docs", str(docs), *sizes, "--texts", "2")
    assert len(report["texts"]) == 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            ["--model", "no-such-folder"],
            "no-such-folder: no such folder, and not a known model; use smollm2",
        ),
        (["--synthetic", "--tokens", "16", "--page-size", "16", "--plot", "a.png"], "--plot needs"),
    ],
)
def test_bench_codec_refuses_invalid_options_in_one_line(arguments: list[str], reason: str) -> None:
    result = CliRunner().invoke(app, ["bench", "codec", *arguments, "--seconds", "0"])
    assert result.exit_code == 2
    assert reason in result.stderr


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    reader = Reader(tiny_model(tmp_path / "model"))
    with pytest.raises(ValueError, match="11 tokens, but at least 20 are needed"):
        list(fidelity.read(reader, ["a short one"], 16, 4, 16))
    with pytest.raises(ValueError, match=r"at least one page \(16 tokens\), got 4 tokens"):
        list(fidelity.read(reader, ["a short one"], 4, 4, 16))


def test_codec_row_measures_a_known_error() -> None:
    """Encode values that fp8 represents exactly, except 17 in K, which becomes 16. So the error is known."""
    spec = PageSpec(num_layers=1, page_size=2, num_kv_heads=1, head_dim=2, dtype="bfloat16", model="codec")
    numbers = np.array([256, 17, 256, 9, 1, 2, 3, 4], dtype=np.float32)
    page = (numbers.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    row = fidelity.codec_row("fp8+zstd", spec, [[page]])
    assert row.ratio == 1
    assert row.rel_error == 0  # stored raw, because encoding saves nothing in pages this small
    big = np.tile(page.view("<u2").reshape(1, 2, 2, 2), (1, 1, 100, 1)).reshape(-1).view(np.uint8)
    spec = PageSpec(num_layers=1, page_size=200, num_kv_heads=1, head_dim=2, dtype="bfloat16", model="codec")
    row = fidelity.codec_row("fp8", spec, [[big]])
    assert row.ratio == 1600 / 804
    assert row.rel_error_v == 0
    assert row.rel_error_k == pytest.approx((1 / (2 * 256**2 + 17**2 + 9**2)) ** 0.5)
    assert row.rel_error == pytest.approx((1 / (2 * 256**2 + 17**2 + 9**2 + 30)) ** 0.5)


def test_the_error_of_a_mean_shrinks_with_the_root_of_their_number() -> None:
    assert fidelity.standard_error([7.0]) == 0
    assert fidelity.standard_error([1.0, 3.0]) == 1
    assert fidelity.standard_error([1.0, 3.0] * 2) == pytest.approx((4 / 3 / 4) ** 0.5)


def test_codec_goals_cover_ratio_and_divergence() -> None:
    row = fidelity.CodecRow("int8+zstd", 2.1, 1, 1, 0, 0, 0, 1.2e-3, 0, 1)
    assert row.meets(1e-3)
    assert not row.meets(0.9e-3)
    assert not replace(row, ratio=2.09).meets(1e-3)
    assert replace(row, codec="int4", ratio=3.2, kl=1e-2).meets(1e-9)
    assert not replace(row, codec="int4", ratio=3.2, kl=1.01e-2).meets(1.0)
    assert replace(row, codec="int8", ratio=0.1, kl=9.0).meets(1e-3)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from tierstore.bench.fidelity import draw

    rows = [fidelity.CodecRow("int8", 2.1, 1, 1, 0, 0, 0, kl, kl, 1) for kl in (0.0, 1e-3, None)]
    draw(rows, 1e-3, "a model", tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().count("<!-- int8 -->") == 2


def test_pages_of_a_model_are_its_own_keys_and_values(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    sample = codec.sample(Reader(folder), "text", "a licence " * 20, 100, 32)
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


def test_pages_not_worth_encoding_count_as_raw() -> None:
    sample = codec.synthetic(32, 16)
    noise = np.random.default_rng(0).integers(0, 256, sample.spec.page_nbytes, dtype=np.uint8)
    rows = {row.what: row for row in codec_rows(codec.Sample(sample.spec, [noise], "noise"), 0.0)}
    ratio = rows["exp: raw bytes / stored bytes"]
    assert ratio.value == 1.0
    assert not ratio.ok


def test_goal_may_be_a_minimum() -> None:
    assert Row("anything", 1.0, "x", at_least=1.0).ok
    assert not Row("anything", 0.9, "x", at_least=1.0).ok
    assert Row("anything", 0.9, "x", at_least=1.0).plain()["goal"] == 1.0
