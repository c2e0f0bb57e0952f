"""Findings: what went wrong, in the field's words, each with its chain of causes down to a policy of the release."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

from kvcover.faults import Fault, KeyFault
from kvcover.sim.cache.wrong import in_words
from kvcover.sim.errors import nearest
from kvcover.sim.kernel.events import Failed, FaultActed, Lost, Raised, Stuck
from kvcover.sim.results.blame import (
    MODEL_HEADS,
    content_causes,
    crash_causes,
    failure_causes,
    fired_at,
    unannounced,
    unreleased,
    untold_causes,
)
from kvcover.sim.results.chains import Cause, Found, fault_cause, policy_cause, span
from kvcover.sim.results.handshakes import bind_failures, dead_dials, refused_maps, wrong_dials
from kvcover.sim.results.keys import misread
from kvcover.sim.results.record import Record
from kvcover.sim.results.result import RankCoverage, Sets
from kvcover.sim.results.slots import uneven_slots


def find(record: Record, ranks: list[RankCoverage], sets: Sets) -> list[Found]:
    """All findings of a finished run, the ones that explain most first."""
    findings = [_unfired(record, fault) for fault, fired in zip(record.setup.faults, record.fired, strict=True) if not fired]
    findings += [
        *bind_failures(record),
        *wrong_dials(record),
        *dead_dials(record),
        *refused_maps(record),
        *_stale_sessions(record),
        *_broken(record),
        *_crashes(record),
        *_stuck(record),
        *_standing(record),
        *_lost(record),
        *_task_failures(record),
        *_sealed_short(record),
        *_untold_prefill(record, sets),
        *_told_without_data(record, ranks, sets),
        *_never_told(record, ranks, sets),
        *_never_asked(record),
        *_put_off(record),
        *_used_early(record),
        *_wrong_content(record, ranks),
    ]
    findings += _held(record, bool(findings))
    return [*(findings or [*_never_filled(record, ranks), *_request_failures(record)]), *uneven_slots(record)]


def _unfired(record: Record, fault: Fault) -> Found:
    """A planned fault that changed nothing, and what it would have needed."""
    router, mode = record.setup.router.name, record.mode.upper()
    if isinstance(fault, KeyFault):
        sent = {key for (_, leg), params in record.legs.items() if fault.leg in (None, leg) for key in params}
        hint = f"; {nearest(fault.key, sent)}" if fault.kind != "set" and fault.key not in sent and sent else ""
        same = {"swap": "on both legs", "stale": "for the request before"}.get(fault.kind, "")
        cause = f"{router} sends no such key there in {mode}, or the same value {same}".rstrip() + hint
    else:
        cause = f"in this {mode} run nothing happened that the fault aims at"
    text = f"{fault} changed nothing: the run proves nothing about it"
    return Found(kind="fault-not-fired", text=text, causes=[Cause(cause)])


def _broken(record: Record) -> list[Found]:
    """Errors that no protocol makes: the code of this vLLM, or the machine, is broken, and the run says nothing more."""
    whose: dict[str, list[str]] = defaultdict(list)
    for event in record.history.events("crashed", "poisoned"):
        fields = event.fields
        if isinstance(fields, Raised) and (broken := fields.broken):
            where = ", ".join(each for each in (fields.call and f"in {fields.call}", fields.at) if each)
            whose[f"{broken} ({where})" if where else broken].append(event.actor)
    return [
        Found(kind="broken", text=f"{span(dict.fromkeys(who))}: {error}", causes=[Cause("no fault of the protocol")])
        for error, who in whose.items()
    ]


def _stuck(record: Record) -> list[Found]:
    """Ranks of a real run that never came up, or never came back from a step."""
    groups: dict[bool, dict[str, list[str]]] = {True: defaultdict(list), False: defaultdict(list)}
    for event, stuck in record.history.having(Stuck, "stuck"):
        groups[stuck.started][stuck.last_step].append(event.actor)
    return [
        Found(
            kind="stalled",
            text=f"{span(itertools.chain(*steps.values()))} never {'came back from a step' if started else 'came up'}",
            causes=[Cause(f"{span(who)}, last step: {step}") for step, who in steps.items() if step],
        )
        for started, steps in groups.items()
        if steps
    ]


def _standing(record: Record) -> list[Found]:
    """Where the ranks of a real run stood when all timers had expired and a request had not ended."""
    steps: dict[str, list[str]] = defaultdict(list)
    for event, stands in record.history.having(Stuck, "stands"):
        steps[stands.last_step].append(event.actor)
    if not steps:
        return []
    setup, whose = record.setup, ", ".join(str(course.index) for course in record.courses if not course.ended)
    timers = f"transfer {setup.transfer_timeout_ns / 1e9:g} s, defer {setup.defer_timeout_ns / 1e9:g} s"
    return [
        Found(
            kind="hang",
            text=f"request {whose} had not ended when all of the connector's timers ({timers}) had expired",
            causes=[Cause(f"{span(who)}, last step: {step}") for step, who in steps.items()],
        )
    ]


def _crashes(record: Record) -> list[Found]:
    findings = []
    for event, raised in record.history.having(Raised, "crashed"):
        findings.append(Found(kind="crash", text=f"{event.actor} died: {raised}", causes=crash_causes(record, event, raised)))
    return findings


def _lost(record: Record) -> list[Found]:
    """Requests that the router could not bring to both engines."""
    requests: dict[Lost, list[str]] = defaultdict(list)
    for event, lost in record.history.having(Lost, "lost"):
        requests[lost].append(str(event.request))
    router = record.setup.router
    return [
        Found(
            kind="lost",
            text=f"the router lost request {', '.join(whose)}: {lost}",
            causes=[Cause(f"{router.name} sends the decode leg to the DP rank that prefill's leg has")]
            if lost.reason == "rejected"
            else [],
        )
        for lost, whose in requests.items()
    ]


def _stale_sessions(record: Record) -> list[Found]:
    """Ranks that moved data through a session to memory that a restart has taken away."""
    broken = [event for event, failed in record.history.having(Failed, "transfer_failed") if failed.source == "gone"]
    back = record.history.events("restarted")
    if not broken or not back:
        return []
    return [
        Found(
            kind="stale-session",
            text=f"{span(dict.fromkeys(e.actor for e in broken))} used sessions to memory that {span({e.actor for e in back})} had "
            "before its restart",
            causes=[Cause("a session is kept under host, port and DP rank, which are as before, so nobody dials again")],
        )
    ]


def _sealed_short(record: Record) -> list[Found]:
    short = record.history.events("sealed_short")
    if not short:
        return []
    return [
        Found(
            kind="sealed-short",
            text=f"{span(dict.fromkeys(e.actor for e in short))} sealed the transfer with {short[0].detail} and will say done",
            causes=[
                Cause("its handshake came in time for the last layers only"),
                policy_cause(record.setup.prefill.release, "sealing"),
            ],
        )
    ]


def _wrong_content(record: Record, ranks: list[RankCoverage]) -> list[Found]:
    """Cells that hold something, and not what they should."""
    decode = record.setup.decode
    wrong = [decode.rank_name(r.dp, r.tp) for r in ranks if r.wrong]
    if not wrong or all(course.at_go is None for course in record.courses):
        return []
    used = [cells for cells in record.wrong if record.courses[cells.request].at_go is not None]
    kinds: Counter[str] = Counter()
    for cells in used:
        kinds.update(cells.kinds)
    first = next((text for cells in used for text in cells.first), "")
    told = f": {in_words(kinds)}; {first}" if kinds else ""
    text = f"{span(wrong)} used cells that hold something else{told}"
    return [Found(kind="wrong-content", text=text, causes=content_causes(record, wrong))]


def _task_failures(record: Record) -> list[Found]:
    grouped: dict[str, list[str]] = defaultdict(list)
    causes: dict[str, list[Cause]] = {}
    for event in record.history.events("task_failed", "transfer_failed"):
        if event.actor not in grouped[event.detail]:
            grouped[event.detail].append(event.actor)
        causes[event.detail] = failure_causes(record, event)
    effect = "its blocks stay as they were"
    if record.mode == "write":
        effect = "the rank reports the transfer finished and tells decode nothing"
    return [
        Found(kind="transfer-failed", text=f"{span(actors)}: {detail}; {effect}", causes=causes[detail])
        for detail, actors in grouped.items()
    ]


def _untold_prefill(record: Record, sets: Sets) -> list[Found]:
    """Prefill ranks that hold data and were not told where it goes (WRITE), or that it was read (READ)."""
    told = set(sets.prefill_told or ())
    prefill = record.setup.prefill
    busy = {course.prefill_dp for course in record.courses if not course.aborted}
    missing = [prefill.rank_name(dp, tp) for dp in sorted(busy) for tp in range(prefill.tp)
               if prefill.rank_name(dp, tp) not in told]  # fmt: skip
    if not missing or any(course.bad_end in ("refused", "recomputed") for course in record.courses):
        return []
    if record.history.events("crashed") or not all(engine.started for engine in record.side("D")):
        return []
    if record.mode == "write":
        text = f"{span(missing)} never learned decode's blocks"
        return [Found(kind="prefill-not-told", text=text, causes=unannounced(record, missing))]
    if any(course.at_go is None for course in record.courses):
        return []
    return [
        Found(
            kind="prefill-not-released",
            text=f"{span(missing)} never got a release, so prefill holds the blocks until its timer",
            causes=unreleased(record, missing),
        )
    ]


def _told_without_data(record: Record, ranks: list[RankCoverage], sets: Sets) -> list[Found]:
    decode = record.setup.decode
    empty = [decode.rank_name(r.dp, r.tp) for r in ranks if r.told and r.coverage is not None and r.coverage < 1]
    if not empty or record.mode == "read":
        return []
    prefill, release = record.setup.prefill, record.setup.prefill.release
    elsewhere = prefill.tp != decode.tp or bool(misread(record, "prefill", 0))
    unmeant = release.write_done_to == "own_rank" and elsewhere and not set(empty) <= set(sets.written)
    return [
        Found(
            kind="told-without-data",
            text=f"{span(empty)} {'was' if len(empty) == 1 else 'were'} told done with cells missing or wrong",
            causes=[
                *([MODEL_HEADS] if record.geometry.mixed else []),
                *([policy_cause(release, "write_done_to")] if unmeant else []),
                Cause("nothing checks who was written before saying done"),
            ],
        )
    ]


def _never_told(record: Record, ranks: list[RankCoverage], sets: Sets) -> list[Found]:
    waiting = {course.decode_dp for course in record.courses if not course.ended and course.admitted}
    decode = record.setup.decode
    if record.mode == "read":
        return []  # nobody tells in READ: a read that never ends has a finding of its own
    untold = [decode.rank_name(r.dp, r.tp) for r in ranks if r.dp in waiting and not r.told]
    if not untold:
        return []
    causes = untold_causes(record, sets, untold)
    return [Found(kind="never-told", text=f"{span(untold)} never heard that the blocks are complete", causes=causes)]


def _put_off(record: Record) -> list[Found]:
    requests = [str(event.request) for event in record.history.events("put_off")]
    if not requests:
        return []
    return [
        Found(
            kind="read-put-off",
            text=f"request {', '.join(requests)} ran without its KV: its step had handshakes, and read for another one",
            causes=[policy_cause(record.setup.decode.release, "read_queue")],
        )
    ]


def _used_early(record: Record) -> list[Found]:
    """Layers that decode used before their reads had landed: by each layer's landing, or by what was there later."""
    if record.mode == "write" or all(course.at_go is None for course in record.courses):
        return []
    decode = record.setup.decode
    early = [
        fault_cause(fired.fault)
        for _, fired in record.history.having(FaultActed, "fault_fired")
        if fired.kind == "early-completion"
    ]
    causes = list(dict.fromkeys(early)) or [policy_cause(decode.release, "read_barrier")]
    text = "used layers before their reads landed"
    if not record.sees("landing"):
        if short := _seen_early(record):
            return [Found(kind="used-before-landing", text=f"{span(short)} {text}", causes=causes)]
        return []
    used = {(event.actor, event.request, event.layer): event.time_ns for event in record.history.events("short")}
    goes = {event.request: event.time_ns for event in reversed(record.history.events("go"))}
    late = [e for e in record.history.events("read") if e.time_ns > used.get((e.peer, e.request, e.layer), e.time_ns)]
    if not late:
        return []
    short, after_ns = list(dict.fromkeys(e.peer for e in late)), max(e.time_ns - goes[e.request] for e in late)
    return [
        Found(
            kind="used-before-landing",
            text=f"{span(short)} {text} (the last landed {after_ns} ns after go)",
            causes=causes,
        )
    ]


def _seen_early(record: Record) -> list[str]:
    """Decode ranks of a real run that used layers too early: by each layer's own landing, where that is seen.

    Else by what they read and held of a request at the end and not when they used it.
    """
    if record.sees("used_early"):
        return list(dict.fromkeys(event.actor for event in record.history.events("used_early")))
    decode, read = record.setup.decode, {(event.peer, event.request) for event in record.history.events("read")}
    return [
        name
        for course in record.courses
        for tp, count in enumerate(course.at_go or ())
        if count.covered < course.at_end[tp].covered and ((name := decode.rank_name(course.decode_dp, tp)), course.index) in read
    ]


def _never_asked(record: Record) -> list[Found]:
    """Requests whose prompt decode took for loaded in READ, although nothing was to be read for them."""
    if record.mode == "write":
        return []
    unasked = [
        course
        for course in record.courses
        if (course.preempted or course.request.plain) and any(count.covered < count.cells for count in course.at_go or ())
    ]
    if not unasked:
        return []
    whose = ", ".join(str(course.index) for course in unasked)
    causes = [Cause(f"request {course.index} {'was preempted' if course.preempted else 'is plain'}") for course in unasked]
    return [
        Found(
            kind="never-read",
            text=f"decode took the prompt of request {whose} for loaded, and nothing was to be read for it",
            causes=[*causes, policy_cause(record.setup.decode.release, "match_read")],
        )
    ]


def _never_filled(record: Record, ranks: list[RankCoverage]) -> list[Found]:
    """Cells that decode used in READ and that no read was to fill, when nothing else explains it."""
    decode = record.setup.decode
    gone = {course.decode_dp for course in record.courses if course.at_go is not None}
    short = [decode.rank_name(r.dp, r.tp) for r in ranks if r.missing and r.dp in gone]
    if record.mode == "write" or not short:
        return []
    field = "windows" if any(table.window for table in decode.tables) else "read_pairing"
    text = f"{span(short)} used cells that no read was to fill"
    return [Found(kind="never-read", text=text, causes=[policy_cause(decode.release, field)])]


def _request_failures(record: Record) -> list[Found]:
    """Requests that ended with an error that nothing else explains."""
    requests: dict[str, set[int]] = defaultdict(set)
    for event in record.history.events("request_failed"):
        requests[event.detail].add(event.request)
    causes = fired_at(record)
    return [
        Found(kind="request-failed", text=f"request {', '.join(map(str, sorted(failed)))} failed: {why}", causes=causes)
        for why, failed in requests.items()
    ]


def _held(record: Record, explained: bool) -> list[Found]:
    """What is held too long; that is a consequence where something else is `explained`."""
    findings = []
    timer = record.history.events("expired", "reaped")
    if timer:
        kinds = {"expired": "the deferral timer of", "reaped": "the scheduler's timer of"}
        grouped = {kind: span(dict.fromkeys(e.actor for e in timer if e.kind == kind)) for kind in kinds}
        text = "; ".join(f"{kinds[kind]} {names} fired" for kind, names in grouped.items() if names)
        held_s = record.setup.defer_timeout_ns / 1e9
        findings.append(
            Found(kind="held-until-timer", text=f"{text}: prefill's blocks were held for {held_s:g} s",
                  causes=[] if explained else fired_at(record))
        )  # fmt: skip
    for engine in record.side("D"):
        if not engine.crashed and (kept := [index for index in engine.held if record.courses[index].ended]):
            text = f"{engine.name} holds the blocks of requests {kept} for ever: they are over, and no rank reports them"
            field = "abort_waiting" if any(record.courses[index].aborted for index in kept) else "decode_timer"
            findings.append(Found(kind="leak", text=text, causes=[policy_cause(engine.me.release, field)]))
    for engine in record.side("P"):
        if engine.held and not engine.crashed:
            text = f"{engine.name} holds the blocks of requests {list(engine.held)} for ever"
            findings.append(Found(kind="leak", text=text, causes=[policy_cause(engine.me.release, "reaper")]))
    return findings
