"""Exploration on a real tier: the same drafts, run there and on the model, so that each says when the other is wrong.

A real run has real time in it, so no digest can cover what it found; what was drawn, and what the model says of it, is the
same in every run.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kvcover.sim.errors import InputError, TierError
from kvcover.sim.releases.records import RELEASES
from kvcover.sim.results.agreement import differences, view
from kvcover.sim.results.result import Result
from kvcover.sim.scenario.scenario import Scenario, Timing, build
from kvcover.sim.search.example import example_text, file_text
from kvcover.sim.search.explore import Exploration, FailureGroup, SeedJob, Signature, Work, good, group_of, signature_of
from kvcover.sim.search.shrink import Draft
from kvcover.sim.search.swarm import pin
from kvcover.sim.simulate import replay_line, run
from kvcover.sim.tiers import Tier

DIFFERS = "differs"
BATCH = 40
_MORE_RUNS = 2
_ORDERS = range(3)  # seeds that decide which of several things of one instant comes first
_NUMBERS = re.compile(r"\d+")


def pinned(tier: Tier, pins: Mapping[str, Any], vllm: str | None) -> dict[str, Any]:
    """What the tier pins, with `pins` over it; the release is the one that `--vllm` names."""
    own = copy.deepcopy(dict(tier.can.pins))
    pin(own, pins)
    names = (vllm or "").split(",")
    for field, name in zip(("release", "decode_release"), (names[0], names[-1]), strict=True):
        if (name in RELEASES and names[0] != name) or (field == "release" and name in RELEASES):
            own.setdefault(field, name)
    return own


def drafts_of(tier: Tier, jobs: Iterable[Work]) -> Iterator[tuple[str, Callable[[], Draft]]]:
    """All drafts of all jobs, by name; what seeds draw is made to fit, what a person wrote is not."""
    for job in jobs:
        yield from job.drafts(tier.fit) if isinstance(job, SeedJob) else job.drafts()


class _Run(msgspec.Struct):
    """One draft on its way: `differ` is empty once some real run has said what the model says."""

    name: str
    draft: Draft
    scenario: Scenario
    real: Result | None = None
    differ: dict[str, list[Any]] = {}


def explore_tier(
    tier: Tier,
    drafts: Iterable[tuple[str, Callable[[], Draft]]],
    vllm: str | None = None,
    budget_s: float = math.inf,
    tick: Callable[[Exploration], None] = lambda summary: None,
) -> Exploration:
    """Run drafts in batches, or those batches that begin within the budget.

    What the tier can't run is in `skipped`, by reason. A run that differs from the model is run again, as a busy machine can
    look like a timeout: it is a failure of outcome `differs` if it differs each time, else counted in `varied`.
    """
    started, digest, summary = time.perf_counter(), hashlib.blake2b(digest_size=16), Exploration()
    source = iter(drafts)
    while batch := list(itertools.islice(source, BATCH)):
        if time.perf_counter() > started + budget_s:
            summary.stopped = True
            break
        runs = list(_runnable(tier, batch, vllm, summary))
        _attempt(tier, runs, vllm, summary)
        for _ in range(_MORE_RUNS):
            _repeat(tier, [each for each in runs if each.differ], vllm, summary)
        for each in runs:
            digest.update(_tell(each, summary))
        summary.seconds = time.perf_counter() - started
        tick(summary)
    summary.digest = digest.hexdigest()
    return summary


def _runnable(
    tier: Tier, batch: Sequence[tuple[str, Callable[[], Draft]]], vllm: str | None, summary: Exploration
) -> Iterator[_Run]:
    for name, make in batch:
        summary.runs += 1
        try:
            draft = make()
            scenario = build(draft)
            tier.check(scenario, vllm)
        except TierError as error:
            _skip(summary, error)
        except InputError as error:
            summary.outcomes["invalid"] = summary.outcomes.get("invalid", 0) + 1
            summary.invalid = summary.invalid or f"{name}: {error}"
        else:
            yield _Run(name, draft, scenario)


def _skip(summary: Exploration, error: TierError) -> None:
    """Count a draft that was not run; reasons that differ in numbers only are one."""
    reason = f"{error.place}: {error.problem}"
    if error.place != "--vllm":  # a name that the user gave, the same for all drafts
        reason = _NUMBERS.sub("N", reason)
    summary.outcomes["skipped"] = summary.outcomes.get("skipped", 0) + 1
    summary.skipped[reason] = summary.skipped.get(reason, 0) + 1


def _run_all(tier: Tier, runs: list[_Run], vllm: str | None) -> list[Result | TierError]:
    return tier.many([each.scenario for each in runs], [vllm] * len(runs), keep_errors=True)


def _attempt(tier: Tier, runs: list[_Run], vllm: str | None, summary: Exploration) -> None:
    if not runs:
        return
    for each, result in zip(runs, _run_all(tier, runs, vllm), strict=True):
        if isinstance(result, TierError):
            _skip(summary, result)
            continue
        each.real = result
        each.differ = against_model(result)


def _repeat(tier: Tier, runs: list[_Run], vllm: str | None, summary: Exploration) -> None:
    """Run again what differs, and believe the run that agrees."""
    if not runs:
        return
    for each, result in zip(runs, _run_all(tier, runs, vllm), strict=True):
        if isinstance(result, Result) and not against_model(result):
            each.real, each.differ = result, {}
            summary.varied += 1


def against_model(real: Result) -> dict[str, list[Any]]:
    """[model, real] for each field in which the model says something else of what was really run, however it plays it."""
    race: Mapping[str, Any] = (real.backend or {}).get("race") or {}
    assert real.scenario is not None
    found: dict[str, list[Any]] = {}
    for model in plays(build(real.scenario)):
        differ = differences(view(model), view(real), tuple(race.get("omit", ())), tuple(race.get("instead", ())))
        if not differ:
            return {}
        found = found or differ
    return found


def plays(scenario: Scenario) -> Iterator[Result]:
    """What the model may say of a scenario that is really run.

    A handshake and the layers of a forward race, and so do requests that come at once; a real tier says nothing of how fast
    they are or which comes first. So the model may be right with handshakes as long as a layer, or with some that take no
    time, and with one of a few orders.
    """
    for timing, seed in itertools.product((scenario.timing, Timing(handshake_ns=0)), (scenario.seed, *_ORDERS)):
        yield run(msgspec.structs.replace(scenario, timing=timing, seed=seed))


def _tell(each: _Run, summary: Exploration) -> bytes:
    """Count a run and group it if it is a failure; what of it is the same in every exploration."""
    real = each.real
    if real is not None:
        outcome = DIFFERS if each.differ else real.outcome
        summary.outcomes[outcome] = summary.outcomes.get(outcome, 0) + 1
        if each.differ:
            summary.add(group_of(_difference(real, each.differ), each.name, {**each.draft, "expect": _expect(real)}))
        elif real.outcome != "vacuous" and not good(each.scenario, real):
            summary.add(group_of(signature_of(real), each.name, {**each.draft, "expect": _expect(real)}))
    return msgspec.json.encode([each.name, each.draft, run(each.scenario).digest])


def _expect(real: Result) -> dict[str, Any]:
    """What every real run of the scenario should say again."""
    race: Mapping[str, Any] = (real.backend or {}).get("race") or {}
    return {name: getattr(real, name) for name in ("outcome", "coverage") if name not in race.get("omit", ())}


def again(tier: Tier, group: FailureGroup, file: str | None, vllm: str | None) -> str:
    """The command that runs a failure again where it was found, and exits with 1 if something else comes of it."""
    if tier.can.virtual_time:
        return f"kvcover replay {file}" if file else replay_line(build(group.draft))
    line = shlex.join(["kvcover", "run", file]) if file else replay_line(build(group.draft))
    return f"{line} --tier {tier.name}" + (f" --vllm {shlex.quote(vllm)}" if vllm else "")


def failure_text(tier: Tier, group: FailureGroup, vllm: str | None) -> str:
    """A failure as a scenario file that expects what came of it."""
    if tier.can.virtual_time:
        return example_text(group)
    head = [
        f"# {group.name}: {group.signature.outcome}, {', '.join(group.signature.kinds)}; {group.count} runs alike",
        f"# seen on the {tier.name} tier: {again(tier, group, 'THIS-FILE', vllm)}",
    ]
    return file_text(head, group.draft)


def _difference(real: Result, differ: Mapping[str, list[Any]]) -> Signature:
    told = [f"{field}: model {model}, {real.tier} {found}" if field == "outcome" else field
            for field, (model, found) in differ.items()]  # fmt: skip
    return msgspec.structs.replace(signature_of(real), outcome=DIFFERS, kinds=tuple(told))
