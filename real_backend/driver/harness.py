"""Run trials: real connectors of one or two vLLM releases, one process a rank, over the stand-in `mori.io`.

Real: the connector, both sides; its sockets; vLLM's scheduler and KV cache manager; the model runner's connector life cycle;
the executor's aggregation. Modelled: the forward pass, the router, and MoRI-IO itself. Engines keep stepping, as engines
under load do; an idle vLLM engine may not step, and then notices timers and messages only with its next request.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvcover.faults import Fault
from kvcover.real_backend.driver.book import SharedInjector
from kvcover.real_backend.driver.children import Children
from kvcover.real_backend.driver.engine import Abort, EngineLoop, Tracked
from kvcover.real_backend.driver.journal import Journal
from kvcover.real_backend.driver.lookout import Lookout
from kvcover.real_backend.driver.processes import Child, Ports, ProcessDied, TreeServer, reserve_ports
from kvcover.real_backend.driver.rank_faults import RANK_KINDS, ProcessFaults
from kvcover.real_backend.driver.reports import Escaped, RunSeen
from kvcover.real_backend.driver.trial import ROLES, EngineKey, Role, Trial
from kvcover.real_backend.driver.witness import Evidence, conclude, not_started
from kvcover.sim.errors import MachineError, TierError
from kvcover.sim.kernel.events import FaultActed, LegSent, Lost
from kvcover.sim.results.outcome import request_outcome
from kvcover.sim.scenario.dispatch import Params

_POLL_S = 0.01
_SETTLE_S = 0.15
_RESTART_LIMIT_S = 10.0


class Harness:
    """Holds one imported release, or two if the engines differ. `run` any number of trials, from any thread."""

    def __init__(
        self, tree: Path | None, work: Path, read_abort_s: float = 2.0, decode_tree: Path | None = None, mori: Path | None = None
    ) -> None:
        """Start importing vLLM from `tree` (None: the installed one); decode's comes from `decode_tree` if that is given.

        `work` takes generated model folders and the processes' logs. `mori` holds a real `mori.io`; None is the stand-in.
        """
        self._work = work
        self._runs = itertools.count()
        first = TreeServer(tree, work, read_abort_s, mori)
        second = first if decode_tree in (None, tree) else TreeServer(decode_tree, work, read_abort_s, mori)
        self._servers: dict[Role, TreeServer] = {"prefill": first, "decode": second}

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of it."""
        for server in self._servers.values():
            server.close()

    def info(self, role: Role) -> dict[str, Any]:
        """Say what an engine's tree holds; waits for the import. Raises TierError if it can't be imported."""
        self._servers[role].await_ready()
        return self._servers[role].info

    def run(self, trial: Trial) -> RunSeen:
        """Run `trial` from start to end; never longer than the connector's own timers plus the start.

        Whatever the connector does is a result. Raises MachineError if something else than it or a planned fault spoilt the
        run, TierError if it can't be begun or the harness can't drive the tree, ValueError for a trial that would measure the
        harness.
        """
        try:
            return self._run(trial)
        except ProcessDied as error:
            raise _as_tier_error(error) from None

    def _run(self, trial: Trial) -> RunSeen:
        started = time.monotonic()
        geometry = trial.setup.geometry
        if geometry.layers == 1 and not geometry.mla and any(self.info(role)["head_axis"] for role in ROLES):
            # Newer releases register a single storage as one region, and of split K and V only the first half of it.
            raise ValueError("one layer of split K and V is not what this release's model runner makes: use two layers")
        for role in ROLES:
            self._servers[role].await_ready()
        with tempfile.TemporaryDirectory(dir=self._work) as folder, reserve_ports() as reserved:
            book = SharedInjector(trial.setup.faults, Path(folder) / "book")
            faults = ProcessFaults(trial, book)
            ports = dict(zip(ROLES, reserved, strict=True))
            with self._children(replace(trial, book=Path(folder) / "book"), Path(folder), ports, faults) as children:
                return drive(trial, children, faults, book, 10.0 + trial.ranks, started)

    @contextmanager
    def _children(self, trial: Trial, folder: Path, ports: dict[Role, Ports], faults: ProcessFaults) -> Iterator[Children]:
        run = f"run {next(self._runs)}"
        # All configurations first: the children are forked from a process with one thread and everything built.
        for role in ROLES:
            self._servers[role].call("configure", run, trial, role, list(range(trial.endpoint(role).dp)), ports[role])
        children = Children(ports, {}, {})
        log = self._work / "children.log"
        children.fork = lambda key: self._fork_engine(run, trial, key, children, folder, log, faults)
        try:
            for role in ROLES:
                for dp in range(trial.endpoint(role).dp):
                    children.fork((role, dp))
            yield children
        finally:
            for server in set(self._servers.values()):
                server.call("end", run)
            for child in children.all():
                child.close()

    def _fork_engine(
        self, run: str, trial: Trial, key: tuple[Role, int], children: Children, folder: Path, log: Path, faults: ProcessFaults
    ) -> None:
        (role, dp), endpoint, server = key, trial.endpoint(key[0]), self._servers[key[0]]
        ports = children.ports
        name = f"{role} scheduler {dp}"
        children.schedulers[key] = Child(name, server, run, "scheduler", (role, dp, log, ports), ask=False)
        children.ranks[key] = []
        for tp in range(endpoint.tp):
            name = endpoint.rank_name(dp, tp)
            meeting = folder / f"{role}{dp}-{len(children.gone)}"
            arguments = (role, dp, log, tp, meeting, ports, faults.late.get(name, 0.0))
            children.ranks[key].append(Child(name, server, run, "rank", arguments, ask=True))


def drive(
    trial: Trial, children: Children, faults: ProcessFaults, book: SharedInjector, start_limit_s: float, started: float
) -> RunSeen:
    """Wait until all children are up, run the trial and judge it; `started` is when it began, on the monotonic clock.

    Raises MachineError if the machine spoilt the run: then it says nothing of the connector, whatever came of it.
    """
    try:
        with Lookout(children.all, min(trial.limits.transfer_s, trial.limits.defer_s)) as lookout:
            seen = _drive(trial, children, faults, book, start_limit_s, started, lookout)
    except ProcessDied as error:
        raise _as_tier_error(error) from None
    except OSError as error:
        raise MachineError("--tier", f"the run could not go on: {error}", "free memory, files or disk") from None
    lookout.check(timeless=_all_well(trial, seen))
    return seen


def _all_well(trial: Trial, seen: RunSeen) -> bool:
    """Whether every request ended well with nothing done to it, which no lost time can have brought about."""
    return not trial.events and all(request_outcome(course) == "ok" for course in seen.record.courses)


def _drive(
    trial: Trial,
    children: Children,
    faults: ProcessFaults,
    book: SharedInjector,
    start_limit_s: float,
    started: float,
    lookout: Lookout,
) -> RunSeen:
    problem = children.await_start(start_limit_s, faults.late)
    if problem:
        refuse_foreign(trial, problem[0])
        return not_started(trial, *problem, time.monotonic() - started, book.totals())
    children.introduce(faults.late)
    run = Run(trial, children, faults, book, lookout)
    lookout.begin()
    run.drive()
    evidence = Evidence(
        trial, run.engines, children.ranks, run.transfer_ids, run.journal, run.legs, children.bound, children.past,
        children.schedulers, children.past_schedulers,
    )  # fmt: skip
    seen = conclude(evidence, time.monotonic() - started, book.totals())
    refuse_foreign(trial, list(seen.raised))
    return seen


def refuse_foreign(trial: Trial, raised: list[Escaped]) -> None:
    """Raise an error for an exception that says nothing of the connector: TierError if the harness called what isn't there,
    MachineError if the machine lacked something, or if one came from elsewhere and no planned fault of a rank explains it.
    """
    ranks_fail = any(fault.kind in RANK_KINDS for fault in trial.events)
    for each in raised:
        if each.machine or (each.foreign and not ranks_fail):
            text = each.machine or f"{each.kind}: {each.text}"
            raise MachineError("--tier", f"{each.rank} met trouble that is no connector's, {text}: the run says nothing",
                               "free ports, files, memory or disk, and run it again")  # fmt: skip
        if each.misfit:
            raise TierError("--vllm", f"the harness can't drive this vLLM: {each.misfit} (at {each.rank})",
                            "use a release that `kvcover releases` lists, or report it")  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _OnItsWay:
    """A leg on its way to an engine, where it is `at` a time of the monotonic clock."""

    at: float
    role: Role
    dp: int
    index: int
    request_id: str
    params: Params


class Run:
    """The router's part, and the decision when a run is over."""

    def __init__(self, trial: Trial, children: Children, faults: ProcessFaults, book: SharedInjector, lookout: Lookout) -> None:
        self._trial, self._lookout = trial, lookout
        self._requests, self._mode = trial.setup.requests, trial.setup.scenario.mode
        self._children = children
        self._ports = children.ports
        self._lock = threading.Lock()
        self._faults, self._book = faults, book
        self._unsent = sorted(range(len(self._requests)), key=lambda index: self._requests[index].arrival_ns)
        self._down: set[EngineKey] = set()
        self._on_their_way: list[_OnItsWay] = []
        self.transfer_ids: list[set[str]] = [set() for _ in self._requests]
        self.journal = Journal()
        self.legs: dict[tuple[int, str], Params] = {}
        self.engines = {key: self._engine(key) for key in children.ranks}

    def drive(self) -> None:
        """Send the legs, then wait until every request is over or nothing moves any more."""
        self._book.start()
        started = time.monotonic()
        self._faults.act(0.0, self._ranks(), over=False)
        for engine in self.engines.values():
            engine.start()
        try:
            self._send_due(0.0)
            while not self._over():
                time.sleep(_POLL_S)
                self._lookout.check()
                now_s = time.monotonic() - started
                self._faults.act(now_s, self._ranks(), over=self._all_ended())
                self._restart_due(now_s)
                self._send_due(now_s)
                self._deliver_due()
                for engine in self.engines.values():
                    if engine.failure:
                        raise _as_tier_error(engine.failure)
        finally:
            for engine in self.engines.values():
                engine.stop()
            self._faults.release(self._ranks())
        for engine in self.engines.values():
            engine.join(timeout=0.5)

    def _engine(self, key: EngineKey) -> EngineLoop:
        aborts, stops = (self._aborts(), {}) if key[0] == "decode" else ({}, self._stops())
        children = self._children
        scheduler, ranks = children.schedulers[key], children.ranks[key]
        return EngineLoop(self._trial, key, scheduler, ranks, self._prefill_done, aborts, stops, self.journal)

    def _ranks(self) -> dict[str, Child]:
        return {rank.name: rank for rank in self._children.all_ranks()}

    def _send_due(self, now_s: float) -> None:
        """Send the legs of all requests that have arrived: in WRITE both at once."""
        while self._unsent and self._requests[self._unsent[0]].arrival_ns <= now_s * 1e9:
            index = self._unsent.pop(0)
            if self._mode == "write":
                self._send_decode(index, {})
            legs = self._trial.legs[index]
            self._send("prefill", self._requests[index].prefill_dp, index, dict(legs.prefill), legs.changed)

    def _restart_due(self, now_s: float) -> None:
        """End engines whose restart begins, and start those anew whose restart ends."""
        for restart in list(self._faults.restarts):
            key = next(key for key, ranks in self._children.ranks.items() if restart.rank in [rank.name for rank in ranks])
            if key in self._down and restart.up_at_s <= now_s:
                self._faults.restarts.remove(restart)
                self._bring_up(key)
            elif key not in self._down and restart.down_at_s <= now_s:
                if self._all_ended() or self.engines[key].dead:
                    self._faults.restarts.remove(restart)  # nothing left that it could change
                else:
                    self._book.note(restart.fault)
                    self._take_down(key)

    def _take_down(self, key: EngineKey) -> None:
        self._down.add(key)
        self._children.end(key)
        self.engines[key].join(timeout=_RESTART_LIMIT_S)
        for request in self.engines[key].tracked.values():
            if request.state != "ended":
                request.state = "lost"

    def _bring_up(self, key: EngineKey) -> None:
        """A new engine that knows nothing; what became of earlier requests is kept for the verdict."""
        self._children.replace(key)
        before = self.engines[key]
        engine = self.engines[key] = self._engine(key)
        engine.tracked.update(before.tracked)
        self.journal.log("restarted", engine.me)
        self._down.discard(key)
        engine.start()

    def _aborts(self) -> dict[int, Abort]:
        found: dict[int, Abort] = {}
        for fault in self._trial.events:
            if fault.kind == "abort":
                note = functools.partial(self._book.note, fault)
                found[int(fault.target)] = Abort(fault.at or "waiting", (fault.ms or 0.0) / 1e3, note)
        return found

    def _stops(self) -> dict[int, Callable[[], None]]:
        planned = [fault for fault in self._trial.events if fault.kind == "stop-at-prefill"]
        return {int(fault.target): functools.partial(self._book.note, fault) for fault in planned}

    def _prefill_done(self, index: int, response: Params) -> None:
        if self._mode == "read":
            self._send_decode(index, response)

    def _send_decode(self, index: int, response: Params) -> None:
        self._send("decode", self._requests[index].decode_dp, index, *self._trial.legs[index].decode(response))

    def _send(self, role: Role, dp: int, index: int, leg: Params, changed: list[Fault]) -> None:
        off = self._trial.legs[index].ports_off
        named = [(self._ports[each], off.get(each, 0)) for each in ROLES]
        addresses = [replace(ports, handshake=ports.handshake + by, notify=ports.notify + by).zmq_address for ports, by in named]
        router_id = f"___prefill_addr_{addresses[0]}___decode_addr_{addresses[1]}_{index:032x}"
        request_id = f"cmpl-{router_id}-0-{'a' * 8 if role == 'prefill' else 'd' * 8}"
        with self._lock:
            self.transfer_ids[index].add(repr(f"sidecar-{request_id}"))  # what newer releases make of a missing one
            if "transfer_id" in leg:
                self.transfer_ids[index].add(repr(leg["transfer_id"]))
        for changing in changed:
            self.journal.log("fault_fired", "router", role, index, fields=FaultActed(str(changing), "params"))
        self.legs[index, role] = leg
        self.journal.log("leg_sent", "router", role, index, fields=LegSent(leg))
        delay_s = 0.0
        for fault in self._book.event("router", role, "", "", index):
            self.journal.log("fault_fired", "router", role, index, fields=FaultActed(str(fault), "router"))
            if fault.kind == "fail-leg":
                self._lose(role, dp, index, request_id, Lost("unsent", "a leg could not be sent"))
                return
            delay_s += (fault.ms or 0.0) / 1e3
        self._on_their_way.append(_OnItsWay(time.monotonic() + delay_s, role, dp, index, request_id, leg))
        self._deliver_due()

    def _deliver_due(self) -> None:
        """Hand over the legs whose time has come; the engine thread of prefill's and the run's own may both be here."""
        with self._lock:
            due = [leg for leg in self._on_their_way if leg.at <= time.monotonic()]
            self._on_their_way = [leg for leg in self._on_their_way if leg not in due]
        for leg in due:
            if (leg.role, leg.dp) in self._down:  # nobody answers the router
                self._lose(leg.role, leg.dp, leg.index, leg.request_id, Lost("down", f"{leg.role} is down"))
            else:
                self.engines[leg.role, leg.dp].submit(leg.index, leg.request_id, leg.params)

    def _lose(self, role: Role, dp: int, index: int, request_id: str, why: Lost) -> None:
        """A leg reaches no engine. In WRITE the router hears of a lost prefill leg when decode has answered, if ever."""
        if role == "decode" or self._mode == "read":
            self.journal.log("lost", "router", request=index, fields=why)
        self.engines[role, dp].tracked[request_id] = Tracked(index, request_id, "ended", failed=True)
        if role == "prefill" and self._mode == "read":
            decode = self.engines["decode", self._requests[index].decode_dp]
            decode.tracked[request_id] = Tracked(index, request_id, "ended", failed=True)

    def _all_ended(self) -> bool:
        requests = [request for engine in self.engines.values() for request in engine.tracked.values()]
        return len(requests) == 2 * len(self._requests) and all(request.state in ("ended", "lost") for request in requests)

    def _over(self) -> bool:
        now = time.monotonic()
        engines = self.engines.values()
        if self._faults.holding or self._down or self._unsent or self._on_their_way:
            return False
        for engine in engines:
            started = engine.step_started
            if started is not None and now - started > _SETTLE_S and not engine.stalled and not engine.dead:
                return False  # a step that takes long is not a standstill, until the engine gives it up
        quiet = now - max(engine.last_progress for engine in engines)
        if self._all_ended():
            return quiet > _SETTLE_S + self._faults.trailing_s
        return quiet > self._quiet_limit_s()

    def _quiet_limit_s(self) -> float:
        limits = self._trial.limits
        timers = max(limits.transfer_s, limits.defer_s)
        longest = timers if self._mode == "write" else max(timers, limits.read_abort_s)
        return longest + 0.6 + self._faults.longest_s + max(request.generate_ns for request in self._requests) / 1e9


def _as_tier_error(error: Exception) -> Exception:
    """A process that died unplanned is nothing that the connector did."""
    if isinstance(error, ProcessDied):
        return MachineError("--tier", f"{error}, and no planned fault did it: the run says nothing", "run it again")
    return error
