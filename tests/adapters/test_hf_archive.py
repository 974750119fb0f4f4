"""Test that questions about a document reuse its pages after the store has imported them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.adapters.tiny import PAGE, ask, open_store, plain, random_prompt, tiny_llama
from tierstore.adapters.huggingface import page_specs
from tierstore.archive.closed_store import open_sink, open_source, shards_of
from tierstore.archive.export import write_archive
from tierstore.archive.file_format import Description
from tierstore.archive.intake import read_archive
from tierstore.errors import ArchiveError
from tierstore.page import PageLayout

DOCUMENT = random_prompt(5 * PAGE)
QUESTIONS = [random_prompt(6, seed=1), random_prompt(3, seed=2), random_prompt(11, seed=3)]


@pytest.mark.parametrize("codec", ["none", "exp"])
@pytest.mark.parametrize("live", [True, False], ids=["running", "closed"])
def test_another_store_answers_the_same_and_computes_only_the_question(
    tmp_path: Path, live: bool, codec: str
) -> None:
    model = tiny_llama().bfloat16() if codec == "exp" else tiny_llama()
    specs = page_specs(model, PAGE)
    path = tmp_path / "document.tier"
    here = tmp_path / "here"
    answers = []
    with open_store(model, disk=here) as store:
        for question in QUESTIONS:
            answers.append(ask(store, model, DOCUMENT + question)[0])
        keys = store.keys(DOCUMENT)
        if live:
            assert asyncio.run(store.export_pages(keys, path)).pages == 5
    if not live:
        with open_source(shards_of(here)[0]) as source:
            assert asyncio.run(write_archive(path, keys, source)).pages == 5
    elsewhere = tmp_path / "elsewhere"
    if not live:
        description = Description(PageLayout.of(specs))
        with open_sink(elsewhere, description, capacity=64 << 20, codec=codec, payload="lmdb") as sink:
            assert asyncio.run(read_archive(path, sink)).complete
    with open_store(model, disk=elsewhere) as store:
        if live:
            assert asyncio.run(store.import_pages(path)).complete
        for question, answer in zip(QUESTIONS, answers, strict=True):
            again, cache = ask(store, model, DOCUMENT + question)
            assert again == answer
            assert cache.reused_tokens == len(DOCUMENT)
    if codec == "none":
        assert answers == [plain(model, DOCUMENT + question) for question in QUESTIONS]


def test_another_model_of_the_same_shape_imports_no_page(tmp_path: Path) -> None:
    model, other = tiny_llama(), tiny_llama(seed=1)
    path = tmp_path / "document.tier"
    with open_store(model) as store:
        ask(store, model, DOCUMENT + QUESTIONS[0])
        asyncio.run(store.export_pages(store.keys(DOCUMENT), path))
    with open_store(other) as store:
        with pytest.raises(ArchiveError, match="the model of its pages is"):
            asyncio.run(store.import_pages(path))
        assert store.match(store.keys(DOCUMENT)).num_pages == 0
