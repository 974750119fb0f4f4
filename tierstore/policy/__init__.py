"""Eviction and admission policies. They handle keys and numbers only, and read no clock."""

from __future__ import annotations

from tierstore.policy.admission import Admission, WriteBudget
from tierstore.policy.history import History
from tierstore.policy.orders import Fifo, Lru, VictimQueue
from tierstore.policy.registry import Known, make_admission, make_history, make_policy

__all__ = [
    "Admission",
    "Fifo",
    "History",
    "Known",
    "Lru",
    "VictimQueue",
    "WriteBudget",
    "make_admission",
    "make_history",
    "make_policy",
]
