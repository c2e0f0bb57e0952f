"""A release's own scheduler and KV cache manager, built as its engine core builds them, and the requests that they take."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvcover.real_backend.driver.reports import StepReport
from kvcover.real_backend.driver.trial import BlockTables, Trial
from kvcover.real_backend.inside.vllm_setup import EngineConfig
from kvcover.sim.scenario.dispatch import Params

STOP = 2
"""The token that ends a request that generates."""
_OTHER = 3
_MANY = 1 << 16
_PROMPT = 1 << 10
"""Prompt tokens are numbers from here on: what was generated is in no prompt."""


def import_ahead() -> None:
    """Import what schedulers and ranks need, in the process that is forked to make them."""
    for module in ("core.sched.scheduler", "structured_output", "request", "outputs", "worker.kv_connector_model_runner_mixin"):
        importlib.import_module(f"vllm.v1.{module}")


class EngineScheduler:
    """vLLM's scheduler of one DP rank, with the connector that it made for itself."""

    def __init__(self, trial: Trial, config: EngineConfig, seen: Callable[[], None]) -> None:
        """`seen` is called when the connector has been told of a request's blocks, before it makes a step's metadata of that."""
        self._seen = seen
        self._trial, self._role, self._dp = trial, config.role, config.dp_rank
        endpoint, vllm = trial.endpoint(config.role), config.vllm
        utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
        kv_cache = utils.generate_scheduler_kv_cache_config([config.kv_cache])
        block_size, hash_size = utils.resolve_kv_cache_block_sizes(kv_cache, vllm)
        manager = importlib.import_module("vllm.v1.structured_output").StructuredOutputManager
        self.vllm: Any = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler(
            vllm_config=vllm,
            kv_cache_config=kv_cache,
            structured_output_manager=manager(vllm),
            block_size=block_size,
            hash_block_size=hash_size,
            log_stats=True,
        )
        self.vllm.num_lookahead_tokens = endpoint.side.lookahead_tokens  # without a drafter, whose slots they would be
        if endpoint.side.max_tokens_per_step:
            self.vllm.max_num_scheduled_tokens = endpoint.side.max_tokens_per_step
        self.connector: Any = self.vllm.connector
        self._hasher = _hasher(vllm, hash_size)
        aggregator = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.utils").KVOutputAggregator
        self._aggregator = aggregator.from_connector(self.connector, endpoint.tp)
        self._statuses: Any = importlib.import_module("vllm.v1.request").RequestStatus
        self._fixed = {
            request.index: blocks
            for request in trial.setup.requests
            if getattr(request, f"{self._role}_dp") == self._dp and (blocks := getattr(request, f"{self._role}_blocks"))
        }
        self._indices: dict[str, int] = {}
        self.external: dict[str, int] = {}
        """Tokens that the connector was last told to bring, by request."""
        self._watch_connector()
        if self._fixed:
            self._order_allocations()

    def add(self, index: int, request_id: str, leg: Params | None, max_tokens: int | None) -> None:
        """Hand the scheduler a new request; `leg` None is one that no router split. `max_tokens` None: it goes on until `STOP`."""
        self._indices[request_id] = index
        sampling = importlib.import_module("vllm.sampling_params").SamplingParams
        extra = None if leg is None else {"kv_transfer_params": leg}
        params = sampling(max_tokens=max_tokens or _MANY, stop_token_ids=[STOP], extra_args=extra)
        self.vllm.add_request(self._request(request_id, self._prompt(index), params))

    def warm(self) -> dict[int, BlockTables]:
        """Put what the scenario wants there into decode's prefix cache, as earlier requests left it. Returns blocks by request."""
        found: dict[int, BlockTables] = {}
        manager, size = self.vllm.kv_cache_manager, self._trial.endpoint(self._role).shape.block_size
        params = importlib.import_module("vllm.sampling_params").SamplingParams(max_tokens=1)
        for asked in self._trial.setup.requests:
            if self._role != "decode" or asked.decode_dp != self._dp or not asked.decode_hit_blocks:
                continue
            request_id = f"before {asked.index}"
            self._indices[request_id] = asked.index
            earlier = self._request(request_id, self._prompt(asked.index)[: asked.decode_hit_blocks * size], params)
            manager.allocate_slots(earlier, earlier.num_tokens)
            found[asked.index] = tuple(tuple(group) for group in manager.get_block_ids(request_id))
            manager.free(earlier)
        return found

    def _request(self, request_id: str, prompt: list[int], params: Any) -> Any:
        request = importlib.import_module("vllm.v1.request").Request
        return request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def abort(self, request_id: str) -> None:
        """The client is gone."""
        self.vllm.finish_requests(request_id, self._statuses.FINISHED_ABORTED)

    def states(self) -> dict[str, str]:
        """The status of every request that the scheduler knows, by vLLM's name for it."""
        return {request_id: request.status.name for request_id, request in self.vllm.requests.items()}

    def tables(self) -> dict[str, BlockTables]:
        """The blocks of every request that has any, by cache group; 0 where a group has let go of one."""
        found = {}
        for request_id in self.vllm.requests:
            groups = self.vllm.kv_cache_manager.get_block_ids(request_id)
            if any(groups):
                found[request_id] = tuple(tuple(group) for group in groups)
        return found

    def model_output(self, scheduled: Mapping[str, int], reports: Sequence[StepReport], stop: Sequence[str]) -> Any:
        """What the executor returns for a step: all ranks' reports in vLLM's aggregate, and a token where a prompt is complete."""
        outputs: Any = importlib.import_module("vllm.v1.outputs")
        ids = list(scheduled)
        tokens = [[STOP if each in stop else _OTHER] if self.samples(each) else [] for each in ids]

        def of(report: StepReport) -> Any:
            connector = outputs.KVConnectorOutput(
                finished_sending=report.finished_sending or None,
                finished_recving=report.finished_recving or None,
                invalid_block_ids=report.invalid_blocks,
            )
            if report.failed_recving:
                connector.failed_recving = report.failed_recving
            numbers = {request_id: number for number, request_id in enumerate(ids)}
            return outputs.ModelRunnerOutput(ids, numbers, sampled_token_ids=tokens, kv_connector_output=connector)

        return self._aggregator.aggregate([of(report) for report in reports], output_rank=0)

    def samples(self, request_id: str) -> bool:
        """Whether the model runner samples: not after a part of a prompt."""
        request = self.vllm.requests.get(request_id)
        return request is not None and request.num_computed_tokens >= request.num_tokens

    def _prompt(self, index: int) -> list[int]:
        """Tokens that no other request of the run has."""
        first = _PROMPT + sum(request.prompt_tokens for request in self._trial.setup.requests[:index])
        return list(range(first, first + self._trial.setup.requests[index].prompt_tokens))

    def _watch_connector(self) -> None:
        """Note how many tokens come from outside, and let none come where the scenario says so.

        Newer schedulers ask for nothing for requests that must not read the prefix cache, and so does any whose
        MultiConnector got the KV elsewhere.
        """
        ask, told = self.connector.get_num_new_matched_tokens, self.connector.update_state_after_alloc

        def get_num_new_matched_tokens(request: Any, computed: int) -> Any:
            answer = ask(request, computed)
            self.external.pop(request.request_id, None)  # it starts anew
            asked = self._trial.setup.requests[self._indices[request.request_id]]
            return (0, False) if self._role == "decode" and asked.external_zero else answer

        def update_state_after_alloc(request: Any, blocks: Any, external: int, *others: Any) -> None:
            self.external[request.request_id] = int(external) or self.external.get(request.request_id, 0)
            told(request, blocks, external, *others)
            self._seen()

        self.connector.get_num_new_matched_tokens = get_num_new_matched_tokens
        self.connector.update_state_after_alloc = update_state_after_alloc

    def _order_allocations(self) -> None:
        """Let each request take the blocks that the scenario gives it, by the order of the free queue; others take them last."""
        manager = self.vllm.kv_cache_manager
        allocate, queue = manager.allocate_slots, manager.block_pool.free_block_queue

        def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
            mine = self._fixed.get(self._indices[request.request_id], ())
            kept = {block for group in manager.get_block_ids(request.request_id) for block in group}
            free = {block.block_id: block for block in queue.get_all_free_blocks()}
            first = [block for block in mine if block not in kept]
            if not free.keys() >= set(first):
                return None  # another request has them: as if there was no room
            reserved = {block for blocks in self._fixed.values() for block in blocks}
            last = [block for block in free if block in reserved and block not in first]
            between = [block for block in free if block not in reserved]
            for block in (*first, *between, *last):
                queue.remove(free[block])
                queue.append(free[block])
            return allocate(request, *args, **kwargs)

        manager.allocate_slots = allocate_slots


def _hasher(vllm: Any, hash_size: int) -> Any:
    """What makes of a request's tokens the hashes of its blocks."""
    utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
    by_name = importlib.import_module("vllm.utils.hashing").get_hash_fn_by_name
    function = by_name(vllm.cache_config.prefix_caching_hash_algo)
    utils.init_none_hash(function)
    return utils.get_request_block_hasher(hash_size, function)
