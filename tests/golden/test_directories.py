"""Test that the current code reads directories and archives of an earlier version, and finds every page unchanged."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_128

from tests.golden.command import told
from tests.golden.directories import (
    CASES,
    DOCUMENTS,
    ERASED,
    KEPT,
    NUM_PAGES,
    Case,
    config_file,
    described,
    digests_put,
    documents_of,
    exported_to,
    files_in,
    open_store,
    put_documents,
    unpack,
)
from tests.golden.trees import load, require_same

LOSSLESS = [case for case in CASES if case.codec in ("none", "exp")]
IDS = [case.name for case in CASES]
HEAD = struct.Struct("<8sHBBIQQ32s36s36sQ")
"""Magic, version, codec, has-parent flag, 0, lengths of page and payload, fingerprint, key, parent, generation."""
HEAD_NBYTES = 4080


def frozen(case: Case) -> Any:
    return load(case.name)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_an_earlier_versions_directory_opens_and_every_page_has_its_bytes(case: Case, tmp_path: Path) -> None:
    home, _ = unpack(case, tmp_path)
    require_same(case.name, frozen(case)["directory"], described(case, home))
    with open_store(case, home) as store:
        require_same(case.name, frozen(case)["pages"], documents_of(store))
        assert {name: store.match(store.keys(tokens)).num_pages for name, tokens in DOCUMENTS.items()} == KEPT
        assert store.explain(store.keys(ERASED)[1:2])[0]["parent"] == store.keys(ERASED)[0].hex()


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_directory_written_today_is_described_as_the_earlier_one(case: Case, tmp_path: Path) -> None:
    home = tmp_path / case.name
    with open_store(case, home) as store:
        put_documents(store)
    require_same(case.name, frozen(case)["directory"], described(case, home))
    with open_store(case, home) as store:
        require_same(case.name, frozen(case)["pages"], documents_of(store))


@pytest.mark.parametrize("case", LOSSLESS, ids=[case.name for case in LOSSLESS])
def test_pages_of_lossless_codecs_are_the_ones_that_were_put(case: Case) -> None:
    with open_store(case, None) as store:
        put = {name: digests_put(store, tokens, KEPT[name]) for name, tokens in DOCUMENTS.items()}
    require_same(case.name, frozen(case)["pages"], put)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_an_earlier_versions_archive_is_imported_and_every_page_has_its_bytes(
    case: Case, tmp_path: Path
) -> None:
    home, archive = unpack(case, tmp_path)
    elsewhere = tmp_path / "elsewhere"
    report = told("import", "--config", config_file(case, elsewhere), archive)
    assert (report["ok"], report["pages"], report["present"]) == (True, NUM_PAGES, 0)
    with open_store(case, elsewhere) as store:
        require_same(case.name, frozen(case)["pages"], documents_of(store))
    with open_store(case, None) as store:
        if case.codec != "int8":  # keys with a lossy codec differ from keys without one
            assert asyncio.run(store.import_pages(archive)).complete
            require_same(case.name, frozen(case)["pages"], documents_of(store))
    require_same(case.name, frozen(case)["export"], exported_to(tmp_path / "again.tier", case, home))
    assert (tmp_path / "again.tier").stat().st_size == archive.stat().st_size


@pytest.mark.parametrize("payload", ["lmdb", "extents"])
def test_a_record_begins_with_the_same_head(payload: str, tmp_path: Path) -> None:
    (case,) = [case for case in CASES if case.name == f"{payload}-none"]
    home = tmp_path / "home"
    with open_store(case, home) as store:
        put_documents(store)
        kept = {
            key: key_before(store.keys(tokens), i)
            for name, tokens in DOCUMENTS.items()
            for i, key in enumerate(store.keys(tokens)[: KEPT[name]])
        }
    found = {}
    for file in files_in(home):
        if file.endswith((".mdb", ".bin")):
            found.update(heads_in((home / file).read_bytes(), case.page_nbytes))
    assert found.keys() >= kept.keys()
    for key, parent in kept.items():
        version, codec, has_parent, zero, raw, stored, _, _, parent_field, generation = found[key]
        assert (version, codec, zero, raw, stored) == (1, 0, 0, case.page_nbytes, case.page_nbytes)
        assert (has_parent, parent_field) == ((0, bytes(36)) if parent is None else (1, parent))
        assert generation != 0


def key_before(keys: list[Any], index: int) -> bytes | None:
    return bytes(keys[index - 1]) if index else None


def heads_in(raw: bytes, page_nbytes: int) -> dict[bytes, tuple[Any, ...]]:
    """Return the fields of every record head with a valid checksum, by key."""
    found = {}
    at = raw.find(b"TierPage")
    while at >= 0:
        head, payload = raw[at : at + HEAD_NBYTES], raw[at + HEAD_NBYTES : at + HEAD_NBYTES + page_nbytes]
        if xxh3_128(head[:-16] + payload).digest() == head[-16:]:
            assert not any(head[HEAD.size : -16])
            _, *fields = HEAD.unpack_from(head)
            found[fields[7]] = tuple(fields)
        at = raw.find(b"TierPage", at + 1)
    return found
