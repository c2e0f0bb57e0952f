"""From what the processes of a real run saw to the record that the one judge looks at, on every tier."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcover.real_backend.driver.engine import EngineLoop, Tracked
from kvcover.real_backend.driver.journal import Journal
from kvcover.real_backend.driver.processes import Child
from kvcover.real_backend.driver.reports import Escaped, RankReport, RunSeen, SchedulerReport
from kvcover.real_backend.driver.sightings import (
    Sight,
    acted_rows,
    early_rows,
    notice_rows,
    rank_rows,
    reads_done,
    sees_landings,
    sent_rows,
)  # fmt: skip
from kvcover.real_backend.driver.trial import ROLES, EngineKey, Trial
from kvcover.sim.cache.ledger import Count
from kvcover.sim.kernel.events import Stray, Stuck
from kvcover.sim.kernel.history import History, Row
from kvcover.sim.results.record import Course, EngineEnd, LegReads, Record
from kvcover.sim.scenario.dispatch import Params
from kvcover.sim.scenario.endpoint import Request

KILLED = "killed by a planned fault"
"""The last step of a rank that can't be asked any more."""
OBSERVED = frozenset(
    ("leg_sent", "fault_fired", "bound", "dialled", "dial_dead", "blocks_ready_sent", "blocks_ready", "poisoned", "wrote", "read",
     "transfer_failed", "write_done_sent", "write_failed_sent", "write_done", "release_sent", "told", "told_failed", "release",
     "released", "allocated", "freed", "reaped", "aborted", "recompute", "go", "short", "used_early", "stray", "ended",
     "request_failed", "crashed", "stuck", "restarted", "lost", "preempted")
)  # fmt: skip
"""What a real run shows. When bytes arrive, what waits in sockets and what a thread waited for, nobody sees.

A message to a port that nobody ever bound is seen to be undelivered; one to a listener that hears no more is not.
"""
SEEN_BY_SCHEDULERS = frozenset(("blocks_ready_sent",))
SEEN_BY_LANDINGS = frozenset(("used_early",))
_LAST_STEP_S = 2.0
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
    schedulers: Mapping[EngineKey, Child] = field(default_factory=dict)
    past_schedulers: Sequence[SchedulerReport] = ()


def conclude(evidence: Evidence, seconds: float, event_faults: tuple[int, ...]) -> RunSeen:
    """Look into every rank, and put together what the run left behind. `event_faults` counts what each of them did."""
    trial, engines = evidence.trial, evidence.engines
    children = [child for ranks in evidence.ranks.values() for child in ranks]
    at_end = {request.index: _at_end(evidence, request) for request in trial.setup.requests}
    reports = {child.name: _ask(child, RankReport(child.name, last_step=KILLED), "report") for child in children}
    reports |= {name: reports[name].after(before) for name, before in evidence.past.items()}
    asked = _scheduler_reports(evidence)
    schedulers = (*evidence.past_schedulers, *asked)
    nothing: list[Escaped] = []
    of_threads = [raised for child in children for raised in _ask(child, nothing, "raised")]
    stray = {child.name: _ask(child, 0, "stray") for child in children}
    rows, answered = _seen(evidence, reports, schedulers, at_end)
    last = max((row[0] for row in rows), default=0)
    rows += [(last, "poisoned", each.rank, "", -1, -1, each.as_event()) for each in of_threads]
    rows += [(last, "stray", name, "", -1, -1, Stray(cells)) for name, cells in stray.items() if cells]
    stalled = tuple(name for engine in engines.values() for name in engine.stalled)
    rows += [(last, "stuck", name, "", -1, -1, Stuck(True, reports[name].last_step)) for name in stalled]
    courses = tuple(_course(evidence, request, answered, at_end[request.index]) for request in trial.setup.requests)
    if not all(course.ended for course in courses):
        rows += [(last, "stands", rank.name, "", -1, -1, Stuck(True, rank.last_step)) for rank in reports.values()]
    ends = tuple(_engine_end(evidence, key) for key in engines)
    unseen = frozenset[str]() if len(asked) == len(evidence.schedulers) else SEEN_BY_SCHEDULERS
    unseen |= frozenset[str]() if sees_landings(reports.values()) else SEEN_BY_LANDINGS
    wrong = tuple(each for rank in reports.values() for each in rank.wrong)
    record = _record(
        trial, rows, courses, ends, event_faults,
        legs=evidence.legs, stray=sum(stray.values()), reads=_reads(schedulers, engines), wrong=wrong,
        observed=OBSERVED - unseen,
    )  # fmt: skip
    raised = [raised for engine in engines.values() for raised in engine.raised]
    return RunSeen(record, tuple(reports.values()), (*raised, *of_threads), stalled, seconds, schedulers)


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
    record = _record(trial, rows, tuple(courses), tuple(ends), event_faults, legs={}, stray=None, observed=OBSERVED)
    return RunSeen(record, (), tuple(raised), tuple(missing), seconds)


def _record(
    trial: Trial,
    rows: list[Row],
    courses: tuple[Course, ...],
    engines: tuple[EngineEnd, ...],
    event_faults: tuple[int, ...],
    **seen: Any,
) -> Record:
    """What the judge looks at; `seen` are legs, stray cells and whatever else was looked for."""
    fired = tuple(keys + events for keys, events in zip(trial.keys.fired, event_faults, strict=True))
    return Record(
        tier="connector",
        setup=trial.as_timed(),
        history=_history(rows),
        courses=courses,
        engines=engines,
        fired=fired,
        **seen,
    )


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


# -- what was seen -----------------------------------------------------------------------------------------------


def _scheduler_reports(evidence: Evidence) -> list[SchedulerReport]:
    """What the schedulers saw; nothing of one whose engine's thread may still be talking to it."""
    reports = []
    for key, scheduler in evidence.schedulers.items():
        evidence.engines[key].join(_LAST_STEP_S)
        if not evidence.engines[key].is_alive() and (report := scheduler.last_words()) is not None:
            reports.append(report)
    return reports


def _reads(schedulers: Iterable[SchedulerReport], engines: Mapping[EngineKey, EngineLoop]) -> dict[tuple[int, str], LegReads]:
    """What was read of each leg, by request and side; a leg that came again after a restart counts as first read."""
    roles = {engine.me: engine.role for engine in engines.values()}
    found: dict[tuple[int, str], LegReads] = {}
    for scheduler in schedulers:
        for request, reads in scheduler.reads.items():
            found.setdefault((request, roles[scheduler.name]), reads)
    return found


def _seen(
    evidence: Evidence,
    reports: Mapping[str, RankReport],
    schedulers: Iterable[SchedulerReport],
    at_end: Mapping[int, tuple[Count, ...]],
) -> tuple[list[Row], set[tuple[str, int]]]:
    """All events that engines, ranks and schedulers tell of, and which prefill rank was told of which request."""
    holding = _holding(evidence, at_end)
    bound = {port: rank.name for rank in reports.values() for _, port in rank.bound}
    sight = Sight({**evidence.owners, **bound}, evidence.transfer_ids, frozenset(holding))
    rows = [*evidence.journal.rows]
    for rank in reports.values():
        rows += rank_rows(sight, rank)
        if evidence.trial.setup.scenario.mode == "read" and rank.name.startswith("D"):
            rows += [*reads_done(rank, evidence.trial.setup.geometry.layers), *early_rows(rank)]
    for scheduler in schedulers:
        rows += [*acted_rows(scheduler), *sent_rows(sight, scheduler.name, scheduler.sent)]
    heard = [row for rank in reports.values() for row in notice_rows(sight, rank, rows)]
    if any(rank.last_step == KILLED for rank in reports.values()):  # it can't say any more whom it wrote to
        kind = "wrote" if evidence.trial.setup.scenario.mode == "write" else "read"
        at = evidence.journal.rows[-1][0] if evidence.journal.rows else 0
        rows += [(at, kind, NOBODY, name, -1, -1, None) for name in sorted(holding)]
    return [*rows, *heard], {(row[2], row[4]) for row in heard if row[1] in ("blocks_ready", "release")}


def _at_end(evidence: Evidence, request: Request) -> tuple[Count, ...]:
    empty = Count(0, 0, evidence.trial.setup.decode.needed(request))
    ranks, engine = evidence.ranks["decode", request.decode_dp], evidence.engines["decode", request.decode_dp]
    tracked = _tracked(engine, request.index)
    if tracked.at_free and engine.used_again(tracked):
        return tuple(tracked.at_free)
    return tuple(_ask(rank, empty, "grade", request.index, False) for rank in ranks)


def _holding(evidence: Evidence, at_end: Mapping[int, tuple[Count, ...]]) -> set[str]:
    """Decode ranks that hold anything of a request."""
    decode = evidence.trial.setup.decode
    return {
        decode.rank_name(request.decode_dp, tp)
        for request in evidence.trial.setup.requests
        for tp, count in enumerate(at_end[request.index])
        if count.missing < count.cells
    }


# -- what became of requests and engines -------------------------------------------------------------------------


def _course(evidence: Evidence, request: Request, told: set[tuple[str, int]], at_end: tuple[Count, ...]) -> Course:
    at_prefill: EngineKey = ("prefill", request.prefill_dp)
    at_decode: EngineKey = ("decode", request.decode_dp)
    engines = [evidence.engines[at_prefill], evidence.engines[at_decode]]
    prefill, decode = (_tracked(engine, request.index) for engine in engines)
    answered = {rank.name for rank in evidence.ranks[at_prefill] if (rank.name, request.index) in told}
    return Course(
        request=request,
        prefill_dp=request.prefill_dp,
        decode_dp=request.decode_dp,
        at_go=None if decode.at_go is None or decode.failed else tuple(decode.at_go),
        at_end=at_end,
        bad_end="failed" if decode.failed else "recomputed" if decode.recomputed else "",
        admitted=decode.state != "new",
        ended=decode.state in ("ended", "aborting", "held") or decode.failed,
        lost=any(_is_lost(engine) for engine in evidence.engines.values()) or "lost" in (prefill.state, decode.state),
        held=prefill.state in ("held", "running") or decode.state in ("aborting", "held"),
        late=prefill.reaped or decode.reaped or prefill.overran or not set(prefill.reported) <= answered,
        aborted=decode.aborted,
        preempted=decode.preempted,
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
    states = ("held", "running") if role == "prefill" else ("aborting", "held")
    held = sorted(request.index for request in engine.tracked.values() if request.state in states)
    me = evidence.trial.endpoint(role)
    return EngineEnd(name=engine.me, me=me, dp=dp, started=True, crashed=_is_lost(engine), held=tuple(held))
