"""One store, one model: ask a request with the store and without it, and compare the answers and what was computed.

What a model really computes is counted where its tokens come in. Equal tokens alone prove little: a prompt fed twice
into one cache doubles its keys, which hardly moves a softmax.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.compare.subject import DRAFTED, Question, Request, Sizes, Subject
from benchmarks.compare.verdicts import Answers, Row, Verdict, beam_verdict, greedy_verdict
from tierstore.adapters.huggingface import TierStoreCache
from tierstore.config import load_config
from tierstore.errors import CapacityError
from tierstore.store import TierStore
from tierstore.types import Tier


@dataclass(slots=True)
class Fed:
    """The forward passes of a model: of each, the columns in its cache before it, its rows and its columns."""

    passes: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Rows times columns, padding among them."""
        return sum(rows * width for _, rows, width in self.passes)

    def taken_back(self, columns: int) -> list[int]:
        """Columns of each pass that were removed again (rejected drafts, a rollback). ``columns``: there at last."""
        begins = [before for before, _, _ in self.passes[1:]] + [columns]
        return [before + width - begin for (before, _, width), begin in zip(self.passes, begins, strict=True)]


@contextmanager
def count_fed(model: PreTrainedModel, columns: Callable[[], int]) -> Iterator[Fed]:
    """Count while this is open; ``columns`` says how many are in the model's cache."""
    fed = Fed()

    def note(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        rows, width = args[0].shape
        fed.passes.append((columns(), rows, width))

    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, torch.nn.Module)
    hook = embeddings.register_forward_pre_hook(note)
    try:
        yield fed
    finally:
        hook.remove()


Say = Callable[[str], None]

PATIENCE_S = 120.0
"""A store that does not come to rest within this time is reported."""


@contextmanager
def open_store(
    subject: Subject, sizes: Sizes, largest: Sequence[Question], folder: Path, *, with_draft: bool
) -> Iterator[TierStore]:
    """A store whose HBM has room for the largest of these questions and little more, and as much host memory."""
    specs = subject.specs(sizes.page, with_draft=with_draft)
    nbytes = sum(spec.page_nbytes for spec in specs)
    slots = max(pages_needed(question, sizes) for question in largest) + 4
    config = {
        "hbm": {"capacity": slots * nbytes, "device": str(subject.model.device)},
        "host": {"capacity": slots * nbytes},
        "nvme": {"path": str(folder), "capacity": 40 * slots * nbytes + (64 << 20)},
    }
    with TierStore.open(load_config(config), specs) as store:
        yield store


def pages_needed(question: Question, sizes: Sizes) -> int:
    """Pages that all rows of a question hold at most at once."""
    prompts = sum(-(-len(prompt) // sizes.page) + 1 for prompt in question.prompts)
    rows = question.rows * len(question.prompts)
    return prompts + rows * (-(-question.new_tokens // sizes.page) + 2)


@dataclass(frozen=True, slots=True)
class Asked:
    """What came back from the store, and what it took."""

    answers: Answers
    reused: dict[str, int]
    fed: int
    to_feed: int
    shared_pages: int
    seconds: float
    wrong: tuple[str, ...]
    note: str = ""


class Comparison:
    """Asks requests of one model over one store and without it."""

    def __init__(self, subject: Subject, store: TierStore, say: Say) -> None:
        """Owns neither."""
        self.subject = subject
        self.store = store
        self._say = say

    def ask(self, request: Request) -> Row:
        """Both answers, and what was computed for the second."""
        self.say(request.case)
        plain = self.subject.plain(request.question)
        asked = self._ask_stored(request)
        return self.row(
            request.case, asked, self.verdict(request.question, asked.answers), plain_is=plain.answers
        )

    def say(self, case: str) -> None:
        """A case begins."""
        self._say(f"{self.subject.name}: {case}")

    def verdict(self, question: Question, found: Answers) -> Verdict:
        """By the rule of the question's kind."""
        plain = self.subject.plain(question)
        if question.kind == "greedy":
            return greedy_verdict(plain, found)
        prompts = [prompt for prompt in question.prompts for _ in range(question.rows)]
        if question.kind == "beams":
            return beam_verdict(plain, found, lambda row, answer: self.subject.score(prompts[row], answer))
        return "equal" if found == plain.answers else "different"

    def row(self, case: str, asked: Asked, verdict: Verdict, *, plain_is: Answers) -> Row:
        """The case as it is shown."""
        wrong = asked.wrong
        if asked.fed != asked.to_feed:
            wrong += (f"{asked.fed} tokens were fed, {asked.to_feed} were not reused",)
        if verdict == "different":
            wrong += (f"without the store: {plain_is}, over it: {asked.answers}",)
        self.store.check()
        return Row(
            case=case,
            model=self.subject.name,
            verdict=verdict,
            reused=asked.reused,
            fed=asked.fed,
            to_feed=asked.to_feed,
            shared_pages=asked.shared_pages,
            seconds=round(asked.seconds, 2),
            wrong=wrong,
            note=asked.note,
        )

    def settle(self) -> None:
        """Wait until nothing moves: what a request finds does not depend on how busy the machine is."""
        if not self.store.drain(PATIENCE_S):
            raise TimeoutError(f"the store did not come to rest within {PATIENCE_S:.0f} s")

    def demote(self, question: Question, tier: Tier) -> None:
        """Send the pages of one prompt and its answer down to ``tier``."""
        self.settle()
        pages = self.store.keys([*question.prompts[0], *self.subject.plain(question).answers[0]])
        self.store.demote(pages, tier)
        self.settle()

    def open_cache(self, question: Question, salt: bytes, *, with_draft: bool = False) -> TierStoreCache:
        """A cache for a question's prompts, once nothing moves."""
        self.settle()
        ids, mask = question.tensors(self.subject.pad)
        draft = self.subject.draft if with_draft else None
        return TierStoreCache(
            self.store, ids, mask, model=self.subject.model, draft=draft, salt=salt, timeout_s=PATIENCE_S
        )

    def _ask_stored(self, request: Request) -> Asked:
        begin = time.perf_counter()
        question, subject = request.question, self.subject
        with (
            self.open_cache(question, request.salt, with_draft=request.assisted) as cache,
            count_fed(subject.model, lambda: cache.columns) as fed,
            count_fed(subject.draft, lambda: _draft_columns(cache, request)) as drafted,
        ):
            start, reused = cache.get_seq_length(), cache.reused_by_tier
            answers = subject.stored(cache, request)
            end, shared = cache.get_seq_length(), cache.shared_pages
            draft_end = _draft_columns(cache, request)
        rows = question.rows
        padding = rows * sum(max(0, pad - start) for pad in question.paddings)
        rejected = sum(fed.taken_back(end)) if request.assisted else 0
        wrong = [*_expected(request, reused, end)]
        if request.assisted:
            wrong += [*_rejected_too_much(fed, end), *_draft_faults(drafted, draft_end, start, end)]
        return Asked(
            answers=answers,
            reused={tier.name: reused[tier] for tier in Tier if reused[tier]},
            fed=fed.tokens - padding,
            to_feed=question.num_tokens - rows * sum(reused.values()) + rejected,
            shared_pages=shared,
            seconds=time.perf_counter() - begin,
            wrong=tuple(wrong),
            note=_drafts(fed, rejected) if request.assisted else "",
        )


def _draft_columns(cache: TierStoreCache, request: Request) -> int:
    return int(cache.draft_model.cache.columns) if request.assisted else 0


def _expected(request: Request, reused: Any, end: int) -> Iterator[str]:
    """What does not hold of where the prompts were found and how long the cache became."""
    question = request.question
    length = max(map(len, question.prompts)) + question.new_tokens - 1
    if end != length:
        yield f"the cache holds {end} columns at the end, not {length}"
    if sum(reused.values()) < request.least_reused:
        yield f"{sum(reused.values())} tokens were reused, {request.least_reused} could have been"
    if request.found_in is not None and reused[request.found_in] < request.least_found:
        yield f"{reused[request.found_in]} tokens came from {request.found_in.name}, not {request.least_found}"


def _rejected_too_much(fed: Fed, end: int) -> Iterator[str]:
    """A pass keeps its first token at least, and rejects drafts only: more were fed for nothing."""
    pairs = zip(fed.taken_back(end), fed.passes, strict=True)
    odd = [back for back, (_, _, width) in pairs if not 0 <= back <= min(DRAFTED, width - 1)]
    if odd:
        yield f"a pass was taken back whole, or more than was drafted: {odd}"


def _draft_faults(drafted: Fed, draft_end: int, start: int, end: int) -> Iterator[str]:
    """The draft model begins where the stored pages end, too, and no token is in its cache twice."""
    if drafted.passes and drafted.passes[0][0] != start:
        yield f"the draft model began at column {drafted.passes[0][0]}, {start} were there"
    if not drafted.passes or drafted.tokens != draft_end - start + sum(drafted.taken_back(draft_end)):
        yield f"the draft model was fed {drafted.tokens} tokens to get from column {start} to {draft_end}"
    if draft_end > end:
        yield f"the draft model's cache holds {draft_end} columns at the end, the model's {end}"


def _drafts(fed: Fed, rejected: int) -> str:
    """How many drafts the model accepted; all passes but the first feed drafts and one token of its own."""
    tried = sum(width - 1 for _, _, width in fed.passes[1:])
    return f"{len(fed.passes)} passes, {rejected} tokens taken back, about {max(0, tried - rejected)} drafts accepted"


def leftovers(comparison: Comparison) -> Row:
    """At the end: no lease is open, nothing is in use, all of HBM can be had; and pages really went down."""
    store = comparison.store
    comparison.settle()
    stats: dict[str, Any] = store.stats()
    number = int(stats["tiers"]["HBM"]["num_slots"])
    moved = stats["counters"]["transfer_bytes"]
    down = int(moved.get("HBM,HOST", 0)) // int(stats["page_nbytes"])
    wrong = []
    if stats["leases"] or stats["tiers"]["HBM"]["owned"]:
        wrong.append(f"{stats['leases']} leases are open, {stats['tiers']['HBM']['owned']} HBM slots in use")
    if not down:
        wrong.append("HBM held everything: nothing was demoted")
    try:
        store.free(store.allocate(number, timeout_s=0.0 if wrong else PATIENCE_S))
    except CapacityError as error:
        wrong.append(str(error))
    store.check()
    return Row(
        case="nothing leaked",
        model=comparison.subject.name,
        verdict="equal",
        reused={},
        fed=0,
        to_feed=0,
        wrong=tuple(wrong),
        note="" if wrong else f"all {number} HBM slots to be had, no lease open; {down} pages had gone down",
    )
