"""Clients that run a small random Llama with the transformers adapter, and compare answers with the model's own."""

# Some functions of transformers have no types:
# mypy: allow-untyped-calls
from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.adapters.tiny import NEW, PAGE, generate, generate_batch, pad_left, plain, plain_batch, tiny_llama
from tests.soak.account import PATIENCE_S, Account, WrongBytes
from tests.soak.faults import Trouble
from tests.soak.waiting import losing, wait_idle
from tests.support.bench import Bench, open_bench
from tests.support.pages import tiers
from tierstore.adapters.huggingface import PrefixCache, Session, TierStoreCache, cache_argument, page_specs
from tierstore.errors import CapacityError

HBM, HOST, NVME = 48, 24, 80
_NEAR = 0.02
"""Two logits that differ by less than this may swap ranks if sums are computed in a different order.

Other logits of this model differ by at least ten times as much.
"""


def _tokens(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(2, 97) for _ in range(length)]


BEGINNINGS = [_tokens(3 * PAGE, seed) for seed in range(3)]
PROMPTS = [
    BEGINNINGS[i % 3][: (i % 4) * PAGE - (i % 2) * 3 if i % 4 else 0] + _tokens(4 + 3 * i, 100 + i)
    for i in range(9)
]
SECRETS = [BEGINNINGS[i][: 2 * PAGE] + _tokens(3 * PAGE, 200 + i) for i in range(2)]
"""Prompts that are stored memory-only or not at all. A later process must not find pages that only they contain."""
SHARED_PAGES = 2


class LlamaClient:
    """Makes all kinds of requests in one thread: single prompts, batches, beams, draft models, forked chats.

    It uses every ``storing`` option."""

    threads = 1

    def __init__(self, home: Path, seed: int, account: Account) -> None:
        self.trouble: Trouble | None = None
        self._model = tiny_llama()
        specs = page_specs(self._model, PAGE)
        nbytes = sum(spec.page_nbytes for spec in specs)
        config = tiers(HBM, HOST, home, nvme_pages=NVME, page_nbytes=nbytes, nvme_more={"payload": "extents"})
        self.bench: Bench = open_bench(config, specs, pump=True, spill=True)
        self._store = self.bench.store
        self._account = account
        self._answers: dict[tuple[Any, ...], list[int]] = {}
        self._chats = PrefixCache(self._store, self._model, timeout_s=2.0)
        self._sessions: list[Session] = []
        self._names = 0
        self._actions: list[tuple[int, str, Callable[[random.Random], None]]] = [
            (8, "request", self._single),
            (3, "memory-only request", self._secret),
            (3, "batch", self._batch),
            (2, "beams", self._beams),
            (3, "speculation", self._speculate),
            (3, "rollback", self._roll_back),
            (6, "turn", self._turn),
            (3, "fork", self._fork),
            (1, "evict", self._evict),
            (1, "flush", self._flush),
            (1, "check", lambda chance: self._store.check()),
        ]

    def read_back(self) -> int:
        """Answer every prompt. Return the number of reused pages that earlier processes had stored."""
        for prompt in SECRETS:
            own = self._store.keys(prompt + self._plain(prompt))[SHARED_PAGES:]
            if any(self._store.match([key]).num_pages for key in own):
                raise WrongBytes("a page of a memory-only request is offered after a restart")
        return sum(self._ask(prompt, "all") for prompt in PROMPTS) // PAGE

    def plant(self) -> None:
        """Raise an error, because this kind of client cannot plant a wrong byte."""
        raise NotImplementedError

    def hand(self, seed: str) -> random.Random:
        """Return the random number generator of a thread."""
        return random.Random(seed)

    def act(self, chance: random.Random) -> None:
        """Do one random action."""
        weights = [weight for weight, _, _ in self._actions]
        _, name, action = chance.choices(self._actions, weights)[0]
        self._account.count("actions", f"llama: {name}")
        try:
            action(chance)
        except CapacityError:  # HBM is full of pages that cannot be written back now
            self._account.count("no room", f"llama: {name}")

    def rest(self, chance: random.Random) -> None:
        """End all chats."""
        self._chats.close()

    def finish(self) -> None:
        """Check that all HBM slots can be allocated, unless acks were lost."""
        self._store.check()
        if not losing(self.trouble):
            wait_idle(self._store, self.trouble)
            self._store.free(self._store.allocate(HBM, timeout_s=PATIENCE_S))

    # -- requests -----------------------------------------------------------------------------------------------

    def _single(self, chance: random.Random) -> None:
        self._ask(chance.choice(PROMPTS), chance.choice(["all", "all", "read-only", "no-store"]))

    def _secret(self, chance: random.Random) -> None:
        self._ask(
            chance.choice(SECRETS), chance.choice(["memory-only", "memory-only", "read-only", "no-store"])
        )

    def _ask(self, prompt: list[int], storing: Any, **options: Any) -> int:
        with self._cache(prompt, storing=storing) as cache:
            answer = generate(self._model, prompt, cache, **options)
            reused = cache.reused_tokens
        self._compare(prompt, answer, max_new_tokens=options.get("max_new_tokens", NEW))
        return reused

    def _cache(self, ids: Any, mask: torch.Tensor | None = None, **options: Any) -> TierStoreCache:
        patience_s = 0.2 if losing(self.trouble) else 2.0
        return TierStoreCache(self._store, ids, mask, model=self._model, timeout_s=patience_s, **options)

    def _batch(self, chance: random.Random) -> None:
        prompts = chance.sample(PROMPTS, chance.randint(2, 3))
        ids, mask = pad_left(prompts)
        with self._cache(ids, mask) as cache:
            rows = generate_batch(self._model, ids, cache, attention_mask=mask)
        for prompt, row in zip(prompts, rows[:, ids.shape[1] :].tolist(), strict=True):
            self._compare(prompt, row)

    def _beams(self, chance: random.Random) -> None:
        prompt = chance.choice(PROMPTS)
        options: dict[str, Any] = {"num_beams": chance.choice([2, 3]), "max_new_tokens": NEW}
        with self._cache(prompt) as cache:
            rows = generate_batch(self._model, torch.tensor([prompt]), cache, **options).tolist()
        want = plain_batch(self._model, torch.tensor([prompt]), **options).tolist()
        if rows != want and abs(self._score(rows[0], prompt) - self._score(want[0], prompt)) > _NEAR:
            raise WrongBytes(f"beam search over {prompt} returned {rows}, expected {want}")
        self._account.count("pages", "answers compared")

    def _speculate(self, chance: random.Random) -> None:
        """Generate with candidate tokens from the prompt itself. Most candidates are rolled back."""
        prompt = _tokens(6, chance.randrange(3)) * chance.choice([3, 4])
        self._ask(prompt, "all", prompt_lookup_num_tokens=chance.choice([2, 4]), max_new_tokens=20)

    def _roll_back(self, chance: random.Random) -> None:
        """Compute a prompt, crop the cache to a random length, and continue with another prompt."""
        first, second = chance.choice(PROMPTS), chance.choice(PROMPTS)
        with torch.no_grad(), self._cache(first) as cache:
            name: dict[str, Any] = {cache_argument(self._model): cache}
            start = cache.get_seq_length()
            self._model(torch.tensor([first[start:]]), **name)
            kept = chance.randrange(len(first))
            if kept < len(first):
                cache.crop(kept - len(first))
            whole = first[:kept] + second
            answer = generate(self._model, whole, cache)
        self._compare(whole, answer)

    # -- chats --------------------------------------------------------------------------------------------------

    def _turn(self, chance: random.Random) -> None:
        if len(self._sessions) < 2:
            self._names += 1
            self._sessions.append(self._chats.session(f"chat {self._names}"))
        self._go_on(chance.choice(self._sessions), chance)

    def _fork(self, chance: random.Random) -> None:
        parents = [session for session in self._sessions if session.tokens]
        if parents:
            parent = chance.choice(parents)
            self._names += 1
            at = chance.choice([None, chance.randint(1, len(parent.tokens))])
            self._sessions.append(parent.fork(f"chat {self._names}", at))
            self._go_on(self._sessions[-1], chance)
        while len(self._sessions) > 4:
            self._sessions.pop(0).drop()

    def _go_on(self, session: Session, chance: random.Random) -> None:
        session.append(_tokens(chance.randint(1, 12), chance.getrandbits(32)))
        prompt = list(session.tokens)
        answer = session.generate(do_sample=False, max_new_tokens=5, pad_token_id=0)
        self._compare(prompt, answer, max_new_tokens=5)
        if len(session.tokens) > 12 * PAGE:
            session.drop()
            self._sessions.remove(session)

    def _evict(self, chance: random.Random) -> None:
        keys = self._store.keys(chance.choice(PROMPTS))
        self._store.evict(keys[chance.randint(0, 2) :])

    def _flush(self, chance: random.Random) -> None:
        if not losing(self.trouble):
            self._store.flush()

    # -- answers ------------------------------------------------------------------------------------------------

    def _plain(self, prompt: list[int], **options: Any) -> list[int]:
        name = (tuple(prompt), tuple(options.items()))
        if name not in self._answers:
            if len(self._answers) > 200:
                self._answers.clear()
            self._answers[name] = plain(self._model, prompt, **options)
        return self._answers[name]

    def _compare(self, prompt: list[int], answer: list[int], **options: Any) -> None:
        """Raise WrongBytes unless the answer is the model's or diverges from it where two tokens are equally likely."""
        want = self._plain(prompt, **{"max_new_tokens": NEW, **options})
        self._account.count("pages", "answers compared")
        if answer == want:
            return
        at = next((i for i, (a, b) in enumerate(zip(answer, want, strict=False)) if a != b), None)
        if at is None or len(answer) != len(want):
            raise WrongBytes(f"the answer to {prompt} has {len(answer)} tokens, expected {len(want)}")
        logits = self._logits(prompt + want[:at])[-1]
        if abs(float(logits[want[at]] - logits[answer[at]])) > _NEAR:
            raise WrongBytes(f"the answer to {prompt} is {answer}, expected {want}")
        self._account.count("pages", "answers that differ where two tokens are equally likely")

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = self._model(torch.tensor([tokens]), use_cache=False).logits[0]
        return found

    def _score(self, row: list[int], prompt: list[int]) -> float:
        logs = self._logits(row).log_softmax(-1)
        return sum(float(logs[i - 1, row[i]]) for i in range(len(prompt), len(row)))
