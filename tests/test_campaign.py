"""Test that small campaigns report no faults, and that they find every planted fault.

Also tests which pages a campaign expects after a kill.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tests.campaign.__main__ import main
from tests.campaign.children import Child, Failed, Say
from tests.campaign.damage import PLANTS as DAMAGE_PLANTS
from tests.campaign.kill import Kills
from tests.campaign.ledger import Ledger
from tests.campaign.regions import BLOCK, DATA, tree_regions
from tests.campaign.survivor import Ordeal, prepare
from tests.campaign.turns import PLANTS, Subject
from tests.nvme.rig import data_file

pytestmark = pytest.mark.deep


@pytest.fixture(autouse=True)
def _kept_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make campaigns create their directories in the test's folder, because they keep some of them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def play(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    """Run a campaign and return its summary. Assert that its exit status agrees with the summary."""
    status = main([*arguments, "--json"])
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(summary, dict)
    assert (status == 0) == summary["ok"]
    return summary


MODES = [
    ("tier", "lmdb", "none"),
    ("tier", "lmdb", "exp"),
    ("tier", "extents", "none"),
    ("tier", "extents", "exp"),
    ("store", "lmdb", "none"),
    ("store", "extents", "none"),
]


@pytest.mark.parametrize(("level", "payload", "codec"), MODES)
def test_kills_leave_every_guarantee_intact(
    level: str, payload: str, codec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--level", level, "--payload", payload, "--codec", codec, "--turns", "6", "--seed", "5"]
    summary = play(capsys, "kill", *arguments)
    assert summary["faults"] == []
    assert summary["turns"] == 6
    assert summary["pages compared"]
    assert summary["directories filled"] == 1


@pytest.mark.parametrize("level", ["tier", "store"])
@pytest.mark.parametrize("plant", PLANTS)
def test_false_report_of_the_victim_is_found(
    level: str, plant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = play(
        capsys,
        "kill",
        "--level",
        level,
        "--payload",
        "extents",
        "--turns",
        "12",
        "--plant",
        plant,
        "--seed",
        "3",
    )
    assert summary["faults"]
    assert plant != "stale" or summary["wrong_bytes"]


@pytest.mark.parametrize(("payload", "codec"), [(p, c) for p in ("lmdb", "extents") for c in ("none", "exp")])
def test_damage_loses_only_pages_and_is_counted(
    payload: str, codec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--payload", payload, "--codec", codec, "--damages", "500", "--seed", "5"]
    summary = play(capsys, "damage", *arguments)
    assert summary["faults"] == []
    assert summary["damages"] == 500
    assert summary["damaged pages counted"]
    assert summary["directories set aside"]


@pytest.mark.parametrize("plant", DAMAGE_PLANTS)
def test_survivor_that_serves_damage_or_crashes_is_found(
    plant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = play(capsys, "damage", "--damages", "500", "--plant", plant, "--seed", "1")
    assert summary["faults"]
    assert (summary["wrong_bytes"] != 0) == (plant == "unchecked")
    assert (summary["signals"] != 0) == (plant == "signal")


def act(say: Say, turn: object) -> None:
    """Report that a write begins, then raise an error, as a failing victim does."""
    say("begin")
    raise AssertionError("nothing to do")


def look(say: Say, *_: object) -> None:
    """Do nothing. This is never called, because the victim fails."""


def fill(say: Say, subject: Subject, home: Path, *_: object) -> None:
    """Report that only 8 pages fit into the used directory, but 10 into a new one."""
    home.mkdir()
    say("10 10 5 0" if home.name.endswith("-new") else "8 8 5 0")


class Broken:
    """A level whose victim fails and whose directories leak space."""

    act = staticmethod(act)
    look = staticmethod(look)
    fill = staticmethod(fill)


def test_a_victim_that_fails_and_leaked_space_are_found(tmp_path: Path) -> None:
    kills = Kills(Broken(), tmp_path, payload="extents", codec="none", seed=1)
    kills.play(1, lambda done: None)
    first, second = kills.faults
    assert first.endswith("AssertionError: nothing to do")
    assert "8 pages fit after the turns, but 10 fit into a new directory" in second


def test_child_process_errors_and_output_are_returned(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="nothing to do"):
        Child(act, None).end()
    assert Child(fill, None, tmp_path / "x").end() == ["8 8 5 0"]


def heard(*lines: str, there: dict[int, int] | None = None) -> Ledger:
    ledger = Ledger()
    ledger.settle((there or {}).items())
    for line in lines:
        ledger.hear(line)
    return ledger


@pytest.mark.parametrize(
    ("lines", "allowed"),
    [
        ((), {7: {1}}),
        (("write 2 7",), {7: {1, 2}}),
        (("write 2 7", "synced 1"), {7: {2}}),
        (("write 2 7", "synced 1", "erase 7"), {7: {2, None}}),
        (("write 2 7", "erase 7", "synced 2"), {7: {None}}),
        (("write 2 7 8", "synced 2", "write 3 8"), {7: {2}, 8: {2, 3}}),
        (("write 2 7", "synced 0"), {7: {1, 2}}),
        (("write 2 7", "failed 2 7"), {7: {1, 2, None}}),
        (("write 2 7", "failed 2 7", "synced 1"), {7: {None}}),
        (("write 2 7", "failed 2 7", "write 3 7", "synced 2"), {7: {3}}),
        (("begin", "open"), {7: {1}}),
    ],
)
def test_expected_hits_follow_from_the_reported_puts(
    lines: tuple[str, ...], allowed: dict[int, set[int | None]]
) -> None:
    assert heard(*lines, there={7: 1}).allowed(may_drop=False) == allowed


def test_expected_hits_with_less_space() -> None:
    assert heard(there={7: 1}).allowed(may_drop=True) == {7: {1, None}}
    assert heard("write 2 7", there={7: 1}).allowed(may_drop=False, may_fail=True) == {7: {1, 2, None}}
    settled = heard("write 2 7", "synced 1", there={7: 1})
    assert settled.allowed(may_drop=False, may_fail=True) == {7: {2}}
    settled.settle([])
    assert settled.allowed(may_drop=False) == {7: {None}}  # the page was missing once, and must not return
    assert settled.history == {7: {2}}


@pytest.mark.parametrize("payload", ["lmdb", "extents"])
def test_every_page_of_the_catalogue_file_is_in_one_region(payload: str, tmp_path: Path) -> None:
    ordeal = Ordeal(
        subject=Subject(codec="none", page_nbytes=8192, space=240),
        home=tmp_path / "home",
        payload=payload,
        capacity=8 << 20,
        seed=1,
        there={},
        history={},
    )
    told = json.loads(Child(prepare, ordeal).end()[-1])
    raw = data_file(ordeal.home).read_bytes()
    inline = {
        at // BLOCK + block
        for name, at, length in told["records"].values()
        if name == DATA
        for block in range(1 + length // BLOCK)
    }
    regions = tree_regions(raw, inline)
    assert {"meta pages", "names", "catalogue", "free list", "stale"} <= regions.keys()
    assert ("pages" in regions) == (payload == "lmdb")
    numbers = sorted([*inline, *(span.offset // BLOCK for spans in regions.values() for span in spans)])
    assert numbers == list(range(len(raw) // BLOCK))
