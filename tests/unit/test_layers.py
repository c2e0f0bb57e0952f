"""Models whose layers are not all alike: sliding windows with block tables of their own, and MLA beside GQA."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvcover import InputError, Result, build, run
from kvcover.sim.cache.geometry import block_tables
from kvcover.sim.cache.layers import Table
from kvcover.sim.cache.presets import PRESETS, resolve_model

SLIDING = "layers=4,kv_heads=8,head_dim=8,window=32,full_every=2"
WITH_WINDOWS = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")


def go(release: str, model: str = SLIDING, **fields: Any) -> Result:
    return run(build({"release": release, "model": model, "mode": "read", "prompt_tokens": 64, "fabric": "loopback", **fields}))


# -- block tables ------------------------------------------------------------------------------------------------

# What vLLM 0.30.0 and 0.33.0 make of layers with these windows (`_get_kv_cache_groups_uniform_page_size`).
GROUPED = [
    ([32, 0, 32, 0], ((0, 2), (1, 3))),
    ([0, 32, 32, 32], ((0,), (1,), (2,), (3,))),
    ([32, 32, 0, 32, 32], ((0,), (1,), (3,), (4,), (2,))),
    ([0, 0, 32, 32, 32], ((0, 1), (2, 4), (3,))),
    ([32] * 5 + [0], ((0,), (1,), (2,), (3,), (4,), (5,))),
    (([32] * 5 + [0]) * 2, ((0, 6), (1, 7), (2, 8), (3, 9), (4, 10), (5, 11))),
    ([32] * 4 + [0] * 5, ((0, 1, 2, 3), (4, 5, 6, 7, 8))),
    ([0] * 3, ((0, 1, 2),)),
    ([32] * 3, ((0, 1, 2),)),
]


@pytest.mark.parametrize(("windows", "tables"), GROUPED)
def test_layers_of_unequal_windows_have_the_block_tables_of_vllm(windows: list[int], tables: tuple[tuple[int, ...], ...]) -> None:
    assert block_tables(windows) == tables


# (window, tokens, block size) and the decode table of vLLM's KV cache manager, 0.30.0 and 0.33.0, when all but the last
# token is loaded: how many of its blocks are null.
ALLOCATED = [
    (32, 64, 16, 2),
    (40, 64, 16, 1),
    (16, 64, 16, 3),
    (32, 70, 16, 2),
    (33, 70, 16, 2),
    (17, 128, 16, 6),
    (100, 64, 16, 0),
]


@pytest.mark.parametrize(("window", "tokens", "block_size", "null"), ALLOCATED)
def test_decode_allocates_what_vllm_does(window: int, tokens: int, block_size: int, null: int) -> None:
    assert Table(window).skipped(tokens, block_size) == null


def test_a_skipped_block_is_one_that_no_token_to_come_attends_to() -> None:
    for window, tokens, size in product((1, 7, 16, 40), range(1, 80, 3), (1, 4, 16)):
        attended = {position // size for position in range(tokens) if position > tokens - 1 - window}
        skipped = Table(window).skipped(tokens, size)
        assert attended == set(range(skipped, -(-tokens // size)))
        kept = Table(window).kept(size)
        assert kept is not None
        assert len(attended) <= kept


# -- sliding windows, counted one block at a time ------------------------------------------------------------------


def slides(tokens: int, window: int, size: int, ahead: tuple[int, int], from_prompt: bool) -> tuple[float, float]:
    """Covered and wrong cells of two layers, one with a window: tables cut as the connector cuts them, then paired."""
    prompt = -(-tokens // size)
    prefill = list(range(-(-(tokens + ahead[0]) // size)))  # what a block holds is its number
    decode: list[int | None] = [None] * -(-(tokens + ahead[1]) // size)
    needed = {"full": set(range(prompt)), "sliding": {p // size for p in range(tokens) if p >= tokens - window}}
    covered = wrong = 0
    for kind in ("full", "sliding"):
        ours, theirs = list(range(len(decode))), prefill
        if kind == "sliding":
            keep = -(-window // size) + 1
            end = prompt if from_prompt else None
            ours, theirs = ours[:end][-keep:], theirs[:end][-keep:]
        if from_prompt:
            pairs = [(block, block) for block in ours if block in theirs]
        elif len(ours) < len(theirs):
            pairs = list(zip(ours, theirs[len(theirs) - len(ours) :], strict=True))
        else:
            pairs = list(zip(ours, theirs, strict=False))
        held = {to: of if of < prompt else None for to, of in pairs}  # a block beyond the prompt was never filled
        covered += sum(held.get(block) == block for block in needed[kind])
        wrong += sum(held.get(block) not in (block, None) for block in needed[kind])
    total = sum(len(blocks) for blocks in needed.values())
    return covered / total, wrong / total


@pytest.mark.parametrize("ahead", [(0, 0), (0, 1), (1, 0), (1, 1), (0, 9), (3, 0)])
@pytest.mark.parametrize(("tokens", "window"), [(64, 32), (64, 17), (61, 30), (48, 100), (33, 1), (16, 16)])
@pytest.mark.parametrize("release", ["0.31.0", "0.33.0", "reference"])
def test_what_a_sliding_layer_gets(release: str, tokens: int, window: int, ahead: tuple[int, int]) -> None:
    model = f"layers=2,kv_heads=2,head_dim=8,window={window},full_every=2"
    result = go(release, model, prompt_tokens=tokens, prefill={"lookahead_tokens": ahead[0]}, decode={"lookahead_tokens": ahead[1]})
    covered, wrong = slides(tokens, window, 16, ahead, from_prompt=release == "reference")
    assert [result.coverage, result.wrong] == pytest.approx([covered, wrong])
    assert result.outcome == ("ok" if covered == 1 else "corrupt")
    assert release != "reference" or result.outcome == "ok"


def test_lookahead_blocks_shift_a_sliding_layer_by_a_block() -> None:
    """Each side counts the exchanged blocks from its own table's end, and decode's has one more (measured, 0.31-0.33)."""
    result = go("0.33.0", decode={"lookahead_tokens": 1})
    assert (result.outcome, round(result.coverage, 3), round(result.wrong, 3)) == ("corrupt", 0.667, 0.333)
    assert any("windows = table_tail" in cause for finding in result.findings for cause in finding.causes)
    assert go("0.33.0", decode={"lookahead_tokens": 1}, overrides={"windows": "prompt_tail"}).outcome == "ok"


@pytest.mark.parametrize("release", WITH_WINDOWS)
def test_sliding_windows_in_write_need_the_hybrid_manager_off(release: str) -> None:
    refused = go(release, mode="write")
    assert (refused.outcome, refused.coverage) == ("crash", 0.0)
    assert any("never start" in finding.text or "NotImplementedError" in finding.text for finding in refused.findings)
    off = {"hybrid_kv": False}
    assert go(release, mode="write", prefill=off, decode=off).outcome == "ok"
    assert go("reference", mode="write").outcome == "refused"


def test_before_0_30_a_sliding_layer_is_like_any_other() -> None:
    for mode in ("write", "read"):
        result = go("0.29.0", mode=mode, timing={"decode_layer_ns": 10**7})
        assert result.outcome == "ok"


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_one_engine_without_the_hybrid_manager_kills_decode(side: str) -> None:
    fields: dict[str, Any] = {side: {"hybrid_kv": False}}
    result = go("0.33.0", **fields)
    assert result.outcome == "crash"
    assert any("block tables, and decode has" in finding.text for finding in result.findings)


def test_a_failed_read_kills_decode_if_there_are_several_block_tables() -> None:
    fault = ["fail-transfer:read,layer=1"]
    assert go("0.33.0", faults=fault).outcome == "crash"
    assert go("0.33.0", "layers=4,kv_heads=8,head_dim=8,window=32", faults=fault).outcome == "failed"
    assert go("reference", faults=fault).outcome == "failed"


def test_a_prefix_hit_needs_only_the_window() -> None:
    result = go("0.33.0", requests=[{"decode_hit_blocks": 3, "suffix_only": True}])
    assert result.outcome == "ok"


# -- MLA beside GQA ----------------------------------------------------------------------------------------------


def heads(rank: int, tp: int, total: int) -> list[int]:
    """vLLM's sharding, written by hand: a share each, or one head that several ranks hold."""
    return [head for head in range(total) if head * tp // total == rank] if tp <= total else [rank * total // tp]


def mla_model_with_a_gqa_layer(p: int, d: int, total: int) -> list[tuple[float, float]]:
    """Covered and wrong of each decode rank: 0.33 maps such a model as if it had one head, in each layer (N7)."""
    ranks = []
    for rank in range(d):
        writer = rank * p // d if d >= p else rank * (p // d)
        mine, theirs = heads(writer, p, total), heads(rank, d, total)
        whole = len(mine) == len(theirs)
        got = [mine[slot] if whole or slot == 0 else None for slot in range(len(theirs))]
        right = sum(a == b for a, b in zip(got, theirs, strict=True))
        wrong = sum(a not in (b, None) for a, b in zip(got, theirs, strict=True))
        cells = 2 + 2 * len(theirs)  # two latent layers, K and V of one
        ranks.append(((2 + 2 * right) / cells, 2 * wrong / cells))
    return ranks


@pytest.mark.parametrize(("p", "d"), [(1, 1), (2, 2), (1, 2), (2, 4), (1, 8), (2, 1), (4, 2), (8, 2), (8, 8)])
@pytest.mark.parametrize("total", [2, 8])
def test_an_mla_model_with_a_gqa_layer_in_0_33(p: int, d: int, total: int) -> None:
    model = f"layers=3,mla=64+16,kv_heads={total},head_dim=8,gqa_every=2"
    result = go("0.33.0", model, mode="write", prefill={"tp": p, "num_blocks": 9}, decode={"tp": d, "num_blocks": 9})
    expected = mla_model_with_a_gqa_layer(p, d, total)
    assert [(rank.coverage, rank.wrong) for rank in result.by_rank] == [pytest.approx(each) for each in expected]
    assert result.outcome == ("ok" if all(covered == 1 for covered, _ in expected) else "corrupt")
    assert result.sets.told == [f"D{rank}" for rank in range(d)]


@pytest.mark.parametrize(("p", "d"), [(2, 2), (2, 4), (4, 2), (1, 8), (8, 4), (4, 8)])
@pytest.mark.parametrize("total", [2, 4, 8])
def test_a_gqa_model_with_an_mla_layer_in_0_33(p: int, d: int, total: int) -> None:
    """A latent can't be sliced: whenever ranks hold unequally many heads the transfer ends there (N8)."""
    model = f"layers=3,kv_heads={total},head_dim=8,mla=64+16,mla_every=2"
    result = go("0.33.0", model, mode="write", prefill={"tp": p}, decode={"tp": d})
    shares = {len(heads(0, tp, total)) for tp in (p, d)}
    assert result.outcome == ("ok" if len(shares) == 1 else "hang")
    assert (result.sets.told == []) == (len(shares) == 2)


@pytest.mark.parametrize(
    "model", ["layers=3,mla=64+16,kv_heads=8,head_dim=8,gqa_every=2", "layers=3,kv_heads=8,head_dim=8,mla=8,mla_every=2"]
)
def test_mixed_layers_start_without_the_hybrid_manager_only_in_0_30_to_0_32(model: str) -> None:
    off = {"hybrid_kv": False}
    for release in ("0.30.0", "0.31.0", "0.32.0"):
        assert go(release, model).outcome == "crash"
        assert go(release, model, prefill=off, decode=off).outcome == "ok"
    for release in ("0.29.0", "0.33.0", "reference"):
        assert go(release, model).outcome == "ok"
    assert go("reference", model, prefill={"tp": 2}).outcome == "refused"


# -- names, numbers, config.json -----------------------------------------------------------------------------------


def config(tmp_path: Path, **fields: Any) -> str:
    path = tmp_path / "config.json"
    known = {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    path.write_text(json.dumps(known | fields))
    return str(path)


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, [0] * 6),
        ({"sliding_window": None}, [0] * 6),
        ({"sliding_window": 8, "use_sliding_window": False}, [0] * 6),
        ({"sliding_window": 8}, [8] * 6),
        ({"sliding_window": 8, "sliding_window_pattern": 3}, [8, 8, 0, 8, 8, 0]),
        ({"sliding_window": 8, "model_type": "gemma2"}, [8, 0] * 3),
        ({"sliding_window": 8, "model_type": "gemma3_text"}, [8] * 5 + [0]),
        ({"sliding_window": 8, "layer_types": ["full_attention", *["sliding_attention"] * 5]}, [0] + [8] * 5),
        ({"sliding_window": 8, "layer_types": ["full_attention"] * 6}, [0] * 6),
    ],
)
def test_windows_of_a_config(tmp_path: Path, fields: dict[str, Any], windows: list[int]) -> None:
    assert list(resolve_model(config(tmp_path, **fields)).windows) == windows


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, "no list of 6 types"),
        ({"sliding_window": 8, "layer_types": ["linear_attention"] * 6}, "recurrent state can't be read"),
        ({"sliding_window": 0}, "out of range"),
        ({"sliding_window": "8"}, "not a whole number"),
        ({"sliding_window": 8, "sliding_window_pattern": 0}, "no count of layers"),
    ],
)
def test_a_config_that_is_wrong(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        resolve_model(config(tmp_path, **fields))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layers=4,kv_heads=8,head_dim=8,full_every=2", "has not the fields of a model; add window$"),
        ("layers=4,mla=64+16,window=32", "has not the fields of a model; leave out window$"),
        ("layers=4,kv_heads=8,head_dim=8,mla=8,window=4,mla_every=2", "leave out window$"),
        ("kv_heads=8,head_dim=8,window=4", "add layers$"),
        ("layers=4,kv_heads=8,head_dim=8,window=0", "out of range"),
        ("layers=4,kv_heads=8,head_dim=8,window=8,full_every=5", "out of range"),
        ("layers=4,kv_heads=8,head_dim=8,mla=64,mla_evry=2", "mla_every"),
    ],
)
def test_numbers_that_make_no_model(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        resolve_model(text)


def test_every_layer_of_another_kind_is_a_model_of_that_kind() -> None:
    assert resolve_model("layers=4,kv_heads=8,head_dim=8,window=8,full_every=1") == resolve_model("layers=4,kv_heads=8,head_dim=8")


@pytest.mark.parametrize(("name", "sliding", "tables"), [("gemma-3-27b", 52, 7), ("gpt-oss-120b", 18, 2)])
def test_presets_with_windows(name: str, sliding: int, tables: int) -> None:
    windows = PRESETS[name].geometry.windows
    assert (sum(window > 0 for window in windows), len(block_tables(windows))) == (sliding, tables)
    assert go("0.33.0", name, prompt_tokens=2048, prefill={"tp": 4}, decode={"tp": 4}).outcome == "ok"


# -- pipeline stages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_pipeline_stages_take_the_same_ports(side: str) -> None:
    """The port of a rank is base + dp + tp in every release: a second stage can't bind it, and waits for ever."""
    result = go("0.33.0", "layers=2,mla=64+16", mode="write", **{side: {"pp": 2}})
    assert result.outcome == "hang"
    assert any("second pipeline stage" in finding.text for finding in result.findings)
    assert go("reference", "layers=2,mla=64+16", mode="write", **{side: {"pp": 2}}).outcome == "refused"


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_request_that_reads_nothing_is_no_matter_of_block_tables(side: str) -> None:
    """Decode computes the last token of a prompt itself, and so all of this one, whatever tables the other side has."""
    result = go("0.30.0", SLIDING, prompt_tokens=1, **{side: {"hybrid_kv": False}})
    assert result.outcome == "recomputed"


@pytest.mark.parametrize(("tp", "total"), [(1, 1), (1, 4), (2, 2), (2, 8), (4, 8), (8, 4)])
@pytest.mark.parametrize("release", ["0.33.0", "reference"])
def test_unequal_pools_of_an_mla_model_with_a_gqa_layer(release: str, tp: int, total: int) -> None:
    """0.33.0 then moves head by head, and as many as the model as a whole has: one. `reference` moves all of the layer."""
    model, held = f"layers=3,mla=64+16,kv_heads={total},head_dim=8,gqa_every=2", len(heads(0, tp, total))
    sides = {"prefill": {"tp": tp, "num_blocks": 20}, "decode": {"tp": tp, "num_blocks": 10}}
    result = go(release, model, mode="write", **sides)
    moved = 1 if release == "0.33.0" else held
    assert [rank.coverage for rank in result.by_rank] == [pytest.approx((2 + 2 * moved) / (2 + 2 * held))] * tp
    assert result.outcome == ("ok" if moved == held else "corrupt")


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_late_rank_does_not_start_an_engine_of_pipeline_stages(side: str) -> None:
    late = f"late-rank:{side[0].upper()}1,ms=100"
    result = go("0.33.0", "layers=2,mla=64+16", mode="write", faults=[late], **{side: {"pp": 2, "tp": 2}})
    assert result.outcome == "hang"


def test_an_engine_starts_with_the_last_of_its_late_ranks() -> None:
    """Prefill computes two layers of 2 ms each once both ranks are there, and not before."""
    for latest, *others in ((3000, 10), (3000, 10, 20)):
        faults = [f"late-rank:P{rank},ms={ms}" for rank, ms in enumerate((*others, latest))]
        result = go("0.33.0", "layers=2,mla=64+16", mode="write", prefill={"tp": len(faults)}, faults=faults)
        assert result.time_to_go_ms is not None
        assert result.time_to_go_ms.p50 > latest


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_reference_refuses_one_engine_without_windows(side: str) -> None:
    """Also where all layers slide, and each engine has one block table: prefill would offer the tail of its own only."""
    result = go("reference", "layers=2,kv_heads=8,head_dim=8,window=16", prompt_tokens=96, **{side: {"hybrid_kv": False}})
    assert result.outcome == "refused"
