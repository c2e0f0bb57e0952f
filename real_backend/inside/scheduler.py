"""The scheduler side of the connector in a process of its own, called as vLLM's scheduler calls it.

What the scheduler itself would do around those calls (admission, block tables, request states) is kept to what the
connector can see. Blocks come from the trial, so that their ids are known; the states and the assertions are vLLM's.
"""

from __future__ import annotations

import importlib
import pickle
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from kvcover.real_backend.driver.processes import Ports
from kvcover.real_backend.driver.reports import Admission, Aggregated, Reconciled, SchedulerReport, StepReport
from kvcover.real_backend.driver.trial import BlockTables, Role, Trial
from kvcover.real_backend.driver.wire import Wire
from kvcover.real_backend.inside.injection import Injection
from kvcover.real_backend.inside.keys import Notes, WatchedLeg, follow_copies
from kvcover.real_backend.inside.raising import raised_by
from kvcover.real_backend.inside.vllm_setup import EngineConfig, connector_class, connector_role, refuse_states
from kvcover.sim.scenario.dispatch import Params


class _Blocks:
    """A request's block tables, as the connector sees them."""

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Return the ids by cache group."""
        return tuple(list(ids) for ids in self._tables)


class SchedulerSide:
    """One DP rank's scheduler-side connector and the requests that it was shown."""

    def __init__(self, trial: Trial, config: EngineConfig, ports: dict[Role, Ports]) -> None:
        self._endpoint = trial.endpoint(config.role)
        self._kv_cache = config.kv_cache
        self._name = self._endpoint.engine_name(config.dp_rank)
        self._injection = Injection(trial, config.role, config.dp_rank, self._name, ports)
        self._injection.wrap_sockets()
        refuse_states(trial, config)
        self._connector = connector_class()(config.vllm, connector_role("SCHEDULER"), config.kv_cache)
        self._requests: dict[str, Any] = {}
        self._blocks: dict[str, BlockTables] = {}
        self._legs: dict[str, WatchedLeg] = {}
        self._sync_loads: set[str] = set()
        utils = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.utils")
        self._aggregator = utils.KVOutputAggregator(self._endpoint.tp)

    def admit(self, request_id: str, leg: Params, blocks: BlockTables, tokens: int, external_zero: bool) -> Admission:
        """Show a new request to the connector, in the order of vLLM's scheduler: admission, match, allocation.

        `external_zero`: the scheduler then takes nothing from outside, as newer ones do for requests that must not read
        the prefix cache, and as any does whose MultiConnector got the KV elsewhere.
        """
        request = self._new_request(request_id, leg, tokens)
        self._requests[request_id], self._blocks[request_id] = request, blocks
        self._connector.on_new_request(request)
        external, wait = self._connector.get_num_new_matched_tokens(request, 0)
        if external_zero:
            external, wait = 0, False
        self._connector.update_state_after_alloc(request, _Blocks(blocks), external)
        states = importlib.import_module("vllm.v1.request").RequestStatus
        request.status = states.WAITING_FOR_REMOTE_KVS if wait else states.RUNNING
        if external and not wait:
            self._sync_loads.add(request_id)
        return Admission(int(external), bool(wait), int(request.num_prompt_tokens))

    def abort_before(self, request_id: str, leg: Params, tokens: int) -> None:
        """Show a request to the connector whose client goes before it gets any block."""
        request = self._new_request(request_id, leg, tokens)
        self._requests[request_id], self._blocks[request_id] = request, ((),) * len(self._endpoint.tables)
        self._connector.on_new_request(request)
        self.finish(request_id, "FINISHED_ABORTED")

    def schedule(self, scheduled: dict[str, int]) -> bytes:
        """Build a step that computes `scheduled` (request id to tokens); return it pickled, with connector metadata."""
        output = importlib.import_module("vllm.v1.core.sched.output").SchedulerOutput.make_empty()
        output.num_scheduled_tokens = dict(scheduled)
        output.total_num_scheduled_tokens = sum(scheduled.values())
        if hasattr(output, "has_sync_kv_loads"):
            output.has_sync_kv_loads = not self._sync_loads.isdisjoint(scheduled)
        if hasattr(output, "kv_connector_block_state"):
            output.kv_connector_block_state = SimpleNamespace(get_block_ids=self._block_ids)
        output.kv_connector_metadata = self._connector.build_connector_meta(output)
        if hasattr(output, "kv_connector_block_state"):
            output.kv_connector_block_state = None
        self._sync_loads.difference_update(scheduled)
        return pickle.dumps(output)

    def _block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """What vLLM's scheduler knows of a request's blocks at the time."""
        return tuple(list(ids) for ids in self._blocks[request_id])

    def resume(self, request_id: str) -> None:
        """Let a request run whose external KV is there."""
        self._requests[request_id].status = importlib.import_module("vllm.v1.request").RequestStatus.RUNNING

    def finish(self, request_id: str, status: str) -> tuple[bool, Params | None]:
        """End a request with a `RequestStatus` name. Returns whether its blocks stay, and what goes into the response."""
        request = self._requests[request_id]
        states = importlib.import_module("vllm.v1.request").RequestStatus
        waiting = request.status == states.WAITING_FOR_REMOTE_KVS
        request.status = states[status]
        blocks = self._block_ids(request_id)
        if hasattr(self._connector, "request_finished_all_groups"):
            keep, params = self._connector.request_finished_all_groups(request, blocks)
        else:
            keep, params = self._connector.request_finished(request, blocks[0])
        if not keep and not waiting:  # blocks that a transfer may still write stay until its report
            del self._requests[request_id]
        return bool(keep), params

    def reconcile(self, sent: set[str], received: set[str]) -> Reconciled:
        """Hand the aggregated reports of a step to the connector, then act on them with the scheduler's own assertions.

        Raises AssertionError where vLLM's scheduler does: a report for a request that is unknown, or that doesn't wait.
        """
        states = importlib.import_module("vllm.v1.request").RequestStatus
        output = importlib.import_module("vllm.v1.outputs").KVConnectorOutput(
            finished_sending=set(sent) or None, finished_recving=set(received) or None
        )
        self._connector.update_connector_output(output)
        for request_id in output.finished_recving or ():
            assert request_id in self._requests, f"finished_recving names unknown request {request_id}"
            status = self._requests[request_id].status
            waiting = status == states.WAITING_FOR_REMOTE_KVS
            assert waiting or states.is_finished(status), f"finished_recving for a request that is {status}"
            if not waiting:
                del self._requests[request_id]
        for request_id in output.finished_sending or ():
            assert request_id in self._requests, f"finished_sending names unknown request {request_id}"
            del self._requests[request_id]
        return Reconciled(frozenset(output.finished_sending or ()), frozenset(output.finished_recving or ()))

    def aggregate(self, reports: list[StepReport]) -> Aggregated:
        """Let vLLM's aggregator say which requests are finished for the engine."""
        output_class = importlib.import_module("vllm.v1.outputs").KVConnectorOutput
        outputs = []
        for report in reports:
            output = output_class(
                finished_sending=report.finished_sending or None,
                finished_recving=report.finished_recving or None,
                invalid_block_ids=report.invalid_blocks,
            )
            if report.failed_recving:
                output.failed_recving = report.failed_recving
            outputs.append(SimpleNamespace(kv_connector_output=output))
        result = self._aggregator.aggregate(outputs).kv_connector_output
        if result.invalid_block_ids and len(self._kv_cache.kv_cache_groups) > 1:
            self._let_vllm_refuse(result.invalid_block_ids)
        return Aggregated(
            frozenset(result.finished_sending or ()),
            frozenset(result.finished_recving or ()),
            frozenset(getattr(result, "failed_recving", None) or ()),
            frozenset(result.invalid_block_ids or ()),
        )

    def _let_vllm_refuse(self, invalid: set[int]) -> None:
        """Hand failed blocks to vLLM's scheduler, which raises when a model has several block tables."""
        scheduler = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
        scheduler._handle_invalid_blocks(SimpleNamespace(kv_cache_config=self._kv_cache), invalid, {})

    def follow(self) -> None:
        """Watch the copies of legs that the connector made in the last call."""
        if (scheduler := getattr(self._connector, "connector_scheduler", None)) is not None:
            follow_copies(scheduler, self._legs)

    def report(self) -> SchedulerReport:
        """Return what was seen so far."""
        reads = {self._injection.request_of(request_id): leg.notes.report() for request_id, leg in self._legs.items()}
        return SchedulerReport(self._name, reads, tuple(self._injection.sent), tuple(self._injection.acted))

    def learn_ports(self, bound: dict[int, str]) -> None:
        """Learn who listens where."""
        self._injection.owners = bound

    def _new_request(self, request_id: str, leg: Params, tokens: int) -> Any:
        self._legs[request_id] = WatchedLeg(leg, Notes())
        request_class = importlib.import_module("vllm.v1.request").Request
        sampling = importlib.import_module("vllm.sampling_params").SamplingParams
        return request_class(
            request_id=request_id,
            prompt_token_ids=list(range(tokens)),
            sampling_params=sampling(max_tokens=16, extra_args={"kv_transfer_params": self._legs[request_id]}),
            pooling_params=None,
        )


def serve(trial: Trial, config: EngineConfig, ports: dict[Role, Ports], pipe: Connection | Wire) -> None:
    """Body of a scheduler's process: answer (method, arguments) with a result or with what was raised."""
    name = f"{config.role} scheduler {config.dp_rank}"
    try:
        side = SchedulerSide(trial, config, ports)
    except Exception as error:
        pipe.send(raised_by(name, error))
        return
    pipe.send(None)
    while True:
        method, arguments = pipe.recv()
        try:
            answer = getattr(side, method)(*arguments)
        except Exception as error:  # EngineCore would die here; the parent decides what follows
            answer = raised_by(name, error)
        side.follow()
        pipe.send(answer)
