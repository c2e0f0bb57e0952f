"""The batch that moves blocks of one layer from a prefill cache to a decode cache: its addresses and its work requests.

Two ways are known. Whole blocks are addressed with the initiator's own strides on both sides, right only between caches
that lie alike; head slices (0.33.0) are addressed on each side with the layout that it advertised.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvcover.sim.cache.geometry import CacheShape, Geometry
from kvcover.sim.cache.ledger import Codes, Copy, SourceCache, cell_copy, raw_copy
from kvcover.sim.errors import PeerRefusal


class Batch(NamedTuple):
    """What lands (None: MoRI refuses the batch) and the work requests that are left after merging."""

    copy: Copy | None
    entries: int


class Slice(NamedTuple):
    """`heads` heads from the source's local head `first` on, into the target's from `into` on."""

    first: int
    into: int
    heads: int


def whole_blocks(
    geometry: Geometry, source: SourceCache, target: CacheShape, read: Codes, written: Codes, *, by_reader: bool
) -> Batch:
    """Blocks `read` of the source into blocks `written` of the target, addressed by the target's rank or by the source's.

    The remote side is addressed with local strides, but for the V plane of a split cache, which is looked for behind the
    peer's number of blocks (0.24+).
    """
    mine = source.shape
    local, remote = (target, mine) if by_reader else (mine, target)
    plain = mine.same_blocks(target) and all(shape.taken_for.memory == shape.memory for shape in (mine, target))
    if plain and int(read.max()) < mine.num_blocks and int(written.max()) < target.num_blocks:
        planes = geometry.planes if mine.memory.startswith("p") else 1
        copy = cell_copy(geometry, target, source.contents[read], written, source.first_head, 0, target.heads)
        return Batch(copy, planes * runs(read, written))
    here, there, length = _by_local_strides(local, remote, written if by_reader else read, read if by_reader else written)
    read, written = (there, here) if by_reader else (here, there)
    return Batch(raw_copy(geometry, source, target, read, written, length), _merged(here, there, length))


def _by_local_strides(local: CacheShape, remote: CacheShape, here: Codes, there: Codes) -> tuple[Codes, Codes, int]:
    """Where runs start on each side, and how long they are, in bytes."""
    taken, peer = local.taken_for, remote.taken_for
    strides = taken.strides
    planes = taken.apart
    v_there = strides["b"] * peer.num_blocks if taken.memory.startswith("p") else strides["p"]
    plane = np.arange(planes)
    starts_here, starts_there = (
        (blocks[:, None] * strides["b"] + plane * v).ravel() * local.head_bytes
        for blocks, v in ((here, strides["p"]), (there, v_there))
    )
    return starts_here, starts_there, local.block_units * local.planes // planes * local.head_bytes


def head_slices(geometry: Geometry, source: SourceCache, target: CacheShape, read: Codes, written: Codes, part: Slice) -> Batch:
    """Some heads of blocks `read` of the source into some of blocks `written` of the target. `check_slices` passed."""
    mine = source.shape
    entries = _slice_entries(mine.taken_for, target.taken_for, read, written, part.heads)
    inside = int(read.max()) < mine.num_blocks and int(written.max()) < target.num_blocks
    if inside and mine.kv_dtype == target.kv_dtype and all(shape.taken_for.memory == shape.memory for shape in (mine, target)):
        first_head = source.first_head + part.first
        return Batch(cell_copy(geometry, target, source.contents[read], written, first_head, part.into, part.heads), entries)
    starts = (
        _heads_at(mine.taken_for, read, part.first, part.heads),
        _heads_at(target.taken_for, written, part.into, part.heads),
    )
    return Batch(raw_copy(geometry, source, target, *starts, mine.head_bytes), entries)


def state_slice(rank: int, own: int, target: int, peer: int, mine: int, theirs: int) -> Slice | None:
    """What rank `rank` of `own` sends of its `mine` heads of a state, and where it goes among the `theirs` of rank `target`.

    None: the whole state, as at equal TP. `peer` is the TP size that the leg gives; the numbers of heads are the true ones.
    States are sliced or gathered even where the heads of K and V are replicated (read in 0.33.0's moriio_layout.py).
    Raises PeerRefusal where the two don't fit.
    """
    if peer == own:
        return None
    if mine == theirs:
        return Slice(0, 0, mine)
    if peer > own and mine == peer // own * theirs:
        return Slice(target % (peer // own) * theirs, 0, theirs)
    if own > peer and theirs == own // peer * mine:
        return Slice(0, rank % (own // peer) * mine, mine)
    raise PeerRefusal("ValueError", f"recurrent states of {mine} heads here and {theirs} at the peer")


def _heads_at(taken: CacheShape, blocks: Codes, first: int, count: int) -> Codes:
    """The byte at which each (plane, block, token, head) of a slice starts."""
    strides = taken.strides
    parts = (("p", np.arange(taken.planes)), ("b", blocks), ("t", np.arange(taken.block_size)), ("h", first + np.arange(count)))
    at = np.zeros(1, dtype=np.int64)
    for axis, numbers in parts:
        at = (at[:, None] + numbers * strides[axis]).ravel()
    return at * taken.head_bytes


def _slice_entries(mine: CacheShape, theirs: CacheShape, read: Codes, written: Codes, count: int) -> int:
    """Work requests of a slice: a run is all heads, all tokens of a head, or one head of one token, whatever both sides have."""
    blocks = mine.apart * len(read)  # of one plane each
    joined = 0
    if count == mine.heads == theirs.heads and mine.memory[0] == theirs.memory[0]:
        joined = blocks - (mine.apart if mine.memory.startswith("p") else 1) * runs(read, written)
    one = mine.block_size == 1  # token, of which both orders are one
    head_major = [one or shape.strides["t"] * shape.head_bytes == shape.content_bytes for shape in (mine, theirs)]
    if head_major[0] != head_major[1]:
        return blocks * count * mine.block_size - joined  # the last of a block and the first of the next may still meet
    if count == mine.heads == theirs.heads or head_major[0]:
        return blocks - joined
    return blocks * mine.block_size


def _merged(here: Codes, there: Codes, length: int) -> int:
    """Work requests that are left when runs that follow each other on both sides are one."""
    order = np.argsort(here, kind="stable")
    return 1 + int(((np.diff(here[order]) != length) | (np.diff(there[order]) != length)).sum())


def runs(local: Codes, remote: Codes) -> int:
    """How many stretches of blocks are contiguous on both sides."""
    if len(local) == 0:
        return 0
    return 1 + int(((np.diff(local) != 1) | (np.diff(remote) != 1)).sum())
