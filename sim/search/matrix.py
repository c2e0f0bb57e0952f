"""Many scenarios that differ in their TP sizes."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from kvcover.sim.errors import InputError
from kvcover.sim.results.result import Result
from kvcover.sim.scenario.scenario import Scenario, checked
from kvcover.sim.tiers import load_tier

SIZES = (1, 2, 4, 8)


def matrix(
    scenario: Scenario,
    *,
    prefill: Sequence[int] = SIZES,
    decode: Sequence[int] = SIZES,
    modes: Sequence[str] = ("write", "read"),
    tier: str = "model",
    vllm: str | None = None,
) -> list[Result]:
    """One result a (mode, prefill TP, decode TP), in that order; these three of the scenario's fields are not read.

    Everything is checked before the first runs. Raises InputError for a pairing that makes no sense, and TierError for a tier
    that can't run here.

    >>> results = matrix(Scenario(release="0.27.0", model="deepseek-v3"), prefill=[4], decode=[4, 8], modes=["write"])
    >>> [(result.coverage, result.outcome) for result in results]
    [(1.0, 'ok'), (0.5, 'hang')]
    """
    scenarios = pairings(scenario, prefill, decode, modes)
    return load_tier(tier).many(scenarios, [vllm] * len(scenarios))


def pairings(scenario: Scenario, prefill: Sequence[int], decode: Sequence[int], modes: Sequence[str]) -> list[Scenario]:
    """The scenarios of a matrix, in the order of its results. Raises InputError for a scenario that makes no sense."""
    scenario = checked(scenario)
    if scenario.expect is not None:
        raise InputError("expect", "a matrix has no single expectation", "use --check")
    return [
        replace(scenario, mode=mode, prefill=replace(scenario.prefill, tp=p), decode=replace(scenario.decode, tp=d))
        for mode in modes
        for p in prefill
        for d in decode
    ]
