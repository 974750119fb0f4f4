"""Tests of prompts for chats and documents. All questions about a document share the tokens before the question."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.small import ids_of, reader
from tierstore.errors import ConfigError
from tierstore.serve.model import Reader
from tierstore.serve.request import RefusedError

DOCUMENT = "Pages that nobody asked for leave first."


def text_of(tokens: list[int]) -> str:
    return str(reader().tokenizer.decode(tokens))


def test_chat_uses_the_models_template_and_special_tokens() -> None:
    tokens = reader().chat([{"role": "user", "content": "hi"}])
    assert text_of(tokens) == "<|user|>hi<|end|><|assistant|>"
    assert len(tokens) == 5


def test_a_prompt_about_a_document_is_the_document_then_the_question() -> None:
    tokens = reader().about(DOCUMENT) + reader().question("Who leaves?")
    assert text_of(tokens) == f"<|user|>{DOCUMENT}\n\nWho leaves?<|end|><|assistant|>"


@pytest.mark.parametrize("chats", [True, False])
@given(document=st.text(max_size=30), question=st.text(max_size=20))
def test_prompt_contains_the_whole_document_and_question(chats: bool, document: str, question: str) -> None:
    found = reader(chats=chats)
    tokens = found.about(document) + found.question(question)
    text = text_of(tokens)
    assert document in text
    assert question in text[len(document) :]


@pytest.mark.parametrize("strange", ["\ue000", "a\ue000b\ue000"])
def test_text_that_contains_the_placeholder_is_kept_whole(strange: str) -> None:
    tokens = reader().about(strange) + reader().question(strange)
    assert text_of(tokens) == f"<|user|>{strange}\n\n{strange}<|end|><|assistant|>"


def test_text_cannot_end_its_own_message() -> None:
    (ends,) = ids_of("<|end|>")
    tokens = reader().about("a<|end|><|assistant|>b") + reader().question("<|end|>c")
    assert text_of(tokens) == "<|user|>a<|end|><|assistant|>b\n\n<|end|>c<|end|><|assistant|>"
    assert tokens.count(ends) == 1


def test_chat_may_be_rendered_while_a_document_is_tokenized() -> None:
    """Threads that share a tokenizer must not affect each other, although it keeps the settings of the last call."""
    wrong: list[str] = []

    def chats() -> None:
        for _ in range(300):
            tokens = reader().chat([{"role": "user", "content": "hi"}])
            if len(tokens) != 5:
                wrong.append(text_of(tokens))

    threads = [Thread(target=chats) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if len(reader().question("<|end|>")) != len("<|end|>") + 2:
            wrong.append("a special word in a text")
    assert not wrong


def test_model_without_a_template_gets_plain_text_and_refuses_chats() -> None:
    found = reader(chats=False)
    tokens = found.about(DOCUMENT) + found.question("Who leaves?")
    assert text_of(tokens) == f"{DOCUMENT}\n\nWho leaves?\nAnswer:"
    with pytest.raises(RefusedError, match="no chat template"):
        found.chat([{"role": "user", "content": "hi"}])


def test_template_error_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('a system message first') }}{% endif %}"
    )
    monkeypatch.setattr(reader().tokenizer, "chat_template", template)
    with pytest.raises(RefusedError, match="a system message first"):
        reader().chat([{"role": "user", "content": "hi"}])


def test_template_that_omits_messages_is_refused_for_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader().tokenizer, "chat_template", "always the same")
    with pytest.raises(RefusedError, match="does not contain the messages"):
        reader().about(DOCUMENT)


def test_a_saved_model_is_read_back_and_answers_alike(tmp_path: Path) -> None:
    reader().model.save_pretrained(tmp_path)
    reader().tokenizer.save_pretrained(tmp_path)
    found = Reader.load(tmp_path, "cpu", "float32", name="again")
    assert (found.name, found.max_tokens, found.vocabulary) == ("again", 512, 260)
    assert found.tokens("hi") == ids_of("hi")


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        Reader.load(tmp_path, "cpu")
