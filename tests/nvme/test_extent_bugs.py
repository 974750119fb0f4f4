"""Bugs planted in a copy of the extent rooms that need two threads, a full disk or a lower capacity to show."""

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
        test_extent_space.test_a_slot_that_is_still_read_is_not_written_again,
    ),
    "a record that went under its read counts as damage": (
        "if lookup(self._env, key) == fetched.raw:",
        "if True:",
        test_extent_space.test_a_page_erased_between_look_up_and_pin_is_a_miss_not_damage,
    ),
    "the budget counts no catalogue": (
        "num_slots = max(0, capacity - files - working) // (slot + share)",
        "num_slots = capacity // slot",
        test_extent_space.test_room_is_used_again_without_growth,
    ),
    "files above the capacity stay": (
        "                self._files.remove(number)\n",
        "                pass\n",
        test_extent_space.test_a_lower_capacity_gives_back_the_last_files_and_drops_only_what_was_in_them,
    ),
    "entries of files given back stay": (
        "            self._entries.erase(lost[start : start + self._erase_keys])\n",
        "            pass\n",
        test_extent_space.test_a_lower_capacity_gives_back_the_last_files_and_drops_only_what_was_in_them,
    ),
    "slots in doubt are forgotten": (
        "self._doubts.setdefault(key, set()).update(places)",
        "pass",
        test_extent_space.test_no_slot_is_lost_whether_a_commit_that_failed_came_about_or_not,
    ),
    "a write cut short counts as whole": (
        "    while buffers:\n        done = ",
        "    if buffers:\n        done = ",
        test_extent_trouble.test_a_write_cut_short_goes_on_where_it_stopped,
    ),
    "a read cut short counts as whole": (
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
        test_payload.test_the_other_payload_starts_anew_with_one_warning_and_auto_keeps_what_is_there,
    ),
    "records are not moved": (
        "self._make_room, self._catalogue.make_places",
        "self._make_room,",
        test_holes.test_long_records_find_room_in_a_tier_full_of_short_ones,
    ),
    "a moved record's old slot is not given back": (
        "                self._records.replaced(key, bytes(found))\n",
        "",
        test_holes.test_long_records_find_room_in_a_tier_full_of_short_ones,
    ),
    "a move that failed keeps its new slots": (
        "            self._slots.free([move.new for move in planned])\n            raise",
        "            raise",
        test_holes.test_a_move_that_the_disk_refuses_loses_no_record_and_no_room,
    ),
    "what is free of a window is taken meanwhile": (
        "            held += pieces\n",
        "            slots.free(pieces)\n",
        test_holes.test_moves_make_room_and_touch_nothing_else,
    ),
    "blocks that nobody names are moved over": (
        "if known == window.place.blocks:",
        "if True:",
        test_holes.test_moves_make_room_and_touch_nothing_else,
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
