"""Faults of whole ranks: processes that die, stand still for a while, or come up late."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from kvcover.faults import EventFault
from kvcover.real_backend.driver.book import SharedInjector
from kvcover.real_backend.driver.processes import Child
from kvcover.real_backend.driver.trial import Trial
from kvcover.sim.errors import TierError

RANK_KINDS = ("crash-rank", "restart-rank", "stall-rank", "late-rank")


@dataclass(slots=True)
class _Due:
    """Something that is done to a rank at a time of the run. `fault` None: it ends a stall."""

    at_s: float
    rank: str
    number: signal.Signals
    fault: EventFault | None


@dataclass(frozen=True, slots=True)
class Restart:
    """The engine of `rank` ends at one time of the run, and comes back at another."""

    down_at_s: float
    up_at_s: float
    rank: str
    fault: EventFault


class ProcessFaults:
    """What is planned for ranks. `late` maps a rank to the seconds by which it is late; `restarts` are for the driver."""

    def __init__(self, trial: Trial, book: SharedInjector) -> None:
        self._book = book
        self._due: list[_Due] = []
        self._stopped: set[str] = set()
        self.late: dict[str, float] = {}
        self.restarts: list[Restart] = []
        events = trial.events
        self.longest_s = max((((fault.ms or 0.0) + (fault.for_ms or 0.0)) / 1e3 for fault in events), default=0.0)
        """How long after its cause something may still happen because of a fault."""
        self.trailing_s = max(((fault.ms or 0.0) / 1e3 for fault in events if fault.kind not in RANK_KINDS), default=0.0)
        """How long after all requests' ends bytes or messages may still come."""
        for fault in events:
            at_s = (fault.ms or 0.0) / 1e3
            if fault.kind == "late-rank":
                if at_s:  # 0 ms late is in time
                    self.late[fault.target] = at_s
                book.note(fault)
            elif fault.kind == "restart-rank":
                self.restarts.append(Restart(at_s, at_s + (fault.for_ms or 0.0) / 1e3, fault.target, fault))
            elif fault.kind == "crash-rank":
                self._due.append(_Due(at_s, fault.target, signal.SIGKILL, fault))
            elif fault.kind == "stall-rank":
                self._due.append(_Due(at_s, fault.target, signal.SIGSTOP, fault))
                self._due.append(_Due(at_s + (fault.for_ms or 0.0) / 1e3, fault.target, signal.SIGCONT, None))
        self._due.sort(key=lambda due: due.at_s)

    @property
    def holding(self) -> bool:
        """Whether a rank stands still now: then a standstill is no end."""
        return bool(self._stopped)

    def act(self, now_s: float, ranks: Mapping[str, Child], *, over: bool) -> None:
        """Do what is due. A fault that comes when all is `over` does nothing, and so doesn't fire."""
        while self._due and self._due[0].at_s <= now_s:
            due = self._due.pop(0)
            if due.fault is None:
                self._continue(due.rank, ranks)
            elif not over:
                self._book.note(due.fault)
                ranks[due.rank].planned_death = due.number == signal.SIGKILL
                ranks[due.rank].planned_stop = due.number == signal.SIGSTOP
                ranks[due.rank].signal(due.number)
                if due.number == signal.SIGSTOP:
                    self._stopped.add(due.rank)

    def release(self, ranks: Mapping[str, Child]) -> None:
        """Let every rank that stands still go on, so that it can be looked into."""
        for rank in list(self._stopped):
            with contextlib.suppress(TierError):
                self._continue(rank, ranks)

    def _continue(self, rank: str, ranks: Mapping[str, Child]) -> None:
        if rank in self._stopped:
            self._stopped.discard(rank)
            ranks[rank].signal(signal.SIGCONT)
            ranks[rank].planned_stop = False
