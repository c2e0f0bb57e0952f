"""vLLM's own scheduler of one DP rank in a process of its own, with the connector's scheduler side that it made for itself.

It is called as vLLM's engine core calls it: requests come in, a step is made, its outcome goes back. What it decides, or
raises, is a result.
"""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from typing import Any

from kvcover.real_backend.driver.processes import Ports
from kvcover.real_backend.driver.reports import Answer, Planned, SchedulerReport, StepReport, Updated
from kvcover.real_backend.driver.trial import BlockTables, Role, Trial
from kvcover.real_backend.driver.wire import Wire
from kvcover.real_backend.inside.injection import Injection
from kvcover.real_backend.inside.keys import Notes, WatchedLeg, follow_copies
from kvcover.real_backend.inside.raising import raised_by
from kvcover.real_backend.inside.vllm_scheduler import EngineScheduler
from kvcover.real_backend.inside.vllm_setup import EngineConfig, refuse_states
from kvcover.sim.scenario.dispatch import Params


class SchedulerSide:
    """What the driver may ask of a scheduler: one method a call of the engine core's."""

    def __init__(self, trial: Trial, config: EngineConfig, ports: dict[Role, Ports]) -> None:
        self._name = trial.endpoint(config.role).engine_name(config.dp_rank)
        self._injection = Injection(trial, config.role, config.dp_rank, self._name, ports)
        self._injection.wrap_sockets()
        refuse_states(trial, config)
        self._engine = EngineScheduler(trial, config, self.follow)
        self._legs: dict[str, WatchedLeg] = {}
        self._step: Any = None

    def add(self, index: int, request_id: str, leg: Params, max_tokens: int | None) -> None:
        """Take a new request; it waits for the next step. An empty leg is that of a request that the router didn't split."""
        self._legs[request_id] = WatchedLeg(leg, Notes())
        self._engine.add(index, request_id, self._legs[request_id] if leg else None, max_tokens)

    def warm(self) -> dict[int, BlockTables]:
        """Fill the prefix cache as the scenario wants it; return the blocks in it, by the request whose prompt they hold."""
        return self._engine.warm()

    def abort(self, request_id: str) -> dict[str, str]:
        """End a request whose client is gone; return all states."""
        self._engine.abort(request_id)
        return self._engine.states()

    def schedule(self) -> Planned:
        """Make a step."""
        step = self._step = self._engine.vllm.schedule()
        for new in step.scheduled_new_reqs:
            new.sampling_params = None  # our forward samples nothing, and a leg in a pickle counts as one nobody can watch
        return Planned(
            pickle.dumps(step),
            dict(step.num_scheduled_tokens),
            frozenset(filter(self._engine.samples, step.num_scheduled_tokens)),
            self._engine.states(),
            self._engine.tables(),
            dict(self._engine.external),
        )

    def update(self, reports: list[StepReport], stop: list[str]) -> Updated:
        """Hand the step's outcome to the scheduler; requests in `stop` sample the token that ends them."""
        output = self._engine.model_output(self._step.num_scheduled_tokens, reports, stop)
        connector = output.kv_connector_output
        reported = frozenset(connector.finished_sending or ()) | frozenset(connector.finished_recving or ())
        failed = frozenset(getattr(connector, "failed_recving", None) or ())
        invalid = frozenset(connector.invalid_block_ids or ())
        made = self._engine.vllm.update_from_output(self._step, output)
        answers = [
            Answer(each.request_id, "" if each.finish_reason is None else str(each.finish_reason), each.kv_transfer_params)
            for client in made.values()
            for each in client.outputs
        ]
        return Updated(reported, failed, invalid, tuple(answers), self._engine.states())

    def follow(self) -> None:
        """Watch the copies of legs that the connector made in the last call."""
        if (scheduler := getattr(self._engine.connector, "connector_scheduler", None)) is not None:
            follow_copies(scheduler, self._legs)

    def report(self) -> SchedulerReport:
        """Return what was seen so far."""
        reads = {self._injection.request_of(request_id): leg.notes.report() for request_id, leg in self._legs.items()}
        return SchedulerReport(self._name, reads, tuple(self._injection.sent), tuple(self._injection.acted))

    def learn_ports(self, bound: dict[int, str]) -> None:
        """Learn who listens where."""
        self._injection.owners = bound


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
