"""From a finished run to its numbers: coverage at go and at the end, outcome of each request, the sets that must agree."""

from __future__ import annotations

import math

import msgspec

from kvcover.sim.cache.ledger import Count
from kvcover.sim.errors import PeerRefusal
from kvcover.sim.kernel.events import ASTRAY
from kvcover.sim.moriio.transfer import Transfer
from kvcover.sim.releases.policies import map_fan
from kvcover.sim.results.checkers import Plan
from kvcover.sim.results.result import Percentiles, RankCoverage, Sets, worst
from kvcover.sim.world import World


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """Cells of one decode rank over all its requests, at go and at the end."""

    at_go: Count
    at_end: Count


def end_count(world: World, transfer: Transfer, tp: int) -> Count:
    """What rank `tp` holds of a request when the run is over; all missing if decode never allocated blocks."""
    if not transfer.needs:
        decode, request = world.setup.decode, transfer.request
        blocks = [request.blocks - skipped for skipped, _ in decode.rows(request.prompt_tokens)]
        return Count(0, 0, sum(g.geometry.layers * g.shape.planes * g.shape.heads * blocks[g.table] for g in decode.groups))
    return world.decodes[transfer.decode_dp].ledger.count_all(tp, transfer.index, transfer.needs[tp])


def request_tallies(world: World, transfer: Transfer) -> list[Tally]:
    """One tally for each TP rank of the decode DP rank that has the request."""
    tallies = []
    for tp in range(world.setup.decode.tp):
        at_end = end_count(world, transfer, tp)
        tallies.append(Tally(at_go=transfer.at_go[tp] if transfer.went else at_end, at_end=at_end))
    return tallies


def request_outcome(world: World, transfer: Transfer, tallies: list[Tally]) -> str:
    """The worst that can be said of one request."""
    prefill = world.prefills[transfer.prefill_dp]
    decode = world.decodes[transfer.decode_dp]
    said = ["ok"]
    if transfer.bad_end:
        said.append(transfer.bad_end)
    if transfer.went and any(tally.at_go.covered < tally.at_go.cells for tally in tallies):
        said.append("corrupt")
    if prefill.crashed or decode.crashed:
        said.append("crash")
    if not transfer.ended:
        said.append("hang")
    if transfer.index in prefill.pool.held or (transfer.ended and transfer.index in decode.pool.held):
        said.append("leak")
    if transfer.timer_fired and transfer.bad_end != "failed":
        said.append("degraded")
    return worst(said)


def rank_coverages(world: World, tallies: list[list[Tally]]) -> list[RankCoverage]:
    """Coverage of every decode rank, in (dp, tp) order; `tallies` are those of the requests, in order."""
    decode = world.setup.decode
    told = {(event.actor, event.request) for event in world.history.events("told")}
    ranks = []
    for dp in range(decode.dp):
        mine = [t for t in world.transfers if t.decode_dp == dp]
        # In READ a rank that reads nothing of a request has nothing to be told of it; a recurrent state is always read.
        always = world.mode == "write" or world.geometry.has_states
        asked = [t for t in mine if always or t.bad_end != "recomputed"]
        for tp in range(decode.tp):
            total = end = Count(0, 0, 0)
            for transfer in mine:
                total += tallies[transfer.index][tp].at_go
                end += tallies[transfer.index][tp].at_end
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
                )
            )
    return ranks


def sets_of(world: World, ranks: list[RankCoverage]) -> Sets:
    """Names of ranks, in (dp, tp) order."""
    decode, prefill, history = world.setup.decode, world.setup.prefill, world.history
    landed = {peer for _, _, _, peer, _, _, fields in history.rows_of("wrote", "read") if fields is not ASTRAY}
    heard = {e.actor for e in history.events("blocks_ready" if world.mode == "write" else "release")}
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


def transfer_times(world: World) -> list[int]:
    """From the first post to the last byte before go, of each request that went and was transferred (ns)."""
    return [t.landed_ns - t.posted_ns for t in world.transfers if t.went and 0 <= t.posted_ns <= t.landed_ns]


def times_to_go(world: World) -> list[int]:
    """From the router's first leg to go, of each request that went (ns)."""
    return [t.go_ns - t.started_ns for t in world.transfers if t.went]


def plan_of(world: World) -> Plan:
    """What a correct connector would have to do with the scenario."""
    prefill, decode = world.setup.prefill, world.setup.decode
    initiator, peer = (prefill, decode) if world.mode == "write" else (decode, prefill)
    intended = {}
    for tp in range(initiator.tp):
        tps = intended_peers(world, tp)
        reached = tuple(peer.rank_name(dp, t) for dp in range(peer.dp) for t in tps)
        for dp in range(initiator.dp):
            if tps:
                intended[initiator.rank_name(dp, tp)] = reached
    return Plan(
        mode=world.mode,
        needed={t.index: tuple(decode.rank_name(t.decode_dp, tp) for tp in range(decode.tp)) for t in world.transfers if _asks(t)},
        holders={t.index: tuple(prefill.rank_name(t.prefill_dp, tp) for tp in range(prefill.tp)) for t in world.transfers},
        intended=intended,
    )


def _asks(transfer: Transfer) -> bool:
    """Whether decode asks prefill for any block of the request."""
    request = transfer.request
    return not (request.suffix_only and request.decode_hit_blocks >= request.blocks)


def intended_peers(world: World, tp: int) -> list[int]:
    """TP ranks of the peer that a correct connector would reach from rank `tp` of the side that moves the data.

    In READ every prefill rank whose cache holds the heads will do, with MLA any of its group.
    """
    own, peer = world.setup.prefill.tp, world.setup.decode.tp
    try:
        if world.mode == "write":
            return [target.tp_rank for target in map_fan(tp, own, peer, world.geometry)]
        if world.geometry.mla:
            return list(range(own))
        mine = set(world.geometry.heads_of(tp, peer))
        return [p for p in range(own) if mine & set(world.geometry.heads_of(p, own))]
    except PeerRefusal:
        return []
