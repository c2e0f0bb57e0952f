"""Why: what a finding blames, read from the record of the run, with the lever of each cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from kvcover.faults import Fault, KeyFault
from kvcover.faults.events import EventFault
from kvcover.sim.kernel.events import Failed, FaultActed, Listener, Raised, Sent
from kvcover.sim.kernel.history import Event
from kvcover.sim.results.chains import Cause, fault_cause, key_cause, policy_cause, span
from kvcover.sim.results.keys import misread
from kvcover.sim.results.record import Course, Record
from kvcover.sim.results.result import Sets
from kvcover.sim.scenario.endpoint import Endpoint


def initiator(record: Record) -> tuple[str, Endpoint, Endpoint]:
    """Which leg and which engine decide where data goes, and to or from which: prefill's in WRITE, decode's in READ."""
    if record.mode == "write":
        return "prefill", record.setup.prefill, record.setup.decode
    return "decode", record.setup.decode, record.setup.prefill


def dial_causes(record: Record, request: int, meant: bool | None) -> list[Cause]:
    """Why ranks dialled where they did: the map, unless they `meant` the right TP rank, the port's arithmetic, the sizes read.

    Which TP rank they meant nobody sees in a real run (None); there it is the size, if that was seen to be misread.
    """
    side, me, peer = initiator(record)
    if request < 0:  # a handshake is for all requests, and came of the first leg that says something else than what is
        request = next((course.index for course in record.courses if misread(record, side, course.index)), 0)
    params, sizes = record.leg(side, request), misread(record, side, request)
    blameless = meant or (meant is None and sizes and (request, side) in record.reads)
    causes = [] if blameless else [policy_cause(me.release, "write_map" if me.letter == "P" else "read_map")]
    if meant and peer.dp > 1:
        if me.release.dial != peer.release.ports and peer.tp > 1:
            plus = peer.release.ports == "dp_plus_tp"
            causes.append(policy_cause(peer.release, "ports") if plus else policy_cause(me.release, "dial"))
        if me.letter == "D" and me.release.read_dp == "zero":
            causes.append(policy_cause(me.release, "read_dp"))
    if me.letter == "P":
        causes += dp_size_cause(me, peer, params)
    return [*causes, *(sizes if not meant or peer.dp > 1 else [])]


def dp_size_cause(me: Endpoint, peer: Endpoint, params: Mapping[str, Any]) -> list[Cause]:
    """A DP size that is not the peer's, for which a rank dials too few ranks or too many."""
    sent, leg = params.get("remote_dp_size", 1), "prefill" if me.letter == "P" else "decode"
    return [] if sent == peer.dp else [key_cause("remote_dp_size", sent, leg, f"the peer has {peer.dp}")]


# What raises on the peer's TP size.
READS_SIZE = (
    "peer_tp", "read_guard", "read_map", "write_map", "write_map_error", "unknown_tp_map", "unknown_tp_guard", "states",
    "unknown_tp_states_read", "unknown_tp_states_write",
)  # fmt: skip
# What says there what a size that the leg does not give counts as, if it is not the rank map.
UNKNOWN_SIZE = {
    "read_guard": "unknown_tp_guard",
    "unknown_tp_states_read": "unknown_tp_states_read",
    "unknown_tp_states_write": "unknown_tp_states_write",
}


def crash_causes(record: Record, event: Event, raised: Raised) -> list[Cause]:
    """What ended an engine: a planned fault, the policy that made an error its end, or what was sent to it."""
    if raised.fault:
        return [fault_cause(raised.fault)]
    prefill, decode = record.setup.prefill, record.setup.decode
    side, me = ("prefill", prefill) if event.actor[0] == "P" else ("decode", decode)
    if raised.error == "TimeoutError":
        return [Cause(f"executor_timeout_s = {me.side.executor_timeout_s}: vLLM's executor gives up on a step that long")]
    compared = raised.policy == "read_guard" and raised.error == "ValueError"  # blocks and contents, and not only TP sizes
    causes = [*(unlike_caches(record) if compared else []), *([policy_cause(me.release, raised.policy)] if raised.policy else [])]
    if raised.policy in READS_SIZE and event.request >= 0:
        causes += misread(record, side, event.request, unknown=UNKNOWN_SIZE.get(raised.policy, "unknown_tp_map"))
    return causes or fired_at(record, "params")


MODEL_HEADS = Cause("the rank map counts the heads of the model as a whole, and some layers have others")


def unlike_caches(record: Record) -> list[Cause]:
    """In what the caches of the two sides differ; few releases compare them."""
    here, there = record.setup.prefill.shape, record.setup.decode.shape
    alike = here.memory == there.memory
    pairs = [
        ("blocks hold", f"{here.block_size} tokens", f"{there.block_size} tokens"),
        ("KV is", here.kv_dtype, there.kv_dtype),
        *([] if alike else [("caches are", f"{here.layout} {here.order}", f"{there.layout} {there.order}")]),
    ]
    return [Cause(f"prefill's {what} {mine}, decode's {theirs}") for what, mine, theirs in pairs if mine != theirs]


def failure_causes(record: Record, event: Event) -> list[Cause]:
    """Why a batch failed: a planned fault, a peer that is gone, a queue without room, or addresses that don't fit."""
    side, me, peer = initiator(record)
    fields = event.fields
    causes: list[Cause] = []
    assert isinstance(fields, Failed | Raised)
    if isinstance(fields, Failed) and fields.source == "planned":
        causes = fired_at(record, "transfer")
    elif isinstance(fields, Failed) and fields.source == "queue":
        waits = record.mode == "read" and me.release.sq_retry == "none"
        causes = [policy_cause(me.release, "sq_retry") if waits else Cause(QUEUE.format(record.setup.scenario.rdma))]
    elif isinstance(fields, Raised) and fields.error == "KeyError":  # no session to a DP rank that it never dialled
        causes = dp_size_cause(me, peer, record.leg(side, event.request)) or fired_at(record, "params")
    elif isinstance(fields, Raised) or fields.source == "bounds":
        field = (fields.policy or "write_pairing") if isinstance(fields, Raised) else "write_plan"
        mixed = [MODEL_HEADS] if record.geometry.mixed and record.mode == "write" else []
        named = (
            [policy_cause(me.release, field)] if record.mode == "write" or (isinstance(fields, Raised) and fields.policy) else []
        )
        unknown = UNKNOWN_SIZE.get(field, "unknown_tp_map")
        sizes = misread(record, side, event.request, unknown=unknown)
        causes = [*unlike_caches(record), *named, *mixed, *sizes]
    if record.mode == "read" and me.release.read_failure == "garbage":
        causes.append(policy_cause(me.release, "read_failure"))
    return causes


QUEUE = "a send queue of {0.sq_depth} work requests on {0.queue_pairs} queue pairs has no room for the batch"


def fired_at(record: Record, *points: str) -> list[Cause]:
    """Planned faults that fired at some points; at all without."""
    fired = [fired for _, fired in record.history.having(FaultActed, "fault_fired") if not points or fired.point in points]
    return [fault_cause(fault) for fault in dict.fromkeys(fault.fault for fault in fired)]


# The event of a message that leaves.
_LEAVES = {
    "remote_blocks": "blocks_ready_sent",
    "write_done": "write_done_sent",
    "write_failed": "write_failed_sent",
    "release": "release_sent",
}
_LOSES = ("drop-notice", "delay-notice", "reorder-notice", "misroute-notice", "poison-notice")
_DEAFENS = ("late-rank", "restart-rank", "stall-rank", "partition")


def aimed(record: Record, message: str, ranks: list[str]) -> list[Cause]:
    """Planned faults that acted and can have kept a message from some ranks that never heard it, on its way or at its end."""
    hit = {
        fired.fault
        for event, fired in record.history.having(FaultActed, "fault_fired")
        if fired.point == "notice" and (not event.peer or event.peer in ranks)
    }
    ports = {fields.port for _, fields in record.history.having(Sent, _LEAVES[message])}
    addressed = {event.actor for event, fields in record.history.having(Listener, "bound") if fields.port in ports}
    return [
        fault_cause(str(fault))
        for fault in acted(record)
        if isinstance(fault, EventFault)
        and (
            (fault.kind in _LOSES and fault.target == message and str(fault) in hit)
            or (fault.kind in _DEAFENS and fault.target in ranks and fault.target in addressed)
        )
    ]


def acted(record: Record) -> list[Fault]:
    """Planned faults that changed something."""
    return [fault for fault, fired in zip(record.setup.faults, record.fired, strict=True) if fired]


def changed(record: Record, *keys: str, leg: str = "decode") -> list[Cause]:
    """Planned faults that changed one of some keys of a leg."""
    return [
        fault_cause(str(fault))
        for fault in acted(record)
        if isinstance(fault, KeyFault) and fault.leg in (None, leg) and {fault.key, fault.new} & {*keys}
    ]


def of_ranks(record: Record, missing: list[str]) -> list[Course]:
    """The requests that some prefill ranks hold data of."""
    prefill = record.setup.prefill
    of = {dp for dp in range(prefill.all_dp) for tp in range(prefill.tp) if prefill.rank_name(dp, tp) in missing}
    return [course for course in record.courses if course.prefill_dp in of and not course.aborted]


# What decode's scheduler finds prefill's ranks by.
_ADDRESS = ("remote_host", "remote_handshake_port", "remote_notify_port", "remote_dp_rank", "remote_hosts", "remote_dp_size_local")


def unreleased(record: Record, missing: list[str]) -> list[Cause]:
    """Why prefill ranks got no release: it was lost, decode sent none, or sent it elsewhere.

    Elsewhere is by the ranks that decode means, by the port, or by the size that both hang on.
    """
    decode, prefill = record.setup.decode, record.setup.prefill
    release, mine = decode.release, of_ranks(record, missing)
    if faults := aimed(record, "release", missing):
        return faults
    sent = {event.request for event in record.history.events("release_sent")}
    if record.sees("release_sent") and not any(course.index in sent for course in mine):
        stopped = {f"stop-at-prefill:{course.index}" for course in mine}
        return [
            *changed(record, "do_remote_prefill", "remote_block_ids", "remote_engine_id", "transfer_id"),
            *changed(record, "do_remote_decode", leg="prefill"),
            *(cause for cause in map(fault_cause, map(str, acted(record))) if cause.text in stopped),
        ]
    if keys := changed(record, *_ADDRESS, "transfer_id") or changed(record, "transfer_id", leg="prefill"):
        return keys
    sizes = misread(record, "decode", mine[0].index if mine else 0)
    causes: list[Cause] = []
    if any(course.prefill_dp for course in mine):
        fields = [*(["read_dp"] if release.read_dp == "zero" else []), *(["release_port"] if release.release_port == "tp" else [])]
        causes = [policy_cause(release, field) for field in fields]
    of_sources = sizes and release.release_to == "sources"  # what it read of, it took from the size
    if not causes and prefill.tp != decode.tp and release.release_to != "holders" and not of_sources:
        causes = [policy_cause(release, "release_to")]
    sized = release.release_to != "own_rank" or (release.release_port != "tp" and prefill.dp > 1)
    return [*causes, *(sizes if sized else [])]


def unannounced(record: Record, missing: list[str]) -> list[Cause]:
    """Why decode's announcement did not come: nobody made it, it was lost, or it went elsewhere."""
    prefill, decode, mine = record.setup.prefill, record.setup.decode, of_ranks(record, missing)
    if faults := aimed(record, "remote_blocks", missing):
        return faults
    numbers = {course.index for course in mine}
    routed = [
        fault_cause(fired.fault)
        for event, fired in record.history.having(FaultActed, "fault_fired")
        if fired.point == "router"
        and event.request in numbers
        and fired.fault.startswith(("wrong-dp", "fail-leg:decode", "delay-leg:decode"))
    ]
    up = {engine.dp for engine in record.side("P") if engine.started}
    if not (mine := [course for course in mine if course.prefill_dp in up]):
        return [Cause("their engine never started")]
    sent = {event.request for event in record.history.events("blocks_ready_sent")}
    if record.sees("blocks_ready_sent") and (silent := [course for course in mine if course.index not in sent]):
        if any(_shut(record, course) for course in silent):
            return [*dict.fromkeys(routed), policy_cause(decode.release, "blocks_ready_gate")]
        return list(dict.fromkeys(routed)) or changed(record, "do_remote_prefill", "transfer_id")
    if keys := changed(record, *_ADDRESS):
        return keys
    for course in mine:
        dp = record.leg("decode", course.index).get("remote_dp_rank", 0)
        if dp != (went := prefill.own_dp(course.prefill_dp)):
            return routed[:1] or [key_cause("remote_dp_rank", dp, "decode", f"prefill's leg went to {went}")]
    width = misread(record, "decode", mine[0].index, "blocks_ready_width", "blocks_ready_width")
    return list(dict.fromkeys([policy_cause(decode.release, "blocks_ready_width"), *width])) if width else []


def _shut(record: Record, course: Course) -> bool:
    """Whether decode's scheduler came to announce a request, and its gate kept it from doing so."""
    decode, params = record.setup.decode, record.leg("decode", course.index)
    if not course.admitted or course.request.external_zero or not params.get("do_remote_prefill"):
        return False
    return not decode.release.call("blocks_ready_gate")(params, decode.own_dp(course.decode_dp), decode.own_pod(course.decode_dp))


def untold_causes(record: Record, sets: Sets, untold: list[str]) -> list[Cause]:
    """Why decode ranks wait: the message was lost, prefill gave up in silence, or nobody means them."""
    prefill, decode = record.setup.prefill, record.setup.decode
    deaf = [name for name in _prefill_ranks(record) if name not in (sets.prefill_told or ())]
    lost = [(message, untold) for message in ("write_done", "write_failed")] + [("remote_blocks", deaf)]
    causes = list(dict.fromkeys(cause for message, ranks in lost for cause in aimed(record, message, ranks)))
    heard_of = decode.release.write_failed_heard == "understood"  # else to be told would change nothing
    if record.history.events("expired") and prefill.release.expiry == "silent" and heard_of:
        causes.append(policy_cause(prefill.release, "expiry"))
    failed = record.history.events("task_failed", "transfer_failed")
    if not (causes or failed) and record.history.events("write_done_sent") and not set(untold) <= set(sets.written):
        params = record.leg("prefill")
        unmapped = [policy_cause(prefill.release, "write_map")] if prefill.tp != decode.tp else []
        causes += misread(record, "prefill", 0) or dp_size_cause(prefill, decode, params) or unmapped
    if decode.release.decode_timer == "none" and not any(engine.crashed for engine in record.side("D")):
        causes.append(policy_cause(decode.release, "decode_timer"))
    return causes


def _prefill_ranks(record: Record) -> list[str]:
    """The ranks that some request was to be prefilled on."""
    prefill = record.setup.prefill
    return [prefill.rank_name(dp, tp) for dp in sorted({c.prefill_dp for c in record.courses}) for tp in range(prefill.tp)]


def content_causes(record: Record, wrong: list[str]) -> list[Cause]:
    """Why decode ranks hold what is not theirs."""
    decode = record.setup.decode
    writers: dict[str, set[str]] = defaultdict(set)
    for _, _, source, rank, _, _, _ in record.history.rows_of("wrote", "read"):
        writers[rank].add(source)
    causes = unlike_caches(record)
    if shared := [name for name in wrong if len(writers[name]) > 1]:
        causes.append(Cause(f"several ranks moved into {span(shared)}; where they meet, the last one wins"))
    if record.geometry.mixed and record.mode == "write":
        causes.append(MODEL_HEADS)
    windows = record.mode == "read" and any(table.window for table in decode.tables)
    unlike = len({_block_count(record, side) for side in ("prefill", "decode")}) > 1
    if windows and unlike:
        causes.append(policy_cause(decode.release, "windows"))
    elif record.mode == "read" and (unlike or any(course.request.suffix_only for course in record.courses)):
        causes.append(policy_cause(decode.release, "read_pairing"))
    elif record.mode == "write" and not record.setup.prefill.shape.same_blocks(decode.shape):
        causes.append(policy_cause(record.setup.prefill.release, "write_plan"))
    return causes


def _block_count(record: Record, side: str) -> int:
    endpoint = record.setup.prefill if side == "prefill" else record.setup.decode
    return endpoint.rows(record.setup.requests[0].prompt_tokens)[0][1]
