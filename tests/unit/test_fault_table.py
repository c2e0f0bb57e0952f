"""What each kind of trouble does, by release: the catalogue F1 to F30 and N1 to N15 of docs/protocol.md, by hand.

Bad where the released sources and runs of the real connector are bad, good where they were mended.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvcover import Result, build, resolve, run, run_world

ALL = ("0.24.0", "0.25.1", "0.26.0", "0.27.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
MLA = "layers=3,mla=64+16"


def since(first: str, last: str = "0.33.0") -> tuple[str, ...]:
    return ALL[ALL.index(first) : ALL.index(last) + 1]


NEW = ("0.33.0",)
HUNDRED_S = 100_000_000_000


def go(release: str, *faults: str, tp: int = 1, mode: str = "write", **fields: Any) -> Result:
    data = {"release": release, "mode": mode, "prefill": {"tp": tp}, "decode": {"tp": tp}, "model": MLA, "fabric": "loopback"}
    return run(build({**data, "faults": list(faults), **fields}))


# name, faults, other fields, outcome by release
ROWS: list[tuple[str, tuple[str, ...], dict[str, Any], dict[tuple[str, ...], str]]] = [
    ("F6 poisoned P", ("poison-notice:remote_blocks",), {}, {since("0.24.0", "0.32.0"): "hang", NEW: "failed"}),
    ("F6 poisoned D", ("poison-notice:write_done",), {}, {ALL: "hang"}),
    ("F7 duplicate", ("duplicate-notice:remote_blocks,ms=5",), {}, {since("0.24.0", "0.32.0"): "hang", NEW: "hang"}),
    ("late duplicate", ("replay-notice:remote_blocks,ms=500",), {}, {ALL: "ok"}),
    ("F8 lost done", ("drop-notice:write_done",), {}, {ALL: "hang"}),
    ("F9 lost blocks", ("drop-notice:remote_blocks",), {}, {since("0.24.0", "0.32.0"): "hang", NEW: "failed"}),
    ("late blocks", ("delay-notice:remote_blocks,ms=20000",), {}, {ALL: "ok"}),
    ("too late blocks", ("delay-notice:remote_blocks,ms=61000",), {}, {since("0.24.0", "0.32.0"): "hang", NEW: "failed"}),
    ("F10 lost release", ("drop-notice:release",), {"mode": "read"}, {ALL: "degraded"}),
    ("F15 dead port", ("late-rank:D0,ms=1000000",), {}, {since("0.24.0"): "hang"}),
    ("F19 abort waiting", ("abort:0,at=waiting,ms=1", "delay-notice:remote_blocks,ms=100"), {}, {ALL: "leak"}),
    ("abort before", ("abort:0,at=before",), {}, {ALL: "ok"}),
    ("abort after", ("abort:0,at=after",), {}, {ALL: "ok"}),
    ("abort READ", ("abort:0,at=before",), {"mode": "read"}, {("0.24.0", "0.25.1"): "crash", since("0.26.0"): "ok"}),
    ("F20 failed write", ("fail-transfer:write,layer=1", "delay-notice:remote_blocks,ms=50"), {}, {ALL: "hang"}),
    ("F20 in the forward", ("fail-transfer:write,layer=1",), {}, {ALL: "crash"}),
    ("F20 queue full", ("sq-full:write", "delay-notice:remote_blocks,ms=50"), {}, {ALL: "hang"}),
    ("queue full READ", ("sq-full:read",), {"mode": "read"}, {("0.24.0", "0.25.1"): "corrupt", since("0.26.0"): "ok"}),
    ("failed read", ("fail-transfer:read,layer=1",), {"mode": "read"},
     {since("0.24.0", "0.30.0"): "corrupt", since("0.31.0"): "failed"}),
    ("lost completion", ("lose-completion:write,layer=1", "delay-notice:remote_blocks,ms=50"), {}, {ALL: "hang"}),
    ("N10 slow read", ("delay-transfer:read,ms=31000,layer=2",), {"mode": "read"},
     {since("0.24.0", "0.32.0"): "corrupt", NEW: "crash"}),
    ("early completion", ("early-completion:write,ms=1000",), {}, {ALL: "corrupt"}),
    ("F12 no barrier", ("delay-transfer:read,ms=50",), {"mode": "read"}, {since("0.24.0", "0.27.0"): "corrupt", since("0.28.0"): "ok"}),
    ("F12 full graphs", ("delay-transfer:read,ms=50",), {"mode": "read", "decode": {"cuda_graphs": "full"}},
     {since("0.24.0", "0.30.0"): "corrupt", since("0.31.0"): "ok"}),
    ("F13 lookahead", (), {"mode": "read", "prefill": {"lookahead_tokens": 16}},
     {("0.24.0", "0.25.1"): "crash", since("0.26.0", "0.29.0"): "corrupt", ("0.30.0",): "ok", since("0.31.0"): "corrupt"}),
    ("F13 prefix", (), {"mode": "read", "requests": [{"decode_hit_blocks": 8, "suffix_only": True}]},
     {("0.24.0", "0.25.1"): "crash", since("0.26.0", "0.30.0"): "corrupt", since("0.31.0"): "ok"}),
    ("lookahead on D", (), {"mode": "read", "decode": {"lookahead_tokens": 16}},
     {since("0.24.0", "0.30.0"): "crash", since("0.31.0"): "ok"}),
    ("lookahead WRITE", (), {"prefill": {"lookahead_tokens": 16}}, {since("0.24.0", "0.31.0"): "hang", since("0.32.0"): "ok"}),
    ("F18 plain READ", (), {"mode": "read", "requests": [{"plain": True}]},
     {since("0.24.0", "0.32.0"): "corrupt", NEW: "recomputed"}),
    ("F29 preempted READ", ("preempt:0",), {"mode": "read"}, {since("0.24.0", "0.32.0"): "corrupt", NEW: "recomputed"}),
    ("preempted WRITE", ("preempt:0",), {}, {since("0.24.0", "0.31.0"): "hang", since("0.32.0"): "recomputed"}),
    ("F30 nothing needed", (), {"requests": [{"external_zero": True}]},
     {("0.24.0", "0.25.1"): "recomputed", since("0.26.0", "0.32.0"): "degraded", NEW: "recomputed"}),
    ("nothing needed READ", (), {"mode": "read", "requests": [{"external_zero": True}]}, {ALL: "recomputed"}),
    ("nothing needed and generating", (), {"requests": [{"external_zero": True, "generate_ns": HUNDRED_S}]},
     {("0.24.0", "0.25.1"): "crash", since("0.26.0", "0.32.0"): "degraded", NEW: "recomputed"}),
    ("N5 no release", ("set:is_request_leader=false@decode",), {"requests": [{"external_zero": True, "generate_ns": HUNDRED_S}]},
     {("0.24.0", "0.25.1"): "crash", since("0.26.0", "0.32.0"): "degraded", NEW: "crash"}),
    ("N5 not wanted", ("set:do_remote_prefill=false@decode",), {"generate_ns": HUNDRED_S},
     {since("0.24.0", "0.31.0"): "hang", ("0.32.0",): "degraded", NEW: "crash"}),
    ("done twice, generating", ("duplicate-notice:write_done,ms=500",), {"generate_ns": HUNDRED_S}, {ALL: "crash"}),
    ("done twice, over", ("duplicate-notice:write_done,ms=500",), {}, {ALL: "ok"}),
    ("two READs in a step", (), {"mode": "read", "requests": 2}, {since("0.24.0", "0.26.0"): "corrupt", since("0.27.0"): "ok"}),
    ("two READs, refused", (), {"mode": "read", "requests": 2, "model": "layers=2,kv_heads=2,head_dim=8", "decode": {"tp": 2}},
     {("0.25.1", "0.26.0"): "crash"}),
    ("two READs, later", (), {"mode": "read", "requests": [{}, {"arrival_ns": 10**9}]}, {ALL: "ok"}),
    ("prefill tells itself", ("set:do_remote_prefill=true@prefill", "delay-leg:decode,ms=400"), {}, {since("0.26.0"): "hang"}),
    ("prefix hit on D", (), {"requests": [{"decode_hit_blocks": 8}]}, {ALL: "ok"}),
    ("prefix hit on D READ", (), {"mode": "read", "requests": [{"decode_hit_blocks": 8}]}, {ALL: "ok"}),
    ("chunked prompt", (), {"prefill": {"max_tokens_per_step": 64}}, {ALL: "ok"}),
    ("chunked READ", (), {"mode": "read", "prefill": {"max_tokens_per_step": 64}}, {ALL: "ok"}),
    ("chunks and lookahead", (), {"prefill": {"max_tokens_per_step": 64, "lookahead_tokens": 64}, "decode": {"lookahead_tokens": 64}},
     {since("0.24.0", "0.31.0"): "corrupt", since("0.32.0"): "ok"}),
    ("F28 stop token", ("stop-at-prefill:0",), {}, {since("0.24.0", "0.27.0"): "crash", since("0.28.0"): "ok"}),
    ("stop token READ", ("stop-at-prefill:0",), {"mode": "read"}, {since("0.24.0", "0.27.0"): "crash", since("0.28.0"): "corrupt"}),
    ("late leg", ("delay-leg:decode,ms=61000",), {}, {since("0.24.0", "0.32.0"): "hang", NEW: "failed"}),
    ("crash of P", ("crash-rank:P0,ms=3",), {}, {ALL: "crash"}),
    ("crash of D", ("crash-rank:D0,ms=3",), {}, {ALL: "crash"}),
    ("short stall", ("stall-rank:P0,ms=1,for=100",), {}, {ALL: "ok"}),
    ("router loses a leg", ("fail-leg:decode",), {}, {since("0.24.0", "0.32.0"): "failed", NEW: "failed"}),
    ("misrouted done", ("misroute-notice:write_done,port=1",), {}, {ALL: "hang"}),
]  # fmt: skip
CASES = [
    pytest.param(faults, fields, release, outcome, id=f"{name}-{release}")
    for name, faults, fields, by_release in ROWS
    for releases, outcome in by_release.items()
    for release in releases
]


@pytest.mark.parametrize(("faults", "fields", "release", "outcome"), CASES)
def test_outcome(faults: tuple[str, ...], fields: dict[str, Any], release: str, outcome: str) -> None:
    result = go(release, *faults, **fields)
    assert result.outcome == outcome


def test_reuse_is_seen_on_every_way_to_post() -> None:
    """A batch that reads blocks given away lands what is there now, also when a fault or a short queue is in the way."""
    scenario: dict[str, Any] = {
        "release": "0.30.0", "model": "llama-3.1-8b", "prompt_tokens": 64,
        "requests": [{"prefill_blocks": [1, 2, 3, 4]}, {"arrival_ns": 80_000_000, "prefill_blocks": [1, 2, 3, 4]}],
        "faults": ["delay-notice:remote_blocks,request=0,ms=72", "stop-at-prefill:0", "slow-nic:P0,factor=20000"],
    }  # fmt: skip
    plain = run(build(scenario))
    assert plain.by_request == ["corrupt", "ok"]
    for other in (
        {"faults": [*scenario["faults"], "delay-transfer:write,ms=0.001,layer=31,request=1"]},
        {"rdma": {"sq_depth": 64}},
    ):
        again = run(build({**scenario, **other}))
        assert (again.by_request[0], again.coverage) == ("corrupt", plain.coverage)


@pytest.mark.parametrize("release", since("0.26.0", "0.29.0"))
def test_f13_overwrites_foreign_blocks(release: str) -> None:
    """vllm#48471: the local list becomes the tail of the remote one, so blocks of others are written."""
    result = go(release, mode="read", prefill={"lookahead_tokens": 16}, requests=[{"decode_blocks": list(range(20, 36))}])
    assert result.stray > 0 if result.stray is not None else False
    assert result.coverage == 0.0


def test_f16_unread_ranks_hold_their_blocks() -> None:
    """F14: P4 → D2 in READ up to 0.32: P1 and P3 are never released."""
    result = run(build({"release": "0.32.0", "mode": "read", "model": MLA, "prefill": {"tp": 4}, "decode": {"tp": 2}}))
    assert result.sets.prefill_released == ["P0", "P2"]
    assert result.outcome == "degraded"


@pytest.mark.parametrize("reuse", [False, True])
def test_f21_the_reaper_frees_under_a_slow_read(reuse: bool) -> None:
    """vllm#56465: P's timer frees blocks that D still reads; once another request has them, D gets that one's content."""
    scenario = {
        "release": "0.32.0", "mode": "read", "model": MLA, "prefill": {"num_blocks": 17}, "decode": {"num_blocks": 64},
        "requests": [{}, {"arrival_ns": 62_000_000_000}][: 1 + reuse], "timers": {"transfer_timeout_s": 100},
        "faults": ["delay-transfer:read,request=0,ms=70000"],
    }  # fmt: skip
    result, world = run_world(resolve(build(scenario)))
    assert world.history.events("reaped")[0].request == 0
    first = next(rank for rank in result.by_rank)
    assert result.by_request[0] == ("corrupt" if reuse else "degraded")
    assert (first.wrong or 0.0) == (0.5 if reuse else 0.0), "all of request 0's cells are wrong, none of request 1's"


@pytest.mark.parametrize("release", ["0.24.0", "0.26.0", "0.27.0", "0.28.0", "0.31.0", "0.33.0"])
def test_a_release_after_the_reaper_is_nobodys(release: str) -> None:
    """Measured on the connector of each: the reaper forgets the id, so prefill hears the release and reports nothing."""
    result = go(release, "delay-notice:release,ms=70000", mode="read")
    assert (result.outcome, result.sets.prefill_told, result.sets.prefill_released) == ("degraded", ["P0"], [])
    assert go(release, "delay-leg:decode,ms=70000", mode="read").outcome == "degraded"


@pytest.mark.parametrize("release", ["0.24.0", "0.26.0", "0.27.0", "0.28.0", "0.31.0", "0.33.0"])
def test_an_id_that_is_no_text_is_never_released(release: str) -> None:
    """Measured on the connector of each: decode only warns of the id, and prefill holds the blocks until its timer."""
    result = go(release, "set:transfer_id=null", mode="read")
    assert (result.outcome, result.sets.prefill_told, result.sets.prefill_released) == ("degraded", [], [])


@pytest.mark.parametrize("release", ["0.27.0", "0.30.0", "0.32.0", "0.33.0"])
def test_a_prompt_of_one_token_is_not_read(release: str) -> None:
    """Measured on the connector of each: decode computes the last token itself, so that nothing is left to ask for."""
    result = go(release, mode="read", block_size=1, prompt_tokens=3, requests=[{"prompt_tokens": 1}, {}])
    assert result.by_request == ["recomputed", "ok"]
    assert result.coverage == 0.75


def test_a_stall_that_comes_when_all_is_over_proves_nothing() -> None:
    assert go("0.33.0", "stall-rank:D0,ms=90000,for=1").outcome == "vacuous"


def test_a_late_write_into_a_freed_block_is_astray() -> None:
    """A request ends, its blocks go to another, and a late batch of the first lands on them."""
    scenario = {
        "release": "0.33.0", "model": MLA, "fabric": "loopback", "decode": {"num_blocks": 17}, "prefill": {"num_blocks": 64},
        "requests": [{}, {"arrival_ns": 200_000_000}],
        "faults": ["early-completion:write,request=0,layer=2,ms=1000"],
    }  # fmt: skip
    result, _ = run_world(resolve(build(scenario)))
    assert result.stray is not None
    assert result.stray > 0
    assert next(check for check in result.checks if check.name == "no-stray-write").verdict == "fail"


@pytest.mark.parametrize(("release", "wrong"), [("0.28.0", True), ("0.30.0", True), ("0.31.0", False), ("0.33.0", False)])
def test_f22_pod_routing_kept_on_the_worker(release: str, wrong: bool) -> None:
    """vllm#51681: the last request's pods count for all: one without pod keys sends another's write-done astray.

    Request 1 comes when the handshakes of request 0 are over and its blocks are still on their way.
    """
    scenario = {
        "release": release, "model": MLA, "router": "wide-ep", "prefill": {"dp": 4, "pods": 2}, "decode": {"dp": 4, "pods": 2},
        "requests": [{"prefill_dp": 2, "decode_dp": 2}, {"prefill_dp": 2, "decode_dp": 2, "arrival_ns": 30_000_000}],
        "faults": ["drop:remote_hosts@prefill#1", "drop:remote_dp_size_local@prefill#1",
                   "reorder-notice:remote_blocks,request=0,ms=100"],
    }  # fmt: skip
    result = run(build(scenario))
    assert (result.by_request[0] != "ok") == wrong


def test_f23_ports_collide() -> None:
    result = run(build({"release": "0.33.0", "model": MLA, "prefill": {"tp": 2}, "decode": {"tp": 2, "dp": 2}}))
    assert result.outcome == "hang"
    assert result.findings[0].kind == "port-taken"


@pytest.mark.parametrize(("router", "outcome"), [("vllm-router 0.1.17", "failed"), ("toy-proxy", "ok")])
def test_f24_heartbeat_lost(router: str, outcome: str) -> None:
    """vllm-router forgets an instance 5 s after its last heartbeat; the toy proxy never does."""
    late: dict[str, Any] = {"router": router, "requests": [{"arrival_ns": 8_000_000_000}]}
    assert go("0.33.0", "stop-heartbeat:decode,ms=1000", **late).outcome == (outcome if outcome == "failed" else "vacuous")


@pytest.mark.parametrize(("collectives", "told"), [(False, ["D0", "D1"]), (True, [])])
def test_lockstep_and_executor(collectives: bool, told: list[str]) -> None:
    """0.33.0, P4 → D2, key dropped: P2 and P3 stall; in lockstep they hold P0 and P1 until the executor kills all."""
    scenario = {
        "release": "0.33.0", "model": "layers=32,kv_heads=8,head_dim=8", "prefill": {"tp": 4, "collectives": collectives},
        "decode": {"tp": 2}, "faults": ["drop:remote_tp_size"],
    }  # fmt: skip
    result, world = run_world(resolve(build(scenario)))
    assert result.sets.told == told
    crashed = world.history.events("crashed")[0]
    assert "TimeoutError" in crashed.detail
    assert crashed.time_ns == pytest.approx(300e9, rel=1e-3)


def test_head_of_line() -> None:
    """One write thread a rank: while it waits for a transfer to end, the tasks of others wait behind it."""
    scenario = {
        "release": "0.33.0", "model": "deepseek-v3", "requests": [{}, {"arrival_ns": 1000}], "prompt_tokens": 65536,
        "faults": ["delay-notice:remote_blocks,ms=200,request=0", "delay-notice:remote_blocks,ms=201,request=1"],
    }  # fmt: skip
    result, world = run_world(resolve(build(scenario)))
    first = {n: [e.time_ns for e in world.history.events("wrote") if e.request == n] for n in (0, 1)}
    assert result.outcome == "ok"
    assert max(first[0]) < min(first[1])


def test_send_queue() -> None:
    """A batch larger than the queue can't ever be posted; one that must wait too long is refused."""
    scattered = [{"prefill_blocks": list(range(1, 33, 2)), "decode_blocks": list(range(2, 34, 2))}]
    small: dict[str, Any] = {
        "rdma": {"sq_depth": 8},
        "requests": scattered,
        "prefill": {"num_blocks": 64},
        "decode": {"num_blocks": 64},
    }
    result = go("0.27.0", "delay-notice:remote_blocks,ms=50", **small)
    assert result.outcome == "hang"
    assert any("SQ request exceeds capacity" in finding.text for finding in result.findings)
    assert go("0.27.0", "delay-notice:remote_blocks,ms=50", **{**small, "rdma": {"sq_depth": 64}}).outcome == "ok"


def test_a_pool_that_is_too_small_makes_requests_wait() -> None:
    """Closed form: 4 requests, room for one at a time on both sides: all go, one after another."""
    scenario = {
        "release": "0.33.0", "model": MLA, "prefill": {"num_blocks": 17}, "decode": {"num_blocks": 17},
        "requests": [{"arrival_ns": 1000 * n} for n in range(4)],
    }  # fmt: skip
    result, world = run_world(resolve(build(scenario)))
    assert (result.outcome, result.coverage, result.stray) == ("ok", 1.0, 0)
    goes, ends = ([e.time_ns for e in world.history.events(kind)] for kind in ("go", "ended"))
    assert all(end <= go for end, go in zip(ends, goes[1:], strict=False))


def test_percentiles_are_those_of_the_history() -> None:
    scenario = {"release": "0.33.0", "model": MLA, "requests": 10, "workload": {"rate_per_s": 50}, "prompt_tokens": 1024}
    result, world = run_world(resolve(build(scenario)))
    arrivals = {t.index: t.request.arrival_ns for t in world.transfers}
    times = sorted((e.time_ns - arrivals[e.request]) / 1e6 for e in world.history.events("go"))
    assert result.time_to_go_ms is not None
    assert (result.time_to_go_ms.p50, result.time_to_go_ms.p90, result.time_to_go_ms.max) == (times[4], times[8], times[9])


def test_concurrency_limit() -> None:
    """With two at a time, the third request leaves the router when one of the first two has ended."""
    scenario = {"release": "0.33.0", "model": MLA, "requests": 5, "workload": {"concurrency": 2}}
    _, world = run_world(resolve(build(scenario)))
    started = sorted(t.started_ns for t in world.transfers)
    ended = sorted(e.time_ns for e in world.history.events("ended"))
    assert started[:2] == [0, 0]
    assert started[2:] == ended[:3]


@pytest.mark.parametrize(("prefill", "decode", "outcome"), [
    ("0.26.0", "0.27.0", "corrupt"),  # prefill decides where WRITE goes
    ("0.27.0", "0.26.0", "ok"),
    ("0.33.0", "0.32.0", "ok"),
])  # fmt: skip
def test_releases_that_differ(prefill: str, decode: str, outcome: str) -> None:
    assert go(prefill, tp=4, decode_release=decode).outcome == outcome


@pytest.mark.parametrize("release", ["0.28.0", "0.31.0", "0.33.0"])
@pytest.mark.parametrize("mode", ["write", "read"])
def test_who_needs_nothing_needs_nothing_when_preempted(release: str, mode: str) -> None:
    """Whatever the scheduler asks the connector for, it is no token of such a request, the second time as the first."""
    result = go(release, "preempt:0", mode=mode, requests=[{"external_zero": True}])
    assert result.by_request[0] in ("recomputed", "degraded")
