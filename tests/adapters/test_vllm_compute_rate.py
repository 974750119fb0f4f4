"""What the engine's own steps say of how long a prompt takes to compute."""

from __future__ import annotations

import pytest

from tests.adapters.vllm_engine import DOCUMENT, Engine
from tests.adapters.vllm_stub import HOST
from tierstore.adapters.vllm import costs as pace_module
from tierstore.adapters.vllm.costs import ComputeRate
from tierstore.adapters.vllm.requests import Step

EACH, BEFORE = 3e-5, 4e-10


def step(computed: int, scheduled: int, name: str = "r") -> Step:
    return Step(name, computed, scheduled, [], [], first=False)


PROMPT = [[step(start, 8192)] for start in range(0, 65536, 8192)]


def takes(steps: list[Step]) -> float:
    return sum(EACH * s.scheduled + BEFORE * s.scheduled * (s.computed + s.scheduled / 2) for s in steps)


def run(pace: ComputeRate, work: list[list[Step]], ahead: int, now: float = 100.0) -> float:
    """One after the other; ``ahead`` are ordered before the first of them has ended."""
    ended, waiting = now, []
    assert pace.ordered(0, PROMPT[0], 1.0)
    pace.ended(0, 9.0)  # the first one compiles
    for number, steps in enumerate(work, 1):
        if pace.ordered(number, steps, now):
            waiting.append((number, steps))
        if len(waiting) >= ahead or steps is work[-1]:
            for told, done in waiting:
                ended = max(ended, now) + takes(done)
                pace.ended(told, ended)
            now, waiting = ended, []
    return ended


@pytest.mark.parametrize("ahead", [1, 2])
def test_steps_of_a_long_prompt_tell_what_a_token_takes_and_what_those_before_it_add(ahead: int) -> None:
    pace = ComputeRate()
    run(pace, PROMPT, ahead)
    for start, end in ((0, 100), (0, 131072), (50000, 60000)):
        assert pace.seconds(start, end) == pytest.approx(takes([step(start, end - start)]))


def test_one_step_tells_what_a_token_takes_but_for_the_first() -> None:
    pace = ComputeRate()
    assert pace.ordered(1, PROMPT[0], 1.0)
    pace.ended(1, 20.0)
    assert pace.seconds(0, 1000) is None
    run(pace, PROMPT[:1], 1)
    assert pace.seconds(0, 8192) == pytest.approx(takes(PROMPT[0]))


def test_prompts_beside_each_other_in_a_step_count_together() -> None:
    pace = ComputeRate()
    run(pace, [[step(c, 4000), step(2 * c, 2000, "s"), step(9 * c, 1, "t")] for c in (0, 8000, 20000)], 1)
    found = pace.seconds(0, 30000)
    assert found == pytest.approx(takes([step(0, 30000)]), rel=0.01)


@pytest.mark.parametrize(
    "steps",
    [[step(0, 300)], [step(900, 1, str(i)) for i in range(600)], [step(0, 600), *[step(9, 15)] * 5], []],
)
def test_a_step_that_is_not_mostly_prompts_says_nothing_and_is_not_asked_for(steps: list[Step]) -> None:
    pace = ComputeRate()
    assert not pace.ordered(1, steps, 1.0)
    pace.ended(1, 2.0)
    assert pace.seconds(0, 100) is None


def test_what_is_newest_counts_most_and_nothing_is_computed_in_less_than_no_time() -> None:
    pace = ComputeRate()
    run(pace, PROMPT, 1)
    before = pace.seconds(0, 8192)
    for number in range(100, 160):
        pace.ordered(number, [step(0, 8192)], number)
        pace.ended(number, number + 0.5)
    assert before is not None
    assert before < 0.4
    assert pace.seconds(0, 8192) == pytest.approx(0.5, rel=0.01)
    hasty = ComputeRate()  # the longer the context, the quicker: not to be gone on with
    for number, context in enumerate((0, 1000, 50000), 1):
        hasty.ordered(number, [step(context, 1000)], number)
        hasty.ended(number, number + 0.9 / number)
    seconds = [hasty.seconds(0, tokens) for tokens in (1, 10**4, 10**6)]
    assert seconds == sorted(seconds, key=lambda each: each or 0.0)
    assert min(each for each in seconds if each is not None) > 0


def test_steps_that_nobody_tells_of_are_forgotten() -> None:
    pace = ComputeRate()
    for number in range(1, 1000):
        assert pace.ordered(number, [step(0, 8192)], float(number))
    assert len(pace._under_way) <= 64
    pace.ended(1, 5000.0)
    assert pace.seconds(0, 1) is None


@pytest.mark.parametrize(("ranks", "ahead"), [(1, 1), (2, 2)])
def test_the_workers_tell_the_scheduler_of_the_ends_of_steps_that_computed_prompts(
    monkeypatch: pytest.MonkeyPatch, ranks: int, ahead: int
) -> None:
    monkeypatch.setattr(pace_module, "_LEAST_TOKENS", 4)
    monkeypatch.setattr(pace_module, "_OF_A_PROMPT", 4)
    told: list[int] = []
    ended = ComputeRate.ended

    def noted(self: ComputeRate, number: int, now: float) -> None:
        told.append(number)
        ended(self, number, now)

    monkeypatch.setattr(ComputeRate, "ended", noted)
    engine = Engine(HOST, ranks=ranks, ahead=ahead)
    engine.add(DOCUMENT, 2)
    engine.run()
    assert told[:2] == [1, 2]  # four tokens a step
    assert not engine.half._compute_rate._under_way
    seconds = engine.half._compute_rate.seconds(0, 9)
    assert seconds is not None
    assert seconds > 0
    engine.close()
