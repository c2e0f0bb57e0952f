"""From what the processes of a real run saw to the record that the one judge looks at, on every tier."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvcover.real_backend.driver.engine import EngineLoop, Tracked
from kvcover.real_backend.driver.journal import Journal
from kvcover.real_backend.driver.processes import Child
from kvcover.real_backend.driver.reports import Escaped, RankReport, RunSeen
from kvcover.real_backend.driver.trial import ROLES, EngineKey, Trial
from kvcover.sim.cache.ledger import Count
from kvcover.sim.kernel.events import ASTRAY, Dial, Failed, FaultActed, Listener, Message, Stray, Stuck
from kvcover.sim.kernel.history import History, Row
from kvcover.sim.results.record import Course, EngineEnd, Record
from kvcover.sim.scenario.dispatch import Params
from kvcover.sim.scenario.endpoint import Request

KILLED = "killed by a planned fault"
"""The last step of a rank that can't be asked any more."""
OBSERVED = frozenset(
    ("leg_sent", "fault_fired", "bound", "dialled", "dial_dead", "blocks_ready", "poisoned", "wrote", "read", "transfer_failed",
     "told", "told_failed", "release", "released", "allocated", "freed", "reaped", "aborted", "recompute", "go", "short", "stray",
     "ended", "request_failed", "crashed", "stuck", "restarted", "lost")
)  # fmt: skip
"""What a real run shows. When bytes arrive, what waits in sockets and what a thread waited for, nobody sees."""
NOBODY = ""
"""Who wrote what is there: a rank that can't be asked any more."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is left of a run when nothing moves any more: its engines' books and its ranks, still alive."""

    trial: Trial
    engines: Mapping[EngineKey, EngineLoop]
    ranks: Mapping[EngineKey, list[Child]]
    transfer_ids: Sequence[set[str]]
    """By request, every id under which its control messages may go, as `repr` writes it: a key fault makes it anything."""
    journal: Journal
    legs: dict[tuple[int, str], Params]
    owners: Mapping[int, str]
    """Which rank listens on which port."""
    past: Mapping[str, RankReport] = field(default_factory=dict)
    """What ranks had seen when a planned fault ended their first life."""


def conclude(evidence: Evidence, seconds: float, event_faults: tuple[int, ...]) -> RunSeen:
    """Look into every rank, and put together what the run left behind. `event_faults` counts what each of them did."""
    trial = evidence.trial
    children = [child for ranks in evidence.ranks.values() for child in ranks]
    reports = {child.name: _ask(child, RankReport(child.name, last_step=KILLED), "report") for child in children}
    for name, before in evidence.past.items():
        now = reports[name]
        reports[name] = replace(now, notices=before.notices + now.notices, batches=before.batches + now.batches)
    nothing: list[Escaped] = []
    of_threads = [raised for child in children for raised in _ask(child, nothing, "raised")]
    stray = {child.name: _ask(child, 0, "stray") for child in children}
    at_end = {request.index: _at_end(evidence, request) for request in trial.setup.requests}
    rows = [*evidence.journal.rows, *_rank_rows(evidence, reports, at_end)]
    last = max((row[0] for row in rows), default=0)
    rows += [(last, "poisoned", each.rank, "", -1, -1, each.as_event()) for each in of_threads]
    rows += [(last, "stray", name, "", -1, -1, Stray(cells)) for name, cells in stray.items() if cells]
    engines = evidence.engines.values()
    stalled = tuple(name for engine in engines for name in engine.stalled)
    rows += [(last, "stuck", name, "", -1, -1, Stuck(True, reports[name].last_step)) for name in stalled]
    courses = tuple(_course(evidence, request, reports, at_end[request.index]) for request in trial.setup.requests)
    if not all(course.ended for course in courses):
        rows += [(last, "stands", rank.name, "", -1, -1, Stuck(True, rank.last_step)) for rank in reports.values()]
    record = Record(
        tier="connector",
        setup=trial.as_timed(),
        history=_history(rows),
        courses=courses,
        engines=tuple(_engine_end(evidence, key) for key in evidence.engines),
        legs=evidence.legs,
        fired=tuple(keys + events for keys, events in zip(trial.keys.fired, event_faults, strict=True)),
        stray=sum(stray.values()),
        observed=OBSERVED,
    )
    raised = [raised for engine in engines for raised in engine.raised]
    return RunSeen(record, tuple(reports.values()), (*raised, *of_threads), stalled, seconds)


def not_started(trial: Trial, raised: list[Escaped], missing: list[str], seconds: float, event_faults: tuple[int, ...]) -> RunSeen:
    """What is left of engines that never came up: an exception, or ranks that wait for ever."""
    setup = trial.setup
    rows: list[Row] = [(0, "crashed", each.rank, "", -1, -1, each.as_event()) for each in raised]
    rows += [(0, "stuck", name, "", -1, -1, Stuck(False, "")) for name in missing]
    ends = (EngineEnd(name=trial.endpoint(role).engine_name(dp), me=trial.endpoint(role), dp=dp, started=False,
                      crashed=bool(raised), held=()) for role in ROLES for dp in range(trial.endpoint(role).dp))  # fmt: skip
    courses = (
        Course(
            request=request, prefill_dp=request.prefill_dp, decode_dp=request.decode_dp, at_go=None,
            at_end=(Count(0, 0, setup.decode.needed(request)),) * setup.decode.tp, admitted=False, ended=False, lost=bool(raised),
        )
        for request in setup.requests
    )  # fmt: skip
    record = Record(
        tier="connector",
        setup=trial.as_timed(),
        history=_history(rows),
        courses=tuple(courses),
        engines=tuple(ends),
        legs={},
        fired=tuple(keys + events for keys, events in zip(trial.keys.fired, event_faults, strict=True)),
        stray=None,
        observed=OBSERVED,
    )
    return RunSeen(record, (), tuple(raised), tuple(missing), seconds)


def _ask(child: Child, otherwise: Any, method: str, *arguments: Any) -> Any:
    """Ask a rank, unless a planned fault killed it."""
    if child.planned_death:
        return otherwise
    return child.ask(method, *arguments)


def _history(rows: list[Row]) -> History:
    """All rows in order of time, which starts with the first leg: ports are bound before it."""
    history = History()
    rows.sort(key=lambda row: row[0])
    start = next((row[0] for row in rows if row[1] == "leg_sent"), rows[0][0] if rows else 0)
    history.rows = [(max(0, row[0] - start), *row[1:]) for row in rows]
    return history


# -- what ranks saw ----------------------------------------------------------------------------------------------


def _at_end(evidence: Evidence, request: Request) -> tuple[Count, ...]:
    empty = Count(0, 0, evidence.trial.setup.decode.needed(request))
    ranks = evidence.ranks["decode", request.decode_dp]
    return tuple(_ask(rank, empty, "grade", request.index, False) for rank in ranks)


def _rank_rows(evidence: Evidence, reports: Mapping[str, RankReport], at_end: Mapping[int, tuple[Count, ...]]) -> Iterator[Row]:
    """The events that ranks report: ports, handshakes, messages, transfers."""
    holding = _holding(evidence, at_end)
    for rank in reports.values():
        for at, port in rank.bound:
            yield at, "bound", rank.name, "", -1, -1, Listener("127.0.0.1", port)
        for at, port in _first_of_each(rank.dialled):
            owner = evidence.owners.get(port, "")
            if owner[:1] != rank.name[:1]:
                yield at, "dialled" if owner else "dial_dead", rank.name, owner, -1, -1, Dial(port)
        for at, fault, point, receiver, request, layer in rank.acted:
            yield at, "fault_fired", rank.name, receiver, request, layer, FaultActed(fault, point)
        for at, notice in rank.notices:
            if (row := _notice_row(evidence, rank.name, at, notice)) is not None:
                yield row
        yield from _batch_rows(rank, holding)
        if evidence.trial.setup.scenario.mode == "read" and rank.name.startswith("D"):
            yield from _reads_done(rank, evidence.trial.setup.geometry.layers)
    if any(rank.last_step == KILLED for rank in reports.values()):  # it can't say any more whom it wrote to
        kind = "wrote" if evidence.trial.setup.scenario.mode == "write" else "read"
        for name in sorted(holding):
            yield 0 if not evidence.journal.rows else evidence.journal.rows[-1][0], kind, NOBODY, name, -1, -1, None


def _holding(evidence: Evidence, at_end: Mapping[int, tuple[Count, ...]]) -> set[str]:
    """Decode ranks that hold anything of a request."""
    decode = evidence.trial.setup.decode
    return {
        decode.rank_name(request.decode_dp, tp)
        for request in evidence.trial.setup.requests
        for tp, count in enumerate(at_end[request.index])
        if count.missing < count.cells
    }


def _first_of_each(dialled: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    first: dict[int, int] = {}
    for at, port in dialled:
        first.setdefault(port, at)
    return [(at, port) for port, at in first.items()]


def _notice_row(evidence: Evidence, rank: str, at: int, notice: Mapping[str, Any]) -> Row | None:
    """What a message means to the rank that took it in; None for what the engine's own events tell.

    An empty list of blocks tells nobody anything: it ends the listener.
    """
    kind, transfer_id = notice.get("type"), repr(notice.get("transfer_id"))
    request = next((index for index, ids in enumerate(evidence.transfer_ids) if transfer_id in ids), -1)
    if rank.startswith("D"):
        return None
    if kind == "remote_blocks":
        if notice.get("block_notify_list") == []:
            return at, "poisoned", rank, "", request, -1, Message("an empty remote_blocks")
        return at, "blocks_ready", rank, "", request, -1, None
    return (at, "release", rank, "", request, -1, None) if kind in ("release", "text") else None


def _batch_rows(rank: RankReport, holding: set[str]) -> Iterator[Row]:
    """Transfers that were posted. What a decode rank that holds nothing was written went astray."""
    for batch in rank.batches:
        source, target = (rank.name, batch.peer) if batch.kind == "write" else (batch.peer, rank.name)
        if batch.error:
            failed = Failed(batch.error, "planned" if batch.planned else "library")
            yield batch.at_ns, "transfer_failed", rank.name, batch.peer, batch.request, batch.layer, failed
        else:
            kind = "wrote" if batch.kind == "write" else "read"
            fields = None if target in holding else ASTRAY
            yield batch.at_ns, kind, source, target, batch.request, batch.layer, fields


def _reads_done(rank: RankReport, layers: int) -> Iterator[Row]:
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


# -- what became of requests and engines -------------------------------------------------------------------------


def _course(evidence: Evidence, request: Request, reports: Mapping[str, RankReport], at_end: tuple[Count, ...]) -> Course:
    at_prefill: EngineKey = ("prefill", request.prefill_dp)
    at_decode: EngineKey = ("decode", request.decode_dp)
    engines = [evidence.engines[at_prefill], evidence.engines[at_decode]]
    prefill, decode = (_tracked(engine, request.index) for engine in engines)
    answered = {
        rank.name
        for rank in evidence.ranks[at_prefill]
        for at, notice in reports[rank.name].notices
        if (row := _notice_row(evidence, rank.name, at, notice)) is not None and row[1] != "poisoned" and row[4] == request.index
    }
    return Course(
        request=request,
        prefill_dp=request.prefill_dp,
        decode_dp=request.decode_dp,
        at_go=None if decode.at_go is None or decode.failed else tuple(decode.at_go),
        at_end=at_end,
        bad_end="failed" if decode.failed else "recomputed" if decode.recomputed else "",
        admitted=decode.state != "new",
        ended=decode.state in ("ended", "aborting") or decode.failed,
        lost=any(_is_lost(engine) for engine in evidence.engines.values()) or "lost" in (prefill.state, decode.state),
        held=prefill.state in ("held", "running") or decode.state == "aborting",
        late=prefill.reaped or prefill.overran or not set(prefill.reported) <= answered,
        aborted=decode.aborted,
    )


def _is_lost(engine: EngineLoop) -> bool:
    """Whether it died. vLLM's executor gives up on ranks in processes of their own after 300 s; one rank alone is waited for."""
    return bool(engine.raised) or (bool(engine.stalled) and len(engine.ranks) > 1)


def _tracked(engine: EngineLoop, index: int) -> Tracked:
    """Return what an engine knows of a request; nothing if its leg never came."""
    found = [request for request in engine.tracked.values() if request.index == index]
    return found[0] if found else Tracked(index, "")


def _engine_end(evidence: Evidence, key: EngineKey) -> EngineEnd:
    engine, (role, dp) = evidence.engines[key], key
    states = ("held", "running") if role == "prefill" else ("aborting",)
    held = sorted(request.index for request in engine.tracked.values() if request.state in states)
    me = evidence.trial.endpoint(role)
    return EngineEnd(name=engine.me, me=me, dp=dp, started=True, crashed=_is_lost(engine), held=tuple(held))
