"""What each request does in a step, out of vLLM's ``SchedulerOutput``, which tells block tables only in part."""

from __future__ import annotations

from typing import Any

from tierstore.adapters.vllm.requests import Step


class Steps:
    """The block tables of all requests that run."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tables: dict[str, list[int]] = {}

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
            table = self._tables[request_id]
            fresh = [] if more is None else list(more[0])
            table += fresh
            steps.append(Step(request_id, computed, scheduled[request_id], table, fresh, first=False))
        return steps

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._tables.pop(request_id, None)

    def _begun(
        self, request_id: str, computed: int, blocks: tuple[list[int], ...] | None, scheduled: dict[str, int]
    ) -> Step:
        table = self._tables[request_id] = [] if blocks is None else list(blocks[0])
        fresh = table[computed // self._block_size :]
        return Step(request_id, computed, scheduled[request_id], table, fresh, first=True)
