"""Exploration on a real tier: the same drafts, run there and on the model, so that each says when the other is wrong.

A real run has real time in it, so no digest can cover what it found; what was drawn, and what the model says of it, is the
same in every run.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kvcover.sim.errors import InputError, NotBegun, TierError
from kvcover.sim.releases.records import RELEASES
from kvcover.sim.results.agreement import differences, view
from kvcover.sim.results.result import Result
from kvcover.sim.scenario.scenario import Scenario, Timing, build
from kvcover.sim.search.baseline import as_baseline
from kvcover.sim.search.example import example_text, file_text
from kvcover.sim.search.explore import BUDGET, INTERRUPTED, Keep, SeedJob, Work, clean, judged, signature_of
from kvcover.sim.search.failures import Exploration, FailureGroup, Signature, Tallied, group_of, run_digest
from kvcover.sim.search.shrink import Draft
from kvcover.sim.search.swarm import pin
from kvcover.sim.simulate import replay_line, run
from kvcover.sim.tiers import Pace, Tier

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

    at: int
    name: str
    draft: Draft
    scenario: Scenario
    real: Result | None = None
    differ: dict[str, list[Any]] = {}
    varied: int = 0


class TierExploration:
    """Drafts on a real tier, batch by batch, none of which begins after the budget.

    What the tier can't run is in `skipped`, by reason. A run that differs from the model is run again, as a busy machine can
    look like a timeout: it is a failure of outcome `differs` if it differs each time, else counted in `varied`. What is bad is
    run on the `baseline` too, if there is one, and is a failure only if it is worse than there. `keep` is given each run as it
    is settled; one that an end came in the middle of is in `unsettled`, and is kept by nobody.
    """

    def __init__(
        self,
        tier: Tier,
        vllm: str | None = None,
        *,
        budget_s: float = math.inf,
        baseline: str = "",
        summary: Exploration | None = None,
        keep: Keep = lambda report: None,
        tick: Callable[[Exploration], None] = lambda summary: None,
    ) -> None:
        self.tier, self.vllm, self.baseline = tier, vllm, baseline
        self.summary = Exploration() if summary is None else summary
        self._keep, self._tick = keep, tick
        self._started = time.monotonic()
        self._until = self._started + budget_s
        self._open: list[_Run] = []

    def run(self, drafts: Iterable[tuple[str, Callable[[], Draft]]]) -> Exploration:
        """Run all drafts that the summary does not have yet, by their position."""
        known = set(self.summary.digests)
        source = (each for each in enumerate(drafts) if each[0] not in known)
        try:
            while batch := list(itertools.islice(source, BATCH)):
                if self._over():
                    break
                self._batch(batch)
        except KeyboardInterrupt:
            self.summary.ended = INTERRUPTED
        self.summary.unsettled = len(self._open)
        return self.summary

    def _over(self) -> bool:
        if time.monotonic() >= self._until:
            self.summary.ended = BUDGET
        return self.summary.stopped

    def _batch(self, batch: Sequence[tuple[int, tuple[str, Callable[[], Draft]]]]) -> None:
        runs = [each for at, (name, make) in batch if (each := self._runnable(at, name, make)) is not None]
        self._open = list(runs)
        self._go(runs, self._first)
        for _ in range(_MORE_RUNS):
            self._go([each for each in self._open if each.differ], self._again)
        for each in [each for each in self._open if each.differ and not self._over()]:
            self._judge(each)
        self._beside([each for each in self._open if each.real is not None and (not each.differ or not self._over())])

    def _runnable(self, at: int, name: str, make: Callable[[], Draft]) -> _Run | None:
        try:
            draft = make()
            scenario = build(draft)
            self.tier.check(scenario, self.vllm)
        except TierError as error:
            self._skip(at, error)
        except InputError as error:
            self._settle(Tallied(at=at, invalid=f"{name}: {error}"), "invalid", run_digest("invalid", name))
        else:
            return _Run(at, name, draft, scenario)
        return None

    def _skip(self, at: int, error: TierError, lost: int = 0) -> None:
        """Count a draft that was not run; reasons that differ in numbers only are one."""
        reason = f"{error.place}: {error.problem}"
        if error.place != "--vllm":  # a name that the user gave, the same for all drafts
            reason = _NUMBERS.sub("N", reason)
        self._settle(Tallied(at=at, skipped={reason: 1}, lost=lost), "skipped", run_digest("skipped", reason))

    def _go(self, runs: list[_Run], take: Callable[[_Run, Result | TierError], None]) -> None:
        """Run them once more, as far as they begin in time; `take` is given each result as it comes."""
        if not runs or self._over():
            return
        pace = Pace(self._until, lambda position, result: take(runs[position], result))
        self.tier.many([each.scenario for each in runs], [self.vllm] * len(runs), keep_errors=True, pace=pace)

    def _first(self, each: _Run, result: Result | TierError) -> None:
        if isinstance(result, NotBegun):
            self.summary.ended = BUDGET
            self._open.remove(each)
        elif isinstance(result, TierError):
            self._open.remove(each)
            self._skip(each.at, result, lost=1)
        else:
            each.real, each.differ = result, against_model(result)
            if not each.differ:
                self._judge(each)

    def _again(self, each: _Run, result: Result | TierError) -> None:
        """Believe the run that agrees."""
        if isinstance(result, Result) and not against_model(result):
            each.real, each.differ, each.varied = result, {}, 1
            self._judge(each)

    def _judge(self, each: _Run) -> None:
        """Settle a run unless a baseline must be asked first."""
        assert each.real is not None
        if not self.baseline or (not each.differ and clean(each.scenario, each.real)):
            self._tell(each, None)

    def _beside(self, runs: list[_Run]) -> None:
        """Ask the baseline of what is bad, and settle it."""
        if not runs or not self.baseline or self._over():
            return
        stock = [as_baseline(each.scenario, self.baseline) for each in runs]

        def take(position: int, before: Result | TierError) -> None:
            if not isinstance(before, NotBegun):
                self._tell(runs[position], before if isinstance(before, Result) else None)

        self.tier.many(stock, [None] * len(stock), keep_errors=True, pace=Pace(self._until, take))

    def _tell(self, each: _Run, before: Result | None) -> None:
        """Count a run, and group it if it is a failure. The digest is of what is the same in every exploration."""
        real, report = each.real, Tallied(at=each.at, varied=each.varied)
        assert real is not None
        verdict, known = judged(each.scenario, real, before)
        as_bad = before is not None and verdict.status != "fail"  # also where it differs from the model
        failed = verdict.status == "fail" or (bool(each.differ) and not as_bad)
        report.known = int(known or (bool(each.differ) and as_bad))
        report.passed = int(verdict.passed and not each.differ)
        if failed:
            signature = _difference(real, each.differ) if each.differ else signature_of(real)
            report.groups = [group_of(signature, each.name, {**each.draft, "expect": _expect(real)})]
        digest = run_digest(each.name, msgspec.json.encode(each.draft), run(each.scenario).digest)
        self._open.remove(each)
        self._settle(report, DIFFERS if each.differ else real.outcome, digest)

    def _settle(self, report: Tallied, outcome: str, digest: bytes) -> None:
        report.count(outcome)
        report.digests = digest
        self._keep(report)
        self.summary.count(report)
        self.summary.seconds = time.monotonic() - self._started
        self._tick(self.summary)


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
