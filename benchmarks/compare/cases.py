"""All cases of one model.

There are two stores. The pages of one contain K and V of the model, and the pages of the other also contain K and V of
a draft model. A case is a function that makes requests to one of these stores and yields a row for each request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.compare.comparison import PATIENCE_S, Asked, Comparison, Say, count_fed, leftovers, open_store
from benchmarks.compare.subject import (
    Prompt,
    Question,
    Request,
    Sizes,
    Subject,
    forks_inside_a_page,
    mixed_batch,
)
from benchmarks.compare.verdicts import Row
from tierstore.adapters.huggingface import PrefixCache, Session
from tierstore.types import Tier

TURNS = 6
FORK = 3
"""Number of the turn that forks the session: it drops the end of the previous turn and asks another question."""
AWAY = 5
"""Number of the turn before which the pages of the conversation are demoted to NVMe."""


def chat(run: Comparison, texts: Sequence[Prompt], sizes: Sizes) -> Iterator[Row]:
    """Hold a chat of several turns, and yield a row for each turn.

    Each answer is compared with that of the plain model, which computes the whole conversation again. With the store, a
    turn may compute only its new tokens and one more, even after a fork inside a page.
    """
    with PrefixCache(run.store, run.subject.model, salt=b"chat", timeout_s=PATIENCE_S) as chats:
        session, begin = chats.session("first"), sizes.short // 2
        for turn in range(1, TURNS + 1):
            name = f"chat, turn {turn}"
            if turn == FORK:
                session = session.fork("second", _inside_a_page(session, sizes))
                name += ", a fork inside a page"
            if turn == AWAY:
                run.settle()
                run.store.demote(chats.keys(session.tokens), Tier.NVME)
                name += ", from NVME"
            run.settle()
            text = texts[0][:begin] if turn == 1 else _piece(texts[2], turn, sizes.turn)
            yield _turn(run, session, text, name, sizes)


def _turn(run: Comparison, session: Session, text: Prompt, name: str, sizes: Sizes) -> Row:
    """Append ``text`` to the session, generate the answer, append it, and return the row."""
    session.append(text)
    question = Question((session.tokens,), sizes.new)
    run.say(name)
    plain = run.subject.plain(question)
    begin = time.perf_counter()
    with session.turn() as cache, count_fed(run.subject.model, lambda: cache.columns) as fed:
        reused, copied = cache.reused_by_tier, cache.copied_tokens
        answers = run.subject.stored(cache, Request(name, question))
    session.append(answers[0])
    computed = len(question.prompts[0]) - sum(reused.values())
    wrong: tuple[str, ...] = ()
    if computed > len(text) + 1:
        wrong = (f"{computed} tokens of the conversation were computed, {len(text)} were new",)
    asked = Asked(
        answers=answers,
        reused={tier.name: count for tier, count in reused.items() if count},
        fed=fed.tokens,
        to_feed=question.num_tokens - sum(reused.values()),
        shared_pages=0,
        seconds=time.perf_counter() - begin,
        wrong=wrong,
        note=f"{len(text)} new tokens, {computed} computed before the answer, {copied} copied",
    )
    return run.row(name, asked, run.verdict(question, answers), plain_is=plain.answers)


def _piece(text: Prompt, number: int, length: int) -> Prompt:
    """Return ``length`` tokens of a text for turn ``number``. In a short text, pieces of different turns overlap."""
    first = number * length % (len(text) - length)
    return text[first : first + length]


def _inside_a_page(session: Session, sizes: Sizes) -> int:
    """Return a position in the last question that is not a page boundary."""
    place = len(session.tokens) - sizes.new - sizes.turn // 2
    return place - 1 if place % sizes.page == 0 else place


Texts = Sequence[Prompt]


def greedy(run: Comparison, texts: Texts, sizes: Sizes) -> Iterator[Row]:
    """Answer one prompt greedily: before it is stored, and then with its pages in HBM, in host memory and on NVMe."""
    question = _long(texts, sizes)
    most = sizes.stored(sizes.long)
    yield run.ask(Request("greedy, cold", question))
    yield run.ask(Request("greedy, warm", question, least_reused=most, found_in=Tier.HBM, least_found=most))
    for tier in (Tier.HOST, Tier.NVME):
        run.demote(question, tier)
        yield run.ask(
            Request(f"greedy, from {tier.name}", question, least_reused=most, found_in=tier, least_found=most)
        )


def batch(run: Comparison, texts: Texts, sizes: Sizes) -> Iterator[Row]:
    """Answer four prompts of different lengths as one batch, twice. ``greedy`` must have stored the first prompt."""
    question = mixed_batch(texts, sizes)
    start = min(question.paddings[-1], sizes.stored(sizes.long))
    least = sum(start - pad for pad in question.paddings if pad < start)
    yield run.ask(Request("batch of 4: whole, part, inside a page, new", question, least_reused=least))
    pairs = zip(question.paddings, question.prompts, strict=True)
    start = min(pad + sizes.stored(len(prompt)) for pad, prompt in pairs)
    least = sum(start - pad for pad in question.paddings)
    yield run.ask(Request("batch of 4, again", question, least_reused=least))


def samples(run: Comparison, texts: Texts, sizes: Sizes) -> Iterator[Row]:
    """Sample several answers to one prompt with a fixed seed, without and with stored pages."""
    question = Question((texts[1][: sizes.short],), sizes.new, "samples", sizes.samples)
    yield run.ask(Request(f"{sizes.samples} samples, cold", question, salt=b"samples"))
    yield run.ask(
        Request(
            f"{sizes.samples} samples, warm",
            question,
            salt=b"samples",
            least_reused=sizes.stored(sizes.short),
        )
    )


def beams(run: Comparison, texts: Texts, sizes: Sizes) -> Iterator[Row]:
    """Answer one prompt by beam search, without and with stored pages. All beams are compared."""
    question = _beams(texts, sizes)
    yield run.ask(Request(f"{sizes.beams} beams, cold", question, salt=b"beams"))
    yield run.ask(
        Request(f"{sizes.beams} beams, warm", question, salt=b"beams", least_reused=sizes.stored(sizes.short))
    )


def chunks(run: Comparison, texts: Texts, sizes: Sizes) -> Iterator[Row]:
    """Prefill in chunks: a prompt that is not stored, and a prompt that diverges from a stored one inside a page."""
    name = f"prefill in chunks of {sizes.chunk}"
    yield run.ask(Request(f"{name}, cold", _long(texts, sizes), salt=b"chunks", chunk=sizes.chunk))
    prompt = forks_inside_a_page(texts[0], texts[2], sizes)
    question = Question((prompt,), sizes.new)
    least = len(prompt) - sizes.tail
    yield run.ask(
        Request(
            f"{name}, fork inside a page", question, salt=b"chunks", chunk=sizes.chunk, least_reused=least
        )
    )


def rollback(run: Comparison, texts: Texts, sizes: Sizes) -> Iterator[Row]:
    """Answer a prompt, remove the answer and the prompt's end from the cache, and continue with other tokens."""
    first = _short(texts, sizes)
    prompt = first.prompts[0]
    kept = len(prompt) - sizes.page - sizes.inside
    run.say("rollback")
    second = Question((prompt[:kept] + texts[3][1 : sizes.tail],), sizes.new)
    plain = run.subject.plain(first).answers + run.subject.plain(second).answers
    begin = time.perf_counter()
    with (
        run.open_cache(first, b"rollback") as cache,
        count_fed(run.subject.model, lambda: cache.columns) as fed,
    ):
        reused = cache.reused_by_tier
        before = run.subject.stored(cache, Request("", first))
        cache.crop(kept - cache.get_seq_length())
        after = run.subject.stored(cache, Request("", second))
        end = cache.get_seq_length()
    length = second.num_tokens
    asked = Asked(
        answers=before + after,
        reused={tier.name: count for tier, count in reused.items() if count},
        fed=fed.tokens,
        to_feed=first.num_tokens - sum(reused.values()) + second.num_tokens - kept,
        shared_pages=0,
        seconds=time.perf_counter() - begin,
        wrong=() if end == length else (f"the cache holds {end} columns at the end, not {length}",),
        note=f"{sum(fed.taken_back(end))} tokens taken back",
    )
    verdicts = {run.verdict(first, before), run.verdict(second, after)}
    worst = next(each for each in ("different", "near-tie", "equal") if each in verdicts)
    yield run.row("rollback into the prompt, another continuation", asked, worst, plain_is=plain)


def assisted(run: Comparison, texts: Texts, sizes: Sizes) -> Iterator[Row]:
    """Answer with a draft model, whose K and V are also in the pages: first cold, then from HBM and from NVMe."""
    question = _short(texts, sizes)
    warm = Request("draft model, warm", question, assisted=True, least_reused=sizes.stored(sizes.short))
    yield run.ask(Request("draft model, cold", question, assisted=True))
    yield run.ask(warm)
    run.demote(question, Tier.NVME)
    pages = sizes.short // sizes.page * sizes.page
    yield run.ask(replace(warm, case="draft model, from NVME", found_in=Tier.NVME, least_found=pages))


Case = Callable[[Comparison, Texts, Sizes], Iterator[Row]]
OWN: tuple[Case, ...] = (greedy, batch, samples, beams, chunks, rollback, chat)
DRAFTED: tuple[Case, ...] = (assisted,)


def compare(
    subject: Subject,
    texts: Texts,
    sizes: Sizes,
    folder: Path,
    say: Say,
    own: Sequence[Case] = OWN,
    drafted: Sequence[Case] = DRAFTED,
) -> Iterator[Row]:
    """Run all cases of a model, and yield their rows.

    Args:
        subject: The model.
        texts: ``TEXTS`` texts, from which prompts are cut.
        sizes: Sizes of the prompts, the answers and the pages.
        folder: Folder for the directories of the disk tiers.
        say: Called with a line of text when a request begins.
        own: Cases that use a store with the model's own pages.
        drafted: Cases that use a store whose pages also contain K and V of the draft model.
    """
    stores: list[tuple[str, list[Question], bool, Sequence[Case]]] = [
        ("own", [mixed_batch(texts, sizes), _beams(texts, sizes)], False, own),
        ("draft", [_short(texts, sizes)], True, drafted),
    ]
    for name, largest, with_draft, cases in stores:
        if cases:
            with open_store(subject, sizes, largest, folder / name, with_draft=with_draft) as store:
                comparison = Comparison(subject, store, say)
                for case in cases:
                    yield from case(comparison, texts, sizes)
                yield leftovers(comparison)


def _long(texts: Texts, sizes: Sizes) -> Question:
    return Question((texts[0],), sizes.new)


def _short(texts: Texts, sizes: Sizes) -> Question:
    return Question((texts[1][: sizes.short],), sizes.new)


def _beams(texts: Texts, sizes: Sizes) -> Question:
    return Question((texts[1][: sizes.short],), sizes.new, "beams", sizes.beams)
