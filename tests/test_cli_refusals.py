"""What a command cannot do is one line: what was given, what was found, what is allowed; and nothing was changed."""

from __future__ import annotations

import os
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from typer.testing import CliRunner, Result

from tests.test_cli import last_line, tierstore
from tests.test_cli_archive import filled
from tierstore.cli.app import app
from tierstore.cli.output import finite
from tierstore.demo import command as demo_room
from tierstore.demo import model as model_room
from tierstore.demo.model import GEMMA3, KNOWN, SMOLLM2, KnownModel, ModelError, Say, model_folder, short_name
from tierstore.errors import ConfigError
from tierstore.plan.geometry import read_model


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
            (f"{tmp_path} is a directory, not a file name",),
        ),
        (
            ["export", "--config", config, "--all", pipe],
            (f"OUT {pipe} is a device, pipe or socket, not a file name",),
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
def test_a_known_model_goes_by_its_short_and_by_its_own_name_in_every_command(
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
    # The table of `plan` and `replay` knows them by the same names, and means the same model.
    geometry = read_model(name)
    assert geometry.name.lower() in KNOWN[short].name.lower()


def test_a_known_models_own_name_is_that_of_the_folder_it_is_prepared_in() -> None:
    assert {short_name(known.name) for known in KNOWN.values()} == set(KNOWN)
    assert tuple(KNOWN.values()) == (SMOLLM2, GEMMA3)


def test_a_folder_goes_before_a_known_models_long_name(
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
        "--model nomodel: no such folder, and not a known model: smollm2 (SmolLM2-135M-Instruct), gemma3"
        in said
    )


@pytest.mark.parametrize("command", [["demo"], ["compare"], ["bench", "codec"], ["bench", "hints"]])
def test_texts_that_are_not_there_are_named_before_a_model_is_fetched(
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


def test_texts_for_hints_are_files(tmp_path: Path) -> None:
    result = here("bench", "hints", "--model", "smollm2", "--docs", tmp_path)
    require_refused(result, f"--docs {tmp_path} is a folder, expected text files")


def test_plan_and_replay_list_what_they_know() -> None:
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
    assert "--loss-class must be one of exact, got 'int8'" in last_line(result)["error"]


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
def test_what_is_no_size_is_named_with_its_option(words: list[str]) -> None:
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
        (["nvme", "--page-sizes", "3B"], ["--page-sizes must be multiples of 4096 bytes", "got '3B'"]),
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
def test_sizes_of_a_measurement_that_cannot_be_are_one_line(
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
