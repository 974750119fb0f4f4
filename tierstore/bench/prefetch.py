"""Rows of ``bench prefetch``: each trace under each policy at the same pace, beside loads that start on look-up."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from prefetch import Compute
from tierstore.bench.prefetch_machine import Sizes
from tierstore.bench.prefetching import POLICIES, Server, mean, p99
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tierstore.replay.traces import Request, Trace

PREFILL = Compute(2.28e-5, 4.33e-10)
"""Seconds to prefill n tokens of an 8B model, ``2.28e-5 n + 4.33e-10 n n``: measured on an H200."""


@dataclass(frozen=True, slots=True)
class Capacities:
    """Bytes of the tiers and bytes a second of the edges; ``token_nbytes``: of KV."""

    hbm: int
    host: int
    nvme: int
    nvme_bytes_per_s: float
    link_bytes_per_s: float
    token_nbytes: int

    def sizes(self, block_tokens: int) -> Sizes:
        """In pages of one block each. ConfigError if a tier holds none."""
        page = block_tokens * self.token_nbytes
        for name in ("hbm", "host", "nvme"):
            if getattr(self, name) < page:
                raise ConfigError(
                    f"--{name} {getattr(self, name)}: allowed: at least one block, {page} bytes"
                )
        return Sizes(
            hbm=self.hbm // page,
            host=self.host // page,
            nvme=self.nvme // page,
            read_s=page / self.nvme_bytes_per_s,
            load_s=page / self.link_bytes_per_s,
            prefill=PREFILL,
            block_tokens=block_tokens,
        )


@dataclass(frozen=True, slots=True)
class PrefetchRow:
    """One policy over one trace. Seconds; stalls are beyond a prefill whose pages are all in HBM.

    ``utilisation``: the least time in which all could be served, everything there at once and loads on look-up, by the
    time in which it comes. ``prefill_share``: of the time, with a request in prefill. ``wasted``: of the pages brought
    up ahead of need, those that no request used. ``stall_by_source``: seconds, by the tier of the slowest page.
    """

    trace: str
    policy: str
    utilisation: float
    requests: int
    too_long: int
    stall_mean_s: float
    stall_p99_s: float
    ttft_mean_s: float
    ttft_p99_s: float
    prefill_share: float
    brought_pages: int
    wasted: float
    late: float
    stall_by_source: dict[str, float]

    def plain(self) -> dict[str, object]:
        """As JSON has it."""
        return asdict(self)


def prefetch_rows(
    trace: Trace,
    capacities: Capacities,
    utilisations: Sequence[float],
    step: Callable[[str, int], None],
) -> Iterator[PrefetchRow]:
    """Every policy at every utilisation. ``step`` is told the policy of each request served."""
    sizes, requests = capacities.sizes(trace.block_tokens), trace.requests
    span = requests[-1].at - requests[0].at if requests else 0.0
    full = Server("on-lookup", sizes, requests, 0.0).run(lambda served: step("at once", served)).makespan
    for utilisation in utilisations:
        stretch = full / (utilisation * span) if span else 0.0
        for policy in POLICIES:
            server = Server(policy, sizes, requests, stretch)
            yield _row(trace.name, policy, utilisation, server, partial(step, policy))


def _row(
    trace: str, policy: str, utilisation: float, server: Server, step: Callable[[int], None]
) -> PrefetchRow:
    found = server.run(step)
    used = found.useful / found.brought if found.brought else 1.0
    return PrefetchRow(
        trace=trace,
        policy=policy,
        utilisation=utilisation,
        requests=len(found.stalls),
        too_long=found.too_long,
        stall_mean_s=mean(found.stalls),
        stall_p99_s=p99(found.stalls),
        ttft_mean_s=mean(found.ttfts),
        ttft_p99_s=p99(found.ttfts),
        prefill_share=found.busy_s / found.makespan if found.makespan else 0.0,
        brought_pages=found.brought,
        wasted=1.0 - used,
        late=found.late / found.brought if found.brought else 0.0,
        stall_by_source=dict(found.causes),
    )


def first(trace: Trace, number: int | None) -> Sequence[Request]:
    """The first requests of a trace; None: all."""
    return trace.requests if number is None else trace.requests[:number]
