"""Whether a release repairs what another breaks: one scenario on both, a verdict, and the evidence for it."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvcover.real_backend.machine.environment import environment
from kvcover.sim.errors import InputError
from kvcover.sim.releases.records import ALIASES, RELEASES
from kvcover.sim.results.result import GOOD, MEANING, Result
from kvcover.sim.results.verdict import judge_run
from kvcover.sim.scenario.routers import get_router
from kvcover.sim.scenario.scenario import Scenario, build
from kvcover.sim.tiers import Tier, load_tier

CONFIRMED, NOT_CONFIRMED, INCONCLUSIVE = "CONFIRMED", "NOT CONFIRMED", "INCONCLUSIVE"


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The verdict, why, and both results. `sha256` is of the scenario without its releases."""

    verdict: str
    reason: str
    before: Result
    after: Result
    scenario: dict[str, Any]
    sha256: str

    def evidence(self) -> dict[str, Any]:
        """Everything that someone else needs to judge or to repeat it."""
        return {
            "schema": 1,
            "kind": "confirmation",
            "verdict": self.verdict,
            "reason": self.reason,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "tier": self.before.tier,
            "mori": self._backend(self.before).get("mori"),
            "scenario": self.scenario,
            "scenario_sha256": self.sha256,
            "environment": environment(),
            "before": self._side(self.before),
            "after": self._side(self.after),
        }

    def _side(self, result: Result) -> dict[str, Any]:
        backend = self._backend(result)
        return {
            "release": result.release,
            "vllm": {name: backend.get(f"{name}_vllm") for name in ("prefill", "decode")} if backend else None,
            "log_tail": backend.get("log_tail", []),
            "result": result.to_dict(),
        }

    @staticmethod
    def _backend(result: Result) -> dict[str, Any]:
        found: dict[str, Any] = getattr(result, "backend", None) or {}
        return found


def confirm(data: Mapping[str, Any], before: str, after: str, tier: str) -> Confirmation:
    """Run the scenario before and after. Raises InputError for input that can't be judged."""
    if before == after:
        raise InputError("--after", f"{after!r} is what --before is", "name two releases or trees")
    if "expect" in data:
        raise InputError("expect", "a confirmation expects bad before and good after", "leave it out")
    pinned = dict(data)
    if str(pinned.get("router", "toy-proxy")) == "toy-proxy":  # the same router for both, whatever came with each
        first = next((name for name in (before, after) if _known(name)), None)
        pinned["router"] = get_router("toy-proxy", first or build({}).release).name
    chosen = load_tier(tier)
    scenarios = [_scenario(pinned, option, text, chosen) for option, text in (("--before", before), ("--after", after))]
    results = chosen.many(scenarios, [None if _known(text) else text for text in (before, after)])
    verdict, reason = judge(*results)
    bare = msgspec.to_builtins(scenarios[0])
    for name in ("release", "decode_release"):
        bare.pop(name, None)
    digest = hashlib.sha256(json.dumps(bare, sort_keys=True).encode()).hexdigest()
    return Confirmation(verdict, reason, results[0], results[1], bare, digest)


def _known(text: str) -> bool:
    return text in RELEASES or text in ALIASES


def _scenario(data: Mapping[str, Any], option: str, text: str, tier: Tier) -> Scenario:
    if _known(text):
        return build({**data, "release": text})
    if not tier.can.takes_vllm:
        raise InputError(option, f"the {tier.name} tier has no release {text!r}", "see `kvcover releases`")
    return build(data)


def judge(before: Result, after: Result) -> tuple[str, str]:
    """The verdict and its reason: bad before, good after, and every planned fault fired in both.

    Code or a machine that is broken is neither: it says nothing of the protocol.
    """
    for when, result in (("before", before), ("after", after)):
        if broken := next((finding for finding in result.findings if finding.kind == "broken"), None):
            return INCONCLUSIVE, f"{when} ({result.release}), {broken.text}, which is {', '.join(broken.causes)}"
        if result.outcome == "vacuous":
            unfired = ", ".join(fault.fault for fault in result.faults if not fault.fired)
            return INCONCLUSIVE, f"{when} ({result.release}), {unfired} never fired, so the run proves nothing"
        if result.outcome not in MEANING:
            return INCONCLUSIVE, f"{when} ({result.release}), the outcome is {result.outcome!r}"
        if any(finding.kind == "stalled" and "never came up" in finding.text for finding in result.findings):
            return INCONCLUSIVE, f"{when} ({result.release}), {result.findings[0].text}"
    was, now = judge_run(before), judge_run(after)
    if now.status == "inconclusive":
        return INCONCLUSIVE, f"after ({after.release}), {now.text}"
    if was.status != "fail":
        return NOT_CONFIRMED, f"{_said(before)} already before: there is nothing to repair in this scenario"
    if not now.passed:
        why = after.findings[0].text if after.findings else now.text
        return NOT_CONFIRMED, f"{_said(after)} still after ({why})"
    but = f" ({was.text})" if before.outcome in GOOD else ""
    return CONFIRMED, f"{_said(before)} before{but}, {_said(after)} after"


def _said(result: Result) -> str:
    return f"{result.release} is {result.outcome} with coverage {result.coverage:.4g}"
