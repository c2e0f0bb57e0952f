"""All processes of a run: waiting for them, telling them of each other, ending and replacing them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvcover.real_backend.driver.processes import HELD, Child, Ports, ProcessDied, scheduled
from kvcover.real_backend.driver.reports import Escaped, RankReport, SchedulerReport
from kvcover.real_backend.driver.trial import EngineKey, Role
from kvcover.sim.errors import MachineError

_POLL_S = 0.01
_BIND_LIMIT_S = 3.0  # on a busy machine a thread that binds may come late, and its port would be nobody's
_RESTART_LIMIT_S = 10.0
_MOST_STARTS = 4.0
_REST_S, _REST_SHARE = 1.0, 0.1


@dataclass(slots=True)
class Children:
    """All processes of a run, by engine and DP rank. `gone` are those that a restart replaced, `past` what they had seen."""

    ports: dict[Role, Ports]
    schedulers: dict[tuple[Role, int], Child]
    ranks: dict[tuple[Role, int], list[Child]]
    gone: list[Child] = field(default_factory=list)
    past: dict[str, RankReport] = field(default_factory=dict)
    past_schedulers: list[SchedulerReport] = field(default_factory=list)
    bound: dict[int, str] = field(default_factory=dict)
    """Which rank listens on which port."""
    fork: Callable[[EngineKey], None] = field(default=lambda _key: None)
    """Start the processes of an engine."""

    def all(self) -> list[Child]:
        return [*self.schedulers.values(), *self.all_ranks(), *self.gone]

    def end(self, key: EngineKey) -> None:
        """Kill the ranks of an engine; what they have seen is kept."""
        for rank in self.ranks[key]:
            self.past[rank.name] = rank.ask("report")
        for rank in self.ranks[key]:
            rank.planned_death = True
            rank.signal(signal.SIGKILL)

    def replace(self, key: EngineKey) -> None:
        """Start the engine anew on the same ports. Raises ProcessDied if it doesn't come up."""
        if (seen := self.schedulers[key].last_words()) is not None:
            self.past_schedulers.append(seen)
        self.schedulers[key].signal(signal.SIGKILL)
        self.gone += [self.schedulers[key], *self.ranks[key]]
        self.fork(key)
        ranks = self.ranks[key]
        for child in (self.schedulers[key], *ranks):
            if not child.steps.poll(_RESTART_LIMIT_S) or child.result() is not None:
                raise ProcessDied(child.name, "did not come back")
        await_ports(ranks)
        for rank in ranks:
            rank.ask("learn_ports", self.bound)
        self.schedulers[key].call("learn_ports", self.bound)

    def all_ranks(self) -> list[Child]:
        return [rank for ranks in self.ranks.values() for rank in ranks]

    def await_start(self, limit_s: float, late: dict[str, float]) -> tuple[list[Escaped], list[str]] | None:
        """Wait until everyone is up but those that are late on purpose. Else return what was raised and who is not up.

        Who is not up in time is given more as long as one of them is at work or kept from it: only those that rest wait for ever.
        Raises MachineError if that takes too long.
        """
        started = time.monotonic()
        raised: list[Escaped] = []
        missing = [child for child in self.all() if child.name not in late]
        while True:
            missing = [child for child in missing if not _is_up(child, started + limit_s, raised)]
            if not missing or _all_rest(missing):
                break
            if time.monotonic() - started > _MOST_STARTS * limit_s:
                who = ", ".join(child.name for child in missing)
                raise MachineError("--tier", f"{who} did not come up in {_MOST_STARTS * limit_s:.0f} s, and did not rest",
                                   "run it again when the machine has room")  # fmt: skip
        return (raised, [child.name for child in missing]) if raised or missing else None

    def introduce(self, late: dict[str, float]) -> None:
        """Tell everyone which rank listens on which port. Listeners bind in threads of their own, so wait for both."""
        present = [rank for rank in self.all_ranks() if rank.name not in late]
        self.bound = await_ports(present)
        for rank in present:
            rank.ask("learn_ports", self.bound)
        for scheduler in self.schedulers.values():
            scheduler.call("learn_ports", self.bound)


def _is_up(child: Child, deadline: float, raised: list[Escaped]) -> bool:
    """Whether a child has said how its start went; an exception is noted."""
    if not child.steps.poll(max(0.0, deadline - time.monotonic())):
        child.check_moving()
        return False
    if (answer := child.result()) is not None:
        raised.append(answer)
    return True


def _all_rest(children: list[Child]) -> bool:
    """Whether none of them works, or would if it could."""
    before = [scheduled(child.pid) for child in children]
    time.sleep(_REST_S)
    after = [scheduled(child.pid) for child in children]
    wanted_s = [(ran - ran_before) / 1e9 + waited - waited_before
                for (_, ran_before, waited_before), (_, ran, waited) in zip(before, after, strict=True)]  # fmt: skip
    return all(state not in HELD for state, *_ in after) and max(wanted_s) < _REST_SHARE * _REST_S


def await_ports(ranks: list[Child]) -> dict[int, str]:
    """Which of these ranks listens on which port, once all do or too much time has passed."""
    bound: dict[int, str] = {}
    deadline = time.monotonic() + _BIND_LIMIT_S
    for rank in ranks:
        while len(ports := rank.ask("bound")) < 2 and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        bound |= dict.fromkeys(ports, rank.name)
    return bound
