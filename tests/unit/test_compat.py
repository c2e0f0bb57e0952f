"""`kvcover compat`: which router goes with which release. What is expected stands in docs/protocol.md (K1, K3, F1 to F5, F14)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcover import build, run
from kvcover.sim.results.result import raced
from kvcover.sim.scenario.routers import ROUTERS
from kvcover.sim.search.compat import Cell, cells, compat_scenarios, confirmed, count_runs, run_all
from kvcover.sim.simulate import model_tier

SIZES = ((1, 2, 4), (1, 2, 4))


def table(routers: list[str], releases: list[str], mode: Any = "write", sizes: Any = SIZES) -> list[Cell]:
    scenarios = compat_scenarios(build({"model": "layers=2,mla=64+16"}), routers, releases, [mode], sizes)
    return list(cells(scenarios, run_all(scenarios, model_tier, jobs=1)))


def test_the_router_decides_as_much_as_the_release() -> None:
    found = {(cell.router, cell.pairings[0].outcome) for cell in table(["vllm-router 0.1.15", "vllm-router 0.1.16"], ["0.27.0"],
                                                                      sizes=((8,), (8,)))}  # fmt: skip
    assert found == {("vllm-router 0.1.15", "corrupt"), ("vllm-router 0.1.16", "ok")}


@pytest.mark.parametrize(
    ("router", "release", "mode", "works", "worst"),
    [
        ("vllm-router 0.1.16", "0.24.0", "write", "equal TP only", "hang"),  # rank to rank
        ("vllm-router 0.1.16", "0.26.0", "write", "P1→D1 only", "corrupt"),  # F1
        ("vllm-router 0.1.16", "0.32.0", "write", "equal TP only", "corrupt"),  # F4, F5
        ("vllm-router 0.1.16", "0.33.0", "write", "all", ""),
        ("vllm-router 0.1.15", "0.24.0", "write", "equal TP only", "hang"),
        ("vllm-router 0.1.15", "0.32.0", "write", "P1→D1 only", "corrupt"),  # K3
        ("vllm-router 0.1.15", "0.33.0", "write", "P1→D1 only", "hang"),  # K3
        ("vllm-router 0.1.16", "0.32.0", "read", "P ≤ D only", "degraded"),  # F14
        ("vllm-router 0.1.16", "0.33.0", "read", "all", ""),
    ],
)
def test_cells(router: str, release: str, mode: str, works: str, worst: str) -> None:
    (cell,) = table([router], [release], mode)
    assert (cell.works, cell.worst, cell.race) == (works, worst, False)


def test_a_race_is_told() -> None:
    """vllm#48534: READ has no barrier up to 0.27.0."""
    old, new = table(["vllm-router 0.1.16"], ["0.27.0", "0.28.0"], "read", ((2,), (2,)))
    assert (old.works, old.race) == ("all", True)
    assert (new.works, new.race) == ("all", False)


@pytest.mark.parametrize("mode", ["write", "read"])
def test_legs_that_are_the_same_are_run_once_and_come_to_the_same(mode: Any) -> None:
    routers, releases = list(ROUTERS), ["0.26.0", "0.33.0"]
    scenarios = compat_scenarios(build({"model": "layers=2,mla=64+16"}), routers, releases, [mode], ((2, 4), (2, 4)))
    assert count_runs(scenarios) < len(scenarios)
    for scenario, result in zip(scenarios, run_all(scenarios, model_tier, jobs=1), strict=True):
        alone = run(scenario)
        assert (result.outcome, result.coverage, raced(result.checks)) == (alone.outcome, alone.coverage, raced(alone.checks))


def test_processes_come_to_the_same() -> None:
    scenarios = compat_scenarios(build({"model": "layers=2,mla=64+16"}), list(ROUTERS), ["0.26.0", "0.27.0"], ["write"], SIZES)
    one, two = (run_all(scenarios, model_tier, jobs=jobs) for jobs in (1, 2))
    assert [result.digest for result in one] == [result.digest for result in two]


def test_own_legs_are_a_router(tmp_path: Path) -> None:
    legs = dict(zip(("prefill", "decode"), ROUTERS["vllm-router 0.1.15"].legs("write"), strict=True))
    file = tmp_path / "legs.json"
    file.write_text(json.dumps(legs))
    (cell,) = table([str(file)], ["0.27.0"])
    assert (cell.works, cell.worst) == ("P1→D1 only", "corrupt")


def test_what_a_real_tier_says_otherwise_is_seen() -> None:
    good, bad = (run(build({"release": "0.27.0", "decode": {"tp": 2}, "prefill": {"tp": p}})) for p in (2, 1))
    assert confirmed([good, bad], [good, good]) == [True, False]
