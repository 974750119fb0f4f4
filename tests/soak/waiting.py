"""Waits that must end, unless acknowledgements are being lost: then they are given up."""

from __future__ import annotations

from time import monotonic

from tests.soak.account import PATIENCE_S, Overdue
from tests.soak.faults import Trouble
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import LeaseState

_SLICE_S = 0.2


def losing(trouble: Trouble | None) -> bool:
    """Whether acknowledgements are being lost, or were."""
    return trouble is not None and trouble.losing


def wait_final(lease: Lease, trouble: Trouble | None) -> LeaseState:
    """READY or FAILED; PENDING only where acknowledgements are lost. Overdue if it does not end."""
    deadline = monotonic() + PATIENCE_S
    while (state := lease.wait(0.02 if losing(trouble) else _SLICE_S)) is LeaseState.PENDING:
        if losing(trouble):
            break
        if monotonic() > deadline:
            raise Overdue("a lease neither got its pages nor failed")
    return state


def wait_idle(store: TierStore, trouble: Trouble | None) -> bool:
    """True once nothing is under way; False only where acknowledgements are lost. Overdue if it does not end."""
    deadline = monotonic() + PATIENCE_S
    while not store.drain(0.02 if losing(trouble) else _SLICE_S):
        if losing(trouble):
            return False
        if monotonic() > deadline:
            raise Overdue("something never ends")
    return True
