"""Test the transformers adapter with its state machine, for each kind of model. Test that planted bugs are found."""

# mypy: allow-untyped-calls
from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from transformers import LlamaForCausalLM, PreTrainedModel

from tests.adapters.machine import AdapterMachine
from tests.adapters.planted import DRAFT, LLAMA, WINDOW
from tests.adapters.test_hf_windows import tiny_gemma, tiny_mistral
from tests.adapters.tiny import tiny_llama
from tests.adapters.walk import walk
from tests.support import lanes
from tests.support.planting import Plant
from tierstore.errors import LeaseError

STEPS = 200


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread, because models this small run slower with more threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_llama() -> LlamaForCausalLM:
    return tiny_llama(num_layers=2)


def machine(model: PreTrainedModel, *, with_draft: bool = False) -> type[AdapterMachine]:
    draft = tiny_llama(num_layers=1, num_kv_heads=1, seed=2) if with_draft else None
    if draft is not None:
        draft.generation_config.num_assistant_tokens = 3
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
    return type("Machine", (AdapterMachine,), {"model": model, "draft": draft})


def run(kind: type[AdapterMachine], examples: int) -> None:
    given = settings(
        max_examples=examples,
        stateful_step_count=40,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(kind, settings=given)


@pytest.mark.parametrize(
    ("build", "with_draft", "few", "many"),
    [
        (small_llama, False, 5, 50),
        (small_llama, True, 2, 20),
        (tiny_gemma, False, 2, 10),
        (tiny_mistral, False, 3, 16),
    ],
    ids=["full", "draft", "groups", "windows"],
)
def test_any_order_of_steps_gives_correct_answers_and_leaks_nothing(
    build: Callable[[], PreTrainedModel], with_draft: bool, few: int, many: int
) -> None:
    run(machine(build(), with_draft=with_draft), lanes.examples(few, many))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("build", "with_draft"),
    [(small_llama, False), (small_llama, True), (tiny_gemma, False), (tiny_mistral, False)],
    ids=["full", "draft", "groups", "windows"],
)
def test_long_random_walks_give_correct_answers_and_lose_nothing(
    build: Callable[[], PreTrainedModel], with_draft: bool
) -> None:
    for seed in lanes.seeds(1, 4):
        walk(machine(build(), with_draft=with_draft), seed, STEPS)


CASES: list[tuple[Plant, Callable[[], PreTrainedModel], bool]] = [
    (plant, small_llama, False) for plant in LLAMA
]
CASES += [(plant, small_llama, True) for plant in DRAFT]
CASES += [(plant, tiny_mistral, False) for plant in WINDOW]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("plant", "build", "with_draft"), CASES, ids=lambda each: getattr(each, "__name__", "")
)
def test_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Plant, build: Callable[[], PreTrainedModel], with_draft: bool
) -> None:
    kind = machine(build(), with_draft=with_draft)
    plant(monkeypatch)
    assert any(fails(kind, seed) for seed in range(4))


def fails(kind: type[AdapterMachine], seed: int) -> bool:
    """Return whether the walk raises an error, or warns that a lease was dropped without being released."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ResourceWarning)
        noticed = ends_in_an_error(kind, seed)
        gc.collect()
    return noticed or any("dropped without release" in str(each.message) for each in told)


def ends_in_an_error(kind: type[AdapterMachine], seed: int) -> bool:
    try:
        walk(kind, seed, STEPS)
    except (AssertionError, ValueError, IndexError, LeaseError):
        return True
    return False
