"""Test ``bench hints`` at tiny sizes: its questions, tiers and hints, and how its rows are computed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from benchmarks import hints
from benchmarks.hinted_model import QUESTION, Answers, random_model, spec_of_random
from benchmarks.hints import (
    CASES,
    Answer,
    Asked,
    HintRow,
    Library,
    Pages,
    hint_rows,
    open_store,
    page_spec,
    place,
)
from tests.support.pages import counter, where
from tierstore.cli.app import app
from tierstore.types import PageKey, Tier

PAGES = 6


@pytest.fixture(autouse=True)
def _short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "REST_S", 0.001)


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[Pages]:
    with open_store(page_spec(1), PAGES, 2, "cpu", tmp_path) as store:
        yield Pages(store, 2, PAGES, 64)


def rows_of(library: Library, source: Tier, rounds: int = 1) -> dict[str, HintRow]:
    return {row.case: row for row in hint_rows(library, source, rounds, 0, lambda asked: None)}


@pytest.mark.parametrize("tier", [Tier.HBM, Tier.HOST, Tier.NVME])
def test_document_is_placed_in_a_tier_and_nowhere_above(pages: Pages, tier: Tier) -> None:
    for other in (Tier.NVME, Tier.HBM, Tier.HOST):
        place(pages.store, pages.documents[0], other)
        place(pages.store, pages.documents[0], tier)
        assert all(min(where(pages.store, key)) == tier for key in pages.documents[0])


def test_without_a_disk_a_document_that_only_hbm_has_is_copied_to_host_memory_first() -> None:
    with open_store(page_spec(1), PAGES, 1, "cpu") as store:
        pages = Pages(store, 1, PAGES, 64)
        place(store, pages.documents[0], Tier.HOST)
        assert store.match(pages.documents[0]).tiers == (Tier.HOST,) * PAGES
        assert pages.ask(0)[1] is True


def test_pages_that_are_in_no_tier_cannot_be_placed(pages: Pages) -> None:
    pages.store.evict(pages.documents[0])
    with pytest.raises(RuntimeError, match="not all of 6 pages could be brought to NVME; pages found: none"):
        place(pages.store, pages.documents[0], Tier.NVME)


@pytest.mark.parametrize("source", [Tier.NVME, Tier.HOST])
def test_every_case_answers_with_the_bytes_that_were_put(pages: Pages, source: Tier) -> None:
    rows = rows_of(pages, source)
    assert tuple(rows) == CASES
    assert all(row.equal and row.pairs == 2 and row.source == source.name for row in rows.values())
    assert rows["resident"].ratio == 1.0
    load_s = rows["none"].load_s
    assert rows["none"].lead_s == 0.0 < hints.LATE * load_s <= rows["late"].lead_s
    assert rows["ahead"].lead_s >= hints.AHEAD * load_s + hints.AHEAD_S
    assert counter(pages.store, "hints", "deferred") == 2 * 2


def test_a_page_with_another_byte_is_reported(pages: Pages) -> None:
    pages._sums[1][3] += 1
    assert not any(answer.content for answer in [pages.ask(1)])
    assert pages.ask(0).content


class Slow:
    """A library whose answers take a fixed time per case. Only the answer in the case "late" has different content."""

    def __init__(self, pages: Pages, seconds: dict[Tier, float], case: Callable[[], str]) -> None:
        self.store = pages.store
        self.documents: Sequence[Sequence[PageKey]] = pages.documents[:1]
        self._seconds = seconds
        self._case = case

    def ask(self, number: int) -> Answer:
        return Answer(
            {"resident": 1.0, "none": 5.0, "late": 4.4, "ahead": 1.1}[self._case()], self._case() != "late"
        )


def test_ratios_are_relative_to_the_best_possible_time(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers take 5 s without a hint, and 1 s if the pages are in HBM already.

    The best possible time is therefore 4 s with a hint 1 s ahead, and 1 s with a hint that is early enough.
    """
    seen: list[str] = ["resident"]
    asked = hints._asked

    def noted(library: Library, number: int, source: Tier, case: Any, load_s: float) -> Asked:
        seen.append(case)
        found = asked(library, number, source, case, 0.01)
        return found._replace(lead_s={"late": 1.0, "ahead": 6.0}.get(case, found.lead_s))

    monkeypatch.setattr(hints, "_asked", noted)
    rows = rows_of(Slow(pages, {}, lambda: seen[-1]), Tier.NVME, rounds=4)
    assert [round(row.ratio, 6) for row in rows.values()] == [1.0, 5.0, 1.1, 1.1]
    assert [row.equal for row in rows.values()] == [True, True, False, True]
    assert [seen[start] for start in (1, 5, 9, 13)] == list(CASES)


class Diary(Slow):
    """A library that records where documents are placed, and how long the benchmark slept before each answer."""

    def __init__(self, pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(pages, {}, lambda: "resident")
        self.noted: list[str] = []
        self.slept: list[float] = []
        monkeypatch.setattr(hints, "sleep", self.slept.append)
        monkeypatch.setattr(hints, "place", self._placed)
        monkeypatch.setattr(hints, "_loads", lambda *ignored: [0.2])

    def ask(self, number: int) -> Answer:
        self.noted.append(f"asked after {sum(self.slept):.2f} s")
        self.slept.clear()
        return super().ask(number)

    def _placed(self, store: Any, keys: Any, tier: Tier) -> None:
        self.noted.append(tier.name)


def test_every_answer_follows_an_equal_pause_and_warmup_answers_are_not_counted(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set the pause before each answer to 0.5 s. Hints are given 0.1 s and 0.3 s before the question, within the pause.

    Pages that the last answer left in HBM are not loaded again.
    """
    monkeypatch.setattr(hints, "REST_S", 0.5)
    monkeypatch.setattr(hints, "perf_counter", lambda: 0.0)
    diary = Diary(pages, monkeypatch)
    rows = rows_of(diary, Tier.NVME)
    warm, rested = ["asked after 0.00 s"] * 2, "asked after 0.50 s"
    assert diary.noted == [*warm, "HBM", rested, "NVME", rested, "NVME", rested, "NVME", rested]
    assert rows["ahead"].pairs == 1


def test_the_loading_time_of_a_slow_document_is_that_of_one_load(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(hints._loads(pages, 0, Tier.HOST)) == 3
    monkeypatch.setattr(hints, "_LOADS_S", 0.0)
    assert len(hints._loads(pages, 0, Tier.NVME)) == 1


def test_documents_in_host_memory_need_no_disk() -> None:
    with open_store(page_spec(1), PAGES, 2, "cpu") as store:
        rows = rows_of(Pages(store, 2, PAGES, 64), Tier.HOST)
        assert Tier.NVME not in {tier for key in store.keys([1] * 64) for tier in where(store, key)}
    assert all(row.equal for row in rows.values())


def tiny() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
    )


@pytest.mark.parametrize("computed", [True, False])
def test_a_model_answers_the_same_with_hints_and_without(tmp_path: Path, computed: bool) -> None:
    model = random_model(tiny(), "cpu")
    ids = [[number + 1] * (4 * 8 + QUESTION) for number in range(2)]
    with open_store(spec_of_random(model, 8), 6, 2, "cpu", tmp_path) as store:
        rows = rows_of(Answers(store, model, ids, computed=computed), Tier.NVME)
        assert all(row.equal for row in rows.values())
        assert [len(keys) for keys in Answers(store, model, ids, computed=computed).documents] == [4, 4]
        store.check()


def invoke(*options: str) -> Any:
    return CliRunner().invoke(app, ["bench", "hints", *options])


def test_bench_hints_prints_a_row_for_each_case_and_source(tmp_path: Path) -> None:
    sizes = ("--layers", "1", "--tokens", "256", "--disk-tokens", "128", "--rounds", "1")
    result = invoke(*sizes, "--dir", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert [(row["source"], row["case"]) for row in found["rows"]] == [
        (s, c) for s in ("NVME", "HOST") for c in CASES
    ]
    pages = {"NVME": 2, "HOST": 4}
    assert all(row["nbytes"] == pages[row["source"]] * page_spec(1).page_nbytes for row in found["rows"])
    assert all(row["equal"] for row in found["rows"])
    said = " ".join(result.stderr.split())
    assert "NVME: documents of 128 tokens, 1" in said
    assert all(re.search(rf"{source}: resident [0-9.]+", said) for source in pages)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--from", "hbm"), "--from must be nvme, host, or both"),
        (("--model", "random", "--device", "cuda:99"), "cuda:99"),
        (("--model", "/nowhere"), "no such folder"),
        (("--docs", "README.md"), "--docs README.md has no effect with --model none: use smollm2"),
        (("--dir", "/nowhere"), "--dir /nowhere: no such folder"),
    ],
)
def test_bench_hints_refuses_unsupported_options(options: tuple[str, ...], said: str) -> None:
    result = invoke("--layers", "1", "--tokens", "64", *options)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
