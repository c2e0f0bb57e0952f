"""A baseline to gate against: results of an earlier run from a file, or the same scenarios on a release of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from kvcover.sim.errors import InputError, TierError, nearest, short
from kvcover.sim.releases.records import ALIASES, RELEASES
from kvcover.sim.results.result import Result
from kvcover.sim.scenario.scenario import Scenario
from kvcover.sim.tiers import Tier

PLACE = "--baseline"


def baseline_release(text: str) -> str | None:
    """The release that `--baseline` names; None if it names a file. Raises InputError if it is neither."""
    if text in RELEASES or text in ALIASES:
        return text
    try:
        there = Path(text).exists() if text else False
    except (OSError, ValueError):
        there = False
    if not there:
        raise InputError(PLACE, f"{short(text)} is no release and no file", nearest(text, RELEASES))
    return None


def as_baseline(scenario: Scenario, release: str) -> Scenario:
    """The same scenario on a stock release: both engines of it, no policy exchanged, nothing expected."""
    return replace(scenario, release=release, decode_release=None, overrides={}, expect=None)


def run_beside(
    tier: Tier, scenarios: Sequence[Scenario], vllm: str | None, stock: Sequence[Scenario]
) -> tuple[list[Result | TierError], list[Result | TierError]]:
    """Results of some scenarios, and of those of a baseline, all in one go.

    What the machine can't run takes the place of its result; what can't be run here at all is raised before anything starts.
    """
    found = tier.many([*scenarios, *stock], [vllm] * len(scenarios) + [None] * len(stock), keep_errors=True)
    return found[: len(scenarios)], found[len(scenarios) :]
