"""Plant bugs in a copy of the extent modules, and test that the test listed for each bug finds it.

These bugs need two threads, a full disk or a lower capacity to show, so the state machine does not find them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nvme import (
    test_encoded,
    test_extent_space,
    test_extent_trouble,
    test_holes,
    test_payload,
)
from tests.support import planting
from tests.support.planting import Bug

pytestmark = pytest.mark.deep

BUGS: dict[str, tuple[str, str, Callable[..., None]]] = {
    "pins are ignored": (
        "if self._pins[place] > 0:",
        "if False:",
        test_extent_space.test_slot_being_read_is_not_rewritten,
    ),
    "a record that was erased during its read counts as damage": (
        "if lookup(self._env, key) == fetched.raw:",
        "if True:",
        test_extent_space.test_page_erased_between_lookup_and_pin_is_a_miss_not_damage,
    ),
    "the budget does not include the catalogue": (
        "num_slots = max(0, capacity - files - working) // (slot + share)",
        "num_slots = capacity // slot",
        test_extent_space.test_freed_space_is_reused_without_growth,
    ),
    "files above the capacity stay": (
        "                self._files.remove(number)\n",
        "                pass\n",
        test_extent_space.test_a_lower_capacity_removes_the_last_files_and_drops_only_their_records,
    ),
    "entries of removed files stay": (
        "            self._entries.erase(lost[start : start + self._erase_keys])\n",
        "            pass\n",
        test_extent_space.test_a_lower_capacity_removes_the_last_files_and_drops_only_their_records,
    ),
    "slots of a commit with an unknown outcome are forgotten": (
        "self._doubts.setdefault(key, set()).update(places)",
        "pass",
        test_extent_space.test_no_slot_is_lost_whether_or_not_a_failed_commit_took_effect,
    ),
    "a short write counts as complete": (
        "    while buffers:\n        done = ",
        "    if buffers:\n        done = ",
        test_extent_trouble.test_a_partial_write_continues_where_it_stopped,
    ),
    "a short read counts as complete": (
        "    if got < BLOCK + nbytes:",
        "    if False:",
        test_extent_trouble.test_a_read_cut_short_is_a_miss,
    ),
    "the first bytes of a slot are not compared": (
        "if scratch[:_HEAD_AT].tobytes() != PREFIX:",
        "if False:",
        test_extent_trouble.test_the_bytes_before_a_head_are_compared_too,
    ),
    "the other payload's files stay": (
        "        _empty(directory)\n    return payload\n",
        "    return payload\n",
        test_payload.test_another_payload_starts_empty_with_one_warning_and_auto_keeps_existing_records,
    ),
    "records are not moved": (
        "self._make_room, self._catalogue.make_places",
        "self._make_room,",
        test_holes.test_long_records_fit_into_a_tier_full_of_short_ones,
    ),
    "a moved record's old slot is not freed": (
        "                self._records.replaced(key, bytes(found))\n",
        "",
        test_holes.test_long_records_fit_into_a_tier_full_of_short_ones,
    ),
    "a move that failed keeps its new slots": (
        "            self._slots.free([move.new for move in planned])\n            raise",
        "            raise",
        test_holes.test_a_move_that_the_disk_refuses_loses_no_record_and_no_space,
    ),
    "free slots of a window are taken during the move": (
        "            held += pieces\n",
        "            slots.free(pieces)\n",
        test_holes.test_moving_records_frees_space_and_changes_nothing_else,
    ),
    "moves overwrite blocks that no entry names": (
        "if known == window.place.blocks:",
        "if True:",
        test_holes.test_moving_records_frees_space_and_changes_nothing_else,
    ),
    "an encoder serves two chunks at once": (
        "            return self._coding.encoder()\n",
        "            return self.__dict__.setdefault('_one', self._coding.encoder())\n",
        test_encoded.test_batches_of_several_chunks_are_encoded_by_several_threads_and_each_encoder_by_one_at_a_time,
    ),
    "places are not checked before an open": (
        "if end > ends.get(first >> 32, 0):",
        "if False:",
        test_extent_trouble.test_an_extent_file_cut_or_missing_at_open_sets_the_directory_aside,
    ),
}


def test_a_copy_without_a_bug_passes(tmp_path: Path) -> None:
    planting.copy_of_checkout(tmp_path, "nvme")
    assert planting.outcome(tmp_path, (test for *_, test in BUGS.values())) == 0


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, tmp_path: Path) -> None:
    right, wrong, test = BUGS[bug]
    planting.copy_of_checkout(tmp_path, "nvme")
    planting.plant(tmp_path, "tierstore.nvme", Bug(bug, right, wrong))
    assert planting.outcome(tmp_path, [test]) == 1
