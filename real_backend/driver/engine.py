"""One DP rank of one engine during a run: the step loop between a scheduler process and its worker processes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from kvcover.real_backend.driver.journal import Journal
from kvcover.real_backend.driver.processes import Child, ProcessDied
from kvcover.real_backend.driver.reports import Escaped, Planned, StepReport, Updated
from kvcover.real_backend.driver.trial import BlockTables, EngineKey, Trial
from kvcover.sim.cache.ledger import Count
from kvcover.sim.kernel.events import Fields, Short
from kvcover.sim.scenario.dispatch import Params

_IDLE_S = 0.004
_LAST_WORDS_S = 0.5
_LOOK_S = 2.0
_DECODE_STEPS = 3
_STATES = {"WAITING_FOR_REMOTE_KVS": "waiting", "RUNNING": "running", "PREEMPTED": "preempted"}
"""Of vLLM's statuses those that say more than that a request is there."""


@dataclass(slots=True)
class Tracked:
    """One request on one engine."""

    index: int
    request_id: str
    state: str = "new"
    """Then waiting or running, or preempted, then held or aborting (its blocks stay), or ended; or lost with its engine."""
    tables: BlockTables = ()
    """Its blocks by cache group, when it had any last."""
    external: int = 0
    """Tokens that the connector was told to bring."""
    steps: int = 0
    since: float = 0.0
    """When it had blocks first."""
    first_token: float = 0.0
    """When it had its first token."""
    go: bool = False
    failed: bool = False
    preempted: bool = False
    recomputed: bool = False
    reaped: bool = False
    overran: bool = False
    """Its forward took as long as a timer: some rank waited for a peer in vain."""
    at_go: list[Count] | None = None
    at_free: list[Count] | None = None
    """What decode's ranks held when its blocks were given back, if others may get them."""
    aborted: bool = False
    reported: list[str] = field(default_factory=list)
    """Ranks that reported the transfer finished, without failure, in order."""


@dataclass(frozen=True, slots=True)
class Abort:
    """A client that goes away, planned for one request of a decode engine; `note` is called when it does."""

    at: str  # before, waiting or after
    after_s: float
    note: Callable[[], None]


class EngineLoop(threading.Thread):
    """Steps its ranks until told to stop. What happened is in `tracked`, `raised` and `stalled`.

    `stops` are the requests whose first token is a stop token; what is called then notes that.
    An exception in any rank or in the scheduler ends the engine, as it ends vLLM's; its processes live on to be looked into.
    """

    def __init__(
        self,
        trial: Trial,
        key: EngineKey,
        scheduler: Child,
        ranks: list[Child],
        on_response: Callable[[int, Params], None],
        aborts: Mapping[int, Abort],
        stops: Mapping[int, Callable[[], None]],
        journal: Journal,
    ) -> None:
        role, dp = key
        super().__init__(daemon=True, name=f"{role} {ranks[0].name}")
        self.trial, self.role, self.ranks = trial, role, ranks
        self.me = trial.endpoint(role).engine_name(dp)
        self.tracked: dict[str, Tracked] = {}
        self.raised: list[Escaped] = []
        self.stalled: list[str] = []
        self.failure: Exception | None = None
        self.last_progress = time.monotonic()
        self.step_started: float | None = None
        self._scheduler = scheduler
        self._on_response = on_response
        self._aborts = dict(aborts)
        self._stops = dict(stops)
        self._journal = journal
        self._mine: set[str] = set()
        """Requests that this engine took, and no life of it before."""
        self._inbox: queue.SimpleQueue[tuple[int, str, Params]] = queue.SimpleQueue()
        self._stopping = threading.Event()

    def submit(self, index: int, request_id: str, leg: Params) -> None:
        """Hand a leg to the engine; it is admitted at the next step."""
        self._inbox.put((index, request_id, leg))
        self._progress()

    def stop(self) -> None:
        """Ask the loop to end; it does so at the next step, or never if a rank is stuck in one."""
        self._stopping.set()

    @property
    def dead(self) -> bool:
        """Whether an exception ended the engine."""
        return bool(self.raised)

    @property
    def step_limit_s(self) -> float:
        """Longest step that can still end: each layer may wait for a handshake twice, and reads have their own limit."""
        limits = self.trial.limits
        return 2 * self.trial.setup.geometry.layers * limits.transfer_s + limits.read_abort_s + 1.0

    def run(self) -> None:
        """Body of the thread."""
        try:
            if self.role == "decode" and any(request.decode_hit_blocks for request in self.trial.setup.requests):
                self._warm()
            while not (self._stopping.is_set() or self.dead or self.stalled):
                self._step()
                self._stopping.wait(_IDLE_S)
        except ProcessDied as error:
            died = next((rank for rank in self.ranks if rank.name == error.name and rank.planned_death), None)
            if died is None:  # no result of the connector, so it goes to the caller
                self.failure = error
            else:
                self._note_raised([died.as_raised(error)])
        except Exception as error:
            self.failure = error
        finally:
            self.step_started = None

    def _progress(self) -> None:
        self.last_progress = time.monotonic()

    def _log(self, kind: str, request: Tracked | None = None, actor: str = "", fields: Fields | None = None) -> None:
        """An event of this engine, or of one of its ranks; something moved."""
        self._journal.log(kind, actor or self.me, request=-1 if request is None else request.index, fields=fields)
        self._progress()

    def _note_raised(self, raised: list[Escaped]) -> None:
        """What ends the engine."""
        self.raised += raised
        for each in raised:
            self._log("crashed", actor=each.rank, fields=each.as_event())

    def _warm(self) -> None:
        """Let earlier requests have left blocks in the prefix cache."""
        cached = self._ask_scheduler("warm") or {}
        for rank in self.ranks:
            rank.ask("warm", cached)

    def _step(self) -> None:
        while not self._inbox.empty():
            self._add(*self._inbox.get())
        self._abort_waiting()
        planned = None if self.dead else self._ask_scheduler("schedule")
        if planned is None:
            return
        tables = self._follow(planned)
        scheduled = [self.tracked[request_id] for request_id in planned.scheduled]
        used = [each for each in scheduled if each.external and not each.go and not each.recomputed]
        if self.trial.setup.scenario.mode == "write":
            self._use(used, layer_by_layer=False)
        arguments = (planned.output, tuple(each.index for each in used if not each.go), tables)
        reports = self._run_ranks(scheduled, arguments)
        if reports is None:
            return
        for rank, report in zip(self.ranks, reports, strict=True):
            for request_id in sorted((report.finished_sending | report.finished_recving) & self._mine):
                self._note_report(self.tracked[request_id], rank.name, request_id in report.failed_recving)
        updated = self._ask_scheduler(
            "update", reports, [each.request_id for each in scheduled if self._stops_now(each, planned.sampled)]
        )
        if updated is not None:
            self._use([each for each in used if not each.go], layer_by_layer=True)
            self._after_step(updated)

    def _add(self, index: int, request_id: str, leg: Params) -> None:
        """Hand a new leg to the scheduler."""
        request = self.tracked[request_id] = Tracked(index, request_id)
        self._mine.add(request_id)
        self._progress()
        generates = self.trial.setup.requests[index].generate_ns or index in self._aborts
        tokens = 1 if self.role == "prefill" else None if generates else _DECODE_STEPS
        self._ask_scheduler("add", index, request_id, leg, tokens)
        abort = self._aborts.get(index)
        if abort is not None and abort.at == "before":
            self._abort(request, abort)

    def _abort_waiting(self) -> None:
        """Let clients go whose requests wait."""
        for request in list(self.tracked.values()):
            abort = self._aborts.get(request.index)
            due = abort and abort.at == "waiting" and request.state == "waiting"
            if abort and due and time.monotonic() - request.since >= abort.after_s:
                self._abort(request, abort)

    def _abort(self, request: Tracked, abort: Abort) -> None:
        abort.note()
        request.aborted = True
        self._log("aborted", request)
        states = self._ask_scheduler("abort", request.request_id)
        if states is not None:
            self._settle(states)

    def _ask_scheduler(self, method: str, *arguments: Any) -> Any:
        self.step_started = time.monotonic()  # a call that takes long is no standstill
        answer = self._scheduler.call(method, *arguments)
        self.step_started = None
        if isinstance(answer, Escaped):
            self._note_raised([answer])
            return None
        return answer

    def _follow(self, planned: Planned) -> dict[int, BlockTables]:
        """Take in what the scheduler decided; return the blocks that requests got since the last step, by request."""
        got: dict[int, BlockTables] = {}
        for request_id, tables in planned.tables.items():
            request = self.tracked[request_id]
            if tables != request.tables:
                got[request.index] = tables
            first = not request.tables
            request.tables, request.external = tables, planned.external.get(request_id, 0)
            if first:
                request.since = time.monotonic()
                self._log("allocated", request)
                if self.role == "decode" and not request.external:
                    request.recomputed = True
                    self._log("recompute", request)
        self._settle(planned.states)
        if planned.scheduled:
            self._progress()
        return got

    def _settle(self, states: Mapping[str, str], reported: Collection[str] = ()) -> None:
        """Give each request the state in which the scheduler has it. `reported`: those of which all ranks reported the end."""
        for request_id in self._mine:
            request, status = self.tracked[request_id], states.get(request_id)
            if request.state == "ended":
                continue
            if status is None:
                self._end(request, request_id in reported)
            elif status.startswith("FINISHED"):
                unread = self.role == "decode" and request.state in ("waiting", "aborting")
                request.state = "aborting" if unread else "held"
            else:
                if status == "PREEMPTED" and request.state != "preempted":  # its blocks are gone, it is admitted anew
                    request.tables, request.go, request.preempted = (), False, True
                    self._log("preempted", request)
                request.state = _STATES.get(status, request.state)

    def _end(self, request: Tracked, reported: bool) -> None:
        """The engine needs nothing more of the request; its blocks are free."""
        unreported = self.role == "decode" or len(request.reported) < len(self.ranks)  # decode reports what it received
        request.reaped = request.state == "held" and not reported and unreported
        request.state = "ended"
        if request.tables:
            self._log("reaped" if request.reaped else "freed", request)
            if self.role == "decode" and len(self.trial.setup.requests) > 1:
                request.at_free = [rank.ask("grade", request.index, False) for rank in self.ranks]

    def used_again(self, request: Tracked) -> bool:
        """Whether another request got blocks that this one had."""
        later = (each for each in self.tracked.values() if each is not request and each.since > request.since)
        return any(
            set(mine) & set(theirs) - {0} for each in later for mine, theirs in zip(request.tables, each.tables, strict=False)
        )

    def _run_ranks(self, scheduled: Collection[Tracked], arguments: tuple[Any, ...]) -> list[StepReport] | None:
        """Let every rank run the step. None if the engine died, or is stuck for longer than anything can take."""
        self.step_started = time.monotonic()
        for rank in self.ranks:
            rank.begin("step", *arguments)
        reports: dict[str, StepReport] = {}
        deadline = self.step_started + self.step_limit_s
        while len(reports) < len(self.ranks):
            open_ranks = {rank.steps: rank for rank in self.ranks if rank.name not in reports}
            left_s = deadline - time.monotonic()
            answered = wait(list[Any](open_ranks), timeout=max(0.0, min(left_s, _LOOK_S)))
            if not answered and left_s <= _LOOK_S:
                break
            if not answered:
                for rank in open_ranks.values():
                    rank.check_moving()
            for pipe in answered:
                rank = open_ranks[pipe]  # type: ignore[index]
                answer = rank.result()
                report = reports[rank.name] = StepReport(raised=answer) if isinstance(answer, Escaped) else answer
                if report.raised:
                    deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)
        if time.monotonic() - self.step_started > self.trial.limits.transfer_s:
            for request in scheduled:
                request.overran = True
        self.step_started = None
        raised = [report.raised for report in reports.values() if report.raised]
        if raised:
            self._note_raised(sorted(raised, key=lambda r: r.rank))
            return None
        if len(reports) < len(self.ranks):
            self.stalled += [rank.name for rank in self.ranks if rank.name not in reports]
            return None
        for request in scheduled:
            request.steps += 1
            request.first_token = request.first_token or time.monotonic()
        return [reports[rank.name] for rank in self.ranks]

    def _note_report(self, request: Tracked, rank: str, failed: bool) -> None:
        """A rank reported the transfer finished. In READ that says little: who read what is told by its batches."""
        self._progress()
        if not failed:
            request.reported.append(rank)
        if self.role == "prefill":
            self._log("released", request, rank)
        elif self.trial.setup.scenario.mode == "write":
            self._log("told_failed" if failed else "told", request, rank)

    def _use(self, requests: Collection[Tracked], *, layer_by_layer: bool) -> None:
        """Decode uses the requests' cells: note what each rank held."""
        for request in requests:
            self._log("go", request)
            request.go = True
            found = [rank.ask("grade", request.index, layer_by_layer) for rank in self.ranks]
            before = request.at_go or found  # of what it used before it was preempted and after the worse is told
            request.at_go = min(before, found, key=lambda counts: sum(count.covered for count in counts))
            for rank, count in zip(self.ranks, found, strict=True):
                if count.covered < count.cells:
                    self._log("short", request, rank.name, Short(count.covered, count.cells))

    def _stops_now(self, request: Tracked, sampled: Collection[str]) -> bool:
        """Whether the token that this step sampled for a request is its last, though the scheduler would let it go on."""
        if self.role == "prefill":
            stop = self._stops.get(request.index)
            if stop is None or request.request_id not in sampled:
                return False
            stop()
            return True
        generate_ns = self.trial.setup.requests[request.index].generate_ns
        over = request.steps >= _DECODE_STEPS and time.monotonic() - request.first_token >= generate_ns / 1e9
        if over and (abort := self._aborts.get(request.index)) is not None and abort.at == "after":
            abort.note()
        return over

    def _after_step(self, updated: Updated) -> None:
        """Act on what the scheduler made of the step's outcome."""
        if self.trial.endpoint(self.role).side.load_failure == "recompute":
            self._note_recomputed(updated)
        for answer in updated.answers:
            request = self.tracked[answer.request_id]
            self._progress()
            if not answer.reason:
                continue
            request.failed |= answer.reason == "error"
            if self.role == "decode":
                self._log("request_failed" if request.failed else "ended", request)
        self._settle(updated.states, updated.reported)
        for answer in updated.answers:
            if answer.reason and self.role == "prefill":
                self._on_response(self.tracked[answer.request_id].index, dict(answer.params or {}))

    def _note_recomputed(self, updated: Updated) -> None:
        """What was not loaded is computed here: whatever was used of it counts for nothing."""
        for request_id in self._mine:
            request = self.tracked[request_id]
            lost = request_id in updated.failed or any(updated.invalid_blocks.intersection(table) for table in request.tables)
            if lost and request.state in ("waiting", "running") and not request.recomputed:
                request.recomputed, request.at_go = True, None
                self._log("recompute", request)
