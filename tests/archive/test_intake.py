"""Test reading an archive: pages are imported exactly as written, and bad files and pages are refused and named."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.archive.rig import (
    DESCRIPTION,
    Shelf,
    archive,
    cancelled_at,
    exported,
    imported,
    record,
    run,
    spoiled,
)
from tests.support.pages import SPEC, chain
from tierstore.archive import file_format, intake
from tierstore.archive.source_sink import Taken
from tierstore.errors import ArchiveError
from tierstore.nvme.reader import Record
from tierstore.page import PageLayout, PageSpec


def test_tree_of_pages_is_imported_completely(tmp_path: Path) -> None:
    trunk = chain(4)
    source = Shelf.of(trunk, chain(3, "other"))
    for name in "ab":
        source.records[chain(1, name)[0]] = record(chain(1, name)[0], trunk[2])
    exported(tmp_path / "x.tier", source, list(reversed(source.records)))
    sink = Shelf()
    done = imported(tmp_path / "x.tier", sink)
    assert (done.pages, done.present, done.complete) == (9, 0, True)
    assert sink.records.keys() == source.records.keys()
    sink.require_right()
    for key, each in sink.records.items():
        assert each.raw == source.records[key].raw


def test_importing_again_changes_nothing_and_replaces_no_page(tmp_path: Path) -> None:
    path, keys = archive(tmp_path / "x.tier")
    sink = Shelf.of(keys[:2])
    before = dict(sink.records)
    done = imported(path, sink)
    assert (done.pages, done.present, done.complete) == (4, 2, True)
    assert all(sink.records[key] is before[key] for key in before)
    again = imported(path, sink)
    assert (again.pages, again.present, again.complete) == (0, 6, True)
    sink.require_right()


def test_page_without_its_parent_and_its_descendants_are_orphans(tmp_path: Path) -> None:
    keys = chain(6)
    exported(tmp_path / "x.tier", Shelf.of(keys), keys[3:])
    empty = Shelf()
    done = imported(tmp_path / "x.tier", empty)
    assert (done.pages, done.orphans, done.complete) == (0, tuple(keys[3:]), False)
    assert empty.records == {}
    before_it = Shelf.of(keys[:3])
    assert imported(tmp_path / "x.tier", before_it).complete
    before_it.require_right()


def test_page_after_a_present_but_unreachable_page_is_not_imported(tmp_path: Path) -> None:
    keys = chain(6)
    exported(tmp_path / "x.tier", Shelf.of(keys), keys[3:])
    sink = Shelf()
    sink.records[keys[2]] = record(keys[2], keys[1])
    done = imported(tmp_path / "x.tier", sink)
    assert (done.pages, done.orphans) == (0, tuple(keys[3:]))


def test_pages_after_a_gap_that_the_file_closes_are_taken(tmp_path: Path) -> None:
    path, keys = archive(tmp_path / "x.tier")
    sink = Shelf()
    for i in (2, 3):
        sink.records[keys[i]] = record(keys[i], keys[i - 1])
    done = imported(path, sink)
    assert (done.pages, done.present, done.complete) == (4, 2, True)
    sink.require_right()


def test_a_full_store_takes_the_first_pages_and_reports_the_rest_as_not_fitting(tmp_path: Path) -> None:
    path, keys = archive(tmp_path / "x.tier")
    sink = Shelf(room=4)
    done = imported(path, sink)
    assert (done.pages, done.no_room, done.complete) == (4, tuple(keys[4:]), False)
    sink.require_right()


def test_small_batches_import_the_same_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "_BATCH_PAGES", 2)
    path, keys = archive(tmp_path / "x.tier", 7)
    for room in range(8):
        sink = Shelf(room=room)
        done = imported(path, sink)
        assert (done.pages, done.no_room) == (room, tuple(keys[room:]))
        sink.require_right()


def test_a_page_that_its_store_cannot_decode_is_damaged_and_its_children_are_orphans(tmp_path: Path) -> None:
    trunk, twig = chain(4), chain(2, "twig")
    source = Shelf.of(trunk, twig)

    class Picky(Shelf):
        def take(self, records: Sequence[Record]) -> Taken:
            for number, each in enumerate(records):
                if each.head.key == trunk[1]:
                    return Taken(number, "cannot be decoded")
                super().take([each])
            return Taken(len(records))

    exported(tmp_path / "x.tier", source)
    sink = Picky()
    done = imported(tmp_path / "x.tier", sink)
    assert done.damaged == ((trunk[1], "cannot be decoded"),)
    assert set(done.orphans) == set(trunk[2:])
    assert sink.records.keys() == {trunk[0], *twig}
    sink.require_right()


def test_a_page_evicted_before_the_end_is_not_counted_as_present(tmp_path: Path) -> None:
    path, keys = archive(tmp_path / "x.tier")

    class Leaky(Shelf):
        def take(self, records: Sequence[Record]) -> Taken:
            taken = super().take(records)
            del self.records[keys[-1]]
            return taken

    done = imported(path, Leaky())
    assert (done.pages, done.no_room, done.complete) == (5, (keys[-1],), False)


# -- files that are refused -------------------------------------------------------------------------------------


def empty(raw: bytearray) -> bytes:
    return b""


def zipped(raw: bytearray) -> bytes:
    return b"PK\x03\x04" + bytes(5000)


def pickled(raw: bytearray) -> bytes:
    return b"\x80\x04cposix\nsystem\n." * 100


def halved(raw: bytearray) -> bytearray:
    return raw[: len(raw) // 2]


def cut(raw: bytearray) -> bytearray:
    return raw[:-1]


def grown(raw: bytearray) -> bytearray:
    return raw + b"x"


def newer(raw: bytearray) -> bytearray:
    raw[8] = 2
    return raw


def end_of_another(raw: bytearray) -> bytearray:
    return raw[:100] + raw[101:]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (empty, "not a page archive"),
        (zipped, "not a page archive"),
        (pickled, "not a page archive"),
        (cut, "truncated"),
        (grown, "truncated"),
        (halved, "truncated"),
        (newer, r"in format version 2, but this TierStore reads version 1"),
        (end_of_another, "damaged"),
    ],
)
def test_an_incomplete_archive_is_refused_by_name(
    tmp_path: Path, change: Callable[[bytearray], bytes], why: str
) -> None:
    path, _ = archive(tmp_path / "x.tier")
    sink = Shelf()
    with pytest.raises(ArchiveError, match=rf"spoiled\.tier: .*{why}"):
        imported(spoiled(path, change), sink)
    assert sink.records == {}


def test_missing_file_raises_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        imported(tmp_path / "x.tier", Shelf())


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (replace(SPEC, model="other"), "the model of its pages is 'test', but this store needs 'other'"),
        (replace(SPEC, page_size=8), "the page_size of its pages is 4, but this store needs 8"),
        (
            replace(SPEC, dtype="bfloat16"),
            "the dtype of its pages is 'float16', but this store needs 'bfloat16'",
        ),
        (replace(SPEC, num_layers=3), "the num_layers of its pages is 2, but this store needs 3"),
        (replace(SPEC, shard=1), "the shard of its pages is 0, but this store needs 1"),
        (replace(SPEC, model="other", page_size=8), "the model of its pages"),
    ],
)
def test_pages_of_another_model_are_refused_with_what_was_found_and_what_is_allowed(
    tmp_path: Path, spec: PageSpec, why: str
) -> None:
    path, _ = archive(tmp_path / "x.tier")
    sink = Shelf(file_format.Description(PageLayout.of(spec)))
    with pytest.raises(ArchiveError, match=why):
        imported(path, sink)
    assert sink.records == {}


def test_other_groups_schemes_and_losses_are_refused(tmp_path: Path) -> None:
    path, _ = archive(tmp_path / "x.tier")
    two = PageLayout.of([SPEC, replace(SPEC, group=1)])
    for description, why in (
        (file_format.Description(two), "the number of KV groups of its pages is 1, but this store needs 2"),
        (
            replace(DESCRIPTION, key_scheme="tierstore-keys-2"),
            "the key scheme of its pages is 'tierstore-keys-1'",
        ),
        (
            replace(DESCRIPTION, loss_class="int8"),
            "the loss class of its pages is 'exact', but this store needs 'int8'",
        ),
    ):
        with pytest.raises(ArchiveError, match=why):
            imported(path, Shelf(description))


def test_record_of_an_unknown_codec_is_one_damaged_page(tmp_path: Path) -> None:
    keys = chain(3)
    source = Shelf.of(keys)
    raw = bytearray(source.records[keys[1]].raw)
    raw[10] = 77
    source.records[keys[1]] = source.records[keys[1]]._replace(raw=bytes(raw))
    exported(tmp_path / "x.tier", source)
    done = imported(tmp_path / "x.tier", Shelf())
    assert [key for key, _ in done.damaged] == [keys[1]]
    assert (done.pages, done.orphans) == (1, (keys[2],))


# -- cancellation and reads that fail ---------------------------------------------------------------------------


def test_cancelled_import_keeps_whole_pages_with_all_their_ancestors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "_BATCH_PAGES", 1)
    path, _ = archive(tmp_path / "x.tier", 4)

    waits, sink, kept = 0, Shelf(), set()
    while cancelled_at(waits + 1, intake.read_archive(path, sink)) is None:
        sink.require_right()
        kept.add(len(sink.records))
        waits, sink = waits + 1, Shelf()
    assert kept == {0, 1, 2, 3, 4}
    assert waits >= 2 * 4 + 1 + 4  # at least: header and index, the first page, each batch
    sink.require_right()
    assert len(sink.records) == 4


def test_a_page_that_the_disk_cannot_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, keys = archive(tmp_path / "x.tier", 4)
    bad = run(intake.read_contents(path)).items[2]

    read = os.preadv

    def fails(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == bad.offset:
            raise OSError(5, os.strerror(5))
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fails)
    sink = Shelf()
    done = imported(path, sink)
    assert [key for key, _ in done.damaged] == [keys[2]]
    assert "Input/output" in done.damaged[0][1]
    assert done.orphans == (keys[3],)
    sink.require_right()
