"""Functions with which clients wait for the store. If acks are being lost, they give up early, without an error."""

from __future__ import annotations

from time import monotonic

from tests.soak.account import PATIENCE_S, Overdue
from tests.soak.faults import Trouble
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import LeaseState

_SLICE_S = 0.2


def losing(trouble: Trouble | None) -> bool:
    """Return whether acks are being lost or were lost."""
    return trouble is not None and trouble.losing


def wait_final(lease: Lease, trouble: Trouble | None) -> LeaseState:
    """Wait until a lease is READY or FAILED, and return its state. While acks are being lost, do not wait for long.

    In that case, the state may be PENDING.

    Raises:
        Overdue: The lease is still PENDING after ``PATIENCE_S`` seconds, although no ack is being lost.
    """
    deadline = monotonic() + PATIENCE_S
    while (state := lease.wait(0.02 if losing(trouble) else _SLICE_S)) is LeaseState.PENDING:
        if losing(trouble):
            break
        if monotonic() > deadline:
            raise Overdue("a lease is still PENDING")
    return state


def wait_idle(store: TierStore, trouble: Trouble | None) -> bool:
    """Wait until nothing is in flight. Returns True, or False if acks are lost and something is still in flight.

    Raises:
        Overdue: Something is still in flight after ``PATIENCE_S`` seconds, although no ack is lost.
    """
    deadline = monotonic() + PATIENCE_S
    while not store.drain(0.02 if losing(trouble) else _SLICE_S):
        if losing(trouble):
            return False
        if monotonic() > deadline:
            raise Overdue("transfers are still in flight")
    return True
