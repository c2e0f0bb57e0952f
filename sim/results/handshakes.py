"""Findings about ports and handshakes: who could not bind, who dialled whom, and who could not map itself onto the peer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from kvcover.sim.kernel.events import Dial, Listener
from kvcover.sim.results.blame import (
    dial_causes,
    initiator,
)
from kvcover.sim.results.chains import Cause, Found, policy_cause, span
from kvcover.sim.results.keys import misread
from kvcover.sim.results.outcome import intended_peers
from kvcover.sim.results.record import Record
from kvcover.sim.scenario.endpoint import Endpoint


def wrong_dials(record: Record) -> list[Found]:
    """Handshakes that reached another rank than the one whose cells are meant."""
    _, _, peer = initiator(record)
    wrong: dict[str, list[tuple[str, str]]] = defaultdict(list)
    requests: dict[str, int] = {}
    all_meant: dict[str, bool | None] = {}
    peers = record.ranks()
    ports: dict[str, int] = {}
    for event, dial in record.history.having(Dial, "dialled"):
        (_, own_tp), (reached, reached_tp) = peers[event.actor], peers[event.peer]
        intended = set(intended_peers(record.setup, own_tp))
        meant_dp = reached.dp if dial.dp is None else _of_all(record, peer, event.request, reached.dp) + dial.dp
        if not intended or (reached.dp == meant_dp and reached_tp in intended):
            continue
        meant = span(peer.rank_name(meant_dp, tp) for tp in sorted(intended))
        wrong[event.peer].append((event.actor, meant))
        requests[event.peer] = event.request
        all_meant[event.peer] = _meant(dial, intended, all_meant.get(event.peer, True))
        ports.setdefault(event.peer, dial.port)
    findings = []
    for reached_name, pairs in wrong.items():
        actors = span(dict.fromkeys(actor for actor, _ in pairs))
        meant = span(dict.fromkeys(meant for _, meant in pairs))
        elsewhere = peers[reached_name][0].me is not peer
        shared = Cause("both engines have ports of one range on one host")
        causes = [shared] if elsewhere else dial_causes(record, requests[reached_name], all_meant[reached_name])
        findings.append(
            Found(
                kind="wrong-peer",
                text=f"{actors} dialled port {ports[reached_name]}, bound by {reached_name}, not {meant}",
                causes=causes,
            )
        )
    return sorted(findings, key=lambda finding: finding.text)


def _of_all(record: Record, peer: Endpoint, request: int, reached_dp: int) -> int:
    """The first DP rank of the instance that a request is to meet; nobody can tell for a handshake of many requests."""
    if request < 0:
        return peer.instance(reached_dp) * peer.dp
    to = record.courses[request].request
    return peer.instance(to.decode_dp if peer is record.setup.decode else to.prefill_dp) * peer.dp


def _meant(dial: Dial, intended: Collection[int], others: bool | None) -> bool | None:
    """Whether this dial, and the `others`, meant a TP rank that is intended; None if nobody can tell."""
    if dial.tp is None or others is None:
        return None
    return others and dial.tp in intended


def dead_dials(record: Record) -> list[Found]:
    """Handshakes to ports that nobody had bound."""
    dead = record.history.having(Dial, "dial_dead")
    if not dead:
        return []
    first = dead[0][0]
    bound_later = {address.port for e, address in record.history.having(Listener, "bound") if e.time_ns > first.time_ns}
    late = all(dial.port in bound_later for _, dial in dead)
    ports = span(dict.fromkeys(f"port {dial.port}" for _, dial in dead))
    effect = "which was bound only later; until then " if late else "which nobody bound; "
    effect += "a rank that dials it can't write" if record.mode == "write" else "the whole step waits for it"
    meant: bool | None = True
    for event, dial in dead:
        meant = _meant(dial, intended_peers(record.setup, record.ranks()[event.actor][1]), meant)
    causes = [] if late else dial_causes(record, first.request, meant)
    return [
        Found(
            kind="dead-port",
            text=f"{span(dict.fromkeys(e.actor for e, _ in dead))} dialled {ports}, {effect}",
            causes=causes,
        )
    ]


def refused_maps(record: Record) -> list[Found]:
    """Ranks that could not map themselves onto the peer."""
    refused = record.history.events("map_refused")
    if not refused:
        return []
    prefill = record.setup.prefill
    return [
        Found(
            kind="map-refused",
            text=f"{span(dict.fromkeys(e.actor for e in refused))} can't map itself onto decode: {refused[0].detail}",
            causes=misread(record, "prefill", refused[0].request) or [policy_cause(prefill.release, "write_map")],
        )
    ]


def bind_failures(record: Record) -> list[Found]:
    """Ranks whose port was taken."""
    findings = []
    for event in record.history.events("bind_failed"):
        release = (record.setup.prefill if event.actor[0] == "P" else record.setup.decode).release
        stages = event.actor == event.peer
        who = f"the second pipeline stage of {event.actor}" if stages else event.actor
        other = "its first stage" if stages else event.peer
        findings.append(
            Found(
                kind="port-taken",
                text=f"{who} could not bind {event.detail}, which {other} has; its engine never starts",
                causes=[policy_cause(release, "ports"), *([Cause("no release counts pipeline stages in it")] if stages else [])],
            )
        )
    return findings
