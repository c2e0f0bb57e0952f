"""Caches of the two sides that lie differently in memory: the model against bytes moved by hand, and what people read."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcover import Result, build, run
from kvcover.sim.cache.batch import Slice, head_slices, whole_blocks
from kvcover.sim.cache.geometry import AXES, CacheShape, Geometry
from kvcover.sim.cache.ledger import SourceCache
from kvcover.sim.errors import InputError
from kvcover.sim.releases.records import PUBLISHED
from tests.oracle import memory_by_hand as by_hand
from tests.oracle.memory_by_hand import Side

TOKENS = 16
# Sizes that fall together where the connector goes by the lengths of axes: 2 blocks, or as many heads as tokens a block.
KV_FORMS = [(layout, order, blocks, size, dtype) for layout, order in AXES if layout != "latent"
            for blocks, size, dtype in ((9, 4, "bf16"), (7, 4, "fp16"), (5, 8, "bf16"), (9, 4, "fp8"), (2, 16, "bf16"))]  # fmt: skip
MLA_FORMS = [(layout, order, blocks, size, dtype) for layout, order in (("latent", "NHD"), ("standard", "HND"))
             for blocks, size, dtype in ((9, 4, "bf16"), (5, 8, "bf16"), (9, 4, "fp8"), (9, 4, "fp16"))]  # fmt: skip


def block_ids(side: Side) -> list[int]:
    """Out of order, some of them neighbours, never block 0."""
    wanted = TOKENS // side.block_size
    return ([3, 4, 6, 1][:wanted] if wanted > 1 else [1]) if side.num_blocks > wanted else list(range(1, wanted + 1))


def scenario(release: str, mode: str, prefill: Side, decode: Side, **fields: Any) -> dict[str, Any]:
    def engine(side: Side) -> dict[str, Any]:
        order = {} if side.heads == 0 else {"order": side.order}
        return {
            "num_blocks": side.num_blocks,
            "block_size": side.block_size,
            "kv_dtype": side.dtype,
            "layout": side.layout,
            **order,
        }

    heads = prefill.heads
    return {
        "release": release,
        "mode": mode,
        "model": f"layers=1,mla={prefill.head_dim}" if heads == 0 else f"layers=1,kv_heads={heads},head_dim={prefill.head_dim}",
        "prompt_tokens": TOKENS,
        "fabric": "loopback",
        "prefill": engine(prefill),
        "decode": engine(decode),
        "requests": [{"prefill_blocks": block_ids(prefill), "decode_blocks": block_ids(decode)}],
        **fields,
    }


def check(release: str, mode: str, prefill: Side, decode: Side) -> None:
    result = run(build(scenario(release, mode, prefill, decode)))
    (rank,) = result.by_rank
    read, written = block_ids(prefill), block_ids(decode)
    if not all(by_hand.starts(release, side) for side in (prefill, decode)):
        assert (result.outcome, rank.missing, result.sets.told) == ("crash", 1.0, [])
        return
    try:
        entries = by_hand.moved(release, mode, prefill, decode, read, written)
    except by_hand.Refused:
        assert (result.outcome, rank.missing) == ("hang" if mode == "write" else "crash", 1.0)
        return
    counts = by_hand.graded(entries, prefill, decode, read, written)
    assert (rank.coverage, rank.wrong, rank.missing) == pytest.approx([count / sum(counts) for count in counts])


@pytest.mark.parametrize("release", PUBLISHED)
@pytest.mark.parametrize("mode", ["write", "read"])
@pytest.mark.parametrize("heads", [0, 2, 4])
def test_every_pair_of_caches(release: str, mode: str, heads: int) -> None:
    """With 4 heads, blocks of 4 tokens head-major are taken for token-major ones; a pool of 2 interleaved for split."""
    forms, others = (MLA_FORMS, MLA_FORMS) if heads == 0 else (KV_FORMS, KV_FORMS[::4])  # of each layout and each size some
    for here, there in itertools.product(forms, others):
        prefill, decode = (Side(*form[:4], heads, 4, form[4]) for form in (here, there))
        try:
            check(release, mode, prefill, decode)
        except AssertionError as error:
            raise AssertionError(f"{prefill} → {decode}: {error}") from error


@st.composite
def slices(draw: st.DrawFn) -> tuple[CacheShape, CacheShape, Slice, list[tuple[int, int]]]:
    size = draw(st.integers(1, 4))

    def shape(layout: str) -> CacheShape:
        order = draw(st.sampled_from(["HND"] if layout == "packed" else ["NHD", "HND"]))
        heads, blocks = draw(st.integers(1, 3)), draw(st.integers(4, 6))
        return CacheShape(planes=2, num_blocks=blocks, block_size=size, heads=heads, head_bytes=2, layout=layout, order=order)

    packed = draw(st.booleans())
    mine, theirs = (shape("packed" if packed else draw(st.sampled_from(["split", "interleaved"]))) for _ in range(2))
    count = draw(st.integers(1, min(mine.heads, theirs.heads)))
    part = Slice(draw(st.integers(0, mine.heads - count)), draw(st.integers(0, theirs.heads - count)), count)
    read, written = (draw(st.lists(st.integers(1, 3), unique=True, min_size=2, max_size=2)) for _ in range(2))  # never 0
    return mine, theirs, part, list(zip(sorted(read), written, strict=True))


def merged(entries: list[tuple[int, int, int]]) -> int:
    """Work requests after merging what is contiguous on both sides."""
    left = 0
    end = (-1, -1)
    for here, there, size in sorted(entries):
        left += (here, there) != end
        end = (here + size, there + size)
    return left


@given(slices())
@settings(max_examples=500, deadline=None)
def test_work_requests_of_slices(case: tuple[CacheShape, CacheShape, Slice, list[tuple[int, int]]]) -> None:
    """The closed form against runs that are merged one by one."""
    mine, theirs, part, pairs = case
    geometry = Geometry(layers=1, kv_heads=8, head_dim=1)
    here, there = (
        Side(s.layout, s.order, s.num_blocks, s.block_size, s.heads, 1, "bf16") for s in (mine.taken_for, theirs.taken_for)
    )
    entries = [
        (here.at(plane, read, token, part.first + n), there.at(plane, written, token, part.into + n), 2)
        for plane, (read, written), token, n in itertools.product(range(2), pairs, range(mine.block_size), range(part.heads))
    ]
    source = SourceCache(mine, np.arange(mine.num_blocks), 0)
    read, written = (np.array(blocks) for blocks in zip(*pairs, strict=True))
    assert head_slices(geometry, source, theirs, read, written, part).entries == merged(entries)


def test_work_requests_of_whole_blocks() -> None:
    """K and V of an interleaved block follow each other on both sides, those of a split one do not."""
    geometry, blocks = Geometry(layers=1, kv_heads=2, head_dim=1), np.array([1, 2, 4])
    for layout, order, entries in (("split", "NHD", 4), ("interleaved", "NHD", 2), ("packed", "HND", 2)):
        shape = CacheShape(planes=2, num_blocks=8, block_size=2, heads=2, head_bytes=2, layout=layout, order=order)
        source = SourceCache(shape, np.arange(8), 0)
        assert whole_blocks(geometry, source, shape, blocks, blocks, by_reader=False).entries == entries


def unlike(**prefill: Any) -> Result:
    fields = {"release": "0.27.0", "model": "layers=2,kv_heads=2,head_dim=8", "prompt_tokens": 64, "fabric": "loopback"}
    return run(build({**fields, "prefill": prefill}))


@pytest.mark.parametrize(("prefill", "outcome", "cause"), [
    ({"layout": "interleaved"}, "corrupt", "prefill's caches are interleaved NHD, decode's split NHD"),
    ({"order": "HND"}, "corrupt", "prefill's caches are split HND, decode's split NHD"),
    ({"block_size": 32}, "crash", "prefill's blocks hold 32 tokens, decode's 16 tokens"),
    ({"kv_dtype": "fp8"}, "corrupt", "prefill's KV is fp8, decode's bf16"),
    ({"kv_dtype": "fp16"}, "corrupt", "prefill's KV is fp16, decode's bf16"),
])  # fmt: skip
def test_the_finding_names_what_differs(prefill: dict[str, Any], outcome: str, cause: str) -> None:
    """Blocks of twice our tokens end beyond decode's memory, which MoRI refuses; all else is not noticed."""
    result = unlike(**prefill)
    assert result.outcome == outcome
    kind = "wrong-content" if outcome == "corrupt" else "transfer-failed"
    assert cause in next(finding for finding in result.findings if finding.kind == kind).causes


def test_a_refused_layout_names_the_policy() -> None:
    result = run(build({"release": "0.25.1", "prefill": {"layout": "packed"}}))
    assert result.outcome == "crash"
    (crash,) = (finding for finding in result.findings if finding.kind == "crash")
    assert "cache_layouts = split_interleaved" in crash.causes[0]


@pytest.mark.parametrize(("fields", "place", "hint"), [
    ({"prefill": {"layout": "interleavd"}}, "prefill.layout", "interleaved"),
    ({"decode": {"layout": "latent"}}, "decode.layout", "use split or interleaved"),
    ({"model": "deepseek-v3", "decode": {"layout": "split"}}, "decode.layout", "use latent or standard"),
    ({"prefill": {"layout": "packed", "order": "NHD"}}, "prefill.order", "leave it out"),
    ({"model": "deepseek-v3", "prefill": {"order": "HND"}}, "prefill.order", "leave it out"),
    ({"prefill": {"order": "nhd"}}, "prefill.order", "NHD"),
    ({"prefill": {"block_size": 0}}, "prefill.block_size", ">= 1"),
    ({"prefill": {"block_size": 32}, "prompt_tokens": 48}, "prompt_tokens", "use 64"),
    ({"prefill": {"block_size": 32}, "requests": [{"prompt_tokens": 8}]}, "requests[0].prompt_tokens", "use 32"),
    ({"decode": {"kv_dtype": "fp4"}}, "decode.kv_dtype", "fp8"),
    ({"decode": {"kv_dtyp": "fp8"}}, "decode.kv_dtyp", "kv_dtype"),
    ({"prefill": {"block_size": 32}, "requests": [{"prefill_blocks": [1, 2]}], "prompt_tokens": 32},
     "requests[0].prefill_blocks", "give 1"),
])  # fmt: skip
def test_nonsense_is_refused(fields: dict[str, Any], place: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        run(build(fields))
    assert place in str(caught.value)
    assert hint in str(caught.value)
