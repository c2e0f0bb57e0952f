"""An engine that dies and comes back: what its peers do with sessions to memory that is gone."""

from __future__ import annotations

from typing import Any

import pytest

from kvcover import build, resolve, run, run_world
from kvcover.real_backend.tiers.connector import connector_tier
from tests.real.test_connector_tier import needs

S = 1_000_000_000
# One request before, one while the engine is down, two after.
AROUND: dict[str, Any] = {
    "model": "layers=2,mla=64+16", "prefill": {"tp": 2}, "decode": {"tp": 2}, "fabric": "loopback",
    "requests": [{}, {"arrival_ns": 4 * S}, {"arrival_ns": 8 * S}, {"arrival_ns": 9 * S}],
}  # fmt: skip
OF_DECODE, OF_PREFILL = "restart-rank:D0,ms=3000,for=2000", "restart-rank:P1,ms=3000,for=2000"

# What the real connectors of 0.27.0 and 0.33.0 did. A failed write raises out of prefill's forward and ends an engine that
# did not restart; a router in WRITE mode hears that prefill is down only when decode answers, which it never does.
# Where decode's blocks come after the forward (a busy machine), the write fails in the writer thread, which only logs it.
LATE_BLOCKS = ["ok", "failed", "hang", "hang"]
MEASURED = [
    ("0.27.0", "write", OF_DECODE, ["crash", "crash", "crash", "crash"]),
    ("0.33.0", "write", OF_DECODE, ["crash", "crash", "crash", "crash"]),
    ("0.27.0", "read", OF_DECODE, ["ok", "failed", "ok", "ok"]),
    ("0.33.0", "read", OF_DECODE, ["ok", "failed", "ok", "ok"]),
    ("0.27.0", "write", OF_PREFILL, ["ok", "hang", "ok", "ok"]),
    ("0.33.0", "write", OF_PREFILL, ["ok", "hang", "ok", "ok"]),
    ("0.27.0", "read", OF_PREFILL, ["ok", "failed", "corrupt", "corrupt"]),
    ("0.33.0", "read", OF_PREFILL, ["ok", "failed", "failed", "failed"]),
]


@pytest.mark.parametrize(("release", "mode", "fault", "seen"), MEASURED)
def test_the_model_does_what_was_measured(release: str, mode: str, fault: str, seen: list[str]) -> None:
    result = run(build(AROUND | {"release": release, "mode": mode, "faults": [fault]}))
    assert result.by_request == seen
    assert result.faults[0].fired == 1


@pytest.mark.parametrize(("mode", "fault", "seen"), [row[1:] for row in MEASURED if row[0] == "0.33.0"])
def test_it_is_the_same_on_a_wire(mode: str, fault: str, seen: list[str]) -> None:
    """There a NIC takes its retries before it gives a batch up."""
    assert run(build(AROUND | {"release": "0.33.0", "mode": mode, "faults": [fault], "fabric": "thor2"})).by_request == seen


@pytest.mark.vllm
@pytest.mark.parametrize("release", ["0.27.0", "0.33.0"])
def test_the_real_connector_does_it_still(release: str) -> None:
    needs(release)
    rows = [row for row in MEASURED if row[0] == release]
    results = connector_tier.many([build(AROUND | {"release": release, "mode": row[1], "faults": [row[2]]}) for row in rows])
    for (_, mode, fault, seen), result in zip(rows, results, strict=True):
        late = mode == "write" and fault == OF_DECODE and result.by_request == LATE_BLOCKS
        assert late or result.by_request == seen, (mode, fault)
        assert result.faults[0].fired == 1


def test_a_session_to_the_old_memory_is_named() -> None:
    result = run(build(AROUND | {"release": "0.33.0", "mode": "read", "faults": [OF_PREFILL]}))
    stale = next(finding for finding in result.findings if finding.kind == "stale-session")
    assert stale.text == "D0, D1 used sessions to memory that P had before its restart"


def test_requests_inside_are_lost_and_their_blocks_are_free() -> None:
    """Request 0 waits at decode, whose pool holds one request, for blocks that come too late."""
    fields = {"release": "reference", "decode": {"tp": 2, "num_blocks": 17}, "requests": [{}, {"arrival_ns": 8 * S}]}
    faults = ["delay-notice:remote_blocks,request=0,ms=5000", OF_DECODE]
    result = run(build(AROUND | fields | {"faults": faults}))
    assert result.by_request[0] == "crash"
    assert result.by_request[1] in ("ok", "failed"), "it is admitted: the dead engine holds nothing"


def test_a_peer_that_had_no_session_finds_the_new_engine() -> None:
    """Nothing was written before the restart, so prefill dials the new ranks and all is well."""
    fields = {"release": "0.33.0", "requests": [{"arrival_ns": 8 * S}]}
    result, world = run_world(resolve(build(AROUND | fields | {"faults": [OF_DECODE]})))
    assert (result.outcome, result.coverage) == ("ok", 1.0)
    assert [event.actor for event in world.history.events("restarted")] == ["D"]


def test_what_was_sent_while_it_was_down_arrives_when_it_is_back() -> None:
    """ZMQ dials again by itself: prefill is down when decode's blocks are announced, and has them when it is back."""
    fields = {"release": "0.33.0", "requests": [{"arrival_ns": 4 * S}, {"arrival_ns": 8 * S}]}
    _, world = run_world(resolve(build(AROUND | fields | {"faults": [OF_PREFILL]})))
    told = [event for event in world.history.events("blocks_ready") if event.request == 0]
    assert {event.actor for event in told} == {"P0", "P1"}
    assert all(event.time_ns >= 5 * S for event in told)


def test_after_the_last_request_it_changes_nothing() -> None:
    assert run(build(AROUND | {"requests": 1, "faults": [OF_DECODE]})).outcome == "vacuous"


def test_a_request_whose_step_is_held_up_dies_with_the_engine() -> None:
    """Decode is to start it 3 s later; by then the engine that had it is dead, and a new one knows nothing of it."""
    faults = ["restart-rank:D0,ms=1,for=2000", "delay-step:decode,ms=3000"]
    result, world = run_world(resolve(build(AROUND | {"release": "0.33.0", "requests": 1, "faults": faults})))
    assert result.outcome == "crash"
    assert not [event for event in world.history.events("allocated") if event.actor == "D"]
    assert next(check for check in result.checks if check.name == "every-request-ends").verdict == "pass"


@pytest.mark.parametrize(("late_ms", "outcome"), [(4000, "failed"), (6000, "ok")])
def test_a_leg_that_leaves_late_finds_the_engine_of_that_moment(late_ms: int, outcome: str) -> None:
    """It is down from 3 s to 5 s. Before the late leg comes there is nothing that a rank's fault could hit."""
    fields = {"release": "0.33.0", "mode": "read", "requests": [{}, {"arrival_ns": 2 * S}]}
    faults = [f"delay-leg:decode,request=1,ms={late_ms - 2000}", OF_DECODE]
    assert run(build(AROUND | fields | {"faults": faults})).by_request == ["ok", outcome]


def test_a_restart_gives_back_what_was_held() -> None:
    """P1 gets no release, holds its blocks and would until its timer fires, but its memory is new by then."""
    fields = {"release": "0.28.0", "mode": "read", "model": "layers=2,kv_heads=1,head_dim=8", "decode": {"tp": 1}, "requests": 1}
    result = run(build(AROUND | fields | {"faults": ["restart-rank:P1,ms=100,for=1"]}))
    assert result.outcome == "ok"
    assert next(check for check in result.checks if check.name == "nothing-held").verdict == "pass"
