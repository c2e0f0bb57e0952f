"""Exploration: scenarios and fault plans drawn from seeds, or every single fault of a small scenario; failures in groups.

A seed switches on a random subset of FEATURES (a swarm: what is left out matters as much as what is in), and each of
them draws its options from a random stream of its own. What comes out is plain scenario data, so every failure is a
file that `kvcover replay` runs again. The work is cut in chunks, and one digest over all results does not depend on
where the cuts are, nor on who ran them.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import Any, NamedTuple

import msgspec

from kvcover.sim.errors import InputError, short
from kvcover.sim.results.regress import change
from kvcover.sim.results.result import GOOD, Result
from kvcover.sim.results.verdict import Verdict, fail, inconclusive, judge_run
from kvcover.sim.scenario.scenario import Scenario
from kvcover.sim.scenario.setup import resolve
from kvcover.sim.search.baseline import as_baseline
from kvcover.sim.search.failures import (
    Exploration,
    FailureGroup,
    Groups,
    Signature,
    Tallied,
    add_group,
    group_of,
    run_digest,
)
from kvcover.sim.search.grid import faults_of, side_of
from kvcover.sim.search.shrink import Draft, find_once, shrink
from kvcover.sim.search.swarm import Swarm, swarm_of
from kvcover.sim.simulate import run_world

CHUNK_SEEDS = 50


# -- running -----------------------------------------------------------------------------------------------------


class SeedJob(msgspec.Struct, frozen=True, kw_only=True, tag="seeds"):
    """Some seeds of a swarm. With a `baseline`, a failure is what that release does better."""

    swarm: Swarm
    first: int
    count: int
    baseline: str = ""

    @property
    def at(self) -> int:
        """Where in the exploration it stands: by its first seed."""
        return self.first

    def drafts(self, fit: Callable[[Draft], None] = lambda draft: None) -> Iterator[tuple[str, Callable[[], Draft]]]:
        """A name for each draft, and how to make it; a tier's `fit` rounds what is drawn."""
        for seed in range(self.first, self.first + self.count):
            yield f"seed {seed}", functools.partial(self.swarm.draft, seed, fit)


class GridJob(msgspec.Struct, frozen=True, kw_only=True, tag="grid"):
    """A scenario alone, and with each of its faults; `at` is its number, `baseline` as of SeedJob."""

    draft: dict[str, Any]
    name: str
    at: int = 0
    baseline: str = ""

    def drafts(self) -> Iterator[tuple[str, Callable[[], Draft]]]:
        """As SeedJob.drafts."""
        yield f"{self.name}, no fault", lambda: self.draft
        try:
            faults = faults_of(self.draft)
        except InputError:
            return  # said by the draft alone
        alone = {name: value for name, value in self.draft.items() if name != "expect"}  # that is of the scenario as it is
        planned = self.draft.get("faults", [])
        for fault in faults:
            yield f"{self.name}, {fault}", functools.partial(dict, alone, faults=[*planned, fault])


Work = SeedJob | GridJob


def signature_of(result: Result) -> Signature:
    """What a failure is told by."""
    kinds = sorted({finding.kind for finding in result.findings})
    if result.outcome in GOOD:
        kinds += [check.name for check in result.checks if check.verdict == "fail"]
    skew = "" if result.decode_release == result.release else " → other"
    return Signature(result.outcome, result.release + skew, result.mode, tuple(kinds))


class _Ran(NamedTuple):
    """What came of one draft: `signature` if that is a failure, `known` if it is none because the baseline is as bad."""

    outcome: str
    digest: str
    signature: Signature | None = None
    passed: bool = False
    known: bool = False


def _run_one(draft: Draft, baseline: str) -> _Ran:
    """Run one draft, and on the baseline's release what is not clean; raises InputError for one that makes no sense."""
    try:
        scenario = msgspec.convert(draft, Scenario, strict=True)
    except msgspec.ValidationError as error:
        raise InputError("draft", str(error)) from None
    try:
        result = run_world(resolve(scenario))[0]
        before = run_world(resolve(as_baseline(scenario, baseline)))[0] if baseline and not clean(scenario, result) else None
    except InputError:
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        kind = f"{type(error).__name__} at {where.name}"
        return _Ran("error", kind, Signature("error", scenario.release, scenario.mode, (kind,)))
    verdict, known = judged(scenario, result, before)
    signature = signature_of(result) if verdict.status == "fail" else None
    return _Ran(result.outcome, result.digest or "", signature, verdict.passed, known)


def clean(scenario: Scenario, result: Result) -> bool:
    """Whether nothing can be worse in a run than in a baseline's."""
    return result.outcome == "ok" and judge_run(result, scenario.expect).passed


def judged(scenario: Scenario, result: Result, before: Result | None) -> tuple[Verdict, bool]:
    """The verdict of a run, beside a baseline's if there is one; and whether it would fail if the baseline were not as bad.

    Beside a baseline, what is worse is a failure even if its outcome is good, as where it refuses what was done before.
    """
    verdict = judge_run(result, scenario.expect)
    if before is None or "vacuous" in (before.outcome, result.outcome):
        return verdict, False
    if worse := change(before, result).worse:
        return fail(*worse), False
    return (inconclusive("as bad as in the baseline"), True) if verdict.status == "fail" else (verdict, False)


def work(job: bytes) -> bytes:
    """Run a job in whatever process this is; both sides are msgpack, so that little travels."""
    planned: Work = msgspec.msgpack.decode(job, type=Work)
    report = Tallied(at=planned.at)
    groups: Groups = {}
    digests = []
    for name, make in planned.drafts():
        try:
            draft = make()
            ran = _run_one(draft, planned.baseline)
        except InputError as error:
            ran = _Ran("invalid", str(error))
            report.invalid = report.invalid or f"{name}: {error}"
        report.count(ran.outcome)
        report.passed += ran.passed
        report.known += ran.known
        digests.append(run_digest(ran.outcome, ran.signature, ran.digest))
        if ran.signature is not None:
            add_group(groups, group_of(ran.signature, name, draft))
    report.groups, report.digests = list(groups.values()), b"".join(digests)
    return msgspec.msgpack.encode(report)


def seed_jobs(swarm: Swarm, first: int, count: int, chunk: int = CHUNK_SEEDS, baseline: str = "") -> Iterator[SeedJob]:
    """All seeds, in chunks."""
    for start in range(first, first + count, chunk):
        yield SeedJob(swarm=swarm, first=start, count=min(chunk, first + count - start), baseline=baseline)


def grid_jobs(
    data: Mapping[str, Any], pairs: Iterable[tuple[int, int]], modes: Iterable[str], baseline: str = ""
) -> Iterator[GridJob]:
    """One job a mode and pairing of TP sizes."""
    for at, (mode, (prefill, decode)) in enumerate(itertools.product(modes, list(pairs))):
        draft = copy.deepcopy(dict(data)) | {"mode": mode}
        side_of(draft, "prefill")["tp"], side_of(draft, "decode")["tp"] = prefill, decode
        yield GridJob(draft=draft, name=f"{mode} P{prefill}→D{decode}", at=at, baseline=baseline)


Keep = Callable[[Tallied], None]


def run_jobs(
    jobs: Iterable[Work],
    executor: Executor | None = None,
    in_flight: int = 1,
    budget_s: float = math.inf,
    tick: Callable[[Exploration], None] = lambda summary: None,
    summary: Exploration | None = None,
    keep: Keep = lambda report: None,
) -> Exploration:
    """Run all jobs, or those that begin within the budget; the summary depends only on which jobs have run.

    `summary` holds what ran before, and `keep` is given each chunk as it ends. What ends it early, an interruption or a worker
    that was killed, is said in the summary, and what came before it is there.
    """
    started, summary = time.perf_counter(), Exploration() if summary is None else summary
    results = _results(jobs, executor, in_flight, started + budget_s, summary)
    try:
        for encoded in results:
            report = msgspec.msgpack.decode(encoded, type=Tallied)
            keep(report)
            summary.count(report)
            summary.seconds = time.perf_counter() - started
            tick(summary)
    except KeyboardInterrupt:
        summary.ended = INTERRUPTED
    except BrokenExecutor:
        summary.ended = KILLED
    finally:
        results.close()
    return summary


BUDGET, INTERRUPTED = "the budget ended", "it was interrupted"
KILLED = "a worker process died, as one that the system kills when memory runs out"


def _results(
    jobs: Iterable[Work], executor: Executor | None, in_flight: int, deadline: float, summary: Exploration
) -> Generator[bytes, None, None]:
    """What `work` makes of each job, in their order; with an executor, a few at a time are ahead."""
    waiting: deque[Future[bytes]] = deque()
    try:
        for job in jobs:
            if time.perf_counter() >= deadline:
                summary.ended = BUDGET
                break
            encoded = msgspec.msgpack.encode(job)
            if executor is None:
                yield work(encoded)
                continue
            waiting.append(executor.submit(work, encoded))
            if len(waiting) > in_flight:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def refuse_nonsense(summary: Exploration) -> None:
    """Raise InputError if there were runs, and none of them made sense."""
    if 0 < summary.runs == summary.outcomes.get("invalid", 0):
        raise InputError("explore", f"no scenario makes sense ({summary.invalid})", "pin less")


def explore(
    seeds: int = 1000,
    *,
    first: int = 0,
    pins: Mapping[str, Any] | None = None,
    features: Sequence[str] = (),
    full: bool = False,
    faults: bool = True,
    budget_s: float = math.inf,
    shrinks: bool = False,
    executor: Executor | None = None,
) -> Exploration:
    """Draw scenarios and faults from seeds, run each on the model, and group what failed: `ranked()` of what is returned.

    `pins` are fields that are as given, whatever a seed draws; `features` draws these only, `full` the rare ones as well, and
    without `faults` there are none. Nothing begins after `budget_s` seconds. `shrinks` reduces each group's example to the
    smallest that finds the same; `build` makes a scenario of it. An executor shares the work out, and changes no result.
    Raises InputError for pins and features that make no sense.

    >>> found = explore(20, pins={"release": "0.26.0", "mode": "write", "model": "layers=1,mla=8"}, features=["tp"])
    >>> worst = found.ranked()[0]
    >>> "wrong-peer" in worst.signature.kinds
    True
    >>> run(build(worst.draft)).outcome
    'corrupt'
    """
    for place, number, least, most in (("seeds", seeds, 1, 10**9), ("first", first, 0, 2**62)):
        if not (isinstance(number, int) and least <= number <= most):
            raise InputError(place, f"{short(number)} is wrong", f"use {least} to {most}")
    if not budget_s >= 0:
        raise InputError("budget_s", f"{short(budget_s)} is no number of seconds", "use a number such as 60")
    swarm = swarm_of(pins or {}, features, full, faults)
    summary = run_jobs(seed_jobs(swarm, first, seeds), executor, _AHEAD, budget_s)
    refuse_nonsense(summary)
    if shrinks:
        shrink_groups(summary, executor)
    return summary


_AHEAD = 64  # jobs that wait for an executor's workers, however many it has


# -- what is kept of a failure -----------------------------------------------------------------------------------


def shrink_groups(summary: Exploration, executor: Executor | None = None, baseline: str = "") -> None:
    """Shrink every example; groups whose examples are now of one signature and shape become one."""
    encoded = [msgspec.msgpack.encode(group) for group in summary.groups.values()]
    shrink_one = functools.partial(_shrink_one, baseline=baseline)
    small = [
        msgspec.msgpack.decode(each, type=FailureGroup) for each in (map if executor is None else executor.map)(shrink_one, encoded)
    ]
    summary.groups, summary.shrunk = {}, True
    for group in small:
        summary.add(group)


def _shrink_one(encoded: bytes, baseline: str) -> bytes:
    group = msgspec.msgpack.decode(encoded, type=FailureGroup)
    goal = find_once(group.draft)

    def still_worse(draft: Draft) -> bool:
        return find_once(draft) == goal and _run_one(draft, baseline).signature is not None

    draft = shrink(group.draft, still_worse if baseline else None)
    small = group_of(_run_one(draft, "").signature or group.signature, group.name, draft)
    small.count = group.count
    return msgspec.msgpack.encode(small)
