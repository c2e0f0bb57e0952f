"""What findings blame: only what can have kept a message away, and all that had to be otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from kvcover import build, run

WRITE: dict[str, Any] = {"release": "0.33.0", "prefill": {"tp": 4}, "decode": {"tp": 4}}
READ: dict[str, Any] = {"release": "0.30.0", "mode": "read", "prefill": {"tp": 2}}


def blamed(kind: str, **data: Any) -> list[str] | None:
    """The causes of the finding of a kind; None if there is no such finding."""
    findings = [finding for finding in run(build({"model": "layers=1,mla=8", **data})).findings if finding.kind == kind]
    return findings[0].causes if findings else None


@pytest.mark.parametrize(("faults", "expected"), [
    (["drop-notice:remote_blocks,to=P1", "duplicate-notice:remote_blocks,to=P2,ms=1"], ["drop-notice:remote_blocks,to=P1"]),
    (["drop-notice:remote_blocks,to=P1", "delay-notice:write_done,ms=1"], ["drop-notice:remote_blocks,to=P1"]),
    (["fail-leg:decode", "set:remote_engine_id=7@prefill"], ["fail-leg:decode"]),
    (["poison-notice:remote_blocks,to=P3", "late-rank:P2,ms=1"], ["poison-notice:remote_blocks,to=P3"]),
])  # fmt: skip
def test_a_fault_is_blamed_only_for_ranks_that_it_can_have_kept_a_message_from(faults: list[str], expected: list[str]) -> None:
    assert blamed("prefill-not-told", **WRITE, faults=faults) == expected


def test_each_lost_message_is_a_cause() -> None:
    """P2 is not told either, but that keeps nothing from D1: P2 writes to D2."""
    faults = [f"drop-notice:write_done,to=D{rank}" for rank in (1, 3)]
    causes = blamed("never-told", **WRITE, faults=[*faults, "duplicate-notice:remote_blocks,to=P0,ms=1"])
    assert causes is not None
    assert causes[:-1] == faults
    assert "decode_timer" in causes[-1]


def test_an_engine_that_never_started_is_told_nothing() -> None:
    """Not the gate, which is open for both requests: the ports of P1 are taken."""
    wide = {"release": "0.32.0", "prefill": {"tp": 2, "dp": 2}, "decode": {"tp": 2}, "router": "wide-ep"}
    assert blamed("prefill-not-told", **wide) == ["their engine never started"]


def test_what_was_not_to_be_read_is_not_released_to_the_wrong_ranks() -> None:
    """A plain request is nobody's: no map of releases is at fault."""
    assert blamed("prefill-not-released", **READ, requests=[{"plain": True}]) == []
    key = ["drop:do_remote_prefill@decode"]
    assert blamed("prefill-not-released", **READ, faults=key) == key


def test_where_releases_go_hangs_on_a_size_that_is_misread() -> None:
    causes = blamed("prefill-not-released", **{**READ, "release": "0.25.1", "model": "layers=1,kv_heads=2,head_dim=8"})
    assert causes is not None
    assert "reads `tp_size`, which was not sent" in causes[0]
    assert not any("release_to" in cause for cause in causes)


def test_a_release_to_another_dp_rank_needs_both_its_policies() -> None:
    """Up to 0.27.0 decode means DP rank 0, and the port that it tells knows no DP rank either: one alone mends nothing."""
    wide: dict[str, Any] = {**READ, "release": "0.25.1", "prefill": {"dp": 2}, "decode": {"dp": 2}}
    found = {
        names: blamed("prefill-not-released", **wide, overrides=dict(names))
        for names in (
            (),
            (("read_dp", "param"),),
            (("release_port", "raw"),),
            (("read_dp", "param"), ("release_port", "raw")),
        )
    }
    assert [[cause.split(",")[1].split(" =")[0].strip() for cause in causes or ()] for causes in found.values()] == [
        ["read_dp", "release_port"],
        ["release_port"],
        ["read_dp"],
        [],
    ]
    assert list(found.values())[-1] is None
