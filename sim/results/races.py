"""Findings of races: both events, the edge that is missing, and the policy that would be it."""

from __future__ import annotations

from collections import defaultdict

from kvcover.sim.results.chains import Cause, Found, Lever, policy_cause, span
from kvcover.sim.results.checkers import Plan
from kvcover.sim.results.order import MISSING, Missing, Race, What, races
from kvcover.sim.results.record import Record

_WORDS: dict[What, str] = {
    "use": "decode uses blocks of request {whose} that {pairs} moved: {missing}",
    "free": "prefill frees blocks of request {whose} that {pairs} moved: {missing}",
    "reuse": "decode gives back blocks of request {whose} that {pairs} moved, for others to take: {missing}",
}
# The policies that decide an edge, each with its side and with what it must be for the edge to be there.
_EDGES: dict[tuple[str, What, Missing], tuple[tuple[str, str, str], ...]] = {
    ("read", "use", "barrier"): (("decode", "read_barrier", "step"),),
    ("read", "free", "queue"): (("decode", "read_done", "all_layers"),),
    ("read", "free", "count"): (("prefill", "acks", "fan_in"), ("decode", "release_acks", "decode_size")),
    ("read", "reuse", "wait"): (("decode", "external_zero_read", "nothing"),),
    ("write", "use", "count"): (("decode", "completion", "all_writers"), ("prefill", "write_done_to", "targets")),
    ("write", "free", "wait"): (("prefill", "write_wait", "all_statuses"),),
    ("write", "reuse", "wait"): (("prefill", "write_wait", "all_statuses"),),
}


def find_races(record: Record, plan: Plan) -> list[Found]:
    """One finding for each missing edge."""
    grouped: dict[tuple[What, Missing], list[Race]] = defaultdict(list)
    for race in races(record.history, plan):
        grouped[race.what, race.missing].append(race)
    return [_finding(record, found) for found in grouped.values()]


def _finding(record: Record, found: list[Race]) -> Found:
    first = found[0]
    sources, targets = span(dict.fromkeys(r.source for r in found)), span(dict.fromkeys(r.target for r in found))
    whose = ", ".join(map(str, sorted({race.request for race in found})))
    text = _WORDS[first.what].format(whose=whose, pairs=f"{sources} → {targets}", missing=MISSING[first.missing])
    causes = [Cause(f"nothing orders {first}")]
    levers: list[tuple[str, str]] = []
    for side, field, better in _EDGES.get((record.mode, first.what, first.missing), ()):
        release = (record.setup.prefill if side == "prefill" else record.setup.decode).release
        if getattr(release, field) != better:
            levers.append((field, better))
            causes.append(policy_cause(release, field))
    if levers:
        would = " and ".join(f"{field} = {better}" for field, better in levers)
        causes.append(Cause(f"{would} would order it", tuple(Lever("policy", field) for field, _ in levers)))
    return Found(kind="race", text=text, causes=causes)
