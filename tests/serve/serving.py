"""Runs a server of the small model in this process. Tests use it over HTTP."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx2 as httpx

from tests.adapters.tiny import open_store
from tests.serve.small import reader
from tests.support.pages import PATIENCE_S
from tierstore.serve.app import Server, make_app
from tierstore.serve.auth import Tenants
from tierstore.serve.documents import Library
from tierstore.serve.engine import Engine
from tierstore.store import TierStore

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Who was it?"}], "max_tokens": 6, "seed": 1}
COMPLETION = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 6, "temperature": 0}


@dataclass
class Serving:
    """A running server and its parts. ``http`` is a client of the server."""

    http: httpx.Client
    engine: Engine
    store: TierStore
    library: Library
    server: Server


@contextmanager
def serving(
    tenants: Tenants | None = None,
    documents: Path | None = None,
    *,
    hosts: tuple[str, ...] = ("*",),
    hbm: int = 96,
    disk: Path | None = None,
    chats: bool = True,
    **limits: int,
) -> Iterator[Serving]:
    """Run a server on a free port until the end of the block. Then assert that it leaked nothing."""
    model = reader(chats=chats)
    with open_store(model.model, hbm=hbm, disk=disk) as store, socket.socket() as bound:
        engine = Engine(model, store, **limits)
        library, ready = Library(documents), Event()
        bound.bind(("127.0.0.1", 0))
        app = make_app(model, engine, store, library, tenants or Tenants(), hosts=hosts)
        server = Server(app, engine, ready.set)
        thread = Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            assert ready.wait(PATIENCE_S)
            url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:
                yield Serving(http, engine, store, library, server)
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
            engine.close()
        assert not thread.is_alive()


def events(response: httpx.Response) -> list[tuple[str, Any]]:
    """Return the names and data of a stream of server-sent events.

    An event without a name has the name "". The data are parsed as JSON, except for "[DONE]".
    """
    found = []
    for frame in response.text.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in frame.split("\n"))
        data = lines["data"]
        found.append((lines.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found
