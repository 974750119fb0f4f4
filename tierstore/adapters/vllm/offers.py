"""What a waiting request is offered: looked up once and repeated, however often vLLM asks."""

from __future__ import annotations

import math
from time import monotonic
from typing import TYPE_CHECKING

from tierstore.adapters.vllm.costs import worth_loading
from tierstore.adapters.vllm.plans import longest
from tierstore.adapters.vllm.requests import Verdict

if TYPE_CHECKING:
    from tierstore.adapters.vllm.ahead import Ahead
    from tierstore.adapters.vllm.costs import Costs
    from tierstore.adapters.vllm.kv_groups import Groups
    from tierstore.adapters.vllm.plans import Plan
    from tierstore.adapters.vllm.requests import Known
    from tierstore.store import TierStore
    from tierstore.types import PageKey

_VERDICT_ASKS = 64
"""How often a verdict is repeated before pages are looked up again: a request that waits for room asks every step."""


class Offers:
    """Lookups in a store. ``put_off_s``: so long a request waits for what ``ahead`` brings up from disk. ``costs``:
    pages are left where they are if computing is quicker, and nobody else wants the engine; None: never.
    """

    def __init__(
        self,
        store: TierStore,
        groups: Groups,
        ahead: Ahead | None,
        put_off_s: float,
        costs: Costs | None = None,
    ) -> None:
        self.left = 0
        """Pages that were left where they were."""
        self._store = store
        self._groups = groups
        self._ahead = ahead
        self._put_off_s = put_off_s
        self._costs = costs

    def of(self, known: Known, computed: int, others: int = 0) -> int | None:
        """Tokens beyond ``computed``; None: ask again. ``others``: requests that want the engine meanwhile."""
        return None if self._put_off(known) else self._verdict(known, computed, others).plan.tokens

    def wanted(self, known: Known, local: int) -> tuple[list[PageKey], int]:
        """The pages of the longest hit, and how many of them lie within the first ``local`` tokens."""
        if self._groups.whole:
            size = self._groups.unit
            return known.chains[0].first((known.request.num_tokens - 1) // size), local // size
        pages = self._plan(known, 0).keys
        return [key for _, key in pages], sum(1 for end, _ in pages if end <= local)

    def _verdict(self, known: Known, computed: int, others: int) -> Verdict:
        verdict, tokens = known.verdict, known.request.num_tokens
        if (
            verdict is None
            or (verdict.tokens, verdict.computed) != (tokens, computed)
            or verdict.asked >= _VERDICT_ASKS
            or verdict.stale
        ):
            plan = self._plan(known, computed)
            if self._costs is not None and not others:
                plan = self._worth(known, plan, self._costs)
            verdict = known.verdict = Verdict(tokens, computed, plan)
        verdict.asked += 1
        return verdict

    def _put_off(self, known: Known) -> bool:
        """Whether the request is to wait in vLLM's queue; where it has waited its pages are looked up anew."""
        if not self._put_off_s or self._ahead is None or known.put_off == math.inf:
            return False
        now = monotonic()
        since = known.put_off = now if known.put_off is None else known.put_off
        if now - since < self._put_off_s and self._ahead.coming(known.request.request_id):
            return True
        known.put_off, known.verdict = math.inf, None
        return False

    def _worth(self, known: Known, plan: Plan, costs: Costs) -> Plan:
        """What of it is loaded; the rest is brought up behind."""
        loaded = plan.up_to(worth_loading(plan, known.request.num_tokens, costs))
        if loaded.tokens < plan.tokens:
            if not known.left:
                self.left += plan.pages - loaded.pages
            known.left = True
            if self._ahead is not None:
                self._ahead.behind(known.request.request_id)
        return loaded

    def _plan(self, known: Known, computed: int) -> Plan:
        """The longest hit; at least one token is left to compute."""
        limit = known.request.num_tokens - 1
        if known.limit is not None:
            limit = min(limit, known.limit)
        return longest(self._groups, known.chains, computed, limit, self._store.match)
