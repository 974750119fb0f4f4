"""A state machine of the transformers adapter, with open caches, chats and a store that is too small for all of them.

Its reference model consists of the tokens of each cache and chat. After every step, a forward pass must give the same
logits as plain transformers for these tokens, each page must hold the K/V of its key's tokens, and no leased page may
be written.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.adapters.store_machine import WAIT_S, Open, StoreMachine, prompts, same_logits
from tests.adapters.tiny import PAGE, plain, plain_batch, random_prompt, watch
from tierstore.adapters.huggingface import TierStoreCache, cache_argument
from tierstore.adapters.huggingface.prefix import common_prefix
from tierstore.errors import CapacityError

MOST_OPEN = 3
SHORT: dict[str, Any] = {"do_sample": False, "max_new_tokens": 3, "pad_token_id": 0}

storing = st.sampled_from(["all", "all", "all", "memory-only", "read-only", "no-store"])


class AdapterMachine(StoreMachine):
    """Calls the adapter in random order. Subclasses set ``model``, and ``draft`` if they use a draft model."""

    flaky = False
    """Whether copies fail. If they do, reused tokens can be lost and computed again, and passes can be repeated."""

    # -- caches -------------------------------------------------------------------------------------------------

    def pick(self, at: int) -> Open | None:
        return self.open[at % len(self.open)] if self.open else None

    @rule(rows=st.lists(prompts, min_size=1, max_size=3), storing=storing, first=st.sampled_from([0, 5, 99]))
    def open_cache(self, rows: list[list[int]], storing: Any, first: int) -> None:
        if len(self.open) == MOST_OPEN:
            self.end_cache(self.open[0])
        if self.draft is not None:
            rows = rows[:1]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        cache = TierStoreCache(
            self.store, ids, mask, model=self.model, draft=self.draft, timeout_s=WAIT_S, storing=storing
        )
        pads = [width - len(row) for row in rows]
        counts = [max(0, cache.get_seq_length() - pad) for pad in pads]
        assert cache.reused_tokens == sum(counts) <= sum(map(len, rows)) - 1
        assert storing != "no-store" or not sum(counts)
        split = list(zip(rows, counts, strict=True))
        found = Open(cache, pads, [row[:n] for row, n in split], [row[n:] for row, n in split])
        found.drafted = list(found.fed[0])
        self.open.append(found)
        if first:
            self.go_on(found, first, 0)

    @rule(
        at=st.integers(0, 5),
        widths=st.lists(st.integers(1, PAGE + 3), min_size=1, max_size=3),
        seed=st.integers(0, 3),
    )
    def feed(self, at: int, widths: list[int], seed: int) -> None:
        cache = self.pick(at)
        for width in widths:
            if cache is not None and cache.columns < 12 * PAGE:
                self.go_on(cache, width, seed)

    def go_on(self, cache: Open, width: int, seed: int) -> None:
        start = cache.columns
        left = max(map(len, cache.rest))
        width = min(width, left) if left else width
        new, rest = [], []
        for row, pad in enumerate(cache.paddings):
            count = max(0, min(width, start + width - pad))
            given = cache.rest[row] if left else random_prompt(width, seed=seed + row)
            new.append(given[:count])
            rest.append(given[count:] if left else [])
        logits = self.forward(cache, new, width)
        if logits is None:
            return
        cache.rest = rest
        cache.fed = [old + more for old, more in zip(cache.fed, new, strict=True)]
        assert cache.columns == start + width
        for row, more in enumerate(new):
            if more:
                same_logits(self.model, cache.fed[row], logits[row, -len(more) :])

    def forward(self, cache: Open, new: list[list[int]], width: int) -> torch.Tensor | None:
        """Return the logits of one pass, or None if HBM has no free slots. In that case the cache is unchanged."""
        start = cache.columns
        ids = torch.tensor([[0] * (width - len(row)) + row for row in new])
        columns = torch.arange(start, start + width)[None] - torch.tensor(cache.paddings)[:, None]
        seen = torch.arange(start + width)[None] >= torch.tensor(cache.paddings)[:, None]
        try:
            with torch.no_grad():
                out = self.model(
                    ids,
                    position_ids=columns.clamp(min=0),
                    attention_mask=seen.long(),
                    **{cache_argument(self.model): cache.cache},
                )
        except CapacityError:
            assert cache.columns == start
            return None
        logits: torch.Tensor = out.logits
        return logits

    @rule(at=st.integers(0, 5))
    def generate(self, at: int) -> None:
        cache = self.pick(at)
        if cache is None:
            return
        rows = [fed + (rest or [7]) for fed, rest in zip(cache.fed, cache.rest, strict=True)]
        width = max(pad + len(row) for pad, row in zip(cache.paddings, rows, strict=True))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        start, options = cache.columns, {**SHORT, "attention_mask": mask}
        name, model = cache_argument(self.model), self.model
        if self.draft is not None and len(rows) == 1:
            options["assistant_model"] = cache.cache.draft_model
            # Remove wrong guesses, and guesses beyond the target's tokens, which did not come from generate.
            guesses = len(cache.drafted) - common_prefix(cache.drafted, cache.fed[0])
            cache.cache.draft_model.cache.crop(-guesses)
        try:
            with watch(model) as fed:
                out = model.generate(ids, **options, **{name: cache.cache})  # type: ignore[operator]
        except CapacityError:
            self.end_cache(cache)
            return
        options.pop("assistant_model", None)
        assert out.tolist() == plain_batch(model, ids, **options).tolist()
        assert cache.columns == out.shape[1] - 1
        if not self.flaky:
            assert fed.widths[0] <= width - start + 20
        if self.draft is None and not self.flaky:
            assert sum(fed.widths) == cache.columns - start
        cache.fed = [row[pad:-1].tolist() for row, pad in zip(out, cache.paddings, strict=True)]
        cache.rest = [[] for _ in rows]
        cache.drafted = cache.fed[0][: cache.cache.batch.columns[-1]]

    @rule(at=st.integers(0, 5), count=st.integers(0, 2 * PAGE), again=st.booleans())
    def crop(self, at: int, count: int, again: bool) -> None:
        """Remove the last ``count`` tokens of a cache. If ``again``, feed them again in the next pass."""
        cache = self.pick(at)
        if cache is None or any(cache.rest):
            return
        stop = max(0, cache.columns - count)
        try:
            cache.cache.crop(-count)
        except ValueError as error:
            if "window" not in str(error):
                raise
            return
        assert cache.columns == stop
        before = cache.fed
        cache.fed = [row[: max(0, stop - pad)] for row, pad in zip(before, cache.paddings, strict=True)]
        if again:
            cache.rest = [old[len(row) :] for old, row in zip(before, cache.fed, strict=True)]
        del cache.drafted[stop:]
        if any(cache.paddings) and stop <= max(cache.paddings):
            self.end_cache(cache)

    @rule(at=st.integers(0, 5), really=st.integers(0, 3))
    def reset(self, at: int, really: int) -> None:
        cache = self.pick(at)
        if cache is not None and not any(cache.paddings) and not really:
            cache.cache.reset()
            cache.fed, cache.rest, cache.drafted = [[] for _ in cache.fed], [[] for _ in cache.fed], []
            assert cache.columns == 0

    @rule(
        at=st.integers(0, 5),
        picks=st.lists(st.integers(0, 11), min_size=1, max_size=4),
        how=st.sampled_from(["repeat", "reorder", "select"]),
    )
    def choose(self, at: int, picks: list[int], how: str) -> None:
        cache = self.pick(at)
        if cache is None or self.draft is not None:
            return
        rows = range(len(cache.fed))
        if how == "repeat":
            chosen = [row for row in rows for _ in range(2)]
            if len(chosen) <= 4:
                cache.cache.batch_repeat_interleave(2)
        else:
            chosen = [pick % len(rows) for pick in picks]
            given = torch.tensor(chosen)
            (cache.cache.reorder_cache if how == "reorder" else cache.cache.batch_select_indices)(given)
        if len(chosen) <= 4:
            for name in ("fed", "rest", "paddings"):
                setattr(cache, name, [getattr(cache, name)[row] for row in chosen])
            cache.fed, cache.rest = [list(row) for row in cache.fed], [list(row) for row in cache.rest]

    @rule(at=st.integers(0, 5), width=st.sampled_from([1, 5, PAGE, 40]), right=st.booleans())
    def feed_draft(self, at: int, width: int, right: bool) -> None:
        """Run the draft model, on the target's tokens if ``right``, otherwise on guesses."""
        cache = self.pick(at)
        if cache is None or self.draft is None:
            return
        paged: Any = cache.cache.draft_model.cache
        known = cache.fed[0] + cache.rest[0]
        follows = known[: len(cache.drafted)] == cache.drafted
        new = known[len(cache.drafted) :][:width] if right and follows else []
        if not new:
            # The cache refuses a guess where it expects tokens of the prompt.
            if any(cache.rest) or len(cache.drafted) < len(cache.fed[0]):
                return
            new = random_prompt(min(width, PAGE), seed=9)
        try:
            with torch.no_grad():
                out = self.draft(torch.tensor([new]), **{cache_argument(self.draft): paged})
        except CapacityError:
            return
        cache.drafted += new
        assert paged.get_seq_length() == len(cache.drafted)
        same_logits(self.draft, cache.drafted, out.logits[0])

    @rule(at=st.integers(0, 5), count=st.integers(1, PAGE))
    def crop_draft(self, at: int, count: int) -> None:
        cache = self.pick(at)
        if cache is not None and self.draft is not None:
            cache.cache.draft_model.cache.crop(-count)
            del cache.drafted[max(0, len(cache.drafted) - count) :]

    @rule(at=st.integers(0, 5), really=st.booleans())
    def close(self, at: int, really: bool) -> None:
        cache = self.pick(at)
        if cache is not None and really:
            self.end_cache(cache)

    def end_cache(self, cache: Open) -> None:
        cache.cache.close()
        self.open = [each for each in self.open if each is not cache]

    # -- chats --------------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from("ab"), tokens=prompts)
    def say(self, name: str, tokens: list[int]) -> None:
        session = self.chats.session(name, ttl_s=50.0)
        known = self.talk.setdefault(name, [])
        if len(session.tokens) < len(known):
            known.clear()
        assert list(session.tokens) == known
        if len(known) < 10 * PAGE:
            session.append(tokens[-PAGE:])
            known += tokens[-PAGE:]

    @rule(name=st.sampled_from("abc"))
    def answer(self, name: str) -> None:
        session = self.chats.session(name, ttl_s=50.0)
        if not session.tokens:
            return
        before = list(session.tokens)
        try:
            answer = session.generate(**SHORT)
        except CapacityError:
            assert list(session.tokens) == before
            return
        assert answer == plain(self.model, before, **SHORT)
        assert list(session.tokens) == before + answer
        self.talk[name] = list(session.tokens)

    @rule(name=st.sampled_from("ab"), fed=prompts, said=st.booleans())
    def turn_by_hand(self, name: str, fed: list[int], said: bool) -> None:
        """Run a turn by calling the model. If ``said``, append the turn's new tokens with the first one replaced."""
        session = self.chats.session(name, ttl_s=50.0)
        if not 0 < len(session.tokens) < 10 * PAGE or self.draft is not None:
            return
        tokens = [*session.tokens, *fed[-PAGE - 2 :]]
        with suppress(CapacityError), session.turn() as cache, torch.no_grad():
            rest = tokens[cache.get_seq_length() :]
            logits = self.model(torch.tensor([rest]), **{cache_argument(self.model): cache}).logits
            same_logits(self.model, tokens, logits[0])
        if said:
            session.append([5, *tokens[len(session.tokens) + 1 :]])
        self.talk[name] = list(session.tokens)

    @rule(name=st.sampled_from("ab"), at=st.floats(0, 1))
    def fork(self, name: str, at: float) -> None:
        session = self.chats.session(name, ttl_s=50.0)
        self.chats.session("c").drop()
        count = int(at * len(session.tokens))
        other = session.fork("c", count)
        assert other.tokens == session.tokens[:count]

    @rule(name=st.sampled_from("abc"), how=st.sampled_from(["retain", "drop", "time"]))
    def end(self, name: str, how: str) -> None:
        session = self.chats.session(name, ttl_s=50.0)
        if how == "retain":
            session.retain(20.0)
        elif how == "drop":
            session.drop()
        else:
            self.now += 30.0
            self.chats.expire()
