"""What the processes of a run report: plain data, no vLLM, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvcover.real_backend.driver.trial import BlockTables
from kvcover.sim.cache.wrong import WrongCells
from kvcover.sim.kernel import events
from kvcover.sim.results.record import LegReads, Record


@dataclass(frozen=True, slots=True)
class Escaped:
    """An exception that left a call on the connector, or ended one of its threads.

    `misfit` is the harness's own line that failed, if no line of the connector was running: then it can't drive this vLLM.
    `broken` is the error, by itself or as the cause of this one, that says the code or the machine is broken: it is no fault
    of the protocol. `machine` says what the machine lacked; `foreign`: it came from elsewhere than vLLM.
    """

    rank: str
    call: str
    kind: str
    text: str
    misfit: str = ""
    broken: str = ""
    place: str = ""
    """File and line of the innermost frame in the connector."""
    traceback: str = ""
    machine: str = ""
    foreign: bool = False

    def as_event(self) -> events.Raised:
        """The fields of the event that it is."""
        return events.RaisedAt(self.kind, self.text, call=self.call, broken=self.broken, place=self.place)


@dataclass(slots=True)
class StepReport:
    """What a worker returns from a step. Request ids are the engine's; `raised` is set if the step died."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    invalid_blocks: set[int] = field(default_factory=set)
    raised: Escaped | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """A step that vLLM's scheduler made. Request ids are the engine's.

    `output` is its SchedulerOutput with the connector's metadata, pickled. `scheduled` are tokens by request, `sampled` the
    requests of these that get a token, `states` the status of all requests that it knows, `tables` the blocks of those that
    have any, `external` the tokens that the connector was last told to bring.
    """

    output: Any
    scheduled: Mapping[str, int]
    sampled: frozenset[str]
    states: Mapping[str, str]
    tables: Mapping[str, BlockTables]
    external: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine core says of a request at the end of a step: why it is over, and what goes into the response."""

    request_id: str
    reason: str
    """As vLLM writes it; empty if it goes on."""
    params: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Updated:
    """What vLLM's scheduler made of a step's outcome.

    `reported` are the requests that all ranks had sent or received, in vLLM's aggregate, `failed` those of them that failed,
    `invalid_blocks` blocks that were not loaded. `answers` are of requests that got a token or are over.
    """

    reported: frozenset[str]
    failed: frozenset[str]
    invalid_blocks: frozenset[int]
    answers: tuple[Answer, ...]
    states: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Post:
    """One post to MoRI: when (monotonic ns), read or write, with which rank, for which request and layer (-1: nobody's).

    `error` is empty when all of it was moved. `planned`: a fault of the scenario failed it, or kept its completion.
    """

    at_ns: int
    kind: str
    peer: str
    request: int
    layer: int
    error: str = ""
    planned: bool = False
    done_ns: int = 0
    """When its bytes were in place; 0 if that isn't known."""


@dataclass(frozen=True, slots=True)
class SentNotice:
    """A control message that left (monotonic ns): its kind, the port that it went to, and the request (-1: unknown)."""

    at_ns: int
    kind: str
    port: int
    request: int


@dataclass(frozen=True, slots=True)
class SchedulerReport:
    """What one scheduler saw: reads of its legs, by request, and as `RankReport` what it sent and which faults acted."""

    name: str
    reads: Mapping[int, LegReads] = field(default_factory=dict)
    sent: tuple[SentNotice, ...] = ()
    acted: tuple[tuple[int, str, str, str, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one worker saw. Times are of the monotonic clock, in ns.

    `notices` are the control messages that its notify listener took in, in order, `sent` those that left, `dialled` the ports
    that it opened a handshake to. `wrote_to` maps a peer's engine key to the ranges (address there, bytes) that were written
    without an error. `caught` are exceptions that the connector caught and logged.
    """

    name: str
    notices: tuple[tuple[int, dict[str, Any]], ...] = ()
    batches: tuple[Post, ...] = ()
    wrote_to: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    bound: tuple[tuple[int, int], ...] = ()
    dialled: tuple[tuple[int, int], ...] = ()
    acted: tuple[tuple[int, str, str, str, int, int], ...] = ()
    """When which planned fault acted here, at which point, and its receiver, request and layer."""
    sent: tuple[SentNotice, ...] = ()
    caught: tuple[Escaped, ...] = ()
    wrong: tuple[WrongCells, ...] = ()
    short: tuple[tuple[int, int, int], ...] = ()
    """When decode used which layer of a request with cells missing or wrong: time, request, layer."""
    last_step: str = ""
    """What it did last, or where it stands if it never came back."""

    def after(self, before: RankReport) -> RankReport:
        """What the rank saw in two lives, of which `before` was the first."""
        both = {name: getattr(before, name) + getattr(self, name) for name in _LISTS}
        return replace(self, **both)


_LISTS = ("notices", "batches", "warnings", "bound", "dialled", "acted", "sent", "caught", "short")


@dataclass(frozen=True, slots=True)
class RunSeen:
    """One run: what came of it, what each rank reported, and every exception."""

    record: Record
    ranks: tuple[RankReport, ...]
    raised: tuple[Escaped, ...]
    stalled: tuple[str, ...]
    """Ranks that never came up, or never came back from a step."""
    seconds: float
    schedulers: tuple[SchedulerReport, ...] = ()
