"""What the processes of a real run saw and sent, as the events that the model logs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcover.real_backend.driver.processes import HOST
from kvcover.real_backend.driver.reports import Post, RankReport, SchedulerReport, SentNotice
from kvcover.sim.kernel.events import ASTRAY, Dial, Failed, FaultActed, Listener, Message, Sent, Took
from kvcover.sim.kernel.history import Row

_SENT = {
    "remote_blocks": "blocks_ready_sent",
    "write_done": "write_done_sent",
    "write_failed": "write_failed_sent",
    "release": "release_sent",
}
"""The event of a control message that leaves, by its kind."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What is needed to read reports: who listens where, under which ids a request's messages may go, who holds anything."""

    owners: Mapping[int, str]
    transfer_ids: Sequence[set[str]]
    holding: frozenset[str]

    def request_of(self, notice: Mapping[str, Any]) -> int:
        """Whose message it is, -1 if nobody's."""
        transfer_id = repr(notice.get("transfer_id"))
        return next((index for index, ids in enumerate(self.transfer_ids) if transfer_id in ids), -1)


def rank_rows(sight: Sight, rank: RankReport) -> Iterator[Row]:
    """What one rank reports, but for the messages that it took in: ports, handshakes, messages sent, transfers."""
    for at, port in rank.bound:
        yield at, "bound", rank.name, "", -1, -1, Listener(HOST, port)
    for at, port in _first_of_each(rank.dialled):
        owner = sight.owners.get(port, "")
        if owner[:1] != rank.name[:1]:
            yield at, "dialled" if owner else "dial_dead", rank.name, owner, -1, -1, Dial(port)
    yield from acted_rows(rank)
    yield from sent_rows(sight, rank.name, rank.sent)
    for batch in rank.batches:
        yield _batch_row(sight, rank.name, batch)


def acted_rows(report: RankReport | SchedulerReport) -> Iterator[Row]:
    """Planned faults that acted in a process."""
    for at, fault, point, receiver, request, layer in report.acted:
        yield at, "fault_fired", report.name, receiver, request, layer, FaultActed(fault, point)


def sent_rows(sight: Sight, sender: str, sent: Iterable[SentNotice]) -> Iterator[Row]:
    """Messages that left; what goes to a port that nobody ever bound reaches nobody."""
    for notice in sent:
        owner = sight.owners.get(notice.port, "")
        if kind := _SENT.get(notice.kind):
            yield notice.at_ns, kind, sender, owner, notice.request, -1, Sent(notice.port)
        if not owner:
            yield notice.at_ns, "undelivered", sender, "", notice.request, -1, Message(notice.kind, HOST, notice.port)


def notice_rows(sight: Sight, rank: RankReport, rows: Sequence[Row]) -> Iterator[Row]:
    """What the messages mean to the rank that took them in; `rows` have those that were sent.

    What an engine's own events tell is left out. An empty list of blocks tells nobody anything: it ends the listener.
    """
    for at, notice in rank.notices:
        kind, request = notice.get("type"), sight.request_of(notice)
        if rank.name.startswith("D"):
            if kind in ("write_done", "text"):
                yield at, "write_done", rank.name, _sender(rows, "write_done_sent", rank.name, request), request, -1, None
        elif kind == "remote_blocks" and notice.get("block_notify_list") == []:
            yield at, "poisoned", rank.name, "", request, -1, Message("an empty remote_blocks")
        elif kind == "remote_blocks":
            yield at, "blocks_ready", rank.name, "", request, -1, None
        elif kind in ("release", "text"):
            yield at, "release", rank.name, _sender(rows, "release_sent", rank.name, request), request, -1, None


def _sender(rows: Sequence[Row], kind: str, receiver: str, request: int) -> str:
    """Who sent a message of this kind; empty if several did, as the message doesn't say."""
    senders = {row[2] for row in rows if row[1] == kind and row[3] == receiver and row[4] == request}
    return senders.pop() if len(senders) == 1 else ""


def _first_of_each(dialled: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    first: dict[int, int] = {}
    for at, port in dialled:
        first.setdefault(port, at)
    return [(at, port) for port, at in first.items()]


def _batch_row(sight: Sight, name: str, batch: Post) -> Row:
    """A transfer that was posted. What a decode rank that holds nothing was written went astray."""
    source, target = (name, batch.peer) if batch.kind == "write" else (batch.peer, name)
    if batch.error:
        failed = Failed(batch.error, "planned" if batch.planned else "library")
        return batch.at_ns, "transfer_failed", name, batch.peer, batch.request, batch.layer, failed
    kind = "wrote" if batch.kind == "write" else "read"
    took = Took(batch.done_ns - batch.at_ns) if batch.done_ns else None
    return batch.at_ns, kind, source, target, batch.request, batch.layer, took if target in sight.holding else ASTRAY


def early_rows(rank: RankReport) -> Iterator[Row]:
    """Layers that a decode rank used with cells missing or wrong, and whose own reads landed after that use."""
    used = {(request, layer): at for at, request, layer in rank.short}
    for batch in rank.batches:
        at = used.get((batch.request, batch.layer))
        if at is not None and batch.kind == "read" and not batch.error and batch.done_ns > at:
            yield at, "used_early", rank.name, batch.peer, batch.request, batch.layer, Took(batch.done_ns - at)


def sees_landings(ranks: Iterable[RankReport]) -> bool:
    """Whether it is known of each read when its bytes were in place; the real library doesn't say."""
    return all(batch.done_ns for rank in ranks for batch in rank.batches if batch.kind == "read" and not batch.error)


def reads_done(rank: RankReport, layers: int) -> Iterator[Row]:
    """A decode rank has read a request when it read all layers of it, and no read of it failed."""
    read: dict[int, set[int]] = defaultdict(set)
    last: dict[int, int] = {}
    failed = {batch.request for batch in rank.batches if batch.error}
    for batch in rank.batches:
        if not batch.error and batch.request >= 0:
            read[batch.request].add(batch.layer)
            last[batch.request] = max(batch.at_ns, last.get(batch.request, 0))
    for request, found in read.items():
        if len(found) == layers and request not in failed:
            yield last[request], "told", rank.name, "", request, -1, None
