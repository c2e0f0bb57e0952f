"""Whether a release repairs what another breaks: one scenario on both, the signature that must be seen before, a verdict."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvcover.real_backend.evidence.expected import Expected, by_model, by_report, given
from kvcover.real_backend.evidence.reading import consistent, files_of
from kvcover.real_backend.machine.environment import environment
from kvcover.real_backend.machine.trees import Tree, choose
from kvcover.sim.errors import InputError, short
from kvcover.sim.releases.records import ALIASES, RELEASES
from kvcover.sim.results.result import GOOD, OUTCOMES, Result, caught, raced
from kvcover.sim.results.verdict import judge_run
from kvcover.sim.scenario.routers import get_router
from kvcover.sim.scenario.scenario import Scenario, build
from kvcover.sim.tiers import Tier, load_tier

CONFIRMED, NOT_CONFIRMED, INCONCLUSIVE = "CONFIRMED", "NOT CONFIRMED", "INCONCLUSIVE"
_RAISED, _MOST_RAISED = ("raised", "caught and logged"), 2
PREDICTED, NOT_PREDICTED = "PREDICTED", "NOT PREDICTED"
EXIT_CODES = {CONFIRMED: 0, PREDICTED: 0, NOT_CONFIRMED: 1, NOT_PREDICTED: 1, INCONCLUSIVE: 3}


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The verdict, why, what was expected before, and both results. `sha256` is of the scenario without its releases."""

    verdict: str
    reason: str
    expected: str
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
            "expected_before": self.expected,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "tier": self.before.tier,
            "mori": (self.before.backend or {}).get("mori"),
            "scenario": self.scenario,
            "scenario_sha256": self.sha256,
            "environment": environment(),
            "before": _side(self.before),
            "after": _side(self.after),
        }


def _side(result: Result) -> dict[str, Any]:
    backend = result.backend or {}
    return {
        "release": result.release,
        "vllm": {name: backend.get(f"{name}_vllm") for name in ("prefill", "decode")} if backend else None,
        "log_tail": backend.get("log_tail", []),
        "result": result.to_dict(),
    }


@dataclass(frozen=True, slots=True)
class Planned:
    """One scenario to be run on two vLLMs; `vllms` are what `--vllm` would be given, None for a release by name."""

    tier: Tier
    scenarios: tuple[Scenario, Scenario]
    vllms: tuple[str | None, str | None]

    def check(self) -> None:
        """Raise TierError or InputError for what can't be run here, or is the same code twice. Runs nothing."""
        files = []
        for scenario, vllm in zip(self.scenarios, self.vllms, strict=True):
            self.tier.check(scenario, vllm)
            if self.tier.can.takes_vllm:
                trees = trees_of(self.tier, scenario, vllm)
                files.append([tree.files for tree in trees])
        if files and files[0] == files[1]:
            raise InputError("--after", f"{trees[0].label} is the connector that --before is", "give two that differ")

    def run(self) -> list[Result]:
        """Both results, before and after."""
        return self.tier.many(self.scenarios, self.vllms)


def plan(data: Mapping[str, Any], before: str, after: str, tier: str) -> Planned:
    """Plan to run a scenario before and after. Raises InputError for input that can't be judged."""
    if before == after:
        raise InputError("--after", f"{after!r} is what --before is", "name two releases or trees")
    if "expect" in data:
        raise InputError("expect", "a confirmation expects bad before and good after", "leave it out, or use --expect-before")
    pinned = dict(data)
    if str(pinned.get("router", "toy-proxy")) == "toy-proxy":  # the same router for both, whatever came with each
        first = next((name for name in (before, after) if _known(name)), None)
        pinned["router"] = get_router("toy-proxy", first or build({}).release).name
    chosen = load_tier(tier)
    scenarios = [_scenario(pinned, option, text, chosen) for option, text in (("--before", before), ("--after", after))]
    vllms = [None if _known(text) else text for text in (before, after)]
    return Planned(chosen, (scenarios[0], scenarios[1]), (vllms[0], vllms[1]))


def trees_of(tier: Tier, scenario: Scenario, vllm: str | None) -> tuple[Tree, Tree]:
    """The vLLMs that a real tier runs a scenario on; the hardware tier has the installed one unless another is given."""
    return choose(vllm or ("installed" if tier.can.hardware else None), scenario.release, scenario.decode_release)


def _known(text: str) -> bool:
    return text in RELEASES or text in ALIASES


def _scenario(data: Mapping[str, Any], option: str, text: str, tier: Tier) -> Scenario:
    if _known(text):
        return build({**data, "release": text})
    if not tier.can.takes_vllm:
        raise InputError(option, f"the {tier.name} tier has no release {text!r}", "see `kvcover releases`")
    return build(data)


def read_pair(before: str, after: str) -> list[Result]:
    """Two results of one scenario, made one after the other, perhaps in two containers.

    Raises InputError for a file that contradicts itself, and for two that can't be compared.
    """
    if os.path.realpath(before) == os.path.realpath(after):
        raise InputError(after, "is the file that is before, too", "give two results")
    results = [consistent(before), consistent(after)]
    first, second = results
    place = f"{before} and {after}"
    if first.tier != second.tier:
        raise InputError(place, f"are of the {first.tier} and the {second.tier} tier", "run both on one tier")
    if first.router != second.router:
        hint = f"run both with --router '{first.router}'"
        raise InputError(place, f"have the routers {first.router} and {second.router}, so that two things differ", hint)
    scenarios = [_bare(result) for result in results]
    for field in sorted({*scenarios[0], *scenarios[1]}):
        if scenarios[0].get(field) != scenarios[1].get(field):
            values = " and ".join(short(scenario.get(field, "the default")) for scenario in scenarios)
            raise InputError(place, f"are of two scenarios: {field} is {values}", "run one scenario on both")
    devices = [str((result.backend or {}).get("device", "cpu")) for result in results]
    if devices[0] != devices[1]:
        raise InputError(place, f"had their caches in memory of {devices[0]} and of {devices[1]}", "run both on one kind")
    transports = [str((result.backend or {}).get("mori")).partition(" over ")[2] for result in results]
    if transports[0] != transports[1]:
        raise InputError(place, f"moved bytes by {transports[0]} and by {transports[1]}", "run both over one transport")
    return results


def _bare(result: Result) -> dict[str, Any]:
    """The scenario without what two results may differ in: the releases, and a router that is resolved elsewhere."""
    bare: dict[str, Any] = msgspec.to_builtins(build(result.scenario or {}))
    for name in ("release", "decode_release", "expect"):
        bare.pop(name, None)
    return bare | {"router": result.router}


def expect(before: Result, report: str | None, text: str | None) -> Expected | None:
    """What before must show: what was given, else what a report says, else the model's signature of that release.

    On the model tier nothing is expected unless somebody says it: what is seen is what the model says.
    """
    if text is not None:
        return given(text)
    if report is not None:
        scenario = before.scenario or {}
        release = str(scenario.get("release", build({}).release))
        return by_report(report, release, str(scenario.get("decode_release", release)))
    return None if before.tier == "model" else by_model(before)


def conclude(before: Result, after: Result, expected: Expected | None) -> Confirmation:
    """The verdict on two results of one scenario. Raises InputError if both are of the same code."""
    _refuse_one_code(before, after)
    verdict, reason = judge(before, after, expected)
    if before.tier == "model":
        verdict = {CONFIRMED: PREDICTED, NOT_CONFIRMED: NOT_PREDICTED}.get(verdict, verdict)
        reason = f"the model predicts: {reason}" if verdict != INCONCLUSIVE else reason
    moris = [str((result.backend or {}).get("mori")) for result in (before, after)]
    if moris[0] != moris[1]:
        reason += f"; mori.io differs too: {moris[0]} before, {moris[1]} after"
    bare = _bare(before)
    digest = hashlib.sha256(json.dumps(bare, sort_keys=True).encode()).hexdigest()
    return Confirmation(verdict, reason, expected.source if expected else "", before, after, bare, digest)


def _refuse_one_code(before: Result, after: Result) -> None:
    if before.tier == "model":
        codes = [[ALIASES.get(name, name) for name in (each.release, each.decode_release)] for each in (before, after)]
    else:
        codes = [files_of(each) for each in (before, after)]
    if codes[0] == codes[1]:
        text = f"{before.release} and {after.release} are the same connector, so that nothing is repaired"
        raise InputError("before and after", text, "give two that differ")


def judge(before: Result, after: Result, expected: Expected | None) -> tuple[str, str]:
    """The verdict and its reason: before shows what was expected and is bad, after passes.

    Code or a machine that is broken is neither: it says nothing of the protocol.
    """
    for when, result in (("before", before), ("after", after)):
        if why := _shows_nothing(result):
            return INCONCLUSIVE, f"{when} ({result.release}), {why}"
    was, now = judge_run(before), judge_run(after)
    if now.status == "inconclusive":
        return INCONCLUSIVE, f"after ({after.release}), {now.text}"
    if expected is not None and (difference := expected.unlike(before)):
        return INCONCLUSIVE, f"before ({before.release}), {difference}"
    if was.status != "fail":
        swapped = "; are the two swapped?" if now.status == "fail" else ""
        return NOT_CONFIRMED, f"{_said(before)} already before: there is nothing to repair in this scenario{swapped}"
    if not now.passed:
        found = after.findings[0].text if after.findings and after.outcome not in GOOD else now.text
        return NOT_CONFIRMED, f"{_said(after)} still after ({found})"
    raised = "".join(f"; before, {line}" for line in caught(before, _RAISED)[:_MOST_RAISED])
    return CONFIRMED, f"{_said(before)} before{f', as {expected.source} says' if expected else ''}, {_said(after)} after{raised}"


def _shows_nothing(result: Result) -> str:
    """Why a result says nothing of the connector; empty if it says something."""
    if broken := next((finding for finding in result.findings if finding.kind == "broken"), None):
        return f"{broken.text}, which is {', '.join(broken.causes)}"
    if unfired := [fault.fault for fault in result.faults if not fault.fired]:
        return f"{', '.join(unfired)} never fired, so the run proves nothing"
    if result.outcome not in OUTCOMES:
        return f"the outcome is {result.outcome!r}"
    if stalled := next((each for each in result.findings if each.kind == "stalled" and "never came up" in each.text), None):
        return stalled.text
    backend = result.backend or {}
    if backend.get("launcher") == "torchrun" and not str(backend.get("self_test", "")).startswith("passed"):
        return "its session was not tested with a good case and with a wrong byte"
    return ""


def _said(result: Result) -> str:
    release = result.release if result.release == result.decode_release else f"{result.release} → {result.decode_release}"
    race = " by luck (a race)" if result.outcome in GOOD and raced(result.checks) else ""
    return f"{release} is {result.outcome}{race} with coverage {result.coverage:.4g}"
