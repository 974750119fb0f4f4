"""Measures the server with a long document on a GPU: ``python -m tests.gpu.serve_on_card``.

The model is a Llama with random weights and one token per byte. One document is added and read. Then questions about it
are asked over HTTP, with its pages in HBM, in host memory and on disk. Both the client and the server measure times.
The last line of output is a JSON object. With ``--shape tiny --device cpu --tokens 2000`` it runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from socket import socket
from statistics import median
from threading import Event, Thread
from typing import Any

from tests.serve.small import VOCABULARY, tokenizer
from tierstore.adapters.huggingface import page_specs
from tierstore.bench.measurement import at_rest
from tierstore.bench.ttft import SHAPES, random_model
from tierstore.config import load_config
from tierstore.serve.app import Server, make_app
from tierstore.serve.auth import Tenants
from tierstore.serve.documents import Library
from tierstore.serve.engine import Engine
from tierstore.serve.model import Reader
from tierstore.store import TierStore
from tierstore.types import PageKey, Tier

PAGE = 64
ANSWER = 8
"""Number of tokens in an answer. The client measures the time until the last one."""
PATIENCE_S = 300.0


def main() -> None:
    """Run the measurement and print its result."""
    options = argparse.ArgumentParser()
    options.add_argument("--device", default="cuda:0")
    options.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    options.add_argument("--tokens", type=int, default=131072)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--dir", type=Path, default=None)
    asked = options.parse_args()
    sizes = replace(SHAPES[asked.shape], vocabulary=max(VOCABULARY, SHAPES[asked.shape].vocabulary))
    model = random_model(sizes, asked.device, asked.tokens + 1024)
    reader = Reader("random", model, tokenizer())
    specs = page_specs(model, PAGE)
    nbytes = (asked.tokens // PAGE + 16) * sum(spec.page_nbytes for spec in specs)
    with tempfile.TemporaryDirectory(dir=asked.dir) as place:
        config = load_config(
            {
                "hbm": {"capacity": nbytes, "device": asked.device},
                "host": {"capacity": nbytes},
                "nvme": {
                    "path": f"{place}/store",
                    "capacity": int(nbytes * 1.5) + (256 << 20),
                    "timeout": 60,
                },
            }
        )
        with TierStore.open(config, specs) as store, at_rest(), served(reader, store) as url:
            sys.stdout.write(
                json.dumps(measured(url, reader, store, asked.tokens - 100, asked.rounds)) + "\n"
            )


def measured(url: str, reader: Reader, store: TierStore, length: int, rounds: int) -> dict[str, Any]:
    """Add a document, and ask about it with its pages in each tier. Return the times in seconds per tier."""
    text = "".join(random.Random(0).choices("abcdefgh ", k=length))
    keys = store.keys(reader.about(text))
    began = time.perf_counter()
    document = call(f"{url}/v1/documents", {"name": "long", "text": text})
    while document["state"] not in ("ready", "failed"):
        time.sleep(0.05)
        document = call(f"{url}/v1/documents/{document['id']}")
    read_s = time.perf_counter() - began
    say(f"read {document['tokens']} tokens in {read_s:.2f} s: {document['state']}")
    store.flush()
    found: dict[str, Any] = {"tokens": document["tokens"], "read_s": read_s}
    question = f"{url}/v1/documents/{document['id']}/ask"
    for tier in (Tier.HBM, Tier.HOST, Tier.NVME):
        rows = []
        for number in range(rounds + 1):
            send_down(store, keys, tier)
            began = time.perf_counter()
            answer = call(question, {"question": f"{tier.name} {number}?", "max_tokens": ANSWER})
            usage = answer["usage"]
            rows.append((usage["ttft_s"], time.perf_counter() - began))
            say(f"{tier.name}: first token {rows[-1][0]:.4f} s, all {rows[-1][1]:.4f} s, {usage['reused']}")
        first, whole = (median(row[i] for row in rows[1:]) for i in (0, 1))
        found[tier.name] = {"first_token_s": first, "client_s": whole, "reused": usage["reused"]}
    return found


def send_down(store: TierStore, keys: list[PageKey], tier: Tier) -> None:
    """Evict the document's pages from all tiers above ``tier``."""
    for above in [t for t in Tier if t < tier]:
        store.evict(keys, above)
    store.drain(PATIENCE_S)


@contextmanager
def served(reader: Reader, store: TierStore) -> Iterator[str]:
    """Run a server with this store, and yield its address."""
    engine, listening = Engine(reader, store), Event()
    app = make_app(reader, engine, store, Library(), Tenants())
    bound = socket()
    bound.bind(("127.0.0.1", 0))
    server = Server(app, engine, listening.set)
    thread = Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        assert listening.wait(PATIENCE_S)
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        engine.close()


def call(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Send a request to the server: POST with ``body`` as JSON, or GET if it is None. Return the parsed response."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def say(line: str) -> None:
    """Print a progress message."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
