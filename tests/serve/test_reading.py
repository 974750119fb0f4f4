"""Tests of reading a document while other requests run."""

from __future__ import annotations

import asyncio
import gc
import json
from itertools import count
from pathlib import Path
from threading import Event as Flag
from threading import Thread

import httpx2 as httpx
import pytest

from tests.adapters.tiny import open_store
from tests.serve.serving import COMPLETION, Serving, serving
from tests.serve.small import GREEDY, ask, ids_of, reader
from tests.support.pages import PATIENCE_S
from tests.support.waiting import wait_for
from tierstore.serve.documents import Library, Reading
from tierstore.serve.engine import Engine
from tierstore.serve.request import Ask, BusyError, Event
from tierstore.types import PageKey


def test_a_question_whose_document_cannot_be_read_for_lack_of_space_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_store(reader().model, hbm=32) as store:
        engine, go, asked, waits = Engine(reader(), store, max_waiting=1), Flag(), Flag(), Flag()
        held = Flag()

        def hold(_: Event) -> None:
            held.set()
            go.wait(PATIENCE_S)

        engine.submit(Ask(prompt=tuple(ids_of("hold")), max_tokens=1, sampling=GREEDY), hold)
        assert held.wait(PATIENCE_S)
        ask(engine, "waits", 1)
        reading, keys_of = Reading(ids_of("a document"), []), store.keys

        def keys(*args: object, **more: object) -> list[PageKey]:
            asked.set()
            waits.wait(PATIENCE_S)
            return keys_of(*args, **more)  # type: ignore[arg-type]

        def begin() -> None:
            with pytest.raises(BusyError):
                reading.begin(engine, b"")

        async def wait() -> None:
            waiting = asyncio.create_task(reading.ended())
            await asyncio.sleep(0)  # let the task begin to wait
            waits.set()
            await asyncio.wait_for(waiting, PATIENCE_S / 2)  # while the engine is still held

        monkeypatch.setattr(store, "keys", keys)
        thread = Thread(target=begin)
        thread.start()
        assert asked.wait(PATIENCE_S)
        try:
            asyncio.run(wait())
        finally:
            waits.set()
            thread.join(PATIENCE_S)
            go.set()
            engine.close()
        assert not reading.under_way


def test_a_finished_ticket_keeps_no_prompt() -> None:
    with open_store(reader().model, hbm=32) as store:
        engine = Engine(reader(), store)
        ticket, told = ask(engine, "Nobody keeps this.", 1)
        told.done()
        ask(engine, "another", 1)[1].done()
        engine.close()
        gc.collect()
        asked = [each for each in gc.get_objects() if type(each) is Ask]  # isinstance can cause warnings
        assert tuple(ids_of("Nobody keeps this.")) not in [each.prompt for each in asked]
        assert ticket.wait(0)


def test_invalid_document_files_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "plain.json").write_text(json.dumps({"a": 1}))
    assert Library(tmp_path).all() == []
    assert ["ignoring a file" in line for line in caplog.messages] == [True, True]


@pytest.mark.parametrize("stream", [False, True])
def test_a_question_about_a_deleted_document_fails_and_none_of_its_pages_return(
    stream: bool,
) -> None:
    text = "The bell rang twice, and then it was still, for it had snowed. " * 3
    computing, go_on, passes = Flag(), Flag(), count()

    def stand_still(*_: object) -> None:
        if next(passes) == 4:
            computing.set()
            go_on.wait(PATIENCE_S)

    with serving(max_active=1) as server:
        id = server.http.post("/v1/documents", json={"name": "x", "text": text}).json()["id"]  # noqa: A001
        keys = server.store.keys(reader().about(text))
        wait_for(lambda: server.http.get(f"/v1/documents/{id}").json()["state"] == "ready")
        question = {"question": "When?", "max_tokens": 60, "stream": stream}
        responses: list[httpx.Response] = []

        def post() -> None:
            with httpx.Client(base_url=server.http.base_url, trust_env=False, timeout=PATIENCE_S) as client:
                responses.append(client.post(f"/v1/documents/{id}/ask", json=question))

        hook = reader(chats=True).model.register_forward_pre_hook(stand_still)
        try:
            first = Thread(target=post)
            first.start()
            assert computing.wait(PATIENCE_S)  # the first answer has begun; the other requests wait
            threads = [
                first,
                *(Thread(target=post) for _ in range(2)),
                Thread(target=delete, args=(server, id)),
            ]
            for thread in threads[1:-1]:
                thread.start()
            wait_for(lambda: "tierstore_serve_waiting 2.0" in server.engine.figures.text())
            threads[-1].start()
            wait_for(lambda: server.library.get("", id) is None)
            go_on.set()
            for thread in threads:
                thread.join(PATIENCE_S)
        finally:
            go_on.set()
            hook.remove()
        assert len(responses) == 3
        assert all("deleted" in response.text for response in responses)
        assert sorted(response.status_code for response in responses)[-2:] == [404, 404]
        server.http.post("/v1/completions", json=COMPLETION)  # runs after all earlier requests
        assert server.store.match(keys).num_pages == 0


def delete(server: Serving, id: str) -> None:  # noqa: A002 - as the API calls it
    with httpx.Client(base_url=server.http.base_url, trust_env=False, timeout=PATIENCE_S) as client:
        assert client.delete(f"/v1/documents/{id}").status_code == 200
