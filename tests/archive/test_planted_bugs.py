"""Test that each bug planted in the archive package is noticed by the test that covers the broken behaviour."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.archive import (
    test_atomic_file,
    test_closed_store,
    test_damages,
    test_export,
    test_file_format,
    test_intake,
)
from tests.support.planting import Bug, install
from tierstore.archive import atomic_file, closed_store, export, file_format, intake, source_sink

pytestmark = pytest.mark.deep

Check = Callable[[Path, pytest.MonkeyPatch], None]


def bits(path: Path, patch: pytest.MonkeyPatch) -> None:
    test_file_format.test_every_flipped_bit_of_header_index_and_trailer_is_detected()


def damages(path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(test_damages, "ROUNDS", 1_000)
    test_damages.test_damages_are_refused_or_named_and_no_wrong_byte_is_imported(path)


def spliced(path: Path, patch: pytest.MonkeyPatch) -> None:
    test_damages.test_another_record_of_the_same_page_is_not_accepted_as_the_written_one(path)


def lied_about(path: Path, patch: pytest.MonkeyPatch) -> None:
    test_damages.test_index_with_a_false_parent_imports_no_page(path)


def again(path: Path, patch: pytest.MonkeyPatch) -> None:
    test_intake.test_importing_again_changes_nothing_and_replaces_no_page(path)


def trouble(path: Path, patch: pytest.MonkeyPatch) -> None:
    test_export.test_failure_at_any_write_leaves_no_draft_and_keeps_the_old_file(
        path, patch, test_export.full, OSError, after=False
    )


def pieces(path: Path, patch: pytest.MonkeyPatch) -> None:
    test_atomic_file.test_pieces_of_any_length_are_written_as_given(path, patch, test_atomic_file.as_it_is)


def longer(path: Path, patch: pytest.MonkeyPatch) -> None:
    test_atomic_file.test_old_bytes_beyond_the_end_of_the_file_are_cut(path, patch)


def killed(path: Path, patch: pytest.MonkeyPatch) -> None:
    test_export.test_draft_of_a_killed_writer_is_removed_by_the_next(path)


def two_writers(path: Path, patch: pytest.MonkeyPatch) -> None:
    test_export.test_second_writer_of_a_file_is_refused(path)


def one_after_the_other(path: Path, patch: pytest.MonkeyPatch) -> None:
    test_export.test_writer_starting_as_another_commits_does_not_write_into_its_file(path, patch)


def synced(path: Path, patch: pytest.MonkeyPatch) -> None:
    test_export.test_a_sync_that_fails_leaves_nothing(path, patch)


def waited(path: Path, patch: pytest.MonkeyPatch) -> None:
    test_export.test_cancelling_a_call_in_a_thread_waits_for_its_end(path)


def no_place(path: Path, patch: pytest.MonkeyPatch) -> None:
    test_closed_store.test_pages_that_find_no_slot_drop_their_successors_too(path, patch)


def budget(path: Path, patch: pytest.MonkeyPatch) -> None:
    test_closed_store.test_import_keeps_the_budget_and_reports_pages_that_do_not_fit(path, "lmdb")


BUGS: list[tuple[ModuleType, Check, Bug]] = [
    (
        file_format,
        bits,
        Bug(
            "index not summed",
            " or xxh3_128_digest(raw) != trailer.index_sum",
            "",
        ),
    ),
    (
        file_format,
        bits,
        Bug(
            "end not summed",
            " or summed[: len(END)] != END or xxh3_128_digest(summed) != found",
            " or summed[: len(END)] != END",
        ),
    ),
    (
        file_format,
        bits,
        Bug(
            "header not summed",
            "header_nbytes(raw) or xxh3_128_digest(summed) != found",
            "header_nbytes(raw)",
        ),
    ),
    (
        source_sink,
        spliced,
        Bug(
            "index's checksum not compared",
            "if raw[CHECKSUM] != item.checksum:",
            "if False:",
        ),
    ),
    (
        source_sink,
        lied_about,
        Bug(
            "parent not compared",
            "if (head.parent, head.codec",
            "if head.parent is None and (head.parent, head.codec",
        ),
    ),
    (
        source_sink,
        waited,
        Bug(
            "does not wait",
            "while pending := [each for each in running if not each.done()]:",
            "while pending := []:",
        ),
    ),
    (
        intake,
        damages,
        Bug(
            "orphans are taken",
            "elif not (item.parent is None or ",
            "elif not (True or ",
        ),
    ),
    (
        intake,
        damages,
        Bug(
            "damage counts as kept",
            "self.damaged.append((item.key, found))\n",
            "self._kept.add(item.key)\n            self.damaged.append((item.key, found))\n",
        ),
    ),
    (
        intake,
        damages,
        Bug(
            "not checked",
            "return checked(item, head, payload, self.contents.description)",
            "return Record(codec.parse(head), head, payload)",
        ),
    ),
    (
        intake,
        again,
        Bug(
            "present pages are replaced",
            "if self.sink.has(item.key):",
            "if False:",
        ),
    ),
    (
        atomic_file,
        trouble,
        Bug(
            "draft stays",
            "self._part.unlink(missing_ok=True)",
            "pass",
        ),
    ),
    (
        atomic_file,
        longer,
        Bug(
            "not cut to its length",
            "os.ftruncate(self._fd, self._offset + self._filled)",
            "pass",
        ),
    ),
    (
        atomic_file,
        pieces,
        Bug(
            "the staged end is lost",
            "self._offset, self._filled = self._offset + begin, rest",
            "self._offset, self._filled = self._offset + begin, 0",
        ),
    ),
    (
        atomic_file,
        pieces,
        Bug(
            "staged from the beginning",
            "self._staged[self._filled : self._filled + count]",
            "self._staged[:count]",
        ),
    ),
    (
        atomic_file,
        killed,
        Bug(
            "another's draft is in the way",
            "fd = os.open(part, os.O_RDWR | os.O_CREAT |",
            "fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL |",
        ),
    ),
    (
        atomic_file,
        two_writers,
        Bug(
            "not locked",
            "fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
            "pass",
        ),
    ),
    (
        atomic_file,
        one_after_the_other,
        Bug(
            "lock of another name",
            "if _is(fd, part):",
            "if True:",
        ),
    ),
    (
        export,
        synced,
        Bug(
            "not synced",
            "await whole(partial(os.fsync, draft.file.fileno()))",
            "pass",
        ),
    ),
    (
        closed_store,
        no_place,
        Bug(
            "children stay",
            "if late:",
            "if False:",
        ),
    ),
    (
        closed_store,
        budget,
        Bug(
            "no budget",
            "if room < 0:",
            "if False:",
        ),
    ),
]


@pytest.mark.parametrize(("module", "check", "bug"), BUGS, ids=[bug.name for _, _, bug in BUGS])
def test_a_planted_bug_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, check: Check, bug: Bug
) -> None:
    install(monkeypatch, module, bug)
    with pytest.raises((Exception, pytest.fail.Exception)):
        check(tmp_path, monkeypatch)


PAIRS = {
    f"{module.__name__.rpartition('.')[2]}-{check.__name__}": (module, check) for module, check, _ in BUGS
}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_copy_without_a_bug_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: str) -> None:
    module, check = PAIRS[pair]
    install(monkeypatch, module)
    check(tmp_path, monkeypatch)
