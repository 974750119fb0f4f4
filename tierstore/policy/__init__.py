"""Who leaves a tier first, and who is worth writing to the next: pure objects, no slots, bytes, threads or clocks."""

from __future__ import annotations

from tierstore.policy.admission import Admission, make_admission
from tierstore.policy.budget import WriteBudget
from tierstore.policy.orders import Fifo, Lru, make_policy
from tierstore.policy.queue import VictimQueue

__all__ = ["Admission", "Fifo", "Lru", "VictimQueue", "WriteBudget", "make_admission", "make_policy"]
