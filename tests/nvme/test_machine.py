"""The state machine finds nothing in the tier, and finds each bug that is planted in a copy of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nvme.machine import MACHINES, search
from tests.support import planting
from tests.support.planting import Bug

EXAMPLES, STEPS = 12, 20

BUGS = {
    "checksum not compared": (
        "codecs/record_head.py",
        "if _checksum(raw[:_SUMMED], payload) != raw[_SUMMED:]:",
        "if False:",
    ),
    "key not compared": ("codecs/record_head.py", "if found.key != key:", "if False:"),
    "fingerprint not compared": (
        "codecs/record_head.py",
        "if found.fingerprint != fingerprint:",
        "if False:",
    ),
    "erase skipped": ("nvme/catalogue.py", "txn.delete(key, db=self._env.catalogue)", "pass"),
    "erase moved before a write of its key": (
        "nvme/writer.py",
        "if not written.isdisjoint(item.keys):",
        "if False:",
    ),
    "write acked before commit": (
        "nvme/writer.py",
        "outcomes = self._serve(batch)",
        "self._settle(batch, [1] * len(batch.writes)); self._serve(batch); batch.writes.clear(); outcomes = []",
    ),
    "an old record is not replaced": (
        "nvme/lmdb_pages.py",
        ".data, db=self._env.pages)",
        ".data, overwrite=False, db=self._env.pages)",
    ),
    "a failed write leaves the old record": (
        "nvme/writer.py",
        "self._owe(job.transfer.keys[index] for job, index in writes)",
        "pass",
    ),
    "an erase that failed is forgotten": (
        "nvme/writer.py",
        "try:\n                self._catalogue.erase(keys)\n",
        (
            "try:\n                self._owed.clear(); self._catalogue.erase(keys)\n"
            "                self._owed.update(dict.fromkeys(keys))\n"
        ),
    ),
    "parent lost": (
        "nvme/lmdb_pages.py",
        "parent=page.parent,\n            nbytes=self._sizing.cost",
        "parent=None,\n            nbytes=self._sizing.cost",
    ),
}


LATE = """
        late, self._late = getattr(self, "_late", ([], [])), (places, [(h.copy(), b.copy()) for h, b in parts])
        places, parts = late
        for first, end in _runs(places):"""

EXTENT_BUGS = {
    "a failed write leaves the old record": BUGS["a failed write leaves the old record"],
    "parent lost": (
        "nvme/extents.py",
        "parent=page.parent,\n            nbytes=self._sizing.cost",
        "parent=None,\n            nbytes=self._sizing.cost",
    ),
    "slots of the last batch count as free": (
        "nvme/extents.py",
        "self._files.sync(_places(written))",
        "self._files.sync(_places(written)); self._slots.free(_places(written))",
    ),
    "a slot is lost when its record goes": (
        "nvme/extents.py",
        "self._doubts.pop(key, None)\n            self._slots.free(places)",
        "self._doubts.pop(key, None)",
    ),
    "bytes are not made durable": ("nvme/extents.py", "os.fdatasync(self._fds[number])", "pass"),
    "bytes go out one batch late": (
        "nvme/extents.py",
        "        for first, end in _runs(places):",
        LATE,
    ),
    "generation not compared": ("codecs/record_head.py", "if found.generation != generation:", "if False:"),
    "the free list is empty of what is used": (
        "nvme/allocator.py",
        "ends = [0, *(first + length for first, length in used)]",
        "used = []; ends = [0]",
    ),
    "the free list is one slot off": (
        "nvme/allocator.py",
        "ends = [0, *(first + length for first, length in used)]",
        "used = [(max(0, first - 1), length) for first, length in used]; ends = [0, *(a + n for a, n in used)]",
    ),
}


HELD_BUGS = {
    "what is held is taken for a page": (
        "nvme/record.py",
        'return payload.nbytes if self.held == "none" or self.layout is None else self.layout.blob_nbytes',
        "return payload.nbytes",
    ),
    "the end of the last block is stored as well": (
        "nvme/tier.py",
        "[page[: form.payload_nbytes] for page in pages]",
        "pages",
    ),
    "the whole view is taken for the payload": (
        "nvme/record.py",
        "return out[: padded(stored)], out[:stored]",
        "return out[: padded(stored)], out[: padded(stored)]",
    ),
}


@pytest.mark.parametrize("payload", MACHINES)
def test_the_tier_behaves_as_a_dict_whatever_happens_to_its_disk(payload: str) -> None:
    search(payload, EXAMPLES, STEPS, shrink=True)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, tmp_path: Path) -> None:
    require_found(*BUGS[bug], "lmdb", tmp_path)


@pytest.mark.parametrize("bug", EXTENT_BUGS)
def test_a_bug_planted_in_extents_is_found(bug: str, tmp_path: Path) -> None:
    require_found(*EXTENT_BUGS[bug], "extents", tmp_path)


@pytest.mark.parametrize("bug", HELD_BUGS)
def test_a_bug_planted_under_encoded_memory_is_found(bug: str, tmp_path: Path) -> None:
    require_found(*HELD_BUGS[bug], "extents held", tmp_path)


def require_found(name: str, right: str, wrong: str, payload: str, tmp_path: Path) -> None:
    planting.copy_of_checkout(tmp_path, "nvme")
    planting.plant(tmp_path, name, Bug("", right, wrong))
    found = planting.run(tmp_path, "-m", "tests.nvme.machine", payload, str(EXAMPLES), str(STEPS))
    assert found.returncode != 0
    assert "AssertionError" in found.stderr, found.stderr[-2000:]
