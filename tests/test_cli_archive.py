"""Tests of the output and exit codes of ``tierstore export`` and ``tierstore import``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from tests.adapters.tiny import tiny_llama
from tests.archive.rig import Shelf, imported, run
from tests.support import forked
from tests.support.folders import save_with_byte_tokenizer
from tests.support.pages import SPEC, chain, nvme_capacity, read, tiers, write
from tests.test_cli import last_line, only_to_be_read, tierstore, tierstore_process, unprivileged
from tests.test_readme import block
from tierstore.adapters.huggingface import ATTENTION, TierStoreCache, cache_argument, page_specs
from tierstore.archive.intake import read_contents
from tierstore.cli.app import app
from tierstore.config import load_config
from tierstore.demo.answers import Session
from tierstore.page import PageSpec
from tierstore.store import TierStore
from tierstore.types import PageKey

OTHER = PageSpec(num_layers=2, page_size=4, num_kv_heads=2, head_dim=8, dtype="float16", model="other")
KEYS = chain(6)


def here(*words: str | Path) -> Result:
    """Run the command in this process, where torch and transformers are already imported."""
    return CliRunner().invoke(app, [str(word) for word in words])


def configured(directory: Path, name: str = "store", **nvme: object) -> Path:
    """Write a configuration file whose store is in ``directory / name``, and return its path."""
    path = directory / f"{name}.yaml"
    section = {"path": str(directory / name), "capacity": nvme_capacity(100), **nvme}
    path.write_text(yaml.safe_dump({"nvme": section}), encoding="utf-8")
    return path


def filled(
    directory: Path, keys: Sequence[PageKey] = KEYS, spec: PageSpec = SPEC, name: str = "store"
) -> Path:
    with TierStore.open(tiers(16, None, directory / name, nvme_pages=100), spec) as store:
        write(store, keys)
    return configured(directory, name)


def test_all_pages_are_exported_and_imported_into_an_empty_store(tmp_path: Path) -> None:
    out = tmp_path / "x.tier"
    result = tierstore("export", "--config", filled(tmp_path), "--all", out, "--json")
    assert result.returncode == 0, result.stderr
    report = last_line(result)
    assert (report["ok"], report["pages"], report["codecs"], report["missing"]) == (True, 6, {"none": 6}, [])
    assert report["nbytes"] == out.stat().st_size
    assert "6 pages: 6 not compressed (codec none)" in result.stdout
    elsewhere = configured(tmp_path, "elsewhere")
    for present in (0, 6):
        result = tierstore("import", "--config", elsewhere, out, "--json")
        assert result.returncode == 0, result.stderr
        report = last_line(result)
        assert (report["ok"], report["pages"], report["present"]) == (True, 6 - present, present)
    with TierStore.open(tiers(16, None, tmp_path / "elsewhere", nvme_pages=100), SPEC) as store:
        assert read(store, KEYS) == 6


def test_pages_are_exported_from_a_read_only_store(tmp_path: Path) -> None:
    config, out = filled(tmp_path), tmp_path / "x.tier"
    with only_to_be_read(tmp_path / "store"):
        result = unprivileged("export", "--config", config, "--all", out, "--json")
    assert result.returncode == 0, result.stderr
    assert last_line(result)["pages"] == 6


def test_keys_listed_in_a_file_are_exported_and_missing_ones_named(tmp_path: Path) -> None:
    missing = chain(1, "missing")[0]
    listed = tmp_path / "keys.txt"
    lines = ["# the first two", KEYS[0].hex(), f"  {KEYS[1].hex().upper()}  # in capitals", "", missing.hex()]
    listed.write_text("\n".join(lines), encoding="utf-8")
    result = tierstore(
        "export", "--config", filled(tmp_path), "--keys", listed, tmp_path / "x.tier", "--json"
    )
    assert result.returncode == 1, result.stderr
    report = last_line(result)
    assert (report["ok"], report["pages"]) == (False, 2)
    assert report["missing"] == [[missing.hex(), "not found"]]
    assert f"not exported: {missing.hex()}: not found" in result.stdout
    sink = Shelf()
    assert imported(tmp_path / "x.tier", sink).complete
    assert list(sink.records) == KEYS[:2]


@pytest.mark.parametrize(
    ("text", "why"),
    [("zz", "line 1: a key must have 72 hex digits, got 'zz'"), ("00", "line 1"), ("# none", "has no keys")],
)
def test_invalid_key_is_refused_by_its_line(tmp_path: Path, text: str, why: str) -> None:
    listed = tmp_path / "keys.txt"
    listed.write_text(text, encoding="utf-8")
    result = tierstore("export", "--config", configured(tmp_path), "--keys", listed, tmp_path / "x.tier")
    assert result.returncode == 2
    assert why in result.stderr
    assert not (tmp_path / "x.tier").exists()


def test_impossible_export_exits_with_code_2_and_no_file(tmp_path: Path) -> None:
    out = tmp_path / "x.tier"
    config = filled(tmp_path)
    none = tmp_path / "none.yaml"
    none.write_text("host: {capacity: 1MiB}\n", encoding="utf-8")
    refused: list[tuple[list[str | Path], str]] = [
        (["--config", config], "choose the pages to export: --keys FILE"),
        (["--config", config, "--all", "--keys", config], "choose the pages to export: --keys FILE"),
        (["--config", config, "--doc", config], "choose the pages to export: --keys FILE"),
        (["--config", none, "--all"], "has no nvme section"),
        (["--config", configured(tmp_path, "new"), "--all"], "does not exist"),
        (["--config", config, "--all", "--fingerprint", "zz"], "has no pages with this fingerprint"),
    ]
    for arguments, why in refused:
        result = tierstore("export", *arguments, out, "--json")
        assert result.returncode == 2
        assert why in result.stderr
        assert why in last_line(result)["error"]
        assert not out.exists()


def test_fingerprint_option_chooses_one_of_several_models(tmp_path: Path) -> None:
    config = filled(tmp_path)
    filled(tmp_path, KEYS[:2], OTHER)
    result = tierstore("export", "--config", config, "--all", tmp_path / "x.tier")
    assert result.returncode == 2
    assert SPEC.fingerprint[:12] in result.stderr
    assert OTHER.fingerprint[:12] in result.stderr
    chosen = ["--fingerprint", OTHER.fingerprint[:8]]
    result = tierstore("export", "--config", config, "--all", *chosen, tmp_path / "x.tier", "--json")
    assert (result.returncode, last_line(result)["pages"]) == (0, 2)


def test_archive_of_another_model_is_refused_unless_declared_new(tmp_path: Path) -> None:
    out = tmp_path / "x.tier"
    assert tierstore("export", "--config", filled(tmp_path), "--all", out).returncode == 0
    other = filled(tmp_path, KEYS[:2], OTHER, "other")
    result = tierstore("import", "--config", other, out, "--json")
    assert result.returncode == 2
    assert f"{out}: the model of its pages is 'test', but this store needs 'other'" in result.stderr
    assert [path.name[:12] for path in (tmp_path / "other").glob("*-0")] == [OTHER.fingerprint[:12]]
    result = tierstore("import", "--config", other, out, "--new-model", "--json")
    assert (result.returncode, last_line(result)["pages"]) == (0, 6)


def test_a_file_of_another_page_size_than_the_configurations_is_refused_by_name(tmp_path: Path) -> None:
    out = tmp_path / "x.tier"
    assert tierstore("export", "--config", filled(tmp_path), "--all", out).returncode == 0
    other = configured(tmp_path, "other")
    other.write_text("page_size: 64\n" + other.read_text(encoding="utf-8"), encoding="utf-8")
    result = tierstore("import", "--config", other, out)
    assert result.returncode == 2
    assert f"{out}: its pages have page_size 4, but " in result.stderr
    assert not (tmp_path / "other").exists()


def test_a_damaged_file_is_refused_or_imported_in_part_with_the_page_named(tmp_path: Path) -> None:
    out = tmp_path / "x.tier"
    assert tierstore("export", "--config", filled(tmp_path), "--all", out).returncode == 0
    item = {item.key: item for item in run(read_contents(out)).items}[KEYS[3]]
    raw = bytearray(out.read_bytes())
    raw[item.end - 1] ^= 1
    out.write_bytes(raw)
    result = tierstore("import", "--config", configured(tmp_path, "two"), out, "--json")
    assert result.returncode == 1
    report = last_line(result)
    assert (report["ok"], report["pages"]) == (False, 3)
    assert report["damaged"] == [[KEYS[3].hex(), "the record does not match its checksum"]]
    assert report["orphans"] == [key.hex() for key in KEYS[4:]]
    assert f"damaged: {KEYS[3].hex()}: the record does not match its checksum" in result.stdout
    out.write_bytes(raw[:-5])
    result = tierstore("import", "--config", configured(tmp_path, "three"), out, "--json")
    assert result.returncode == 2
    assert "truncated" in result.stderr
    assert not (tmp_path / "three").exists()


def test_pages_beyond_the_capacity_are_reported(tmp_path: Path) -> None:
    out = tmp_path / "x.tier"
    keys = chain(16)
    assert tierstore("export", "--config", filled(tmp_path, keys), "--all", out).returncode == 0
    result = tierstore("import", "--config", configured(tmp_path, "two", capacity="360KiB"), out, "--json")
    assert result.returncode == 1, result.stderr
    report = last_line(result)
    assert 0 < report["pages"] < 16
    assert report["no_room"] == [key.hex() for key in keys[report["pages"] :]]
    assert "nvme.capacity is full" in result.stdout


def test_a_store_in_use_is_named_with_its_process(tmp_path: Path) -> None:
    config = filled(tmp_path)
    with TierStore.open(tiers(16, None, tmp_path / "store", nvme_pages=100), SPEC):
        result = tierstore_process("export", "--config", config, "--all", tmp_path / "x.tier")
    assert result.returncode == 2
    assert "in use by process" in result.stderr


EACH_READ = """
from tierstore.archive.closed_store import ClosedSource
record = ClosedSource.record
def interrupted(self, key):
    os.kill(os.getpid(), signal.SIGINT)
    return record(self, key)
ClosedSource.record = interrupted
"""

CLEAN_UP = """
from tierstore.archive.atomic_file import Draft
leave = Draft.__exit__
def interrupted(self, *error):
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    return leave(self, *error)
Draft.__exit__ = interrupted
"""


@pytest.mark.parametrize("by", [EACH_READ, EACH_READ + CLEAN_UP])
def test_interrupted_export_leaves_no_file(tmp_path: Path, by: str) -> None:
    """Later interrupts do not stop the clean-up that the first one began."""
    config = filled(tmp_path)
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # shells make background jobs ignore it
        f"{by}"
        "from tierstore.cli import main\n"
        "main()\n"
    )
    result = forked.run(program, "export", "--config", config, "--all", tmp_path / "x.tier")
    assert result.returncode in (1, 130), result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "store.yaml"]


TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


def words_of_the_guide(line: str, directory: Path, model: Path) -> list[str | Path]:
    """Return the arguments of a command line in the guide, with its model and files replaced by those of the test."""
    program, *words = line.split()
    assert program == "tierstore"
    given = {"smollm2": model} | {
        word: directory / word for word in words if word.startswith(("here.", "there.", "report."))
    }
    return [given.get(word, word) for word in words]


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "plain"])
def test_document_is_exported_by_its_text_and_answers_elsewhere(tmp_path: Path, chat: bool) -> None:
    folder = save_with_byte_tokenizer(tiny_llama(vocabulary=256), tmp_path / "model")
    if chat:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    session = Session(folder)
    spec = session.spec(8)
    text = "The lighthouse keeper counts the ships and writes each down. " * 2
    (tmp_path / "report.txt").write_text(text, encoding="utf-8")
    question = session.prompt(text, "How many?")
    answers, pages = [], 0
    for name in ("here", "there"):
        memory = {"hbm": {"capacity": 64 * spec.page_nbytes, "device": "cpu"}}
        config = {**memory, "nvme": {"path": str(tmp_path / name), "capacity": "32MiB"}}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        if name == "there":
            export, import_ = (
                words_of_the_guide(line, tmp_path, folder)
                for line in block("docs/archive.md", "sh").splitlines()
            )
            result = here(*export, "--json")
            assert result.exit_code == 0, result.stderr
            pages = json.loads(result.stdout.splitlines()[-1])["pages"]
            result = here(*import_, "--json")
            assert json.loads(result.stdout.splitlines()[-1])["pages"] == pages, result.stderr
        with TierStore.open(load_config(config), spec) as store:
            answers.append(session.stored(store, question, 5))
    begins = len("[user]") if chat else 0
    assert pages == (begins + len(text)) // 8
    assert answers[0].tokens == answers[1].tokens
    assert (answers[0].reused_tokens, answers[1].reused_tokens) == (0, 8 * pages)


def test_document_export_uses_the_dtype_of_the_directory(tmp_path: Path) -> None:
    folder = save_with_byte_tokenizer(tiny_llama(vocabulary=256), tmp_path / "model")
    text = "Nothing was ever written in so few bits. " * 2
    ids: list[int] = Session(folder).tokenizer(text)["input_ids"]
    count = len(ids) // 8
    (tmp_path / "doc.txt").write_text(text, encoding="utf-8")
    config = configured(tmp_path, capacity="32MiB")
    tree = {"hbm": {"capacity": "1MiB", "device": "cpu"}, **yaml.safe_load(config.read_text())}
    words: list[str | Path] = ["export", "--config", config, "--doc", tmp_path / "doc.txt", "--model", folder]
    words += [tmp_path / "x.tier", "--json"]
    for dtype in (torch.bfloat16, torch.float32):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION)
        with TierStore.open(load_config(tree), page_specs(model, 8)) as store:
            with TierStoreCache(store, ids, model=model) as cache, torch.inference_mode():
                model(torch.tensor([ids]), **{cache_argument(model): cache}, use_cache=True)
            assert store.match(store.keys(ids)).num_pages == count
        result = here(*words)
        if dtype == torch.bfloat16:
            assert result.exit_code == 0, result.stderr
            assert run(read_contents(tmp_path / "x.tier")).description.layout.specs[0].dtype == "bfloat16"
            assert json.loads(result.stdout.splitlines()[-1])["pages"] == count
    assert result.exit_code == 2
    assert "pages of bfloat16 and float32; choose one with --dtype" in result.stderr
    assert here(*words, "--dtype", "float32").exit_code == 0


def test_pages_of_several_loss_classes_are_exported_to_separate_files(tmp_path: Path) -> None:
    spec = PageSpec(num_layers=2, page_size=8, num_kv_heads=2, head_dim=32, dtype="bfloat16", model="classes")
    tree = {"hbm": {"capacity": "1MiB", "device": "cpu"}}
    chains = {}
    for codec, count in (("none", 3), ("int8", 4), ("exp", 1), ("int8+zstd", 2)):
        nvme = {"path": str(tmp_path / "store"), "capacity": "32MiB", "codec": codec}
        with TierStore.open(load_config({**tree, "nvme": nvme}), spec) as store:
            keys = store.keys([count] * 8 * count)
            store.put(keys, store.allocate(count))  # pages of zeros, so that some are stored raw
            chains[codec] = keys
    out, config = tmp_path / "x.tier", configured(tmp_path, codec="int8")
    result = here("export", "--config", config, "--all", out)
    assert result.exit_code == 2
    assert "several loss classes" in result.stderr
    assert "exact: 4" in result.stderr
    assert "int8: 6" in result.stderr
    assert not out.exists()
    for name, codecs in (("exact", ("none", "exp")), ("int8", ("int8", "int8+zstd"))):
        result = here("export", "--config", config, "--all", "--loss-class", name, out)
        assert result.exit_code == 0, result.stderr
        contents = run(read_contents(out))
        assert contents.description.loss_class == name
        assert {item.key for item in contents.items} == {key for codec in codecs for key in chains[codec]}
    # Keys of one loss class need no further option. Keys of two are refused, unless --loss-class selects one.
    listed = tmp_path / "keys.txt"
    listed.write_text("\n".join(key.hex() for key in chains["none"]), encoding="utf-8")
    assert here("export", "--config", config, "--keys", listed, out).exit_code == 0
    assert run(read_contents(out)).description.loss_class == "exact"
    listed.write_text("\n".join(key.hex() for key in chains["none"] + chains["int8"]), encoding="utf-8")
    assert "several loss classes" in here("export", "--config", config, "--keys", listed, out).stderr
    result = here("export", "--config", config, "--keys", listed, "--loss-class", "int8", out)
    assert result.exit_code == 1
    assert "its loss class is 'exact', but this file accepts only 'int8'" in result.stdout
    assert {item.key for item in run(read_contents(out)).items} == set(chains["int8"])


def test_document_that_was_never_read_is_not_exported(tmp_path: Path) -> None:
    folder = save_with_byte_tokenizer(tiny_llama(vocabulary=256), tmp_path / "model")
    spec = Session(folder).spec(8)
    (tmp_path / "doc.txt").write_text("Nobody read this text before, nor will they.", encoding="utf-8")
    config = tmp_path / "store.yaml"
    section = {"path": str(tmp_path / "store"), "capacity": "32MiB"}
    config.write_text(yaml.safe_dump({"nvme": section}), encoding="utf-8")
    with TierStore.open(
        load_config({"hbm": {"capacity": "1MiB", "device": "cpu"}, "nvme": section}), spec
    ) as store:
        store.put(store.keys(range(8)), store.allocate(1))
    out = tmp_path / "x.tier"
    refused: list[tuple[list[str | Path], str]] = [
        ([folder], "has no pages of the document"),
        ([folder], f"{folder} has not read it there"),
        ([folder], "send it to `tierstore serve` with this configuration (POST /v1/documents)"),
        ([tmp_path / "nowhere"], "no such folder"),
        ([folder, "--dtype", "float31"], "--dtype must be one of"),
        ([folder, "--dtype", "float64"], f"has no pages of {folder} in float64"),
        ([folder, "--dtype", "float64"], "Let the model read the document first"),
    ]
    for arguments, why in refused:
        result = here("export", "--config", config, "--doc", tmp_path / "doc.txt", "--model", *arguments, out)
        assert result.exit_code == 2, result.output
        assert why in result.stderr
    assert not out.exists()


@pytest.mark.parametrize("made", [False, True], ids=["no directory", "an empty one"])
def test_document_export_from_an_unused_directory_asks_to_read_it_first(tmp_path: Path, made: bool) -> None:
    config, doc = configured(tmp_path), tmp_path / "doc.txt"
    doc.write_text("Nobody read this.", encoding="utf-8")
    if made:
        (tmp_path / "store").mkdir()
    result = here("export", "--config", config, "--doc", doc, "--model", "smollm2", tmp_path / "x.tier")
    assert result.exit_code == 2
    assert f"no store has used {tmp_path / 'store'} yet, so smollm2 has not read {doc}" in result.stderr
    assert "Let the model read the document first" in result.stderr
    result = here("export", "--config", config, "--doc", tmp_path / "no", "--model", "m", tmp_path / "x.tier")
    assert (result.exit_code, "--doc" in result.stderr) == (2, True)
