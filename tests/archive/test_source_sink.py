"""Tests of calls that run ahead: results are in order, running calls are limited, and none outlives the consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from threading import Event, Lock

import pytest

from tests.archive.rig import run
from tests.support.pages import PATIENCE_S
from tierstore.archive.source_sink import ahead, most_ahead


class Calls:
    """Calls that block until their gate is opened, with a record of which have begun and which have ended."""

    def __init__(self, count: int) -> None:
        self.lock = Lock()
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.gates = [Event() for _ in range(count)]
        self.starts = [Event() for _ in range(count)]

    def call(self, number: int) -> int:
        with self.lock:
            self.begun.append(number)
        self.starts[number].set()
        assert self.gates[number].wait(PATIENCE_S)
        with self.lock:
            self.ended.append(number)
        if number == 99:
            raise OSError("the hundredth")
        return number

    def all(self) -> list[Callable[[], int]]:
        return [partial(self.call, number) for number in range(len(self.gates))]

    def open(self, *numbers: int) -> None:
        for number in numbers:
            self.gates[number].set()


@pytest.mark.parametrize("most", [1, 2, 5, 64])
def test_results_are_returned_in_the_order_of_the_calls(most: int) -> None:
    calls = Calls(20)
    calls.open(*range(20))

    async def play() -> list[int]:
        async with aclosing(ahead(calls.all(), most)) as results:
            return [each async for each in results]

    assert run(play()) == list(range(20))


def test_started_calls_are_bounded_until_a_result_is_taken() -> None:
    calls = Calls(6)

    async def play() -> None:
        taken: list[int] = []
        begun: list[Callable[[], int]] = []

        def noted() -> Callable[[], int]:
            begun.append(calls.all()[len(begun)])
            return begun[-1]

        async with aclosing(ahead((noted() for _ in range(6)), 3)) as results:
            first = asyncio.ensure_future(anext(results))
            await asyncio.to_thread(calls.starts[2].wait, PATIENCE_S)
            calls.open(1, 2)  # the end of a later call does not let another begin
            assert len(begun) == 3
            calls.open(0)
            taken.append(await first)
            assert len(begun) == 3
            calls.open(3, 4, 5)
            taken += [each async for each in results]
        assert taken == list(range(6))

    run(play())


def test_a_cancelled_task_waits_for_all_calls_that_it_started() -> None:
    calls = Calls(6)

    async def play() -> None:
        async def consume() -> None:
            async with aclosing(ahead(calls.all(), 3)) as results:
                async for _ in results:
                    pass

        task = asyncio.ensure_future(consume())
        await asyncio.to_thread(calls.starts[2].wait, PATIENCE_S)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        calls.open(0, 1, 2)
        await asyncio.wait([task])
        assert task.cancelled()
        assert sorted(calls.ended) == sorted(calls.begun) == [0, 1, 2]

    run(play())


def test_the_error_of_a_call_is_raised_in_order_and_only_when_the_others_have_finished() -> None:
    calls = Calls(5)

    def fail() -> int:
        raise OSError("broken")

    async def play() -> None:
        given = [*calls.all()[:1], fail, *calls.all()[1:]]
        calls.open(0)

        async def consume() -> None:
            async with aclosing(ahead(given, 4)) as results:
                async for each in results:
                    assert each == 0

        task = asyncio.ensure_future(consume())
        await asyncio.to_thread(calls.starts[2].wait, PATIENCE_S)
        await asyncio.wait([task], timeout=0)
        assert not task.done()
        calls.open(1, 2, 3)
        with pytest.raises(OSError, match="broken"):
            await task
        assert sorted(calls.ended) == sorted(calls.begun)

    run(play())


def test_pages_in_flight_are_bounded_in_bytes_and_number() -> None:
    assert [most_ahead(nbytes) for nbytes in (1 << 12, 1 << 20, 2 << 20, 8 << 20, 64 << 20)] == [
        64,
        32,
        16,
        4,
        2,
    ]
