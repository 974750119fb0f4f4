"""Run the soak test for a few seconds, to test that its clients work and that it reports faults."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Set
from pathlib import Path

import pytest

from tests.soak.__main__ import main
from tests.soak.account import Account, WrongBytes
from tests.soak.client import WRONG, Role, run
from tests.soak.damage import DAMAGES, Vandal
from tests.soak.faults import PROFILES
from tests.soak.own import SECRETS, OwnClient
from tests.soak.parent import CLIENT_GROWS, Soak, soak
from tests.soak.playing import Ending
from tests.support import pages
from tests.support.pages import fill

pytestmark = pytest.mark.deep

EXPECTED_FAULTS: dict[str, set[str]] = {
    "none": set(),
    "delays": {"delayed", "late acks"},
    "failures": {"pages failed"},
    "disk": {"write error", "write error after writing"},
    "full": {"disk full"},
    "lost": {"acks lost"},
    "all": {"delayed", "late acks", "pages failed", "disk full"},
}


def play(
    home: Path, kind: str, profile: str, capsys: pytest.CaptureFixture[str], until: Set[str] = frozenset()
) -> dict[str, dict[str, int]]:
    """Run a client to completion in this process, and return the last counts that it reported."""
    role = Role(kind=kind, profile=profile, seed=7, seconds=0.3)
    capsys.readouterr()
    assert run(role, home, until) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert said[-1]["closed"] is True
    counts: dict[str, dict[str, int]] = said[-2]["counts"]
    assert counts["actions"]
    return counts


@pytest.mark.parametrize("profile", PROFILES)
def test_a_client_meets_the_faults_of_its_profile_and_ends(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = EXPECTED_FAULTS[profile]
    met = play(tmp_path, "own", profile, capsys, expected).get("faults", {})
    assert met.keys() >= expected
    if profile == "none":
        assert not met


def test_every_kind_of_client_reads_back_what_another_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("own", "forks", "engine", "alone"):
        writes = "engine: put" if kind == "engine" else "write"
        counts = play(tmp_path, kind, "none", capsys, {writes})
        assert kind == "own" or counts["pages"]["read back"] > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "STEADY", None)  # a client sets this in its own process
        play(tmp_path, "encoded", "none", capsys, {"write"})
        assert play(tmp_path, "encoded", "failures", capsys)["pages"]["read back"] > 0
    play(tmp_path, "llama", "none", capsys, {"llama: request"})
    assert play(tmp_path, "llama", "failures", capsys)["pages"]["read back"] > 0


@pytest.mark.parametrize("name", [*DAMAGES, "strange files"])
def test_after_any_damage_the_next_client_opens_and_plays(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play(tmp_path, "alone", "none", capsys)
    vandal = Vandal(tmp_path, random.Random(1))
    vandal.deal(name)
    assert vandal.strike() == name
    play(tmp_path, "alone", "none", capsys)
    assert vandal.look() is None


def test_a_foreign_file_that_disappeared_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play(tmp_path, "alone", "none", capsys)
    vandal = Vandal(tmp_path, random.Random(1))
    vandal.deal("strange files")
    vandal.strike()
    next(tmp_path.glob("strange-*")).unlink()
    assert "not left alone" in (vandal.look() or "")


def test_a_memory_only_page_offered_after_a_restart_is_noticed(tmp_path: Path) -> None:
    first = OwnClient(tmp_path, 1, Account())
    slots = first.bench.store.allocate(1)
    fill(first.bench.store, SECRETS[0], slots)
    first.bench.store.put(SECRETS[0], slots)
    first.bench.close()
    second = OwnClient(tmp_path, 1, Account())
    with pytest.raises(WrongBytes, match="memory-only"):
        second.read_back()
    second.bench.close()


def test_a_wrong_byte_is_noticed_by_the_client_and_by_the_parent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a failed run keeps its directory
    role = Role(kind="own", profile="none", seed=5, seconds=0.3, plant=True)
    assert run(role, tmp_path / "one") == WRONG
    assert main(["--minutes", "0.01", "--seed", "77", "--seconds", "0.5", "--plant"]) == 1
    out, err = capsys.readouterr()
    summary = json.loads(out.splitlines()[-1])
    assert summary["seed"] == 77
    assert summary["wrong_bytes"] == len(summary["failed"]) == 1
    assert f"--seed {summary['failed'][0]['seed']}" in err
    assert "wrong bytes in page" in err


@pytest.mark.parametrize(
    ("ending", "ok"),
    [
        (Ending("killed"), True),
        (Ending("closed", rss={"start": 1, "end": CLIENT_GROWS}), True),
        (Ending("closed", rss={"start": 1, "end": CLIENT_GROWS + 2}), False),
        (Ending("hang", "exit status -9"), False),
        (Ending("failed", "exit status -11"), False),
    ],
)
def test_the_ending_of_a_client_decides_whether_the_soak_passes(
    ending: Ending, ok: bool, tmp_path: Path
) -> None:
    game = Soak(tmp_path, 1, 1.0, plant=False)
    game.add(Role(kind="own", profile="none", seed=1, seconds=1.0), ending)
    assert game.summary()["ok"] is ok


def test_a_short_soak_counts_its_clients() -> None:
    summary = soak(minutes=0.01, seconds=0.5, seed=3, least=3)
    assert summary["ok"] is True
    assert summary["clients"] == 4  # three, and the one that runs as long as the soak
