"""Test the estimate of the time to compute a prompt, which is derived from the duration of earlier engine steps."""

from __future__ import annotations

import pytest

from tests.adapters.vllm_engine import DOCUMENT, Engine
from tests.adapters.vllm_stub import HOST
from tierstore.adapters import compute_rate as pace_module
from tierstore.adapters.compute_rate import ComputeRate
from tierstore.adapters.vllm.requests import Step

EACH, BEFORE = 3e-5, 4e-10


def step(computed: int, scheduled: int, name: str = "r") -> Step:
    return Step(name, computed, scheduled, [], [], first=False)


PROMPT = [[step(start, 8192)] for start in range(0, 65536, 8192)]


def takes(steps: list[Step]) -> float:
    return sum(EACH * s.scheduled + BEFORE * s.scheduled * (s.computed + s.scheduled / 2) for s in steps)


def run(pace: ComputeRate, work: list[list[Step]], ahead: int, now: float = 100.0) -> float:
    """Simulate steps in order, ``ahead`` of them in flight at a time. Return the time at which the last one ends."""
    ended, waiting = now, []
    assert pace.ordered(0, PROMPT[0], 1.0)
    pace.ended(0, 9.0)  # the first step includes compilation
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
def test_steps_of_a_long_prompt_give_time_per_token_and_per_context_token(ahead: int) -> None:
    pace = ComputeRate()
    run(pace, PROMPT, ahead)
    for start, end in ((0, 100), (0, 131072), (50000, 60000)):
        assert pace.seconds(start, end) == pytest.approx(takes([step(start, end - start)]))


def test_one_step_gives_the_time_per_token_but_the_first_step_does_not() -> None:
    pace = ComputeRate()
    assert pace.ordered(1, PROMPT[0], 1.0)
    pace.ended(1, 20.0)
    assert pace.seconds(0, 1000) is None
    run(pace, PROMPT[:1], 1)
    assert pace.seconds(0, 8192) == pytest.approx(takes(PROMPT[0]))


def test_prompts_in_one_step_are_counted_together() -> None:
    pace = ComputeRate()
    run(pace, [[step(c, 4000), step(2 * c, 2000, "s"), step(9 * c, 1, "t")] for c in (0, 8000, 20000)], 1)
    found = pace.seconds(0, 30000)
    assert found == pytest.approx(takes([step(0, 30000)]), rel=0.01)


@pytest.mark.parametrize(
    "steps",
    [[step(0, 300)], [step(900, 1, str(i)) for i in range(600)], [step(0, 600), *[step(9, 15)] * 5], []],
)
def test_steps_that_are_not_mostly_prefill_are_not_measured(steps: list[Step]) -> None:
    pace = ComputeRate()
    assert not pace.ordered(1, steps, 1.0)
    pace.ended(1, 2.0)
    assert pace.seconds(0, 100) is None


def test_newest_steps_weigh_most_and_no_time_is_negative() -> None:
    pace = ComputeRate()
    run(pace, PROMPT, 1)
    before = pace.seconds(0, 8192)
    for number in range(100, 160):
        pace.ordered(number, [step(0, 8192)], number)
        pace.ended(number, number + 0.5)
    assert before is not None
    assert before < 0.4
    assert pace.seconds(0, 8192) == pytest.approx(0.5, rel=0.01)
    hasty = ComputeRate()  # steps that get faster with a longer context: this must not be extrapolated
    for number, context in enumerate((0, 1000, 50000), 1):
        hasty.ordered(number, [step(context, 1000)], number)
        hasty.ended(number, number + 0.9 / number)
    seconds = [hasty.seconds(0, tokens) for tokens in (1, 10**4, 10**6)]
    assert seconds == sorted(seconds, key=lambda each: each or 0.0)
    assert min(each for each in seconds if each is not None) > 0


def test_steps_never_reported_as_ended_are_forgotten() -> None:
    pace = ComputeRate()
    for number in range(1, 1000):
        assert pace.ordered(number, [step(0, 8192)], float(number))
    assert len(pace._under_way) <= 64
    pace.ended(1, 5000.0)
    assert pace.seconds(0, 1) is None


def measure(pace: ComputeRate, number: int, steps: list[Step], seconds: float) -> bool:
    """Simulate a step that takes ``seconds``. Return whether ``pace`` measures its duration."""
    wanted = pace.ordered(number, steps, 100.0 * number)
    pace.ended(number, 100.0 * number + seconds)
    return wanted


def test_small_mixed_and_first_steps_give_a_rough_rate_until_a_good_step() -> None:
    pace = ComputeRate(rough=True)
    decoding = [step(900, 1, str(i)) for i in range(200)]
    assert not measure(pace, 1, decoding, 1.0)
    assert pace.seconds(0, 10) is None
    assert measure(pace, 2, [step(0, 100)], 0.2)
    assert pace.seconds(0, 100) == pytest.approx(0.2)
    assert measure(pace, 3, [step(0, 1000), *decoding], 9.0)
    assert measure(pace, 4, PROMPT[0], 9.0)  # this step includes compilation
    assert pace.seconds(0, 100) is not None
    assert not pace.known
    assert measure(pace, 5, PROMPT[0], takes(PROMPT[0]))
    assert pace.known
    assert pace.seconds(0, 8192) == pytest.approx(takes(PROMPT[0]))
    assert not measure(pace, 6, [step(0, 100)], 0.2)


def test_a_rough_step_that_ends_after_a_good_one_is_forgotten() -> None:
    pace = ComputeRate(rough=True)
    measure(pace, 1, PROMPT[0], 9.0)
    assert pace.ordered(2, PROMPT[0], 200.0)
    assert pace.ordered(3, [step(0, 100)], 201.0)
    pace.ended(2, 200.0 + takes(PROMPT[0]))
    pace.ended(3, 300.0)
    assert pace.seconds(0, 8192) == pytest.approx(takes(PROMPT[0]))


def test_rough_rates_are_only_measured_on_demand() -> None:
    pace = ComputeRate()
    assert not measure(pace, 1, [step(0, 100)], 0.2)
    measure(pace, 2, PROMPT[0], 9.0)
    assert pace.seconds(0, 100) is None


def test_tokens_with_less_context_than_measured_get_the_minimum_time() -> None:
    pace = ComputeRate()
    for number in (1, 2):
        measure(pace, number, [step(30000, 1000)], 2.0)
    assert pace.seconds(30000, 31000) == pytest.approx(2.0)
    assert pace.seconds(40000, 41000) == pytest.approx(2.0)
    assert pace.seconds(0, 30500) == pytest.approx(30.5 * 2.0 / 2)  # as if only the context took time


@pytest.mark.parametrize(("ranks", "ahead"), [(1, 1), (2, 2)])
def test_workers_report_ends_of_prefill_steps_to_the_scheduler(
    monkeypatch: pytest.MonkeyPatch, ranks: int, ahead: int
) -> None:
    monkeypatch.setattr(pace_module, "_OF_A_PROMPT", 4)
    told: list[int] = []
    ended = ComputeRate.ended

    def noted(self: ComputeRate, number: int, now: float) -> None:
        told.append(number)
        ended(self, number, now)

    monkeypatch.setattr(ComputeRate, "ended", noted)
    engine = Engine(HOST, ranks=ranks, ahead=ahead)
    engine.half._compute_rate = ComputeRate(4)
    engine.add(DOCUMENT, 2)
    engine.run()
    assert told[:2] == [1, 2]  # four tokens per step
    assert not engine.half._compute_rate._under_way
    seconds = engine.half._compute_rate.seconds(0, 9)
    assert seconds is not None
    assert seconds > 0
    engine.close()
