"""Faults of the router and of a stop token on the real connector: what comes of them, and that the model says so too."""

from __future__ import annotations

from typing import Any

import pytest

from kvcover import build, run
from kvcover.real_backend.tiers.connector import connector_tier
from tests.real.test_connector_tier import needs

TWO: dict[str, Any] = {
    "model": "layers=2,mla=64+16",
    "prompt_tokens": 64,
    "fabric": "loopback",
    "timers": {"defer_timeout_s": 2.0, "transfer_timeout_s": 1.5},
    "prefill": {"tp": 2},
    "decode": {"tp": 2},
}
# A leg that comes after the defer timeout finds nothing (WRITE), or blocks that only the reaper gives back (READ).
EXPECTED: dict[tuple[str, str], tuple[str, str]] = {  # 0.27.0, 0.33.0
    ("write", "stop-at-prefill:0"): ("crash", "ok"),
    ("write", "fail-leg:prefill"): ("hang", "hang"),
    ("write", "fail-leg:decode"): ("failed", "failed"),
    ("write", "delay-leg:prefill,ms=300"): ("ok", "ok"),
    ("write", "delay-leg:decode,ms=6000"): ("hang", "failed"),
    ("read", "stop-at-prefill:0"): ("crash", "corrupt"),
    ("read", "fail-leg:prefill"): ("failed", "failed"),
    ("read", "delay-leg:decode,ms=3000"): ("degraded", "degraded"),
}


@pytest.mark.vllm
@pytest.mark.parametrize(("release", "column"), [("0.27.0", 0), ("0.33.0", 1)])
def test_the_real_connector_and_the_model(release: str, column: int) -> None:
    needs(release)
    scenarios = [build(TWO | {"release": release, "mode": mode, "faults": [fault]}) for mode, fault in EXPECTED]
    expected = [both[column] for both in EXPECTED.values()]
    assert [run(scenario).outcome for scenario in scenarios] == expected
    real = connector_tier.many(scenarios)
    assert [result.outcome for result in real] == expected
    assert all(fault.fired for result in real for fault in result.faults)
