"""Tests of documents over HTTP: they are read once, asked about, deleted, and kept across a restart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx2 as httpx
import pytest

from tests.nvme.rig import data_file_is_read_only
from tests.serve.serving import Serving, events, serving
from tests.serve.small import reader
from tests.support.pages import PATIENCE_S
from tests.support.waiting import wait_for
from tierstore.serve.documents import Document, Library

TEXT = "The ship sailed at dawn, and nobody saw it leave the harbour. " * 3
OTHER = "Nobody had ever seen the lighthouse by day, or so it was said. " * 3


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving() as found:
        yield found


def add(server: Serving, text: str = TEXT, name: str = "ship") -> dict[str, Any]:
    """Add a document, and wait until it has been read."""
    response = server.http.post("/v1/documents", json={"name": name, "text": text})
    assert response.status_code == 202, response.text
    return wait(server, response.json()["id"])


def wait(server: Serving, id: str) -> dict[str, Any]:  # noqa: A002 - as the API calls it
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found: dict[str, Any] = server.http.get(f"/v1/documents/{id}").json()
        if found["state"] in ("ready", "failed"):
            return found
        time.sleep(0.01)
    raise AssertionError(found)


def ask(server: Serving, id: str, **more: Any) -> httpx.Response:  # noqa: A002
    return server.http.post(
        f"/v1/documents/{id}/ask", json={"question": "When?", "max_tokens": 6, "seed": 1} | more
    )


def test_a_document_is_read_into_the_store_and_then_answers_from_it(server: Serving) -> None:
    document = add(server)
    assert document["state"] == "ready"
    assert document["tokens"] == document["tokens_read"] > len(TEXT)
    assert document["pages_stored"] == document["pages"] == document["tokens"] // 8
    found = ask(server, document["id"])
    assert found.status_code == 200
    assert found.json()["finish_reason"] == "length"
    usage = found.json()["usage"]
    assert usage["completion_tokens"] == 6
    assert sum(usage["reused"].values()) >= document["pages"] * 8
    assert 0 <= usage["waited_s"] <= usage["ttft_s"] <= usage["total_s"]


def test_streamed_answer_equals_the_whole_one(server: Serving) -> None:
    id = add(server)["id"]  # noqa: A001
    whole = ask(server, id).json()
    *pieces, (last, end) = events(ask(server, id, stream=True))
    assert {name for name, _ in pieces} == {"piece"}
    assert last == "done"
    assert "".join(piece["text"] for _, piece in pieces) == whole["answer"]
    assert end["finish_reason"] == whole["finish_reason"]
    assert end["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_question_sent_at_once_reuses_its_document_which_is_computed_once() -> None:
    text = f"At once: {TEXT}"
    with serving(chunk=4) as server:
        id = server.http.post("/v1/documents", json={"name": "now", "text": text}).json()["id"]  # noqa: A001
        usage = ask(server, id).json()["usage"]
    assert sum(usage["reused"].values()) >= len(text) // 8 * 8


def test_the_same_text_twice_is_the_same_document(server: Serving) -> None:
    first, second = add(server), add(server, name="another name")
    assert second["id"] == first["id"]
    assert second["name"] == first["name"]
    listed = [each["id"] for each in server.http.get("/v1/documents").json()["data"]]
    assert listed.count(first["id"]) == 1


def test_deletion_keeps_only_pages_shared_with_another_document(server: Serving) -> None:
    one, other = add(server, TEXT + OTHER, "both"), add(server, TEXT, "one")
    keys = server.store.keys(reader().about(TEXT + OTHER))
    kept = set(server.store.keys(reader().about(TEXT))).intersection(keys)
    assert server.store.match(keys).num_pages == len(keys)
    assert server.http.delete(f"/v1/documents/{one['id']}").json()["deleted"] is True
    assert server.store.match(keys).num_pages == len(kept) > 0
    assert server.http.get(f"/v1/documents/{one['id']}").status_code == 404
    assert ask(server, one["id"]).status_code == 404
    assert server.http.delete(f"/v1/documents/{one['id']}").status_code == 404
    left = [each["id"] for each in server.http.get("/v1/documents").json()["data"]]
    assert one["id"] not in left
    assert other["id"] in left


def test_a_document_deleted_while_it_is_read_leaves_no_page() -> None:
    computing, go_on, passes = Event(), Event(), count()

    def stand_still(*_: object) -> None:
        if next(passes) == 3:
            computing.set()
            go_on.wait(PATIENCE_S)

    with serving(chunk=16) as server:
        hook = reader(chats=True).model.register_forward_pre_hook(stand_still)
        try:
            id = server.http.post("/v1/documents", json={"name": "x", "text": TEXT}).json()["id"]  # noqa: A001
            assert computing.wait(PATIENCE_S)
            thread = Thread(target=server.http.delete, args=(f"/v1/documents/{id}",))
            thread.start()
            deadline = time.monotonic() + PATIENCE_S
            while server.library.get("", id) is not None:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            assert server.store.match(server.store.keys(reader().about(TEXT))).num_pages > 0
            go_on.set()  # the pages of this pass are put after the text was deleted
            thread.join(PATIENCE_S)
        finally:
            hook.remove()
        assert next(passes) < len(TEXT) // 16  # reading stopped early
        server.engine.close()
        assert server.store.match(server.store.keys(reader().about(TEXT))).num_pages == 0


def test_a_deleted_documents_pages_are_not_on_the_disk_either(tmp_path: Path) -> None:
    with serving(disk=tmp_path) as server:
        gone, kept = add(server), add(server, OTHER, "light")
        server.store.flush()
        server.http.delete(f"/v1/documents/{gone['id']}")
    with serving(disk=tmp_path) as server:
        assert server.store.match(server.store.keys(reader().about(TEXT))).num_pages == 0
        assert server.store.match(server.store.keys(reader().about(OTHER))).num_pages == kept["pages"]


def test_a_deletion_that_the_disk_can_only_note_is_durable(tmp_path: Path) -> None:
    with serving(disk=tmp_path) as server:
        gone = add(server)
        server.store.flush()
        with _refused(server, tmp_path, "data.mdb"):
            assert server.http.delete(f"/v1/documents/{gone['id']}").status_code == 200
    with serving(disk=tmp_path) as server:
        assert server.store.match(server.store.keys(reader().about(TEXT))).num_pages == 0


def test_deletion_that_is_not_durable_is_refused_and_can_be_retried(tmp_path: Path) -> None:
    folder = tmp_path / "documents"
    with serving(disk=tmp_path / "disk", documents=folder) as server:
        document = add(server)
        url = f"/v1/documents/{document['id']}"
        server.store.flush()
        with (
            _refused(server, tmp_path / "disk", "data.mdb"),
            _refused(server, tmp_path / "disk", "erased.bin"),
        ):
            refused = server.http.delete(url)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "not_erased"
            assert server.http.get(url).status_code == 200
            assert list(folder.glob("*.json"))
        wait_for(lambda: server.http.delete(url).status_code == 200)
        assert server.http.get(url).status_code == 404
        assert not list(folder.glob("*.json"))
    with serving(disk=tmp_path / "disk") as server:
        assert server.store.match(server.store.keys(reader().about(TEXT))).num_pages == 0


def _refused(server: Serving, home: Path, name: str) -> AbstractContextManager[None]:
    """Within the block, make a file in the store's directory reject writes."""
    return data_file_is_read_only(home, str(server.store.stats()["fingerprint"]), name=name)


def test_a_document_that_can_never_be_read_is_refused_and_not_kept(server: Serving) -> None:
    before = server.http.get("/v1/documents").json()
    response = server.http.post("/v1/documents", json={"name": "long", "text": "x" * 5000})
    assert response.status_code == 400
    assert str(server.engine.max_tokens) in response.json()["error"]["message"]
    assert server.http.get("/v1/documents").json() == before


@pytest.mark.parametrize(
    ("field", "value"), [("name", ""), ("name", "x" * 201), ("text", ""), ("text", 1), ("tags", [])]
)
def test_invalid_documents_are_refused_by_name(server: Serving, field: str, value: object) -> None:
    response = server.http.post("/v1/documents", json={"name": "a", "text": "b"} | {field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


def test_invalid_questions_are_refused_by_name(server: Serving) -> None:
    id = add(server)["id"]  # noqa: A001
    for more in ({"question": ""}, {"max_tokens": 0}, {"model": "tiny"}, {"temperature": 3}):
        response = ask(server, id, **more)
        assert response.status_code == 400
        assert response.json()["error"]["param"] in more


def test_texts_survive_a_restart_and_names_too(tmp_path: Path) -> None:
    with serving(documents=tmp_path / "texts") as server:
        before = add(server)
    (file,) = (tmp_path / "texts").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    with serving(documents=tmp_path / "texts") as server:
        found = server.http.get(f"/v1/documents/{before['id']}").json()
        assert found["name"] == "ship"
        assert found["tokens"] == before["tokens"]
        assert found["state"] == "waiting"  # its pages were lost with the memory of the first server
        assert ask(server, before["id"]).status_code == 200
        (listed,) = server.http.get("/v1/documents").json()["data"]
        assert listed["state"] == "ready"  # the question made the server read it
        server.http.delete(f"/v1/documents/{before['id']}")
    assert list((tmp_path / "texts").iterdir()) == []


def test_same_text_after_a_restart_is_read_again(tmp_path: Path) -> None:
    for _ in range(2):
        with serving(documents=tmp_path) as server:
            found = add(server)
            assert found["state"] == "ready"
            assert found["pages_stored"] == found["pages"]


@pytest.mark.parametrize("damage", ["text", "name", "half", "foreign", "renamed"])
def test_damaged_text_is_skipped_and_named(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    library = Library(tmp_path)
    document = library.add(Document("", "ship", TEXT))
    library.add(Document("", "light", OTHER))
    file = tmp_path / f"{document.id}.json"
    whole = file.read_text()
    match damage:
        case "text":
            file.write_text(whole.replace("dawn", "dusk", 1))
        case "name":
            file.write_text(whole.replace('"ship"', '"shop"'))
        case "half":
            file.write_text(whole[: len(whole) // 2])
        case "foreign":
            file.write_text("[1, 2]")
        case _:
            file.rename(tmp_path / "0.json")
    assert [each.name for each in Library(tmp_path).all("")] == ["light"]
    (line,) = caplog.messages
    assert "ignoring a file" in line
    assert "dawn" not in line


def test_leftovers_of_an_unfinished_write_are_removed(tmp_path: Path) -> None:
    (tmp_path / f"{Document('', 'a', 'b').id}.part").write_text("{")
    assert Library(tmp_path).all() == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["film.part", "ab.part", "notes.json", "a.txt"])
def test_files_of_other_programs_are_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{")
    library = Library(tmp_path)
    library.add(Document("", "a", "b"))
    assert Library(tmp_path).all() == [Document("", "a", "b")]
    assert (tmp_path / name).read_text() == "{"


def test_a_document_that_cannot_be_kept_is_not_read(tmp_path: Path) -> None:
    with serving(documents=tmp_path / "texts") as server:
        (tmp_path / "texts").rmdir()
        response = server.http.post("/v1/documents", json={"name": "a", "text": TEXT})
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert server.http.get("/v1/documents").json()["data"] == []
        assert server.store.match(server.store.keys(reader().about(TEXT))).num_pages == 0


def test_an_answer_without_a_given_length_may_fill_the_remaining_space() -> None:
    with serving(hbm=32) as server:
        most = server.engine.max_tokens
        document = add(server, "A day at sea. " * 14)
        asked = server.http.post(f"/v1/documents/{document['id']}/ask", json={"question": "When?"})
        assert asked.status_code == 200, asked.text
        usage = asked.json()["usage"]
        assert usage["prompt_tokens"] + usage["completion_tokens"] == most
        prompt = {"model": "tiny", "prompt": "x" * (most - 3), "temperature": 0}
        completed = server.http.post("/v1/completions", json=prompt)
        assert completed.status_code == 200, completed.text
        assert completed.json()["usage"]["total_tokens"] == most


def test_a_document_that_is_too_long_is_refused_with_sizes_and_without_an_answer(server: Serving) -> None:
    response = server.http.post("/v1/documents", json={"name": "long", "text": "x" * 5000})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith("the request is too long, with a prompt of 50")
    assert "answer" not in message
    assert f"at most {server.engine.max_tokens} tokens fit" in message
