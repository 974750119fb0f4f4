"""Tests of ``plan`` for documents that do not fit into HBM: what is streamed, how fast, and what prevents it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.support.models import GQA, MLA, WINDOWS, read
from tierstore.cli.app import app
from tierstore.codecs.host_format import HostFormat
from tierstore.config import load_config
from tierstore.gpu.attention.page_stream import RING_NBYTES, PageStream
from tierstore.gpu.attention.streamed import StreamedDecode
from tierstore.host.arena import HostArena
from tierstore.page import PageLayout
from tierstore.plan.forecast import Decode, Plan, Rates, forecast, page_layout
from tierstore.plan.geometry import Geometry, read_model
from tierstore.plan.measure import Rate

PAGE = 512
"""Size of a page of 4 tokens of ``GQA`` in bytes."""


def planned(
    model: Geometry,
    tokens: int,
    questions: int,
    sections: dict[str, dict[str, Any]],
    gbps: float = 1.0,
    page_size: int = 4,
) -> Plan:
    rates = Rates(copy=Rate(gbps * 1e9, ""), read=None, prefill=Rate(None, ""), per_token=False)
    config, layout = page_layout(load_config(sections), model, page_size, None)
    return forecast(config, model, layout, rates, [tokens], questions)


def decode(
    fields: dict[str, Any],
    tokens: int,
    questions: int = 1,
    *,
    hbm: int = 10,
    host: int = 100,
    page: int = PAGE,
    device: str = "cpu",
    **more: Any,
) -> tuple[Decode, tuple[str, ...]]:
    """Plan for a document, with HBM for ``hbm`` pages and host memory for ``host`` pages of ``page`` bytes."""
    sections = {
        "hbm": {"capacity": hbm * page, "device": device},
        "host": {"capacity": host * page, **more},
    }
    plan = planned(read(fields), tokens, questions, sections)
    found = plan.documents[0].decode
    assert found is not None
    return found, plan.warnings


@pytest.mark.parametrize(
    ("tokens", "hbm_tokens", "questions", "ring_mib", "link_gbps", "measured_ms", "within"),
    [
        # docs/benchmarks/attention.md. The part ``questions`` used the same slabs as the first row, whose link this is.
        (262_144, 32_768, 1, 512, 54.07, 559.8, 0.02),
        (600_000, 32_768, 1, 256, 54.8, 1359.0, 0.01),
        (131_072, 16_384, 1, 256, 54.6, 281.7, 0.01),
        (131_072, 16_384, 32, 256, 54.6, 297.6, 0.05),
    ],
)
def test_the_time_of_a_step_is_close_to_measurements_on_a_gpu(
    tokens: int,
    hbm_tokens: int,
    questions: int,
    ring_mib: int,
    link_gbps: float,
    measured_ms: float,
    within: float,
) -> None:
    model = read_model("llama-3.1-8b")
    capacity = hbm_tokens * (128 << 10) - (
        ring_mib << 20
    )  # in the measurements, the ring takes HBM from pages
    config: dict[str, Any] = {"hbm": {"capacity": capacity, "device": "cpu"}, "host": {"capacity": "100GiB"}}
    plan = planned(model, tokens, questions, config, link_gbps, page_size=64)
    found = plan.documents[0].decode
    assert found is not None
    assert found.limits == ()
    assert found.ring_nbytes == RING_NBYTES
    assert found.step_s is not None
    assert found.step_s * 1e3 == pytest.approx(measured_ms, rel=within)
    assert found.tokens_per_s == questions / found.step_s


def test_a_document_that_fits_with_a_page_for_each_question_is_not_streamed() -> None:
    assert decode(GQA, 39, 1)[0] == Decode(0, 0, 0, 0.0, None, ())
    assert decode(GQA, 20, 5)[0].streamed_pages == 0
    assert decode(GQA, 20, 6)[0].streamed_pages == 1
    found, warnings = decode(GQA, 40, 1)
    assert (found.streamed_pages, found.streamed_nbytes) == (1, PAGE)
    [warning] = warnings
    assert warning == (
        "decoding 1 question on a document of 40 tokens needs 4 tokens from host memory in every step: "
        "use tierstore.gpu.attention.streamed"
    )


def test_questions_divide_the_time_of_the_copies() -> None:
    one, four = decode(GQA, 160, 1)[0], decode(GQA, 160, 4)[0]
    assert (one.streamed_pages, four.streamed_pages) == (31, 34)
    assert one.step_s == pytest.approx(31 * PAGE / 1e9)
    assert four.tokens_per_s == pytest.approx(4 * 1e9 / (34 * PAGE))


def test_encoded_pages_are_streamed_in_their_encoded_size() -> None:
    fields = GQA | {"hidden_size": 512}  # heads of 128 elements, so that scales are small
    plain, coded = (decode(fields, 160, page=16 * PAGE, codec=codec)[0] for codec in ("none", "int8"))
    assert plain.streamed_pages == coded.streamed_pages == 31
    held = HostFormat.of("int8", PageLayout.of(read(fields).specs(4)))
    assert coded.streamed_nbytes == 31 * held.payload_nbytes
    assert 0.5 < coded.streamed_nbytes / plain.streamed_nbytes < 0.54
    assert coded.ring_nbytes == plain.ring_nbytes


def test_unknown_hbm_or_copy_rate_leaves_the_step_unknown() -> None:
    model = read(GQA)
    host: dict[str, Any] = {"capacity": "1MiB"}
    assert planned(model, 1000, 1, {"host": host}).documents[0].decode is None
    owned: dict[str, Any] = {"device": "cpu", "owner": "engine"}
    assert planned(model, 1000, 1, {"hbm": owned, "host": host}).documents[0].decode is None
    config, layout = page_layout(
        load_config({"hbm": {"capacity": PAGE, "device": "cpu"}, "host": host}), model, 4, None
    )
    unknown = Rate(None, "not measured")
    rates = Rates(copy=unknown, read=None, prefill=unknown, per_token=False)
    found = forecast(config, model, layout, rates, [1000]).documents[0].decode
    assert found is not None
    assert (found.streamed_pages, found.step_s, found.tokens_per_s) == (250, None, None)


def test_limits_say_what_to_enlarge() -> None:
    for found, limit in (
        (
            decode(GQA, 160, host=30),
            "host.capacity must be at least 15.5 KiB (15,872 bytes) to hold the streamed pages, got 15 KiB",
        ),
        (
            decode(GQA, 160, 11),
            "hbm.capacity must be at least 5.5 KiB (5,632 bytes), so that each question has a page of its own, got ",
        ),
        (
            decode(GQA, 160, device="cuda:0", pin="never"),
            "host.pin must be auto or always, because a GPU can",
        ),
        (
            decode(GQA | WINDOWS | {"hidden_size": 512}, 160, page=16 * PAGE, codec="int8"),
            "encoded pages with several KV groups cannot be streamed, got 2 groups: use host.codec none",
        ),
    ):
        assert found[0].step_s is None
        assert len(found[0].limits) == 1
        assert found[0].limits[0].startswith(limit)
        assert f"can be decoded neither from HBM nor with streamed pages: {limit}" in found[1][-1]
    plan = planned(read(GQA), 160, 1, {"hbm": {"capacity": 10 * PAGE, "device": "cpu"}})
    assert plan.documents[0].decode is not None
    assert plan.documents[0].decode.limits == (
        "the configuration has no host section; add one with a capacity of at least 15.5 KiB (15,872 bytes)",
    )


def test_the_named_capacity_is_enough() -> None:
    assert decode(GQA, 160, host=31)[0].limits == ()
    assert decode(GQA, 160, 10, host=40)[0].limits == ()


@pytest.mark.parametrize("fields", [GQA, MLA, GQA | WINDOWS], ids=["one group", "latents", "two groups"])
def test_the_plan_streams_what_streamed_attention_streams(fields: dict[str, Any]) -> None:
    model, pages, hbm = read(fields), 25, 6
    specs = model.specs(4)
    layout = PageLayout.of(specs)
    found, _ = decode(fields, 4 * pages + 3, hbm=hbm, page=layout.page_nbytes)
    with_window = [window for window in model.windows if window is not None]
    arena = HostArena(layout, 20)
    rings = nbytes = 0
    for group, spec in enumerate(specs):
        stream = PageStream.open(arena, "cpu", group=group)
        way = StreamedDecode(stream)
        in_host = np.arange(pages + 1) < pages + 1 - hbm
        slots = np.where(in_host, np.arange(pages + 1), np.arange(pages + 1) - (pages + 1 - hbm))
        way.plan(
            [0, pages + 1], slots, [4], spec.num_kv_heads, spec.num_kv_heads, spec.head_dim, 4, in_host=in_host,
            q_data_type=torch.float16, head_dim_vo=spec.head_dim if spec.kind == "mha" else 12,
            window_left=with_window[0] - 1 if group else -1,
        )  # fmt: skip
        rings += stream.nbytes if way.streamed_pages else 0
        nbytes += way.streamed_pages * spec.page_nbytes
        if group == 0:
            assert found.streamed_pages == way.streamed_pages
        stream.close()
    arena.close()
    assert (found.ring_nbytes, found.streamed_nbytes) == (rings, nbytes)


def test_a_window_larger_than_hbm_streams_only_the_pages_in_it() -> None:
    fields = GQA | WINDOWS | {"sliding_window": 80}
    found, _ = decode(fields, 160, page=PAGE)
    # 31 pages of the layer with full attention, and 20 - 9 pages of the other layer. Each layer has half of a page.
    assert (found.streamed_pages, found.streamed_nbytes) == (31, (31 + 11) * PAGE // 2)


def test_the_command_shows_streamed_documents_only_if_there_are_any(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GQA), encoding="utf-8")
    (tmp_path / "store.yaml").write_text(
        f"hbm: {{capacity: {10 * PAGE}B, device: cpu}}\nhost: {{capacity: {100 * PAGE}B}}", encoding="utf-8"
    )

    def run(*more: str) -> tuple[str, Any]:
        words = [
            "--config",
            str(tmp_path / "store.yaml"),
            "--model",
            str(tmp_path),
            "--page-size",
            "4",
            "--json",
        ]
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["plan", *words, *more])
        assert result.exit_code == 0, result.output
        return result.stdout, json.loads(result.stdout.splitlines()[-1])

    told, plan = run("--tokens", "32")
    assert "time per step" not in told
    assert plan["questions"] == 1
    assert plan["documents"][0]["decode"]["streamed_pages"] == 0
    told, plan = run("--tokens", "32", "--tokens", "160", "--questions", "4")
    row = next(line for line in told.splitlines() if line.split()[:3] == ["160", "tokens", "4"])
    assert row.split()[3:8] == ["136", "17", "KiB", "256", "MiB"]
    assert "times per step are predicted from the copy rate, a lower bound" in told
    assert "decoding 4 questions on a document of 160 tokens needs 136 tokens from host memory" in told
    assert plan["questions"] == 4
    short, long = (document["decode"] for document in plan["documents"])
    assert (short["streamed_pages"], short["tokens_per_s"]) == (2, 4 / short["step_s"])
    assert long["streamed_nbytes"] == 34 * PAGE
    assert long["step_s"] == long["streamed_nbytes"] / plan["rates"]["host_to_hbm_bytes_per_s"]["per_s"]
