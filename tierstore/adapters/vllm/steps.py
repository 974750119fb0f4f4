"""What each request does in a step, out of vLLM's ``SchedulerOutput``, which tells block tables only in part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierstore.adapters.vllm.requests import Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.adapters.vllm.kv_groups import Groups


class Steps:
    """The block tables of all requests that run."""

    def __init__(self, groups: Groups) -> None:
        self._sizes = [group.block_size for group in groups.all]
        self._tables: dict[str, list[list[int]]] = {}

    def of(self, output: Any) -> list[Step]:
        """One a scheduled request. Each output exactly once, in order."""
        for request_id in output.finished_req_ids:
            self.forget(request_id)
        scheduled: dict[str, int] = output.num_scheduled_tokens
        steps: list[Step] = []
        for new in output.scheduled_new_reqs:
            steps.append(self._begun(new.req_id, new.num_computed_tokens, new.block_ids, scheduled))
        cached = output.scheduled_cached_reqs
        for request_id, more, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                steps.append(self._begun(request_id, computed, more, scheduled))
                continue
            tables = self._tables[request_id]
            fresh: list[int] = []
            for table, blocks in zip(tables, more or (), strict=False):
                table += blocks
                fresh += blocks
            steps.append(Step(request_id, computed, scheduled[request_id], tables, fresh, first=False))
        return steps

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._tables.pop(request_id, None)

    def _begun(
        self, request_id: str, computed: int, blocks: Sequence[list[int]] | None, scheduled: dict[str, int]
    ) -> Step:
        tables = [list(table) for table in blocks or [[] for _ in self._sizes]]
        self._tables[request_id] = tables
        fresh = [
            block
            for table, size in zip(tables, self._sizes, strict=True)
            for block in table[computed // size :]
        ]
        return Step(request_id, computed, scheduled[request_id], tables, fresh, first=True)
