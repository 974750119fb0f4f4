"""A chat of several turns: each computes its new tokens and one more, also after a fork inside a page."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from tierstore.adapters.huggingface import PrefixCache, Session
from tierstore.compare.feeding import count_fed
from tierstore.compare.judging import Row
from tierstore.compare.prompts import Sizes
from tierstore.compare.request import Prompt, Question, Request
from tierstore.compare.running import PATIENCE_S, Asked, Comparison
from tierstore.types import Tier

TURNS = 6
FORK = 3
"""The turn that takes back the end of the one before it and asks something else."""
AWAY = 5
"""The turn before which the conversation goes to NVMe."""


def chat(run: Comparison, texts: Sequence[Prompt], sizes: Sizes) -> Iterator[Row]:
    """A row for each turn; every answer is held against the whole conversation computed anew."""
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
    """Append ``text``, have it answered, append the answer."""
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
    """A piece of a text; of a short one they come again."""
    first = number * length % (len(text) - length)
    return text[first : first + length]


def _inside_a_page(session: Session, sizes: Sizes) -> int:
    """A place in the last question, not at a page's end."""
    place = len(session.tokens) - sizes.new - sizes.turn // 2
    return place - 1 if place % sizes.page == 0 else place
