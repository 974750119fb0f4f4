"""Planning: the geometry that is read, the arithmetic, and what the command says. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

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


def test_work_is_unknown_with_its_reason_where_a_size_is_missing_and_pages_are_planned_all_the_same() -> None:
    found = planned(tiers(64, 64), {**GQA, "intermediate_size": None}).documents[0]
    assert found.recompute_s is None
    assert read({**GQA, "intermediate_size": None}).prefill == "config.json has no intermediate_size"
    assert read({**GQA, "num_experts": "8"}).prefill == "config.json: cannot interpret num_experts '8'"
    assert found.tiers[1].seconds is not None
    assert found.tiers[1].sooner is None


def test_a_plan_counts_what_a_hand_counts() -> None:
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
        "a document of 400 tokens needs 100 pages (50 KiB), HBM holds 20 (10 KiB)",
        "a document of 400 tokens needs 100 pages (50 KiB), HOST holds 70 (35 KiB)",
    ]
    assert plan["refused"] == []


def test_a_restore_from_disk_takes_both_hops_or_the_one_there_is() -> None:
    def seconds(tier: Tier, *, through_host: bool) -> float:
        found = restore_seconds(tier, 100, 10**6, KNOWN, through_host=through_host)
        assert found is not None
        return found

    assert seconds(Tier.HBM, through_host=True) == 0.0
    assert seconds(Tier.HOST, through_host=True) == pytest.approx(10e-3)
    assert seconds(Tier.NVME, through_host=True) == pytest.approx(110e-3)
    assert seconds(Tier.NVME, through_host=False) == pytest.approx(100e-3)


def test_what_was_not_measured_is_not_predicted() -> None:
    nothing = Rate(None, "not measured")
    blind = Rates(copy=nothing, read=nothing, prefill=nothing, per_token=False)
    for tier in (Tier.HOST, Tier.NVME):
        assert restore_seconds(tier, 3, 10, blind, through_host=True) is None
    document = planned(tiers(64, 64), GQA, 16, rates=blind).documents[0]
    assert document.recompute_s is None
    assert [(found.seconds, found.sooner) for found in document.tiers] == [(0.0, None), (None, None)]


def test_a_given_speed_of_prefill_is_taken() -> None:
    given = Rates(copy=KNOWN.copy, read=None, prefill=Rate(50.0, "given"), per_token=True)
    assert planned(tiers(64, 64), GQA, 100, rates=given).documents[0].recompute_s == 2.0


def test_what_will_disappoint_is_said(tmp_path: Path) -> None:
    slow = Rates(copy=Rate(1.0, ""), read=Rate(1.0, ""), prefill=Rate(1e12, ""), per_token=False)
    config = tiers(300, 300, tmp_path, nvme_pages=20)
    told = " / ".join(planned(config, GQA | WINDOWS, 3, 8, rates=slow).warnings)
    assert "1 of 2 layers attend only to the last 3 tokens" in told
    assert "the tiers above it 600: not all of them can be saved" in told
    assert "a document of 3 tokens is shorter than a page (4): nothing is stored" in told
    assert "recomputing a document of 8 tokens is faster than restoring it from NVME" in told


def test_what_an_opening_would_refuse_is_refused_in_its_words(tmp_path: Path) -> None:
    config = load_config(
        {
            "hbm": {"capacity": 500, "device": "cpu"},
            "host": {"capacity": "1PiB"},
            "nvme": {"path": tmp_path / "store", "capacity": "64KiB"},
        }
    )
    hbm, memory, nvme = planned(config, GQA).sizes.refused
    assert hbm == "hbm.capacity must be at least one page, 512 bytes, got 500 bytes"
    assert memory.startswith("host.capacity needs 8 PiB (9,007,199,254,740,992 bytes) of memory, but only ")
    assert nvme.startswith("nvme.capacity must be at least ")
    assert nvme.endswith(", got 65536 bytes")
    spec = page_layout(config, read(GQA), 4, None)[1].specs
    with pytest.raises(ConfigError) as refused:
        TierStore.open(config, spec)
    assert str(refused.value) == hbm


def test_a_plan_for_more_disk_than_there_is_says_so(tmp_path: Path) -> None:
    config = load_config(
        {"host": {"capacity": "1MiB"}, "nvme": {"path": tmp_path / "x", "capacity": "4000PiB"}}
    )
    (refused,) = planned(config, GQA).sizes.refused
    assert f"free at {tmp_path} besides" in refused


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


@pytest.mark.parametrize("payload", ["lmdb", "extents"])
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
            # Each page that is on its way has room for a raw one set aside.
            assert 0.95 * pages[codec] - 1 <= tier_stats(store, Tier.NVME)["resident"] <= pages[codec]
    assert pages["int8"] > 1.1 * pages["none"]


def test_rates_of_this_machine_are_taken_and_leave_nothing_behind(tmp_path: Path) -> None:
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


def test_a_rate_that_cannot_be_taken_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    assert "recompute times from the model's operations" in told
    assert sorted(path.name for path in folder.iterdir()) == ["model", "store.yaml"]


def test_the_command_takes_dtype_and_speed(folder: Path) -> None:
    code, told, plan = run(folder, "--dtype", "float32", "--prefill-tokens-per-s", "64", "--page-size", "4")
    assert code == 0, told
    assert plan["bytes_per_token"] == 256
    assert plan["documents"][0]["recompute_s"] == 8192 / 64
    assert "given with --prefill-tokens-per-s" in told


def test_pages_have_64_tokens_unless_something_says_otherwise(folder: Path) -> None:
    assert run(folder)[2]["page_size"] == 64
    with open(folder / "store.yaml", "a", encoding="utf-8") as file:
        file.write("page_size: 8\n")
    assert run(folder)[2]["page_size"] == 8
    code, _, plan = run(folder, "--page-size", "4")
    assert (code, plan["page_size"], plan["refused"]) == (0, 4, [])


def test_a_configuration_that_would_not_open_ends_with_code_1(folder: Path) -> None:
    code, told, plan = run(folder, "--page-size", "100000")
    assert code == 1
    assert "refused: hbm.capacity must be at least one page" in told
    assert plan["tiers"][0]["pages"] == 0


def test_what_cannot_be_planned_ends_with_code_2_and_one_line(folder: Path) -> None:
    code, _, plan = run(folder, model="nothing")
    assert (code, set(plan)) == (2, {"error"})
    (folder / "store.yaml").write_text("hbmm: {}", encoding="utf-8")
    code, _, plan = run(folder)
    assert code == 2
    assert "did you mean hbm?" in plan["error"]
