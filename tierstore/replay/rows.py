"""What a replay says: one row a trace, capacity and policy, beside what a cache that knows the future would hit."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from tierstore.replay.simulation import replay

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.replay.bounds import Bounds
    from tierstore.replay.simulation import Setting
    from tierstore.replay.traces import Trace


@dataclass(frozen=True, slots=True)
class Row:
    """Rates are prefix-hit tokens by tokens asked for, over the second half of the trace; bytes over all of it.

    ``capacity_bytes``: pages of all tiers together, the bound's too. ``too_long``: requests with more pages than HBM
    holds, passed over; the bound serves them. ``seconds``: wall time of this row's replay, without the bound;
    ``pages_per_second``: pages asked for in all of the trace, by it.
    """

    trace: str
    policy: str
    admission: str
    capacity_bytes: int
    hit_rate: float
    optimal_hit_rate: float
    hit_tokens: dict[str, int]
    asked_tokens: int
    bytes_moved: dict[str, int]
    nvme_bytes_written: int
    too_long: int
    seconds: float
    pages_per_second: float


def row(trace: Trace, setting: Setting, bounds: Bounds, step: Callable[[int], None]) -> Row:
    """Replays the trace; ``step`` is told of each request's pages as they are done."""
    began = perf_counter()
    outcome = replay(trace, setting, step)
    seconds = perf_counter() - began
    pages = sum(setting.pages.values())
    names = [setting.policies[tier] for tier in sorted(setting.pages)]
    return Row(
        trace=trace.name,
        policy=names[0] if len(set(names)) == 1 else "/".join(names),
        admission=setting.admission,
        capacity_bytes=pages * setting.page_nbytes,
        hit_rate=outcome.hit_rate,
        optimal_hit_rate=bounds.rate(trace, pages),
        hit_tokens={tier.name: n * trace.block_tokens for tier, n in sorted(outcome.hits.items())},
        asked_tokens=outcome.asked_tokens,
        bytes_moved=outcome.moved,
        nvme_bytes_written=outcome.nvme_written,
        too_long=outcome.too_long,
        seconds=seconds,
        pages_per_second=sum(len(request.keys) for request in trace.requests) / seconds if seconds else 0.0,
    )
