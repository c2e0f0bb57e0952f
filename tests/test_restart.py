"""An engine that dies and comes back: what its peers do with sessions to memory that is gone."""

from __future__ import annotations

from typing import Any

import pytest

from real_backend.tier import connector_tier
from sim import build, resolve, run, run_world
from tests.test_connector_tier import needs

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
