"""Findings: what went wrong, in the field's words, each with its chain of causes down to a policy of the release."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from kvcover.faults import Fault, KeyFault
from kvcover.sim.errors import nearest
from kvcover.sim.kernel.events import Dial, Failed, FaultFired, Listener, Lost, Raised
from kvcover.sim.releases.policies import FIELDS
from kvcover.sim.releases.records import ConnectorRelease
from kvcover.sim.results.outcome import intended_peers
from kvcover.sim.results.record import Record
from kvcover.sim.results.result import Finding, RankCoverage, Sets
from kvcover.sim.scenario.setup import Endpoint


def find(record: Record, ranks: list[RankCoverage], sets: Sets) -> list[Finding]:
    """All findings of a finished run, the ones that explain most first."""
    findings = [_unfired(record, fault) for fault, fired in zip(record.setup.faults, record.fired, strict=True) if not fired]
    findings += [
        *_bind_failures(record),
        *_wrong_dials(record),
        *_dead_dials(record),
        *_refused_maps(record),
        *_stale_sessions(record),
        *_crashes(record),
        *_lost(record),
        *_task_failures(record),
        *_sealed_short(record),
        *_untold_prefill(record, sets),
        *_told_without_data(record, ranks),
        *_never_told(record, ranks, sets),
        *_never_asked(record),
        *_put_off(record),
        *_used_early(record, ranks),
        *_wrong_content(record, ranks),
        *_held(record),
    ]
    return findings or [*_never_filled(record, ranks), *_request_failures(record)]


def _unfired(record: Record, fault: Fault) -> Finding:
    """A planned fault that changed nothing, and what it would have needed."""
    router, mode = record.setup.router.name, record.mode.upper()
    if isinstance(fault, KeyFault):
        sent = {key for (_, leg), params in record.legs.items() if fault.leg in (None, leg) for key in params}
        hint = f"; {nearest(fault.key, sent)}" if fault.kind != "set" and fault.key not in sent and sent else ""
        same = {"swap": "on both legs", "stale": "for the request before"}.get(fault.kind, "")
        cause = f"{router} sends no such key there in {mode}, or the same value {same}".rstrip() + hint
    else:
        cause = f"in this {mode} run nothing happened that the fault aims at"
    return Finding(kind="fault-not-fired", text=f"{fault} changed nothing: the run proves nothing about it", causes=[cause])


def span(names: Iterable[str]) -> str:
    """`P1–P7` for a run of neighbours, else the names."""
    listed = sorted(names, key=lambda name: (len(name), name))
    heads = [name.rstrip("0123456789") for name in listed]
    tails = [int(name[len(head) :] or -1) for name, head in zip(listed, heads, strict=True)]
    if len(listed) > 2 and len(set(heads)) == 1 and tails == list(range(tails[0], tails[0] + len(tails))):
        return f"{listed[0]}–{listed[-1]}"
    return ", ".join(listed)


_UNKNOWN = {
    "refused": "refuses an unknown size",
    "zero_is_own": "takes the peer to be as large as itself",
    "non_positive_is_own": "takes the peer to be as large as itself",
    "remote_tp_size_or_tp_size_or_own": "takes the peer to be as large as itself",
}


def peer_tp_causes(
    release: ConnectorRelease, params: Mapping[str, Any], field: str = "peer_tp", unknown: str = "unknown_tp_map"
) -> list[str]:
    """Why a leg's peer TP size was read as it was; `unknown` is the field that says what a missing one counts as."""
    policy = getattr(release, field)
    sent, short = params.get("remote_tp_size"), params.get("tp_size")
    if policy == "tp_size_or_1":
        if "tp_size" in params:
            return [f"release {release.name} reads `tp_size`, which was sent as {short!r}"]
        causes = [f"release {release.name} reads `tp_size`, which was not sent, default 1"]
        if "remote_tp_size" in params:
            causes.append(f"`remote_tp_size` = {sent!r} was sent and not read")
        return causes
    if policy in ("true_size", "own_size"):
        return [_cause(release, field)]
    if sent:
        return [f"`remote_tp_size` = {sent!r} was sent"]
    if short:
        return [f"`remote_tp_size` was not sent, `tp_size` = {short!r} was"]
    words = _UNKNOWN[getattr(release, unknown)]
    return [f"neither `remote_tp_size` nor `tp_size` was sent; release {release.name} {words}"]


def _cause(release: ConnectorRelease, field: str) -> str:
    name = getattr(release, field)
    return f"release {release.name}, {field} = {name}: {FIELDS[field].policies[name].text}"


def _leg(record: Record, side: str, request: int = 0) -> dict[str, Any]:
    return record.legs.get((max(request, 0), side), {})


def _initiator(record: Record) -> tuple[str, ConnectorRelease]:
    """Which leg and which release decide where data goes: prefill's in WRITE, decode's in READ."""
    if record.mode == "write":
        return "prefill", record.setup.prefill.release
    return "decode", record.setup.decode.release


def _wrong_dials(record: Record) -> list[Finding]:
    """Handshakes that reached another rank than the one whose cells are meant."""
    side, release = _initiator(record)
    wrong: dict[str, list[tuple[str, str]]] = defaultdict(list)
    requests: dict[str, int] = {}
    peers = record.ranks()
    ports: dict[str, int] = {}
    for event, dial in record.history.having(Dial, "dialled"):
        (_, own_tp), (reached, reached_tp) = peers[event.actor], peers[event.peer]
        intended = set(intended_peers(record.setup, own_tp))
        if not intended or (reached.dp == dial.dp and reached_tp in intended):
            continue
        peer = record.setup.decode if record.mode == "write" else record.setup.prefill
        meant = span(peer.rank_name(dial.dp, tp) for tp in sorted(intended))
        wrong[event.peer].append((event.actor, meant))
        requests[event.peer] = event.request
        ports.setdefault(event.peer, dial.port)
    findings = []
    for reached_name, pairs in wrong.items():
        actors = span(dict.fromkeys(actor for actor, _ in pairs))
        meant = span(dict.fromkeys(meant for _, meant in pairs))
        params = _leg(record, side, requests[reached_name])
        causes = [*_map_causes(record, side, release), *peer_tp_causes(release, params)]
        findings.append(
            Finding(
                kind="wrong-peer",
                text=f"{actors} dialled port {ports[reached_name]}, bound by {reached_name}, not {meant}",
                causes=causes,
            )
        )
    return sorted(findings, key=lambda finding: finding.text)


def _map_causes(record: Record, side: str, release: ConnectorRelease) -> list[str]:
    field = "write_map" if record.mode == "write" else "read_map"
    causes = [_cause(release, field)]
    dp = record.setup.decode.dp if record.mode == "write" else record.setup.prefill.dp
    if dp > 1:
        causes.insert(0, _cause(release, "dial"))
    return causes


def _dead_dials(record: Record) -> list[Finding]:
    dead = record.history.having(Dial, "dial_dead")
    if not dead:
        return []
    side, release = _initiator(record)
    first = dead[0][0]
    bound_later = {address.port for e, address in record.history.having(Listener, "bound") if e.time_ns > first.time_ns}
    late = all(dial.port in bound_later for _, dial in dead)
    ports = span(dict.fromkeys(f"port {dial.port}" for _, dial in dead))
    effect = "which was bound only later; until then " if late else "which nobody bound; "
    effect += "a rank that dials it can't write" if record.mode == "write" else "the whole step waits for it"
    causes = [] if late else [*_map_causes(record, side, release), *peer_tp_causes(release, _leg(record, side, first.request))]
    return [
        Finding(
            kind="dead-port",
            text=f"{span(dict.fromkeys(e.actor for e, _ in dead))} dialled {ports}, {effect}",
            causes=causes,
        )
    ]


def _refused_maps(record: Record) -> list[Finding]:
    refused = record.history.events("map_refused")
    if not refused:
        return []
    release = record.setup.prefill.release
    return [
        Finding(
            kind="map-refused",
            text=f"{span(dict.fromkeys(e.actor for e in refused))} can't map itself onto decode: {refused[0].detail}",
            causes=[
                _cause(release, "unknown_tp_map"),
                _cause(release, "write_map_error"),
                *peer_tp_causes(release, _leg(record, "prefill", refused[0].request)),
            ],
        )
    ]


def _bind_failures(record: Record) -> list[Finding]:
    findings = []
    for event in record.history.events("bind_failed"):
        release = (record.setup.prefill if event.actor[0] == "P" else record.setup.decode).release
        stages = event.actor == event.peer
        who = f"the second pipeline stage of {event.actor}" if stages else event.actor
        other = "its first stage" if stages else event.peer
        findings.append(
            Finding(
                kind="port-taken",
                text=f"{who} could not bind {event.detail}, which {other} has; its engine never starts",
                causes=[_cause(release, "ports"), *(["no release counts pipeline stages in it"] if stages else [])],
            )
        )
    return findings


def _crashes(record: Record) -> list[Finding]:
    findings = []
    for event, raised in record.history.having(Raised, "crashed"):
        endpoint = record.setup.prefill if event.actor[0] == "P" else record.setup.decode
        leg = "prefill" if endpoint is record.setup.prefill else "decode"
        causes = [raised.fault] if raised.fault else _crash_causes(record, endpoint, leg, raised)
        if event.request >= 0 or not causes:  # else it died before there was a leg
            causes += peer_tp_causes(endpoint.release, _leg(record, leg, event.request))
        findings.append(Finding(kind="crash", text=f"{event.actor} died: {raised}", causes=causes))
    return findings


def _crash_causes(record: Record, endpoint: Endpoint, leg: str, raised: Raised) -> list[str]:
    """The policy by which an error of the connector became the end of an engine."""
    if raised.error == "TimeoutError":
        return [f"executor_timeout_s = {endpoint.side.executor_timeout_s}: vLLM's executor gives up on a step that long"]
    compared = raised.policy == "read_guard" and raised.error == "ValueError"  # blocks and contents, and not only TP sizes
    unlike = _unlike_caches(record) if compared else []
    return [*unlike, *([_cause(endpoint.release, raised.policy)] if raised.policy else [])]


def _lost(record: Record) -> list[Finding]:
    """Requests that the router could not bring to both engines."""
    requests: dict[Lost, list[str]] = defaultdict(list)
    for event, lost in record.history.having(Lost, "lost"):
        requests[lost].append(str(event.request))
    router = record.setup.router
    return [
        Finding(
            kind="lost",
            text=f"the router lost request {', '.join(whose)}: {lost}",
            causes=[f"{router.name} sends the decode leg to the DP rank that prefill's leg has"]
            if lost.reason == "rejected"
            else [],
        )
        for lost, whose in requests.items()
    ]


def _stale_sessions(record: Record) -> list[Finding]:
    """Ranks that moved data through a session to memory that a restart has taken away."""
    broken = [event for event, failed in record.history.having(Failed, "transfer_failed") if failed.source == "gone"]
    back = record.history.events("restarted")
    if not broken or not back:
        return []
    return [
        Finding(
            kind="stale-session",
            text=f"{span(dict.fromkeys(e.actor for e in broken))} used sessions to memory that {span({e.actor for e in back})} had "
            "before its restart",
            causes=["a session is kept under host, port and DP rank, which are as before, so nobody dials again"],
        )
    ]


def _sealed_short(record: Record) -> list[Finding]:
    short = record.history.events("sealed_short")
    if not short:
        return []
    return [
        Finding(
            kind="sealed-short",
            text=f"{span(dict.fromkeys(e.actor for e in short))} sealed the transfer with {short[0].detail} and will say done",
            causes=["its handshake came in time for the last layers only", _cause(record.setup.prefill.release, "sealing")],
        )
    ]


_MODEL_HEADS = "the rank map counts the heads of the model as a whole, and some layers have others"


def _wrong_content(record: Record, ranks: list[RankCoverage]) -> list[Finding]:
    """Cells that hold something, and not what they should."""
    decode = record.setup.decode
    wrong = [decode.rank_name(r.dp, r.tp) for r in ranks if r.wrong]
    if not wrong or all(course.at_go is None for course in record.courses):
        return []
    writers: dict[str, set[str]] = defaultdict(set)
    for _, _, source, rank, _, _, _ in record.history.rows_of("wrote", "read"):
        writers[rank].add(source)
    causes = _unlike_caches(record)
    if shared := [name for name in wrong if len(writers[name]) > 1]:
        causes.append(f"several ranks moved into {span(shared)}; where they meet, the last one wins")
    if record.geometry.mixed and record.mode == "write":
        causes.append(_MODEL_HEADS)
    windows = record.mode == "read" and any(table.window for table in decode.tables)
    unlike = len({_block_count(record, side) for side in ("prefill", "decode")}) > 1
    if windows and unlike:
        causes.append(_cause(decode.release, "windows"))
    elif record.mode == "read" and (unlike or any(course.request.suffix_only for course in record.courses)):
        causes.append(_cause(decode.release, "read_pairing"))
    elif record.mode == "write" and not record.setup.prefill.shape.same_blocks(decode.shape):
        causes.append(_cause(record.setup.prefill.release, "write_plan"))
    return [Finding(kind="wrong-content", text=f"{span(wrong)} used cells that hold something else", causes=causes)]


def _unlike_caches(record: Record) -> list[str]:
    """In what the caches of the two sides differ; few releases compare them."""
    here, there = record.setup.prefill.shape, record.setup.decode.shape
    alike = here.memory == there.memory
    pairs = [
        ("blocks hold", f"{here.block_size} tokens", f"{there.block_size} tokens"),
        ("KV is", here.kv_dtype, there.kv_dtype),
        *([] if alike else [("caches are", f"{here.layout} {here.order}", f"{there.layout} {there.order}")]),
    ]
    return [f"prefill's {what} {mine}, decode's {theirs}" for what, mine, theirs in pairs if mine != theirs]


def _block_count(record: Record, side: str) -> int:
    endpoint = record.setup.prefill if side == "prefill" else record.setup.decode
    return endpoint.rows(record.setup.requests[0].prompt_tokens)[0][1]


def _task_failures(record: Record) -> list[Finding]:
    grouped: dict[str, list[str]] = defaultdict(list)
    requests, policies = {}, {}
    for event in record.history.events("task_failed", "transfer_failed"):
        if event.actor not in grouped[event.detail]:
            grouped[event.detail].append(event.actor)
        requests[event.detail] = event.request
        known = event.fields.policy if isinstance(event.fields, Raised) else ""
        policies[event.detail] = known or ("write_plan" if record.mode == "write" else "read_failure")
    side, release = _initiator(record)
    return [
        Finding(
            kind="transfer-failed",
            text=f"{span(actors)}: {detail}; " + ("the rank reports the transfer finished and tells decode nothing"
                                                   if record.mode == "write" else "its blocks stay as they were"),
            causes=[*_unlike_caches(record), _cause(release, policies[detail]),
                    *([_MODEL_HEADS] if record.geometry.mixed and record.mode == "write" else []),
                    *peer_tp_causes(release, _leg(record, side, requests[detail]))],
        )
        for detail, actors in grouped.items()
    ]  # fmt: skip


def _untold_prefill(record: Record, sets: Sets) -> list[Finding]:
    """Prefill ranks that hold data and were not told where it goes (WRITE), or that it was read (READ)."""
    told = set(sets.prefill_told or ())
    prefill, decode = record.setup.prefill, record.setup.decode
    busy = {course.prefill_dp for course in record.courses if not course.aborted}
    missing = [prefill.rank_name(dp, tp) for dp in sorted(busy) for tp in range(prefill.tp)
               if prefill.rank_name(dp, tp) not in told]  # fmt: skip
    if not missing or any(course.bad_end in ("refused", "recomputed") for course in record.courses):
        return []
    if record.history.events("crashed") or not all(engine.started for engine in record.side("D")):
        return []
    if record.mode == "write":
        params = _leg(record, "decode")
        return [
            Finding(
                kind="prefill-not-told",
                text=f"{span(missing)} never learned decode's blocks",
                causes=list(dict.fromkeys([
                    _cause(decode.release, "blocks_ready_width"),
                    *peer_tp_causes(decode.release, params, "blocks_ready_width", "blocks_ready_width"),
                ])),
            )
        ]  # fmt: skip
    if any(course.at_go is None for course in record.courses):
        return []
    return [
        Finding(
            kind="prefill-not-released",
            text=f"{span(missing)} never got a release, so prefill holds the blocks until its timer",
            causes=[_cause(decode.release, "release_to"), *peer_tp_causes(decode.release, _leg(record, "decode"))],
        )
    ]


def _told_without_data(record: Record, ranks: list[RankCoverage]) -> list[Finding]:
    decode = record.setup.decode
    empty = [decode.rank_name(r.dp, r.tp) for r in ranks if r.told and r.coverage is not None and r.coverage < 1]
    if not empty or record.mode == "read":
        return []
    release = record.setup.prefill.release
    return [
        Finding(
            kind="told-without-data",
            text=f"{span(empty)} {'was' if len(empty) == 1 else 'were'} told done with cells missing or wrong",
            causes=[
                *([_MODEL_HEADS] if record.geometry.mixed else []),
                _cause(release, "write_done_to"),
                "nothing checks who was written before saying done",
            ],
        )
    ]


def _never_told(record: Record, ranks: list[RankCoverage], sets: Sets) -> list[Finding]:
    waiting = {course.decode_dp for course in record.courses if not course.ended and course.admitted}
    decode = record.setup.decode
    if record.mode == "read":
        return []  # nobody tells in READ: a read that never ends has a finding of its own
    untold = [decode.rank_name(r.dp, r.tp) for r in ranks if r.dp in waiting and not r.told]
    if not untold:
        return []
    release, history = record.setup.prefill.release, record.history
    causes = [fired.fault for _, fired in history.having(FaultFired, "fault_fired") if fired.point == "notice"][:1]
    if history.events("expired"):
        causes.append(_cause(release, "expiry"))
    if history.events("write_done_sent"):
        causes.append(_cause(release, "write_done_to"))
    causes.append(_cause(decode.release, "decode_timer"))
    return [Finding(kind="never-told", text=f"{span(untold)} never heard that the blocks are complete", causes=causes)]


def _put_off(record: Record) -> list[Finding]:
    requests = [str(event.request) for event in record.history.events("put_off")]
    if not requests:
        return []
    return [
        Finding(
            kind="read-put-off",
            text=f"request {', '.join(requests)} ran without its KV: its step had handshakes, and read for another one",
            causes=[_cause(record.setup.decode.release, "read_handshake")],
        )
    ]


def _used_early(record: Record, ranks: list[RankCoverage]) -> list[Finding]:
    if record.mode == "write" or all(course.at_go is None for course in record.courses):
        return []
    decode = record.setup.decode
    go_ns = min(event.time_ns for event in record.history.events("go"))
    late = [e for e in record.history.events("read") if e.time_ns > go_ns]
    short = [decode.rank_name(r.dp, r.tp) for r in ranks if r.coverage is not None and r.missing]
    if not late or not short:
        return []
    return [
        Finding(
            kind="used-before-landing",
            text=f"{span(short)} used layers before their reads landed (the last landed {late[-1].time_ns - go_ns} ns after go)",
            causes=[_cause(decode.release, "read_barrier")],
        )
    ]


def _never_asked(record: Record) -> list[Finding]:
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
    causes = [f"request {course.index} {'was preempted' if course.preempted else 'is plain'}" for course in unasked]
    return [
        Finding(
            kind="never-read",
            text=f"decode took the prompt of request {whose} for loaded, and nothing was to be read for it",
            causes=[*causes, _cause(record.setup.decode.release, "match_read")],
        )
    ]


def _never_filled(record: Record, ranks: list[RankCoverage]) -> list[Finding]:
    """Cells that decode used in READ and that no read was to fill, when nothing else explains it."""
    decode = record.setup.decode
    gone = {course.decode_dp for course in record.courses if course.at_go is not None}
    short = [decode.rank_name(r.dp, r.tp) for r in ranks if r.missing and r.dp in gone]
    if record.mode == "write" or not short:
        return []
    field = "windows" if any(table.window for table in decode.tables) else "read_pairing"
    text = f"{span(short)} used cells that no read was to fill"
    return [Finding(kind="never-read", text=text, causes=[_cause(decode.release, field)])]


def _request_failures(record: Record) -> list[Finding]:
    """Requests that ended with an error that nothing else explains."""
    requests: dict[str, set[int]] = defaultdict(set)
    for event in record.history.events("request_failed"):
        requests[event.detail].add(event.request)
    fired = list(dict.fromkeys(fired.fault for _, fired in record.history.having(FaultFired, "fault_fired")))
    return [
        Finding(kind="request-failed", text=f"request {', '.join(map(str, sorted(failed)))} failed: {why}", causes=fired)
        for why, failed in requests.items()
    ]


def _held(record: Record) -> list[Finding]:
    findings = []
    timer = record.history.events("expired", "reaped")
    if timer:
        kinds = {"expired": "the deferral timer of", "reaped": "the scheduler's timer of"}
        grouped = {kind: span(dict.fromkeys(e.actor for e in timer if e.kind == kind)) for kind in kinds}
        text = "; ".join(f"{kinds[kind]} {names} fired" for kind, names in grouped.items() if names)
        held_s = record.setup.scenario.timers.defer_timeout_s
        findings.append(
            Finding(kind="held-until-timer", text=f"{text}: prefill's blocks were held for {held_s:g} s",
                    causes=[_cause(record.setup.prefill.release, "reaper")])
        )  # fmt: skip
    for engine in record.side("D"):
        if not engine.crashed and (kept := [index for index in engine.held if record.courses[index].ended]):
            text = f"{engine.name} holds the blocks of requests {kept} for ever: they are over, and no rank reports them"
            field = "abort_waiting" if any(record.courses[index].aborted for index in kept) else "decode_timer"
            findings.append(Finding(kind="leak", text=text, causes=[_cause(engine.me.release, field)]))
    for engine in record.side("P"):
        if engine.held and not engine.crashed:
            text = f"{engine.name} holds the blocks of requests {list(engine.held)} for ever"
            findings.append(Finding(kind="leak", text=text, causes=[_cause(engine.me.release, "reaper")]))
    return findings
