"""What a model runner knows of its requests, from one scheduler output after another: their blocks, and what to compute."""

from __future__ import annotations

from typing import Any, NamedTuple


class Chunk(NamedTuple):
    """Tokens of one request that a step computes, and the request's blocks by cache group."""

    request_id: str
    tokens: range
    tables: tuple[list[int], ...]


class Batch:
    """Kept as vLLM's model runner keeps it: new requests bring their blocks, others what was added, resumed ones all anew."""

    def __init__(self) -> None:
        self._tables: dict[str, tuple[list[int], ...]] = {}

    def take(self, output: Any) -> list[Chunk]:
        """Follow vLLM's SchedulerOutput; return what it has computed."""
        for request_id in output.finished_req_ids:
            self._tables.pop(request_id, None)
        first: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = tuple(list(group) for group in new.block_ids)
            first[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request_id, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            first[request_id] = computed
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = tuple(list(group) for group in blocks)
                continue
            for table, added in zip(self._tables[request_id], blocks or (), strict=bool(blocks)):
                table += added
        return [
            Chunk(request_id, range(first[request_id], first[request_id] + count), self._tables[request_id])
            for request_id, count in output.num_scheduled_tokens.items()
        ]
