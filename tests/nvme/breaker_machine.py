"""State machine that compares the read breaker with a reference model, on a disk that fails and recovers."""

from __future__ import annotations

from types import ModuleType

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierstore.nvme import read_breaker as real

LIMIT, FIRST, LONGEST = 3, 1.0, 4.0


class BreakerMachine(RuleBasedStateMachine):
    """Tracks the reads in flight and the expected state of the breaker, without access to its private attributes."""

    module: ModuleType = real

    def __init__(self) -> None:
        super().__init__()
        self.breaker = self.module.Breaker(limit=LIMIT, first_pause_s=FIRST, longest_pause_s=LONGEST)
        self.now = 100.0
        self.out: list[tuple[int, int]] = []
        """Reads in flight: the ticket of each, and the number of times the breaker had opened before its admission."""
        self.openings = 0
        self.in_a_row = 0
        self.pause = FIRST
        self.until = 0.0
        self.open = False
        self.probe: tuple[int, int] | None = None

    @initialize()
    def begin(self) -> None:
        assert self.breaker.state.value == "closed"

    @rule(seconds=st.sampled_from([0.0, 0.4, 0.6, 1.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def ask(self) -> None:
        ticket = self.breaker.admit(self.now)
        due = self.now >= self.until and self.probe is None
        assert (ticket is not None) == (not self.open or due)
        if ticket is None:
            return
        read = (ticket, self.openings)
        self.out.append(read)
        if self.open:
            self.probe = read

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        read = self._take(data)
        self.breaker.succeeded(read[0], self.now)
        if read[1] == self.openings and (not self.open or read is self.probe):
            self.open, self.probe, self.in_a_row, self.pause = False, None, 0, FIRST
        elif self.open and self.probe is None:
            self.until = min(self.until, self.now)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        read = self._take(data)
        self.breaker.failed(read[0], self.now)
        if read[1] != self.openings:
            return
        self.in_a_row += 1
        if read is self.probe or self.in_a_row == LIMIT:
            self._opens()

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def hang(self, data: st.DataObject) -> None:
        read = self._take(data)
        self.breaker.hung(read[0], self.now)
        if read[1] == self.openings:
            self._opens()

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def nothing_was_asked(self, data: st.DataObject) -> None:
        read = self._take(data)
        self.breaker.gave_up(read[0], self.now)
        if read is self.probe:
            self.probe, self.until = None, min(self.until, self.now)

    @invariant()
    def state_is_told(self) -> None:
        want = "closed" if not self.open else "probing" if self.probe is not None else "open"
        assert self.breaker.state.value == want

    def _take(self, data: st.DataObject) -> tuple[int, int]:
        return self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))

    def _opens(self) -> None:
        self.open, self.probe, self.in_a_row = True, None, 0
        self.openings += 1
        self.until = self.now + self.pause
        self.pause = min(2 * self.pause, LONGEST)
