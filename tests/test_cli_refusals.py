"""Test that a command that cannot run prints one line and changes nothing.

The line names the given value, what was found, and what is allowed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from typer.testing import CliRunner, Result

from tests.support import forked
from tests.test_cli import last_line, tierstore
from tests.test_cli_archive import filled
from tierstore.cli.app import app
from tierstore.cli.output import finite
from tierstore.demo import command as demo_room
from tierstore.demo import model as model_room
from tierstore.demo.model import GEMMA3, KNOWN, SMOLLM2, KnownModel, ModelError, Say, model_folder, short_name
from tierstore.errors import ConfigError
from tierstore.plan.geometry import read_model

ROOT = Path(__file__).parents[1]


def here(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def require_refused(result: Result, *parts: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    for part in parts:
        assert part in line
    assert "Errno" not in line


def test_a_file_that_is_missing_is_named_with_what_is_allowed(tmp_path: Path) -> None:
    nowhere, config = tmp_path / "nowhere", filled(tmp_path)
    out, pipe = tmp_path / "x.tier", tmp_path / "pipe"
    os.mkfifo(pipe)
    before = sorted(tmp_path.rglob("*"))
    plotted = f"the folder {nowhere} does not exist" if find_spec("matplotlib") else "--plot needs matplotlib"
    refused: list[tuple[list[str | Path], tuple[str, ...]]] = [
        (["export", "--config", nowhere, "--all", out], (str(nowhere), "cannot read the configuration file")),
        (
            ["export", "--config", config, "--all", nowhere / "x.tier"],
            (f"{nowhere}/x.tier: the folder {nowhere} does not exist",),
        ),
        (
            ["export", "--config", config, "--all", tmp_path],
            (f"{tmp_path} is a directory; expected a regular file or a new name",),
        ),
        (
            ["export", "--config", config, "--all", pipe],
            (f"OUT {pipe} is a device, pipe or socket; expected a regular file or a new name",),
        ),
        (
            ["export", "--config", config, "--keys", nowhere, out],
            (f"--keys {nowhere}: no such file", "expected a file of keys in hex"),
        ),
        (
            ["export", "--config", config, "--doc", nowhere, "--model", "smollm2", out],
            (f"--doc {nowhere}: no such file", "expected a text file"),
        ),
        (
            ["import", "--config", config, nowhere],
            (f"FILE {nowhere}: no such file", "expected a file that `tierstore export` wrote"),
        ),
        (
            ["import", "--config", config, tmp_path],
            (f"FILE {tmp_path}: is a directory", "expected a file that"),
        ),
        (["bench", "core", "--dir", nowhere], (f"--dir {nowhere}: no such folder",)),
        (["bench", "nvme", "--dir", nowhere], (f"--dir {nowhere}: no such folder",)),
        (
            ["bench", "codec", "--synthetic", "--plot", nowhere / "a.svg"],
            ("--plot", plotted),
        ),
    ]
    for arguments, parts in refused:
        require_refused(here(*arguments), *parts)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("smollm2", "smollm2"),
        ("SmolLM2-135M", "smollm2"),
        ("SmolLM2-135M-Instruct", "smollm2"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2"),
        ("gemma3", "gemma3"),
        ("GEMMA3", "gemma3"),
        ("Gemma-3-270m", "gemma3"),
        ("google/gemma-3-270m", "gemma3"),
    ],
)
def test_a_known_model_is_accepted_by_its_short_and_long_name_in_every_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, short: str
) -> None:
    assert short_name(name) == short
    asked: list[KnownModel] = []
    monkeypatch.chdir(tmp_path)

    def prepare(say: Say, known: KnownModel = SMOLLM2) -> Path:
        asked.append(known)
        return tmp_path

    monkeypatch.setattr(model_room, "prepare_model", prepare)
    assert model_folder(name, lambda line: None) == tmp_path
    assert asked == [KNOWN[short]]
    # `plan` and `replay` know the same model by the same names.
    geometry = read_model(name)
    assert geometry.name.lower() in KNOWN[short].name.lower()


def test_an_unknown_model_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "no-config").mkdir()
    (tmp_path / "doc.txt").write_text("text")
    (tmp_path / "tiers.yaml").write_text(
        "hbm: {capacity: 1GiB, device: cpu}\nnvme: {path: store, capacity: 1GiB}\n"
    )
    before = sorted(tmp_path.rglob("*"))
    commands = [
        ["serve", "--config", "tiers.yaml"],
        ["plan", "--config", "tiers.yaml"],
        ["demo"],
        ["export", "--config", "tiers.yaml", "--doc", "doc.txt", "out.kv"],
        ["bench", "codec"],
    ]
    lines = [[*words, "--model", model] for words in commands for model in ("nomodel", "no-config", "")]
    # All commands run in one process, because starting it takes most of the time.
    program = (
        "import json, sys\n"
        "from typer.testing import CliRunner\n"
        "from tierstore.cli.app import app\n"
        "ended = [CliRunner().invoke(app, words) for words in json.loads(sys.argv[1])]\n"
        "print(json.dumps([[each.exit_code, each.stderr] for each in ended]))\n"
    )
    ended = without_torch([json.dumps(lines)], tmp_path, program)
    assert ended.returncode == 0, ended.stderr
    for words, (code, stderr) in zip(lines, json.loads(ended.stdout), strict=True):
        assert code == 2, words
        assert "model" in stderr, words
    assert sorted(tmp_path.rglob("*")) == before


def test_a_wrong_folder_of_documents_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "tiers.yaml").write_text("hbm: {capacity: 1GiB, device: cpu}\n")
    words = ["serve", "--config", "tiers.yaml", "--model", "model", "--documents", "tiers.yaml"]
    ended = without_torch(words, tmp_path)
    assert ended.returncode == 2
    assert ended.stderr == (
        "tierstore: --documents tiers.yaml is not a folder; name an existing folder, or a new one, which will be "
        "created\n"
    )


def test_start_without_a_terminal_prints_progress_lines(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "tiers.yaml").write_text("hbm: {capacity: 1GiB, device: cpu}\n")
    ended = without_torch(["serve", "--config", "tiers.yaml", "--model", "model", "--port", "0"], tmp_path)
    assert ended.returncode == 99, "torch is imported once the options are known to be usable"
    assert ended.stderr == "importing torch and transformers\n"


def without_torch(
    words: list[str], folder: Path, program: str = forked.TIERSTORE
) -> subprocess.CompletedProcess[str]:
    """Run ``tierstore`` in a separate process that exits with code 99 if it imports torch or transformers."""
    ending = (
        "import os, sys\n"
        "from importlib.abc import Loader, MetaPathFinder\n"
        "from importlib.machinery import ModuleSpec\n"
        "class Ending(MetaPathFinder, Loader):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        return ModuleSpec(name, self) if name in ('torch', 'transformers') else None\n"
        "    def exec_module(self, module):\n"
        "        os._exit(99)\n"
        "sys.meta_path.insert(0, Ending())\n"
    )
    return subprocess.run(
        [sys.executable, "-c", ending + program, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_model_is_refused_and_not_taken_for_the_current_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"--model must be smollm2 .*, or a model's folder, got '"):
        model_folder(name, lambda line: None)
    with pytest.raises(ConfigError, match=r"the model must be a folder with a config\.json or one of "):
        read_model(name)


def test_known_models_are_listed_under_their_short_names() -> None:
    assert {short_name(known.name) for known in KNOWN.values()} == set(KNOWN)
    assert tuple(KNOWN.values()) == (SMOLLM2, GEMMA3)


def test_a_folder_takes_precedence_over_a_known_models_long_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "SmolLM2-135M"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"SmolLM2-135M: the folder has no config\.json; use smollm2"):
        model_folder("SmolLM2-135M", lambda line: None)
    (folder / "config.json").write_text("{}")
    assert model_folder("SmolLM2-135M", lambda line: None).resolve() == folder


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--model", "nomodel"],
        ["compare", "--model", "nomodel"],
        ["bench", "codec", "--model", "nomodel"],
    ],
)
def test_an_unknown_model_is_refused_before_anything_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str]
) -> None:
    def fetched(*_: object, **__: object) -> Path:
        raise AssertionError("something was prepared")

    for room in (model_room, demo_room):
        monkeypatch.setattr(room, "prepare_model", fetched, raising=False)
    monkeypatch.chdir(tmp_path)
    result = here(*arguments)
    assert result.exit_code == 2
    said = " ".join((result.stdout + result.stderr).split())
    assert (
        "--model nomodel: no such folder, and not a known model; use smollm2 (SmolLM2-135M-Instruct), gemma3"
        in said
    )


@pytest.mark.parametrize("command", [["demo"], ["compare"], ["bench", "codec"], ["bench", "hints"]])
def test_missing_texts_are_named_before_a_model_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: list[str]
) -> None:
    def fetched(*_: object, **__: object) -> Path:
        raise AssertionError("something was prepared")

    monkeypatch.setattr(model_room, "prepare_model", fetched)
    os.mkfifo(tmp_path / "pipe")
    for name, found in (("nowhere", "does not exist"), ("pipe", "is not a file")):
        result = here(*command, "--model", "smollm2", "--docs", tmp_path / name)
        assert result.exit_code == 2
        assert f"--docs {tmp_path / name} {found}, expected text files" in result.stderr


def test_bench_hints_refuses_a_folder_of_texts(tmp_path: Path) -> None:
    result = here("bench", "hints", "--model", "smollm2", "--docs", tmp_path)
    require_refused(result, f"--docs {tmp_path} is a folder, expected text files")


def test_plan_lists_the_known_models() -> None:
    with pytest.raises(ConfigError, match=r"'nomodel' is neither .*known names: .*gemma-3-270m"):
        read_model("nomodel")


def test_the_version_is_that_of_the_package() -> None:
    result = tierstore("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, "tierstore 0.1.0\n", "")


def test_flags_of_export_that_do_not_fit_are_named(tmp_path: Path) -> None:
    config = filled(tmp_path)
    result = tierstore(
        "export", "--config", config, "--all", "--loss-class", "int8", tmp_path / "x.tier", "--json"
    )
    assert result.returncode == 2
    assert (
        "--loss-class must be one of exact (the classes of this model's pages in "
        in last_line(result)["error"]
    )


@pytest.mark.parametrize(
    "words",
    [
        ["copy", "--pieces", "4KiB,foo"],
        ["copy", "--batch", "foo"],
        ["copy", "--small", "foo"],
        ["copy", "--contiguous", "foo"],
        ["copy", "--codec", "int8", "--pieces", "foo"],
        ["copy", "--codec", "int8", "--batch", "foo"],
        ["copy", "--codec", "int8", "--contiguous", "foo"],
        ["arena", "--size", "foo"],
        ["overlap", "--restored", "foo"],
        ["overlap", "--read", "foo"],
        ["overlap", "--batch", "foo"],
    ],
)
def test_invalid_size_is_named_with_its_option(words: list[str]) -> None:
    option = next(word for word, value in pairwise(words) if "foo" in value)
    require_refused(here("bench", *words, "--device", "cpu"), f"{option} must be a size", "got 'foo'")


FLOATS = [
    ["bench", "nvme", "--idle"],
    ["bench", "codec", "--synthetic", "--seconds"],
    ["bench", "prefetch", "trace.jsonl", "--utilisation", "0.5", "--utilisation"],
    ["plan", "--config", "config.yaml", "--model", "llama-3.1-8b", "--prefill-tokens-per-s"],
]


@pytest.mark.parametrize("words", FLOATS, ids=lambda words: words[1])
@pytest.mark.parametrize("number", ["nan", "-nan", "inf", "1e999"])
def test_an_option_that_takes_a_number_takes_a_finite_one(words: list[str], number: str) -> None:
    result = here(*words, number)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words[-1] in result.stderr
    assert "Traceback" not in result.stderr


def test_every_option_that_takes_a_float_refuses_what_is_not_finite() -> None:
    found = [
        (command.__name__, name, option.callback)
        for group in (app, *(each.typer_instance for each in app.registered_groups))
        if group is not None
        for info in group.registered_commands
        if (command := info.callback) is not None
        for name, hint in get_type_hints(command, include_extras=True).items()
        if "float" in str(get_args(hint)[:1])
        for option in get_args(hint)[1:]
    ]
    assert len(found) == len(FLOATS)
    assert [each for each in found if each[2] is not finite] == []


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            ["nvme", "--page-sizes", "3B"],
            ["--page-sizes must be multiples of 4 KiB (4,096 bytes)", "got '3B'"],
        ),
        (["nvme", "--page-sizes", ""], ["--page-sizes must be a size", "got ''"]),
        (["nvme", "--size", "1GB,2GB"], ["--size must be a size", "got '1GB,2GB'"]),
        (["nvme", "--stall-size", "0"], ["--stall-size must be a size", "got '0'"]),
        (["prefetch", "t.jsonl", "--disk", "0"], ["--disk must be a size", "got '0'"]),
        (["core", "--records", f"{10**12}"], ["--records 272.8 TiB would need", "choose smaller sizes"]),
        (["core", "--pages", f"{10**12}"], ["--pages 272.8 TiB would need", "choose smaller sizes"]),
        (
            ["arena", "--device", "cpu", "--size", "1PB"],
            ["--size 909.5 TiB would need", "choose smaller sizes"],
        ),
        (
            ["codec", "--synthetic", "--page-size", f"{10**12}"],
            ["out of memory: Unable to allocate", "choose smaller sizes"],
        ),
    ],
)
def test_impossible_measurement_sizes_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], parts: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = here("bench", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    line = result.stderr.splitlines()[-1]
    assert all(part in line for part in parts), line
    assert list(tmp_path.iterdir()) == []


def test_a_disk_is_read_by_as_many_threads_as_a_store_may_have() -> None:
    result = here("bench", "nvme", "--readers", "65")
    assert result.exit_code == 2
    assert "'--readers'" in result.stderr
