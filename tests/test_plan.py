"""Tests of ``plan``: its arithmetic, the rates that it measures, and its output. No test checks a duration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.support import lanes
from tests.support.models import GQA, MLA, WINDOWS, read, work
from tests.support.pages import PATIENCE_S, chain, tier_stats, tiers
from tierstore.cli.app import app
from tierstore.config import StoreConfig, load_config
from tierstore.errors import ConfigError
from tierstore.plan.forecast import Plan, Rates, forecast, page_layout, restore_seconds
from tierstore.plan.measure import Rate, copy_rate, matmul_rate, read_rate
from tierstore.store import TierStore
from tierstore.types import Tier

KNOWN = Rates(copy=Rate(1e10, ""), read=Rate(1e9, ""), prefill=Rate(1e12, ""), per_token=False)


def planned(
    config: StoreConfig, fields: dict[str, Any], *lengths: int, rates: Rates = KNOWN, page_size: int = 4
) -> Plan:
    model = read(fields)
    config, layout = page_layout(config, model, page_size, None)
    return forecast(config, model, layout, rates, lengths or (64,))


def test_missing_sizes_leave_work_unknown_with_a_reason_but_pages_planned() -> None:
    found = planned(tiers(64, 64), {**GQA, "intermediate_size": None}).documents[0]
    assert found.recompute_s is None
    assert read({**GQA, "intermediate_size": None}).prefill == "config.json has no intermediate_size"
    assert read({**GQA, "num_experts": "8"}).prefill == "config.json: cannot interpret num_experts '8'"
    assert found.tiers[1].seconds is not None
    assert found.tiers[1].sooner is None


def test_plan_equals_a_calculation_by_hand() -> None:
    page = 2 * 2 * 4 * 2 * 8 * 2
    config = load_config(
        {"hbm": {"capacity": 20 * page + 5, "device": "cpu"}, "host": {"capacity": 70 * page}}
    )
    plan = planned(config, GQA, 33, 33, 400).plain()
    assert (plan["page_nbytes"], plan["bytes_per_token"], plan["page_padding_nbytes"]) == (
        page,
        128,
        4096 - page,
    )
    assert [tier["pages"] for tier in plan["tiers"]] == [20, 70]
    assert [tier["tokens"] for tier in plan["tiers"]] == [80, 280]
    short, long = plan["documents"]
    assert (short["pages"], short["nbytes"]) == (8, 8 * page)
    assert [tier["documents"] for tier in short["tiers"]] == [2, 8]
    assert short["recompute_s"] == work(GQA).operations(33) / 1e12
    assert [tier["seconds"] for tier in short["tiers"]] == [0.0, pytest.approx(8 * page / 1e10)]
    assert short["tiers"][1]["sooner"] == pytest.approx(short["recompute_s"] / (8 * page / 1e10))
    assert [tier["documents"] for tier in long["tiers"]] == [0, 0]
    assert [tier["seconds"] for tier in long["tiers"]] == [None, None]
    assert plan["warnings"] == [
        "a document of 400 tokens needs 100 pages (50 KiB), but HBM holds 20 (10 KiB)",
        "a document of 400 tokens needs 100 pages (50 KiB), but HOST holds 70 (35 KiB)",
        (
            "1 question on a document of 400 tokens can be decoded neither from HBM nor with streamed pages: "
            "host.capacity must be at least 40.5 KiB (41,472 bytes) to hold the streamed pages, got 35 KiB "
            "(35,840 bytes)"
        ),
    ]
    assert plan["refused"] == []


def test_restore_from_disk_counts_every_existing_hop() -> None:
    def seconds(tier: Tier, *, through_host: bool) -> float:
        found = restore_seconds(tier, 100, 10**6, KNOWN, through_host=through_host)
        assert found is not None
        return found

    assert seconds(Tier.HBM, through_host=True) == 0.0
    assert seconds(Tier.HOST, through_host=True) == pytest.approx(10e-3)
    assert seconds(Tier.NVME, through_host=True) == pytest.approx(110e-3)
    assert seconds(Tier.NVME, through_host=False) == pytest.approx(100e-3)


def test_unmeasured_times_are_not_predicted() -> None:
    nothing = Rate(None, "not measured")
    blind = Rates(copy=nothing, read=nothing, prefill=nothing, per_token=False)
    for tier in (Tier.HOST, Tier.NVME):
        assert restore_seconds(tier, 3, 10, blind, through_host=True) is None
    document = planned(tiers(64, 64), GQA, 16, rates=blind).documents[0]
    assert document.recompute_s is None
    assert [(found.seconds, found.sooner) for found in document.tiers] == [(0.0, None), (None, None)]


def test_given_prefill_rate_is_used() -> None:
    given = Rates(copy=KNOWN.copy, read=None, prefill=Rate(50.0, "given"), per_token=True)
    assert planned(tiers(64, 64), GQA, 100, rates=given).documents[0].recompute_s == 2.0


def test_plan_warns_of_configurations_with_little_benefit(tmp_path: Path) -> None:
    slow = Rates(copy=Rate(1.0, ""), read=Rate(1.0, ""), prefill=Rate(1e12, ""), per_token=False)
    config = tiers(300, 300, tmp_path, nvme_pages=20)
    told = " / ".join(planned(config, GQA | WINDOWS, 3, 8, rates=slow).warnings)
    assert "1 of 2 layers attend only to the last 3 tokens" in told
    assert "the tiers above it hold 600, so it cannot save all of them" in told
    assert "a document of 3 tokens is shorter than a page (4): nothing is stored" in told
    assert "recomputing a document of 8 tokens is faster than restoring it from NVME" in told


def test_plan_refuses_what_open_refuses_with_the_same_message(tmp_path: Path) -> None:
    config = load_config(
        {
            "hbm": {"capacity": 500, "device": "cpu"},
            "host": {"capacity": "1PiB"},
            "nvme": {"path": tmp_path / "store", "capacity": "64KiB"},
        }
    )
    hbm, memory, nvme = planned(config, GQA).sizes.refused
    assert hbm == "hbm.capacity must hold at least one page of 512 bytes, got 500 bytes"
    assert memory.startswith("host.capacity needs 8 PiB (9,007,199,254,740,992 bytes) of memory, but only ")
    assert nvme.startswith("nvme.capacity must be at least ")
    assert nvme.endswith(", got 64 KiB (65,536 bytes)")
    spec = page_layout(config, read(GQA), 4, None)[1].specs
    with pytest.raises(ConfigError) as refused:
        TierStore.open(config, spec)
    assert str(refused.value) == hbm


def test_plan_refuses_more_disk_than_available(tmp_path: Path) -> None:
    config = load_config(
        {"host": {"capacity": "1MiB"}, "nvme": {"path": tmp_path / "x", "capacity": "4000PiB"}}
    )
    (refused,) = planned(config, GQA).sizes.refused
    assert f"the free space at {tmp_path} (space that" in refused


def test_an_engine_that_brings_its_memory_leaves_hbm_open() -> None:
    config = load_config({"hbm": {"device": "cpu", "owner": "engine"}, "host": {"capacity": "64KiB"}})
    plan = planned(config, GQA, 8)
    hbm, host = plan.documents[0].tiers
    assert (plan.sizes.refused, plan.sizes.tiers[0].pages, hbm.documents) == ((), None, None)
    assert host.documents == 64
    assert host.seconds is not None


@pytest.mark.parametrize("fields", [GQA, GQA | WINDOWS, MLA], ids=["one group", "two groups", "latents"])
def test_the_plan_holds_as_many_pages_as_the_opened_store(tmp_path: Path, fields: dict[str, Any]) -> None:
    config = tiers(5, 9, tmp_path / "store", nvme_pages=20)
    plan = planned(config, fields)
    pages = {size.tier: size.pages for size in plan.sizes.tiers}
    with TierStore.open(config, plan.layout.specs) as store:
        stats = store.stats()
        assert (stats["page_nbytes"], stats["slot_nbytes"]) == (
            plan.layout.page_nbytes,
            plan.layout.slot_nbytes,
        )
        assert tier_stats(store, Tier.HBM)["num_slots"] == pages[Tier.HBM]
        assert tier_stats(store, Tier.HOST)["num_slots"] == pages[Tier.HOST]
        for number in range(2 * (pages[Tier.NVME] or 0)):
            store.put(chain(1, str(number)), store.allocate(1, PATIENCE_S))
        store.flush()
        assert tier_stats(store, Tier.NVME)["resident"] == pages[Tier.NVME]


@pytest.mark.parametrize("payload", lanes.some(["lmdb", "extents"], "extents".__eq__))
def test_a_plan_counts_what_a_codec_of_fixed_length_saves(tmp_path: Path, payload: str) -> None:
    pages = {}
    for codec in ("none", "int8"):
        more = {"codec": codec, "payload": payload}
        config = tiers(5, 9, tmp_path / codec, nvme_pages=60, page_nbytes=128 << 10, nvme_more=more)
        plan = planned(config, GQA | {"hidden_size": 8192})
        pages[codec] = {size.tier: size.pages for size in plan.sizes.tiers}[Tier.NVME] or 0
        with TierStore.open(config, plan.layout.specs) as store:
            for number in range(2 * pages[codec]):
                store.put(chain(1, str(number)), store.allocate(1, PATIENCE_S))
            store.flush()
            # For each page in flight, the tier reserves the size of a raw page.
            assert 0.95 * pages[codec] - 1 <= tier_stats(store, Tier.NVME)["resident"] <= pages[codec]
    assert pages["int8"] > 1.1 * pages["none"]


def test_rates_of_this_machine_are_measured_without_leftovers(tmp_path: Path) -> None:
    for rate in (
        copy_rate(5000, "cpu"),
        read_rate(5000, tmp_path),
        matmul_rate(16, 32, "float32", "cpu"),
        matmul_rate(16, 32, "bfloat16", "cpu"),
    ):
        assert rate.per_s is not None
        assert rate.per_s > 0
        assert rate.how.startswith("measured")
    assert list(tmp_path.iterdir()) == []


def test_unmeasurable_rate_reports_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    file = tmp_path / "file"
    file.touch()
    for rate, why in (
        (copy_rate(5000, "cuda:0"), "finds 0 CUDA devices"),
        (matmul_rate(16, 32, "float32", "cuda"), "finds 0 CUDA devices"),
        (read_rate(5000, file), "cannot create a temporary file in"),
    ):
        assert rate.per_s is None
        assert why in rate.how
        assert rate.seconds(1) is None


class Clock:
    """A clock that only matrix products advance, by ``s_per_token`` seconds per row of the left matrix."""

    def __init__(self, s_per_token: float) -> None:
        self.now = 0.0
        self.s_per_token = s_per_token
        self.products: list[int] = []

    def read(self) -> float:
        return self.now

    def multiply(self, rows: torch.Tensor, weight: torch.Tensor) -> None:
        self.products.append(rows.shape[0])
        self.now += self.s_per_token * rows.shape[0]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(0.0)
    monkeypatch.setattr("tierstore.plan.measure.perf_counter", clock.read)
    monkeypatch.setattr("torch.matmul", clock.multiply)
    return clock


def test_a_device_that_multiplies_too_slowly_gets_no_rate_after_two_small_products(clock: Clock) -> None:
    """Regression test: on a CPU with slow bfloat16, the measurement took 2 minutes and printed 0 GFLOP/s."""
    clock.s_per_token = 0.14
    rate = matmul_rate(16, 32, "bfloat16", "cpu")
    assert rate.per_s is None
    assert rate.how == (
        "not measured: cpu takes 0.56 s for one product of 4 x 16 x 32 in bfloat16, too long for an engine; "
        "set --prefill-tokens-per-s"
    )
    assert clock.products == [4, 4]


def test_a_slow_device_is_measured_with_few_products(clock: Clock) -> None:
    clock.s_per_token = 0.02
    rate = matmul_rate(16, 32, "float32", "cpu")
    assert rate.per_s == pytest.approx(2 * 16 * 32 / 0.02)
    assert rate.how == "measured: 64 x 16 x 32 in float32 on cpu, best of 1"
    assert clock.products == [4, 4, 64, 64]


def test_a_fast_device_is_measured_up_to_2048_tokens_ten_times_each(clock: Clock) -> None:
    clock.s_per_token = 1e-7
    rate = matmul_rate(16, 32, "float32", "cpu")
    assert rate.per_s == pytest.approx(2 * 16 * 32 / 1e-7)
    assert rate.how.endswith("best of 10")
    assert clock.products == [
        4,
        4,
        *(tokens for tokens in (64, 128, 256, 512, 1024, 2048) for _ in range(11)),
    ]


def test_rates_are_printed_with_three_digits_however_small(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore.plan.forecast.copy_rate", lambda *_: Rate(4.321e6, "measured: copies"))
    monkeypatch.setattr("tierstore.plan.forecast.matmul_rate", lambda *_: Rate(2.346e8, "measured: products"))
    told = run(folder, "--page-size", "4")[1]
    assert "HOST -> HBM: 0.00432 GB/s, measured: copies" in told
    assert "prefill: 0.235 GFLOP/s, measured: products" in told


CONFIG = """
hbm: {{capacity: 64KiB, device: cpu}}
host: {{capacity: 64KiB}}
nvme: {{path: {path}, capacity: 1MiB}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(GQA), encoding="utf-8")
    (tmp_path / "store.yaml").write_text(CONFIG.format(path=tmp_path / "store"), encoding="utf-8")
    return tmp_path


def run(folder: Path, *more: str, model: str = "model") -> tuple[int, str, Any]:
    options = ["--config", str(folder / "store.yaml"), "--model", str(folder / model), *more, "--json"]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["plan", *options])
    return result.exit_code, result.stdout, json.loads(result.stdout.splitlines()[-1])


def test_the_command_measures_and_ends_with_one_object(folder: Path) -> None:
    code, told, plan = run(folder, "--page-size", "4", "--tokens", "100", "--tokens", "8")
    assert code == 0, told
    assert set(plan) == {
        "model",
        "bytes_per_token",
        "page_size",
        "smallest_reuse_tokens",
        "page_nbytes",
        "page_padding_nbytes",
        "tiers",
        "questions",
        "documents",
        "rates",
        "refused",
        "warnings",
    }
    assert plan["model"]["name"] == str(folder / "model" / "config.json")
    assert [tier["tier"] for tier in plan["tiers"]] == ["HBM", "HOST", "NVME"]
    assert [document["tokens"] for document in plan["documents"]] == [100, 8]
    assert all(tier["seconds"] > 0 for tier in plan["documents"][0]["tiers"][1:])
    assert set(plan["rates"]) == {
        "host_to_hbm_bytes_per_s",
        "nvme_read_bytes_per_s",
        "prefill_operations_per_s",
    }
    assert "recompute times from the model's operations at the prefill rate, a lower bound" in told
    assert sorted(path.name for path in folder.iterdir()) == ["model", "store.yaml"]


NO_HBM = """
host: {{capacity: 64KiB}}
nvme: {{path: {path}, capacity: 1MiB}}
"""


def test_without_hbm_and_a_card_nothing_is_predicted_unless_the_device_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU of this machine says nothing about an engine's GPU. ``plan`` once predicted 120,045 s from its speed."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (folder / "store.yaml").write_text(NO_HBM.format(path=folder / "store"), encoding="utf-8")
    code, told, plan = run(folder, "--page-size", "4")
    assert code == 0, told
    (document,) = plan["documents"]
    assert document["recompute_s"] is None
    assert [tier["sooner"] for tier in document["tiers"]] == [None, None]
    assert [tier["documents"] for tier in document["tiers"]] == [0, 0]
    assert "HOST -> HBM: not measured: the configuration has no hbm section" in told
    assert "torch finds no GPU on this machine; set --device or --prefill-tokens-per-s" in told
    _, _, plan = run(folder, "--page-size", "4", "--prefill-tokens-per-s", "64")
    assert plan["documents"][0]["recompute_s"] == 8192 / 64
    _, told, plan = run(folder, "--page-size", "4", "--device", "cpu")
    assert plan["documents"][0]["recompute_s"] > 0
    assert "on cpu, best of" in told


def test_the_last_line_says_which_times_are_predicted_from_which_rates(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "store.yaml").write_text("hbm: {capacity: 64KiB, device: cpu}", encoding="utf-8")
    measured, unknown = Rate(1e9, "measured: here"), Rate(None, "not measured: there")
    for copy, product, line in (
        (measured, measured, "restore times are predicted from the copy rate, recompute times from"),
        (measured, unknown, "restore times are predicted from the copy rate"),
        (unknown, unknown, "no time is predicted"),
        (unknown, measured, "recompute times are predicted from the model's operations at the prefill rate"),
    ):
        monkeypatch.setattr("tierstore.plan.forecast.copy_rate", lambda *_, copy=copy: copy)
        monkeypatch.setattr("tierstore.plan.forecast.matmul_rate", lambda *_, product=product: product)
        assert any(printed.startswith(line) for printed in run(folder, "--page-size", "4")[1].splitlines())


def test_without_hbm_the_present_gpu_is_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[object] = []

    def rate(*arguments: object) -> Rate:
        measured.append(arguments[-1])
        return Rate(1e9, "")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("tierstore.plan.forecast.copy_rate", rate)
    monkeypatch.setattr("tierstore.plan.forecast.matmul_rate", rate)
    (folder / "store.yaml").write_text(NO_HBM.format(path=folder / "store"), encoding="utf-8")
    assert run(folder, "--page-size", "4")[0] == 0
    assert run(folder, "--page-size", "4", "--device", "cuda:3")[0] == 0
    assert measured == ["cuda", "cuda", "cuda:3", "cuda:3"]


def test_device_option_overrides_the_configuration(folder: Path) -> None:
    code, told, _ = run(folder, "--page-size", "4", "--device", "cuda:77")
    assert (code, "refused: hbm.device" in told) == (1, True)
    code, _, plan = run(folder, "--device", "gpu")
    assert (code, plan["error"]) == (2, "--device must be cpu, cuda or cuda:N, got 'gpu'")


def test_the_command_takes_dtype_and_speed(folder: Path) -> None:
    code, told, plan = run(folder, "--dtype", "float32", "--prefill-tokens-per-s", "64", "--page-size", "4")
    assert code == 0, told
    assert plan["bytes_per_token"] == 256
    assert plan["documents"][0]["recompute_s"] == 8192 / 64
    assert "given with --prefill-tokens-per-s" in told


def test_default_page_size_is_64_tokens(folder: Path) -> None:
    assert run(folder)[2]["page_size"] == 64
    with open(folder / "store.yaml", "a", encoding="utf-8") as file:
        file.write("page_size: 8\n")
    assert run(folder)[2]["page_size"] == 8
    code, _, plan = run(folder, "--page-size", "4")
    assert (code, plan["page_size"], plan["refused"]) == (0, 4, [])


def test_a_configuration_that_would_not_open_ends_with_code_1(folder: Path) -> None:
    code, told, plan = run(folder, "--page-size", "100000")
    assert code == 1
    assert "refused: hbm.capacity must hold at least one page of " in told
    assert plan["tiers"][0]["pages"] == 0


def test_impossible_plan_exits_with_code_2_and_one_line(folder: Path) -> None:
    code, _, plan = run(folder, model="nothing")
    assert (code, set(plan)) == (2, {"error"})
    (folder / "store.yaml").write_text("hbmm: {}", encoding="utf-8")
    code, _, plan = run(folder)
    assert code == 2
    assert "did you mean hbm?" in plan["error"]
