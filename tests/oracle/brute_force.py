"""A deliberately naive oracle for one request: what should arrive where, and how it ends.

Nothing here knows about time, processes or the simulator. Memory is a plain dictionary from address to a
tag that says which key or value element it is; a transfer is a loop that copies tag after tag at the
addresses a release computes. The control plane is a handful of loops over ranks. It shares no code with the
package and must never import it: its use is to disagree.

Scope: one request, data parallel size 1 on both sides, one host an engine, and a port range of its own for
each engine, so that a port beyond the peer's last rank has no listener. One layer stands for all of them:
with one memory region per layer all layers are alike. Caches are split K/V, ``[2, blocks, tokens, heads,
dim]``, or for MLA ``[blocks, tokens, latent]``. RDMA back end, no speculative decoding, no chunked prefill,
no prefix hit in WRITE, READ data lands before it is used. Failed loads fail the request (the default policy
of the engine).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

RELEASES: Final = (
    "0.24.0",
    "0.25.1",
    "0.26.0",
    "0.27.0",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
    "0.33.0",
)

#: From best to worst, as the design orders them.
OUTCOMES: Final = (
    "ok",
    "refused",
    "recomputed",
    "failed",
    "degraded",
    "leak",
    "hang",
    "crash",
    "corrupt",
)


class Absent:
    """The key is not in the dictionary at all (``None`` would be a value)."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = Absent()

#: Plane (0 K or latent, 1 V), KV head, token of the prompt, element of the head.
Tag = tuple[int, int, int, int]
#: Copied from offset, to offset, number of elements.
Entry = tuple[int, int, int]
Triple = tuple[float, float, float]


@dataclass
class Expected:
    """What one request should do. Ranks are tensor parallel ranks."""

    cells_per_rank: int = 0
    #: Per decode rank the prefill ranks whose bytes landed in its memory (in READ: were read), in rank order.
    writers: list[list[int]] = field(default_factory=list)
    #: Per decode rank the cells that hold the right content under every, and under some, order of the writes.
    covered_min: list[int] = field(default_factory=list)
    covered_max: list[int] = field(default_factory=list)
    #: Per decode rank the cells in which any byte landed: covered + wrong, whatever the order of the writes.
    touched: list[int] = field(default_factory=list)
    #: Per decode rank (covered, wrong, missing) as fractions; None where the order of writers decides.
    triples: list[Triple | None] = field(default_factory=list)
    #: Per decode rank the elements that landed outside the blocks of this request.
    stray: list[int] = field(default_factory=list)
    #: Decode ranks told of completion. In READ nobody is told; here: ranks whose own read succeeded.
    told: set[int] = field(default_factory=set)
    #: Decode ranks told of failure (a notice in WRITE, a failed read reported to the scheduler in READ).
    failed: set[int] = field(default_factory=set)
    #: Prefill ranks whose bound port gets ``remote_blocks`` (WRITE), even if that rank can't use it.
    prefill_told: set[int] = field(default_factory=set)
    #: Prefill ranks that report the request as sent, without the scheduler's reaper.
    prefill_acked: set[int] = field(default_factory=set)
    #: The part of ``prefill_acked`` that reported only because deferred writes expired.
    prefill_expired: set[int] = field(default_factory=set)
    #: Ranks ("P1", "D2") that dialled a port without a listener.
    stalled: set[str] = field(default_factory=set)
    outcome: str = "ok"
    #: ``outcome`` and what else may happen where only timing decides.
    possible_outcomes: set[str] = field(default_factory=set)
    error: str | None = None

    @property
    def coverage(self) -> float | None:
        if self.covered_min != self.covered_max:
            return None
        return sum(self.covered_min) / (self.cells_per_rank * len(self.covered_min))

    @property
    def coverage_bounds(self) -> tuple[float, float]:
        total = self.cells_per_rank * len(self.covered_min)
        return sum(self.covered_min) / total, sum(self.covered_max) / total


@dataclass(frozen=True)
class Pool:
    """The cache of one rank, one layer, in elements."""

    planes: int
    num_blocks: int
    block_size: int
    slots: int
    head_dim: int

    @property
    def block_len(self) -> int:
        return self.block_size * self.slots * self.head_dim

    @property
    def length(self) -> int:
        return self.planes * self.num_blocks * self.block_len

    def address(self, plane: int, block: int, token: int, slot: int, element: int) -> int:
        row = (plane * self.num_blocks + block) * self.block_size + token
        return (row * self.slots + slot) * self.head_dim + element


@dataclass
class Case:
    release: int
    mode: str
    p: int
    d: int
    heads: int
    prefill_value: Any
    decode_value: Any
    forwarded_tp_size: bool
    prefill_blocks: list[int]
    decode_blocks: list[int]
    tokens: int
    prefill_pool: Pool
    decode_pool: Pool
    source: list[dict[int, Tag]]
    #: Per decode rank: address -> writer -> tag.
    landed: list[dict[int, dict[int, Tag]]]

    @property
    def mla(self) -> bool:
        return self.heads == 0

    @property
    def planes(self) -> int:
        return 1 if self.mla else 2

    @property
    def prompt_blocks(self) -> int:
        return -(-self.tokens // self.prefill_pool.block_size)


def rank_heads(rank: int, size: int, heads: int) -> list[int]:
    """KV heads that one rank holds, in the order of its cache. MLA has one, the latent."""
    if heads == 0:
        return [0]
    if size <= heads:
        if heads % size:
            raise ValueError(f"{heads} KV heads over {size} ranks is not supported")
        each = heads // size
        return list(range(rank * each, (rank + 1) * each))
    return [rank * heads // size]


def floor_rank(rank: int, own: int, peer: int) -> int:
    """The one peer rank that a rank talks to."""
    if own <= 0 or peer <= 0:
        raise ValueError("sizes must be positive")
    if peer == own:
        return rank
    if max(own, peer) % min(own, peer):
        raise ValueError(f"{own} and {peer}: not a multiple")
    return rank * (peer // own) if peer > own else rank // (own // peer)


def peer_size(remote_tp_size: Any, tp_size: Any, unknown: int) -> int:
    """The peer's size as 0.27 and later read it. Raises what ``int`` raises."""
    for value in (remote_tp_size, tp_size):
        if value:
            return int(value)
    return unknown


def copy(
    entries: Sequence[Entry],
    source: dict[int, Tag],
    source_len: int,
    target: dict[int, dict[int, Tag]],
    target_len: int,
    writer: int,
) -> bool:
    """One batch: all or nothing. The only bound is the length of the registered region on either side."""
    for start, end, size in entries:
        if start + size > source_len or end + size > target_len:
            return False
    for start, end, size in entries:
        for i in range(size):
            if start + i in source:
                target.setdefault(end + i, {})[writer] = source[start + i]
    return True


def whole_blocks(own: Pool, peer_num_blocks: int, pairs: Sequence[tuple[int, int]]) -> list[Entry]:
    """(own offset, peer offset, size). The peer's cache is taken for one's own, but for its block count."""
    entries: list[Entry] = []
    for own_block, peer_block in pairs:
        for plane in range(own.planes):
            own_start = (plane * own.num_blocks + own_block) * own.block_len
            peer_start = (plane * peer_num_blocks + peer_block) * own.block_len
            entries.append((own_start, peer_start, own.block_len))
    return entries


def head_slices(
    source: Pool,
    target: Pool,
    source_slot: int,
    target_slot: int,
    count: int,
    pairs: Sequence[tuple[int, int]],
) -> list[Entry]:
    """Copies of single heads of single tokens between caches whose real layouts are both known."""
    if source_slot + count > source.slots or target_slot + count > target.slots:
        raise ValueError(f"heads {target_slot}..{target_slot + count} of {target.slots}")
    entries: list[Entry] = []
    for source_block, target_block in pairs:
        for plane in range(source.planes):
            for token in range(source.block_size):
                for n in range(count):
                    start = source.address(plane, source_block, token, source_slot + n, 0)
                    end = target.address(plane, target_block, token, target_slot + n, 0)
                    entries.append((start, end, source.head_dim))
    return entries


def write_pairs(c: Case) -> list[tuple[int, int]]:
    """Prefill block, decode block. Raises inside the write task where a release refuses the lengths."""
    mine, theirs = c.prefill_blocks, c.decode_blocks
    if c.release >= 32:
        mine = mine[: c.prompt_blocks]
    if c.release <= 25 and len(mine) != len(theirs):
        raise ValueError(f"{len(mine)} blocks for {len(theirs)}")
    if len(mine) > len(theirs):
        raise ValueError(f"{len(mine)} blocks for {len(theirs)}")
    return list(zip(mine, theirs, strict=False))


def note(out: Expected, text: str) -> None:
    out.error = text if out.error is None else f"{out.error}; {text}"


def write_without_fan_out(c: Case, out: Expected) -> list[str]:
    """WRITE up to 0.32: a prefill rank has one decode rank; blocks and completions go by one's own number."""
    out.prefill_told = {i for i in range(c.d) if i < c.p}

    if c.release <= 26:
        declared = 1  # ``remote_tp_size`` isn't read, and no router sends ``tp_size`` on this leg
    else:
        try:
            declared = peer_size(c.prefill_value, ABSENT, 0)
        except (TypeError, ValueError) as error:
            note(out, f"prefill scheduler: {error}")
            return ["crash", "hang"]

    bad_end = ["ok"]
    for rank in range(c.p):
        try:
            target = rank if c.release == 24 else floor_rank(rank, c.p, declared or c.p)
        except ValueError as error:
            # Swallowed by the dialling thread: the write finds no session, or expires for want of blocks.
            note(out, f"P{rank} map: {error}")
            out.prefill_acked.add(rank)
            if rank not in out.prefill_told:
                out.prefill_expired.add(rank)
            continue
        if target >= c.d:
            out.stalled.add(f"P{rank}")
            continue
        if rank not in out.prefill_told:
            out.prefill_acked.add(rank)
            out.prefill_expired.add(rank)
            continue
        try:
            pairs = write_pairs(c)
        except ValueError as error:
            note(out, f"P{rank} write: {error}")
            out.prefill_acked.add(rank)
            continue
        entries = whole_blocks(c.prefill_pool, c.decode_pool.num_blocks, pairs)
        fits = copy(
            entries,
            c.source[rank],
            c.prefill_pool.length,
            c.landed[target],
            c.decode_pool.length,
            writer=rank,
        )
        out.prefill_acked.add(rank)
        if fits:
            out.told.add(rank)  # its own number, not ``target``
        else:
            note(out, f"P{rank} write: length out of range")
            # The same error leaves the forward if the transfer is finalised there, which a late seal decides.
            out.possible_outcomes.add("crash")

    if len(out.told) < c.d:
        bad_end.append("hang")
    elif not complete(c):
        bad_end.append("corrupt")
    if out.prefill_expired or len(out.prefill_acked) < c.p:
        bad_end.append("degraded")  # deferred writes expire, or the scheduler's reaper frees
    return bad_end


@dataclass(frozen=True)
class Slice:
    target: int
    source_slot: int
    target_slot: int
    count: int
    writers: int
    whole: bool


def fan(rank: int, own: int, peer: int, heads: int) -> list[Slice]:
    """0.33: what one prefill rank writes to an engine of the declared size, by looking at every head."""
    if own <= 0 or peer <= 0:
        raise ValueError("sizes must be positive")
    if max(own, peer) % min(own, peer):
        raise ValueError(f"{own} and {peer}: neither is a multiple of the other")
    if heads and own != peer:
        for size in (own, peer):
            if (size <= heads and heads % size) or (size > heads and size % heads):
                raise ValueError(f"{heads} heads over {size} ranks")
    slices: list[Slice] = []
    for target in range(peer):
        feeders = [target // (peer // own)] if peer >= own else [q for q in range(own) if q // (own // peer) == target]
        wanted = rank_heads(target, peer, heads)
        writer_of: dict[int, int] = {}
        for head in wanted:
            for feeder in feeders:
                if head in rank_heads(feeder, own, heads):
                    writer_of[head] = feeder
                    break
        mine = [head for head in wanted if writer_of.get(head) == rank]
        if mine:
            held = rank_heads(rank, own, heads)
            slices.append(
                Slice(
                    target=target,
                    source_slot=held.index(mine[0]),
                    target_slot=wanted.index(mine[0]),
                    count=len(mine),
                    writers=len(set(writer_of.values())),
                    whole=len(mine) == len(held) == len(wanted),
                )
            )
    return slices


def write_with_fan_out(c: Case, out: Expected) -> list[str]:
    """WRITE of 0.33."""
    bad_end = ["ok"]
    try:
        announced = peer_size(c.decode_value, ABSENT, c.d)
    except (TypeError, ValueError) as error:
        note(out, f"decode scheduler: {error}")
        bad_end += ["crash", "hang"]
        announced = 0  # and no decode rank is left to hear of anything
    out.prefill_told = {i for i in range(announced) if i < c.p}

    try:
        declared = peer_size(c.prefill_value, ABSENT, 0) or c.p
    except (TypeError, ValueError) as error:
        note(out, f"prefill scheduler: {error}")
        return [*bad_end, "crash", "hang"]
    try:
        plans = [fan(rank, c.p, declared, c.heads) for rank in range(c.p)]
    except ValueError as error:
        note(out, f"prefill forward: {error}")
        return [*bad_end, "crash", "hang"]

    done: list[list[int]] = [[] for _ in range(c.d)]  # per decode rank: writers named in each message
    notices = [0] * c.d
    for rank, plan in enumerate(plans):
        if any(s.target >= c.d for s in plan):
            out.stalled.add(f"P{rank}")
            continue
        out.prefill_acked.add(rank)
        if rank not in out.prefill_told:
            out.prefill_expired.add(rank)
            for s in plan:
                notices[s.target] += "crash" not in bad_end
            continue
        try:
            for s in plan:
                pairs = write_pairs(c)
                same = c.prefill_pool.slots == c.decode_pool.slots and (c.prefill_pool.num_blocks == c.decode_pool.num_blocks)
                if c.mla or (s.whole and same):
                    entries = whole_blocks(c.prefill_pool, c.decode_pool.num_blocks, pairs)
                else:
                    entries = head_slices(c.prefill_pool, c.decode_pool, s.source_slot, s.target_slot, s.count, pairs)
                if not copy(
                    entries,
                    c.source[rank],
                    c.prefill_pool.length,
                    c.landed[s.target],
                    c.decode_pool.length,
                    rank,
                ):
                    raise ValueError("length out of range")
        except ValueError as error:
            note(out, f"P{rank} write: {error}")
            continue
        for s in plan:
            done[s.target].append(s.writers)

    reports = [0] * c.d
    for rank in range(c.d):
        count = 0
        for writers in done[rank]:
            count += 1
            if count >= writers:
                out.told.add(rank)
                reports[rank] += 1
                count = 0
        if notices[rank]:
            out.failed.add(rank)
            reports[rank] += notices[rank]

    if out.told | out.failed != set(range(c.d)):
        bad_end.append("hang")
        if "crash" not in bad_end and sum(reports) >= c.d and out.failed:
            # Reports are counted, not attributed: a rank that hears of several failures, each in a step
            # of its own, makes up for ranks that hear of nothing.
            out.possible_outcomes.add("failed")
    elif out.failed:
        bad_end.append("failed")
    elif not complete(c):
        bad_end.append("corrupt")
    if len(out.prefill_acked) < c.p:
        bad_end.append("leak")  # no reaper in WRITE
    if out.prefill_expired and "failed" not in bad_end:
        bad_end.append("degraded")
    return bad_end


def read_pairs(c: Case) -> list[tuple[int, int]]:
    """Decode block, prefill block. Raises in the scheduler or the step, which both end the engine."""
    mine, theirs = c.decode_blocks, c.prefill_blocks
    if len(mine) > len(theirs):
        if c.release <= 30:
            raise ValueError("more decode blocks than prefill blocks")
        if len(mine) > len(theirs) + 1:  # one tail block is allowed
            raise ValueError("decode blocks beyond the tail")
        mine = mine[: len(theirs)]
    elif len(mine) < len(theirs):
        if c.release <= 25:
            raise ValueError(f"{len(mine)} blocks for {len(theirs)}")
        if c.release <= 29:
            mine = theirs[-len(mine) :]  # the peer's numbers, taken for one's own
        elif c.release >= 31:
            theirs = theirs[-len(mine) :]
    return list(zip(mine, theirs, strict=False))


def read(c: Case, out: Expected) -> list[str]:
    unreleased = ["degraded"]  # the prefill scheduler's reaper
    if 27 <= c.release <= 30:
        try:
            peer_size(c.prefill_value, ABSENT, 0)
        except (TypeError, ValueError) as error:
            note(out, f"prefill scheduler: {error}")
            return ["crash"]
    tp_size: Any = c.p if c.forwarded_tp_size else ABSENT
    if c.release <= 26:
        declared = c.p if c.forwarded_tp_size else 1
    else:
        try:
            declared = peer_size(c.decode_value, tp_size, 0)
        except (TypeError, ValueError) as error:
            note(out, f"decode scheduler: {error}")
            return ["crash", *unreleased]
    try:
        pairs = read_pairs(c)
    except ValueError as error:
        note(out, f"decode: {error}")
        return ["crash", *unreleased]

    effective = declared or c.d
    flexible = c.release >= 27 and c.d == 1 and c.mla and declared > 1
    sources: list[int] = []
    try:
        for rank in range(c.d):
            if c.release == 24:
                sources.append(rank)
            elif flexible:
                sources.append(0)  # first of the round
            else:
                sources.append(floor_rank(rank, c.d, effective))
    except ValueError as error:
        note(out, f"decode step: {error}")
        return ["crash", *unreleased]
    for rank in range(c.d):
        dialled = range(declared) if flexible else (sources[rank],)
        if any(port >= c.p for port in dialled):
            out.stalled.add(f"D{rank}")
    if out.stalled and c.release >= 27:
        # Every rank waits for the vote of the stuck one, before anyone reads.
        note(out, "decode step blocked in the handshake")
        out.possible_outcomes.add("crash")  # if the executor's own limit ends the step
        return ["hang", *unreleased]

    releases: list[list[int]] = [[] for _ in range(c.p)]
    for rank in range(c.d):
        if f"D{rank}" in out.stalled:
            continue  # gives up waiting and decodes without a read
        source = sources[rank]
        slices: list[Entry] | None = None
        if c.release >= 33 and not c.mla:
            if c.prefill_pool.slots != c.decode_pool.slots:
                note(out, "decode step: heads per rank differ")
                return ["crash", *unreleased]
            if c.prefill_pool.num_blocks != c.decode_pool.num_blocks:
                flipped = [(theirs, mine) for mine, theirs in pairs]
                slices = head_slices(c.prefill_pool, c.decode_pool, 0, 0, c.decode_pool.slots, flipped)
        if slices is None:
            if c.release >= 25 and not c.mla and effective != c.d and min(effective, c.d) < c.heads:
                note(out, "decode step: heads not replicated on both sides")
                return ["crash", *unreleased]
            own_first = whole_blocks(c.decode_pool, c.prefill_pool.num_blocks, pairs)
            slices = [(theirs, mine, size) for mine, theirs, size in own_first]
        fits = copy(
            slices,
            c.source[source],
            c.prefill_pool.length,
            c.landed[rank],
            c.decode_pool.length,
            writer=source,
        )
        if fits:
            out.told.add(rank)
        else:
            note(out, f"D{rank} read: length out of range")
            if c.release >= 31:
                out.failed.add(rank)
        holders = [source]
        if c.release >= 33 and effective > c.d:
            first = floor_rank(rank, c.d, effective)
            holders = list(range(first, first + effective // c.d))
        for holder in holders:
            if holder < c.p:
                releases[holder].append(rank)

    bad_end = ["ok"]
    for rank in range(c.p):
        needed = 1
        if c.release >= 25 and releases[rank] and c.d > c.p:
            if c.d % c.p:
                note(out, f"P{rank} release: {c.d} is not a multiple of {c.p}")
                bad_end.append("crash")
                continue
            needed = c.d // c.p
        if len(releases[rank]) >= needed:
            out.prefill_acked.add(rank)
    if out.failed:
        bad_end.append("failed")
    else:
        if not complete(c):
            bad_end.append("corrupt")
        if len(out.prefill_acked) < c.p:
            bad_end += unreleased
    return bad_end


def cell_addresses(c: Case, rank: int) -> list[list[tuple[int, Tag]]]:
    """Per cell of one decode rank the addresses it needs and the tag that belongs there."""
    pool = c.decode_pool
    blocks = c.decode_blocks
    first = 0
    if c.mode == "read" and len(blocks) < c.prompt_blocks:
        first = c.prompt_blocks - len(blocks)  # the head is cached on decode, and these are the rest
    cells = []
    for plane in range(pool.planes):
        for slot, head in enumerate(rank_heads(rank, c.d, c.heads)):
            for logical in range(first, min(c.prompt_blocks, first + len(blocks))):
                cell = []
                for token in range(pool.block_size):
                    position = logical * pool.block_size + token
                    if position < c.tokens:
                        for element in range(pool.head_dim):
                            address = pool.address(plane, blocks[logical - first], token, slot, element)
                            cell.append((address, (plane, head, position, element)))
                cells.append(cell)
    return cells


def complete(c: Case) -> bool:
    """Every cell of every rank is right, in every order of the writes."""
    for rank in range(c.d):
        for cell in cell_addresses(c, rank):
            for address, tag in cell:
                there = c.landed[rank].get(address)
                if not there or any(t != tag for t in there.values()):
                    return False
    return True


def survey(c: Case, out: Expected) -> None:
    """Fill in what lies in the decode memory."""
    for rank in range(c.d):
        memory = c.landed[rank]
        always = sometimes = touched = 0
        cells = cell_addresses(c, rank)
        for cell in cells:
            must = may = True
            anything = False
            for address, tag in cell:
                there = memory.get(address, {})
                anything = anything or bool(there)
                may = may and tag in there.values()
                must = must and bool(there) and all(t == tag for t in there.values())
            always += must
            sometimes += may
            touched += anything
        out.cells_per_rank = len(cells)
        out.writers.append(sorted({writer for there in memory.values() for writer in there}))
        out.covered_min.append(always)
        out.covered_max.append(sometimes)
        out.touched.append(touched)
        total = len(cells)
        out.triples.append((always / total, (touched - always) / total, (total - touched) / total) if always == sometimes else None)
        own = {
            c.decode_pool.address(plane, block, token, slot, element)
            for plane in range(c.decode_pool.planes)
            for block in c.decode_blocks
            for token in range(c.decode_pool.block_size)
            for slot in range(c.decode_pool.slots)
            for element in range(c.decode_pool.head_dim)
        }
        out.stray.append(sum(address not in own for address in memory))


def expected(
    release: str,
    mode: str,
    prefill_tp: int,
    decode_tp: int,
    kv_heads: int,
    prefill_value: object = ABSENT,
    decode_value: object = ABSENT,
    *,
    prefill_blocks: Sequence[int] = (1, 3),
    decode_blocks: Sequence[int] = (2, 0),
    block_size: int = 2,
    prefill_num_blocks: int = 4,
    decode_num_blocks: int = 4,
    head_dim: int = 1,
    tokens: int | None = None,
    forwarded_tp_size: bool = False,
) -> Expected:
    """What one request must do.

    ``kv_heads`` 0 means MLA, and ``head_dim`` is then the latent. ``prefill_value`` and ``decode_value`` are
    ``remote_tp_size`` of the two legs as they leave the router, ABSENT if not there. ``tp_size`` is there
    only in READ, on the decode leg, equal to the prefill size, and only with ``forwarded_tp_size``.
    ``tokens`` is the prompt length, by default all that the prefill blocks hold. In READ a decode list that
    is shorter than the prompt needs is its tail (the head is cached there), and only the cells of that tail
    count.
    """
    if mode not in ("write", "read"):
        raise ValueError(f"mode {mode!r}")
    if tokens is None:
        tokens = len(prefill_blocks) * block_size
    if not 0 < tokens <= len(prefill_blocks) * block_size:
        raise ValueError("the prefill blocks don't hold the prompt")
    if mode == "read" and tokens < 2:
        raise ValueError("READ of a one-token prompt moves nothing")
    if not decode_blocks or min(*prefill_blocks, *decode_blocks, 0) < 0:
        raise ValueError("blocks")
    if max(prefill_blocks) >= prefill_num_blocks or max(decode_blocks) >= decode_num_blocks:
        raise ValueError("a block is outside its pool")

    planes = 1 if kv_heads == 0 else 2
    prefill_pool = Pool(planes, prefill_num_blocks, block_size, len(rank_heads(0, prefill_tp, kv_heads)), head_dim)
    decode_pool = Pool(planes, decode_num_blocks, block_size, len(rank_heads(0, decode_tp, kv_heads)), head_dim)
    source: list[dict[int, Tag]] = []
    for rank in range(prefill_tp):
        memory: dict[int, Tag] = {}
        for plane in range(planes):
            for position in range(tokens):
                block = prefill_blocks[position // block_size]
                for slot, head in enumerate(rank_heads(rank, prefill_tp, kv_heads)):
                    for element in range(head_dim):
                        address = prefill_pool.address(plane, block, position % block_size, slot, element)
                        memory[address] = (plane, head, position, element)
        source.append(memory)

    case = Case(
        release=int(RELEASES[RELEASES.index(release)].split(".")[1]),
        mode=mode,
        p=prefill_tp,
        d=decode_tp,
        heads=kv_heads,
        prefill_value=prefill_value,
        decode_value=decode_value,
        forwarded_tp_size=forwarded_tp_size,
        prefill_blocks=list(prefill_blocks),
        decode_blocks=list(decode_blocks),
        tokens=tokens,
        prefill_pool=prefill_pool,
        decode_pool=decode_pool,
        source=source,
        landed=[{} for _ in range(decode_tp)],
    )
    out = Expected()
    if mode == "read":
        ends = read(case, out)
    elif case.release >= 33:
        ends = write_with_fan_out(case, out)
    else:
        ends = write_without_fan_out(case, out)
    out.outcome = max(ends, key=OUTCOMES.index)
    out.possible_outcomes.add(out.outcome)
    survey(case, out)
    return out
