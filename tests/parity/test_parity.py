"""The model against the real connector of three releases, on cases of the parity plan.

`KVCOVER_TREES` names a folder with one vLLM source tree a release. The whole plan: `python -m kvcover.real_backend.evidence.parity`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcover.real_backend.evidence.parity import Planned, Verdict, plan, verdicts

RELEASES = ("0.26.0", "0.27.0", "0.33.0", "0.27.0→0.33.0")
CASES_A_RELEASE = 7
MOST_RANKS = 8

pytestmark = pytest.mark.vllm


def cases(releases: str) -> list[Planned]:
    fitting = [each for each in plan() if each.releases == releases and each.cell.case().ranks <= MOST_RANKS]
    return fitting[:CASES_A_RELEASE]


@pytest.fixture(scope="module")
def seen(trees: Path) -> dict[str, Verdict]:
    """All cases, one import a release."""
    there = [each for each in RELEASES if all((trees / release).is_dir() for release in each.split("→"))]
    return {verdict.id: verdict for releases in there for verdict in verdicts(trees, cases(releases))}


@pytest.mark.parametrize("planned", [each for releases in RELEASES for each in cases(releases)], ids=lambda each: each.id)
def test_model_and_connector_agree(planned: Planned, trees: Path, seen: dict[str, Verdict]) -> None:
    if planned.id not in seen:
        pytest.skip(f"NOT RUN: no tree of vLLM {planned.releases} in KVCOVER_TREES")
    verdict = seen[planned.id]
    assert verdict.verdict != "disagree", json.dumps(verdict.differ) + " ".join(verdict.raised)
