"""Random operations on an ``Engine``, and a dictionary that predicts what each prompt finds."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.sglang.engine import Engine, Request, Setup

LONGEST = 10
"""Pages of the longest prompt."""


class WrongHitError(AssertionError):
    """A prompt found less or more than was stored."""


@dataclass
class Ledger:
    """Say how much of a prompt a lossless cache finds.

    Attention pages are found up to the first one that nobody computed. A model with recurrent states also needs a state
    after the last page, and the only states are those after the prompts that were computed.
    """

    page_size: int
    states: bool
    pages: set[tuple[int, ...]] = field(default_factory=set)
    ends: set[tuple[int, ...]] = field(default_factory=set)

    def insert(self, tokens: Sequence[int]) -> None:
        self.pages.update(self._prefixes(tokens))
        self.ends.add(tuple(tokens))

    def hit(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of the prompt are found."""
        found = 0
        for prefix in self._prefixes(tokens):
            if prefix not in self.pages:
                break
            if not self.states or prefix in self.ends:
                found = len(prefix)
        return found

    def clear(self) -> None:
        self.pages.clear()
        self.ends.clear()

    def _prefixes(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[:end]) for end in range(self.page_size, len(tokens) + 1, self.page_size)]


class Walk:
    """Carry out random operations and check every answer.

    With ``exact``, each operation ends before the next one starts, and each prompt must find exactly what the ledger
    says. Otherwise several requests are in flight, are aborted in every state, and must not find more than the ledger
    says. Ranks that are given the same seed carry out the same operations.
    """

    def __init__(self, setup: Setup, seed: int, *, exact: bool) -> None:
        self.setup = setup
        self.random = random.Random(seed)
        self.exact = exact
        self.ledger = Ledger(setup.page_size, states=setup.model == "mamba")
        self.engine = Engine(setup)
        self.live: list[Request] = []
        self.admitted: set[Request] = set()
        self.prompts: list[list[int]] = []
        self.counts: dict[str, int] = {}
        self._stored: list[int] = []

    def run(self, operations: int) -> dict[str, int]:
        """Carry out the operations, then check that nothing leaked. Return how often what happened."""
        kinds = self._kinds()
        done: list[str] = []
        for _ in range(operations):
            kind = self.random.choices(list(kinds), [weight for weight, _ in kinds.values()])[0]
            done.append(kind)
            try:
                kinds[kind][1]()
            except Exception as error:
                error.add_note(f"operation {len(done)}, after {', '.join(done[-12:-1])}")
                raise
            self._count(kind)
        self.rest()
        self.engine.stop()
        return self.counts

    def rest(self) -> None:
        """End all requests, check the tree, and check that every page and state can be freed."""
        for request in list(self.live):
            self._abort(request)
        engine = self.engine
        engine.settle()
        engine.sound()
        if problems := engine.problems():
            raise AssertionError(f"the backend is inconsistent: {problems}")
        engine.evict(1 << 20)
        engine.settle()
        engine.evict_host(1 << 20)
        leaked: dict[str, int] = {}
        try:
            for _ in engine.until():  # SGLang's threads free the memory of aborted prefetches later
                engine.step()
                if not (leaked := engine.leaked()):
                    break
        except TimeoutError as error:
            raise AssertionError(f"memory that nobody uses is never freed: {leaked}") from error

    def _kinds(self) -> dict[str, tuple[int, Any]]:
        common = {
            "evict": (12, lambda: self.engine.evict(self.random.randint(1, 24))),
            "evict host": (8, lambda: self.engine.evict_host(self.random.randint(1, 24))),
            "restart": (1, self._restart),
        }
        if self.exact:
            # SGLang refuses to detach while prefetches are in flight. If it is done anyway, their host memory leaks.
            rare = {"clear": (1, self._clear), "reattach": (1, self._reattach)}
            return {"serve": (60, self._serve), **rare, **common}
        return {
            "submit": (40, self._submit),
            "step": (40, self._step),
            "advance": (100, self._advance),
            "abort": (4, self._abort_one),
            **common,
        }

    def _step(self) -> None:
        time.sleep(self.random.uniform(0, 0.002))  # for SGLang's threads
        self.engine.step()

    def _prompt(self) -> list[int]:
        """Return a prompt of whole pages. Most prompts begin like an earlier one."""
        page, choose = self.setup.page_size, self.random
        tokens: list[int] = []
        if self.prompts and choose.random() < 0.85:
            tokens = choose.choice(self.prompts)
            if choose.random() < 0.6:
                tokens = tokens[: page * choose.randint(0, len(tokens) // page)]
        new = choose.randint(0 if tokens else 1, 4)
        for _ in range(min(new, LONGEST - len(tokens) // page)):
            tokens = tokens + [choose.randint(0, 2) for _ in range(page)]
        self.prompts = [*self.prompts[-40:], tokens]
        return tokens

    def _serve(self) -> None:
        tokens = self._prompt()
        certain = self._certain()
        expected = self.ledger.hit(tokens)
        request = self.engine.serve(tokens)
        self.engine.store()
        if request.hit > expected or (certain and request.hit < expected):
            raise WrongHitError(
                f"{request.hit} tokens found ({request.device_hit} on the device, {request.prefetched} in storage),"
                f" {expected} expected, of {tokens}"
            )
        self._stored = tokens
        self._meet()
        self._count("prompts with predicted hits", certain)
        self.ledger.insert(tokens)
        self._count("tokens hit", request.hit)
        self._count("tokens from storage", request.prefetched)

    def _certain(self) -> bool:
        """Return whether the next prompt finds all that is stored. If not, SGLang itself may use less of it.

        With write-back, a page on the device that is not written yet hides later pages in storage. With sliding
        windows, SGLang reads a window from storage only if all of it comes after what is found on the device and in
        host memory. A prefetch with best effort ends when the request could start. A selective write-through drops
        pages that were used once.
        """
        if (
            self.setup.prefetch_policy == "best_effort"
            or self.setup.write_policy == "write_through_selective"
        ):
            return False
        if self.setup.write_policy != "write_back" and self.setup.model != "swa":
            return True
        if self.random.random() < 0.5:
            return False
        self.engine.evict(1 << 20)
        self.engine.store()
        if self.setup.model == "swa":
            self.engine.evict_host(1 << 20)
        return True

    def _submit(self) -> None:
        if len(self.live) < 3:
            self.live.append(self.engine.submit(self._prompt()))

    def _advance(self) -> None:
        if not self.live:
            return
        request = self.random.choice(self.live)
        if request not in self.admitted:
            self.engine.step()
            if not self.engine.ready(request):
                return
            request.prefetched = self.engine.prefetched(request)
            self.engine.admit(request)
            self.admitted.add(request)
            expected = self.ledger.hit(request.tokens)
            if request.hit > expected:
                raise WrongHitError(
                    f"{request.hit} tokens found, at most {expected} possible, of {request.tokens}"
                )
            self._count("tokens hit", request.hit)
            self._count("tokens from storage", request.prefetched)
        else:
            self.engine.check(request)
            self.engine.finish(request)
            self.ledger.insert(request.tokens)
            self._forget(request)

    def _abort_one(self) -> None:
        if self.live:
            self._abort(self.random.choice(self.live))

    def _abort(self, request: Request) -> None:
        self.engine.abort(request)
        self._count(f"abort {'admitted' if request in self.admitted else 'waiting'}")
        self._forget(request)

    def _forget(self, request: Request) -> None:
        self.live.remove(request)
        self.admitted.discard(request)

    def _restart(self) -> None:
        for request in list(self.live):
            self._abort(request)
        if self.exact:
            self.engine.evict(1 << 20)
        self.engine.store()
        self.engine.stop()
        self.engine = Engine(self.setup)
        if not self.setup.durable:
            self._forget_all()
        self._meet()

    def _reattach(self) -> None:
        self.engine.store()
        if not self.setup.durable:
            self.rest()
            self._forget_all()
        self.engine.reattach()
        self._meet()

    def _meet(self) -> None:
        """Wait until all ranks find the prompt that was stored last.

        With MLA, the first rank writes for all. The others see its pages a little later.
        """
        if self.exact and self.setup.model in ("mla", "dsa") and self.setup.ranks > 1 and self._stored:
            for _ in self.engine.until():
                if self.engine.finds(self._stored):
                    break

    def _clear(self) -> None:
        """Forget everything, in HBM, host memory and storage."""
        for request in list(self.live):
            self._abort(request)
        self.rest()
        if not self.engine.tree.clear_storage_backend():
            raise AssertionError("the storage backend cannot be cleared")
        self._forget_all()

    def _forget_all(self) -> None:
        self.ledger.clear()
        self._stored = []

    def _count(self, what: str, number: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + number
