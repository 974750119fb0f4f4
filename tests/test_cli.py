"""Tests of the command line's output and exit codes. Each command runs at least once in a separate process."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.support import forked
from tests.support.pages import PATIENCE_S
from tierstore.cli import doctor
from tierstore.cli.app import app
from tierstore.config import config_schema, load_config
from tierstore.keys import page_keys
from tierstore.nvme import direct_io
from tierstore.nvme.tier import NvmeTier
from tierstore.page import PageSpec
from tierstore.store import TierStore
from tierstore.types import PageKey, Tier, Transfer


def tierstore(*arguments: str | Path, answer: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command in this process, where torch is already imported. ``answer`` is its standard input."""
    words = [str(argument) for argument in arguments]
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, words, input=answer)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return subprocess.CompletedProcess(words, result.exit_code, result.stdout, result.stderr)


def tierstore_process(*arguments: str | Path, answer: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command in a separate process. ``answer`` is its standard input."""
    environment = {"COLUMNS": "200", "NO_COLOR": "1"}
    return forked.run(forked.TIERSTORE, *arguments, given=answer, env=environment)


def last_line(result: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(result.stdout.splitlines()[-1])


def test_without_a_command_the_commands_are_listed() -> None:
    result = tierstore_process()
    assert result.returncode == 2
    for command in ("config-schema", "demo", "doctor", "inspect", "verify", "purge"):
        assert command in result.stdout + result.stderr


@pytest.mark.parametrize("arguments", [("nonsense",), ("doctor", "--nonsense")])
def test_unknown_arguments_exit_with_code_2(arguments: tuple[str, ...]) -> None:
    result = tierstore(*arguments)
    assert result.returncode == 2
    assert "nonsense" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("arguments", [("config-schema",), ("config-schema", "--json")])
def test_config_schema_prints_the_schema_and_nothing_else(arguments: tuple[str, ...]) -> None:
    result = (tierstore_process if "--json" in arguments else tierstore)(*arguments)
    assert result.returncode == 0
    assert json.loads(result.stdout) == config_schema()
    assert len(result.stdout.splitlines()) == 1 or "--json" not in arguments


def test_doctor_reports_the_machines_resources(tmp_path: Path) -> None:
    result = tierstore_process("doctor", "--path", tmp_path, "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    report = last_line(result)
    checks = {check["name"]: check for check in report["checks"]}
    assert report["ok"] is True
    assert checks["torch"]["value"].startswith("2.")
    assert checks["disk"]["value"].startswith(str(tmp_path))
    assert {"Python", "host memory", "huge pages", "memlock limit", "LMDB", "O_DIRECT"} <= set(checks)
    assert all(check["why"] for check in report["checks"] if check["state"] != "ok")
    assert list(tmp_path.iterdir()) == []


def test_doctor_shows_the_measured_disk_speed_and_auto_readers(tmp_path: Path) -> None:
    if not direct_io.works(tmp_path):
        pytest.skip("no O_DIRECT here")
    checks = {check.name: check.value for check in doctor.disk_speed(tmp_path)}
    assert re.fullmatch(r"[0-9.]+ GB/s", checks["disk writes"])
    assert re.fullmatch(r"[0-9.]+ GB/s; nvme.readers auto: [1248]", checks["disk reads"])
    assert list(tmp_path.iterdir()) == []


def test_doctor_accepts_a_directory_that_does_not_exist_yet(tmp_path: Path) -> None:
    result = tierstore("doctor", "--path", tmp_path / "a" / "b", "--json")
    assert result.returncode == 0
    disk = next(check for check in last_line(result)["checks"] if check["name"] == "disk")
    assert "does not exist yet" in disk["value"]
    assert list(tmp_path.iterdir()) == []


def test_doctor_fails_where_no_file_can_be_created(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a directory", encoding="utf-8")
    result = tierstore("doctor", "--path", file, "--json")
    assert result.returncode == 1
    assert last_line(result)["failed"] == ["disk", "O_DIRECT"]
    assert file.read_text(encoding="utf-8") == "not a directory"


@pytest.mark.parametrize(
    ("allowed", "value", "state"),
    [
        ("always [madvise] never\n", "madvise", "ok"),
        ("[always] madvise never\n", "always", "ok"),
        ("always madvise [never]\n", "never", "note"),
        ("\n", "unknown", "note"),
    ],
)
def test_doctor_reports_whether_memory_gets_huge_pages(
    allowed: str, value: str, state: str, tmp_path: Path
) -> None:
    file = tmp_path / "enabled"
    file.write_text(allowed, encoding="ascii")
    check = doctor.huge_pages(file)
    assert (check.value, check.state) == (value, state)
    assert state == "ok" or str(file) in check.why


def test_doctor_reports_a_kernel_without_huge_pages(tmp_path: Path) -> None:
    check = doctor.huge_pages(tmp_path / "enabled")
    assert (check.value, check.state) == ("none", "note")
    assert "small pages" in check.why


def test_doctor_suggests_the_cpu_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (check,) = doctor.cuda()
    assert check.state == "note"
    assert "hbm.device must be cpu" in check.why


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("no-such-package-here",))
    monkeypatch.setattr(doctor, "PACKAGES_OF_EXTRAS", {"no-such-package-either": "hf"})
    core, _, optional = doctor.packages()
    assert (core.name, core.state) == ("no-such-package-here", "fail")
    assert (optional.name, optional.state) == ("no-such-package-either", "note")
    assert "tierstore[hf]" in optional.why


FINGERPRINT = "f1" * 32
SHARD = f"{FINGERPRINT}-0"
PAGE_NBYTES = 8192


def keys(count: int) -> tuple[PageKey, ...]:
    return tuple(page_keys(range(count), page_size=1, namespace=b"cli"))


def open_tier(home: Path) -> NvmeTier:
    return NvmeTier.open(
        home,
        capacity=64 << 20,
        fingerprint=FINGERPRINT,
        shard=0,
        page_nbytes=PAGE_NBYTES,
        wake=lambda: None,
        description={"model": "tiny-model@1"},
    )


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return the directory of a closed store with 5 pages."""
    tier = open_tier(tmp_path / "home")
    pages = [np.full(PAGE_NBYTES, value, np.uint8) for value in range(5)]
    slots, parents = tuple(range(5)), (None, *keys(4))
    nbytes = 5 * tier.record_nbytes
    tier.submit_write(Transfer(1, keys(5), Tier.HOST, slots, Tier.NVME, slots, nbytes, parents), pages)
    assert tier.sync(PATIENCE_S)
    assert tier.close(PATIENCE_S)
    return tmp_path / "home"


def flip_a_byte_of_a_page(home: Path) -> None:
    data = home / SHARD / "data.mdb"
    raw = bytearray(data.read_bytes())
    raw[raw.index(bytes([3]) * PAGE_NBYTES) + 100] ^= 1
    data.write_bytes(raw)


@pytest.mark.parametrize("command", ["inspect", "verify", "purge"])
@pytest.mark.parametrize("foreign", ["missing", "not ours"])
def test_foreign_directory_is_refused_and_unchanged(tmp_path: Path, command: str, foreign: str) -> None:
    folder = tmp_path / "folder"
    if foreign == "not ours":
        folder.mkdir()
        (folder / "letter.txt").write_text("dear", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    result = tierstore(command, folder, *(["--yes"] if command == "purge" else []), "--json")
    assert result.returncode == 2
    assert str(folder) in last_line(result)["error"]
    assert str(folder) in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_inspect_shows_what_a_directory_holds(home: Path) -> None:
    result = tierstore_process("inspect", home, "--json")
    assert result.returncode == 0, result.stderr
    assert "tiny-model@1" in result.stdout
    (shard,) = last_line(result)["shards"]
    assert (shard["name"], shard["records"], shard["page_nbytes"]) == (SHARD, 5, PAGE_NBYTES)
    assert (shard["fault"], shard["in_use_by"], shard["damaged"]) == (None, None, False)


def test_the_model_of_a_store_is_in_the_table_and_an_empty_directory_is_called_empty(tmp_path: Path) -> None:
    spec = PageSpec(
        num_layers=1, page_size=4, num_kv_heads=1, head_dim=8, dtype="float32", model="my-model@7"
    )
    path = tmp_path / "store"
    config = {
        "hbm": {"capacity": "64KiB", "device": "cpu"},
        "host": {"capacity": "64KiB"},
        "nvme": {"path": path, "capacity": "8MiB"},
    }
    TierStore.open(load_config(config), spec).close()
    told = tierstore("inspect", path).stdout
    for word in ("my-model@7", "float32", "none"):
        assert word in told
    config["nvme"] = {"path": path, "capacity": "8MiB", "codec": "int8+zstd"}
    TierStore.open(load_config(config), spec).close()
    result = tierstore("inspect", path, "--json")
    assert "int8+zstd" in result.stdout.splitlines()[-2]
    assert last_line(result)["shards"][0]["codec"] == "int8+zstd"
    (tmp_path / "empty").mkdir()
    result = tierstore("inspect", tmp_path / "empty")
    assert result.returncode == 2
    assert "is empty" in result.stderr


def test_inspect_shows_the_name_of_a_model_stored_under_a_digest(tmp_path: Path) -> None:
    """Open a store whose ``model`` is a weight digest, as in the transformers adapter, with and without ``name``."""
    path, digest = tmp_path / "store", "3fa4" + "0" * 60
    config = load_config(
        {"hbm": {"capacity": "64KiB", "device": "cpu"}, "nvme": {"path": path, "capacity": "8MiB"}}
    )

    def shown(**more: str) -> str:
        spec = PageSpec(num_layers=1, page_size=4, num_kv_heads=1, head_dim=8, dtype="float32", model=digest)
        TierStore.open(config, spec, **more).close()  # type: ignore[arg-type]
        return tierstore("inspect", path).stdout

    assert digest[:12] in shown()
    told = shown(name="smollm2")
    assert "smollm2, weights 3fa400000000" in told
    assert digest not in told
    assert "smollm2, weights" in shown()  # the name is kept if a later opening gives none
    assert "tiny, weights 3fa4" in shown(name="tiny")
    with pytest.raises(TypeError, match="name must be a string, got 7"):
        shown(name=7)  # type: ignore[arg-type]


@pytest.mark.parametrize("columns", [80, 200])
def test_a_long_model_name_is_cut_to_one_line_and_leaves_space_for_the_other_columns(
    tmp_path: Path, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = json.dumps({f"setting_{number}": [number] * 4 for number in range(200)}, indent=1)
    spec = PageSpec(num_layers=1, page_size=4, num_kv_heads=1, head_dim=8, dtype="float32", model=model)
    path = tmp_path / "store"
    config = {
        "hbm": {"capacity": "64KiB", "device": "cpu"},
        "nvme": {"path": path, "capacity": "8MiB"},
    }
    TierStore.open(load_config(config), spec).close()
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = CliRunner().invoke(app, ["inspect", str(path), "--json"])
    assert shown.exit_code == 0
    *table, line = shown.stdout.splitlines()
    shard = json.loads(line)["shards"][0]
    assert shard["description"]["groups"][0]["model"] == model
    name = shard["fingerprint"][:12] + "-0"
    (row,) = (told for told in table if told.strip().startswith(f"{name} "))
    assert row.split()[-1] == "closed"
    (told,) = (told for told in table if '{ "setting' in told)
    assert name in told
    assert len(table) <= 5


def test_inspect_names_the_process_that_uses_a_directory(home: Path) -> None:
    tier = open_tier(home)
    try:
        result = tierstore_process("inspect", home, "--json")
    finally:
        assert tier.close(PATIENCE_S)
    assert result.returncode == 0, result.stderr
    assert last_line(result)["shards"][0]["in_use_by"] == os.getpid()


def test_verify_reads_every_record(home: Path) -> None:
    result = tierstore_process("verify", home, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    report = last_line(result)
    assert (report["ok"], report["checked"], report["bad"]) == (True, 5, 0)


def test_verify_names_the_damaged_record(home: Path) -> None:
    flip_a_byte_of_a_page(home)
    result = tierstore("verify", home, "--json")
    assert result.returncode == 1
    report = last_line(result)
    assert (report["ok"], report["checked"], report["bad"]) == (False, 5, 1)
    assert report["shards"][0]["bad"][0][0] == keys(5)[3].hex()
    assert keys(5)[3].hex() in result.stdout.splitlines()[1]


def test_verify_fails_for_a_directory_in_use(home: Path) -> None:
    tier = open_tier(home)
    try:
        result = tierstore_process("verify", home, "--json")
    finally:
        assert tier.close(PATIENCE_S)
    assert result.returncode == 1
    assert str(os.getpid()) in last_line(result)["shards"][0]["skipped"]


@contextmanager
def only_to_be_read(home: Path) -> Iterator[None]:
    """Within the block, make a directory read-only, as on a read-only medium. Privileged users can still write."""
    paths = [home, *home.rglob("*")]
    before = [path.stat().st_mode for path in paths]
    for path, mode in zip(paths, before, strict=True):
        path.chmod(mode & ~0o222)
    try:
        yield
    finally:
        for path, mode in zip(paths, before, strict=True):
            path.chmod(mode)


def unprivileged(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command without the privilege to override file permissions, even if the tests run as root."""
    drop = (
        "import ctypes; libc = ctypes.CDLL(None)\n"
        "header = (ctypes.c_uint32 * 2)(0x20080522, 0)\n"  # version 3, this process
        "sets = (ctypes.c_uint32 * 6)()\n"  # effective, permitted and inheritable: bits 0-31, then 32-63
        "assert libc.capget(header, sets) == 0\n"
        "sets[0] &= ~2; sets[1] &= ~2; sets[2] &= ~2\n"  # CAP_DAC_OVERRIDE
        "assert libc.capset(header, sets) == 0\n"
    )
    return forked.run(drop + forked.TIERSTORE, *arguments)


@pytest.mark.parametrize("locked_before", [True, False])
def test_read_only_directory_is_inspected_and_verified(home: Path, locked_before: bool) -> None:
    if not locked_before:  # as if the directory had been copied without its lock file
        (home / f"{SHARD}.lock").unlink()
    before = sorted(home.rglob("*"))
    with only_to_be_read(home):
        shown, verified = (unprivileged(command, home, "--json") for command in ("inspect", "verify"))
        assert (shown.returncode, last_line(shown)["shards"][0]["records"]) == (0, 5), shown.stderr
        assert (verified.returncode, last_line(verified)["checked"]) == (0, 5), verified.stderr
        purged = unprivileged("purge", home, "--yes", "--json")
    assert purged.returncode == 2
    assert purged.stderr == f"tierstore: {home / SHARD}.lock: Permission denied\n"
    assert sorted(home.rglob("*")) == before


def test_verify_fails_for_a_read_only_directory_in_use(home: Path) -> None:
    tier = open_tier(home)
    try:
        with only_to_be_read(home):
            result = unprivileged("verify", home, "--json")
    finally:
        assert tier.close(PATIENCE_S)
    assert result.returncode == 1
    assert str(os.getpid()) in last_line(result)["shards"][0]["skipped"]


@pytest.mark.parametrize("answer", ["n\n", "\n", "what?\n"])
def test_purge_removes_nothing_without_confirmation(home: Path, answer: str) -> None:
    result = tierstore("purge", home, "--json", answer=answer)
    assert result.returncode == 1
    assert "Remove 'all'" in result.stderr
    assert last_line(result) == {"removed": [], "freed_nbytes": 0, "kept": []}
    assert (home / SHARD / "data.mdb").exists()


def test_purge_without_a_terminal_names_the_option_that_it_needs(home: Path) -> None:
    result = tierstore_process("purge", home, "--json", answer="")
    assert result.returncode == 2
    question, why = result.stderr.splitlines()
    assert question.startswith("Remove 'all'")
    assert (
        why
        == "tierstore: cannot ask for confirmation: standard input is closed; use --yes to remove without asking"
    )
    assert last_line(result) == {"error": why.removeprefix("tierstore: ")}
    assert (home / SHARD / "data.mdb").exists()


@pytest.mark.parametrize(
    ("options", "answer"), [(["--yes"], ""), ([], "y\n"), (["--yes", "--which", "f1f1"], "")]
)
def test_purge_removes_what_the_store_wrote_and_nothing_else(
    home: Path, options: list[str], answer: str
) -> None:
    (home / "letter.txt").write_text("dear", encoding="utf-8")
    result = tierstore("purge", home, *options, "--json", answer=answer)
    assert result.returncode == 0, result.stderr
    assert last_line(result)["removed"] == [SHARD]
    assert last_line(result)["freed_nbytes"] >= 5 * PAGE_NBYTES
    assert not (home / SHARD).exists()
    assert (home / "letter.txt").read_text(encoding="utf-8") == "dear"


def test_purge_of_another_fingerprint_or_damage_keeps_intact_directories(home: Path) -> None:
    for which, code in (("e0", 1), ("damaged", 0)):
        result = tierstore("purge", home, "--yes", "--which", which, "--json")
        assert (result.returncode, last_line(result)["removed"]) == (code, [])
        assert ("no fingerprint" in result.stderr) == (which == "e0")
    assert tierstore("purge", home, "--yes", "--which", "").returncode == 2
    assert tierstore("verify", home).returncode == 0


def test_purge_keeps_what_is_in_use(home: Path) -> None:
    tier = open_tier(home)
    try:
        result = tierstore_process("purge", home, "--yes", "--json")
    finally:
        assert tier.close(PATIENCE_S)
    assert result.returncode == 1
    assert last_line(result)["removed"] == []
    assert str(os.getpid()) in last_line(result)["kept"][0][1]
    assert tierstore("verify", home).returncode == 0
