"""Many scenarios that differ in their TP sizes."""

from __future__ import annotations

from typing import Any

from kvcover.sim.results.result import Result
from kvcover.sim.scenario.scenario import build
from kvcover.sim.tiers import load_tier


def run_matrix(data: dict[str, Any], modes: list[str], pairs: list[tuple[int, int]], tier: str, vllm: str | None) -> list[Result]:
    """One result a (mode, prefill TP, decode TP), in that order. All scenarios are checked before the first runs."""
    scenarios = []
    for mode in modes:
        for prefill, decode in pairs:
            sides = {"prefill": {**data.get("prefill", {}), "tp": prefill}, "decode": {**data.get("decode", {}), "tp": decode}}
            scenarios.append(build({**data, "mode": mode, **sides}))
    return load_tier(tier).many(scenarios, [vllm] * len(scenarios))
