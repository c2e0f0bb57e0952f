"""Races: uses, frees and reuses of blocks that nothing orders after the bytes that the NIC moves into or out of them.

Happens-before over the events of a run by AXIOMS (`docs/order.md`), and not by their times: which of two events that nothing
orders came first in this run was up to made-up latencies. Only the last landing of each flow (prefill rank, decode rank,
request) is looked at, unless a barrier waits layer by layer, as whoever waits for a transfer waits for all of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import msgspec

from kvcover.sim.kernel.events import Counted, FaultActed
from kvcover.sim.kernel.history import History, Row

if TYPE_CHECKING:
    from kvcover.sim.results.checkers import Plan


class Axiom(msgspec.Struct, frozen=True):
    """One rule by which one event is before another, or by which nothing is; and where it comes from."""

    name: str
    text: str
    source: str


AXIOMS = (
    Axiom("program", "what one thread does it does in order: a scheduler's steps, a forward, a write task, the handling of one "
          "message. Two threads of a rank are ordered only by what one hands to the other",
          "moriio_engine.py:_write_worker_loop, _async_wait"),
    Axiom("fill", "prefill computes a layer before its batch is posted: a write task waits for the layer's event, "
          "and READ's block ids leave with the answer of a finished step",
          "moriio_engine.py:_execute_write_task; moriio_connector.py:request_finished"),
    Axiom("status", "bytes land before the status of their batch is success. A failed status orders nothing",
          "mori TransferStatus; against it mori#434, mori#113"),
    Axiom("wait", "a status orders what follows only for the thread that looked at it and went on because of it",
          "moriio_engine.py:waiting_for_transfer_complete; moriio_connector.py:_await_reads_issued_this_step, wait_for_layer_load"),
    Axiom("queue", "on one queue pair batches are over in the order in which they were posted; on several they are not",
          "InfiniBand, reliable connection; qp_per_transfer in moriio_common.py"),
    Axiom("message", "a message is sent before it is received, and those of one sender to one port are received in order",
          "ZMQ; moriio_engine.py:send_notify"),
    Axiom("senders", "messages of different senders are not ordered by the order in which they happen to arrive",
          "ZMQ, fair queueing"),
    Axiom("count", "what happens at the n-th of several messages is after a message only if there are fewer than n without it",
          "moriio_engine.py:_handle_write_done_message; moriio_connector.py:resolve_moriio_transfer_ack; KVOutputAggregator in "
          "kv_connector/utils.py"),
    Axiom("scheduler", "a rank's report is before what its scheduler does with it: it frees blocks, or resumes a request, whose "
          "forward all ranks run after it", "moriio_connector.py:get_finished; vLLM's scheduler, update_from_output"),
    Axiom("timer", "a timer is after what its scheduler had been told when it fired, and after nothing else",
          "moriio_connector.py:update_connector_output (the reaper)"),
)  # fmt: skip

What = Literal["use", "free", "reuse"]
Missing = Literal["barrier", "wait", "status", "queue", "count", "timer"]
MISSING: dict[Missing, str] = {
    "barrier": "the forward does not wait for it",
    "wait": "the transfer ended before the status of all its batches was seen",
    "status": "the status that was waited for did not prove that the bytes had landed",
    "queue": "only the status of the last layer was looked at, and there are several queue pairs",
    "count": "no message is needed for it that follows from the landing",
    "timer": "it was done without word of the transfer's end",
}
_SEEN = {
    "write": {"wrote", "settled", "write_done", "told_failed", "go", "released", "freed", "reaped", "fault_fired"},
    "read": {"read", "settled", "go", "release", "released", "freed", "reaped", "fault_fired"},
}
_UNPROVEN = ("early-completion", "late-transfer", "partial-transfer")
Flow = tuple[str, str, int]
"""The prefill rank, the decode rank and the request of some landings."""
Placed = tuple[int, Row]
"""An event and its place in the history: at one instant, too, one thing is done after another."""


class Race(msgspec.Struct, frozen=True, kw_only=True):
    """Two events that nothing orders: a landing, and a use, free or reuse (`event`) of the blocks that it concerns.

    `missing` says which edge is not there. Times in ns are those of this run, and no part of the verdict.
    """

    what: What
    missing: Missing
    request: int
    source: str
    target: str
    layer: int
    landed_ns: int
    event: str
    actor: str
    event_ns: int

    def __str__(self) -> str:
        moved = f"layer {self.layer} of request {self.request} from {self.source} into {self.target}"
        after = self.landed_ns - self.event_ns
        here = f"{abs(after)} ns {'after' if after > 0 else 'before'} it" if after else "at the same instant"
        return f"{moved} and {self.event} at {self.actor}: {MISSING[self.missing]} (in this run it landed {here})"


def sees(plan: Plan) -> bool:
    """Whether the tier sees all events that order needs."""
    return plan.observed is None or _SEEN[plan.mode] <= plan.observed


def races(history: History, plan: Plan) -> Iterator[Race]:
    """The races of a finished run, at most one use, free and reuse for each flow. None if the tier does not see order."""
    if sees(plan):
        yield from (_Writes(history, plan) if plan.mode == "write" else _Reads(history, plan)).races()


class _Run:
    """What both modes need: the last landing of each flow, and when blocks were used and given back."""

    def __init__(self, history: History, plan: Plan, moved: str) -> None:
        self.history, self.plan = history, plan
        self.rows = history.rows_of(moved)
        self.flows: dict[Flow, Row] = {(row[2], row[3], row[4]): row for row in self.rows}
        self.unproven = {
            (event.actor, event.peer, event.request)
            for event, fired in (history.having(FaultActed, "fault_fired") if self.rows else ())
            if fired.kind in _UNPROVEN
        }
        seen = _SEEN[plan.mode] - {moved}
        self.events: dict[str, list[Placed]] = {kind: [] for kind in seen}
        for place, row in enumerate(history.rows if self.rows else ()):
            if row[1] in seen:
                self.events[row[1]].append((place, row))
        self.go = _first(self.events["go"])
        given = self.events["freed"] + self.events["reaped"]
        self.freed = _first([placed for placed in given if placed[1][2].startswith("P")])
        self.given_back = _first([placed for placed in given if placed[1][2].startswith("D")])
        self.released: dict[int, list[Placed]] = defaultdict(list)
        for placed in self.events["released"]:
            self.released[placed[1][4]].append(placed)

    def races(self) -> Iterator[Race]:
        """Flow by flow; blocks that are used in a race are reused in one too, which goes without saying."""
        for flow, row in self.flows.items():
            request = flow[2]
            if flow[1] in self.plan.users[request]:
                if (go := self.go.get(request)) is not None:
                    if missing := self.use(flow, row, go):
                        yield _race("use", missing, row, go[1])
                elif (given := self.given_back.get(request)) is not None and (missing := self.reuse(flow, row, given)):
                    yield _race("reuse", missing, row, given[1])
            if flow[0] not in self.plan.holders[request]:
                continue  # it read the blocks of another engine
            if (freed := self.freed.get(request)) is not None and (missing := self.free(flow, row, freed)):
                yield _race("free", missing, row, freed[1])

    def use(self, flow: Flow, row: Row, go: Placed) -> Missing | None:
        """Which edge is missing from the landing to go."""
        raise NotImplementedError

    def free(self, flow: Flow, row: Row, freed: Placed) -> Missing | None:
        """Which edge is missing from the landing, which reads prefill's blocks, to where prefill frees them."""
        raise NotImplementedError

    def reuse(self, flow: Flow, row: Row, given: Placed) -> Missing | None:
        """Which edge is missing from the landing to where decode gives back the blocks of a request that never went."""
        raise NotImplementedError

    def counted(self, freed: Placed) -> bool:
        """Whether prefill freed the blocks because enough of its ranks had reported."""
        place, row = freed
        reported = sum(each < place for each, _ in self.released[row[4]])
        return row[1] == "freed" and reported >= len(self.plan.holders[row[4]])


class _Writes(_Run):
    """WRITE: landing → statuses waited for → write_done → told → report → go; and → report → prefill frees."""

    def __init__(self, history: History, plan: Plan) -> None:
        super().__init__(history, plan, "wrote")
        self.settled = {(row[2], row[4]): row[0] for _, row in self.events["settled"]}
        # Of each request: (sender, receiver, place) of what makes a decode rank report, and how many of them it takes.
        self.messages: dict[int, list[tuple[str, str, int]]] = defaultdict(list)
        self.wanted: dict[tuple[int, str], int] = {}
        for place, (_, _, rank, sender, request, _, fields) in self.events["write_done"]:
            self.messages[request].append((sender, rank, place))
            self.wanted[request, rank] = fields.wanted if isinstance(fields, Counted) else 1
        self.failures: dict[int, list[tuple[str, str, int]]] = defaultdict(list)
        for place, (_, _, rank, sender, request, _, _) in self.events["told_failed"]:
            self.failures[request].append((sender, rank, place))
        self._needs: dict[tuple[str, int], bool] = {}

    def use(self, flow: Flow, row: Row, go: Placed) -> Missing | None:
        if missing := self._unsettled(flow, row):
            return missing
        source, request = flow[0], flow[2]
        heard = [place for sender, _, place in self.messages[request] if sender == source]
        return None if heard and min(heard) < go[0] and self._needed(source, request) else "count"

    def free(self, flow: Flow, row: Row, freed: Placed) -> Missing | None:
        if missing := self._unsettled(flow, row):
            return missing
        source, request = flow[0], flow[2]
        reports = self.released[request]
        own = [place for place, report in reports if report[2] == source]
        if self.counted(freed):
            return None if own and len(reports) - len(own) < len(self.plan.holders[request]) else "count"
        return None if own and own[0] < freed[0] else "timer"

    def reuse(self, flow: Flow, row: Row, given: Placed) -> Missing | None:
        if missing := self._unsettled(flow, row):
            return missing
        source, request = flow[0], flow[2]
        heard = [place for sender, _, place in (*self.messages[request], *self.failures[request]) if sender == source]
        if not heard or min(heard) > given[0]:
            return "timer"
        return None if self._needed(source, request) else "count"

    def _unsettled(self, flow: Flow, row: Row) -> Missing | None:
        """Why the sender can't know that the bytes landed, whatever it says."""
        settled = self.settled.get((flow[0], flow[2]))
        if settled is None:
            return "wait"
        return "status" if row[0] > settled or flow in self.unproven else None

    def _needed(self, source: str, request: int) -> bool:
        """Whether decode's ranks would report too few times if the source's messages had not come."""
        key = source, request
        if key not in self._needs:
            self._needs[key] = self._reports(request, source) < len(self.plan.users[request])
        return self._needs[key]

    def _reports(self, request: int, without: str) -> int:
        """How often decode's ranks can report the request without the messages of one sender."""
        by_rank: dict[str, int] = defaultdict(int)
        for sender, rank, _ in self.messages[request]:
            by_rank[rank] += sender != without
        failures = sum(sender != without for sender, _, _ in self.failures[request])
        ours = self.plan.users[request]
        return failures + sum(count // self.wanted[request, rank] for rank, count in by_rank.items() if rank in ours)


class _Reads(_Run):
    """READ: landing → statuses waited for → the layer's use; and → release → report → prefill frees."""

    def __init__(self, history: History, plan: Plan) -> None:
        super().__init__(history, plan, "read")
        # By request and layer (-1: all of them), when it ended and at which place.
        self.barrier: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
        self.settled: dict[tuple[str, int], tuple[int, int]] = {}  # by rank and request: when, and for which layer (-1: all)
        for place, (time_ns, _, actor, _, request, layer, _) in self.events["settled"]:
            if actor in plan.users[request]:
                self.settled[actor, request] = time_ns, layer
            else:
                self.barrier[request][layer] = time_ns, place
        self.heard: dict[int, list[tuple[str, str]]] = defaultdict(list)  # of each request: who released which prefill rank
        for _, (_, _, rank, sender, request, _, _) in self.events["release"]:
            self.heard[request].append((sender, rank))
        by_layer = {request for request, layers in self.barrier.items() if -1 not in layers}
        self.outrun = {
            (row[2], row[3], row[4])
            for row in (self.rows if by_layer else ())
            if row[4] in by_layer and row[0] > self.barrier[row[4]].get(row[5], (-1, -1))[0]
        }

    def use(self, flow: Flow, row: Row, go: Placed) -> Missing | None:
        barrier = self.barrier.get(flow[2])
        if barrier is None:
            return "barrier"
        if flow in self.unproven:
            return "status"
        if -1 in barrier:
            return "status" if row[0] > barrier[-1][0] else None
        return "barrier" if flow in self.outrun else None

    def free(self, flow: Flow, row: Row, freed: Placed) -> Missing | None:
        _, target, request = flow
        settled = self.settled.get((target, request))
        if settled is None:
            return "wait"
        if settled[1] > 0 and not self.plan.one_queue:
            return "queue"
        if row[0] > settled[0] or flow in self.unproven:
            return "status"
        need = len(self.plan.holders[request]) if self.counted(freed) else 0
        if need:
            return None if self._reports(request, target, freed) < need else "count"
        # a timer: whether a report for which this release was needed had come
        every, others = self._reports(request, "", freed), self._reports(request, target, freed)
        return None if others < every else "timer"

    def reuse(self, flow: Flow, row: Row, given: Placed) -> Missing | None:
        ended = self.barrier.get(flow[2], {}).get(-1)
        if ended is None or ended[1] > given[0]:
            return "wait"
        return "status" if row[0] > ended[0] or flow in self.unproven else None

    def _reports(self, request: int, without: str, freed: Placed) -> int:
        """How many of prefill's ranks that had reported would have done so without the releases of one decode rank."""
        count = 0
        for place, report in self.released[request]:
            if place < freed[0]:
                wanted = report[6].wanted if isinstance(report[6], Counted) else 1
                count += sum(rank == report[2] and sender != without for sender, rank in self.heard[request]) >= wanted
        return count


def _first(events: list[Placed]) -> dict[int, Placed]:
    """The first of some events of each request."""
    return {placed[1][4]: placed for placed in reversed(events)}


def _race(what: What, missing: Missing, row: Row, event: Row) -> Race:
    return Race(
        what=what,
        missing=missing,
        request=row[4],
        source=row[2],
        target=row[3],
        layer=row[5],
        landed_ns=row[0],
        event=event[1],
        actor=event[2],
        event_ns=event[0],
    )
