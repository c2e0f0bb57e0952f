"""The connector tier over AMD's own `mori.io` and a NIC in software: what it sees there is what it sees over the stand-in."""

from __future__ import annotations

from typing import Any

import pytest

from kvcover import Result, build
from kvcover.real_backend.machine import mori, trees
from kvcover.real_backend.tiers.connector import connector_tier
from kvcover.sim.errors import TierError

pytestmark = [pytest.mark.mori, pytest.mark.vllm]
MLA, GQA = "layers=2,mla=64+16", "layers=2,kv_heads=8,head_dim=8"
CASES: list[dict[str, Any]] = [
    {"release": "0.33.0", "model": MLA},
    {"release": "0.33.0", "model": GQA, "mode": "read"},
    {"release": "0.26.0", "model": MLA},
    {"release": "0.33.0", "model": GQA, "faults": ["fail-transfer:write,from=P1"]},
    {"release": "0.33.0", "model": MLA, "faults": ["drop-notice:write_done,to=D0"]},
]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> mori.Added:
    """AMD's library for the test, if it was added."""
    try:
        trees.check_machine()
        for release in ("0.26.0", "0.33.0"):
            trees.find(release)
    except TierError as error:
        pytest.skip(f"NOT RUN: {error}")
    if not (found := mori.added()):
        pytest.skip(f"NOT RUN: no mori.io of AMD's here, get it with `kvcover mori add {mori.NEWEST}`")
    return found[-1]


def seen(result: Result) -> dict[str, Any]:
    ranks = [(rank.coverage, rank.wrong, rank.told) for rank in result.by_rank]
    return {"outcome": result.outcome, "ranks": ranks, "sets": result.sets, "faults": result.faults, "stray": result.stray}


def test_both_see_the_same(library: mori.Added, monkeypatch: pytest.MonkeyPatch) -> None:
    scenarios = [build({"prefill": {"tp": 2}, "decode": {"tp": 2}} | case) for case in CASES]
    monkeypatch.setenv("KVCOVER_MORI", "stand-in")
    by_stand_in = connector_tier.many(scenarios)
    monkeypatch.setenv("KVCOVER_MORI", "library")
    by_library = connector_tier.many(scenarios)
    assert [seen(result) for result in by_library] == [seen(result) for result in by_stand_in]
    assert {str((result.backend or {})["mori"]) for result in by_stand_in} == {"loopback"}
    for result in by_library:
        backend = result.backend or {}
        assert backend["mori"] == f"real mori.io {library.version} over a software NIC"
        assert "timing" in backend["mori_does_not_show"] and len(backend["mori_does_not_show"]) == 4
        assert backend["prefill_vllm"]["mori_wheel"] == mori.WHEELS[library.version]
        assert f" --tier connector --mori {library.version}" in result.replay
