"""Many scenarios that differ in their TP sizes."""

from __future__ import annotations

from typing import Any

from kvcover.sim.results.result import Result
from kvcover.sim.results.show import progress
from kvcover.sim.scenario.scenario import build
from kvcover.sim.scenario.setup import resolve
from kvcover.sim.tiers import load_tier


def run_matrix(data: dict[str, Any], modes: list[str], pairs: list[tuple[int, int]], tier: str, vllm: str | None) -> list[Result]:
    """One result a (mode, prefill TP, decode TP), in that order. All scenarios are checked before the first runs."""
    scenarios = []
    for mode in modes:
        for prefill, decode in pairs:
            scenario = build(
                {
                    **data,
                    "mode": mode,
                    "prefill": {**data.get("prefill", {}), "tp": prefill},
                    "decode": {**data.get("decode", {}), "tp": decode},
                }
            )
            resolve(scenario)
            scenarios.append(scenario)
    run = load_tier(tier)
    if hasattr(run, "many"):
        results: list[Result] = run.many(scenarios, vllm=vllm)
        return results
    return [run(scenario, vllm=vllm) for scenario in progress(scenarios, "pairings")]
