"""Run one connector case: real connectors of one vLLM release, one process a rank, over the stand-in `mori.io`.

Real: the connector, both sides; its sockets; the model runner's connector life cycle; the executor's aggregation.
Modelled: the scheduler's state machine, the forward pass, the router, and MoRI-IO itself. Engines keep stepping, as
engines under load do; an idle vLLM engine may not step, and then notices timers and messages only with its next request.
"""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real_backend import rank as rank_module
from real_backend import scheduler_side
from real_backend.case import CaseResult, ConnectorCase, Leg, Raised, Side
from real_backend.engine import Engine
from real_backend.processes import Child, reserve_ports
from real_backend.verdict import Evidence, conclude, not_started
from real_backend.vllm_setup import ConfigFactory, Ports, has_head_axis, prepare

_POLL_S = 0.01
_SETTLE_S = 0.15
_SIDES: tuple[Side, Side] = ("prefill", "decode")


class Harness:
    """Holds one imported release. Make one a process; `run` any number of cases."""

    def __init__(self, tree: Path, work: Path, read_abort_s: float = 2.0) -> None:
        """Import vLLM from `tree`; `work` takes generated model folders and the children's logs."""
        self._work = work
        prepare(tree, read_abort_s)
        self._configs = ConfigFactory(work / "models")

    def run(self, case: ConnectorCase) -> CaseResult:
        """Run `case` from start to end; never longer than the connector's own timers plus the start.

        Whatever the connector does is a result. Raises RuntimeError if a process died, OSError if no ports are free,
        ValueError for a case that would measure the harness.
        """
        if case.model.layers == 1 and not case.model.mla and has_head_axis():
            # Newer releases register a single storage as one region, and of split K and V only the first half of it.
            raise ValueError("one layer of split K and V is not what this release's model runner makes: use two layers")
        started = time.monotonic()
        with tempfile.TemporaryDirectory(dir=self._work) as folder, self._children(case, Path(folder)) as children:
            problem = children.await_start(10.0 + case.ranks)
            if problem:
                return not_started(case, *problem, time.monotonic() - started)
            run = _Run(case, children)
            run.drive()
            evidence = Evidence(case, run.engines, children.ranks, run.transfer_ids)
            return conclude(evidence, time.monotonic() - started)

    @contextmanager
    def _children(self, case: ConnectorCase, folder: Path) -> Iterator[_Children]:
        with reserve_ports() as reserved:
            yield from self._start(case, folder, dict(zip(_SIDES, reserved, strict=True)))

    def _start(self, case: ConnectorCase, folder: Path, ports: dict[Side, Ports]) -> Iterator[_Children]:
        # All configurations first: the children are forked from a process with one thread and everything built.
        configs = {
            (side, dp): self._configs.engine(case, side, dp, ports[side]) for side in _SIDES for dp in range(case.engine(side).dp)
        }
        gc.freeze()
        children = _Children(ports, {}, {})
        log = self._work / "children.log"
        try:
            for (side, dp), config in configs.items():
                size = case.engine(side)
                label = f"{side} scheduler {dp}"
                children.schedulers[side, dp] = Child(label, scheduler_side.serve, (case, config), log, ask=False)
                meeting = folder / f"{side}{dp}"
                children.ranks[side, dp] = [
                    Child(size.rank_name(side, dp, tp), rank_module.serve, (case, config, tp, meeting), log, ask=True)
                    for tp in range(size.tp)
                ]
            yield children
        finally:
            children.kill()


@dataclass(slots=True)
class _Children:
    """All processes of a run, by engine and DP rank."""

    ports: dict[Side, Ports]
    schedulers: dict[tuple[Side, int], Child]
    ranks: dict[tuple[Side, int], list[Child]]

    def all(self) -> list[Child]:
        return [*self.schedulers.values(), *(rank for ranks in self.ranks.values() for rank in ranks)]

    def await_start(self, limit_s: float) -> tuple[list[Raised], list[str]] | None:
        """Wait until everyone is up. Otherwise return what was raised and who is not up."""
        deadline = time.monotonic() + limit_s
        raised, missing = [], []
        for child in self.all():
            if not child.steps.poll(max(0.0, deadline - time.monotonic())):
                missing.append(child.name)
                continue
            answer = child.result()
            if answer is not None:
                raised.append(answer)
        return (raised, missing) if raised or missing else None

    def kill(self) -> None:
        for child in self.all():
            child.kill()


class _Run:
    """The router's part, and the decision when a run is over."""

    def __init__(self, case: ConnectorCase, children: _Children) -> None:
        self._case = case
        self._ports = children.ports
        self._lock = threading.Lock()
        self.transfer_ids: list[set[Any]] = [set() for _ in case.requests]
        self.engines = {
            (side, dp): Engine(case, side, children.schedulers[side, dp], ranks, self._prefill_done)
            for (side, dp), ranks in children.ranks.items()
        }

    def drive(self) -> None:
        """Send the legs, then wait until every request is over or nothing moves any more."""
        for engine in self.engines.values():
            engine.start()
        for index, request in enumerate(self._case.requests):
            if self._case.mode == "write":
                self._send_decode(index, {})
            self._send("prefill", request.prefill_dp, index, dict(request.prefill_leg))
        while not self._over():
            time.sleep(_POLL_S)
            for engine in self.engines.values():
                if engine.failure:
                    raise engine.failure
        for engine in self.engines.values():
            engine.stop()
        for engine in self.engines.values():
            engine.join(timeout=0.5)

    def _prefill_done(self, index: int, response: Leg) -> None:
        if self._case.mode == "read":
            self._send_decode(index, response)

    def _send_decode(self, index: int, response: Leg) -> None:
        request = self._case.requests[index]
        leg = request.decode_leg(response) if callable(request.decode_leg) else dict(request.decode_leg)
        self._send("decode", request.decode_dp, index, leg)

    def _send(self, side: Side, dp: int, index: int, leg: Leg) -> None:
        addresses = [self._ports[each].zmq_address for each in _SIDES]
        router_id = f"___prefill_addr_{addresses[0]}___decode_addr_{addresses[1]}_{index:032x}"
        request_id = f"cmpl-{router_id}-0-{'a' * 8 if side == 'prefill' else 'd' * 8}"
        with self._lock:
            self.transfer_ids[index].add(f"sidecar-{request_id}")  # what newer releases make of a missing one
            if "transfer_id" in leg:
                self.transfer_ids[index].add(leg["transfer_id"])
        self.engines[side, dp].submit(index, request_id, leg)

    def _over(self) -> bool:
        now = time.monotonic()
        engines = self.engines.values()
        for engine in engines:
            started = engine.step_started
            if started is not None and now - started > _SETTLE_S and not engine.stalled and not engine.dead:
                return False  # a step that takes long is not a standstill, until the engine gives it up
        quiet = now - max(engine.last_progress for engine in engines)
        requests = [request for engine in engines for request in engine.tracked.values()]
        legs = 2 * len(self._case.requests)
        if len(requests) == legs and all(request.state == "ended" for request in requests):
            return quiet > _SETTLE_S
        return quiet > self._quiet_limit_s()

    def _quiet_limit_s(self) -> float:
        case = self._case
        timers = max(case.transfer_timeout_s, case.defer_timeout_s)
        return timers + 0.6 if case.mode == "write" else max(timers, case.timers.read_abort_s) + 0.6
