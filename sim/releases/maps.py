"""Which rank moves what to which rank, who is told of it, and which pairs of sizes a guard lets through."""

from __future__ import annotations

import msgspec

from kvcover.sim.cache.geometry import CacheShape, Geometry, check_slices
from kvcover.sim.errors import PeerRefusal

MOST_RANKS = 65536  # as there are ports
MOST_HEADS = 65536


class Target(msgspec.Struct, frozen=True):
    """What one prefill rank gives to decode rank `tp_rank`: local heads [local, local+count) into slot `remote`.

    `writers` prefill ranks give something to that decode rank, each sends one write-done.
    """

    tp_rank: int
    local: int
    remote: int
    count: int
    writers: int = 1


def floor_rank(rank: int, own: int, peer: int) -> int:
    """The one peer rank of `rank` of `own` ranks among `peer` ranks (vllm#46332)."""
    if peer <= 0:
        raise PeerRefusal("ValueError", f"peer TP size must be positive, not {peer}")
    if peer >= own:
        if peer % own:
            raise PeerRefusal("ValueError", f"peer TP size {peer} is not a multiple of {own}")
        return rank * (peer // own)
    if own % peer:
        raise PeerRefusal("ValueError", f"TP size {own} is not a multiple of the peer's {peer}")
    return rank // (own // peer)


def map_own(rank: int, own: int, peer: int, geometry: Geometry) -> list[Target]:
    return [Target(rank, 0, 0, geometry.heads_per_rank(own))]


def map_floor(rank: int, own: int, peer: int, geometry: Geometry) -> list[Target]:
    return [Target(floor_rank(rank, own, peer), 0, 0, geometry.heads_per_rank(own))]


def _check_pair(a: int, b: int, geometry: Geometry) -> None:
    larger, smaller = max(a, b), min(a, b)
    if smaller <= 0:
        raise PeerRefusal("ValueError", "TP sizes must be positive")
    if larger % smaller:
        raise PeerRefusal("ValueError", f"one of TP sizes {a} and {b} must be a multiple of the other")
    if a != b:
        for size in (a, b):
            geometry.heads_of(0, size)


def map_fan(rank: int, own: int, peer: int, geometry: Geometry) -> list[Target]:
    """Fan out to every peer rank that needs part of ours, or fan in with our neighbours (0.33.0, protocol of WRITE).

    Where several ranks hold the same head or latent, only the first of the group writes it (a `count` of 0 to the others, if
    there are recurrent states, which all of them write).
    """
    _check_pair(own, peer, geometry)
    if peer > MOST_RANKS:
        raise PeerRefusal("MemoryError", f"a map onto {peer} ranks")
    mine = geometry.heads_of(rank, own)
    if peer >= own:
        spread = peer // own
        return [
            Target(t, geometry.heads_of(t, peer).start - mine.start, 0, geometry.heads_per_rank(peer))
            for t in range(rank * spread, (rank + 1) * spread)
        ]
    group = own // peer
    target = rank // group
    starts = [geometry.heads_of(p, own).start for p in range(target * group, (target + 1) * group)]
    first = starts.index(mine.start) == rank - target * group
    if not first and not geometry.has_states:
        return []
    slot = mine.start - geometry.heads_of(target, peer).start
    writers = group if geometry.has_states else len(set(starts))
    return [Target(target, 0, slot, len(mine) if first else 0, writers)]


def read_gather(rank: int, own: int, peer: int, geometry: Geometry) -> list[Target]:
    """The mirror of `map_fan` seen from decode: every prefill rank that holds a part first. Only in `reference`.

    In the result `local` is the slot of the decode rank and `remote` the head slot at the prefill rank.
    """
    _check_pair(own, peer, geometry)
    sources = range(rank * peer // own, max(rank * peer // own + 1, (rank + 1) * peer // own))
    return [
        Target(source, target.remote, target.local, target.count)
        for source in sources
        for target in map_fan(source, peer, own, geometry)
        if target.tp_rank == rank
    ]


# -- who is told -------------------------------------------------------------------------------------------------


def done_own_rank(rank: int, targets: list[Target]) -> list[int]:
    return [rank]


def done_targets(rank: int, targets: list[Target]) -> list[int]:
    return [target.tp_rank for target in targets]


def release_own_rank(rank: int, sources: list[int], own: int, peer: int) -> list[int]:
    return [rank]


def release_sources(rank: int, sources: list[int], own: int, peer: int) -> list[int]:
    return sources


def release_holders(rank: int, sources: list[int], own: int, peer: int) -> list[int]:
    """All prefill ranks that hold blocks for this decode rank, read or not (0.33.0)."""
    if peer == own:
        return sources
    if peer < own:
        return [floor_rank(rank, own, peer)]
    first = floor_rank(rank, own, peer)
    return list(range(first, first + peer // own))


def acks_any(own: int, consumer: int) -> int:
    return 1


def acks_fan_in(own: int, consumer: int) -> int:
    """How many releases a prefill rank waits for (vllm#46332)."""
    if consumer <= own:
        return 1
    if consumer % own:
        raise PeerRefusal("ValueError", f"consumer TP size {consumer} is not a multiple of {own}")
    return consumer // own


# -- guards ------------------------------------------------------------------------------------------------------


def guard_none(own: int, peer: int, mine: CacheShape, advertised: CacheShape | None, geometry: Geometry) -> None:
    return None


def guard_replicated(own: int, peer: int, mine: CacheShape, advertised: CacheShape | None, geometry: Geometry) -> None:
    """Unequal TP only when every rank of both sides holds one replicated head, or the latent (vllm#46332)."""
    if own <= 0 or peer <= 0:
        raise PeerRefusal("ValueError", f"TP sizes must be positive, not {own} and {peer}")
    if geometry.mla or own == peer or min(own, peer) >= geometry.kv_heads:
        return
    raise PeerRefusal(
        "NotImplementedError", f"unequal TP ({own} and {peer}) with {geometry.kv_heads} KV heads that are not replicated"
    )


def guard_layouts(own: int, peer: int, mine: CacheShape, advertised: CacheShape | None, geometry: Geometry) -> None:
    """First the layouts that both sides advertised, then, if they are equal, `guard_replicated` (0.33.0).

    The layout of a split cache names the start of its V plane and so the pool size: with unequal pools only what head
    slices need is compared. A peer of an older release advertises none.
    """
    if advertised is None or mine.advertised == advertised.advertised:
        guard_replicated(own, peer, mine, advertised, geometry)
        return
    if mine.heads != advertised.heads:
        raise PeerRefusal("MoRIIOError", f"{mine.heads} heads a rank here, {advertised.heads} at the peer")
    check_slices(mine, advertised)
