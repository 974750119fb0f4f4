"""Tests of ``compare``, which compares answers with and without the store.

Most tests use tiny models. Real models are tested if they are prepared on this machine.
"""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel
from typer.testing import CliRunner, Result

from benchmarks.compare import subject as prompts
from benchmarks.compare.cases import compare, greedy
from benchmarks.compare.comparison import Comparison, Fed, leftovers, open_store
from benchmarks.compare.subject import TEXTS, Request, Sizes, Subject, load_tokenizer, mixed_batch, read_texts
from benchmarks.compare.verdicts import (
    Plain,
    Row,
    all_held,
    as_json,
    beam_verdict,
    greedy_verdict,
    near_ties,
    show,
)
from tests.adapters.tiny import PAGE, VOCABULARY, random_prompt, strong, tiny_llama
from tests.support.folders import save_with_byte_tokenizer
from tierstore.adapters.huggingface import TierStoreCache, attention
from tierstore.cli.app import app
from tierstore.demo.model import GEMMA3, SMOLLM2, KnownModel, is_prepared, prepared_folder

SMALL = Sizes(long=70, short=42, new=6, page=PAGE, chunk=13, inside=3, tail=12, turn=10)
TEXT = [tuple(random_prompt(SMALL.long, seed=seed)) for seed in range(TEXTS)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread. A second one does not speed up models this small, and can slow them down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_gemma() -> Gemma3ForCausalLM:
    """Return a Gemma 3 with six layers. Every third layer has full attention; the others have a window of one page."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=PAGE,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=8,
        bos_token_id=1,
        pad_token_id=0,
    )
    return strong(Gemma3ForCausalLM(config))


def silent(line: str) -> None:
    """Discard a progress message."""


@pytest.mark.parametrize("build", [pytest.param(tiny_llama, marks=pytest.mark.deep), tiny_gemma])
def test_every_case_answers_as_without_the_store(
    build: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    rows = list(compare(Subject("tiny", build()), TEXT, SMALL, tmp_path, silent))
    assert [(row.case, row.wrong) for row in rows if not row.held] == []
    by_case = {row.case: row for row in rows}
    assert len(by_case) == len(rows) - 1 == 23  # the rows of both stores end with "nothing leaked"
    assert by_case["greedy, warm"].reused == {"HBM": SMALL.long - 1}
    assert by_case["greedy, from NVME"].reused == {"NVME": SMALL.long - 1}
    assert by_case["greedy, from NVME"].fed == SMALL.new
    assert by_case["3 samples, warm"].shared_pages == SMALL.short // PAGE
    assert by_case["4 beams, cold"].fed == 4 * (SMALL.short + SMALL.new - 1)
    mixed = by_case["batch of 4: whole, part, inside a page, new"]
    assert mixed.reused == {
        "HBM": 57 + 47 + 42
    }  # the new prompt begins at column 57; the third differs within a page, at 43
    assert near_ties(rows) == 0


def test_draft_models_have_accepted_and_rejected_drafts(tmp_path: Path) -> None:
    sizes = replace(SMALL, new=30)
    rows = list(compare(Subject("tiny", tiny_llama()), TEXT, sizes, tmp_path, silent, own=()))
    cold = rows[0]
    assert cold.case == "draft model, cold"
    assert cold.held
    assert ", 0 tokens taken back" not in cold.note
    assert "about 0 drafts" not in cold.note


def test_draft_model_shares_its_weights_and_keeps_the_kinds_of_its_layers() -> None:
    subject = Subject("tiny", tiny_gemma())
    assert subject.draft.config.layer_types == [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "full_attention",
    ]
    own, drafts = subject.model.state_dict(), subject.draft.state_dict()
    last = "self_attn.q_proj.weight"
    assert drafts[f"model.layers.4.{last}"].data_ptr() == own[f"model.layers.5.{last}"].data_ptr()


def test_greedy_answers_differ_unless_the_plain_model_nearly_tied() -> None:
    plain = Plain([[5, 6, 7], [1, 2, 3]], [[0.5, 5e-5, 0.5], [1.0, 1.0, 1.0]])
    assert greedy_verdict(plain, [[5, 6, 7], [1, 2, 3]]) == "equal"
    assert greedy_verdict(plain, [[5, 9, 9], [1, 2, 3]]) == "near-tie"
    assert greedy_verdict(plain, [[5, 9, 9], [1, 2, 4]]) == "different"
    assert greedy_verdict(plain, [[5, 6, 9], [1, 2, 3]]) == "different"
    assert greedy_verdict(plain, [[5, 6], [1, 2, 3]]) == "different"
    assert greedy_verdict(plain, [[5, 6, 7]]) == "different"


def test_beams_differ_unless_the_plain_model_scores_them_alike() -> None:
    plain = Plain([[5, 6], [5, 7]])
    scores = {(5, 6): -1.0, (5, 7): -1.00005, (5, 8): -1.2}

    def score(row: int, answer: Sequence[int]) -> float:
        return scores[answer[0], answer[1]]

    assert beam_verdict(plain, [[5, 6], [5, 7]], score) == "equal"
    assert beam_verdict(plain, [[5, 7], [5, 6]], score) == "near-tie"
    assert beam_verdict(plain, [[5, 6], [5, 8]], score) == "different"
    assert beam_verdict(plain, [[5, 6]], score) == "different"


def test_rolled_back_columns_are_counted_per_pass() -> None:
    assert Fed([(0, 1, 10), (10, 1, 5), (12, 1, 1)]).taken_back(13) == [0, 3, 0]
    assert Fed([(0, 2, 10), (10, 2, 1)]).taken_back(11) == [0, 0]
    assert Fed([(0, 1, 10)]).taken_back(8) == [2]


def test_recomputing_a_stored_prompt_is_an_error_even_if_the_answer_is_equal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    honest = Subject.stored

    def wasteful(self: Subject, cache: TierStoreCache, request: Request) -> list[list[int]]:
        found = honest(self, cache, request)
        self.model(torch.tensor([[3, 4, 5]]), use_cache=False)
        return found

    monkeypatch.setattr(Subject, "stored", wasteful)
    rows = list(compare(Subject("tiny", tiny_llama()), TEXT, SMALL, tmp_path, silent, own=(greedy,)))
    assert {row.verdict for row in rows} == {"equal"}
    assert [row.case for row in rows if row.held] == ["nothing leaked", "nothing leaked"]
    drafted = next(row for row in rows if row.case == "draft model, cold")
    assert drafted.wrong == ("a pass was taken back whole, or more than was drafted: [3]",)
    assert f"{SMALL.long + SMALL.new - 1 + 3} tokens were fed" in rows[0].wrong[0]


def test_slots_that_were_never_freed_are_found(tmp_path: Path) -> None:
    subject = Subject("tiny", tiny_llama())
    with open_store(subject, SMALL, [mixed_batch(TEXT, SMALL)], tmp_path, with_draft=False) as store:
        comparison = Comparison(subject, store, silent)
        assert list(greedy(comparison, TEXT, SMALL))
        assert leftovers(comparison).held
        slots = store.allocate(1)
        assert "1 HBM slots in use" in leftovers(comparison).wrong[0]
        store.free(slots)


def test_report_names_each_case_and_what_is_wrong() -> None:
    good = Row("one", "m", "equal", {"HBM": 7}, 5, 5)
    tie = Row("two", "m", "near-tie", {}, 5, 5)
    bad = Row("three", "m", "different", {}, 5, 5, wrong=("tokens differ",))
    console = Console(width=120, file=io.StringIO(), record=True)
    show(console, [good, tie, bad])
    text = console.export_text()
    assert "m, three: WRONG: tokens differ" in text
    assert "2 of 3 cases answered as without the store, 1 of them by a near-tie" in text
    assert "NOT EVERYTHING HOLDS" in text
    found = json.loads(json.dumps(as_json([good, tie, bad])))
    assert (found["equal"], found["near_ties"], len(found["rows"])) == (False, 1, 3)
    assert all_held([good, tie])


# -- the command ------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a tiny model, with texts next to it. Make the command use small prompts."""
    monkeypatch.setattr(prompts, "Sizes", lambda: SMALL)
    for number in range(TEXTS):
        (tmp_path / f"text{number}.txt").write_text(f"{number} says {number * 37}. " * 12)
    return save_with_byte_tokenizer(tiny_llama(vocabulary=256), tmp_path / "tiny")


def run(folder: Path, *more: str) -> Result:
    arguments = ["compare", "--model", str(folder), "--dir", str(folder.parent), "--json"]
    return CliRunner().invoke(app, [*arguments, "--docs", str(folder.parent), *more])


def test_command_ends_with_one_json_line_and_leaves_nothing_behind(folder: Path) -> None:
    before = sorted(folder.parent.iterdir())
    result = run(folder)
    found = json.loads(result.stdout.splitlines()[-1])
    assert [row["wrong"] for row in found["rows"] if not row["held"]] == []
    assert (result.exit_code, found["equal"]) == (0, True)
    assert sorted(folder.parent.iterdir()) == before


def test_planted_difference_ends_with_exit_code_1(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = attention._gather

    def keys_for_values(
        pages: torch.Tensor, slots: torch.Tensor, plane: int, num_tokens: int
    ) -> torch.Tensor:
        return gather(pages, slots, 0, num_tokens)

    monkeypatch.setattr(attention, "_gather", keys_for_values)
    result = run(folder)
    found = json.loads(result.stdout.splitlines()[-1])
    assert (result.exit_code, found["equal"]) == (1, False)
    assert next(row for row in found["rows"] if row["case"] == "greedy, warm")["verdict"] == "different"


def test_command_refuses_invalid_options_in_one_line(folder: Path) -> None:
    result = CliRunner().invoke(app, ["compare", "--model", "nowhere"])
    assert result.exit_code == 2
    assert "no such folder, and not a known model; use smollm2" in result.stderr
    for device, why in (("gpu", "must be cpu, cuda or cuda:N"), ("cuda:77", "set it to cpu")):
        result = CliRunner().invoke(app, ["compare", "--model", str(folder), "--device", device])
        assert result.exit_code == 2
        assert why in result.stderr
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"kv_lora_rank": 4}))
    result = run(folder)
    assert result.exit_code == 2
    assert "multi-head latent attention" in result.stderr


# -- real models ------------------------------------------------------------------------------------------------


def prepared(known: KnownModel) -> Path:
    folder = prepared_folder(known)
    if not is_prepared(folder):
        pytest.skip(f"{known.name} is not prepared: `make compare` does that")
    return folder


@pytest.mark.deep
def test_smollm2_answers_as_without_the_store(tmp_path: Path) -> None:
    folder = prepared(SMOLLM2)
    sizes = Sizes(long=90, short=40, new=7, page=16, inside=5, tail=20)
    texts = read_texts(load_tokenizer(folder), sizes)
    rows = compare(Subject.load("smollm2", folder), texts, sizes, tmp_path, silent, own=(greedy,), drafted=())
    assert [(row.case, row.wrong) for row in rows if not row.held] == []


def test_gemma3_answers_as_without_the_store_beyond_its_window(tmp_path: Path) -> None:
    folder = prepared(GEMMA3)
    sizes = Sizes(long=540, short=40, new=3)
    tokenizer = load_tokenizer(folder)
    subject = Subject.load("gemma3", folder)
    config = subject.model.config
    assert config.sliding_window == 512 < sizes.long
    full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert (len(config.layer_types), full) == (18, [5, 11, 17])
    bases = {kind: rope["rope_theta"] for kind, rope in config.rope_parameters.items()}
    assert bases == {"full_attention": 1e6, "sliding_attention": 1e4}
    assert tokenizer("The capital of France is")["input_ids"][0] == config.bos_token_id
    texts = read_texts(tokenizer, sizes)
    rows = compare(subject, texts, sizes, tmp_path, silent, own=(greedy,), drafted=())
    assert [(row.case, row.wrong) for row in rows if not row.held] == []
