"""From a finished run to its numbers: coverage at go and at the end, outcome of each request, the sets that must agree."""

from __future__ import annotations

import math

from kvcover.sim.cache.ledger import Count
from kvcover.sim.errors import PeerRefusal
from kvcover.sim.kernel.events import ASTRAY
from kvcover.sim.releases.maps import map_fan
from kvcover.sim.results.checkers import Plan
from kvcover.sim.results.record import Course, Record
from kvcover.sim.results.result import Percentiles, RankCoverage, Sets, worst
from kvcover.sim.scenario.setup import Setup


def request_outcome(course: Course) -> str:
    """The worst that can be said of one request."""
    said = ["ok"]
    if course.bad_end:
        said.append(course.bad_end)
    if course.at_go is not None and any(count.covered < count.cells for count in course.at_go):
        said.append("corrupt")
    if course.lost:
        said.append("crash")
    if not course.ended:
        said.append("hang")
    if course.held:
        said.append("leak")
    if course.late and course.bad_end != "failed":
        said.append("degraded")
    return worst(said)


def rank_coverages(record: Record) -> list[RankCoverage]:
    """Coverage of every decode rank, in (dp, tp) order."""
    decode = record.setup.decode
    told = {(event.actor, event.request) for event in record.history.events("told")}
    ranks = []
    for dp in range(decode.all_dp):
        mine = [course for course in record.courses if course.decode_dp == dp]
        # In READ a rank that reads nothing of a request has nothing to be told of it; a recurrent state is always read.
        always = record.mode == "write" or record.geometry.has_states
        asked = [t for t in mine if always or t.bad_end != "recomputed"]
        for tp in range(decode.tp):
            total = end = Count(0, 0, 0)
            for course in mine:
                total += course.cells[tp]
                end += course.at_end[tp]
            name = decode.rank_name(dp, tp)
            ranks.append(
                RankCoverage(
                    dp=dp,
                    tp=tp,
                    coverage=total.covered / total.cells if mine else None,
                    wrong=total.wrong / total.cells if mine else None,
                    missing=total.missing / total.cells if mine else None,
                    told=bool(asked) and all((name, t.index) in told for t in asked) if mine else None,
                    coverage_end=end.covered / end.cells if mine else None,
                    by_layer=_by_layer(mine, tp),
                )
            )
    return ranks


def _by_layer(courses: list[Course], tp: int) -> list[float | None] | None:
    """Coverage of each layer of one decode rank, over its requests; None if it had none, or it is not known of all."""
    known = [course.by_layer[tp] for course in courses if course.by_layer is not None]
    if not courses or len(known) < len(courses):
        return None
    counts = known[0] if len(known) == 1 else [sum(layer, Count(0, 0, 0)) for layer in zip(*known, strict=True)]
    return [count.covered / count.cells if count.cells else None for count in counts]


def sets_of(record: Record, ranks: list[RankCoverage]) -> Sets:
    """Names of ranks, in (dp, tp) order."""
    decode, prefill, history = record.setup.decode, record.setup.prefill, record.history
    landed = {peer for _, _, _, peer, _, _, fields in history.rows_of("wrote", "read") if fields is not ASTRAY}
    heard = {e.actor for e in history.events("blocks_ready" if record.mode == "write" else "release")}
    released = {e.actor for e in history.events("released")}
    return Sets(
        needed=[decode.rank_name(r.dp, r.tp) for r in ranks if r.coverage is not None],
        written=[name for name in decode.rank_names() if name in landed],
        told=[decode.rank_name(r.dp, r.tp) for r in ranks if r.told],
        prefill_told=[name for name in prefill.rank_names() if name in heard],
        prefill_released=[name for name in prefill.rank_names() if name in released],
    )


def percentiles(values_ns: list[int]) -> Percentiles | None:
    """Nearest-rank percentiles of some times, in ms; None when there are none."""
    if not values_ns:
        return None
    ordered = sorted(values_ns)

    def at(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)] / 1e6

    return Percentiles(p50=at(0.5), p90=at(0.9), p99=at(0.99), max=ordered[-1] / 1e6)


def transfer_times(record: Record) -> list[int]:
    """From the first post to the last byte before go, of each request that went and was transferred (ns)."""
    return [c.landed_ns - c.posted_ns for c in record.courses if c.at_go is not None and 0 <= c.posted_ns <= c.landed_ns]


def times_to_go(record: Record) -> list[int]:
    """From the router's first leg to go, of each request that went (ns)."""
    return [course.go_ns - course.started_ns for course in record.courses if course.at_go is not None]


def plan_of(record: Record) -> Plan:
    """What a correct connector would have to do with the scenario."""
    prefill, decode, setup = record.setup.prefill, record.setup.decode, record.setup
    initiator, peer = (prefill, decode) if record.mode == "write" else (decode, prefill)
    intended = {}
    for tp in range(initiator.tp):
        tps = intended_peers(setup, tp)
        reached = tuple(peer.rank_name(dp, t) for dp in range(peer.all_dp) for t in tps)
        for dp in range(initiator.all_dp):
            if tps:
                intended[initiator.rank_name(dp, tp)] = reached
    users = {c.index: tuple(decode.rank_name(c.decode_dp, tp) for tp in range(decode.tp)) for c in record.courses}
    return Plan(
        mode=record.mode,
        needed={c.index: users[c.index] for c in record.courses if _asks(c)},
        holders={c.index: tuple(prefill.rank_name(c.prefill_dp, tp) for tp in range(prefill.tp)) for c in record.courses},
        users=users,
        intended=intended,
        observed=record.observed,
        one_queue=setup.scenario.rdma.queue_pairs == 1,
    )


def _asks(course: Course) -> bool:
    """Whether decode asks prefill for any block of the request."""
    request = course.request
    return not (request.suffix_only and request.decode_hit_blocks >= request.blocks)


def intended_peers(setup: Setup, tp: int) -> list[int]:
    """TP ranks of the peer that a correct connector would reach from rank `tp` of the side that moves the data.

    In READ every prefill rank whose cache holds the heads will do, with MLA any of its group.
    """
    own, peer = setup.prefill.tp, setup.decode.tp
    try:
        if setup.scenario.mode == "write":
            return [target.tp_rank for target in map_fan(tp, own, peer, setup.geometry)]
        if setup.geometry.mla:
            return list(range(own))
        mine = set(setup.geometry.heads_of(tp, peer))
        return [p for p in range(own) if mine & set(setup.geometry.heads_of(p, own))]
    except PeerRefusal:
        return []
