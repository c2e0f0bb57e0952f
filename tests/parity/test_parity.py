"""The model against the real connector of three releases, on cases of the parity plan.

`KVCOVER_TREES` names a folder with one vLLM source tree a release. The whole plan: `python -m kvcover.real_backend.evidence.parity`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcover.real_backend.evidence.parity import Comparison, comparisons, plan, releases_of
from kvcover.real_backend.evidence.plan import Planned

RELEASES = ("0.26.0", "0.27.0", "0.33.0", "0.27.0→0.33.0")
CASES_A_RELEASE = 7
MOST_RANKS = 8

pytestmark = pytest.mark.vllm


def cases(releases: str) -> list[Planned]:
    return [each for each in plan() if releases_of(each.scenario) == releases and ranks(each) <= MOST_RANKS][:CASES_A_RELEASE]


def ranks(planned: Planned) -> int:
    return sum(side.tp * side.dp for side in (planned.scenario.prefill, planned.scenario.decode))


@pytest.fixture(scope="module")
def seen(trees: Path) -> dict[str, Comparison]:
    """All cases, one import a release."""
    there = [each for each in RELEASES if all((trees / release).is_dir() for release in each.split("→"))]
    return {found.id: found for releases in there for found in comparisons(trees, cases(releases))}


@pytest.mark.parametrize("planned", [each for releases in RELEASES for each in cases(releases)], ids=lambda each: each.id)
def test_model_and_connector_agree(planned: Planned, trees: Path, seen: dict[str, Comparison]) -> None:
    if planned.id not in seen:
        pytest.skip(f"NOT RUN: no tree of vLLM {releases_of(planned.scenario)} in KVCOVER_TREES")
    found = seen[planned.id]
    assert found.verdict != "disagree", json.dumps(found.differ) + " ".join(found.raised)
