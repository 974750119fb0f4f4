"""Tests of many requests at the same time, some of them cancelled, while their pages are moved and evicted.

All answers must equal those of transformers.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from prefetch import Prefetcher
from tests.adapters.tiny import PAGE, open_store, plain
from tests.serve.small import Told, ask, reader
from tests.support import lanes
from tests.support.pages import PATIENCE_S
from tierstore.serve.engine import Engine, Ticket
from tierstore.serve.request import BusyError, Done
from tierstore.serve.sampling import Spelling
from tierstore.store import TierStore
from tierstore.types import Tier

REQUESTS = lanes.examples(30, 50)
OUTCOMES = ("done", "failed", "cancelled", "busy", "refused")


@dataclass
class Request:
    """A request that the engine accepted, and what was reported about it."""

    prompt: tuple[int, ...]
    count: int
    ticket: Ticket
    told: Told
    cancelled: bool


@cache
def answer(prompt: tuple[int, ...], count: int) -> str:
    """Return the answer of plain transformers. Prompts do not contain 0, which would be masked as padding."""
    spelling = Spelling(reader().tokenizer, prompt)
    tokens = plain(reader().model, list(prompt), max_new_tokens=count) if count else []
    return "".join(spelling.add(token) for token in tokens) + spelling.end()


class Storm:
    """Submits requests whose common prefixes often end within a token of a page boundary, and moves their pages."""

    def __init__(self, seed: int, engine: Engine, store: TierStore, *, on_host: bool) -> None:
        self.engine, self.store, self.chance = engine, store, random.Random(seed)
        self.texts = [[self.chance.randrange(1, 256) for _ in range(200)] for _ in range(3)]
        self.taken: list[Request] = []
        self.busy, self.on_host = 0, on_host

    def request(self) -> None:
        """Submit a request. With some probability, cancel it immediately or after its first piece of text."""
        chance = self.chance
        most = self.engine.max_tokens - 12
        length = min(
            chance.choice([1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, chance.randrange(1, 180)]), most
        )
        prompt = chance.choice(self.texts)[:length]
        if chance.random() < 0.3:
            prompt[-1] = chance.randrange(1, 256)
        count, salt = chance.choice([0, 1, 2, 8, 12]), chance.choice([b"", b"a"])
        try:
            ticket, told = ask(self.engine, prompt, count, salt=salt)
        except BusyError:
            self.busy += 1
            assert self.taken[-1].ticket.wait(PATIENCE_S)
            return
        fate = chance.random()
        if 0.1 < fate < 0.2 and count:
            told.first()
        if fate < 0.2:
            ticket.cancel()
        self.taken.append(Request(tuple(prompt), count, ticket, told, fate < 0.2))
        self._move(prompt, salt)

    def _move(self, prompt: list[int], salt: bytes) -> None:
        keys, fate = self.store.keys(prompt, salt=salt), self.chance.random()
        if fate < 0.1:
            self.store.evict(keys)
        elif fate < 0.3:
            self.store.demote(keys, Tier.HOST if self.on_host and fate < 0.2 else Tier.NVME)

    def check(self) -> None:
        """Check every answer, the count of each outcome, and the number of tokens from each source."""
        for each in self.taken:
            assert each.ticket.wait(PATIENCE_S)
        done = [each for each in self.taken if self._check_answer(each)]
        counted = {name: self._counted(f'requests_total{{outcome="{name}"}}') for name in OUTCOMES}
        assert sum(counted.values()) == REQUESTS
        assert (counted["busy"], counted["failed"], counted["refused"]) == (self.busy, 0, 0)
        sources = sum(
            self._counted(f'prompt_tokens_total{{source="{source}"}}')
            for source in ("computed", "HBM", "HOST", "NVME")
        )
        told = sum(len(each.prompt) for each in done)
        # A request that was cancelled in its last step counts as done, but this was not reported to its caller.
        assert sources == told if counted["done"] == len(done) else sources > told

    def _check_answer(self, each: Request) -> bool:
        """Check a request's answer. Return False if it was cancelled and its end was not reported, else True."""
        while each.told.more():
            pass
        if each.cancelled and each.told.end is None:
            return False
        usage = each.told.done()
        assert isinstance(each.told.end, Done)
        assert each.told.text == answer(each.prompt, each.count)
        assert usage.completion_tokens == each.count
        assert usage.reused_tokens < usage.prompt_tokens == len(each.prompt)
        return True

    def _counted(self, name: str) -> float:
        lines = self.engine.figures.text().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"tierstore_serve_{name} "))


@pytest.mark.parametrize(
    ("seed", "hbm", "host", "page", "chunk", "most", "waiting"),
    lanes.some(
        [
            (1, 24, 0, 8, 16, 4, 64),
            (2, 40, 8, 4, 7, 8, 4),
            (3, 16, 3, 8, 64, 1, 1),
            (4, 24, 64, 16, 8, 2, 64),
            (5, 40, 8, 8, 1, 4, 64),
        ],
        lambda seed, *_: seed in (2, 3),
    ),
)
def test_answers_equal_transformers_in_any_sequence_of_events(
    tmp_path: Path, seed: int, hbm: int, host: int, page: int, chunk: int, most: int, waiting: int
) -> None:
    with ExitStack() as stack:
        opened = open_store(reader().model, hbm=hbm, host=host, disk=tmp_path, page_size=page)
        store = stack.enter_context(opened)
        if seed % 2:
            stack.enter_context(Prefetcher.attach(store))
        engine = Engine(reader(), store, chunk=chunk, max_active=most, max_waiting=waiting)
        stack.callback(engine.close)
        storm = Storm(seed, engine, store, on_host=host > 0)
        for _ in range(REQUESTS):
            storm.request()
        storm.check()
