"""Tests of the engine: its answers equal those of transformers, and requests take turns without long delays."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event as Flag
from threading import Semaphore, Thread

import pytest

from prefetch import Prefetcher
from tests.adapters.tiny import PAGE, open_store, plain
from tests.serve.small import GREEDY, Told, ask, ids_of, reader, standing_at
from tests.support.pages import PATIENCE_S
from tests.support.sick_disk import Failing, Hanging, disk_of, hold_clock, replace_preadv
from tests.support.waiting import wait_for
from tierstore.adapters.huggingface import page_specs
from tierstore.config import load_config
from tierstore.errors import StoreClosed
from tierstore.serve.engine import CLOSING, Engine
from tierstore.serve.request import Ask, BusyError, Done, Event, Failed, Piece, RefusedError, Sampling
from tierstore.store import TierStore
from tierstore.types import PageKey, Tier

LONG = "A page that leaves is found again below, and comes back before anybody waits for it."
OTHER = "Something else altogether, that has nothing in common with the first."
MIDDLE = 60
"""A forward pass in the middle of a long answer to ``LONG``, counted from 0."""


@contextmanager
def engine(
    hbm: int = 64, host: int = 0, disk: Path | None = None, **options: int
) -> Iterator[tuple[Engine, TierStore]]:
    with open_store(reader().model, hbm=hbm, host=host, disk=disk, payload="extents") as store:
        found = Engine(reader(), store, **{"chunk": 16, **options})
        try:
            yield found, store
        finally:
            found.close()


def text_of(prompt: list[int], count: int, **options: object) -> str:
    answer = plain(reader().model, prompt, max_new_tokens=count, **options)
    return str(reader().tokenizer.decode(answer, skip_special_tokens=True))


def counted(found: Engine, name: str) -> float:
    line = next(line for line in found.figures.text().splitlines() if line.startswith(f"{name} "))
    return float(line.split()[-1])


def test_answer_equals_transformers() -> None:
    with engine() as (found, _):
        _, told = ask(found, LONG, 12)
        usage = told.done()
    want = text_of(ids_of(LONG), 12)
    # transformers decodes bytes that never become a character as a replacement character.
    assert told.text == want.removesuffix("\ufffd") or told.text == want
    assert isinstance(told.end, Done)
    assert told.end.reason == "length"
    assert (usage.prompt_tokens, usage.completion_tokens, usage.reused) == (len(ids_of(LONG)), 12, {})
    assert 0 <= usage.waited_s <= usage.ttft_s <= usage.total_s


def test_prompt_with_a_stored_prefix_reuses_it() -> None:
    with engine() as (found, _):
        ask(found, LONG)[1].done()
        _, told = ask(found, LONG + " More.")
        usage = told.done()
    assert usage.reused_tokens >= len(LONG) // PAGE * PAGE
    assert usage.reused == {"HBM": usage.reused_tokens}
    assert told.text.rstrip("\ufffd") == text_of(ids_of(LONG + " More."), 8).rstrip("\ufffd")
    assert told.reads[0] == usage.reused_tokens
    assert told.reads[-1] == usage.prompt_tokens


def test_end_token_ends_an_answer_and_is_not_in_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, second) = plain(reader().model, ids_of(LONG), max_new_tokens=2)
    assert first != second
    monkeypatch.setattr(reader().model.generation_config, "eos_token_id", [second])
    with engine() as (found, _):
        _, told = ask(found, LONG, 30)
        usage = told.done()
    assert isinstance(told.end, Done)
    assert (told.end.reason, usage.completion_tokens) == ("stop", 2)


def test_a_stop_string_ends_an_answer() -> None:
    with engine() as (found, _):
        _, whole = ask(found, LONG, 30)
        whole.done()
        stop = whole.text[3:5]
        _, told = ask(found, LONG, 30, stop=(stop,))
        told.done()
    assert isinstance(told.end, Done)
    assert (told.text, told.end.reason) == (whole.text[: whole.text.find(stop)], "stop")


def test_request_for_zero_tokens_reads_the_prompt_into_the_store() -> None:
    with engine() as (found, store):
        _, told = ask(found, LONG, 0)
        usage = told.done()
        keys = store.keys(ids_of(LONG))
        assert store.match(keys).num_pages == len(keys) > 0
    assert (told.text, usage.completion_tokens) == ("", 0)
    assert told.reads == [*range(0, usage.prompt_tokens, 16), usage.prompt_tokens]


def test_seed_gives_the_same_tokens_regardless_of_other_requests() -> None:
    chance = Sampling(temperature=1.3, top_p=0.9, top_k=50, seed=5)
    with engine() as (found, _):
        texts = []
        for others in (0, 3):
            beside = [ask(found, OTHER * (n + 1), 20, sampling=Sampling(seed=n))[1] for n in range(others)]
            _, told = ask(found, LONG, 20, sampling=chance)
            for each in (told, *beside):
                each.done()
            texts.append(told.text)
        _, other = ask(found, LONG, 20, sampling=Sampling(temperature=1.3, top_p=0.9, top_k=50, seed=6))
        other.done()
    assert texts[0] == texts[1] != other.text


def test_answer_with_tiny_temperature_is_greedy() -> None:
    with engine() as (found, _):
        _, likeliest = ask(found, LONG, 20)
        _, told = ask(found, LONG, 20, sampling=Sampling(temperature=1e-42, top_p=0.5))
        likeliest.done()
        told.done()
    assert told.text == likeliest.text


def test_a_salt_keeps_tenants_apart() -> None:
    with engine() as (found, _):
        ask(found, LONG, salt=b"a")[1].done()
        assert ask(found, LONG, salt=b"b")[1].done().reused == {}
        assert ask(found, LONG, salt=b"a")[1].done().reused_tokens > 0


def test_answers_continue_while_a_long_prompt_is_read() -> None:
    with engine(hbm=128, chunk=8) as (found, _):
        _, short = ask(found, LONG, 60)
        short.first()
        _, long = ask(found, OTHER * 5, 1)
        long.done()
        while short.more():
            pass
        # Meanwhile 45 chunks of 8 tokens were read, and a token was sent after each chunk.
        assert len(short.text) > 20
        short.done()


class Order:
    """Records the order in which requests begin and end, as reported by the engine's thread."""

    def __init__(self, found: Engine) -> None:
        self.engine = found
        self.began: list[str] = []
        self.ended: list[str] = []
        self.most = 0
        """The maximum number of requests that ran at the same time."""

    def ask(self, name: str, prompt: str, count: int) -> Told:
        """Submit a request with greedy sampling, and record under ``name`` when it begins and ends."""
        told = Told()

        def tell(event: Event) -> None:
            if name not in self.began:
                self.began.append(name)
                self.most = max(self.most, len(self.began) - len(self.ended))
            if isinstance(event, Done):
                self.ended.append(name)
            told.events.put(event)

        self.engine.submit(Ask(prompt=tuple(ids_of(prompt)), max_tokens=count, sampling=GREEDY), tell)
        return told


def test_max_active_requests_run_and_the_others_wait_in_order() -> None:
    with engine(hbm=40, max_active=2) as (found, _):
        order, (go, first) = Order(found), held(found)
        first.events.get(timeout=PATIENCE_S)
        asked = [order.ask(name, f"{name} {LONG}", 16) for name in "abcdef"]
        go.set()
        for told in asked:
            told.done()
    assert "".join(order.began) == "abcdef"
    assert order.most == 2


def test_a_request_that_needs_all_of_hbm_is_not_overtaken_by_smaller_ones() -> None:
    with engine(hbm=32, max_active=8) as (found, _):
        order, (go, first) = Order(found), held(found)
        first.events.get(timeout=PATIENCE_S)
        asked = [order.ask(name, f"{name} {LONG}", 40) for name in "ab"]
        asked.append(order.ask("large", OTHER * 3, 31 * PAGE - len(OTHER) * 3))
        asked += [order.ask(name, f"{name} {LONG}", 4) for name in "cd"]
        go.set()
        for told in asked:
            told.done()
    assert order.began == ["a", "b", "large", "c", "d"]
    assert order.ended[2] == "large", "something ran beside one that needs all there is"


@pytest.mark.parametrize(
    ("prompt", "count", "why"),
    [
        ([], 4, "at least one token"),
        ([1, 2, 999], 4, "token must be 0 to 259, got 999"),
        ([-1], 4, "got -1"),
        (
            [1] * 500,
            13,
            "at most 248 tokens fit .*the model reads up to 512 tokens, HBM holds 32 pages of 8 tokens",
        ),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_with_the_sizes(
    prompt: list[int], count: int, why: str
) -> None:
    with engine(hbm=32) as (found, _):
        with pytest.raises(RefusedError, match=why):
            ask(found, prompt, count)
        assert counted(found, 'tierstore_serve_requests_total{outcome="refused"}') == 1


def test_a_prompt_and_answer_that_fill_hbm_are_served() -> None:
    with engine(hbm=16) as (found, _):
        assert found.max_tokens == 15 * PAGE
        usage = ask(found, [5] * 50, 15 * PAGE - 50)[1].done()
    assert usage.completion_tokens == 15 * PAGE - 50


def held(found: Engine) -> tuple[Flag, Told]:
    """Submit a request whose first event blocks the engine's thread until the returned flag is set."""
    go, told = Flag(), Told()

    def tell(event: Event) -> None:
        told.events.put(event)
        go.wait(PATIENCE_S)

    found.submit(Ask(prompt=tuple(ids_of("hold")), max_tokens=1, sampling=GREEDY), tell)
    return go, told


def test_requests_beyond_max_waiting_are_refused() -> None:
    with engine(max_waiting=2) as (found, _):
        go, told = held(found)
        told.events.get(timeout=PATIENCE_S)
        waiting = [ask(found, LONG)[1] for _ in range(2)]
        with pytest.raises(BusyError, match="2 requests are already waiting; the limit is 2"):
            ask(found, LONG)
        go.set()
        for each in waiting:
            each.done()
        ask(found, LONG)[1].done()


def test_request_cancelled_while_waiting_is_never_computed() -> None:
    with engine() as (found, store):
        go, told = held(found)
        told.events.get(timeout=PATIENCE_S)
        ticket, waiting = ask(found, LONG)
        ticket.cancel()
        go.set()
        ask(found, OTHER)[1].done()
        assert not waiting.more()
        assert store.match(store.keys(ids_of(LONG))).num_pages == 0
        assert counted(found, 'tierstore_serve_requests_total{outcome="cancelled"}') == 1


def test_a_request_cancelled_while_running_frees_its_space() -> None:
    with engine(hbm=32) as (found, _), standing_at(MIDDLE, reader().model) as model:
        ticket, told = ask(found, LONG, 160)
        told.first()
        model.wait()
        ticket.cancel()
        ticket.cancel()
        model.go_on.set()
        # The cancelled request had all of HBM, so this request needs its pages.
        ask(found, OTHER * 2, 100)[1].done()
        assert told.end is None
        while told.more():
            pass
        assert told.end is None, "it was told of its end after it was cancelled"


def test_an_error_in_one_request_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine() as (found, _):

        def fail(module: object, args: object, kwargs: dict[str, object]) -> None:
            raise ArithmeticError("no such number")

        hook = reader().model.register_forward_pre_hook(fail, with_kwargs=True)
        end = ask(found, LONG)[1].wait()
        hook.remove()
        assert end == Failed("ArithmeticError: no such number")
        assert ask(found, LONG)[1].done().completion_tokens == 8
        assert counted(found, 'tierstore_serve_requests_total{outcome="failed"}') == 1


def test_closing_fails_running_and_waiting_requests() -> None:
    with engine(hbm=32, max_active=1) as (found, _), standing_at(MIDDLE, reader().model) as model:
        _, active = ask(found, LONG, 160)
        active.first()
        model.wait()
        _, waiting = ask(found, OTHER)
        closer = Thread(target=found.close)
        closer.start()
        wait_for(lambda: not found.ready)
        model.go_on.set()
        closer.join(PATIENCE_S)
        assert not closer.is_alive()
        assert (active.wait(), waiting.wait()) == (Failed(CLOSING), Failed(CLOSING))
        with pytest.raises(StoreClosed, match="closing"):
            ask(found, LONG)
        found.close()


def test_closing_the_store_first_ends_the_engine() -> None:
    model = reader().model
    specs = page_specs(model, PAGE)
    config = load_config({"hbm": {"capacity": 32 * specs[0].page_nbytes, "device": str(model.device)}})
    store = TierStore.open(config, specs)
    found = Engine(reader(), store)
    with standing_at(MIDDLE, model) as standing:
        _, told = ask(found, LONG, 100)
        told.first()
        standing.wait()
        closer = Thread(target=store.close)
        closer.start()
        closer.join(PATIENCE_S)
        assert not closer.is_alive()
    assert isinstance(told.wait(), Failed)
    with pytest.raises(StoreClosed):
        ask(found, LONG)
    found.close()


def on_disk(found: Engine, store: TierStore, prompt: str) -> list[PageKey]:
    """Process a prompt, and demote its pages so that only the disk holds them. Return their keys."""
    ask(found, prompt, 0)[1].done()
    keys = store.keys(ids_of(prompt))
    assert store.demote(keys, Tier.NVME)
    assert store.drain(PATIENCE_S)
    assert set(store.match(keys).tiers) == {Tier.NVME}
    return keys


def test_prompt_on_disk_is_reused_and_its_tier_reported(tmp_path: Path) -> None:
    with engine(host=64, disk=tmp_path) as (found, store):
        keys = on_disk(found, store, LONG)
        _, told = ask(found, LONG + "!")
        usage = told.done()
    assert usage.reused["NVME"] == len(keys) * PAGE
    assert told.text.rstrip("\ufffd") == text_of(ids_of(LONG + "!"), 8).rstrip("\ufffd")


def test_request_waiting_for_the_disk_blocks_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(host=64, disk=tmp_path) as (found, store):
        on_disk(found, store, LONG)
        hold_clock(disk_of(store))
        hanging = Hanging(1)
        replace_preadv(monkeypatch, hanging)
        order = Order(found)
        waits = order.ask("on disk", LONG + "!", 4)
        hanging.wait(1)
        order.ask("near", OTHER, 20).done()
        assert order.began == ["near"]
        hanging.go_on.set()
        assert waits.done().reused["NVME"] > 0


def test_a_request_cancelled_while_its_pages_are_loaded_releases_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(host=64, disk=tmp_path, max_active=1) as (found, store):
        on_disk(found, store, LONG)
        hold_clock(disk_of(store))
        hanging = Hanging(1)
        replace_preadv(monkeypatch, hanging)
        ticket, told = ask(found, LONG + "!")
        hanging.wait(1)
        ticket.cancel()
        assert ticket.wait(PATIENCE_S), "it holds on to a disk that hangs"
        ask(found, OTHER)[1].done()
        hanging.go_on.set()
        assert not told.more()


def test_pages_that_cannot_be_read_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(host=64, disk=tmp_path) as (found, store):
        on_disk(found, store, LONG)
        replace_preadv(monkeypatch, Failing())
        _, told = ask(found, LONG + "!")
        usage = told.done()
        replace_preadv(monkeypatch, None)
    assert usage.reused == {}
    assert told.text.rstrip("\ufffd") == text_of(ids_of(LONG + "!"), 8).rstrip("\ufffd")


def test_hints_promote_the_pages_of_a_waiting_request(tmp_path: Path) -> None:
    with engine(host=64, disk=tmp_path, max_active=1) as (found, store), Prefetcher.attach(store):
        keys = on_disk(found, store, LONG)
        words, begun, first = Semaphore(0), Flag(), Told()

        def tell(event: Event) -> None:
            first.events.put(event)
            if isinstance(event, Piece):
                begun.set()
                assert words.acquire(timeout=PATIENCE_S)

        found.submit(Ask(prompt=tuple(ids_of(OTHER)), max_tokens=30, sampling=GREEDY), tell)
        assert begun.wait(PATIENCE_S)
        _, told = ask(found, LONG + "!", 4)
        words.release()  # once the next token is computed, the engine has seen the waiting request
        wait_for(lambda: Tier.NVME not in store.match(keys).tiers)
        words.release(30)
        first.done()
        usage = told.done()
    assert "NVME" not in usage.reused
    assert usage.reused_tokens >= len(keys) * PAGE
