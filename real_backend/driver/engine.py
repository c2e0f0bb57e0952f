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
from kvcover.real_backend.driver.reports import Escaped, Forward, StepReport
from kvcover.real_backend.driver.trial import EngineKey, Trial
from kvcover.sim.cache.ledger import Count
from kvcover.sim.kernel.events import Fields, Short
from kvcover.sim.scenario.dispatch import Params

_IDLE_S = 0.004
_LAST_WORDS_S = 0.5
_LOOK_S = 2.0
_DECODE_STEPS = 3


@dataclass(slots=True)
class Tracked:
    """One request on one engine."""

    index: int
    request_id: str
    state: str = "new"  # then waiting or running, then held or aborting (its blocks stay), or ended; or lost with its engine
    prompt_tokens: int = 0
    """Those that this engine computes, or loads."""
    steps: int = 0
    since: float = 0.0
    """When it was admitted."""
    first_token: float = 0.0
    """When it had its first token."""
    go: bool = False
    failed: bool = False
    recomputed: bool = False
    reaped: bool = False
    overran: bool = False
    """Its forward took as long as a timer: some rank waited for a peer in vain."""
    at_go: list[Count] | None = None
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

    def _end(self, request: Tracked, kind: str = "freed") -> None:
        """The engine needs nothing more of the request; its blocks are free."""
        request.state = "ended"
        self._log(kind, request)

    def _step(self) -> None:
        scheduled = {t.request_id: 1 for t in self.tracked.values() if t.state == "running"}
        fill: dict[int, int] = {}
        use: list[int] = []
        while not self._inbox.empty():
            request = self._admit(*self._inbox.get())
            if request is None:
                return
            if request.state == "running":
                scheduled[request.request_id] = request.prompt_tokens
                if self.role == "prefill":
                    fill[request.index] = request.prompt_tokens
                elif not request.recomputed:  # what decode computes itself is no delivery: its cells are left alone
                    use.append(request.index)
        if not self._abort_waiting():
            return
        output = self._ask_scheduler("schedule", scheduled)
        if output is None:
            return
        forward = Forward(fill, tuple(use)) if scheduled else None
        reports = self._run_ranks(scheduled, output, forward)
        if reports is not None:
            self._after_step(scheduled, use, reports)

    def _admit(self, index: int, request_id: str, leg: Params) -> Tracked | None:
        asked = self.trial.setup.requests[index]
        blocks = self.trial.tables[index][self.role]
        request = self.tracked[request_id] = Tracked(index, request_id)
        self._progress()
        abort = self._aborts.get(index)
        if abort is not None and abort.at == "before":
            self._ask_scheduler("abort_before", request_id, leg, asked.prompt_tokens)
            abort.note()
            request.state, request.aborted = "ended", True
            self._log("aborted", request)
            return None if self.dead else request
        external_zero = self.role == "decode" and asked.external_zero
        admission = self._ask_scheduler("admit", request_id, leg, blocks, asked.prompt_tokens, external_zero)
        if admission is None:
            return None
        request.state = "waiting" if admission.wait else "running"
        request.since = time.monotonic()
        request.prompt_tokens = admission.prompt_tokens
        request.recomputed = self.role == "decode" and admission.external_tokens == 0
        self._log("allocated", request)
        if request.recomputed:
            self._log("recompute", request)
        return request

    def _abort_waiting(self) -> bool:
        """Let clients go whose requests wait; False if that ended the engine."""
        for request in self.tracked.values():
            abort = self._aborts.get(request.index)
            if abort and abort.at == "waiting" and request.state == "waiting" and time.monotonic() - request.since >= abort.after_s:
                abort.note()
                request.state = "aborting"  # its blocks are free when the ranks have reported, not before
                request.aborted = True
                self._log("aborted", request)
                self._ask_scheduler("finish", request.request_id, "FINISHED_ABORTED")
        return not self.dead

    def _ask_scheduler(self, method: str, *arguments: Any) -> Any:
        answer = self._scheduler.call(method, *arguments)
        if isinstance(answer, Escaped):
            self._note_raised([answer])
            return None
        return answer

    def _run_ranks(self, scheduled: Collection[str], output: bytes, forward: Forward | None) -> list[StepReport] | None:
        """Let every rank run the step. None if the engine died, or is stuck for longer than anything can take."""
        self.step_started = time.monotonic()
        for rank in self.ranks:
            rank.begin("step", output, forward)
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
            for request_id in scheduled:
                self.tracked[request_id].overran = True
        self.step_started = None
        raised = [report.raised for report in reports.values() if report.raised]
        if raised:
            self._note_raised(sorted(raised, key=lambda r: r.rank))
            return None
        if len(reports) < len(self.ranks):
            self.stalled += [rank.name for rank in self.ranks if rank.name not in reports]
            return None
        return [reports[rank.name] for rank in self.ranks]

    def _after_step(self, scheduled: dict[str, int], used: list[int], reports: list[StepReport]) -> None:
        aggregated = self._aggregate(reports)
        if aggregated is None:
            return
        sent, received, failed = aggregated
        for request_id in scheduled:
            self._finish_if_over(self.tracked[request_id], used)
        for request_id in received & set(self.tracked):
            self._arrived(self.tracked[request_id], request_id in failed)
        answer = self._ask_scheduler("reconcile", sent, received)
        if answer is None:
            return
        for request_id in answer.received & set(self.tracked):
            if self.tracked[request_id].state == "running":
                self._ask_scheduler("resume", request_id)
            elif self.tracked[request_id].state == "aborting":
                self._end(self.tracked[request_id])
        for request_id in answer.sent:
            request = self.tracked[request_id]
            unreported = self.role == "decode" or len(request.reported) < len(self.ranks)  # decode reports what it received
            request.reaped = request_id not in sent and unreported
            self._end(request, "reaped" if request.reaped else "freed")

    def _aggregate(self, reports: list[StepReport]) -> tuple[set[str], set[str], set[str]] | None:
        """Note who reported what, then let vLLM's aggregator say which requests are finished for the engine."""
        for rank, report in zip(self.ranks, reports, strict=True):
            finished = report.finished_sending | report.finished_recving
            for request_id in sorted(finished & set(self.tracked)):
                self._note_report(self.tracked[request_id], rank.name, request_id in report.failed_recving)
            if finished or report.invalid_blocks:
                self._progress()
        result = self._ask_scheduler("aggregate", reports)
        if result is None:
            return None
        for request in self.tracked.values():
            blocks = set(self.trial.blocks("decode", request.index))
            request.failed |= self.role == "decode" and not blocks.isdisjoint(result.invalid_blocks)
        return set(result.sent), set(result.received), set(result.failed)

    def _note_report(self, request: Tracked, rank: str, failed: bool) -> None:
        """A rank reported the transfer finished. In READ that says little: who read what is told by its batches."""
        if not failed:
            request.reported.append(rank)
        if self.role == "prefill":
            self._log("released", request, rank)
        elif self.trial.setup.scenario.mode == "write":
            self._log("told_failed" if failed else "told", request, rank)

    def _use(self, request: Tracked, *, layer_by_layer: bool) -> None:
        """Decode uses the request's cells: note what each rank held."""
        self._log("go", request)
        request.go = True
        request.at_go = [rank.ask("grade", request.index, layer_by_layer) for rank in self.ranks]
        for rank, count in zip(self.ranks, request.at_go, strict=True):
            if count.covered < count.cells:
                self._log("short", request, rank.name, Short(count.covered, count.cells))

    def _finish_if_over(self, request: Tracked, used: list[int]) -> None:
        """End a prefill leg after its one token, and a decode leg a few steps after the one that used its cells."""
        if self.role == "decode":
            if request.index in used:
                self._use(request, layer_by_layer=True)
            if not request.steps:
                request.first_token = time.monotonic()
            request.steps += 1
            generate_ns = self.trial.setup.requests[request.index].generate_ns
            generating = time.monotonic() - request.first_token < generate_ns / 1e9
            if request.steps < _DECODE_STEPS or generating:
                return
            if (abort := self._aborts.get(request.index)) is not None and abort.at == "after":
                abort.note()
        if (stop := self._stops.get(request.index)) is not None:
            stop()
        status = "FINISHED_LENGTH_CAPPED" if stop is None else "FINISHED_STOPPED"
        answer = self._ask_scheduler("finish", request.request_id, status)
        if answer is None:
            return
        keep, response = answer
        if self.role == "decode":
            self._log("ended" if not request.failed else "request_failed", request)
        if keep:
            request.state = "held"
        else:
            self._end(request)
        self._progress()
        if self.role == "prefill":
            self._on_response(request.index, response or {})

    def _arrived(self, request: Tracked, failed: bool) -> None:
        """All ranks reported: the request may use its cells, or has failed, now."""
        if request.state != "waiting":
            return
        self._progress()
        if failed:
            request.failed = True
            self._log("request_failed", request)
            self._end(request)
            self._ask_scheduler("finish", request.request_id, "FINISHED_ERROR")
            return
        self._use(request, layer_by_layer=False)
        request.state = "running"
