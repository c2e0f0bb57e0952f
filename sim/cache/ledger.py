"""What lies in decode's memory: which identity each cell of each rank and layer holds.

A cell is (plane K or V, block, KV head) of one (decode rank, layer). What it holds is written as a number, its *code*:
`code_of(content, plane, head)`, 0 for nothing. Contents number the token blocks of all requests, so equal prompts share
codes. A *copy* is a batch that landed; what a layer holds is the sequence of copies that landed there, and layers with
the same sequence hold the same. So landing a batch costs the same for any number of blocks, and cells are only looked
at when somebody asks.

Copies between caches that lie differently in memory fall on units (single tokens of a head) and not on cells; then the
same memory is looked at unit by unit. Where in memory a unit lies is the caches' affair (`geometry`): here units are numbered
alike for all.
"""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvcover.sim.cache.geometry import CacheShape, Geometry

Codes = NDArray[np.int64]
EMPTY = 0
_NOBODY = -1
FOREIGN = -1


class Copy(msgspec.Struct, frozen=True, eq=False):
    """A batch: `codes[i]` lands at index `where[i]`, of cells, or of units when `by_unit`."""

    where: Codes
    codes: Codes
    by_unit: bool
    size_bytes: int

    def part(self, fraction: float) -> Copy:
        """The first `fraction` of the batch (at least one index); itself when that is all of it."""
        if fraction >= 1.0:
            return self
        count = max(1, int(len(self.where) * fraction))
        return Copy(self.where[:count], self.codes[:count], self.by_unit, round(self.size_bytes * fraction))


class Count(msgspec.Struct, frozen=True):
    """How many of the needed cells are covered, wrong and missing."""

    covered: int
    wrong: int
    missing: int

    @property
    def cells(self) -> int:
        return self.covered + self.wrong + self.missing

    def __add__(self, other: Count) -> Count:
        return Count(self.covered + other.covered, self.wrong + other.wrong, self.missing + other.missing)


def code_of(geometry: Geometry, contents: Codes, plane: int, head: int) -> Codes:
    """Codes of (content, plane, global head). Content 0 is a block that was never filled: a copy of it is nothing."""
    codes: Codes = ((contents * geometry.planes + plane) * geometry.kv_heads + head + 1) * (contents > 0)
    return codes


def cell_index(shape: CacheShape, plane: int, blocks: Codes, slot: int) -> Codes:
    """Where the cells of these blocks lie in one rank and layer."""
    return (plane * shape.num_blocks + blocks) * shape.heads + slot


def cell_copy(
    geometry: Geometry, shape: CacheShape, contents: Codes, blocks: Codes, first_head: int, slot: int, count: int
) -> Copy:
    """Whole cells: block `contents[i]`, `count` heads from global head `first_head` on, into `blocks[i]` from `slot` on."""
    where, codes = [], []
    for plane in range(geometry.planes):
        for k in range(count):
            where.append(cell_index(shape, plane, blocks, slot + k))
            codes.append(code_of(geometry, contents, plane, first_head + k))
    size = len(blocks) * geometry.planes * count * shape.block_size * shape.head_bytes
    return Copy(np.concatenate(where), np.concatenate(codes), False, size)


class SourceCache(msgspec.Struct, frozen=True, eq=False):
    """The cache of one prefill rank: what its blocks contain, and its first global head."""

    shape: CacheShape
    contents: Codes
    first_head: int

    def unit_codes(self, geometry: Geometry, units: Codes, block_size: int) -> Codes:
        """Codes of what lies at these units, one a (token, head), in a cache of `block_size` tokens a block."""
        cell_token, slot = np.divmod(units, self.shape.heads)
        plane_block, token = np.divmod(cell_token, self.shape.block_size)
        plane, block = np.divmod(plane_block, self.shape.num_blocks)
        contents = self.contents[block]
        filled = contents > 0
        if block_size != self.shape.block_size:  # contents number the blocks of one row of tokens, on either side
            contents, token = np.divmod((contents - 1) * self.shape.block_size + token, block_size)
            contents += 1
        cells = (contents * geometry.planes + plane) * geometry.kv_heads + self.first_head + slot + 1
        codes: Codes = (cells * block_size + token) * filled
        return codes


def raw_copy(geometry: Geometry, source: SourceCache, target: CacheShape, read: Codes, written: Codes, length: int) -> Copy | None:
    """Runs of `length` bytes: from the source's bytes at `read` to the target's at `written`, both from the region's start.

    Returns None when a run passes the end of a region: MoRI then refuses the whole batch ("length out of range"). What was
    written as one dtype and is read as another is `FOREIGN`.
    """
    mine = source.shape
    regions = ((read, mine), (written, target))
    if any(int(starts.max()) + length > shape.units * shape.head_bytes for starts, shape in regions):
        return None
    grain = math.gcd(mine.head_bytes, target.head_bytes)
    size, steps = len(read) * length, np.arange(0, length, grain)
    read, written = ((starts[:, None] + steps).ravel() for starts in (read, written))
    where = target.unit_at(written // target.head_bytes)
    codes = source.unit_codes(geometry, mine.unit_at(read // mine.head_bytes), target.block_size)
    if mine.kv_dtype != target.kv_dtype:
        codes = np.where(codes == EMPTY, EMPTY, FOREIGN)
        order = np.argsort(codes == FOREIGN, kind="stable")  # a unit with a part that is foreign is foreign
        where, codes = where[order], codes[order]
    return Copy(where, codes, True, size)


class Need(msgspec.Struct, frozen=True, eq=False):
    """The cells that one decode rank needs for one request, and the code that each must hold."""

    where: Codes
    codes: Codes


class Ledger:
    """The memory of all TP ranks of one decode DP rank, each `shape` a layer.

    Memory is kept by *region*: the blocks of one request. A batch that lands in its own request's blocks touches that
    region alone, so what it costs does not grow with the number of requests; a batch astray is landed in every region
    that it hits.
    """

    def __init__(self, geometry: Geometry, shape: CacheShape, tp: int) -> None:
        self.geometry = geometry
        self.shape = shape
        self._tp = tp
        # State n is `_parents[n]` followed by `_copies[n]`; state 0 is empty memory.
        self._parents = [0]
        self._copies: list[Copy | None] = [None]
        self._children: dict[int, dict[int, int]] = {}  # by copy, then by state before
        self._counts: dict[tuple[int, int], Count] = {}
        self._kept: list[Copy | Need] = []  # keeps ids in the two dicts above unique
        # States by request, rank and layer; `_NOBODY` has the blocks that no request has owned yet.
        self._regions: dict[int, list[list[int]]] = {_NOBODY: [[0] * geometry.layers for _ in range(tp)]}
        self._owner: Codes = np.full(shape.num_blocks, _NOBODY, dtype=np.int64)  # last request to own each block

    def admit(self, region: int, blocks: Codes) -> None:
        """The request `region` owns `blocks` from now on; what their last owners left there is still there."""
        before: list[int] = np.unique(self._owner[blocks]).tolist()
        states = [[0] * self.geometry.layers for _ in range(self._tp)]
        self._regions[region] = states
        for owner in before:
            left = {state: self._left_in(state, blocks) for rows in self._regions[owner] for state in set(rows) if state}
            if not left:
                continue
            for rank, rows in enumerate(self._regions[owner]):
                for layer, state in enumerate(rows):
                    for copy in left.get(state, ()):
                        states[rank][layer] = self._after(states[rank][layer], copy)
        self._owner[blocks] = region

    def _left_in(self, state: int, blocks: Codes) -> list[Copy]:
        """The copies of a state that still show in `blocks`: from the last back to those that filled them all."""
        hidden = set(blocks.tolist())
        left: list[Copy] = []
        for copy in reversed(self._chain(state)):
            cells = np.unique(_cells_of_units(self.shape, copy.where)) if copy.by_unit else copy.where
            touched, counts = np.unique(cells // self.shape.heads % self.shape.num_blocks, return_counts=True)
            if hidden.isdisjoint(touched.tolist()):
                continue
            left.append(copy)
            if not copy.by_unit:
                hidden -= set(touched[counts == self.geometry.planes * self.shape.heads].tolist())
        return left[::-1]

    def land(self, rank: int, layer: int, region: int, copy: Copy) -> None:
        """A batch of whole cells landed in the blocks of its own request."""
        states = self._regions[region][rank]
        states[layer] = self._after(states[layer], copy)

    def land_astray(self, rank: int, layer: int, copy: Copy, home: int | None) -> int:
        """A batch that may hit any block. Returns how many cells it changed outside region `home`."""
        cells = np.unique(_cells_of_units(self.shape, copy.where)) if copy.by_unit else copy.where
        owners = self._owner[cells // self.shape.heads % self.shape.num_blocks]
        changed = 0
        for owner in np.unique(owners).tolist():
            mine = cells[owners == owner]
            before = self._regions[owner][rank][layer]
            after = self._regions[owner][rank][layer] = self._after(before, copy)
            if owner != home:
                changed += int((self._units(before, mine) != self._units(after, mine)).any(axis=1).sum())
        return changed

    def count(self, rank: int, layer: int, region: int, need: Need) -> Count:
        """How much of `need` the region holds in this rank and layer."""
        return self._count(self._regions[region][rank][layer], need)

    def count_each(self, rank: int, region: int, need: Need) -> list[Count]:
        """`count` of every layer of a rank; layers in the same state are looked at once."""
        states = self._regions[region][rank]
        counts = {state: self._count(state, need) for state in dict.fromkeys(states)}
        return [counts[state] for state in states]

    def count_all(self, rank: int, region: int, need: Need) -> Count:
        """`count` over all layers of a rank; layers in the same state are looked at once."""
        covered = wrong = missing = 0
        for state, layers in Counter(self._regions[region][rank]).items():
            count = self._count(state, need)
            covered += layers * count.covered
            wrong += layers * count.wrong
            missing += layers * count.missing
        return Count(covered, wrong, missing)

    def _after(self, before: int, copy: Copy) -> int:
        """The state after `copy` landed in a layer that was in state `before`."""
        children = self._children.get(id(copy))
        if children is None:
            children = self._children[id(copy)] = {}
            self._kept.append(copy)
        after = children.get(before)
        if after is None:
            after = children[before] = len(self._parents)
            self._parents.append(before)
            self._copies.append(copy)
        return after

    def _chain(self, state: int) -> list[Copy]:
        chain = []
        while state:
            copy = self._copies[state]
            assert copy is not None
            chain.append(copy)
            state = self._parents[state]
        return chain[::-1]

    def _count(self, state: int, need: Need) -> Count:
        key = (state, id(need))
        known = self._counts.get(key)
        if known is not None:
            return known
        if any(copy.by_unit for copy in self._chain(state)):
            tokens = np.arange(self.shape.block_size)
            held = self._units(state, need.where)
            covered = int((held == need.codes[:, None] * self.shape.block_size + tokens).all(axis=1).sum())
            missing = int((held == EMPTY).all(axis=1).sum())
        else:
            cells = self._cells(state)[need.where]
            covered = int((cells == need.codes).sum())
            missing = int((cells == EMPTY).sum())
        self._kept.append(need)
        count = self._counts[key] = Count(covered, len(need.where) - covered - missing, missing)
        return count

    def _cells(self, state: int) -> Codes:
        """Codes of all cells, for a state that whole cells made."""
        cells: Codes = np.zeros(self.shape.cells, dtype=np.int64)
        for copy in self._chain(state):
            cells[copy.where] = copy.codes
        return cells

    def _units(self, state: int, cells: Codes) -> Codes:
        """Unit codes of some cells, shape [cells, block_size]."""
        units: Codes = np.zeros(self.shape.units, dtype=np.int64)
        tokens = np.arange(self.shape.block_size)
        for copy in self._chain(state):
            if copy.by_unit:
                units[copy.where] = copy.codes
            else:
                codes = (copy.codes[:, None] * self.shape.block_size + tokens) * (copy.codes[:, None] > 0)
                units[_units_of_cells(self.shape, copy.where)] = codes
        held: Codes = units[_units_of_cells(self.shape, cells)]
        return held


def _units_of_cells(shape: CacheShape, cells: Codes) -> Codes:
    """Unit indices of whole cells, shape [cells, block_size]."""
    plane_block, slot = np.divmod(cells, shape.heads)
    tokens = np.arange(shape.block_size)
    units: Codes = (plane_block[:, None] * shape.block_size + tokens) * shape.heads + slot[:, None]
    return units


def _cells_of_units(shape: CacheShape, units: Codes) -> Codes:
    """The cell in which each unit lies."""
    block_token, slot = np.divmod(units, shape.heads)
    cells: Codes = block_token // shape.block_size * shape.heads + slot
    return cells
