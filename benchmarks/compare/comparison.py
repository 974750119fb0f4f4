"""Makes requests to one model with and without a store, and compares the answers and the number of computed tokens.

The tokens are counted at the model's embedding layer. Equal answers alone prove little. For example, if a prompt is
computed twice into the same cache, the cache contains every key twice, which hardly changes the softmax.
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
    """The forward passes of a model.

    ``passes`` contains, for each pass, the number of columns in the cache before it, and the numbers of rows and of
    columns that it computes.
    """

    passes: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Number of computed tokens, including padding."""
        return sum(rows * width for _, rows, width in self.passes)

    def taken_back(self, columns: int) -> list[int]:
        """Return, for each pass, how many of its columns were later removed from the cache.

        Rejected drafts and rollbacks remove columns. ``columns`` is the number of columns in the cache at the end.
        """
        begins = [before for before, _, _ in self.passes[1:]] + [columns]
        return [before + width - begin for (before, _, width), begin in zip(self.passes, begins, strict=True)]


@contextmanager
def count_fed(model: PreTrainedModel, columns: Callable[[], int]) -> Iterator[Fed]:
    """Yield a ``Fed`` that records the forward passes of ``model`` during the ``with`` block.

    ``columns`` returns the number of columns that are in the model's cache now.
    """
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
"""Maximum time in seconds to wait for the store's transfers, and timeout of the caches."""


@contextmanager
def open_store(
    subject: Subject, sizes: Sizes, largest: Sequence[Question], folder: Path, *, with_draft: bool
) -> Iterator[TierStore]:
    """Open a store for the duration of a ``with`` block.

    HBM and host memory each have space for the pages of the largest question in ``largest``, and for four more pages.
    """
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
    """Return the largest number of pages that the rows of a question use together at any time."""
    prompts = sum(-(-len(prompt) // sizes.page) + 1 for prompt in question.prompts)
    rows = question.rows * len(question.prompts)
    return prompts + rows * (-(-question.new_tokens // sizes.page) + 2)


@dataclass(frozen=True, slots=True)
class Asked:
    """The answers with the store, and the cost of computing them.

    ``reused`` is the number of prompt tokens that were reused, by tier. ``fed`` is the number of tokens that the model
    computed, and ``to_feed`` the number that it had to compute. ``shared_pages`` is the number of pages that at least
    two rows used. ``seconds`` is the elapsed time. ``wrong`` describes everything that is wrong apart from the answers.
    """

    answers: Answers
    reused: dict[str, int]
    fed: int
    to_feed: int
    shared_pages: int
    seconds: float
    wrong: tuple[str, ...]
    note: str = ""


class Comparison:
    """Makes requests to one model, with one store and without it."""

    def __init__(self, subject: Subject, store: TierStore, say: Say) -> None:
        """Compare the model ``subject`` with and without ``store``. The caller closes the store.

        ``say`` is called with a line of text when a request begins.
        """
        self.subject = subject
        self.store = store
        self._say = say

    def ask(self, request: Request) -> Row:
        """Make a request without and with the store, and return the row."""
        self.say(request.case)
        plain = self.subject.plain(request.question)
        asked = self._ask_stored(request)
        return self.row(
            request.case, asked, self.verdict(request.question, asked.answers), plain_is=plain.answers
        )

    def say(self, case: str) -> None:
        """Announce the start of a case."""
        self._say(f"{self.subject.name}: {case}")

    def verdict(self, question: Question, found: Answers) -> Verdict:
        """Return the verdict on ``found``, the answers with the store, by the rule for this kind of question."""
        plain = self.subject.plain(question)
        if question.kind == "greedy":
            return greedy_verdict(plain, found)
        prompts = [prompt for prompt in question.prompts for _ in range(question.rows)]
        if question.kind == "beams":
            return beam_verdict(plain, found, lambda row, answer: self.subject.score(prompts[row], answer))
        return "equal" if found == plain.answers else "different"

    def row(self, case: str, asked: Asked, verdict: Verdict, *, plain_is: Answers) -> Row:
        """Return the row of a case, after checking the number of computed tokens and the store's invariants.

        ``plain_is`` contains the answers without the store.
        """
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
        """Wait until no transfer is in flight, so that the tiers of the pages do not depend on the machine's load."""
        if not self.store.drain(PATIENCE_S):
            raise TimeoutError(f"copies were still in flight after {PATIENCE_S:.0f} s")

    def demote(self, question: Question, tier: Tier) -> None:
        """Demote the pages of the first prompt and of its answer to ``tier``."""
        self.settle()
        pages = self.store.keys([*question.prompts[0], *self.subject.plain(question).answers[0]])
        self.store.demote(pages, tier)
        self.settle()

    def open_cache(self, question: Question, salt: bytes, *, with_draft: bool = False) -> TierStoreCache:
        """Wait until no transfer is in flight, and create a cache for the question's prompts."""
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
    """Yield a description of each difference from the expected length of the cache and the expected reuse."""
    question = request.question
    length = max(map(len, question.prompts)) + question.new_tokens - 1
    if end != length:
        yield f"the cache holds {end} columns at the end, not {length}"
    if sum(reused.values()) < request.least_reused:
        yield f"{sum(reused.values())} tokens were reused, {request.least_reused} could have been"
    if request.found_in is not None and reused[request.found_in] < request.least_found:
        yield f"{reused[request.found_in]} tokens came from {request.found_in.name}, not {request.least_found}"


def _rejected_too_much(fed: Fed, end: int) -> Iterator[str]:
    """Yield a fault if a pass was removed from the cache entirely, or if more columns than drafts were removed.

    The first column of a pass is never a draft, so it must stay.
    """
    pairs = zip(fed.taken_back(end), fed.passes, strict=True)
    odd = [back for back, (_, _, width) in pairs if not 0 <= back <= min(DRAFTED, width - 1)]
    if odd:
        yield f"a pass was taken back whole, or more than was drafted: {odd}"


def _draft_faults(drafted: Fed, draft_end: int, start: int, end: int) -> Iterator[str]:
    """Yield the faults of the draft model.

    It must start where the stored pages end, and no token may be in its cache twice.
    """
    if drafted.passes and drafted.passes[0][0] != start:
        yield f"the draft model began at column {drafted.passes[0][0]}, {start} were there"
    if not drafted.passes or drafted.tokens != draft_end - start + sum(drafted.taken_back(draft_end)):
        yield f"the draft model was fed {drafted.tokens} tokens to get from column {start} to {draft_end}"
    if draft_end > end:
        yield f"the draft model's cache holds {draft_end} columns at the end, the model's {end}"


def _drafts(fed: Fed, rejected: int) -> str:
    """Return a note with the number of passes and of accepted drafts.

    Each pass except the first computes drafts and one token that the model itself has generated.
    """
    tried = sum(width - 1 for _, _, width in fed.passes[1:])
    return f"{len(fed.passes)} passes, {rejected} tokens taken back, about {max(0, tried - rejected)} drafts accepted"


def leftovers(comparison: Comparison) -> Row:
    """Return a row that says whether the store is clean after all cases.

    No lease may be open, no HBM slot may be in use, and all HBM slots must be allocatable. Also, pages must have been
    copied from HBM to host memory, because otherwise HBM was too large for a meaningful comparison.
    """
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
