"""Tests of damaged archives: the file is refused or the damaged pages are named, and no wrong byte is imported."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from tests.archive.rig import Shelf, exported, imported, run, spoiled
from tests.support import lanes
from tests.support.pages import SPEC, chain
from tierstore.archive import file_format, intake
from tierstore.errors import ArchiveError
from tierstore.nvme import record_format
from tierstore.nvme.record_format import HEAD_NBYTES

BLOCK = HEAD_NBYTES + SPEC.page_nbytes


def flip(raw: bytearray, dice: random.Random) -> None:
    for _ in range(dice.choice([1, 1, 1, 2, 8])):
        raw[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)


def cut_short(raw: bytearray, dice: random.Random) -> None:
    del raw[dice.randrange(len(raw)) :]


def cut_out(raw: bytearray, dice: random.Random) -> None:
    start = dice.randrange(len(raw))
    del raw[start : start + dice.choice([1, 16, 512, 4096])]


def zero(raw: bytearray, dice: random.Random) -> None:
    length = dice.choice([1, 16, 512, 4096])
    start = dice.randrange(len(raw)) // length * length
    raw[start : start + length] = bytes(len(raw[start : start + length]))


def swap(raw: bytearray, dice: random.Random) -> None:
    length = dice.choice([512, 4096])
    one, two = (dice.randrange(len(raw) // length) * length for _ in range(2))
    raw[one : one + length], raw[two : two + length] = raw[two : two + length], raw[one : one + length]


def swap_records(raw: bytearray, dice: random.Random) -> None:
    start = file_format.header_nbytes(bytes(raw[: file_format.PRELUDE_NBYTES]))
    one, two = (start + BLOCK * dice.randrange(8) for _ in range(2))
    raw[one : one + BLOCK], raw[two : two + BLOCK] = raw[two : two + BLOCK], raw[one : one + BLOCK]


def write_over(raw: bytearray, dice: random.Random) -> None:
    start = dice.randrange(len(raw))
    piece = dice.randbytes(dice.choice([1, 16, 512]))
    raw[start : start + len(piece)] = piece


DAMAGES = (flip, cut_short, cut_out, zero, swap, swap_records, write_over)
ROUNDS = lanes.examples(250, 1_000)


def test_damages_are_refused_or_named_and_no_wrong_byte_is_imported(tmp_path: Path) -> None:
    trunk, twig = chain(5), chain(3, "twig")
    source = Shelf.of(trunk, twig)
    exported(tmp_path / "x.tier", source)
    whole = (tmp_path / "x.tier").read_bytes()
    outcomes = {"refused": 0, "partial": 0, "unchanged": 0}

    async def rounds() -> None:
        for number in range(ROUNDS):
            raw = bytearray(whole)
            DAMAGES[number % len(DAMAGES)](raw, random.Random(number))
            path = tmp_path / "damaged.tier"
            path.write_bytes(raw)
            sink = Shelf()
            outcomes[await judged(path, sink, raw)] += 1
            sink.require_right()
            for key, each in sink.records.items():
                assert each.raw == source.records[key].raw

    async def judged(path: Path, sink: Shelf, raw: bytearray) -> str:
        try:
            done = await intake.read_archive(path, sink)
        except ArchiveError:
            assert sink.records == {}
            return "refused"
        if raw == whole:
            assert done.complete
            return "unchanged"
        start = file_format.header_nbytes(whole)
        hurt = {
            item.key
            for item in (await intake.read_contents(path)).items
            if raw[item.offset : item.end] != whole[item.offset : item.end]
        }
        assert start <= min(position for position in range(len(raw)) if raw[position] != whole[position])
        assert {key for key, _ in done.damaged} <= hurt
        assert hurt <= {key for key, _ in done.damaged} | set(done.orphans)
        assert hurt
        assert sink.records.keys() == set(source.records) - hurt - set(done.orphans)
        assert not done.complete
        return "partial"

    run(rounds())
    assert outcomes["refused"] > ROUNDS // 10, outcomes
    assert outcomes["partial"] > ROUNDS // 10, outcomes


def test_damage_to_a_page_loses_only_it_and_its_descendants(tmp_path: Path) -> None:
    trunk, twig = chain(4), chain(2, "twig")
    exported(tmp_path / "x.tier", Shelf.of(trunk, twig))
    items = {item.key: item for item in run(intake.read_contents(tmp_path / "x.tier")).items}
    for position in (0, 20, 4000, 4079, HEAD_NBYTES, BLOCK - 1):

        def change(raw: bytearray, position: int = position) -> bytearray:
            raw[items[trunk[1]].offset + position] ^= 0x10
            return raw

        sink = Shelf()
        done = imported(spoiled(tmp_path / "x.tier", change), sink)
        assert [key for key, _ in done.damaged] == [trunk[1]]
        assert done.orphans == tuple(trunk[2:])
        assert sink.records.keys() == {trunk[0], *twig}
        sink.require_right()


def test_another_record_of_the_same_page_is_not_accepted_as_the_written_one(tmp_path: Path) -> None:
    keys = chain(3)
    exported(tmp_path / "x.tier", Shelf.of(keys))
    offsets = {item.key: item.offset for item in run(intake.read_contents(tmp_path / "x.tier")).items}
    other = Shelf.of(keys).records[keys[1]]
    noise = other.payload.copy()
    noise[0] ^= 1
    for head in (other.head, replace(other.head, parent=None)):

        def change(raw: bytearray, head: record_format.Head = head) -> bytearray:
            start = offsets[keys[1]]
            payload = noise if head.parent else other.payload
            raw[start : start + BLOCK] = record_format.seal(head, payload) + payload.tobytes()
            return raw

        sink = Shelf()
        done = imported(spoiled(tmp_path / "x.tier", change), sink)
        assert done.damaged == ((keys[1], "the record does not match the index"),)
        sink.require_right()


def test_index_with_a_false_parent_imports_no_page(tmp_path: Path) -> None:
    keys = chain(4)
    path = tmp_path / "x.tier"
    exported(path, Shelf.of(keys), keys[2:])  # their predecessors are not in the file
    items = run(intake.read_contents(path)).items
    liar = [items[0]._replace(parent=None), items[1]]
    raw = path.read_bytes()
    start = items[-1].end
    indexed = file_format.index(liar)
    head = raw[: file_format.header_nbytes(raw)]
    path.write_bytes(raw[:start] + indexed + file_format.trailer(head[-16:], start, indexed))
    sink = Shelf()
    done = imported(path, sink)
    assert [key for key, _ in done.damaged] == [keys[2]]
    assert done.orphans == (keys[3],)
    assert sink.records == {}
