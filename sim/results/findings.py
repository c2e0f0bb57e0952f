"""Findings: what went wrong, in the field's words, each with its chain of causes down to a policy of the release."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from kvcover.faults import Fault, KeyFault
from kvcover.sim.errors import nearest
from kvcover.sim.kernel.events import Dial, Failed, FaultFired, Listener, Lost, Raised
from kvcover.sim.releases.policies import POLICIES
from kvcover.sim.releases.records import ConnectorRelease
from kvcover.sim.results.outcome import intended_peers
from kvcover.sim.results.result import Finding, RankCoverage, Sets
from kvcover.sim.scenario.setup import Endpoint
from kvcover.sim.world import World


def find(world: World, ranks: list[RankCoverage], sets: Sets) -> list[Finding]:
    """All findings of a finished run, the ones that explain most first."""
    findings = [_unfired(world, fault) for fault, fired in zip(world.setup.faults, world.fired, strict=True) if not fired]
    findings += [
        *_bind_failures(world),
        *_wrong_dials(world),
        *_dead_dials(world),
        *_refused_maps(world),
        *_stale_sessions(world),
        *_crashes(world),
        *_lost(world),
        *_task_failures(world),
        *_sealed_short(world),
        *_untold_prefill(world, sets),
        *_told_without_data(world, ranks),
        *_never_told(world, ranks, sets),
        *_never_asked(world),
        *_put_off(world),
        *_used_early(world, ranks),
        *_wrong_content(world, ranks),
        *_held(world),
    ]
    return findings or [*_never_filled(world, ranks), *_request_failures(world)]


def _unfired(world: World, fault: Fault) -> Finding:
    """A planned fault that changed nothing, and what it would have needed."""
    router, mode = world.setup.router.name, world.mode.upper()
    if isinstance(fault, KeyFault):
        sent = {key for (_, leg), params in world.legs.items() if fault.leg in (None, leg) for key in params}
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


def peer_tp_causes(release: ConnectorRelease, params: Mapping[str, Any], field: str = "peer_tp") -> list[str]:
    """Why a leg's peer TP size was read as it was."""
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
    unknown = {
        "refused": "refuses an unknown size",
        "zero_is_own": "takes the peer to be as large as itself",
        "non_positive_is_own": "takes the peer to be as large as itself",
    }[release.unknown_tp_map]
    return [f"neither `remote_tp_size` nor `tp_size` was sent; release {release.name} {unknown}"]


def _cause(release: ConnectorRelease, field: str) -> str:
    name = getattr(release, field)
    return f"release {release.name}, {field} = {name}: {POLICIES[field][name].text}"


def _leg(world: World, side: str, request: int = 0) -> dict[str, Any]:
    return world.legs.get((max(request, 0), side), {})


def _initiator(world: World) -> tuple[str, ConnectorRelease]:
    """Which leg and which release decide where data goes: prefill's in WRITE, decode's in READ."""
    if world.mode == "write":
        return "prefill", world.setup.prefill.release
    return "decode", world.setup.decode.release


def _wrong_dials(world: World) -> list[Finding]:
    """Handshakes that reached another rank than the one whose cells are meant."""
    side, release = _initiator(world)
    wrong: dict[str, list[tuple[str, str]]] = defaultdict(list)
    requests: dict[str, int] = {}
    peers = {rank.name: rank for engine in world.engines for rank in engine.ranks}
    ports: dict[str, int] = {}
    for event, dial in world.history.having(Dial, "dialled"):
        actor, reached, meant_dp = peers[event.actor], peers[event.peer], dial.dp
        intended = set(intended_peers(world, actor.tp))
        if not intended or (reached.engine.dp == meant_dp and reached.tp in intended):
            continue
        peer = world.setup.decode if world.mode == "write" else world.setup.prefill
        meant = span(peer.rank_name(meant_dp, tp) for tp in sorted(intended))
        wrong[event.peer].append((event.actor, meant))
        requests[event.peer] = event.request
        ports.setdefault(event.peer, dial.port)
    findings = []
    for reached_name, pairs in wrong.items():
        actors = span(dict.fromkeys(actor for actor, _ in pairs))
        meant = span(dict.fromkeys(meant for _, meant in pairs))
        params = _leg(world, side, requests[reached_name])
        causes = [*_map_causes(world, side, release), *peer_tp_causes(release, params)]
        findings.append(
            Finding(
                kind="wrong-peer",
                text=f"{actors} dialled port {ports[reached_name]}, bound by {reached_name}, not {meant}",
                causes=causes,
            )
        )
    return sorted(findings, key=lambda finding: finding.text)


def _map_causes(world: World, side: str, release: ConnectorRelease) -> list[str]:
    field = "write_map" if world.mode == "write" else "read_map"
    causes = [_cause(release, field)]
    dp = world.setup.decode.dp if world.mode == "write" else world.setup.prefill.dp
    if dp > 1:
        causes.insert(0, _cause(release, "dial"))
    return causes


def _dead_dials(world: World) -> list[Finding]:
    dead = world.history.having(Dial, "dial_dead")
    if not dead:
        return []
    side, release = _initiator(world)
    first = dead[0][0]
    bound_later = {address.port for e, address in world.history.having(Listener, "bound") if e.time_ns > first.time_ns}
    late = all(dial.port in bound_later for _, dial in dead)
    ports = span(dict.fromkeys(f"port {dial.port}" for _, dial in dead))
    effect = "which was bound only later; until then " if late else "which nobody bound; "
    effect += "a rank that dials it can't write" if world.mode == "write" else "the whole step waits for it"
    causes = [] if late else [*_map_causes(world, side, release), *peer_tp_causes(release, _leg(world, side, first.request))]
    return [
        Finding(
            kind="dead-port",
            text=f"{span(dict.fromkeys(e.actor for e, _ in dead))} dialled {ports}, {effect}",
            causes=causes,
        )
    ]


def _refused_maps(world: World) -> list[Finding]:
    refused = world.history.events("map_refused")
    if not refused:
        return []
    release = world.setup.prefill.release
    return [
        Finding(
            kind="map-refused",
            text=f"{span(dict.fromkeys(e.actor for e in refused))} can't map itself onto decode: {refused[0].detail}",
            causes=[
                _cause(release, "unknown_tp_map"),
                _cause(release, "write_map_error"),
                *peer_tp_causes(release, _leg(world, "prefill", refused[0].request)),
            ],
        )
    ]


def _bind_failures(world: World) -> list[Finding]:
    findings = []
    for event in world.history.events("bind_failed"):
        release = (world.setup.prefill if event.actor[0] == "P" else world.setup.decode).release
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


def _crashes(world: World) -> list[Finding]:
    findings = []
    for event, raised in world.history.having(Raised, "crashed"):
        endpoint = world.setup.prefill if event.actor[0] == "P" else world.setup.decode
        leg = "prefill" if endpoint is world.setup.prefill else "decode"
        causes = [raised.fault] if raised.fault else _crash_causes(world, endpoint, leg, raised)
        if event.request >= 0 or not causes:  # else it died before there was a leg
            causes += peer_tp_causes(endpoint.release, _leg(world, leg, event.request))
        findings.append(Finding(kind="crash", text=f"{event.actor} died: {raised}", causes=causes))
    return findings


def _crash_causes(world: World, endpoint: Endpoint, leg: str, raised: Raised) -> list[str]:
    """The policy by which an error of the connector became the end of an engine."""
    if raised.error == "TimeoutError":
        return [f"executor_timeout_s = {endpoint.side.executor_timeout_s}: vLLM's executor gives up on a step that long"]
    compared = raised.policy == "read_guard" and raised.error == "ValueError"  # blocks and contents, and not only TP sizes
    unlike = _unlike_caches(world) if compared else []
    return [*unlike, *([_cause(endpoint.release, raised.policy)] if raised.policy else [])]


def _lost(world: World) -> list[Finding]:
    """Requests that the router could not bring to both engines."""
    requests: dict[Lost, list[str]] = defaultdict(list)
    for event, lost in world.history.having(Lost, "lost"):
        requests[lost].append(str(event.request))
    router = world.setup.router
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


def _stale_sessions(world: World) -> list[Finding]:
    """Ranks that moved data through a session to memory that a restart has taken away."""
    broken = [event for event, failed in world.history.having(Failed, "transfer_failed") if failed.source == "gone"]
    back = world.history.events("restarted")
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


def _sealed_short(world: World) -> list[Finding]:
    short = world.history.events("sealed_short")
    if not short:
        return []
    return [
        Finding(
            kind="sealed-short",
            text=f"{span(dict.fromkeys(e.actor for e in short))} sealed the transfer with {short[0].detail} and will say done",
            causes=["its handshake came in time for the last layers only", _cause(world.setup.prefill.release, "sealing")],
        )
    ]


_MODEL_HEADS = "the rank map counts the heads of the model as a whole, and some layers have others"


def _wrong_content(world: World, ranks: list[RankCoverage]) -> list[Finding]:
    """Cells that hold something, and not what they should."""
    decode = world.setup.decode
    wrong = [decode.rank_name(r.dp, r.tp) for r in ranks if r.wrong]
    if not wrong or not any(t.went for t in world.transfers):
        return []
    writers: dict[str, set[str]] = defaultdict(set)
    for _, _, source, rank, _, _, _ in world.history.rows_of("wrote", "read"):
        writers[rank].add(source)
    causes = _unlike_caches(world)
    if shared := [name for name in wrong if len(writers[name]) > 1]:
        causes.append(f"several ranks moved into {span(shared)}; where they meet, the last one wins")
    if world.geometry.mixed and world.mode == "write":
        causes.append(_MODEL_HEADS)
    windows = world.mode == "read" and any(table.window for table in decode.tables)
    unlike = len({_block_count(world, side) for side in ("prefill", "decode")}) > 1
    if windows and unlike:
        causes.append(_cause(decode.release, "windows"))
    elif world.mode == "read" and (unlike or any(t.request.suffix_only for t in world.transfers)):
        causes.append(_cause(decode.release, "read_pairing"))
    elif world.mode == "write" and not world.setup.prefill.shape.same_blocks(decode.shape):
        causes.append(_cause(world.setup.prefill.release, "write_plan"))
    return [Finding(kind="wrong-content", text=f"{span(wrong)} used cells that hold something else", causes=causes)]


def _unlike_caches(world: World) -> list[str]:
    """In what the caches of the two sides differ; few releases compare them."""
    here, there = world.setup.prefill.shape, world.setup.decode.shape
    alike = here.memory == there.memory
    pairs = [
        ("blocks hold", f"{here.block_size} tokens", f"{there.block_size} tokens"),
        ("KV is", here.kv_dtype, there.kv_dtype),
        *([] if alike else [("caches are", f"{here.layout} {here.order}", f"{there.layout} {there.order}")]),
    ]
    return [f"prefill's {what} {mine}, decode's {theirs}" for what, mine, theirs in pairs if mine != theirs]


def _block_count(world: World, side: str) -> int:
    endpoint = world.setup.prefill if side == "prefill" else world.setup.decode
    return endpoint.rows(world.setup.requests[0].prompt_tokens)[0][1]


def _task_failures(world: World) -> list[Finding]:
    grouped: dict[str, list[str]] = defaultdict(list)
    requests, policies = {}, {}
    for event in world.history.events("task_failed", "transfer_failed"):
        if event.actor not in grouped[event.detail]:
            grouped[event.detail].append(event.actor)
        requests[event.detail] = event.request
        known = event.fields.policy if isinstance(event.fields, Raised) else ""
        policies[event.detail] = known or ("write_plan" if world.mode == "write" else "read_failure")
    side, release = _initiator(world)
    return [
        Finding(
            kind="transfer-failed",
            text=f"{span(actors)}: {detail}; " + ("the rank reports the transfer finished and tells decode nothing"
                                                   if world.mode == "write" else "its blocks stay as they were"),
            causes=[*_unlike_caches(world), _cause(release, policies[detail]),
                    *([_MODEL_HEADS] if world.geometry.mixed and world.mode == "write" else []),
                    *peer_tp_causes(release, _leg(world, side, requests[detail]))],
        )
        for detail, actors in grouped.items()
    ]  # fmt: skip


def _untold_prefill(world: World, sets: Sets) -> list[Finding]:
    """Prefill ranks that hold data and were not told where it goes (WRITE), or that it was read (READ)."""
    told = set(sets.prefill_told or ())
    prefill, decode = world.setup.prefill, world.setup.decode
    busy = {t.prefill_dp for t in world.transfers if not t.aborted}
    missing = [prefill.rank_name(dp, tp) for dp in sorted(busy) for tp in range(prefill.tp)
               if prefill.rank_name(dp, tp) not in told]  # fmt: skip
    if not missing or any(t.bad_end in ("refused", "recomputed") for t in world.transfers):
        return []
    if world.history.events("crashed") or not all(e.started for e in world.decodes):
        return []
    if world.mode == "write":
        params = _leg(world, "decode")
        return [
            Finding(
                kind="prefill-not-told",
                text=f"{span(missing)} never learned decode's blocks",
                causes=list(dict.fromkeys([
                    _cause(decode.release, "blocks_ready_width"),
                    *peer_tp_causes(decode.release, params, "blocks_ready_width"),
                ])),
            )
        ]  # fmt: skip
    if not all(t.went for t in world.transfers):
        return []
    return [
        Finding(
            kind="prefill-not-released",
            text=f"{span(missing)} never got a release, so prefill holds the blocks until its timer",
            causes=[_cause(decode.release, "release_to"), *peer_tp_causes(decode.release, _leg(world, "decode"))],
        )
    ]


def _told_without_data(world: World, ranks: list[RankCoverage]) -> list[Finding]:
    decode = world.setup.decode
    empty = [decode.rank_name(r.dp, r.tp) for r in ranks if r.told and r.coverage is not None and r.coverage < 1]
    if not empty or world.mode == "read":
        return []
    release = world.setup.prefill.release
    return [
        Finding(
            kind="told-without-data",
            text=f"{span(empty)} {'was' if len(empty) == 1 else 'were'} told done with cells missing or wrong",
            causes=[
                *([_MODEL_HEADS] if world.geometry.mixed else []),
                _cause(release, "write_done_to"),
                "nothing checks who was written before saying done",
            ],
        )
    ]


def _never_told(world: World, ranks: list[RankCoverage], sets: Sets) -> list[Finding]:
    waiting = {t.decode_dp for t in world.transfers if not t.ended and t.needs}
    decode = world.setup.decode
    if world.mode == "read":
        return []  # nobody tells in READ: a read that never ends has a finding of its own
    untold = [decode.rank_name(r.dp, r.tp) for r in ranks if r.dp in waiting and not r.told]
    if not untold:
        return []
    release, history = world.setup.prefill.release, world.history
    causes = [fired.fault for _, fired in history.having(FaultFired, "fault_fired") if fired.point == "notice"][:1]
    if history.events("expired"):
        causes.append(_cause(release, "expiry"))
    if history.events("write_done_sent"):
        causes.append(_cause(release, "write_done_to"))
    causes.append(_cause(decode.release, "decode_timer"))
    return [Finding(kind="never-told", text=f"{span(untold)} never heard that the blocks are complete", causes=causes)]


def _put_off(world: World) -> list[Finding]:
    requests = [str(event.request) for event in world.history.events("put_off")]
    if not requests:
        return []
    return [
        Finding(
            kind="read-put-off",
            text=f"request {', '.join(requests)} ran without its KV: its step had handshakes, and read for another one",
            causes=[_cause(world.setup.decode.release, "read_handshake")],
        )
    ]


def _used_early(world: World, ranks: list[RankCoverage]) -> list[Finding]:
    if world.mode == "write" or not any(t.went for t in world.transfers):
        return []
    decode = world.setup.decode
    go_ns = min(event.time_ns for event in world.history.events("go"))
    late = [e for e in world.history.events("read") if e.time_ns > go_ns]
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


def _never_asked(world: World) -> list[Finding]:
    """Requests whose prompt decode took for loaded in READ, although nothing was to be read for them."""
    if world.mode == "write":
        return []
    unasked = [
        t
        for t in world.transfers
        if t.went and (t.preempted or t.request.plain) and any(count.covered < count.cells for count in t.at_go)
    ]
    if not unasked:
        return []
    whose = ", ".join(str(t.index) for t in unasked)
    causes = [f"request {t.index} {'was preempted' if t.preempted else 'is plain'}" for t in unasked]
    return [
        Finding(
            kind="never-read",
            text=f"decode took the prompt of request {whose} for loaded, and nothing was to be read for it",
            causes=[*causes, _cause(world.setup.decode.release, "match_read")],
        )
    ]


def _never_filled(world: World, ranks: list[RankCoverage]) -> list[Finding]:
    """Cells that decode used in READ and that no read was to fill, when nothing else explains it."""
    decode = world.setup.decode
    gone = {t.decode_dp for t in world.transfers if t.went}
    short = [decode.rank_name(r.dp, r.tp) for r in ranks if r.missing and r.dp in gone]
    if world.mode == "write" or not short:
        return []
    field = "windows" if any(table.window for table in decode.tables) else "read_pairing"
    text = f"{span(short)} used cells that no read was to fill"
    return [Finding(kind="never-read", text=text, causes=[_cause(decode.release, field)])]


def _request_failures(world: World) -> list[Finding]:
    """Requests that ended with an error that nothing else explains."""
    requests: dict[str, set[int]] = defaultdict(set)
    for event in world.history.events("request_failed"):
        requests[event.detail].add(event.request)
    fired = list(dict.fromkeys(fired.fault for _, fired in world.history.having(FaultFired, "fault_fired")))
    return [
        Finding(kind="request-failed", text=f"request {', '.join(map(str, sorted(failed)))} failed: {why}", causes=fired)
        for why, failed in requests.items()
    ]


def _held(world: World) -> list[Finding]:
    findings = []
    timer = world.history.events("expired", "reaped")
    if timer:
        kinds = {"expired": "the deferral timer of", "reaped": "the scheduler's timer of"}
        grouped = {kind: span(dict.fromkeys(e.actor for e in timer if e.kind == kind)) for kind in kinds}
        text = "; ".join(f"{kinds[kind]} {names} fired" for kind, names in grouped.items() if names)
        held_s = world.setup.scenario.timers.defer_timeout_s
        findings.append(
            Finding(kind="held-until-timer", text=f"{text}: prefill's blocks were held for {held_s:g} s",
                    causes=[_cause(world.setup.prefill.release, "reaper")])
        )  # fmt: skip
    for waiting in world.decodes:
        if not waiting.crashed and (kept := sorted(index for index in waiting.pool.held if world.transfers[index].ended)):
            text = f"{waiting.name} holds the blocks of requests {kept} for ever: they are over, and no rank reports them"
            field = "abort_waiting" if any(world.transfers[index].aborted for index in kept) else "decode_timer"
            findings.append(Finding(kind="leak", text=text, causes=[_cause(waiting.me.release, field)]))
    for engine in world.prefills:
        if engine.pool.held and not engine.crashed:
            findings.append(
                Finding(kind="leak", text=f"{engine.name or 'P'} holds the blocks of requests {sorted(engine.pool.held)} for ever",
                        causes=[_cause(engine.me.release, "reaper")])
            )  # fmt: skip
    return findings
