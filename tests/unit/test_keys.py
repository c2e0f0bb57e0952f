"""`router keys`: what one bad key does. What is expected stands in the notes K1 to K37 of docs/protocol.md.

`tests/measured/test_measured_keys.py` compares every case with what the real connector did.
"""

from __future__ import annotations

from functools import cache

import pytest

from kvcover.sim.search.keys import TROUBLES, KeyCase, KeyOutcome, key_cases, run_case


@cache
def cases(release: str, mode: str, router: str = "toy-proxy") -> dict[str, KeyCase]:
    return {case.id.partition("/")[2]: case for case in key_cases(release, mode, router)}


def outcome(release: str, name: str) -> KeyOutcome | None:
    return run_case(cases(release, name.split("/")[0])[name])


@pytest.mark.parametrize(
    ("name", "by_release"),
    [
        ("write/prefill/transfer_id/missing", {"0.27.0": "crash!", "0.28.0": "hang"}),  # K24
        ("write/prefill/transfer_id/wrong-type", {"0.27.0": "crash!", "0.33.0": "crash!"}),  # K25: a list can't be a key
        ("write/prefill/remote_block_ids/missing", {"0.27.0": "crash!", "0.33.0": "crash!"}),  # K27
        ("write/prefill/remote_tp_size/missing", {"0.27.0": "ok", "0.33.0": "ok"}),  # K1, equal TP
        ("write/prefill/remote_tp_size/wrong-type", {"0.27.0": "crash!", "0.33.0": "crash!"}),  # K11
        ("write/prefill/do_remote_decode/missing", {"0.27.0": "hang", "0.33.0": "hang"}),  # K32
        ("write/decode/do_remote_prefill/missing", {"0.31.0": "hang", "0.32.0": "degraded"}),  # K30
        ("write/decode/remote_dp_rank/null", {"0.27.0": "crash!", "0.33.0": "crash!"}),  # K19
        ("write/decode/is_request_leader/wrong-value", {"0.28.0": "hang", "0.33.0": "failed"}),  # K22
        ("read/decode/remote_block_ids/null", {"0.27.0": "corrupt", "0.33.0": "corrupt"}),  # K28
        ("read/decode/remote_engine_id/missing", {"0.27.0": "corrupt", "0.33.0": "corrupt"}),  # K29
        ("read/prefill/remote_engine_id/missing", {"0.27.0": "crash!", "0.30.0": "crash!", "0.31.0": "ok"}),  # K27, K29
        ("read/decode/remote_dp_size/null", {"0.27.0": "crash!", "0.33.0": "crash!"}),  # K17
    ],
)
def test_notes(name: str, by_release: dict[str, str]) -> None:
    found = {}
    for release in by_release:
        result = outcome(release, name)
        assert result is not None
        found[release] = result.outcome + ("!" if result.everybody else "")
    assert found == by_release


def test_a_wrong_size_in_the_first_request_is_everybodys() -> None:
    """K3: peers that have met keep the rank that the first request named."""
    assert outcome("0.27.0", "write/prefill/remote_tp_size/wrong-value") == KeyOutcome(outcome="corrupt", everybody=True)


def test_stale_and_another_requests_differ_in_what_is_under_way() -> None:
    found = {trouble: cases("0.33.0", "write")[f"write/prefill/transfer_id/{trouble}"] for trouble in ("stale", "other")}
    assert found["stale"].fault == found["other"].fault == "stale:transfer_id@prefill#1"
    arrivals = {name: [r.arrival_ns or 0 for r in case.scenario.requests] for name, case in found.items()}  # type: ignore[union-attr]
    assert arrivals["stale"][0] < arrivals["stale"][1]
    assert arrivals["other"][0] == arrivals["other"][1]


def test_every_key_has_every_trouble_or_a_reason() -> None:
    found = cases("0.33.0", "read", "vllm-router 0.1.16").values()
    assert {case.trouble for case in found} == set(TROUBLES)
    assert all((case.scenario is None) == bool(case.why) for case in found)
    assert {"tp_size", "remote_hosts"} <= {case.key for case in found if case.leg == "decode"}, "answered, and asked for in vain"
    assert all(run_case(case) is None for case in found if case.why)
