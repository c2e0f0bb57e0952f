"""Which keys of its leg each side read in a real run, on which line of the connector, and what was sent and never read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvcover.sim.errors import PeerRefusal
from kvcover.sim.releases.records import ConnectorRelease
from kvcover.sim.results.chains import Cause, Lever, policy_cause, span
from kvcover.sim.results.record import KeyRead, LegReads, Record

SIZES = ("remote_tp_size", "tp_size")
"""Keys that may say the peer's TP size, the one that is meant first."""


class LegKeys(msgspec.Struct, frozen=True):
    """The reads of the legs of some requests, which were all alike. `copied`: copies of them may have been read unseen."""

    side: str
    requests: list[int]
    read: list[KeyRead]
    never_read: dict[str, Any]
    copied: list[str]


def tell_keys(record: Record) -> list[LegKeys]:
    """What was read of every leg, those alike together; empty where the tier didn't look."""
    groups: dict[tuple[str, LegReads, str], LegKeys] = {}
    for (request, side), reads in sorted(record.reads.items(), key=lambda item: (item[0][1] != "prefill", item[0][0])):
        unread = never_read(record.leg(side, request), reads)
        group = groups.setdefault((side, reads, repr(unread)), LegKeys(side, [], list(reads.reads), unread, list(reads.copied)))
        group.requests.append(request)
    return list(groups.values())


def never_read(sent: Mapping[str, Any], reads: LegReads) -> dict[str, Any]:
    """What was sent and nobody read."""
    read = {each.key for each in reads.reads}
    return {key: value for key, value in sent.items() if key not in read}


def in_words(told: LegKeys) -> list[str]:
    """Two lines at most: what was read and is absent, with the default that was taken, and what was sent and never read."""
    whose = told.side + (f", request {span(map(str, told.requests))}" if told.requests != [0] else "")
    absent = dict.fromkeys(absence(each) for each in told.read if each.absent)
    lines = [f"{whose} read what was not sent: {'; '.join(absent)}"] if absent else []
    if told.never_read:
        copies = f" (unless in the copies made: {', '.join(told.copied)})" if told.copied else ""
        unread = ", ".join(f"`{key}` = {value!r}" for key, value in told.never_read.items())
        lines.append(f"{whose} never read what was sent{copies}: {unread}")
    return lines


def all_in_words(told: LegKeys) -> list[str]:
    """As `in_words`, and which line read each key that was there."""
    there: dict[str, list[str]] = {}
    for each in told.read:
        if not each.absent:
            there.setdefault(each.key, []).append(each.place)
    places = "; ".join(f"`{key}` ({', '.join(dict.fromkeys(found))})" for key, found in there.items())
    return [*in_words(told), *([f"{told.side} read: {places}"] if there else [])]


def absence(read: KeyRead) -> str:
    """A key that was read and not there, and what was taken instead."""
    taken = f", default {read.default}" if read.default not in ("", "None") else ", an error" if read.how == "[]" else ""
    return f"`{read.key}` ({read.place}), absent{taken}"


_UNKNOWN = {
    "refused": "refuses an unknown size",
    "zero_is_own": "takes the peer to be as large as itself",
    "non_positive_is_own": "takes the peer to be as large as itself",
    "remote_tp_size_or_tp_size_or_own": "takes the peer to be as large as itself",
}


def peer_tp_causes(
    release: ConnectorRelease, params: Mapping[str, Any], leg: str, field: str = "peer_tp", unknown: str = "unknown_tp_map"
) -> list[Cause]:
    """Why the peer's TP size was read from `leg` as it was; `unknown` is the field that says what a missing one counts as."""
    policy = getattr(release, field)
    sent, short = params.get("remote_tp_size"), params.get("tp_size")
    reading, long_key, short_key = Lever("policy", field), Lever("key", "remote_tp_size", leg), Lever("key", "tp_size", leg)
    if policy == "tp_size_or_1":
        if "tp_size" in params:
            return [Cause(f"release {release.name} reads `tp_size`, which was sent as {short!r}", (short_key, reading))]
        causes = [Cause(f"release {release.name} reads `tp_size`, which was not sent, default 1", (short_key, reading))]
        if "remote_tp_size" in params:
            causes.append(Cause(f"`remote_tp_size` = {sent!r} was sent and not read", (reading,)))
        return causes
    if policy in ("true_size", "own_size"):
        return [policy_cause(release, field)]
    if sent:
        return [Cause(f"`remote_tp_size` = {sent!r} was sent", (long_key, reading))]
    if short:
        return [Cause(f"`remote_tp_size` was not sent, `tp_size` = {short!r} was", (long_key, short_key, reading))]
    text = f"neither `remote_tp_size` nor `tp_size` was sent; release {release.name} {_UNKNOWN[getattr(release, unknown)]}"
    levers = dict.fromkeys((long_key, short_key, reading, Lever("policy", unknown)))
    return [Cause(text, tuple(levers))]


def misread(record: Record, side: str, request: int, field: str = "peer_tp", unknown: str = "unknown_tp_map") -> list[Cause]:
    """Why `side` took the peer's TP size for another than it is; no cause if it didn't. `field` and `unknown` decide that.

    Where the reads of the leg were seen, they say it, and not the release.
    """
    setup, params = record.setup, record.leg(side, request)
    me, peer = (setup.prefill, setup.decode) if side == "prefill" else (setup.decode, setup.prefill)
    try:
        read = me.release.call(field)(params, me.tp, peer.tp)
    except PeerRefusal:
        read = None
    wrong = not (type(read) is int and read == peer.tp)
    reads = record.reads.get((max(request, 0), side))
    if field == "peer_tp" and reads is not None:
        return _seen_misread(side, params, peer.tp, reads, wrong)
    return peer_tp_causes(me.release, params, side, field, unknown) if wrong else []


def _seen_misread(side: str, leg: Mapping[str, Any], size: int, reads: LegReads, unknown_is_wrong: bool) -> list[Cause]:
    """Why the leg made a side take the peer's TP `size` for another. Each function of the connector reads it by itself.

    What a function makes of a leg that names no size isn't seen, unless it is the default of the read.
    """
    functions: dict[str, list[KeyRead]] = {}
    for read in reads.reads:
        if read.key in SIZES and read.how != "in":
            functions.setdefault(read.function, []).append(read)
    for found in functions.values():
        there = next((read for read in found if not read.absent and leg.get(read.key)), None)
        defaults = [read.default for read in found if read.absent and read.default not in ("", "None")]
        right = leg[there.key] == size if there else defaults[-1] == str(size) if defaults else not unknown_is_wrong
        if not right:
            return [*_reads_as_causes(side, leg, found, there), *_unread_causes(side, leg, reads)]
    return []


def _reads_as_causes(side: str, leg: Mapping[str, Any], found: list[KeyRead], there: KeyRead | None) -> list[Cause]:
    told = [there] if there else list({read.key: read for read in found}.values())
    return [
        Cause(
            f"{side} read {absence(read)}" if read.absent else f"{side} read `{read.key}` = {leg.get(read.key)!r} ({read.place})",
            (Lever("key", read.key, side),),
        )
        for read in told
    ]


def _unread_causes(side: str, leg: Mapping[str, Any], reads: LegReads) -> list[Cause]:
    unless = f", unless in the copies made: {', '.join(reads.copied)}" if reads.copied else ""
    unread = never_read(leg, reads)
    return [Cause(f"`{key}` = {unread[key]!r} was sent to {side} and never read{unless}") for key in SIZES if key in unread]
