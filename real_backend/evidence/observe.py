"""One scenario on a harness that has imported its vLLM already, judged as the connector tier judges it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from kvcover.real_backend.driver.harness import Harness
from kvcover.real_backend.driver.race import Unsteady, race_of
from kvcover.real_backend.driver.reports import RunSeen
from kvcover.real_backend.machine.trees import Tree
from kvcover.real_backend.tiers.report import to_result
from kvcover.real_backend.tiers.translate import to_trial
from kvcover.sim.results.result import Result
from kvcover.sim.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Observed:
    """What the processes saw, what comes of that, and why another run may differ."""

    seen: RunSeen
    result: Result
    race: Unsteady | None


def observe(harness: Harness, scenario: Scenario, trees: tuple[Tree, Tree], completion_delay_s: float = 0.0) -> Observed:
    """Run it, with transfers that take `completion_delay_s`. Raises TierError for what the tier can't run."""
    trial = replace(to_trial(scenario), completion_delay_s=completion_delay_s)
    seen = harness.run(trial)
    result = to_result(trial, seen, trees, (harness.info("prefill"), harness.info("decode")), None)
    return Observed(seen, result, race_of(trial, seen))


def tree_at(folder: Path, release: str) -> Tree:
    """The tree in a folder that is known to hold a release."""
    return Tree(folder, release, "folder")
