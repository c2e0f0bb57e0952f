"""Models with recurrent states: which release starts them, who writes which share of a state, and what a request holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcover import InputError, Result, build, run
from kvcover.sim.cache.geometry import block_tables
from kvcover.sim.cache.presets import PRESETS, resolve_model
from kvcover.sim.releases.records import PUBLISHED

STATES = "layers=4,kv_heads=8,head_dim=8,state=8x16,state_every=2"
TWO_HEADS = "layers=4,kv_heads=2,head_dim=8,state=8x16,state_every=2"
LATENT = "layers=4,mla=64+16,state=8x16,state_every=2"


def go(release: str, mode: str, p: int = 1, d: int = 1, model: str = STATES, **fields: Any) -> Result:
    sizes = {"prefill": {"tp": p, **fields.pop("prefill", {})}, "decode": {"tp": d, **fields.pop("decode", {})}}
    return run(
        build({"release": release, "mode": mode, "model": model, "prompt_tokens": 64, "fabric": "loopback", **sizes, **fields})
    )


@pytest.mark.parametrize("release", PUBLISHED)
@pytest.mark.parametrize("mode", ["read", "write"])
def test_who_starts_a_model_with_states(release: str, mode: str) -> None:
    """vLLM refuses up to 0.29, the connector in 0.30; 0.31 and 0.32 have READ, 0.33 both (measured, and so in the sources)."""
    at = PUBLISHED.index(release)
    starts = at >= PUBLISHED.index("0.31.0" if mode == "read" else "0.33.0")
    field = "hybrid_manager" if at < PUBLISHED.index("0.30.0") else "states"
    result = go(release, mode)
    assert (result.outcome, result.coverage) == (("ok", 1.0) if starts else ("crash", 0.0))
    assert starts or any(f"{field} = " in cause for finding in result.findings for cause in finding.causes)
    assert go(release, mode, prefill={"hybrid_kv": False}).outcome == "crash"


@pytest.mark.parametrize("release", ["0.31.0", "0.32.0", "0.33.0"])
@pytest.mark.parametrize(("p", "d"), [(2, 4), (4, 2), (1, 2)])
def test_read_needs_equal_tp(release: str, p: int, d: int) -> None:
    result = go(release, "read", p, d, LATENT)
    assert (result.outcome, result.coverage, result.sets.prefill_released) == ("crash", 0.0, [])
    assert any(f"states of TP size {p} to TP size {d}" in finding.text for finding in result.findings)


def test_several_attention_tables_are_for_write_only() -> None:
    """Four layers that attend and two with states make two tables of attention, of two layers each."""
    model = "layers=6,kv_heads=8,head_dim=8,state=8x16,state_every=3"
    assert go("0.33.0", "read", model=model).outcome == "crash"
    assert go("0.33.0", "write", model=model).outcome == "ok"


def shares(rank: int, tp: int, heads: int) -> set[int]:
    """The state heads of a rank: equal shares, in order."""
    return {head for head in range(heads) if head * tp // heads == rank}


def held(rank: int, tp: int, kv_heads: int) -> set[int]:
    """The KV heads of a rank: shares, or one head that several ranks hold."""
    return {head for head in range(kv_heads) if head * tp // kv_heads == rank} or {rank * kv_heads // tp}


@pytest.mark.parametrize(("p", "d"), [(1, 2), (1, 8), (2, 4), (2, 1), (4, 1), (4, 2), (8, 2), (8, 4), (8, 8)])
@pytest.mark.parametrize(("model", "kv_heads"), [(STATES, 8), (TWO_HEADS, 2), (LATENT, 1)])
def test_what_a_lost_writer_leaves_out(p: int, d: int, model: str, kv_heads: int) -> None:
    """Every prefill rank writes its share of each state, whoever writes the heads: without rank 1, that share is missing.

    Counted a head at a time. Two layers attend (4 blocks each, K and V or a latent), two keep a state of two parts.
    """
    lost = min(1, p - 1)
    result = go("0.33.0", "write", p, d, model, faults=[f"fail-transfer:write,from=P{lost}"])
    expected = []
    for rank in range(d):
        writers = [source for source in range(p) if source * d // p == rank or source == rank * p // d]
        first: dict[int, int] = {}
        for source in writers:
            for head in held(source, p, kv_heads):
                first.setdefault(head, source)
        heads, states, planes = held(rank, d, kv_heads), shares(rank, d, 8), 1 if model == LATENT else 2
        got_heads = sum(first[head] != lost for head in heads)
        got_states = len(states - shares(lost, p, 8))
        total = 2 * (4 * planes * len(heads) + 2 * len(states))
        expected.append(2 * (4 * planes * got_heads + 2 * got_states) / total)
    assert [rank.coverage for rank in result.by_rank] == pytest.approx(expected)


@pytest.mark.parametrize(("p", "d", "writers"), [(2, 1, 2), (4, 1, 4), (4, 2, 2), (8, 2, 4), (1, 4, 1), (2, 2, 1)])
@pytest.mark.parametrize("model", [STATES, TWO_HEADS, LATENT])
def test_decode_waits_for_every_rank_that_has_a_state(p: int, d: int, writers: int, model: str) -> None:
    """`num_writers` counts all q = P/D ranks, those with nothing but a state too: one message less and decode waits."""
    result = go("0.33.0", "write", p, d, model)
    assert result.outcome == "ok"
    assert result.sets.prefill_told == [f"P{rank}" for rank in range(p)]
    for rank in range(writers):
        lost = go("0.33.0", "write", p, d, model, faults=[f"drop-notice:write_done,from=P{rank}"])
        waits = {rank * d // p} if p >= d else set(range(rank * d // p, (rank + 1) * d // p))
        assert lost.sets.told == [f"D{other}" for other in range(d) if other not in waits]


@pytest.mark.parametrize("release", ["0.31.0", "0.32.0"])
def test_an_unknown_size_is_not_equal_up_to_0_32(release: str) -> None:
    """The leg gives no TP size: own size to the guard of attention, but not to that of states (measured)."""
    faults = ["drop:remote_tp_size@decode", "drop:tp_size@decode"]
    assert go(release, "read", 2, 2, faults=faults).outcome == "crash"
    assert go(release, "read", 2, 2, "layers=4,kv_heads=8,head_dim=8", faults=faults).outcome == "ok"
    assert go("0.33.0", "read", 2, 2, faults=faults).outcome == "ok"


def test_an_unknown_size_in_write_is_a_hang() -> None:
    result = go("0.33.0", "write", 2, 2, faults=["drop:remote_tp_size"])
    assert (result.outcome, result.sets.told) == ("hang", [])
    assert go("0.33.0", "write", 2, 2, "layers=4,kv_heads=8,head_dim=8", faults=["drop:remote_tp_size"]).outcome == "ok"


@pytest.mark.parametrize(("release", "layer", "released"), [
    ("0.31.0", 0, 2), ("0.31.0", 1, 0), ("0.32.0", 0, 2), ("0.32.0", 1, 0), ("0.33.0", 0, 0), ("0.33.0", 1, 0),
])  # fmt: skip
def test_a_failed_read_kills_decode(release: str, layer: int, released: int) -> None:
    """Layer 0 attends, layer 1 keeps a state; prefill's blocks are released only where the forward had begun (measured)."""
    result = go(release, "read", 2, 2, faults=[f"fail-transfer:read,layer={layer}"])
    assert (result.outcome, len(result.sets.prefill_released or ())) == ("crash", released)
    assert go("reference", "read", 2, 2, faults=[f"fail-transfer:read,layer={layer}"]).outcome == "failed"


def test_reference_does_what_can_be_done_and_refuses_the_rest() -> None:
    for p, d in ((2, 2), (2, 4), (4, 2)):
        assert go("reference", "write", p, d).outcome == "ok"
        assert go("reference", "read", p, d).outcome == ("ok" if p == d else "refused")
    assert go("reference", "read", prefill={"hybrid_kv": False}).outcome == "refused"


def test_a_request_holds_one_block_of_each_state_table() -> None:
    """A pool of the null block, 4 blocks of tokens and 1 state holds one request; one block less is refused by name."""
    pool = {"num_blocks": 6}
    assert go("0.33.0", "write", prefill=pool, decode=pool, requests=3, workload={"rate_per_s": 1.0}).outcome == "ok"
    with pytest.raises(InputError, match="can't hold a request of 5"):
        go("0.33.0", "write", decode={"num_blocks": 5})


def test_a_prefix_hit_at_decode_has_no_state() -> None:
    for mode in ("read", "write"):
        assert go("0.33.0", mode, requests=[{"decode_hit_blocks": 3}]).outcome == "ok"
    assert go("0.33.0", "read", requests=[{"decode_hit_blocks": 3, "suffix_only": True}]).outcome == "ok"


def test_a_prompt_of_one_token_is_computed_at_decode() -> None:
    assert go("0.33.0", "write", prompt_tokens=1).outcome == "recomputed"


@pytest.mark.parametrize("release", ["0.31.0", "0.32.0", "0.33.0"])
def test_the_state_is_read_even_if_decode_wants_nothing(release: str) -> None:
    """Two layers of 4 blocks and two of a state: a fifth of the cells is read, and decode is told (measured)."""
    result = go(release, "read", requests=[{"external_zero": True}])
    assert (result.outcome, result.coverage_end, result.sets.told) == ("recomputed", 0.2, ["D0"])


# -- names, numbers, config.json -----------------------------------------------------------------------------------

QWEN = {
    "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip


def config(tmp_path: Path, **fields: Any) -> str:
    path = tmp_path / "config.json"
    known = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
    path.write_text(json.dumps(known | fields))
    return str(path)


@pytest.mark.parametrize("fields", [
    {"full_attention_interval": 4},
    {"layer_types": ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 3 + ["full_attention"]},
])  # fmt: skip
def test_states_of_a_config(tmp_path: Path, fields: dict[str, Any]) -> None:
    """The convolution keeps 3 inputs of 16·128 keys, as many queries and 32·128 values; the rest is 32 matrices of 128²."""
    geometry = resolve_model(config(tmp_path, **QWEN, **fields))
    assert geometry.minor is not None
    assert (geometry.minor.state, geometry.minor_layers, geometry.minor.kv_heads) == (True, (0, 1, 2, 4, 5, 6), 16)
    assert 2 * 16 * geometry.minor.head_dim == 3 * (2 * 16 * 128 + 32 * 128) + 32 * 128 * 128
    assert geometry.minor.head_dim == 17152


@pytest.mark.parametrize(("fields", "says"), [
    ({"layer_types": ["mamba", "attention"] * 4}, "layer_types"),
    ({"layer_types": ["linear_attention"] * 8}, "layer_types"),
    ({"layers_block_type": ["mamba"] * 8}, "layers_block_type"),
    ({"attn_layer_indices": [3]}, "attn_layer_indices"),
    ({"attn_layer_period": 8}, "attn_layer_period"),
    ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
    ({"linear_attn_config": {}}, "linear_attn_config"),
    ({"mamba_d_state": 128}, "mamba_d_state"),
    ({"full_attention_interval": 4}, "full_attention_interval"),
    ({**QWEN, "mamba_d_ssm": 8}, "mamba_d_ssm|linear_num"),
    ({**QWEN, "full_attention_interval": 0}, "full_attention_interval"),
    ({**QWEN, "layer_types": ["linear_attention"]}, "no list of 8 types"),
    ({**QWEN, "full_attention_interval": 4, "kv_lora_rank": 64}, "kv_lora_rank"),
])  # fmt: skip
def test_a_config_with_other_states_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        resolve_model(config(tmp_path, **fields))


@pytest.mark.parametrize(("fields", "hint"), [
    ({"attn_type_list": [1, 0] * 4}, "layers=8,kv_heads=2,head_dim=16,state="),
    ({"attn_type_list": [0] * 8, "head_dim": None, "hidden_size": 4096, "num_key_value_heads": None}, "layers=8,kv_heads=8,head_dim=512,"),
    ({"linear_attn_config": {}, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, "layers=8,mla=512+64,state="),
    ({"index_topk": 2048, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, "layers=8,mla=512+64 to leave it out"),
    ({"index_topk": 2048, "kv_lora_rank": 512}, "layers=8,mla=512+N to leave it out"),
    ({"attn_type_list": [], "num_attention_heads": 0, "head_dim": "x"}, "state=HEADSxWIDTH"),
])  # fmt: skip
def test_a_hint_is_computed_from_the_file_at_hand(tmp_path: Path, fields: dict[str, Any], hint: str) -> None:
    with pytest.raises(InputError) as raised:
        resolve_model(config(tmp_path, **fields))
    assert hint in str(raised.value)


def test_a_list_that_says_attention_for_every_layer_is_plain_attention(tmp_path: Path) -> None:
    """MiniMax-M2's `attn_type_list`."""
    assert resolve_model(config(tmp_path, attn_type_list=[1] * 8)) == resolve_model(config(tmp_path))


@pytest.mark.parametrize(("text", "says"), [
    ("layers=4,kv_heads=8,head_dim=8,state_every=2", "has not the fields"),
    ("layers=4,state=8x16,state_every=2", "has not the fields"),
    ("layers=4,kv_heads=8,head_dim=8,state=8,state_every=2", "8x64"),
    ("layers=4,kv_heads=8,head_dim=8,state=8x0,state_every=2", "out of range"),
    ("layers=4,kv_heads=8,head_dim=8,state=8x16,state_every=1", "leaves no layer"),
    ("layers=4,kv_heads=8,head_dim=8,state=8x16,state_every=5", "out of range"),
    ("layers=4,kv_heads=8,head_dim=8,state=8x16,state_evry=2", "state_every"),
])  # fmt: skip
def test_numbers_that_make_no_model(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        resolve_model(text)


def test_a_state_is_never_replicated() -> None:
    with pytest.raises(InputError, match="heads of a state"):
        go("0.33.0", "write", 16, 16)


def test_the_preset() -> None:
    """Every fourth of 48 layers attends, so there are three tables of states beside the one of attention."""
    geometry = PRESETS["qwen3-next-80b-a3b"].geometry
    assert [len(layers) for layers in block_tables(geometry.sorts)] == [12] * 4
    for mode in ("read", "write"):
        assert go("0.33.0", mode, 2, 2, "qwen3-next-80b-a3b").outcome == "ok"
    assert go("0.33.0", "write", 2, 4, "qwen3-next-80b-a3b").outcome == "ok"
