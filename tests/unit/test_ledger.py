"""The ledger: whole cells against single units, and both against a dictionary written byte by byte."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcover.sim.cache.batch import whole_blocks
from kvcover.sim.cache.geometry import CacheShape, Geometry
from kvcover.sim.cache.ledger import Count, Ledger, Need, SourceCache, cell_copy, cell_index, code_of, raw_copy


def shape_of(geometry: Geometry, heads: int, num_blocks: int, block_size: int) -> CacheShape:
    return CacheShape(planes=geometry.planes, num_blocks=num_blocks, block_size=block_size, heads=heads, head_bytes=1)


@st.composite
def writes(draw: st.DrawFn) -> tuple[Geometry, CacheShape, list[tuple[list[int], list[int], int]], list[int]]:
    """Some writes of whole blocks: (contents, into which blocks, first head), and the blocks that are needed."""
    geometry = Geometry(layers=1, kv_heads=4, head_dim=1, mla=False)
    shape = shape_of(geometry, draw(st.sampled_from([1, 2])), num_blocks=6, block_size=draw(st.integers(1, 3)))
    some = []
    for _ in range(draw(st.integers(0, 4))):
        blocks = draw(st.lists(st.integers(0, 5), unique=True, min_size=1, max_size=4))
        contents = draw(st.lists(st.integers(1, 4), min_size=len(blocks), max_size=len(blocks)))
        some.append((contents, blocks, draw(st.integers(0, 2))))
    return geometry, shape, some, draw(st.lists(st.integers(0, 5), unique=True, min_size=1, max_size=4))


@given(writes())
@settings(max_examples=150, deadline=None)
def test_cells_and_units_count_alike(case: tuple[Geometry, CacheShape, list[tuple[list[int], list[int], int]], list[int]]) -> None:
    """The fast way (whole cells) and the exact way (every token of every head) agree, and so does a plain dictionary."""
    geometry, shape, some, needed = case
    by_cell, by_unit = Ledger(geometry, shape, tp=1), Ledger(geometry, shape, tp=1)
    for ledger in (by_cell, by_unit):
        ledger.admit(0, np.arange(6))
    held: dict[tuple[int, int, int], tuple[int, int]] = {}
    for contents, blocks, first_head in some:
        pool = np.zeros(shape.num_blocks, dtype=np.int64)
        pool[blocks] = contents
        copy = cell_copy(geometry, shape, np.array(contents), np.array(blocks), first_head, 0, shape.heads)
        by_cell.land(0, 0, 0, copy)
        length = shape.block_units
        starts = np.array([(plane * shape.num_blocks + b) * length for b in blocks for plane in range(2)])
        raw = raw_copy(geometry, SourceCache(shape, pool, first_head), shape, starts, starts, length)
        assert raw is not None
        assert by_unit.land_astray(0, 0, raw, home=0) == 0
        for content, block in zip(contents, blocks, strict=True):
            for plane in range(2):
                for slot in range(shape.heads):
                    held[plane, block, slot] = (content, first_head + slot)
    where, codes, want = [], [], {"covered": 0, "wrong": 0, "missing": 0}
    for plane in range(2):
        for slot in range(shape.heads):
            where.append(cell_index(shape, plane, np.array(needed), slot))
            codes.append(code_of(geometry, np.full(len(needed), 2), plane, 1 + slot))
            for block in needed:
                have = held.get((plane, block, slot))
                want["missing" if have is None else "covered" if have == (2, 1 + slot) else "wrong"] += 1
    need = Need(np.concatenate(where), np.concatenate(codes))
    expected = Count(want["covered"], want["wrong"], want["missing"])
    assert by_cell.count(0, 0, 0, need) == expected
    assert by_unit.count(0, 0, 0, need) == expected


def test_a_batch_past_the_region_is_refused_whole() -> None:
    """MoRI checks every entry against the registered length: the V plane of a larger block never fits (see docs/protocol.md)."""
    geometry = Geometry(layers=1, kv_heads=8, head_dim=1)
    wide, narrow = shape_of(geometry, 4, 8, 2), shape_of(geometry, 2, 8, 2)
    pool, block = np.arange(8), np.array([1])
    assert whole_blocks(geometry, SourceCache(wide, pool, 0), narrow, block, block, by_reader=False).copy is None
    assert whole_blocks(geometry, SourceCache(narrow, pool, 0), wide, block, block, by_reader=False).copy is not None


def test_a_write_astray_counts_the_cells_that_it_changes() -> None:
    """Request 0 owns blocks 4 and 5, request 1 block 6; a batch of request 0 over 4 to 7 changes 6 and 7."""
    geometry = Geometry(layers=1, kv_heads=1, head_dim=1, mla=True)
    shape = shape_of(geometry, 1, 8, 2)
    ledger = Ledger(geometry, shape, tp=1)
    ledger.admit(0, np.array([4, 5]))
    ledger.admit(1, np.array([6]))
    copy = cell_copy(geometry, shape, np.array([1, 2, 3, 4]), np.array([4, 5, 6, 7]), 0, 0, 1)
    assert ledger.land_astray(0, 0, copy, home=0) == 2
    assert ledger.land_astray(0, 0, copy, home=None) == 0, "the same identities again change nothing"
    need = Need(np.array([6]), np.array([99]))
    assert ledger.count(0, 0, 1, need) == Count(0, 1, 0)
    ledger.admit(2, np.array([7]))
    assert ledger.count(0, 0, 2, Need(np.array([7]), code_of(geometry, np.array([4]), 0, 0))) == Count(1, 0, 0), (
        "it lies there still"
    )


def test_a_new_owner_finds_what_the_last_one_left() -> None:
    geometry = Geometry(layers=1, kv_heads=1, head_dim=1, mla=True)
    shape = shape_of(geometry, 1, 4, 1)
    ledger = Ledger(geometry, shape, tp=1)
    ledger.admit(0, np.array([1, 2]))
    ledger.land(0, 0, 0, cell_copy(geometry, shape, np.array([1, 2]), np.array([1, 2]), 0, 0, 1))
    ledger.admit(1, np.array([2, 3]))
    need = Need(np.array([2, 3]), code_of(geometry, np.array([7, 8]), 0, 0))
    assert ledger.count(0, 0, 1, need) == Count(0, 1, 1)
    ledger.land(0, 0, 1, cell_copy(geometry, shape, np.array([7, 8]), np.array([2, 3]), 0, 0, 1))
    assert ledger.count(0, 0, 1, need) == Count(2, 0, 0)
