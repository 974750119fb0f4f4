"""Test the attention code for GPUs on the CPU, with reference code instead of the GPU kernels."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.adapters.test_hf_windows import tiny_gemma, tiny_mistral
from tests.adapters.tiny import (
    NEW,
    PAGE,
    ask,
    generate_batch,
    open_store,
    pad_left,
    plain,
    plain_batch,
    random_prompt,
    tiny_llama,
)
from tests.support import lanes
from tierstore.adapters.huggingface import TierStoreCache, attention, cache
from tierstore.adapters.huggingface.attention import Plans
from tierstore.adapters.huggingface.batch import Span
from tierstore.gpu.attention.paged import PagedDecode


@pytest.fixture(autouse=True)
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> torch.Tensor:
        raise AssertionError("not by the card's way")

    monkeypatch.setattr(cache, "Plans", partial(Plans, backend="reference"))
    monkeypatch.setattr(attention, "attend_pages", never)


def answers(build: Callable[[], PreTrainedModel] = tiny_llama) -> None:
    """Check the answers to a cold prompt, to a warm one, and to one that diverges inside a page."""
    model, prompt = build(), random_prompt(5 * PAGE + 3)
    other = prompt[: 3 * PAGE + 5] + random_prompt(4, seed=9)
    with open_store(model) as store:
        for given in (prompt, prompt, other):
            # long enough for a wrong order of pages to show
            assert ask(store, model, given, max_new_tokens=11)[0] == plain(model, given, max_new_tokens=11)


@pytest.mark.parametrize(
    "build",
    lanes.some(
        [tiny_llama, tiny_gemma, tiny_mistral, partial(tiny_llama, 1), partial(tiny_llama, 4)],
        (tiny_llama, tiny_gemma).__contains__,
    ),
)
def test_answers_equal_plain_transformers(build: Callable[[], PreTrainedModel]) -> None:
    answers(build)


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}, {"prefill_chunk_size": 5}])
def test_padded_rows_some_with_a_prefix_and_some_without(how: dict[str, Any]) -> None:
    model = tiny_llama()
    prompts = [random_prompt(3 * PAGE + 3), random_prompt(PAGE - 2, seed=3), random_prompt(2 * PAGE, seed=4)]
    ids, mask = pad_left(prompts)
    expected = plain_batch(model, ids, attention_mask=mask, **how)
    with open_store(model, hbm=64) as store:
        for _ in range(2):
            with TierStoreCache(store, ids, mask, model=model) as cache:
                assert torch.equal(generate_batch(model, ids, cache, attention_mask=mask, **how), expected)


def test_a_pass_is_planned_once_for_all_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    plan = PagedDecode.plan

    def noted(self: PagedDecode, *args: Any, **kwargs: Any) -> None:
        planned.append(self)
        plan(self, *args, **kwargs)

    monkeypatch.setattr(PagedDecode, "plan", noted)
    model, prompt = tiny_llama(num_layers=3), random_prompt(PAGE + 3)
    with open_store(model) as store:
        ask(store, model, prompt)
    assert len(planned) == NEW - 1, "for each token after the first"
    assert len(set(planned)) == 1


# -- planted bugs -----------------------------------------------------------------------------------------------


def plan_is_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Plans, "renew", lambda self: None)


def page_is_full(patch: pytest.MonkeyPatch) -> None:
    plan = attention._plan

    def wrong(planned: Any, spans: list[Span], kind: Any, page_size: int) -> Any:
        longer = [Span(s.start, -(-s.stop // page_size) * page_size, s.slots, s.pages) for s in spans]
        spans = [
            Span(n.stop - (s.stop - s.start), n.stop, n.slots, n.pages)
            for s, n in zip(spans, longer, strict=True)
        ]
        return plan(planned, spans, kind, page_size)

    patch.setattr(attention, "_plan", wrong)


def pages_are_in_another_order(patch: pytest.MonkeyPatch) -> None:
    plan = attention._plan

    def wrong(planned: Any, spans: list[Span], kind: Any, page_size: int) -> Any:
        spans = [Span(s.start, s.stop, s.slots, np.roll(s.pages, 1)) for s in spans]
        return plan(planned, spans, kind, page_size)

    patch.setattr(attention, "_plan", wrong)


def one_token_more_in_sight(patch: pytest.MonkeyPatch) -> None:
    attend = Plans.attend

    def wrong(
        self: Plans, queries: Any, spans: Any, pages: Any, scale: float, window: int | None, place: Any
    ) -> Any:
        return attend(self, queries, spans, pages, scale, None if window is None else window + 1, place)

    patch.setattr(Plans, "attend", wrong)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("plant", "build"),
    [
        (plan_is_kept, tiny_llama),
        (page_is_full, tiny_llama),
        (pages_are_in_another_order, tiny_llama),
        (one_token_more_in_sight, tiny_mistral),
    ],
)
def test_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    build: Callable[[], PreTrainedModel],
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        answers(build)
