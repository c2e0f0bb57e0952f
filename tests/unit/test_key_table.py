"""Every row of the table of keys: what a missing, wrong or odd key does, by release.

The rows and their consequences are those of the notes K1 to K37 in docs/protocol.md, written down by hand from the released
sources and from runs of the real connector; those that the harness can run are in `data/measured.toml` as well.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvcover import Result, build, run

ALL = ("0.24.0", "0.25.1", "0.26.0", "0.27.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
MLA, GQA = "layers=2,mla=64+16", "layers=2,kv_heads=8,head_dim=8"


def since(first: str, last: str = "0.33.0") -> tuple[str, ...]:
    return ALL[ALL.index(first) : ALL.index(last) + 1]


OLD, FIXED, NEW = since("0.24.0", "0.26.0"), since("0.27.0", "0.32.0"), ("0.33.0",)
EARLY, LATER = since("0.24.0", "0.27.0"), since("0.28.0")
MISREAD = ("0.25.1", "0.26.0")


def go(release: str, faults: tuple[str, ...] = (), prefill: Any = 2, decode: Any = 2, mode: str = "write", **fields: Any) -> Result:
    def side(size: Any) -> dict[str, int]:
        return {"tp": size} if isinstance(size, int) else {"tp": size[0], "dp": size[1]}

    data = {"release": release, "mode": mode, "prefill": side(prefill), "decode": side(decode), "faults": list(faults)}
    return run(build({"model": MLA, "fabric": "loopback", **data, **fields}))


WRITE_ROWS: list[tuple[str, tuple[str, ...], dict[str, Any], dict[tuple[str, ...], str]]] = [
    ("K1", ("drop:remote_tp_size",), {}, {("0.24.0",): "ok", MISREAD: "corrupt", since("0.27.0"): "ok"}),
    ("K2", ("drop:remote_tp_size",), {"prefill": 1, "decode": (1, 2)}, {since("0.24.0", "0.26.0"): "ok", since("0.27.0"): "corrupt"}),
    ("K3", ("set:remote_tp_size=1",), {}, {("0.24.0",): "ok", since("0.25.1", "0.32.0"): "corrupt", NEW: "hang"}),
    ("K4 MLA", ("set:remote_tp_size=4",), {}, {FIXED: "hang", NEW: "leak"}),
    ("K4 GQA", ("set:remote_tp_size=4",), {"model": GQA}, {NEW: "corrupt"}),
    ("K5", ("set:remote_tp_size=2@prefill",), {}, {}),  # no change when the sizes are equal: see test_own_size_instead
    ("K6", ("set:remote_tp_size=3@prefill",), {"prefill": 4, "decode": 4}, {FIXED: "hang", NEW: "crash"}),
    ("K7", ("set:remote_tp_size=-1@prefill",), {}, {FIXED: "hang", NEW: "crash"}),
    ("K8", ("set:remote_tp_size=null",), {}, {since("0.27.0"): "ok"}),
    ("K8 old", ("set:tp_size=null@prefill",), {}, {MISREAD: "crash"}),
    ("K9", ("set:remote_tp_size=0",), {}, {since("0.27.0"): "ok"}),
    ("K9 old", ("set:tp_size=0@prefill",), {}, {MISREAD: "hang"}),
    ("K10 text", ('set:remote_tp_size="2"',), {}, {since("0.27.0"): "ok"}),
    ("K10 float", ("set:remote_tp_size=2.0",), {}, {since("0.27.0"): "ok"}),
    ("K10 true", ("set:remote_tp_size=true",), {}, {FIXED: "corrupt", NEW: "hang"}),
    ("K10 old", ('set:tp_size="2"@prefill',), {}, {MISREAD: "ok"}),
    ("K11", ('set:remote_tp_size="x"@prefill',), {}, {since("0.27.0"): "crash"}),
    ("K12", ("set:tp_size=1@prefill",), {}, {since("0.27.0"): "ok"}),
    ("K12 old", ("set:tp_size=2@prefill",), {}, {MISREAD: "ok"}),
    ("K13, K14", ("drop:remote_dp_size@prefill",), {"prefill": 1, "decode": (1, 2)}, {ALL: "hang"}),
    ("K15", ("set:remote_dp_size=2@prefill",), {}, {("0.24.0",): "degraded", since("0.27.0"): "degraded"}),
    ("K16", ("set:remote_dp_size=0@prefill",), {}, {ALL: "hang"}),
    ("K17", ("set:remote_dp_size=null@prefill",), {}, {ALL: "crash"}),
    ("K18", ("drop:remote_dp_rank@decode",), {"prefill": (1, 2), "decode": 1, "requests": [{"decode_dp": 0}, {"decode_dp": 0}]},
     {since("0.24.0", "0.32.0"): "hang", NEW: "failed"}),
    ("K19", ("set:remote_dp_rank=null@decode",), {}, {ALL: "crash"}),
    ("K19 text", ('set:remote_dp_rank="1"@decode',), {}, {ALL: "crash"}),
    ("K21", ("set:remote_dp_rank_override=true@decode", "set:remote_dp_rank=1@decode"), {},
     {since("0.28.0", "0.32.0"): "hang", NEW: "failed"}),
    ("K22", ("set:is_request_leader=false@decode",), {}, {("0.24.0", "0.27.0"): "ok", since("0.28.0", "0.32.0"): "hang", NEW: "failed"}),
    ("K24", ("drop:transfer_id",), {}, {EARLY: "crash", LATER: "hang"}),
    ("K25", ("set:transfer_id=null",), {}, {since("0.27.0"): "hang"}),
    ("K27", ("drop:remote_block_ids@prefill",), {}, {ALL: "crash"}),
    ("K29", ("drop:remote_engine_id@prefill",), {}, {ALL: "crash"}),
    ("K30", ("drop:do_remote_prefill@decode",), {}, {since("0.24.0", "0.31.0"): "hang", since("0.32.0"): "degraded"}),
    ("K31", ('set:do_remote_prefill="false"@decode',), {}, {since("0.27.0"): "ok"}),
    ("K32", ("drop:do_remote_decode@prefill",), {}, {ALL: "hang"}),
    ("K35", ('set:remote_host="10.9.9.9"@prefill', "set:remote_handshake_port=1@prefill", "set:remote_notify_port=2@prefill"), {},
     {EARLY: "hang", LATER: "ok"}),
    ("K36", (), {"request_id_addresses": False}, {ALL: "crash"}),
]  # fmt: skip

READ_ROWS: list[tuple[str, tuple[str, ...], dict[str, Any], dict[tuple[str, ...], str]]] = [
    ("K6", ("set:remote_tp_size=3@decode",), {"prefill": 4, "decode": 4}, {since("0.27.0"): "crash"}),
    ("K10 old", ('set:tp_size="2"@decode',), {}, {MISREAD: "crash"}),
    ("K16", ("set:remote_dp_size=0@decode",), {}, {since("0.27.0"): "crash"}),
    ("K20", ("set:remote_dp_rank=1@decode#0",), {"prefill": (1, 2), "decode": 1, "requests": 1}, {since("0.27.0"): "corrupt"}),
    ("K24", ("drop:transfer_id@decode",), {}, {EARLY: "crash", LATER: "degraded"}),
    ("K28", ("set:remote_block_ids=null@decode",), {}, {ALL: "corrupt"}),
    ("K29", ("drop:remote_engine_id@decode",), {}, {ALL: "corrupt"}),
    ("K30", ("drop:do_remote_prefill@decode",), {}, {since("0.24.0", "0.32.0"): "corrupt", NEW: "degraded"}),
    ("K37", ("set:tp_size=1@decode", "drop:remote_tp_size@decode"), {"model": MLA}, {since("0.27.0"): "degraded"}),
]


def cases(rows: list[tuple[str, tuple[str, ...], dict[str, Any], dict[tuple[str, ...], str]]]) -> list[Any]:
    return [
        pytest.param(faults, fields, release, outcome, id=f"{name}-{release}")
        for name, faults, fields, by_release in rows
        for releases, outcome in by_release.items()
        for release in releases
    ]


@pytest.mark.parametrize(("faults", "fields", "release", "outcome"), cases(WRITE_ROWS))
def test_write(faults: tuple[str, ...], fields: dict[str, Any], release: str, outcome: str) -> None:
    assert go(release, faults, **fields).outcome == outcome


@pytest.mark.parametrize(("faults", "fields", "release", "outcome"), cases(READ_ROWS))
def test_read(faults: tuple[str, ...], fields: dict[str, Any], release: str, outcome: str) -> None:
    assert go(release, faults, mode="read", **fields).outcome == outcome


@pytest.mark.parametrize("release", FIXED)
def test_own_size_instead_of_the_peers(release: str) -> None:
    """K5: an identity map, which is wrong only if the sizes differ; P2 and P3 then dial nobody."""
    result = go(release, ("set:remote_tp_size=4@prefill",), prefill=4, decode=2)
    assert [rank.coverage for rank in result.by_rank] == [1.0, 1.0]
    assert (result.outcome, result.sets.prefill_released) == ("degraded", ["P0", "P1"])


@pytest.mark.parametrize("release", since("0.28.0"))
def test_pods(release: str) -> None:
    """K18b, K23: without pod keys a decode rank of the second pod tells nobody; with them every rank gets its blocks."""
    sides = {"prefill": {"dp": 4, "pods": 2}, "decode": {"dp": 4, "pods": 2}}
    bare = run(build({"release": release, "model": MLA, **sides}))
    assert bare.by_request[2:] != ["ok", "ok"]
    keyed = run(build({"release": release, "model": MLA, "router": "wide-ep", **sides}))
    assert (keyed.outcome, keyed.coverage) == ("ok", 1.0)


@pytest.mark.parametrize("release", ALL)
def test_transfer_id_used_twice(release: str) -> None:
    """K26: the second request's tasks find the transfer over; its decode waits for ever."""
    requests = [{"arrival_ns": 0}, {"arrival_ns": 10**9}]
    result = go(release, ('set:transfer_id="tx"',), prefill=1, decode=1, requests=requests)
    assert result.by_request == ["ok", "hang"]


@pytest.mark.parametrize("release", ALL)
@pytest.mark.parametrize("mode", ["write", "read"])
def test_plain_request_on_a_decode_engine(release: str, mode: str) -> None:
    """K33: it hangs in WRITE up to 0.31, decodes garbage in READ up to 0.32, and is computed locally since."""
    result = go(release, mode=mode, requests=[{"plain": True}])
    broken = {"write": ("hang", since("0.24.0", "0.31.0")), "read": ("corrupt", since("0.24.0", "0.32.0"))}[mode]
    assert result.outcome == (broken[0] if release in broken[1] else "recomputed")


@pytest.mark.parametrize("release", ALL)
def test_plain_request_in_chunks_on_a_prefill_engine(release: str) -> None:
    """K34: up to 0.27 the scheduler looks it up and dies."""
    chunked = run(build({"release": release, "model": MLA, "prefill": {"max_tokens_per_step": 32}, "requests": [{"plain": True}]}))
    assert ("crash" in chunked.by_request) == (release in EARLY)
